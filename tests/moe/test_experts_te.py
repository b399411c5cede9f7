"""The calls into Transformer Engine's GroupedLinear, on a stand-in that makes the demands of the real one."""

import copy
import importlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dispatchers.base import ExpertInput
from moe.activations import Activation
from moe.config import MoEConfig
from moe.expert_loop import Slots
from moe.experts import GroupedMLP
from moe.quantization.recipes import RECIPES
from moe.quantization.weights import keep_quantized_weights
from moe.slots import add_slots, weighted_activation
from tests import reference
from tests.tolerances import assert_close

HIDDEN, FFN, ROWS = 16, 32, 13
COUNTS = (5, 0, 8, 3)
EXPERTS = len(COUNTS)


class Format(Enum):
    HYBRID = "hybrid"
    E4M3 = "e4m3"


@dataclass(repr=False)
class Recipe:
    """A recipe; its subclasses have the fields that are passed."""

    fp8_format: Format = Format.HYBRID


@dataclass(repr=False)
class DelayedScaling(Recipe):
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True


class Float8CurrentScaling(Recipe):
    pass


class Float8BlockScaling(Recipe):
    pass


class MXFP8BlockScaling(Recipe):
    pass


@dataclass(repr=False)
class NVFP4BlockScaling:
    disable_rht: bool = False


ALIGNMENT = {MXFP8BlockScaling: 32, NVFP4BlockScaling: 128}  # others: 16
WIDTHS = {MXFP8BlockScaling: 32}


class State:
    """What the stand-in knows of the world."""

    region: list[Any]  # recipes of the regions that are open
    ran: set[int]  # linears that ran in the outermost one
    calls: list[dict[str, Any]]
    unavailable: set[str]


class autocast:
    """A region; an instance is not entered again while it is open."""

    def __init__(self, enabled: bool = True, calibrating: bool = False, recipe: Any = None) -> None:
        assert recipe is not None
        self.recipe = recipe if enabled else None

    def __enter__(self) -> None:
        if not State.region:
            State.ran.clear()
        State.region.append(self.recipe)

    def __exit__(self, *error: object) -> None:
        State.region.pop()


