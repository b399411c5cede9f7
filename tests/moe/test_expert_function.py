"""The expert autograd function against one plain loop in fp64: every dtype, activation, padding, shape and stride."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moe import expert_loop
from moe.activations import Activation
from moe.deferred_gradients import DeferredGradients
from moe.expert_function import expert_mlp
from moe.expert_loop import Slots
from moe.expert_weights import ExpertWeights
from moe.gemm import gemm_dtype
from tests import reference
from tests.tolerances import assert_close

ROWS, HIDDEN, FFN, EXPERTS = 13, 9, 7, 5  # odd, and all different
ACTIVATIONS = {
    "swiglu": Activation(),
    "geglu": Activation(name="gelu"),
    "gelu": Activation(name="gelu", gated=False),
    "squared_relu": Activation(name="squared_relu", gated=False),
    "gpt_oss": Activation(name="quick_gelu", clamp=7.0, offset=1.0),
}


SLOT_BYTES = (3 * HIDDEN + 6 * FFN) * 8  # of scratch, gated and in fp64; half in narrower dtypes


@pytest.fixture(params=[24 << 20, 15 * SLOT_BYTES, 1], ids=["together", "some", "each"])
def _chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute all experts together, two or three, and each by itself."""
    monkeypatch.setitem(expert_loop.CHUNK_BYTES, "cpu", request.param)


in_chunks = pytest.mark.usefixtures("_chunk_bytes")


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Fill whatever torch allocates without writing it with NaN: a value that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Case:
    """Leaves of one call, in its dtype; names are those of reference.MoEWeights where they mean the same."""

    leaves: dict[str, Tensor]  # tokens [R, H], probs [M], fc1, fc2 and maybe fc1_bias, fc2_bias
    slots: Slots
    expert_ids: Tensor  # [M]
    routing_map: Tensor  # [R, E]
    grad: Tensor  # [R, H]
    activation: Activation


def random_map(num_rows: int = ROWS) -> Tensor:
    """Each row goes to some experts, expert 2 is idle and row 0 is read by nobody."""
    routing_map = torch.rand(num_rows, EXPERTS) < 0.5
    routing_map[:1], routing_map[:, 2] = False, False
    return routing_map


def make(
    activation: Activation,
    dtype: torch.dtype,
    routing_map: Tensor,
    biases: bool,
    num_padding: int = 3,
    scale: float = 1,
) -> Case:
    """Draw a case; each expert has num_padding padding slots anywhere among its slots, whose order is shuffled."""
    num_rows = routing_map.shape[0]
    segments = []
    for column in routing_map.T:
        ids = torch.cat([column.nonzero().flatten(), torch.full((num_padding,), -1)])
        segments.append(ids[torch.randperm(len(ids))])
    row_ids, counts = torch.cat(segments), tuple(len(ids) for ids in segments)
    weights = reference.random_weights(
        EXPERTS, HIDDEN, FFN, seed=1, gate_rows=activation.num_inputs, biases=biases
    ).tensors()
    names = [name for name in weights if name.startswith("fc")]
    probs = (torch.rand(len(row_ids), dtype=torch.float64) * 3).masked_fill(row_ids < 0, 0)
    leaves = {name: weights[name].detach().to(dtype) for name in names}
    leaves["tokens"] = (torch.randn(num_rows, HIDDEN, dtype=torch.float64) * scale).to(dtype)
    leaves["probs"] = probs if dtype == torch.float64 else probs.float()
    return Case(
        leaves={name: leaf.requires_grad_() for name, leaf in leaves.items()},
        slots=Slots(counts, row_ids, has_padding=num_padding > 0),
        expert_ids=torch.arange(EXPERTS).repeat_interleave(torch.tensor(counts)),
        routing_map=routing_map,
        grad=torch.randn(num_rows, HIDDEN, dtype=torch.float64).to(dtype),
        activation=activation,
    )


def run(case: Case) -> dict[str, Tensor]:
    """Return output and gradients of the code under test."""
    tokens, probs, *weights = (case.leaves.get(n) for n in ("tokens", "probs", "fc1", "fc2", "fc1_bias", "fc2_bias"))
    output = expert_mlp(tokens, probs, case.slots, case.activation, ExpertWeights(*weights))
    grads = torch.autograd.grad(output, list(case.leaves.values()), case.grad)
    for (name, tensor), grad in zip(case.leaves.items(), grads, strict=True):
        assert grad.dtype == tensor.dtype, name
    return {"output": output.detach(), **dict(zip(case.leaves, grads, strict=True))}


