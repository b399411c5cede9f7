"""Capacity and token rounding against a loop over experts in plain Python."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from router import apply_router_token_dropping, apply_token_rounding, get_capacity
from router.capacity import _capacity_of_valid, rank_by_score

NUM_EXPERTS = 5
INFINITY, NAN = float("inf"), float("nan")
TOKENS = [0, 1, 7, 33]


def _decision(num_tokens: int, topk: int = 2, *, ties: bool = False) -> tuple[Tensor, Tensor]:
    """Positive weights of all pairs, fp64, that require a gradient; the map of the topk best of each token.

    With ties the weights have four values only, and token 3 is NaN in every column but the first, where it is inf.
    """
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator, dtype=torch.float64) + 0.01
    routing_map = torch.zeros(num_tokens, NUM_EXPERTS, dtype=torch.bool)
    routing_map.scatter_(1, scores.topk(topk, 1).indices, True)
    if ties:
        scores = (scores * 4).ceil() / 4
        scores[3:4] = NAN
        scores[3:4, 0] = INFINITY
    return scores.requires_grad_(), routing_map


def _padding(num_tokens: int) -> Tensor:
    """[T] bool, True = padding: two of five tokens, the first among them."""
    return torch.tensor([t % 5 in (0, 3) for t in range(num_tokens)], dtype=torch.bool)


def _best_first(column: list[float], rows: list[int]) -> list[int]:
    """The rows with their largest values first, NaN last, among equals the first row first."""
    return sorted(rows, key=lambda t: (math.isnan(column[t]), 0.0 if math.isnan(column[t]) else -column[t], t))


def _dropped_by_loop(
    scores: list[list[float]], routed: list[list[bool]], limits: tuple[int, float], policy: str, padding: list[bool]
) -> list[list[bool]]:
    """The pairs that stay, by a loop over experts; limits: K and the factor."""
    topk, factor = limits
    num_valid = padding.count(False)
    capacity = math.ceil(num_valid * topk / NUM_EXPERTS * factor)
    stay = [[False] * NUM_EXPERTS for _ in routed]
    for e in range(NUM_EXPERTS):
        rows = [t for t in range(len(routed)) if routed[t][e] and not padding[t]]
        order = _best_first([row[e] for row in scores], rows) if policy == "probs" else rows
        for t in order[:capacity]:
            stay[t][e] = True
    return stay


def _padded_by_loop(stay: list[list[bool]], num_rows: int, padding: list[bool]) -> list[list[bool]]:
    """The pairs that stay and the free ones that fill each column up to num_rows, padding tokens last."""
    filled = [list(row) for row in stay]
    candidates = sorted(range(len(stay)), key=lambda t: (padding[t], t))
    for e in range(NUM_EXPERTS):
        for t in candidates:
            if not filled[t][e] and sum(row[e] for row in filled) < num_rows:
                filled[t][e] = True
    return filled


def _rounded_by_loop(
    weights: list[list[float]], routed: list[list[bool]], multiple: int, policy: str, padding: list[bool]
) -> list[list[bool]]:
    """The pairs after rounding, by a loop over experts that adds or drops one token at a time."""
    result = [[False] * NUM_EXPERTS for _ in routed]
    for e in range(NUM_EXPERTS):
        column = [row[e] for row in weights]
        valid = [t for t in range(len(routed)) if not padding[t]]
        inside = _best_first(column, [t for t in valid if routed[t][e]])
        outside = _best_first(column, [t for t in valid if not routed[t][e]])
        rest = len(inside) % multiple
        goes_up = rest > 0 and (policy == "up" or (policy == "nearest" and 2 * rest >= multiple))
        if goes_up and inside and len(inside) - rest + multiple <= len(valid):
            while len(inside) % multiple:
                inside.append(outside.pop(0))
        while len(inside) % multiple:
            inside.pop()
        for t in inside:
            result[t][e] = True
    return result


def _assert_result(result: tuple[Tensor, Tensor], scores: Tensor, weighted: list, expected_map: list) -> None:
    """The map is as expected, probs and their gradient are those of the weighted pairs and exactly 0 elsewhere."""
    probs, routing_map = result
    assert routing_map.tolist() == expected_map
    weights = torch.tensor(weighted, dtype=torch.bool).reshape(scores.shape)
    assert torch.equal(probs.nan_to_num(nan=-7.0), scores.masked_fill(~weights, 0.0).nan_to_num(nan=-7.0))
    assert probs.dtype == scores.dtype
    slopes = torch.arange(1.0, scores.numel() + 1, dtype=torch.float64).view_as(scores)
    (gradient,) = torch.autograd.grad(probs, scores, slopes)
    assert torch.equal(gradient, slopes * weights)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.01, 0.5, 1.0, 1.3, 9.0, 1e30])
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_dropping_equals_the_loop(num_tokens: int, factor: float, policy: str, ties: bool, masked: bool) -> None:
    scores, routed = _decision(num_tokens, ties=ties)
    mask = _padding(num_tokens) if masked else None
    padding = [False] * num_tokens if mask is None else mask.tolist()
    stay = _dropped_by_loop(scores.tolist(), routed.tolist(), (2, factor), policy, padding)
    result = apply_router_token_dropping(scores, routed, 2, factor, policy, padding_mask=mask)
    _assert_result(result, scores, stay, stay)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.01, 0.5, 1.0, 2.0, 9.0, 1e30])
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_padding_to_capacity_equals_the_loop(num_tokens: int, factor: float, policy: str, masked: bool) -> None:
    scores, routed = _decision(num_tokens, ties=True)
    mask = _padding(num_tokens) if masked else None
    padding = [False] * num_tokens if mask is None else mask.tolist()
    num_rows = min(math.ceil(num_tokens * 2 / NUM_EXPERTS * factor), num_tokens)
    valid_routed = routed & ~torch.tensor(padding, dtype=torch.bool).unsqueeze(1)
    # The capacity comes from all tokens here: the loop is told of no padding, only of no routed padding.
    stay = _dropped_by_loop(scores.tolist(), valid_routed.tolist(), (2, factor), policy, [False] * num_tokens)
    filled = _padded_by_loop(stay, num_rows, padding)
    result = apply_router_token_dropping(scores, routed, 2, factor, policy, True, padding_mask=mask)
    _assert_result(result, scores, stay, filled)
    assert result[1].sum(0).tolist() == [num_rows] * NUM_EXPERTS


def test_hand_written_dropping() -> None:
    # Capacity ceil(6 * 1 / 2 * 0.7) = 3. Expert 0 has five tokens: by probs 1, 4 and of the two 0.6 the first.
    probs = torch.tensor([[0.2, 0.0], [0.9, 0.0], [0.6, 0.0], [0.0, 0.5], [0.7, 0.0], [0.6, 0.0]])
    routed = probs > 0
    kept_probs, kept = apply_router_token_dropping(probs, routed, 1, 0.7, "probs")
    assert kept.long().tolist() == [[0, 0], [1, 0], [1, 0], [0, 1], [1, 0], [0, 0]]
    assert torch.equal(kept_probs, torch.tensor([[0.0, 0], [0.9, 0], [0.6, 0], [0, 0.5], [0.7, 0], [0, 0]]))
    kept_probs, kept = apply_router_token_dropping(probs, routed, 1, 0.7, "position")
    assert kept.long().tolist() == [[1, 0], [1, 0], [1, 0], [0, 1], [0, 0], [0, 0]]
    assert torch.equal(kept_probs, torch.tensor([[0.2, 0.0], [0.9, 0], [0.6, 0], [0, 0.5], [0, 0], [0, 0]]))
    padded_probs, padded = apply_router_token_dropping(probs, routed, 1, 0.7, "position", True)
    assert padded.long().tolist() == [[1, 1], [1, 1], [1, 0], [0, 1], [0, 0], [0, 0]]
    assert torch.equal(padded_probs, kept_probs)


def test_hand_written_padding_to_capacity_takes_padding_tokens_last() -> None:
    # Capacity of all four tokens: ceil(4 / 2 * 1.5) = 3. Tokens 0 and 2 are padding, 0 wrongly routed.
    probs = torch.tensor([[0.9, 0.0], [0.0, 0.3], [0.0, 0.0], [0.4, 0.0]])
    padding = torch.tensor([True, False, True, False])
    kept_probs, kept = apply_router_token_dropping(probs, probs > 0, 1, 1.5, "probs", True, padding_mask=padding)
    assert kept.long().tolist() == [[1, 1], [1, 1], [0, 0], [1, 1]]  # token 0 is all that is left: prob 0
    assert torch.equal(kept_probs, torch.tensor([[0.0, 0.0], [0.0, 0.3], [0.0, 0.0], [0.4, 0.0]]))
    kept = apply_router_token_dropping(probs, probs > 0, 1, 1.0, "probs", True, padding_mask=padding)[1]
    assert kept.long().tolist() == [[0, 0], [1, 1], [0, 0], [1, 1]]


def test_position_is_first_come_with_the_counts_of_a_top_k_over_the_map() -> None:
    """Differs: Megatron-Core takes a top-k over the map's zeros and ones: as many tokens, but any of them."""
    routed = _decision(33)[1]
    kept = apply_router_token_dropping(routed.double(), routed, 2, 0.7, "position")[1]
    capacity = math.ceil(33 * 2 / NUM_EXPERTS * 0.7)
    of_any = torch.zeros_like(routed).scatter(0, routed.int().topk(capacity, 0).indices, True) & routed
    assert kept.sum(0).tolist() == of_any.sum(0).tolist()
    for e in range(NUM_EXPERTS):
        arrivals = routed[:, e].nonzero().flatten().tolist()
        assert kept[:, e].nonzero().flatten().tolist() == arrivals[:capacity]


