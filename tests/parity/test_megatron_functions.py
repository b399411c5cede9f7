"""The router's functions against megatron-core's of the same names, value and gradient, over their options.

Where ours differ on purpose, `test_megatron_differences.py` says how.
"""

import types
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import router as ours
from tests.parity.megatron import draw
from tests.tolerances import assert_close, tolerance

SIZES = st.tuples(st.integers(1, 40), st.integers(0, 1000))  # T, seed
SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
WIDE = [torch.float32, torch.float64]
NARROW = [torch.bfloat16, torch.float16]


def logits_of(num_tokens: int, num_experts: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[T, E] logits, no two of a row alike, in narrow dtypes neither: top-k takes any of equal scores."""
    if dtype in WIDE:
        return (draw(num_tokens, num_experts, seed=seed).to(dtype) * 2).requires_grad_()
    steps = draw(num_tokens, num_experts, seed=seed).argsort(-1)  # exact in both
    return (steps * 0.25 - num_experts / 8).to(dtype).requires_grad_()


def gradient(value: Tensor, leaf: Tensor) -> Tensor:
    """The gradient of a weighted sum of the value."""
    weight = draw(*value.shape, seed=5) if value.dim() else torch.ones(())
    return torch.autograd.grad((value * weight.to(value.dtype)).sum(), leaf, retain_graph=True)[0]


def assert_close_gradients(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Compare gradients that may cancel to rounding errors: the scale is at least that of the probs."""
    assert actual.dtype == expected.dtype
    allowed = tolerance(dtype or actual.dtype) * max(1.0, expected.abs().max().item())
    assert (actual - expected).abs().max() <= allowed


@st.composite
def routing_options(draw_from: st.DrawFn, *, takes_groups: bool = True) -> tuple[int, dict[str, Any]]:
    """Draw a number of experts and options that both sides take."""
    num_groups, size = draw_from(st.sampled_from([1, 2, 4])), draw_from(st.integers(1, 8))
    score_function = draw_from(st.sampled_from(SCORES))
    group_topk = draw_from(st.none() | st.integers(1, num_groups)) if takes_groups else None
    if group_topk is None:
        topk = draw_from(st.integers(1, num_groups * size))
    else:
        topk = draw_from(st.integers(group_topk, group_topk * size))  # Megatron sums topk // group_topk of a group
    options: dict[str, Any] = {"topk": topk, "score_function": score_function}
    if score_function == "softmax":
        options["use_pre_softmax"] = topk == 1 or draw_from(st.booleans())
    elif draw_from(st.booleans()):
        options["expert_bias"] = draw(num_groups * size, seed=draw_from(st.integers(0, 99))) * 0.5
    if group_topk is not None:
        options |= {"num_groups": num_groups, "group_topk": group_topk}
    options["scaling_factor"] = draw_from(st.sampled_from([None, 0.5, 2.5]))
    return num_groups * size, options


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", WIDE + NARROW, ids=str)
@settings(max_examples=150)
@given(case=routing_options(), size=SIZES)
def test_topk_routing_with_score_function(
    theirs: types.ModuleType, dtype: torch.dtype, fused: bool, case: tuple[int, dict[str, Any]], size: tuple[int, int]
) -> None:
    (num_experts, options), (num_tokens, seed) = case, size
    logits = logits_of(num_tokens, num_experts, seed, dtype)
    expected, expected_map = theirs.topk_routing_with_score_function(logits, **options)
    probs, routing_map = ours.topk_routing_with_score_function(logits, **options, fused=fused)
    assert torch.equal(routing_map, expected_map)
    assert probs.dtype == expected.dtype == dtype
    known_to = torch.float32 if dtype == torch.float64 else dtype  # theirs computes in fp32
    assert_close(probs, expected, known_to, what="probs")
    assert_close_gradients(gradient(probs, logits), gradient(expected, logits), known_to)


@pytest.mark.parametrize("fused", [False, True])
@given(case=routing_options(takes_groups=False), size=SIZES)
def test_precomputed_indices(
    theirs: types.ModuleType, fused: bool, case: tuple[int, dict[str, Any]], size: tuple[int, int]
) -> None:
    (num_experts, options), (num_tokens, seed) = case, size
    logits = logits_of(num_tokens, num_experts, seed)
    ids = draw(num_tokens, num_experts, seed=seed + 1).argsort(-1)[:, : options["topk"]]
    expected, expected_map = theirs.topk_routing_with_score_function(logits, **options, precomputed_indices=ids)
    probs, routing_map = ours.topk_routing_with_score_function(logits, **options, precomputed_indices=ids, fused=fused)
    assert torch.equal(routing_map, expected_map)
    assert_close(probs, expected)
    assert_close_gradients(gradient(probs, logits), gradient(expected, logits))


@given(size=SIZES, num_groups=st.sampled_from([1, 2, 4]), group_size=st.integers(1, 6), data=st.data())
def test_group_limited_topk(
    theirs: types.ModuleType, size: tuple[int, int], num_groups: int, group_size: int, data: st.DataObject
) -> None:
    num_tokens, seed = size
    group_topk = data.draw(st.integers(1, num_groups))
    topk = data.draw(st.integers(group_topk, group_topk * group_size))
    scores = (draw(num_tokens, num_groups * group_size, seed=seed) - 1).requires_grad_()  # mostly negative
    arguments = (scores, topk, num_tokens, num_groups * group_size, num_groups, group_topk)
    values, ids = ours.group_limited_topk(*arguments)
    expected_values, expected_ids = theirs.group_limited_topk(*arguments)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(values, expected_values)
    assert torch.equal(gradient(values, scores), gradient(expected_values, scores))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@settings(max_examples=100)
@given(size=SIZES, score_function=st.sampled_from(SCORES), num_experts=st.integers(1, 17), data=st.data())
def test_scores_and_the_loss_of_them(
    theirs: types.ModuleType,
    dtype: torch.dtype,
    masked: bool,
    fused: bool,
    size: tuple[int, int],
    score_function: str,
    num_experts: int,
    data: st.DataObject,
) -> None:
    num_tokens, seed = size
    topk = data.draw(st.integers(1, num_experts))
    logits = logits_of(num_tokens, num_experts, seed, dtype)
    padding = draw(num_tokens, seed=seed + 1) > 0.5 if masked else None
    expected_map, expected = theirs.compute_routing_scores_for_aux_loss(
        logits, topk, score_function, padding_mask=padding
    )
    routing_map, scores = ours.compute_routing_scores_for_aux_loss(logits, topk, score_function, fused, padding)
    assert torch.equal(routing_map, expected_map)
    assert_close(scores, expected, torch.float32)
    assert_close_gradients(gradient(scores, logits), gradient(expected, logits), min_dtype(dtype))
    counts = routing_map.sum(0) + torch.arange(num_experts)  # those of other ranks
    num_valid = 3 + (num_tokens if padding is None else int((~padding).sum()))
    arguments = (counts, num_valid, topk, num_experts, 0.3)
    loss = ours.switch_load_balancing_loss_func(scores, *arguments)
    expected_loss = theirs.switch_load_balancing_loss_func(expected, *arguments)
    assert_close(loss, expected_loss, torch.float32)
    assert_close_gradients(gradient(loss, logits), gradient(expected_loss, logits), min_dtype(dtype))


def min_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to which a gradient of logits is known: theirs computes in fp32."""
    return torch.float32 if dtype == torch.float64 else dtype


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@given(num_tokens=st.integers(1, 40), num_experts=st.integers(1, 17), seed=st.integers(0, 1000))
def test_z_loss_func(
    theirs: types.ModuleType, dtype: torch.dtype, masked: bool, num_tokens: int, num_experts: int, seed: int
) -> None:
    logits = logits_of(num_tokens, num_experts, seed, dtype)
    padding = draw(num_tokens, seed=seed + 1) > 0.5 if masked else None  # often all of few tokens
    z_loss, expected = (side.z_loss_func(logits, 0.3, padding_mask=padding) for side in (ours, theirs))
    assert_close(z_loss, expected)
    assert_close_gradients(gradient(z_loss, logits), gradient(expected, logits))


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@given(
    num_tokens=st.integers(24, 60),
    num_experts=st.integers(1, 17),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.1, 1.0, 2.0]),
    tol=st.sampled_from([1e-4, 1e-2]),
)
def test_sinkhorn(
    theirs: types.ModuleType,
    dtype: torch.dtype,
    num_tokens: int,
    num_experts: int,
    seed: int,
    spread: float,
    tol: float,
) -> None:
    cost = draw(num_tokens, num_experts, seed=seed).to(dtype) * spread
    assert_close(ours.sinkhorn(cost, tol), theirs.sinkhorn(cost, tol))


@given(tiles=st.integers(1, 30), topk=st.integers(1, 5), seed=st.integers(0, 99), update=st.booleans())
def test_qb_dual_update(theirs: types.ModuleType, tiles: int, topk: int, seed: int, update: bool) -> None:
    num_experts = 6
    scores, beta = draw(tiles * num_experts, num_experts, seed=seed), draw(num_experts, seed=seed + 1) * 0.3
    ids, quantile = ours.qb_dual_update(scores, topk, beta, update)
    expected_ids, expected_quantile = theirs.qb_dual_update(scores, topk, beta, update)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(quantile, expected_quantile)


@given(
    slots=st.integers(0, 500),
    num_experts=st.integers(1, 64),
    factor=st.floats(0.1, 4.0),
    lowest=st.none() | st.integers(1, 9),
)
def test_get_capacity(
    theirs: types.ModuleType, slots: int, num_experts: int, factor: float, lowest: int | None
) -> None:
    arguments = (slots, num_experts, factor, lowest)
    assert ours.get_capacity(*arguments) == theirs.get_capacity(*arguments)


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("policy", ["probs", "position"])
@given(num_tokens=st.integers(1, 40), topk=st.integers(1, 5), factor=st.floats(0.2, 4.0), seed=st.integers(0, 1000))
def test_apply_router_token_dropping(
    theirs: types.ModuleType, policy: str, pad: bool, num_tokens: int, topk: int, factor: float, seed: int
) -> None:
    logits = logits_of(num_tokens, 6, seed)
    probs, chosen = ours.topk_routing_with_score_function(logits, topk, score_function="sigmoid")
    arguments = (probs, chosen, topk, factor, policy, pad)
    expected, expected_map = theirs.apply_router_token_dropping(*arguments)
    kept, kept_map = ours.apply_router_token_dropping(*arguments)
    # Which of equal values theirs takes is open: with "position" all are equal, and so are the rows that pad.
    assert torch.equal(kept_map.sum(0), expected_map.sum(0))
    assert torch.equal(kept, probs * kept_map)
    if policy == "probs":
        assert torch.equal(kept_map & chosen, expected_map & chosen)
        assert torch.equal(kept, expected)
        assert_close_gradients(gradient(kept, logits), gradient(expected, logits))
    if not pad:
        assert not (kept_map & ~chosen).any()


@given(seed=st.integers(0, 99), num_experts=st.integers(1, 9), rate=st.sampled_from([1e-3, 0.1]), rows=st.booleans())
def test_get_updated_expert_bias(
    theirs: types.ModuleType, seed: int, num_experts: int, rate: float, rows: bool
) -> None:
    shape = (3, num_experts) if rows else (num_experts,)
    counts = torch.randint(5, shape, generator=torch.Generator().manual_seed(seed))
    bias = draw(*shape, seed=seed)
    updated = ours.get_updated_expert_bias(counts, bias, rate, dist.group.WORLD)
    assert torch.equal(updated, ours.get_updated_expert_bias(counts.float(), bias, rate))
    assert torch.equal(updated, theirs.get_updated_expert_bias(counts.float(), bias, rate, dist.group.WORLD))


@given(seed=st.integers(0, 99), tiles=st.integers(0, 5), multiple=st.sampled_from([1, 4, 8]), topk=st.integers(1, 4))
def test_pad_routing_map(theirs: types.ModuleType, seed: int, tiles: int, multiple: int, topk: int) -> None:
    logits = draw(tiles * multiple, 6, seed=seed)
    _, chosen = ours.topk_routing_with_score_function(logits, topk, score_function="sigmoid")
    padded = ours.pad_routing_map(chosen, multiple)
    assert torch.equal(padded, theirs.pad_routing_map(chosen, multiple))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("router_dtype", WIDE, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_router_gating_linear(
    theirs: types.ModuleType, has_bias: bool, router_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    leaves = [draw(*shape, seed=seed).to(dtype) for seed, shape in enumerate([(7, 2, 12), (5, 12), (5,)])]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    used = leaves if has_bias else leaves[:2]
    results = []
    for side in (ours, theirs):
        logits = side.router_gating_linear(*leaves[:2], leaves[2] if has_bias else None, router_dtype)
        assert logits.dtype == router_dtype
        upstream = draw(7, 2, 5, seed=9).to(router_dtype)
        results.append((logits, *torch.autograd.grad(logits, used, upstream)))
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        assert_close(actual, expected)
        # Both round products of router_dtype once: narrow results are the same, but for sums in another order.
        assert actual.dtype in WIDE or (actual != expected).float().mean() < 0.05


@pytest.mark.parametrize("scale", [None, 0.25])
def test_attach_loss(theirs: types.ModuleType, scale: float | None) -> None:
    """Megatron-Core keeps one scale for the process; ours comes with the loss."""
    logits = logits_of(9, 5, seed=1)
    probs = logits.softmax(-1)
    their_scale = None if scale is None else torch.tensor(scale)
    with mock.patch.object(theirs.MoEAuxLossAutoScaler, "main_loss_backward_scale", their_scale):
        expected = gradient(theirs.MoEAuxLossAutoScaler.apply(probs, logits.square().sum()), logits)
    actual = gradient(ours.attach_loss(probs, logits.square().sum(), *([] if scale is None else [scale])), logits)
    assert torch.equal(actual, expected)
