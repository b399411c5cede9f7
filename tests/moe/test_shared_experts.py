"""The dense MLP and the shared expert against the reference."""

from functools import partial

import pytest
import torch
from torch import Tensor

from moe.config import MoEConfig
from moe.shared_experts import MLP, SharedExpertMLP
from tests import reference
from tests.tolerances import assert_close

HIDDEN, WIDTH = 10, 7


def build(kind: type[MLP], dtype: torch.dtype = torch.float64, **fields: object) -> MLP:
    config = MoEConfig(
        **{
            "hidden_size": HIDDEN,
            "num_moe_experts": 4,
            "moe_ffn_hidden_size": 3,
            "moe_shared_expert_intermediate_size": WIDTH,
            "params_dtype": dtype,
            "init_method_std": 0.4,
            **fields,
        }
    )
    mlp = kind(config) if kind is SharedExpertMLP else kind(config, WIDTH)
    for name, parameter in mlp.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return mlp


def expected(mlp: MLP, hidden_states: Tensor) -> Tensor:
    """The reference in fp64; with biases, the shared expert written as an expert that sees every token."""
    weights = {name: parameter.double() for name, parameter in mlp.named_parameters()}
    fc1, fc2 = weights["linear_fc1.weight"], weights["linear_fc2.weight"]
    activation = partial(reference.activation, mlp.activation.name)
    tokens, gate = hidden_states.double().reshape(-1, HIDDEN), weights.get("gate_weight")
    if "linear_fc1.bias" not in weights:
        return reference.shared_expert(tokens, fc1, fc2, activation, gate).view(hidden_states.shape)
    ones = torch.ones(len(tokens), 1, dtype=torch.float64)
    probs = ones if gate is None else torch.sigmoid(tokens @ gate.T)
    fc1_bias, fc2_bias = weights["linear_fc1.bias"][None], weights["linear_fc2.bias"][None]
    output = reference.experts(tokens, probs, ones.bool(), fc1[None], fc2[None], activation, fc1_bias, fc2_bias)
    return output.view(hidden_states.shape)


@pytest.mark.parametrize("shape", [(5, 3, HIDDEN), (4, HIDDEN), (0, 3, HIDDEN)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("kind", ["dense", "shared", "gated"])
def test_equals_the_reference(kind: str, biases: bool, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    mlp = build(
        MLP if kind == "dense" else SharedExpertMLP,
        dtype,
        add_bias_linear=biases,
        moe_shared_expert_gate=kind == "gated",
        gated_linear_unit=kind != "dense",
    )
    hidden_states = torch.randn(shape, dtype=dtype).requires_grad_()
    actual, exact = mlp(hidden_states), expected(mlp, hidden_states)
    assert_close(actual, exact, dtype, what="output")
    leaves, grad = [hidden_states, *mlp.parameters()], torch.randn(shape, dtype=dtype)
    actual_grads = torch.autograd.grad(actual, leaves, grad)
    for actual_grad, exact_grad in zip(
        actual_grads, torch.autograd.grad(exact, leaves, grad.double(), materialize_grads=True), strict=True
    ):
        assert_close(actual_grad, exact_grad, dtype)


def test_the_gate_is_computed_in_fp32() -> None:
    """A bf16 gate logit near 8 would be rounded to a multiple of 1/32."""
    mlp = build(SharedExpertMLP, torch.bfloat16, moe_shared_expert_gate=True)
    tokens = torch.randn(50, HIDDEN).bfloat16()
    scores = []
    mlp._run = lambda hidden_states, weights: scores.append(weights) or hidden_states  # type: ignore[method-assign]
    mlp(tokens)
    assert_close(scores[0], torch.sigmoid(tokens.double() @ mlp.gate_weight[0].double()), torch.float32)


def test_names_shapes_and_refusal() -> None:
    shapes = {
        name: tuple(p.shape) for name, p in build(SharedExpertMLP, moe_shared_expert_gate=True).named_parameters()
    }
    assert shapes == {
        "gate_weight": (1, HIDDEN),
        "linear_fc1.weight": (2, WIDTH, HIDDEN),
        "linear_fc2.weight": (HIDDEN, WIDTH),
    }
    assert build(SharedExpertMLP).gate_weight is None
    with pytest.raises(ValueError, match=r"moe_shared_expert_intermediate_size \(None\)"):
        build(SharedExpertMLP, moe_shared_expert_intermediate_size=None)