Limit = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
LIMITS: dict[str, Limit] = {
    "probs": lambda p, m, pad: apply_router_token_dropping(p, m, 2, 0.7, "probs", padding_mask=pad),
    "position": lambda p, m, pad: apply_router_token_dropping(p, m, 2, 0.7, "position", padding_mask=pad),
    "filled": lambda p, m, pad: apply_router_token_dropping(p, m, 2, 0.7, "probs", True, padding_mask=pad),
    "up": lambda p, m, pad: apply_token_rounding(p, m, 4, "up", padding_mask=pad),
    "nearest": lambda p, m, pad: apply_token_rounding(p, m, 4, "nearest", padding_mask=pad),
}


@pytest.mark.parametrize("limit", [name for name in LIMITS if name != "filled"])  # that one counts all tokens
def test_valid_tokens_get_what_they_would_get_alone(limit: str) -> None:
    scores, routed = _decision(33)
    valid = ~_padding(33)
    alone_probs, alone = LIMITS[limit](scores[valid], routed[valid], None)
    for garbage in (0.0, NAN, INFINITY, 50.0):
        spoilt = torch.where(valid.unsqueeze(1), scores, garbage)
        probs, kept = LIMITS[limit](spoilt, routed | ~valid.unsqueeze(1), ~valid)  # padding even routed everywhere
        assert torch.equal(kept[valid], alone)
        assert torch.equal(probs[valid], alone_probs)
        assert not kept[~valid].any()
        assert not probs[~valid].any()
    nothing = LIMITS[limit](scores, routed, torch.ones(33, dtype=torch.bool))
    assert not nothing[0].any()
    assert not nothing[1].any()


