"""Router logits: precision, gradients, what is saved."""

import pytest
import torch
from torch import Tensor

from router import router_gating_linear
from tests.tolerances import assert_close

HALF = [torch.bfloat16, torch.float16]


def _inputs(dtype: torch.dtype, weight_dtype: torch.dtype, *shape: int) -> list[Tensor]:
    sizes = [(*shape, 6), (5, 6), (5,)]
    dtypes = [dtype, weight_dtype, weight_dtype]
    return [torch.randn(size).to(dtype).requires_grad_() for size, dtype in zip(sizes, dtypes, strict=True)]


@pytest.mark.parametrize("router_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("shape", [(7, 3), (0, 3), (4,)], ids=str)
def test_logits_and_gradients_are_computed_in_the_router_dtype(
    shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype, router_dtype: torch.dtype
) -> None:
    inputs = _inputs(dtype, weight_dtype, *shape)
    upstream = torch.randn(*shape, 5, dtype=router_dtype)
    logits = router_gating_linear(*inputs, router_dtype)
    gradients = torch.autograd.grad(logits, inputs, upstream)

    exact = [tensor.detach().to(router_dtype).double().requires_grad_() for tensor in inputs]
    expected = exact[0] @ exact[1].t() + exact[2]
    assert logits.dtype == router_dtype
    assert_close(logits, expected, what="logits")
    expected_gradients = torch.autograd.grad(expected, exact, upstream.double())
    for name, tensor, gradient, right in zip(
        ("inp", "weight", "bias"), inputs, gradients, expected_gradients, strict=True
    ):
        assert gradient.dtype == tensor.dtype
        coarser = max(gradient.dtype, router_dtype, key=lambda dtype: torch.finfo(dtype).eps)
        assert_close(gradient, right, coarser, what=name)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_autocast_leaves_the_router_in_fp32(dtype: torch.dtype) -> None:
    inputs = _inputs(dtype, dtype, 7)
    expected = router_gating_linear(*inputs, torch.float32)
    expected_gradients = torch.autograd.grad(expected.square().sum(), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = router_gating_linear(*inputs, torch.float32)
        gradients = torch.autograd.grad(logits.square().sum(), inputs)
    assert logits.dtype == torch.float32
    assert all(map(torch.equal, (logits, *gradients), (expected, *expected_gradients)))


def test_inputs_themselves_are_saved_and_nothing_else() -> None:
    inp, weight, bias = _inputs(torch.bfloat16, torch.bfloat16, 7, 3)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.data_ptr()) or x, lambda x: x):
        router_gating_linear(inp, weight, bias, torch.float32)
    assert saved == [inp.data_ptr(), weight.data_ptr()]


def test_no_bias_and_frozen_parts() -> None:
    inp, weight, _ = _inputs(torch.float64, torch.float64, 7)
    logits = router_gating_linear(inp.detach(), weight, None, torch.float64)
    logits.sum().backward()
    assert_close(logits, inp @ weight.t())
    assert_close(weight.grad, inp.sum(0).expand(5, 6))
    assert inp.grad is None


@pytest.mark.parametrize("router_dtype", [*HALF, torch.int64], ids=str)
def test_refused_dtype(router_dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"router_dtype \({router_dtype}\) must be torch.float32 or torch.float64"):
        router_gating_linear(torch.randn(7, 6), torch.randn(5, 6), None, router_dtype)
