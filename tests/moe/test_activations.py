"""The activation object against the reference and autograd, and its refusals."""

import pytest
import torch
from torch import Tensor

from moe.activations import Activation
from tests import reference
from tests.tolerances import assert_close

ACTIVATIONS = [
    Activation(),
    Activation(name="gelu"),
    Activation(name="squared_relu"),
    Activation(name="quick_gelu", clamp=7.0, offset=1.0),  # gpt-oss
    Activation(name="silu", clamp=0.5),
    Activation(name="gelu", offset=-0.5),
    *(Activation(name=name, gated=False) for name in ("silu", "gelu", "quick_gelu", "squared_relu")),
]


def expected(activation: Activation, fc1_output: Tensor) -> Tensor:
    return reference.activation(activation.name, fc1_output, clamp=activation.clamp, offset=activation.offset)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_values_and_gradients_equal_the_reference(activation: Activation, weighted: bool) -> None:
    fc1_output = (torch.randn(11, activation.num_inputs, 7, dtype=torch.float64) * 5).requires_grad_()
    weights = (torch.rand(11, dtype=torch.float64) * 3).requires_grad_() if weighted else None
    grad = torch.randn(11, 7, dtype=torch.float64)
    before = fc1_output.detach().clone()
    assert_close(activation.forward(fc1_output.detach()), expected(activation, fc1_output), what="forward")

    output = expected(activation, fc1_output) * (1.0 if weights is None else weights.unsqueeze(-1))
    output.backward(grad)
    grad_input = torch.full_like(fc1_output, torch.nan, requires_grad=False)
    actual, grad_weights = activation.forward_backward(
        fc1_output.detach(), grad.clone(), None if weights is None else weights.detach(), grad_input
    )
    assert_close(actual, output, what="weighted activation")
    assert_close(grad_input, fc1_output.grad, what="gradient of the input")
    assert (grad_weights is None) == (weights is None)
    if grad_weights is not None and weights is not None:
        assert_close(grad_weights, weights.grad, what="gradient of the weights")
    assert torch.equal(fc1_output, before)


def test_clamp_offset_and_kinks_by_hand() -> None:
    gpt_oss = Activation(name="quick_gelu", clamp=7.0, offset=1.0)
    fc1_output = torch.tensor([[[100.0, 0.0, 100.0], [-100.0, 3.0, 6.5]]], dtype=torch.float64)  # [1, G, F]
    seven = 7 / (1 + torch.tensor(-1.702 * 7, dtype=torch.float64).exp())
    assert_close(gpt_oss.forward(fc1_output), torch.stack([seven * -6, seven * 0, seven * 7.5])[None])
    grad_input = torch.empty_like(fc1_output)
    gpt_oss.forward_backward(fc1_output, torch.ones(1, 3, dtype=torch.float64), None, grad_input)
    # A clamped gate or up has no gradient; phi'(0) = 1/2 times up + 1 = 4.
    assert_close(
        grad_input, torch.stack([torch.tensor([0, 2.0, 0]).double(), torch.stack([seven * 0, seven * 0, seven])])[None]
    )
    relu = Activation(name="squared_relu", gated=False)
    assert relu.forward(torch.tensor([[[-2.0, 0.0, 3.0]]])).tolist() == [[0.0, 0.0, 9.0]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "relu"}, r"activation_func \('relu'\)"),
        ({"clamp": 0.0}, r"activation_func_clamp_value \(0.0\)"),
        ({"clamp": float("nan")}, r"activation_func_clamp_value \(nan\)"),
        ({"gated": False, "offset": 1.0}, r"glu_linear_offset \(1.0\).*gated_linear_unit=True"),
        ({"gated": False, "clamp": 7.0}, r"activation_func_clamp_value \(7.0\).*gated_linear_unit=True"),
    ],
)
def test_an_unsupported_combination_raises(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Activation(**fields)