@pytest.mark.parametrize("limit", LIMITS)
def test_a_nan_row_is_no_more_to_others_than_the_worst_row(limit: str) -> None:
    scores, routed = _decision(33)
    worst, spoilt = scores.detach().clone(), scores.detach().clone()
    worst[4], spoilt[4] = -INFINITY, NAN
    expected_probs, expected = LIMITS[limit](worst, routed, None)
    probs, kept = LIMITS[limit](spoilt, routed, None)
    assert torch.equal(kept, expected)
    others = torch.arange(33) != 4
    assert torch.equal(probs[others], expected_probs[others])
    assert not probs[4][~kept[4]].any()  # 0, not NaN * 0


@pytest.mark.parametrize("num_experts", [1, 3, 49, 75, 77])
@pytest.mark.parametrize("factor", [1.0, 1.1, 0.3])
def test_capacity_of_a_count_on_the_device_is_exact(num_experts: int, factor: float) -> None:
    """525 / 75 is 7, but 525 * (1 / 75) is more and would be rounded up to 8."""
    for num_valid in (0, 1, 49, 98, 525, 539, 1050):
        padding = torch.ones(1100, dtype=torch.bool)
        padding[:num_valid] = False
        for topk in (1, 2):
            expected = get_capacity(num_valid * topk, num_experts, factor)
            assert _capacity_of_valid(padding, topk, num_experts, factor).item() == expected


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("policy", ["nearest", "up", "down"])
@pytest.mark.parametrize("multiple", [1, 2, 3, 4, 16, 64])
@pytest.mark.parametrize("num_tokens", [*TOKENS, 64])
def test_rounding_equals_the_loop(num_tokens: int, multiple: int, policy: str, ties: bool, masked: bool) -> None:
    weights, routed = _decision(num_tokens, ties=ties)
    routed[:, 4] = False  # an expert without tokens
    mask = _padding(num_tokens) if masked else None
    padding = [False] * num_tokens if mask is None else mask.tolist()
    expected = _rounded_by_loop(weights.tolist(), routed.tolist(), multiple, policy, padding)
    result = apply_token_rounding(weights, routed, multiple, policy, padding_mask=mask)
    _assert_result(result, weights, expected, expected)
    counts = (routed & ~torch.tensor(padding, dtype=torch.bool).unsqueeze(1)).sum(0)
    rounded = result[1].sum(0)
    assert not (rounded % multiple).any()
    assert ((counts - rounded).abs() < multiple).all()
    assert not rounded[counts == 0].any()