class GroupedLinear(nn.Module):
    """The constructor's and the call's arguments that are used here, in the order of the real ones by name."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: str = "cuda",
        use_grouped_tensor: bool | None = None,
    ) -> None:
        super().__init__()
        assert isinstance(use_grouped_tensor, bool), "None reads the environment"
        self.num_gemms, self.use_bias = num_gemms, bias
        self._fp8_workspaces: dict[str, Tensor] = {}
        for e in range(num_gemms):
            for name, shape in {"weight": (out_features, in_features), "bias": (out_features,)}.items():
                if name == "weight" or bias:
                    empty = torch.empty(shape, dtype=params_dtype, device=device)
                    self.register_parameter(f"{name}{e}", nn.Parameter(empty))

    def get_extra_state(self) -> Tensor:
        return torch.empty(0)

    def forward(self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
        assert type(m_splits) is list
        assert all(type(split) is int for split in m_splits)
        assert len(m_splits) == self.num_gemms
        assert sum(m_splits) == inp.shape[0] > 0
        assert not torch.is_autocast_enabled("cpu")
        weights = [getattr(self, f"weight{e}") for e in range(self.num_gemms)]
        assert all(w.is_contiguous() and w.dim() == 2 and w.shape[1] == inp.shape[1] for w in weights)
        assert {p.dtype for p in self.parameters()} == {inp.dtype}
        recipe = State.region[-1] if State.region else None
        if recipe is not None:
            assert all(split % ALIGNMENT.get(type(recipe), 16) == 0 for split in m_splits), m_splits
            assert all(size % WIDTHS.get(type(recipe), 16) == 0 for w in weights for size in w.shape)
            assert not (isinstance(recipe, DelayedScaling) and id(self) in State.ran)
            State.ran.add(id(self))
            if is_first_microbatch is not None:
                for e, weight in enumerate(weights):
                    if is_first_microbatch:
                        assert f"weight{e}" not in self._fp8_workspaces
                        self._fp8_workspaces[f"weight{e}"] = weight.detach().clone()
                    assert torch.equal(self._fp8_workspaces[f"weight{e}"], weight), "stale"
        State.calls.append({"recipe": recipe, "is_first": is_first_microbatch, "grad": torch.is_grad_enabled()})
        parts = []
        for e, x in enumerate(inp.split(m_splits)):
            bias = getattr(self, f"bias{e}") if self.use_bias else None
            parts.append(nn.functional.linear(x, weights[e], bias))
        return torch.cat(parts)


def availability(name: str) -> Any:
    def is_available(return_reason: bool = False) -> Any:
        assert return_reason
        return name not in State.unavailable, f"no {name} here"

    return is_available


@pytest.fixture(autouse=True)
def _transformer_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    State.region, State.ran, State.calls, State.unavailable = [], set(), [], set()
    modules = {n: types.ModuleType(f"transformer_engine{n}") for n in ("", ".pytorch", ".common", ".common.recipe")}
    checks = ("is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available", "is_nvfp4_available")
    contents = {
        ".pytorch": {
            "GroupedLinear": GroupedLinear,
            "autocast": autocast,
            **{name: availability(name) for name in checks},
        },
        ".common.recipe": {
            kind.__name__: kind
            for kind in (
                Format,
                DelayedScaling,
                Float8CurrentScaling,
                Float8BlockScaling,
                MXFP8BlockScaling,
                NVFP4BlockScaling,
            )
        },
        ".common": {"recipe": modules[".common.recipe"]},
    }
    for place, module in modules.items():
        vars(module).update(contents.get(place, {}))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "moe.experts_te", raising=False)
    yield
    sys.modules.pop("moe.experts_te", None)


def build(backend: str = "te", **fields: Any) -> GroupedMLP:
    torch.manual_seed(1)
    sizes = {"hidden_size": HIDDEN, "moe_ffn_hidden_size": FFN, "num_moe_experts": EXPERTS, "init_method_std": 0.3}
    experts = GroupedMLP(MoEConfig(moe_expert_backend=backend, **{**sizes, **fields}))
    for name, parameter in experts.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return experts


def draw(
    dtype: torch.dtype = torch.float32,
    num_rows: int = ROWS,
    counts: tuple[int, ...] = COUNTS,
    num_padding: int = 2,
    hidden: int = HIDDEN,
) -> ExpertInput:
    """Slots that read any rows; the last num_padding of each expert that has as many are padding, all without rows."""
    generator = torch.Generator().manual_seed(2)
    row_ids = torch.cat([torch.randperm(max(num_rows, n), generator=generator)[:n] for n in counts])
    row_ids = row_ids % max(num_rows, 1) if num_rows else row_ids.fill_(-1)
    for end, count in zip(torch.tensor(counts).cumsum(0).tolist(), counts, strict=True):
        row_ids[end - min(num_padding, count) : end] = -1
    probs = (3 * torch.rand(sum(counts), generator=generator)).masked_fill(row_ids < 0, 0)
    return ExpertInput(
        tokens=torch.randn(num_rows, hidden, generator=generator).to(dtype).requires_grad_(),
        row_ids=row_ids,
        probs=probs.requires_grad_(),
        tokens_per_expert=torch.tensor(counts),
        tokens_per_expert_list=counts,
        has_padding=bool((row_ids < 0).any()),
    )


def grad_of(output: Tensor) -> Tensor:
    return torch.arange(output.numel(), dtype=torch.float64).cos().view_as(output).to(output.dtype)


def run(experts: GroupedMLP, expert_input: ExpertInput) -> dict[str, Tensor]:
    """Return the output and all gradients."""
    leaves = {"tokens": expert_input.tokens, "probs": expert_input.probs, **dict(experts.named_parameters())}
    output = experts(expert_input)
    grads = torch.autograd.grad(output, list(leaves.values()), grad_of(output))
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        assert (grad.dtype, grad.layout) == (leaf.dtype, torch.strided), name
    return {"output": output.detach(), **dict(zip(leaves, grads, strict=True))}


def compare(expert_input: ExpertInput, dtype: torch.dtype = torch.float32, **fields: Any) -> dict[str, Tensor]:
    """Assert that the backend's results are the reference backend's, and return them."""
    results = [run(build(backend, params_dtype=dtype, **fields), expert_input) for backend in ("reference", "te")]
    for name, expected in results[0].items():
        assert_close(results[1][name], expected, dtype, name)
    return results[1]


ACTIVATIONS = {
    "swiglu": {},
    "gelu": {"activation_func": "gelu", "gated_linear_unit": False},
    "squared_relu": {"activation_func": "squared_relu", "gated_linear_unit": False},
    "gpt_oss": {
        "activation_func": "quick_gelu",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 1.0,
    },
}


@pytest.mark.parametrize("num_padding", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biases", [True, False], ids=["biases", "plain"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_equals_the_reference_backend(name: str, biases: bool, dtype: torch.dtype, num_padding: int) -> None:
    fields = {"add_bias_linear": biases, **ACTIVATIONS[name]}
    if name == "gpt_oss" and dtype == torch.bfloat16:
        fields["activation_func_clamp_value"] = 7.0  # out of reach: roundings differ, and so may sides of the clamp
    found = compare(draw(dtype, num_padding=num_padding), dtype, **fields)
    for parameter in (n for n in found if n.startswith("linear")):
        assert not found[parameter][1].any(), f"{parameter} of the idle expert"
        assert found[parameter][2].any(), parameter
    assert len(State.calls) == 2


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
def test_equals_the_plain_loop(gated: bool) -> None:
    experts, expert_input = build(add_bias_linear=True, gated_linear_unit=gated), draw()
    found = run(experts, expert_input)
    leaves = {n: p.detach().double().requires_grad_() for n, p in experts.named_parameters()}
    tokens = expert_input.tokens.detach().double().requires_grad_()
    probs = expert_input.probs.detach().double().requires_grad_()
    real = expert_input.row_ids >= 0
    experts_of = torch.arange(EXPERTS).repeat_interleave(expert_input.tokens_per_expert)
    places = (expert_input.row_ids[real], experts_of[real])
    dense = torch.zeros(ROWS, EXPERTS, dtype=torch.float64).index_put(places, probs[real])
    routing_map = torch.zeros(ROWS, EXPERTS, dtype=torch.bool).index_put(places, torch.tensor(True))
    names = ("linear_fc1.weight", "linear_fc2.weight", "linear_fc1.bias", "linear_fc2.bias")
    fc1, fc2, *biases = (leaves[name] for name in names)
    output = reference.experts(tokens, dense, routing_map, fc1, fc2, partial(reference.activation, "silu"), *biases)
    leaves = {"tokens": tokens, "probs": probs, **leaves}
    grads = torch.autograd.grad(output, list(leaves.values()), grad_of(output))
    for name, expected in {"output": output, **dict(zip(leaves, grads, strict=True))}.items():
        assert_close(found[name], expected, torch.float32, name)


@pytest.mark.parametrize("biases", [True, False], ids=["biases", "plain"])
@pytest.mark.parametrize(
    ("num_rows", "counts"),
    [(0, COUNTS), (0, (0, 0, 0, 0)), (ROWS, (0, 0, 0, 0)), (1, (0, 0, 0, 1)), (ROWS, (0, 9, 0, 0))],
)
def test_no_rows_no_slots_and_one_expert(num_rows: int, counts: tuple[int, ...], biases: bool) -> None:
    compare(draw(num_rows=num_rows, counts=counts, num_padding=0), add_bias_linear=biases)


@pytest.mark.parametrize("hostile", [torch.nan, torch.inf])
def test_padding_slots_read_zeros_and_write_nowhere(hostile: float) -> None:
    experts, clean = build(add_bias_linear=True), draw()
    used = set(clean.row_ids.tolist())
    clean = replace(clean, tokens=torch.cat([torch.zeros(1, HIDDEN), clean.tokens]).detach().requires_grad_())
    clean = replace(clean, row_ids=torch.where(clean.row_ids < 0, -1, clean.row_ids + 1))
    tokens = clean.tokens.detach().clone()
    tokens[0] = hostile  # row 0 is what a padding slot would read
    soiled = replace(clean, tokens=tokens.requires_grad_())
    assert -1 in used
    expected, found = run(experts, clean), run(experts, soiled)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_steps_leave_their_inputs_as_they_are() -> None:
    first, probs, y = torch.randn(3, 2, 4), torch.rand(3), torch.randn(3, HIDDEN)
    leaves = [tensor.clone().requires_grad_() for tensor in (first, probs, y)]
    slots = Slots((1, 2), torch.tensor([0, 1, 0]))
    hidden = weighted_activation(leaves[0], leaves[1], Activation())
    output = add_slots(leaves[2], leaves[1], torch.ones(2, HIDDEN), slots, 2)
    grads = [torch.randn_like(hidden), torch.randn_like(output)]
    kept = [grad.clone() for grad in grads]
    torch.autograd.grad([hidden, output], leaves, grads)
    for after, before in zip([*leaves, *grads], [first, probs, y, *kept], strict=True):
        assert torch.equal(after, before)


def test_state_dict_and_modules_are_those_of_every_backend() -> None:
    expected, experts = build("reference", add_bias_linear=True), build(add_bias_linear=True)
    run(experts, draw())
    assert {n: t.shape for n, t in experts.state_dict().items()} == {
        n: t.shape for n, t in expected.state_dict().items()
    }
    assert [type(m) for m in experts.modules()] == [type(m) for m in expected.modules()]
    experts.load_state_dict(expected.state_dict())
    for linear in (experts.backend.fc1, experts.backend.fc2):
        assert all(tensor.is_meta for tensor in linear.parameters())


def test_a_copy_computes_with_its_own_weights() -> None:
    experts = build(fp8="hybrid", fp8_recipe="delayed")
    copied = copy.deepcopy(experts)
    assert copied.backend.operands is copied.operands is not experts.operands
    assert copied.backend.fc1 is not experts.backend.fc1
    assert repr(copied.backend.recipe) != repr(experts.backend.recipe) == repr(experts.backend.recipe)
    with torch.no_grad():
        copied.linear_fc1.weight.zero_()
    counts = (16, 0, 16, 32)
    assert not run(copied, draw(counts=counts))["output"].any()
    assert run(experts, draw(counts=counts))["output"].any()


def test_weights_of_any_strides() -> None:
    expected, experts = build("reference"), build()
    for linear in (experts.linear_fc1, experts.linear_fc2):
        linear.weight.data = linear.weight.data.transpose(-1, -2).contiguous().transpose(-1, -2)
        assert not linear.weight.is_contiguous()
    want, found = run(expected, draw()), run(experts, draw())
    for name in want:
        assert_close(found[name], want[name], what=name)


@pytest.mark.parametrize("frozen", ["linear_fc1", "linear_fc2"])
def test_a_frozen_linear_changes_no_other_gradient(frozen: str) -> None:
    experts, expert_input = build(add_bias_linear=True), draw()
    expected = run(experts, expert_input)
    getattr(experts, frozen).requires_grad_(False)
    output = experts(expert_input)
    output.backward(grad_of(output))
    for name, parameter in experts.named_parameters():
        if name.startswith(frozen):
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, expected[name]), name


def test_a_frozen_weight_with_a_trained_bias_is_refused() -> None:
    experts = build(add_bias_linear=True)
    experts.linear_fc1.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"linear_fc1.weight \(requires_grad=False\) must not be frozen"):
        experts(draw())


def test_autocast_and_expanded_gradients_and_no_grad() -> None:
    experts, expert_input = build(), draw()
    expected = experts(expert_input)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = experts(expert_input)
    assert torch.equal(found, expected)
    found.sum().backward()
    assert expert_input.tokens.grad.isfinite().all()
    with torch.no_grad():
        assert torch.equal(experts(expert_input), expected)


QUANTIZED = {
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "delayed": {
        "fp8": "e4m3",
        "fp8_recipe": "delayed",
        "fp8_margin": 2,
        "fp8_amax_history_len": 8,
        "fp8_amax_compute_algo": "most_recent",
    },
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "hybrid", "fp8_recipe": "mxfp8"},
    "nvfp4": {"fp4": "e2m1"},
}


def quantized(name: str, **fields: Any) -> tuple[GroupedMLP, ExpertInput]:
    width, multiple = RECIPES[name].width_multiple, RECIPES[name].row_multiple
    sizes = {"hidden_size": width, "moe_ffn_hidden_size": width}
    counts = (2 * multiple, 0, multiple, multiple)
    return build(**sizes, **QUANTIZED[name], **fields), draw(num_rows=2 * multiple, counts=counts, hidden=width)


@pytest.mark.parametrize("name", QUANTIZED)
def test_each_recipe_is_entered_once_per_forward(name: str) -> None:
    experts, expert_input = quantized(name)
    for _ in range(2):
        run(experts, expert_input)
    recipes = {id(call["recipe"]): call["recipe"] for call in State.calls}
    assert len(State.calls) == 4
    assert len(recipes) == 1
    (recipe,) = recipes.values()
    assert isinstance(recipe, globals()[RECIPES[name].te_name])
    assert [call["is_first"] for call in State.calls] == [None] * 4
    if name != "nvfp4":
        assert recipe.fp8_format.value == QUANTIZED[name]["fp8"]
    if name == "delayed":
        given = (recipe.margin, recipe.amax_history_len, recipe.amax_compute_algo, recipe.reduce_amax)
        assert given == (2, 8, "most_recent", False)
    assert name in repr(experts)
    assert "transformer_engine.pytorch.GroupedLinear" in repr(experts)


@pytest.mark.parametrize(("again", "num_products"), [("activation", 3), ("mlp", 4)])
@pytest.mark.parametrize("name", [None, *(name for name in QUANTIZED if name != "delayed")])
def test_recomputation_saves_less_and_changes_nothing(name: str | None, again: str, num_products: int) -> None:
    results, saved = [], []
    for fields in ({}, {"moe_recompute": again}):
        State.calls.clear()
        experts, expert_input = (build(**fields), draw()) if name is None else quantized(name, **fields)
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = experts(expert_input)
        saved.append(sum(sizes.values()))
        parameters = list(experts.parameters())
        leaves = [expert_input.tokens, expert_input.probs, *parameters]
        results.append([output.detach(), *torch.autograd.grad(output, leaves, grad_of(output))])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert saved[1] < saved[0]
    assert len(State.calls) == num_products
    assert len({id(call["recipe"]) for call in State.calls}) == 1
    assert (State.calls[0]["recipe"] is None) == (name is None)


def test_no_region_without_quantization() -> None:
    run(build(), draw())
    assert [call["recipe"] for call in State.calls] == [None, None]


def test_kept_weights_are_quantized_by_the_first_forward_of_a_block() -> None:
    experts, expert_input = quantized("tensorwise")
    for _ in range(2):
        State.calls.clear()
        with keep_quantized_weights(experts):
            for _ in range(3):
                run(experts, expert_input)
        assert [call["is_first"] for call in State.calls] == [True] * 2 + [False] * 4
        assert experts.backend.fc1._fp8_workspaces
        with torch.no_grad():
            experts.linear_fc1.weight.mul_(2)
    run(experts, expert_input)
    assert State.calls[-1]["is_first"] is None
    assert not experts.backend.fc1._fp8_workspaces


def test_kept_weights_are_made_anew_where_gradients_begin() -> None:
    experts, expert_input = quantized("tensorwise")
    with keep_quantized_weights(experts):
        for is_recorded in (False, False, True, True):
            with torch.set_grad_enabled(is_recorded):
                experts(expert_input)
    assert [call["is_first"] for call in State.calls[::2]] == [True, False, True, False]


def test_kept_weights_must_not_change() -> None:
    experts, expert_input = quantized("tensorwise")
    with keep_quantized_weights(experts):
        experts(expert_input)
        with torch.no_grad():
            experts.linear_fc2.weight.mul_(2)
        with pytest.raises(RuntimeError, match="linear_fc2 was changed in place"):
            experts(expert_input)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"params_dtype": torch.float64}, r"params_dtype \(torch.float64\) must be one of .*or use 'reference'"),
        ({"moe_deterministic": True}, r"moe_deterministic \(True\) is not available with moe_expert_backend 'te'"),
        (
            {"moe_layer_recompute": True, "fp8": "hybrid", "fp8_recipe": "delayed"},
            r"moe_layer_recompute \(True\) is not available with fp8_recipe 'delayed'",
        ),
        (
            {"moe_recompute": "mlp", "fp8": "hybrid", "fp8_recipe": "delayed"},
            r"moe_recompute \('mlp'\) is not available with fp8_recipe 'delayed'",
        ),
        ({"fp8": "hybrid", "hidden_size": 24}, r"hidden_size \(24\) must be divisible by 16 for recipe 'delayed'"),
        (
            {"fp8": "e4m3", "fp8_recipe": "mxfp8", "hidden_size": 32, "moe_ffn_hidden_size": 48},
            r"moe_ffn_hidden_size \(48\) must be divisible by 32 for recipe 'mxfp8'",
        ),
        ({"fp8": "e4m3", "fp8_recipe": "rowwise"}, r"fp8_recipe \('rowwise'\) is not available"),
    ],
)
def test_refusals(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**fields)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_recipe_that_the_device_lacks_is_refused(name: str) -> None:
    module = importlib.import_module("moe.experts_te")
    State.unavailable.add(module.AVAILABILITY[name])
    field = "fp4_recipe" if name == "nvfp4" else "fp8_recipe"
    with pytest.raises(ValueError, match=rf"{field} \('{name}'\) is not available on this device .*no is_.*here"):
        quantized(name)


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.delitem(sys.modules, "moe.experts_te", raising=False)
    with pytest.raises(
        ImportError, match=r"moe_expert_backend \('te'\) needs Transformer Engine .*pip install .*\[pytorch\]"
    ):
        build()
