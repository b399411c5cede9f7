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


# Numbers of rows and parts of them: at the start, in between, at the end, all, few, one, none.
PARTS = [(40, 0, 13), (40, 13, 24), (40, 27, 40), (40, 0, 40), (5, 1, 4), (11, 2, 11), (9, 4, 5), (8, 8, 8)]


@onednn
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("num_rows", "start", "stop"), PARTS)
def test_part_of_the_rows(num_rows: int, start: int, stop: int, is_transposed: bool) -> None:
    """The rows of a part come out as in fp64; others are not written, and what they hold does not matter."""
    part = slice(start, stop)
    rows, weight = torch.full((num_rows, 19), torch.nan), torch.randn(19, 23)
    rows[part] = torch.randn(part.stop - part.start, 19)
    out = torch.full((num_rows, 23), 7.0)
    with Recording() as calls:
        multiply_rows(rows, part, weight.t().contiguous().t() if is_transposed else weight, out)
    assert (len(calls.onednn_rows), calls.num_mm) == ((1, 0) if part.start < part.stop else (0, 1))
    expected = torch.full((num_rows, 23), 7.0, dtype=torch.float64)
    expected[part] = rows[part].double() @ weight.double()
    assert_close(out, expected.float())


@onednn
def test_few_kernels_serve_many_counts() -> None:
    """Hundred different counts ask for at most fourteen sizes."""
    rows, weight, out = torch.randn(400, 16), torch.randn(16, 16), torch.empty(400, 16)
    with Recording() as calls:
        for count in range(200, 300):
            multiply_rows(rows, slice(30, 30 + count), weight, out)
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
        multiply_rows(rows, slice(0, 40), weight, out)
    assert (calls.onednn_rows, calls.num_mm) == ([], 1)


@onednn
def test_mkldnn_can_be_turned_off() -> None:
    """torch's own switch is obeyed."""
    rows, weight, out = torch.randn(40, 16), torch.randn(16, 16), torch.empty(40, 16)
    with torch.backends.mkldnn.flags(enabled=False), Recording() as calls:
        multiply_rows(rows, slice(0, 40), weight, out)
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