def test_hand_written_rounding() -> None:
    weights = torch.tensor([[0.9], [0.1], [0.5], [0.4], [0.2], [0.95], [0.3]])
    routed = torch.tensor([[True], [True], [True], [False], [False], [False], [False]])
    for policy, multiple, rows in (
        ("up", 2, [0, 1, 2, 5]),  # the best token that did not choose the expert comes in, after 0.1 that did
        ("down", 2, [0, 2]),
        ("nearest", 2, [0, 1, 2, 5]),  # 3 is as near to 2 as to 4
        ("nearest", 7, []),
        ("up", 5, [0, 1, 2, 3, 5]),
        ("up", 8, []),  # of seven tokens no eight
        ("nearest", 1, [0, 1, 2]),
    ):
        probs, kept = apply_token_rounding(weights, routed, multiple, policy)
        assert kept.flatten().nonzero().flatten().tolist() == rows, (policy, multiple)
        assert torch.equal(probs, weights * kept)
    last = torch.tensor([False, False, False, False, False, True, False])  # 5 is padding: 3 comes in
    kept = apply_token_rounding(weights, routed, 4, "up", padding_mask=last)[1]
    assert kept.flatten().nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_places_are_stable_and_put_nan_last() -> None:
    scores = torch.tensor([[1.0], [NAN], [3.0], [1.0], [INFINITY], [-INFINITY]])
    everywhere = torch.ones(6, 1, dtype=torch.bool)
    assert rank_by_score(scores, everywhere).flatten().tolist() == [2, 5, 1, 3, 0, 4]
    first = torch.tensor([[True], [True], [False], [False], [False], [True]])
    assert rank_by_score(scores, first).flatten().tolist() == [0, 2, 4, 5, 3, 1]
    second = torch.tensor([[False], [False], [True], [False], [False], [False]])
    assert rank_by_score(scores, first, second).flatten().tolist() == [0, 2, 3, 5, 4, 1]


