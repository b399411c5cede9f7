"""Products by oneDNN and by torch.mm: values, what is written, which library runs, and how many kernels it makes."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe import MoEConfig, MoELayer, gemm
from moe.gemm import describe_gemms, multiply_rows
from tests import reference
from tests.tolerances import assert_close

CPU = torch.device("cpu")


@pytest.fixture
def _onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let oneDNN multiply every fp32 product, whatever the CPU."""
    monkeypatch.setattr(gemm, "prefers_onednn", lambda: True)
    monkeypatch.setattr(gemm, "SMALLEST_ONEDNN", 1)


onednn = pytest.mark.usefixtures("_onednn")


class Recording(TorchDispatchMode):
    """Notes the rows of each product of oneDNN, and the number of torch.mm's."""

    def __init__(self) -> None:
        super().__init__()
        self.onednn_rows: list[int] = []
        self.num_mm = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.onednn_rows.append(len(args[0]))
        self.num_mm += func is torch.ops.aten.mm.out
        return func(*args, **(kwargs or {}))


# Rows of each expert: few, many, none, one, all of one, more than a step added at the end.
COUNTS = [(13, 11, 16), (40,), (1, 3, 1), (2, 9), (4, 1, 4), (8, 0, 8), (0, 0), (24, 1), (0, 5, 0)]


@onednn
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("counts", COUNTS)
def test_rows_of_each_expert(counts: tuple[int, ...], transpose: bool) -> None:
    """Each expert's rows come out as in fp64, whatever its neighbours are."""
    rows, out = torch.randn(sum(counts), 19), torch.full((sum(counts), 23), torch.nan)
    weights = [torch.randn((23, 19) if transpose else (19, 23)) for _ in counts]
    with Recording() as calls:
        multiply_rows(rows, counts, iter(weights), out, transpose=transpose)
    assert (len(calls.onednn_rows), calls.num_mm) == (sum(count > 0 for count in counts), counts.count(0))
    for part, weight, result in zip(rows.split(counts), weights, out.split(counts), strict=True):
        assert_close(result, (part.double() @ (weight.t() if transpose else weight).double()).float())


@onednn
@pytest.mark.parametrize("which", [0, 1, 2])
def test_neighbours_do_not_matter(which: int) -> None:
    """The rows that are added to an expert's may hold anything."""
    rows, weights, out = torch.full((12, 19), torch.nan), torch.randn(3, 19, 23), torch.empty(12, 23)
    rows.split((3, 5, 4))[which].normal_()
    multiply_rows(rows, (3, 5, 4), weights, out)
    expected = rows.split((3, 5, 4))[which].double() @ weights[which].double()
    assert_close(out.split((3, 5, 4))[which], expected.float())


@onednn
def test_few_kernels_serve_many_counts() -> None:
    """Hundred different counts ask for at most fourteen sizes."""
    counts = tuple(range(200, 300))
    rows, weight, out = torch.randn(sum(counts), 16), torch.randn(16, 16), torch.empty(sum(counts), 16)
    with Recording() as calls:
        multiply_rows(rows, counts, [weight] * 100, out)
    assert len(calls.onednn_rows) == 100
    assert len(set(calls.onednn_rows)) <= 14


def _double(tensor: Tensor) -> Tensor:
    return tensor.double()


@onednn
@pytest.mark.parametrize(
    ("constant", "value", "cast"),
    [
        ("SMALLEST_ONEDNN", 40 * 16 * 16 + 1, Tensor.contiguous),
        ("LARGEST_ONEDNN_RESULT", 40 * 16 * 4 - 1, Tensor.contiguous),
        ("prefers_onednn", lambda: False, Tensor.contiguous),
        ("ROW_STEP", 8, _double),
    ],
    ids=["small", "large", "another CPU", "fp64"],
)
def test_torch_mm_otherwise(
    constant: str, value: object, cast: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small products, large results, other CPUs and other dtypes are torch.mm's."""
    rows, weight = cast(torch.randn(40, 16)), cast(torch.randn(16, 16))
    out = torch.empty_like(rows)
    monkeypatch.setattr(gemm, constant, value)
    with Recording() as calls:
        multiply_rows(rows, (40,), [weight], out)
    assert (calls.onednn_rows, calls.num_mm) == ([], 1)


@onednn
def test_mkldnn_can_be_turned_off() -> None:
    """torch's own switch is obeyed."""
    rows, weight, out = torch.randn(40, 16), torch.randn(16, 16), torch.empty(40, 16)
    with torch.backends.mkldnn.flags(enabled=False), Recording() as calls:
        multiply_rows(rows, (40,), [weight], out)
    assert (calls.onednn_rows, calls.num_mm) == ([], 1)


@pytest.mark.parametrize(
    ("name", "avx512", "expected"),
    [("AMD EPYC", True, True), ("AMD EPYC", False, False), ("Intel(R) Xeon(R)", True, False)],
)
def test_which_cpus(name: str, avx512: bool, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's with AVX-512, where both libraries are there."""
    capabilities = {"cpu_name": name, "avx512_f": avx512}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    for has_mkl in (True, False):
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda has_mkl=has_mkl: has_mkl)
        assert gemm.prefers_onednn.__wrapped__() is (expected and has_mkl)
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # torch before 2.13
    assert gemm.prefers_onednn.__wrapped__() is False


def test_description(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts' text names the library that runs."""
    monkeypatch.setattr(gemm, "prefers_onednn", lambda: True)
    assert describe_gemms(torch.float32, CPU) == "GEMMs torch.float32 by oneDNN and torch.mm"
    assert describe_gemms(torch.float64, CPU) == "GEMMs torch.float64 by torch.mm"
    assert describe_gemms(torch.float32, torch.device("meta")) == "GEMMs torch.float32 by torch.mm"
    monkeypatch.setattr(gemm, "prefers_onednn", lambda: False)
    assert describe_gemms(torch.float32, CPU) == "GEMMs torch.float32 by torch.mm"


@onednn
@pytest.mark.parametrize("recompute", [None, "mlp"])
def test_layer(recompute: str | None) -> None:
    """Output and every gradient of a layer are those of the reference, whether oneDNN or torch.mm multiplies."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_moe_experts": 6, "moe_ffn_hidden_size": 40, "moe_router_topk": 2}
    layer = MoELayer(MoEConfig(**sizes, moe_recompute=recompute))
    hidden_states = torch.randn(50, 1, 24, requires_grad=True)
    grad = torch.randn(50, 1, 24)
    with Recording() as calls:
        output = layer(hidden_states)
        output.backward(grad)
    assert len(calls.onednn_rows) == 6 * (4 if recompute is None else 5)  # two forward, two backward, fc1 again
    fc1, fc2 = layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight
    actual = (hidden_states, layer.router.weight, fc1, fc2)
    leaves = [tensor.detach().double().requires_grad_() for tensor in actual]
    weights = reference.MoEWeights(router=leaves[1], fc1=leaves[2], fc2=leaves[3])
    act = partial(reference.activation, "silu")
    expected = reference.moe_layer(leaves[0][:, 0], weights, 2, act)
    expected.backward(grad[:, 0].double())
    assert_close(output[:, 0], expected)
    for tensor, leaf in zip(actual, leaves, strict=True):
        assert_close(tensor.grad, leaf.grad)
