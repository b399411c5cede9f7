"""How many [T, E] tensors a decision makes in forward and backward: logits, results, gradients and no more."""

from typing import Any

import pytest
import torch
from torch import Tensor

from router import RouterConfig, TopKRouter, topk_routing_with_score_function
from tests.new_tensors import NewTensors

NUM_TOKENS, NUM_EXPERTS, TOPK, HIDDEN_SIZE = 48, 64, 4, 8
LOSSES = {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001}
DECISION = ["mm", "zeros_like", "zeros_like"]  # logits, probs, routing_map
GRADIENT = ["zeros_like"]  # of logits


def dense_tensors(fields: dict[str, object]) -> tuple[list[str], list[str]]:
    """Return the operations that made tensors of [T, E] in forward and in backward; the gate's products have fewer."""
    config = RouterConfig(hidden_size=HIDDEN_SIZE, num_moe_experts=NUM_EXPERTS, moe_router_topk=TOPK, **fields)
    router = TopKRouter(config)
    hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0)).requires_grad_()
    gradient = torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=torch.Generator().manual_seed(1))
    with NewTensors(NUM_TOKENS * NUM_EXPERTS) as forward:
        probs, _ = router(hidden)
    with NewTensors(NUM_TOKENS * NUM_EXPERTS) as backward:
        probs.backward(gradient)
    return forward.operations, backward.operations


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_a_fused_decision_makes_its_results_and_one_gradient(score_function: str) -> None:
    fields = {"moe_router_fusion": True, "moe_router_score_function": score_function}
    assert dense_tensors(fields) == (DECISION, GRADIENT)


def test_a_fused_decision_with_losses_makes_the_scores_and_a_gradient_of_each_loss() -> None:
    forward, backward = dense_tensors({"moe_router_fusion": True, **LOSSES})
    assert forward == [*DECISION, "_softmax"]
    assert [name for name in backward if name != "add"] == ["sub", "mul", *GRADIENT]  # z-loss, aux loss, choice
    assert backward.count("add") <= 2  # their sum


def test_separate_steps_make_their_results_once() -> None:
    forward, _ = dense_tensors({})
    assert forward == DECISION


class _Stop(torch.autograd.Function):
    """Identity that gives no gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def test_no_gradient_of_probs_is_no_gradient_of_logits() -> None:
    logits = torch.randn(NUM_TOKENS, NUM_EXPERTS, requires_grad=True)
    probs, _ = topk_routing_with_score_function(logits, TOPK, fused=True)
    _Stop.apply(probs).sum().backward()
    assert logits.grad is None


def test_views_and_writes_in_place_are_not_new() -> None:
    values = torch.zeros(4, 3)
    with NewTensors(12) as made:
        values.t()[0].fill_(1)
        values.add_(1)
        values[0].exp()
        torch.zeros(1).expand(4, 3)
        (values + 1).sum(0)
        values.topk(3)
    assert made.operations == ["add", "topk", "topk"]
