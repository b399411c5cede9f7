"""Balancing without a loss: sinkhorn, quantile balancing and the expert bias, against plain Python."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from router import get_updated_expert_bias, qb_dual_update, sinkhorn
from tests.ranks import run_ranks
from tests.tolerances import assert_close

NAN, INFINITY = float("nan"), float("inf")


def _cost(num_tokens: int, num_experts: int, seed: int = 1) -> Tensor:
    return torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("sizes", [(1, 3), (7, 5), (40, 6)], ids=str)
def test_sinkhorn_gives_equal_rows_and_columns(sizes: tuple[int, int]) -> None:
    cost = _cost(*sizes)
    plan = sinkhorn(cost, tol=1e-13)
    assert_close(plan.sum(1), torch.full((sizes[0],), 1 / sizes[0], dtype=torch.float64), torch.float32)
    assert_close(plan.sum(0), torch.full((sizes[1],), 1 / sizes[1], dtype=torch.float64), torch.float32)
    ratios = plan / cost.exp()  # rows and columns were scaled, nothing else
    assert_close(ratios / ratios[:, :1] * ratios[:1, :1], ratios[:1].expand_as(ratios), torch.float32)


def _sinkhorn_by_loop(cost: Tensor, tol: float) -> Tensor:
    kernel = [[math.exp(value) for value in row] for row in cost.tolist()]
    num_rows, num_columns = cost.shape
    columns, change = [1.0] * num_columns, math.inf
    while change > tol:
        rows = [1 / num_rows / (sum(map(math.prod, zip(row, columns, strict=True))) + 1e-8) for row in kernel]
        sums = [sum(row[e] * factor for row, factor in zip(kernel, rows, strict=True)) for e in range(num_columns)]
        last, columns = columns, [1 / num_columns / (value + 1e-8) for value in sums]
        change = sum(abs(a - b) for a, b in zip(last, columns, strict=True)) / num_columns
    plan = [[v * c * r for v, c in zip(row, columns, strict=True)] for row, r in zip(kernel, rows, strict=True)]
    return torch.tensor(plan, dtype=torch.float64)


@pytest.mark.parametrize("tol", [1e-1, 1e-4])
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_sinkhorn_ends_where_the_loop_ends(spread: float, tol: float) -> None:
    cost = _cost(12, 5) * spread
    assert_close(sinkhorn(cost, tol), _sinkhorn_by_loop(cost, tol))


def test_sinkhorn_bears_any_cost() -> None:
    cost = _cost(9, 4)
    expected = sinkhorn(cost)
    assert_close(sinkhorn(cost + 1000.0), expected, torch.float32)
    far_below = sinkhorn(cost - 1000.0)
    assert_close(far_below, expected, torch.float16)  # the guard of the divisions weighs more there
    assert torch.equal(far_below.argsort(1), expected.argsort(1))
    spoilt = torch.cat([cost[:3], torch.tensor([[NAN, 0, 0, 0], [INFINITY, 0, 0, 0], [-INFINITY] * 4]), cost[3:]])
    plan = sinkhorn(spoilt)
    assert not plan[3:6].any()
    assert_close(torch.cat([plan[:3], plan[6:]]), expected)
    assert sinkhorn(cost[:0]).shape == (0, 4)
    one_expert_alone = torch.full((6, 3), -INFINITY).index_fill(1, torch.tensor([1]), 0.0)
    assert sinkhorn(one_expert_alone).isfinite().all()  # never equal columns; it ends


def _quantile_by_loop(scores: Tensor, k: int, beta: Tensor) -> tuple[list[set[int]], list[float]]:
    choices, thresholds = [], []
    for row in (scores - beta).tolist():
        order = sorted(range(len(row)), key=lambda e, row=row: -row[e])
        choices.append(set(order[:k]))
        thresholds.append(row[order[k]])
    place = len(scores) * k // scores.shape[1]
    columns = zip(*scores.tolist(), strict=True)
    margins = [sorted((s - a for s, a in zip(column, thresholds, strict=True)), reverse=True) for column in columns]
    return choices, [column[place] for column in margins]


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [1, 10, 33])
def test_quantile_equals_the_loop(num_tokens: int, k: int) -> None:
    scores, beta = _cost(num_tokens, 5), torch.linspace(-0.5, 0.5, 5)
    ids, quantile = qb_dual_update(scores, k, beta)
    choices, expected = _quantile_by_loop(scores, k, beta)
    assert [set(row) for row in ids.tolist()] == choices
    assert_close(quantile, torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(qb_dual_update(scores, k, beta, update_beta=False)[1], beta)


def test_quantile_balances_the_load() -> None:
    scores, beta = _cost(400, 8) + torch.linspace(-2, 2, 8), torch.zeros(8)
    loads = []
    for _ in range(30):
        ids, quantile = qb_dual_update(scores, 2, beta)
        loads.append(ids.flatten().bincount(minlength=8))
        beta = quantile - quantile.mean()
    assert loads[0].max() > 250
    assert loads[-1].max() <= 110  # 100 is even


def test_quantile_of_valid_rows_alone() -> None:
    scores, beta = _cost(20, 5), torch.zeros(5)
    padding = torch.rand(20, generator=torch.Generator().manual_seed(2)) < 0.4
    spoilt = scores.masked_fill(padding.unsqueeze(1), NAN)
    ids, quantile = qb_dual_update(spoilt, 2, beta, padding_mask=padding)
    alone_ids, alone = qb_dual_update(scores[~padding], 2, beta)
    assert torch.equal(ids[~padding], alone_ids)
    assert torch.equal(quantile, alone)
    everything = torch.ones(20, dtype=torch.bool)
    assert torch.equal(qb_dual_update(scores, 2, beta, padding_mask=everything)[1], beta.double())
    assert torch.equal(qb_dual_update(scores[:0], 2, beta)[1], beta)


@pytest.mark.parametrize("spoiler", [NAN, INFINITY, -INFINITY])
def test_rows_that_are_not_finite_have_no_say_in_the_quantile(spoiler: float) -> None:
    scores, beta = _cost(20, 5), torch.linspace(-0.5, 0.5, 5)
    spoilt = scores.clone()
    spoilt[::3, 1] = spoiler
    is_whole = torch.arange(20) % 3 != 0
    ids, quantile = qb_dual_update(spoilt, 2, beta)
    alone_ids, alone = qb_dual_update(scores[is_whole], 2, beta)
    assert torch.equal(ids[is_whole], alone_ids)
    assert torch.equal(quantile, alone)
    assert torch.equal(qb_dual_update(torch.full((6, 5), spoiler), 2, beta)[1], beta)


def test_quantile_refuses_a_choice_of_all_experts() -> None:
    scores, beta = _cost(20, 5), torch.zeros(5)
    for k in (0, 5):
        with pytest.raises(ValueError, match=rf"k \({k}\) must lie between 1 and the number of experts \(5\) - 1"):
            qb_dual_update(scores, k, beta)


def test_bias_moves_towards_the_mean_load_by_hand() -> None:
    counts, bias = torch.tensor([7, 1, 4, 4]), torch.tensor([0.5, 0.0, -1.0, 1.0])
    updated = get_updated_expert_bias(counts, bias, 0.25)
    assert updated.tolist() == [0.25, 0.25, -1.0, 1.0]
    assert counts.tolist() == [7, 1, 4, 4]
    thirds = get_updated_expert_bias(torch.tensor([2, 1, 1]), torch.zeros(3), 1.0)  # the mean is 4/3
    assert thirds.tolist() == [-1.0, 1.0, 1.0]
    assert get_updated_expert_bias(torch.zeros(3, dtype=torch.int64), bias[:3], 0.25).tolist() == bias[:3].tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_bias_is_fp32_and_exact_whatever_the_dtype_of_the_counts(dtype: torch.dtype) -> None:
    counts = torch.tensor([[2**24 + 2, 2**24, 2**24 + 1], [5, 5, 5]]).to(dtype)  # two layers
    bias = get_updated_expert_bias(counts, torch.zeros(2, 3), 0.5)
    assert bias.dtype == torch.float32
    middle = 0.5 if dtype == torch.float32 else 0.0  # fp32 cannot hold 2**24 + 1
    assert bias.tolist() == [[-0.5, 0.5, middle], [0.0, 0.0, 0.0]]


def _bias_over_ranks() -> tuple[Tensor, Tensor]:
    counts = torch.tensor([[9, 0, 3], [0, 5, 1], [2, 2, 2], [0, 0, 1]])[dist.get_rank()]
    return get_updated_expert_bias(counts, torch.zeros(3), 1.0, dist.group.WORLD), counts


@pytest.mark.parametrize(("world_size", "signs"), [(1, [-1, 1, 1]), (2, [-1, 1, 1]), (4, [-1, 1, 1])])
def test_bias_sums_the_counts_of_all_ranks(world_size: int, signs: list[int]) -> None:
    for rank, (bias, counts) in enumerate(run_ranks(_bias_over_ranks, world_size)):
        assert bias.tolist() == signs
        assert counts.tolist() == [[9, 0, 3], [0, 5, 1], [2, 2, 2], [0, 0, 1]][rank]
