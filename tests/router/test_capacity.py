"""Capacity and token rounding against a loop over experts in plain Python."""

import math

import pytest
import torch
from torch import Tensor

from router import apply_router_token_dropping, apply_token_rounding, get_capacity
from router.capacity import rank_by_score
from tests.tolerances import assert_close

NUM_EXPERTS = 5
INFINITY, NAN = float("inf"), float("nan")


def _decision(num_tokens: int, topk: int = 2, seed: int = 1) -> tuple[Tensor, Tensor]:
    """probs that require a gradient, and the map of the topk best."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator, dtype=torch.float64) + 0.01
    chosen = torch.zeros(num_tokens, NUM_EXPERTS, dtype=torch.bool).scatter(1, scores.topk(topk, 1).indices, True)
    return scores.requires_grad_(), chosen


def _best(values: list[float], rows: list[int], limit: int) -> list[int]:
    """The rows of the largest values, NaN last, of equal ones the first."""
    return sorted(rows, key=lambda t: (-values[t] if values[t] == values[t] else INFINITY, t))[:limit]


def _kept_by_loop(probs: Tensor, chosen: Tensor, capacity: int, policy: str, pad: bool) -> Tensor:
    kept = torch.zeros_like(chosen)
    for e in range(chosen.shape[1]):
        rows = chosen[:, e].nonzero().flatten().tolist()
        kept[_best(probs[:, e].tolist(), rows, capacity) if policy == "probs" else rows[:capacity], e] = True
        if pad:
            free = (~kept[:, e]).nonzero().flatten().tolist()
            kept[free[: min(capacity, len(chosen)) - int(kept[:, e].sum())], e] = True
    return kept


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.01, 0.5, 1.0, 1.3, 9.0])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
def test_capacity_equals_the_loop(num_tokens: int, factor: float, policy: str, pad: bool) -> None:
    scores, chosen = _decision(num_tokens)
    before = (scores.detach().clone(), chosen.clone(), scores._version, chosen._version)
    probs = scores * chosen
    kept_probs, kept = apply_router_token_dropping(probs, chosen, 2, factor, policy, pad)
    capacity = math.ceil(num_tokens * 2 / NUM_EXPERTS * factor)
    assert torch.equal(kept, _kept_by_loop(scores, chosen, capacity, policy, pad))
    real = _kept_by_loop(scores, chosen, capacity, policy, pad=False)
    assert torch.equal(kept_probs, scores * real)
    (gradient,) = torch.autograd.grad((kept_probs * 3.0).sum(), scores)
    assert torch.equal(gradient, 3.0 * real)
    assert torch.equal(scores, before[0])
    assert torch.equal(chosen, before[1])
    assert (scores._version, chosen._version) == before[2:]


def test_hand_written_capacity() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.0, 0.8], [0.7, 0.3], [0.6, 0.0], [0.7, 0.0]])
    chosen = probs > 0
    for policy, rows in (("probs", [0, 2]), ("position", [0, 2])):  # of the two 0.7 the first
        kept = apply_router_token_dropping(probs, chosen, 1, 0.8, policy)[1]  # ceil(5 / 2 * 0.8) = 2
        assert kept[:, 0].nonzero().flatten().tolist() == rows
    kept_probs, kept = apply_router_token_dropping(probs.flip(0), chosen.flip(0), 1, 0.8, "position")
    assert kept[:, 0].tolist() == [True, True, False, False, False]
    assert kept_probs.tolist() == [
        [p if k else 0 for p, k in zip(*rows, strict=True)]
        for rows in zip(probs.flip(0).tolist(), kept.tolist(), strict=True)
    ]


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_padding_tokens_leave_the_capacity_of_the_valid_ones(policy: str) -> None:
    scores, chosen = _decision(33)
    padding = torch.rand(33, generator=torch.Generator().manual_seed(2)) < 0.4
    chosen = chosen & ~padding.unsqueeze(1)
    kept_probs, kept = apply_router_token_dropping(scores * chosen, chosen, 2, 0.7, policy, padding_mask=padding)
    valid_scores, valid_chosen = scores[~padding], chosen[~padding]
    alone_probs, alone = apply_router_token_dropping(valid_scores * valid_chosen, valid_chosen, 2, 0.7, policy)
    assert torch.equal(kept[~padding], alone)
    assert torch.equal(kept_probs[~padding], alone_probs)
    assert not kept[padding].any()


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_a_nan_row_drops_first_and_changes_no_other(policy: str) -> None:
    scores, chosen = _decision(12)
    spoilt = scores.detach().clone()
    spoilt[0] = NAN
    spoilt[0, 0] = INFINITY
    chosen[0] = torch.tensor([True, True, False, False, False])
    others = torch.cat([torch.zeros(1, NUM_EXPERTS, dtype=torch.bool), chosen[1:]])
    probs = torch.where(chosen, spoilt, 0.0)
    kept = apply_router_token_dropping(probs, chosen, 2, 0.7, policy)[1]
    if policy == "probs":
        without = apply_router_token_dropping(torch.where(others, spoilt, 0.0), others, 2, 0.7, policy)[1]
        assert torch.equal(kept[1:, 1:], without[1:, 1:])  # the column of the NaN too
    assert torch.equal(kept, _kept_by_loop(spoilt, chosen, math.ceil(12 * 2 / 5 * 0.7), policy, pad=False))


def _rounded_by_loop(weights: Tensor, chosen: Tensor, multiple: int, policy: str, padding: Tensor) -> Tensor:
    kept = torch.zeros_like(chosen)
    for e in range(chosen.shape[1]):
        rows = chosen[:, e].nonzero().flatten().tolist()
        others = [t for t in range(len(chosen)) if t not in rows and not padding[t]]
        below, rest = divmod(len(rows), multiple)
        up = {"up": rest > 0, "down": False, "nearest": rest >= multiple - multiple // 2}[policy]
        target = (below + up) * multiple if rows else 0
        if target > len(rows) + len(others):
            target = (len(rows) + len(others)) // multiple * multiple
        values = weights[:, e].tolist()
        order = _best(values, rows, len(rows)) + _best(values, others, len(others))
        kept[order[:target], e] = True
    return kept


@pytest.mark.parametrize("policy", ["nearest", "up", "down"])
@pytest.mark.parametrize("multiple", [1, 2, 3, 4, 16, 64])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33, 64])
def test_rounding_equals_the_loop(num_tokens: int, multiple: int, policy: str) -> None:
    for masked in (False, True):
        weights, chosen = _decision(num_tokens, seed=multiple)
        padding = torch.rand(num_tokens, generator=torch.Generator().manual_seed(2)) < 0.4
        padding = padding if masked else torch.zeros_like(padding)
        chosen = chosen & ~padding.unsqueeze(1)
        before = (weights.detach().clone(), chosen.clone())
        probs, kept = apply_token_rounding(weights, chosen, multiple, policy, padding_mask=padding if masked else None)
        assert torch.equal(kept, _rounded_by_loop(weights, chosen, multiple, policy, padding))
        counts, rounded = chosen.sum(0), kept.sum(0)
        assert (rounded % multiple == 0).all()
        assert ((counts - rounded).abs() < multiple).all()
        assert (rounded[counts == 0] == 0).all()
        assert not kept[padding].any()
        assert torch.equal(probs, weights * kept)
        (gradient,) = torch.autograd.grad((probs * 3.0).sum(), weights)
        assert torch.equal(gradient, 3.0 * kept)
        assert torch.equal(weights, before[0])
        assert torch.equal(chosen, before[1])


def test_hand_written_rounding() -> None:
    weights = torch.tensor([[0.9], [0.1], [0.5], [0.4], [0.2], [0.95], [0.3]])
    chosen = torch.tensor([[True], [True], [True], [False], [False], [False], [False]])
    for policy, multiple, rows in (
        ("up", 2, [0, 1, 2, 5]),  # the best token that did not choose the expert comes in, after 0.1 that did
        ("down", 2, [0, 2]),
        ("nearest", 2, [0, 1, 2, 5]),  # 3 is as near to 2 as to 4
        ("nearest", 7, []),
        ("up", 5, [0, 1, 2, 3, 5]),
        ("up", 4, [0, 1, 2, 5]),
    ):
        kept = apply_token_rounding(weights, chosen, multiple, policy)[1]
        assert kept.flatten().nonzero().flatten().tolist() == rows, (policy, multiple)


def test_places_are_stable_and_put_nan_last() -> None:
    scores = torch.tensor([[1.0], [NAN], [3.0], [1.0], [INFINITY], [-INFINITY]])
    everywhere = torch.ones(6, 1, dtype=torch.bool)
    assert rank_by_score(scores, everywhere).flatten().tolist() == [2, 4, 1, 3, 0, 5]
    first = torch.tensor([[True], [False], [False], [False], [False], [True]])
    second = torch.tensor([[False], [True], [True], [False], [False], [False]])
    assert rank_by_score(scores, first, second).flatten().tolist() == [0, 3, 2, 5, 4, 1]


def test_no_value_is_read_on_the_host() -> None:
    probs, chosen = torch.empty(9, 5, device="meta"), torch.empty(9, 5, device="meta", dtype=torch.bool)
    padding = torch.empty(9, device="meta", dtype=torch.bool)
    for policy in ("probs", "position"):
        for pad in (False, True):
            for mask in (None, padding):
                result = apply_router_token_dropping(probs, chosen, 2, 0.7, policy, pad, padding_mask=mask)
                assert [value.shape for value in result] == [(9, 5)] * 2
    assert apply_token_rounding(probs, chosen, 4, padding_mask=padding)[1].shape == (9, 5)


def test_refused_arguments() -> None:
    probs, chosen = _decision(7)
    for factor in (0.0, -1.0, INFINITY, NAN):
        with pytest.raises(ValueError, match=r"capacity_factor \(.*\) must be a positive, finite number"):
            apply_router_token_dropping(probs, chosen, 2, factor)
    with pytest.raises(ValueError, match=r"drop_policy \('first'\) must be 'probs' or 'position'"):
        apply_router_token_dropping(probs, chosen, 2, 1.0, "first")
    with pytest.raises(ValueError, match=r"policy \('even'\) must be one of 'nearest', 'up', 'down'"):
        apply_token_rounding(probs, chosen, 4, "even")
    with pytest.raises(ValueError, match=r"multiple \(0\) must be at least 1"):
        apply_token_rounding(probs, chosen, 0)
    assert get_capacity(10, 4, 1.1) == 3
    assert get_capacity(10, 4, 1.1, min_capacity=8) == 8


def test_results_are_close_in_fp32() -> None:
    scores, chosen = _decision(33)
    wide, _ = apply_router_token_dropping(scores * chosen, chosen, 2, 0.7)
    narrow, _ = apply_router_token_dropping(scores.float() * chosen, chosen, 2, 0.7)
    assert narrow.dtype == torch.float32
    assert_close(narrow, wide)
