"""Balancing losses against the oracle, in value and gradient, and how they join the main loss."""

import pytest
import torch
from torch import Tensor

from router import attach_loss, compute_routing_scores_for_aux_loss, switch_load_balancing_loss_func, z_loss_func
from tests import reference
from tests.tolerances import assert_close

NUM_EXPERTS = 5


def _aux_loss(logits: Tensor, topk: int, coeff: float, score_function: str) -> Tensor:
    routing_map, scores = compute_routing_scores_for_aux_loss(logits, topk, score_function)
    return switch_load_balancing_loss_func(scores, routing_map.sum(0), len(logits), topk, NUM_EXPERTS, coeff)


def _with_gradient(loss: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    return loss, torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("topk", [1, 2, 3])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_losses_equal_the_reference(score_function: str, topk: int, num_tokens: int, dtype: torch.dtype) -> None:
    logits = torch.randn(num_tokens, NUM_EXPERTS, dtype=dtype).mul(2).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    routing_map, scores = compute_routing_scores_for_aux_loss(logits, topk, score_function)
    log_scores = exact if score_function == "softmax" else exact.sigmoid().log()
    assert_close(scores, log_scores.softmax(-1), what="scores")
    assert torch.equal(routing_map, reference.largest(exact, topk))
    for loss, expected in (
        (_aux_loss(logits, topk, 0.3, score_function), reference.aux_loss(exact, topk, 0.3, score_function)),
        (z_loss_func(logits, 0.3), reference.z_loss(exact, 0.3)),
    ):
        assert loss.dtype == dtype
        value, gradient = _with_gradient(loss, logits)
        expected_value, expected_gradient = _with_gradient(expected, exact)
        assert_close(value, expected_value, what="loss")
        assert_close(gradient, expected_gradient, what="gradient")


def test_hand_written_losses() -> None:
    scores, counts = torch.tensor([[0.5, 0.25, 0.25], [0.75, 0.125, 0.125]]), torch.tensor([2, 1, 1])
    mean_scores, shares = torch.tensor([0.625, 0.1875, 0.1875]), torch.tensor([1 / 2, 1 / 4, 1 / 4])
    loss = switch_load_balancing_loss_func(scores, counts, 2, 2, 3, 0.1)
    assert_close(loss, 0.1 * 3 * (mean_scores * shares).sum())
    logits = torch.tensor([[1.0, 3.0], [0.25, 0.75]]).log()  # logsumexp log 4 and 0
    assert_close(z_loss_func(logits, 0.1), 0.1 * torch.tensor(4.0).log().square() / 2)


@pytest.mark.parametrize("topk", [1, 2])
def test_a_balanced_router_gives_exactly_the_coefficient(topk: int) -> None:
    logits = torch.stack([torch.arange(8.0).roll(shift) for shift in range(8)])
    routing_map, scores = compute_routing_scores_for_aux_loss(logits, topk, "softmax")
    assert routing_map.sum(0).tolist() == [topk] * 8
    loss = switch_load_balancing_loss_func(scores.double(), routing_map.sum(0), 8, topk, 8, 0.25)
    assert_close(loss, torch.tensor(0.25), torch.float32)
    uniform = switch_load_balancing_loss_func(torch.full((8, 8), 1 / 8), routing_map.sum(0), 8, topk, 8, 0.25)
    assert uniform.item() == 0.25


def test_shares_of_uneven_parts_add_up_to_the_loss() -> None:
    logits = torch.randn(13, NUM_EXPERTS, dtype=torch.float64)
    routing_map, scores = compute_routing_scores_for_aux_loss(logits, 2, "softmax")
    counts, total, parts = routing_map.sum(0), torch.tensor(13), [0, 5, 1, 7]
    aux_shares = [
        switch_load_balancing_loss_func(part, counts, total, 2, NUM_EXPERTS, 0.3) for part in scores.split(parts)
    ]
    z_shares = [z_loss_func(part, 0.3, total) for part in logits.split(parts)]
    assert_close(torch.stack(aux_shares).sum(), reference.aux_loss(logits, 2, 0.3))
    assert_close(torch.stack(z_shares).sum(), reference.z_loss(logits, 0.3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_attach_loss_adds_a_gradient_and_changes_no_value(dtype: torch.dtype) -> None:
    logits = torch.randn(7, NUM_EXPERTS, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(7, NUM_EXPERTS)
    loss = logits.to(dtype).square().sum()
    attached = attach_loss(logits, loss, scale=0.25)
    assert torch.equal(attached, logits)
    assert attached.data_ptr() == logits.data_ptr()
    (gradient,) = torch.autograd.grad((attached * weight).sum(), logits, retain_graph=True)
    assert_close(gradient, weight + 0.25 * 2 * logits)
    (halved,) = torch.autograd.grad((attached * weight).sum() * 0.0, logits)
    assert_close(halved, 0.5 * logits)  # the strength does not depend on the main loss


@pytest.mark.parametrize(
    ("shape", "topk", "score_function", "message"),
    [
        ((7, 5), 2, "tanh", r"score_function \('tanh'\) must be 'softmax' or 'sigmoid'"),
        ((7, 5), 6, "softmax", r"topk \(6\) must lie between 1 and the number of experts \(5\)"),
        ((7, 3, 5), 2, "softmax", r"logits \(\(7, 3, 5\)\) must have two dimensions"),
    ],
)
def test_refused_arguments(shape: tuple[int, ...], topk: int, score_function: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_routing_scores_for_aux_loss(torch.randn(shape), topk, score_function)