@pytest.mark.parametrize("limit", LIMITS)
def test_arguments_stay_as_they_are_and_results_have_their_own_storage(limit: str) -> None:
    scores, routed = _decision(33)
    arguments = (scores.detach(), routed, _padding(33))
    before = [(value.clone(), value._version, value.data_ptr()) for value in arguments]
    results = [*LIMITS[limit](*arguments), *LIMITS[limit](arguments[0], routed, None)]
    for value, (copy, version, address) in zip(arguments, before, strict=True):
        assert torch.equal(value, copy)
        assert (value._version, value.data_ptr()) == (version, address)
        assert all(result.data_ptr() != address for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_keep_the_dtype_and_the_bits(dtype: torch.dtype) -> None:
    scores, routed = _decision(33)
    narrow = scores.detach().to(dtype)
    for limit in LIMITS.values():
        probs, kept = limit(narrow, routed, None)
        assert probs.dtype == dtype
        wide_probs, wide_kept = limit(narrow.double(), routed, None)
        assert torch.equal(probs.double(), wide_probs)
        assert torch.equal(kept, wide_kept)


def test_no_value_is_read_on_the_host() -> None:
    probs, routed = torch.empty(9, 5, device="meta"), torch.empty(9, 5, device="meta", dtype=torch.bool)
    for mask in (None, torch.empty(9, device="meta", dtype=torch.bool)):
        for limit in LIMITS.values():
            kept_probs, kept = limit(probs, routed, mask)
            assert kept_probs.is_meta
            assert kept_probs.shape == kept.shape == (9, 5)


def test_get_capacity() -> None:
    assert [get_capacity(10, 4, factor) for factor in (0.1, 0.4, 0.5, 1.1, 2.0)] == [1, 1, 2, 3, 5]
    assert get_capacity(0, 4, 1.0) == 0
    assert get_capacity(10, 4, 1.1, min_capacity=8) == 8
    assert get_capacity(10, 4, 1.1, min_capacity=2) == 3
    for factor in (0.0, -1.0, INFINITY, NAN):
        with pytest.raises(ValueError, match=r"capacity_factor \(.*\) must be a positive, finite number"):
            get_capacity(10, 4, factor)
    with pytest.raises(ValueError, match=r"num_experts \(0\) must be at least 1"):
        get_capacity(10, 0, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capacity_factor": -1.0}, r"capacity_factor \(-1.0\) must be a positive, finite number"),
        ({"drop_policy": "first"}, r"drop_policy \('first'\) must be 'probs' or 'position'"),
        ({"router_topk": 0}, r"router_topk \(0\) must lie between 1 and the number of experts \(5\)"),
        ({"router_topk": 6}, r"router_topk \(6\) must lie between 1 and the number of experts \(5\)"),
        ({"routing_probs": torch.zeros(7, 4)}, r"routing_probs \(\[7, 4\]\) and routing_map \(\[7, 5\]\) must both"),
        ({"routing_probs": torch.zeros(7, 5).long()}, r"routing_probs \(torch.int64\) must have a float dtype"),
        ({"routing_map": torch.zeros(7, 5)}, r"routing_map \(torch.float32\) be bool; pass .* routing_map.bool\(\)"),
        (
            {"padding_mask": torch.zeros(5).bool()},
            r"padding_mask \(\[5\], torch.bool\) must be bool of the shape \[7\]",
        ),
        ({"padding_mask": torch.zeros(7)}, r"padding_mask \(\[7\], torch.float32\) must be bool of the shape \[7\]"),
    ],
)
def test_dropping_refuses(change: dict, message: str) -> None:
    scores, routed = _decision(7)
    arguments = {"routing_probs": scores, "routing_map": routed, "router_topk": 2, "capacity_factor": 1.0} | change
    with pytest.raises(ValueError, match=message):
        apply_router_token_dropping(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "even"}, r"policy \('even'\) must be one of 'nearest', 'up', 'down'"),
        ({"multiple": 0}, r"multiple \(0\) must be at least 1"),
        ({"weights": torch.zeros(35)}, r"weights \(\[35\]\) and routing_map \(\[7, 5\]\) must both have the shape"),
        (
            {"routing_map": torch.zeros(7, 5).long()},
            r"weights \(torch.float64\) .* routing_map \(torch.int64\) be bool",
        ),
        ({"padding_mask": torch.zeros(7, 1).bool()}, r"padding_mask \(\[7, 1\], torch.bool\) must be bool"),
    ],
)
def test_rounding_refuses(change: dict, message: str) -> None:
    weights, routed = _decision(7)
    with pytest.raises(ValueError, match=message):
        apply_token_rounding(**({"weights": weights, "routing_map": routed, "multiple": 4} | change))
