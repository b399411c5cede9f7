"""The router's functions against megatron-core's of the same names, value and gradient, over their options."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import router as ours
from tests.parity import megatron
from tests.tolerances import assert_close

theirs = megatron.load()
SIZES = st.tuples(st.integers(1, 40), st.integers(0, 1000))  # T, seed
SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradient(value: Tensor, leaf: Tensor, seed: int = 5) -> Tensor:
    """The gradient of a weighted sum of the value."""
    weight = draw(*value.shape, seed=seed) if value.dim() else torch.ones(())
    return torch.autograd.grad((value.float() * weight).sum(), leaf, retain_graph=True)[0]


@st.composite
def routing_options(draw_from: st.DrawFn) -> tuple[int, dict[str, Any]]:
    """Draw a number of experts and options that both sides take."""
    num_groups, size = draw_from(st.sampled_from([1, 2, 4])), draw_from(st.integers(1, 8))
    score_function = draw_from(st.sampled_from(SCORES))
    group_topk = draw_from(st.none() | st.integers(1, num_groups))
    if group_topk is None:
        topk = draw_from(st.integers(1, num_groups * size))
    else:
        topk = group_topk * draw_from(st.integers(1, size))  # Megatron sums topk // group_topk scores of a group
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
@settings(max_examples=150)
@given(case=routing_options(), size=SIZES)
def test_topk_routing_with_score_function(fused: bool, case: tuple[int, dict[str, Any]], size: tuple[int, int]) -> None:
    (num_experts, options), (num_tokens, seed) = case, size
    logits = (draw(num_tokens, num_experts, seed=seed) * 2).requires_grad_()
    expected, expected_map = theirs.topk_routing_with_score_function(logits, **options)
    probs, routing_map = ours.topk_routing_with_score_function(logits, **options, fused=fused)
    assert torch.equal(routing_map, expected_map)
    assert_close(probs, expected, what="probs")
    assert_close_gradients(gradient(probs, logits), gradient(expected, logits))


def assert_close_gradients(actual: Tensor, expected: Tensor) -> None:
    """Compare gradients that may cancel to rounding errors: the scale is at least that of the probs."""
    assert (actual - expected).abs().max() <= 2e-5 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("score_function", SCORES)
def test_narrow_logits(score_function: str, dtype: torch.dtype) -> None:
    order = torch.stack([torch.randperm(16) for _ in range(33)])
    logits = (order * 0.25 - 2).to(dtype)  # no two are equal
    for topk in (2, 5):
        arguments = (logits, topk, False, None, None, 2.5, score_function)
        expected, expected_map = theirs.topk_routing_with_score_function(*arguments)
        probs, routing_map = ours.topk_routing_with_score_function(*arguments)
        assert probs.dtype == expected.dtype == dtype
        assert torch.equal(routing_map, expected_map)
        assert_close(probs, expected)


@given(case=routing_options(), size=SIZES)
def test_precomputed_indices(case: tuple[int, dict[str, Any]], size: tuple[int, int]) -> None:
    (num_experts, options), (num_tokens, seed) = case, size
    options = {name: options.get(name) for name in ("topk", "score_function", "scaling_factor")}
    options["use_pre_softmax"] = options["topk"] == 1 and options["score_function"] == "softmax"
    logits = (draw(num_tokens, num_experts, seed=seed) * 2).requires_grad_()
    ids = draw(num_tokens, num_experts, seed=seed + 1).argsort(-1)[:, : options["topk"]]
    expected, expected_map = theirs.topk_routing_with_score_function(logits, **options, precomputed_indices=ids)
    for fused in (False, True):
        probs, routing_map = ours.topk_routing_with_score_function(
            logits, **options, precomputed_indices=ids, fused=fused
        )
        assert torch.equal(routing_map, expected_map)
        assert_close(probs, expected)
        assert_close_gradients(gradient(probs, logits), gradient(expected, logits))


@given(size=SIZES, num_groups=st.sampled_from([1, 2, 4]), group_size=st.integers(1, 6), data=st.data())
def test_group_limited_topk(size: tuple[int, int], num_groups: int, group_size: int, data: st.DataObject) -> None:
    num_tokens, seed = size
    group_topk = data.draw(st.integers(1, num_groups))
    topk = group_topk * data.draw(st.integers(1, group_size))
    scores = draw(num_tokens, num_groups * group_size, seed=seed) - 1  # mostly negative
    arguments = (scores, topk, num_tokens, num_groups * group_size, num_groups, group_topk)
    values, ids = ours.group_limited_topk(*arguments)
    expected_values, expected_ids = theirs.group_limited_topk(*arguments)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(values, expected_values)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@given(size=SIZES, score_function=st.sampled_from(SCORES), num_experts=st.integers(1, 17), data=st.data())
def test_scores_and_losses(
    fused: bool, masked: bool, size: tuple[int, int], score_function: str, num_experts: int, data: st.DataObject
) -> None:
    num_tokens, seed = size
    topk = data.draw(st.integers(1, num_experts))
    logits = (draw(num_tokens, num_experts, seed=seed) * 2).requires_grad_()
    padding = draw(num_tokens, seed=seed + 1) > 0.5 if masked else None
    expected_map, expected = theirs.compute_routing_scores_for_aux_loss(
        logits, topk, score_function, padding_mask=padding
    )
    routing_map, scores = ours.compute_routing_scores_for_aux_loss(logits, topk, score_function, fused, padding)
    assert torch.equal(routing_map, expected_map)
    assert_close(scores, expected)
    assert_close_gradients(gradient(scores, logits), gradient(expected, logits))
    counts = routing_map.sum(0)
    num_valid = num_tokens if padding is None else int((~padding).sum())
    if num_valid:
        arguments = (counts, num_valid, topk, num_experts, 0.3)
        loss = ours.switch_load_balancing_loss_func(scores, *arguments)
        expected_loss = theirs.switch_load_balancing_loss_func(expected, *arguments)
        assert_close(loss, expected_loss)
        assert_close_gradients(gradient(loss, logits), gradient(expected_loss, logits))
    z_loss = ours.z_loss_func(logits, 0.3, padding)
    expected_loss = theirs.z_loss_func(logits, 0.3, padding_mask=padding)
    assert_close(z_loss, expected_loss)
    assert_close_gradients(gradient(z_loss, logits), gradient(expected_loss, logits))


def test_the_loss_takes_a_padding_mask_of_the_other_sense() -> None:
    """Differs: True is padding here, everywhere; in this one function of Megatron-Core True is valid."""
    scores, counts, padding = draw(9, 5, seed=1).softmax(-1), torch.arange(5), draw(9, seed=2) > 0
    expected = theirs.switch_load_balancing_loss_func(scores, counts, 9, 2, 5, 0.3, padding_mask=~padding)
    assert_close(ours.switch_load_balancing_loss_func(scores, counts, 9, 2, 5, 0.3, padding_mask=padding), expected)


@given(size=SIZES, num_experts=st.integers(1, 17), spread=st.sampled_from([0.1, 1.0, 4.0]))
def test_sinkhorn(size: tuple[int, int], num_experts: int, spread: float) -> None:
    num_tokens, seed = size
    cost = draw(num_tokens, num_experts, seed=seed) * spread
    assert_close(ours.sinkhorn(cost), theirs.sinkhorn(cost), torch.bfloat16 if spread == 4.0 else None)


@given(num_tokens=st.integers(1, 30), topk=st.integers(1, 3), seed=st.integers(0, 99), update=st.booleans())
def test_qb_dual_update(num_tokens: int, topk: int, seed: int, update: bool) -> None:
    num_experts = 6
    scores, beta = draw(num_tokens * num_experts, num_experts, seed=seed), draw(num_experts, seed=seed + 1) * 0.3
    ids, quantile = ours.qb_dual_update(scores, topk, beta, update)
    expected_ids, expected_quantile = theirs.qb_dual_update(scores, topk, beta, update)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(quantile, expected_quantile)


def test_qb_dual_update_takes_counts_that_do_not_divide() -> None:
    """Differs: Megatron-Core asserts that T * k is divisible by E."""
    scores, beta = draw(7, 6, seed=1), torch.zeros(6)
    with pytest.raises(AssertionError, match="divisible"):
        theirs.qb_dual_update(scores, 2, beta)
    assert ours.qb_dual_update(scores, 2, beta)[1].isfinite().all()


@given(
    slots=st.integers(0, 500),
    num_experts=st.integers(1, 64),
    factor=st.floats(0.1, 4.0),
    lowest=st.none() | st.integers(1, 9),
)
def test_get_capacity(slots: int, num_experts: int, factor: float, lowest: int | None) -> None:
    assert ours.get_capacity(slots, num_experts, factor, lowest) == theirs.get_capacity(
        slots, num_experts, factor, lowest
    )


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("policy", ["probs", "position"])
@given(size=SIZES, topk=st.integers(1, 5), factor=st.floats(0.2, 4.0))
def test_apply_router_token_dropping(policy: str, pad: bool, size: tuple[int, int], topk: int, factor: float) -> None:
    num_tokens, seed = size
    logits = draw(num_tokens, 6, seed=seed).requires_grad_()
    probs, chosen = ours.topk_routing_with_score_function(logits, topk, score_function="sigmoid")
    arguments = (probs, chosen, topk, factor, policy, pad)
    expected, expected_map = theirs.apply_router_token_dropping(*arguments)
    kept, kept_map = ours.apply_router_token_dropping(*arguments)
    if policy == "position" or pad:
        # Differs: "position" keeps the first tokens, padding adds the first free ones; a top-k of equal values, as in
        # Megatron-Core, takes any. And more capacity than tokens keeps what was routed: one row each, not T.
        is_more = ours.get_capacity(num_tokens * topk, 6, factor) > num_tokens
        assert torch.equal(kept_map.sum(0), expected_map.sum(0)) or is_more
    else:
        assert torch.equal(kept_map, expected_map)
    if policy == "probs":
        assert torch.equal(kept, expected)
        assert_close_gradients(gradient(kept, logits), gradient(expected, logits))


def test_position_keeps_the_first_tokens() -> None:
    """Differs: see above; this is what "position" says."""
    chosen = torch.tensor([[1, 0], [1, 1], [1, 0], [0, 1], [1, 1]], dtype=torch.bool)
    probs = chosen * torch.rand(5, 2)
    kept = ours.apply_router_token_dropping(probs, chosen, 1, 0.8, "position")[1]  # 2 of 5 tokens
    assert kept.long().tolist() == [[1, 0], [1, 1], [0, 0], [0, 1], [0, 0]]


@given(seed=st.integers(0, 99), num_experts=st.integers(1, 9), rate=st.sampled_from([1e-3, 0.1]))
def test_get_updated_expert_bias(seed: int, num_experts: int, rate: float) -> None:
    counts = torch.randint(5, (num_experts,), generator=torch.Generator().manual_seed(seed))
    bias = draw(num_experts, seed=seed)
    before = counts.clone()
    updated = ours.get_updated_expert_bias(counts, bias, rate, dist.group.WORLD)
    assert torch.equal(counts, before)  # Differs: Megatron-Core reduces into its argument
    assert_close(updated, theirs.get_updated_expert_bias(counts.clone().float(), bias, rate, dist.group.WORLD))


@given(seed=st.integers(0, 99), tiles=st.integers(1, 5), multiple=st.sampled_from([1, 4, 8]), topk=st.integers(1, 4))
def test_pad_routing_map(seed: int, tiles: int, multiple: int, topk: int) -> None:
    _, chosen = ours.topk_routing_with_score_function(
        draw(tiles * multiple, 6, seed=seed), topk, score_function="sigmoid"
    )
    before = chosen.clone()
    padded = ours.pad_routing_map(chosen, multiple)
    assert torch.equal(chosen, before)  # Differs: Megatron-Core writes into its argument
    assert torch.equal(padded, theirs.pad_routing_map(chosen.clone(), multiple).bool())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("router_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_router_gating_linear(has_bias: bool, router_dtype: torch.dtype, dtype: torch.dtype) -> None:
    leaves = [draw(7, 2, 12, seed=1, dtype=dtype), draw(5, 12, seed=2, dtype=dtype), draw(5, seed=3, dtype=dtype)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    arguments = (*leaves[:2], leaves[2] if has_bias else None, router_dtype)
    results = []
    for function in (ours.router_gating_linear, theirs.router_gating_linear):
        logits = function(*arguments)
        used = leaves if has_bias else leaves[:2]
        results.append((logits, *torch.autograd.grad(logits.square().sum(), used)))
    assert results[0][0].dtype == results[1][0].dtype == router_dtype
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)