def expected(case: Case) -> dict[str, Tensor]:
    """The same by the reference in fp64, from the same rounded inputs."""
    leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in case.leaves.items()}
    real = case.slots.row_ids >= 0
    dense = torch.zeros(case.routing_map.shape, dtype=torch.float64)
    dense = dense.index_put((case.slots.row_ids[real], case.expert_ids[real]), leaves["probs"][real])
    activation = case.activation
    output = reference.experts(
        leaves["tokens"],
        dense,
        case.routing_map,
        leaves["fc1"],
        leaves["fc2"],
        partial(reference.activation, activation.name, clamp=activation.clamp, offset=activation.offset),
        leaves.get("fc1_bias"),
        leaves.get("fc2_bias"),
    )
    grads = torch.autograd.grad(output, list(leaves.values()), case.grad.double(), materialize_grads=True)
    return {"output": output.detach(), **dict(zip(leaves, grads, strict=True))}


def check(case: Case, results: dict[str, Tensor]) -> None:
    for name, values in expected(case).items():
        assert_close(results[name], values, case.leaves["tokens"].dtype, what=name)


@in_chunks
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("biases", [True, False], ids=["biases", "plain"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_equals_the_reference_with_padding_and_probs_of_any_sum(name: str, biases: bool, dtype: torch.dtype) -> None:
    case = make(ACTIVATIONS[name], dtype, random_map(), biases, scale=6 if name == "gpt_oss" else 1)
    results = run(case)
    check(case, results)
    for weight in (name for name in results if name.startswith("fc")):
        assert not results[weight][2].any(), f"{weight} of the idle expert"
    assert not results["output"][0].any()
    assert not results["probs"][case.slots.row_ids < 0].any()


@pytest.mark.parametrize("hostile", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_padding_slots_read_zeros_and_write_nowhere(dtype: torch.dtype, hostile: float) -> None:
    case = make(ACTIVATIONS["swiglu"], dtype, random_map(), biases=True)
    clean = run(case)
    tokens, grad = case.leaves["tokens"].detach().clone(), case.grad.clone()
    tokens[0], grad[0] = hostile, hostile  # row 0 is what a padding slot must not touch, even with a prob
    probs = case.leaves["probs"].detach().masked_fill(case.slots.row_ids < 0, 5.0)
    leaves = {**case.leaves, "tokens": tokens.requires_grad_(), "probs": probs.requires_grad_()}
    soiled = run(replace(case, leaves=leaves, grad=grad))
    for name in clean:
        assert torch.equal(clean[name], soiled[name]), name


def test_chunks_hold_neighbours_up_to_a_number_of_slots() -> None:
    chunks = list(expert_loop.make_chunks((3, 0, 4, 9, 1, 2, 5, 0), 7))
    assert [(chunk.slots.start, chunk.slots.stop, list(chunk.experts), chunk.counts) for chunk in chunks] == [
        (0, 7, [0, 1, 2], (3, 0, 4)),
        (7, 16, [3], (9,)),
        (16, 19, [4, 5], (1, 2)),
        (19, 24, [6, 7], (5, 0)),
    ]
    assert list(expert_loop.make_chunks((), 7)) == []
    assert [chunk.counts for chunk in expert_loop.make_chunks((1, 1, 0), 0)] == [(1,), (1,), (0,)]
    tiles = list(expert_loop.make_tiles((4, 0, 2), 2))
    assert [(tile.slots.start, list(tile.experts), tile.counts) for tile in tiles] == [
        (0, [0], (2,)),
        (2, [0], (2,)),
        (4, [2], (2,)),
    ]


MAPS = {
    "everything to one expert": lambda: torch.arange(EXPERTS).eq(3).expand(ROWS, EXPERTS),
    "one row": lambda: torch.ones(1, EXPERTS, dtype=torch.bool),
    "rows, no slots": lambda: torch.zeros(ROWS, EXPERTS, dtype=torch.bool),
    "no rows": lambda: torch.zeros(0, EXPERTS, dtype=torch.bool),
}


@in_chunks
@pytest.mark.parametrize("num_padding", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_extreme_maps(name: str, dtype: torch.dtype, num_padding: int) -> None:
    case = make(ACTIVATIONS["swiglu"], dtype, MAPS[name](), biases=True, num_padding=num_padding)
    check(case, run(case))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strides", ["rows", "columns"])
def test_strided_tokens_and_expanded_gradients(strides: str, dtype: torch.dtype) -> None:
    case = make(ACTIVATIONS["swiglu"], dtype, random_map(), biases=True)
    tokens = case.leaves["tokens"].detach()
    strided = tokens.T.contiguous().T if strides == "rows" else tokens.repeat_interleave(2, dim=1)[:, ::2]
    assert not strided.is_contiguous()
    grad = torch.ones((), dtype=dtype).expand(ROWS, HIDDEN)  # as y.sum().backward() makes it
    case = replace(case, leaves={**case.leaves, "tokens": strided.requires_grad_()}, grad=grad)
    check(case, run(case))


@pytest.mark.parametrize("weight", ["fc1", "fc2"])
def test_weights_of_any_strides(weight: str) -> None:
    case = make(ACTIVATIONS["swiglu"], torch.float64, random_map(), biases=True)
    strided = case.leaves[weight].detach().transpose(1, -1).contiguous().transpose(1, -1)  # channels_last does the like
    assert not strided.is_contiguous()
    case = replace(case, leaves={**case.leaves, weight: strided.requires_grad_()})
    check(case, run(case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_multiplying_in_fp32_is_at_least_as_close(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all activations together: a single small tensor may lose by the luck of its roundings."""
    errors = {dtype: 0.0, torch.float32: 0.0}
    for activation in ACTIVATIONS.values():
        case = make(activation, dtype, random_map(5 * ROWS), biases=True)
        exact = expected(case)
        for mode in errors:
            monkeypatch.setattr(expert_loop, "gemm_dtype", lambda dtype, device, mode=mode: mode)
            results = run(case)
            check(case, results)
            errors[mode] += sum(((results[n].double() - exact[n]).norm() / exact[n].norm()).item() for n in exact)
    assert 0 < errors[torch.float32] < errors[dtype]


def test_gemm_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    for dtype in (torch.float64, torch.float32):
        assert gemm_dtype(dtype, cpu) == gemm_dtype(dtype, cuda) == dtype
    for dtype in (torch.bfloat16, torch.float16):
        assert (gemm_dtype(dtype, cpu), gemm_dtype(dtype, cuda)) == (torch.float32, dtype)


@in_chunks
@pytest.mark.parametrize("num_rows", [0, ROWS])
@pytest.mark.parametrize("biases", [True, False])
def test_without_ids_and_probs_slot_i_is_row_i_with_weight_1(biases: bool, num_rows: int) -> None:
    counts = tuple((torch.arange(num_rows) % EXPERTS).bincount(minlength=EXPERTS).tolist())
    experts = torch.arange(EXPERTS).repeat_interleave(torch.tensor(counts))
    case = make(ACTIVATIONS["swiglu"], torch.float64, torch.eye(EXPERTS).bool()[experts], biases, num_padding=0)
    ordered = replace(case.slots, row_ids=torch.arange(num_rows))
    ones = torch.ones(num_rows, dtype=torch.float64, requires_grad=True)
    by_ids = run(replace(case, slots=ordered, leaves={**case.leaves, "probs": ones}))
    without = {name: leaf for name, leaf in case.leaves.items() if name != "probs"}
    plain = run(replace(case, slots=Slots(counts), leaves=without))
    check(replace(case, slots=ordered, leaves={**case.leaves, "probs": ones}), {**plain, "probs": by_ids["probs"]})


@pytest.mark.parametrize("frozen", ["fc1", "fc2"])
def test_a_frozen_weight_gets_no_gradient_and_changes_no_other(frozen: str) -> None:
    case = make(Activation(), torch.float64, random_map(), biases=False)
    want = run(case)
    weight = case.leaves.pop(frozen).requires_grad_(False)
    args = {**case.leaves, frozen: weight}
    output = expert_mlp(
        args["tokens"], args["probs"], case.slots, case.activation, ExpertWeights(args["fc1"], args["fc2"])
    )
    output.backward(case.grad)
    assert weight.grad is None
    for name, leaf in case.leaves.items():
        assert torch.equal(leaf.grad, want[name]), name


def deferred_gradients(case: Case, num_parts: int, needed: tuple[str, ...]) -> dict[str, Tensor]:
    """Cut every expert's slots into parts, run each with the same DeferredGradients, and return all gradients."""
    leaves = {
        name: leaf.detach().requires_grad_(name in (*needed, "tokens", "probs")) for name, leaf in case.leaves.items()
    }
    weights = ExpertWeights(*(leaves.get(name) for name in ("fc1", "fc2", "fc1_bias", "fc2_bias")))
    deferred = DeferredGradients(weights)
    by_expert = torch.arange(len(case.expert_ids)).split(case.slots.counts)
    output = torch.zeros_like(leaves["tokens"])
    for part in range(num_parts):
        pieces = [slots.tensor_split(num_parts)[part] for slots in by_expert]
        chosen, counts = torch.cat(pieces), tuple(len(piece) for piece in pieces)
        slots = Slots(counts, case.slots.row_ids[chosen], case.slots.has_padding)
        output = output + expert_mlp(
            leaves["tokens"], leaves["probs"][chosen], slots, case.activation, weights, deferred
        )
    output.backward(case.grad)
    assert deferred.parts == {}
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


@in_chunks
@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_deferred_gradients_of_parts_are_those_of_the_whole(dtype: torch.dtype, biases: bool, num_parts: int) -> None:
    case = make(ACTIVATIONS["swiglu"], dtype, random_map(), biases)
    weights = tuple(name for name in case.leaves if name.startswith("fc"))
    want, found = expected(case), deferred_gradients(case, num_parts, weights)
    assert found.keys() == case.leaves.keys()
    for name, grad in found.items():
        assert_close(grad, want[name], dtype, name)


@pytest.mark.parametrize("needed", [("fc1",), ("fc2", "fc1_bias"), ()])
def test_deferred_gradients_of_frozen_weights(needed: tuple[str, ...]) -> None:
    case = make(ACTIVATIONS["swiglu"], torch.float64, random_map(), biases=True)
    want, found = expected(case), deferred_gradients(case, 2, needed)
    assert found.keys() == {"tokens", "probs", *needed}
    for name, grad in found.items():
        assert_close(grad, want[name], torch.float64, name)


def test_tiles_refuse_counts_that_do_not_fill_them() -> None:
    case = make(ACTIVATIONS["swiglu"], torch.float64, random_map(), biases=False)
    weights = ExpertWeights(case.leaves["fc1"], case.leaves["fc2"])
    with pytest.raises(ValueError, match=r"counts \(.*\) must be multiples of the tile \(32 rows\)"):
        expert_mlp(
            case.leaves["tokens"],
            case.leaves["probs"],
            case.slots,
            case.activation,
            weights,
            DeferredGradients(weights, tile_rows=32),
        )


@in_chunks
@pytest.mark.parametrize("products", [torch.float32, None], ids=["in fp32", "as they are"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tile_rows", [None, 32])
def test_recomputing_the_first_product_changes_no_bit_and_saves_its_output(
    tile_rows: int | None, dtype: torch.dtype, products: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if products is not None and dtype != torch.float64:
        monkeypatch.setattr(expert_loop, "gemm_dtype", lambda dtype, device: products)
    case = make(ACTIVATIONS["swiglu"], dtype, random_map(), biases=True)
    counts = tuple(-(-count // 32) * 32 for count in case.slots.counts)
    segments, probs = (
        case.slots.row_ids.split(case.slots.counts),
        case.leaves["probs"].detach().split(case.slots.counts),
    )
    row_ids = torch.cat([F.pad(ids, (0, n - len(ids)), value=-1) for ids, n in zip(segments, counts, strict=True)])
    probs = torch.cat([F.pad(p, (0, n - len(p))) for p, n in zip(probs, counts, strict=True)])
    results, saved = [], []
    for first_gemm in ("keep", "recompute"):
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in {**case.leaves, "probs": probs}.items()}
        weights = ExpertWeights(*(leaves[name] for name in ("fc1", "fc2", "fc1_bias", "fc2_bias")))
        deferred = None if tile_rows is None else DeferredGradients(weights, tile_rows)
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = expert_mlp(
                leaves["tokens"],
                leaves["probs"],
                Slots(counts, row_ids, has_padding=True),
                case.activation,
                weights,
                deferred,
                first_gemm=first_gemm,
            )
        output.backward(case.grad)
        results.append([output.detach(), *(leaf.grad for leaf in leaves.values())])
        saved.append(sum(sizes.values()))
    assert saved[0] - saved[1] == sum(counts) * 2 * FFN * dtype.itemsize
    for kept, again in zip(*results, strict=True):
        assert torch.equal(kept, again)
