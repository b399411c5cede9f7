"""Where ours deviates from megatron-core on purpose: each difference with what both sides do."""

import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import router as ours
from router.balancing import MAX_SINKHORN_ITERATIONS
from tests.parity.megatron import HIDDEN_SIZE, NUM_EXPERTS, draw, on_cpu, router_pair, run_router
from tests.tolerances import assert_close

BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


@pytest.mark.parametrize("fused", [False, True])
def test_weights_add_up_where_all_scores_vanish(theirs: types.ModuleType, fused: bool) -> None:
    """Theirs has 1e-20 under the fraction, and scores that are 0 in fp32 here."""
    logits = torch.tensor([[-160.0, -161.0, -170.0, -180.0]], requires_grad=True)
    arguments = (logits, 2, False, None, None, None, "sigmoid")
    expected = torch.tensor([[-160.0, -161.0]]).softmax(-1)  # of exp, which sigmoid is here
    probs, _ = ours.topk_routing_with_score_function(*arguments, fused=fused)
    assert_close(probs[:, :2], expected)
    assert theirs.topk_routing_with_score_function(*arguments)[0].sum() < 1e-4
    scores = ours.compute_routing_scores_for_aux_loss(logits, 2, "sigmoid", fused)[1]
    assert_close(scores.sum(-1), torch.ones(1))
    assert theirs.compute_routing_scores_for_aux_loss(logits, 2, "sigmoid")[1].sum() < 1e-4
    assert torch.autograd.grad(probs[0, 0], logits)[0][0, 0] > 0.1


def test_saturated_scores_do_not_tie(theirs: types.ModuleType) -> None:
    """Ours compares logits, theirs scores, which are all 1 here."""
    logits = torch.arange(40.0, 48.0).expand(5, 8)
    chosen = [side.topk_routing_with_score_function(logits, 2, score_function="sigmoid")[1] for side in (ours, theirs)]
    assert torch.equal(chosen[0], torch.tensor([False] * 6 + [True] * 2).expand(5, 8))
    assert not torch.equal(chosen[0], chosen[1])
    counted = ours.compute_routing_scores_for_aux_loss(logits, 2, "sigmoid")[0]
    assert torch.equal(counted, chosen[0])


def test_fp64_logits_are_scored_in_fp64(theirs: types.ModuleType) -> None:
    """Theirs scores in fp32 and rounds up to fp64."""
    logits = draw(9, 5, seed=1).double()
    exact = logits.softmax(-1)
    for side, is_exact in ((ours, True), (theirs, False)):
        probs = side.topk_routing_with_score_function(logits, 5)[0]
        assert ((probs - exact).abs().max() < 1e-12) == is_exact


def test_a_row_of_minus_infinity_stays_in_its_groups(theirs: types.ModuleType) -> None:
    """Theirs masks closed groups with -inf, so that they tie with the open ones."""
    opened = torch.stack([torch.arange(8), (torch.arange(8) + 3) % 8], dim=1)  # two groups of 8 experts for each token
    best = (opened.unsqueeze(-1) * 8 + torch.tensor([1, 2, 5])).flatten(1)  # three experts of each open them
    scores = torch.full((8, 64), -torch.inf).scatter(1, best, 1.0)
    for side, is_inside in ((ours, True), (theirs, False)):
        ids = side.group_limited_topk(scores, 7, 8, 64, 8, 2)[1]  # one more than these six
        is_open = (ids.unsqueeze(-1) // 8 == opened.unsqueeze(1)).any(-1)
        assert is_open.all() == is_inside


def test_no_tokens(theirs: types.ModuleType) -> None:
    """Theirs raises."""
    hidden, weight = torch.zeros(0, 1, 12), draw(5, 12, seed=1)
    assert ours.router_gating_linear(hidden, weight, None, torch.float32).shape == (0, 1, 5)
    with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
        theirs.router_gating_linear(hidden, weight, None, torch.float32)
    assert [part.shape for part in ours.group_limited_topk(torch.zeros(0, 8), 4, 0, 8, 4, 2)] == [(0, 4), (0, 4)]
    with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
        theirs.group_limited_topk(torch.zeros(0, 8), 4, 0, 8, 4, 2)
    assert ours.z_loss_func(torch.zeros(0, 8), 0.3) == 0
    assert theirs.z_loss_func(torch.zeros(0, 8), 0.3).isnan()


def test_the_loss_takes_a_padding_mask_of_the_other_sense(theirs: types.ModuleType) -> None:
    """True is padding in ours, everywhere; in this one function of theirs True is valid."""
    scores, counts, padding = draw(9, 5, seed=1).softmax(-1), torch.arange(5), draw(9, seed=2) > 0
    expected = theirs.switch_load_balancing_loss_func(scores, counts, 9, 2, 5, 0.3, padding_mask=~padding)
    assert_close(ours.switch_load_balancing_loss_func(scores, counts, 9, 2, 5, 0.3, padding_mask=padding), expected)


def test_sinkhorn_of_large_costs_is_finite(theirs: types.ModuleType) -> None:
    """Theirs overflows in exp."""
    cost = draw(48, 8, seed=1)
    large = cost + 200.0 * (torch.arange(48) % 3 == 0).unsqueeze(1)  # a row's factor absorbs it
    assert_close(ours.sinkhorn(large), ours.sinkhorn(cost), torch.bfloat16)
    assert not theirs.sinkhorn(large).isfinite().all()


def test_sinkhorn_ends(theirs: types.ModuleType) -> None:
    """A single token's factors move for ever, by the guard of the divisions; theirs has no limit."""
    cost = draw(1, 3, seed=0) * 2.0
    assert_close(ours.sinkhorn(cost).sum(), torch.ones(()))

    def limited(value: Tensor) -> Tensor:
        if calls.call_count > MAX_SINKHORN_ITERATIONS:
            raise TimeoutError
        return value.abs()

    with mock.patch.object(torch, "abs", side_effect=limited) as calls, pytest.raises(TimeoutError):
        theirs.sinkhorn(cost)


def test_quantiles_of_counts_that_do_not_divide(theirs: types.ModuleType) -> None:
    """Theirs asserts that T * k is divisible by E; ours rounds T * k / E down: 7 * 2 / 6 here is 2."""
    scores, beta = draw(7, 6, seed=1), draw(6, seed=2) * 0.3
    with pytest.raises(AssertionError, match="divisible"):
        theirs.qb_dual_update(scores, 2, beta)
    threshold = (scores - beta).sort(-1, descending=True).values[:, 2:3]
    expected = (scores - threshold).sort(0, descending=True).values[2]
    assert torch.equal(ours.qb_dual_update(scores, 2, beta)[1], expected)


def test_position_keeps_the_first_tokens(theirs: types.ModuleType) -> None:
    """Theirs keeps the top-k of a map of zeros and ones: any of them."""
    chosen = torch.tensor([[1, 0], [1, 1], [1, 0], [0, 1], [1, 1]], dtype=torch.bool)
    probs = chosen * draw(5, 2, seed=1)
    kept = ours.apply_router_token_dropping(probs, chosen, 1, 0.8, "position")[1]  # 2 of 5 tokens
    assert kept.long().tolist() == [[1, 0], [1, 1], [0, 0], [0, 1], [0, 0]]
    many = torch.ones(64, 4, dtype=torch.bool)
    theirs_kept = theirs.apply_router_token_dropping(many.float(), many, 1, 0.5, "position")[1]
    ours_kept = ours.apply_router_token_dropping(many.float(), many, 1, 0.5, "position")[1]
    assert torch.equal(ours_kept.nonzero()[:, 0].unique(), torch.arange(8))
    assert torch.equal(ours_kept.sum(0), theirs_kept.sum(0))
    assert not torch.equal(ours_kept, theirs_kept)


def test_counts_are_summed_in_a_copy(theirs: types.ModuleType) -> None:
    """Theirs writes the sum over the ranks into its argument."""
    counts, group = torch.tensor([1, 5, 3]), mock.Mock(spec=dist.ProcessGroup)
    group.size.return_value = 2

    def double(tensor: Tensor, **kwargs: object) -> None:
        tensor.mul_(2)

    with mock.patch.object(dist, "all_reduce", double):
        bias = ours.get_updated_expert_bias(counts, torch.zeros(3), 0.1, group)
        assert counts.tolist() == [1, 5, 3]
        assert torch.equal(bias, theirs.get_updated_expert_bias(counts, torch.zeros(3), 0.1, group))
    assert counts.tolist() == [2, 10, 6]


def test_the_map_is_padded_in_a_copy_and_in_full(theirs: types.ModuleType) -> None:
    """Theirs writes into its argument, and stops short of the multiple where tokens run out."""
    chosen = torch.tensor([[1, 0], [0, 1], [1, 1], [1, 0], [1, 0], [0, 0]], dtype=torch.bool)
    before = chosen.clone()
    padded = ours.pad_routing_map(chosen, 3)
    assert torch.equal(chosen, before)
    assert theirs.pad_routing_map(chosen, 3).data_ptr() == chosen.data_ptr()
    assert torch.equal(chosen, padded)
    with pytest.raises(ValueError, match=r"expert 0 has 4 of 6 tokens and needs 4 more"):
        ours.pad_routing_map(before, 8)
    assert theirs.pad_routing_map(before.clone(), 8).sum(0).tolist() == [6, 6]


def test_padding_tokens_are_routed_nowhere() -> None:
    """Theirs routes and computes them."""
    routers = router_pair({})
    hidden, padding = draw(12, 4, HIDDEN_SIZE, seed=10), draw(12, 4, seed=6) > 0.4
    with on_cpu():
        (probs, routing_map), (_, their_map) = (router(hidden, padding) for router in routers)
    assert not routing_map[padding.flatten()].any()
    assert not probs[padding.flatten()].any()
    assert torch.equal(routing_map[~padding.flatten()], their_map[~padding.flatten()])
    assert their_map.sum() == 12 * 4 * 2


def test_a_padding_mask_beside_an_expert_bias() -> None:
    """Theirs raises: it combines [T, E] with [T]."""
    router, their_router = router_pair(BIASED)
    hidden, padding = draw(12, 4, HIDDEN_SIZE, seed=10), draw(12, 4, seed=6) > 0.4
    routing_map = run_router(router, hidden, padding)["routing_map"]
    assert torch.equal(router.local_tokens_per_expert, routing_map.sum(0))
    with pytest.raises(RuntimeError, match="must match the size"):
        run_router(their_router, hidden, padding)


def test_sequences_are_balanced_by_their_own_tokens(theirs: types.ModuleType) -> None:
    """Theirs divides every sequence by the mean number of valid tokens. Both agree where all have as many."""
    fields = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.3}
    router, their_router = router_pair(fields)
    hidden = draw(12, 3, HIDDEN_SIZE, seed=10)
    padding = torch.arange(12).unsqueeze(1) >= torch.tensor([12, 5, 2])  # [S, B]
    losses = []
    for sequence in range(3):
        logits = hidden[~padding[:, sequence], sequence] @ router.weight.t()
        chosen, scores = theirs.compute_routing_scores_for_aux_loss(logits, 2, "softmax")
        arguments = (chosen.sum(0), len(logits), 2, NUM_EXPERTS, 0.3)
        losses.append(theirs.switch_load_balancing_loss_func(scores, *arguments))
    plain = router_pair({})[0]
    without = run_router(plain, hidden, padding)["weight"]
    expected = without + torch.autograd.grad(torch.stack(losses).mean(), router.weight)[0]
    assert_close(run_router(router, hidden, padding)["weight"], expected)
    their_gradient = run_router(their_router, hidden, padding)["weight"]
    assert (their_gradient - expected).abs().max() > 0.1 * (expected - without).abs().max()


def test_global_counts_of_unequal_micro_batches(theirs: types.ModuleType) -> None:
    """Counts so far are scaled to this micro-batch's tokens; theirs takes the mean over micro-batches."""
    fields = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.3}
    router, their_router = router_pair(fields)
    plain = router_pair({})[0]
    batches = [draw(size, 1, HIDDEN_SIZE, seed=size) for size in (24, 6)]
    counts = torch.zeros(NUM_EXPERTS)
    expected = torch.zeros_like(router.weight)
    for hidden, share in zip(batches, (1.0, 6 / 30), strict=True):
        logits = hidden.flatten(0, 1) @ router.weight.t()
        chosen, scores = theirs.compute_routing_scores_for_aux_loss(logits, 2, "softmax")
        counts += chosen.sum(0)
        arguments = (counts * share, len(logits), 2, NUM_EXPERTS, 0.3)
        loss = theirs.switch_load_balancing_loss_func(scores, *arguments)
        expected += torch.autograd.grad(loss, router.weight)[0]
        actual, their_gradient, without = (run_router(each, hidden)["weight"] for each in (router, their_router, plain))
    assert_close(actual - without, expected)
    assert (their_gradient - actual).abs().max() > 0.1 * expected.abs().max()


def test_the_expert_bias_follows_what_tokens_chose() -> None:
    """Theirs counts what capacity left, so with padding to capacity its bias never moves."""
    capacity = {"moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": True}
    router, their_router = router_pair({**BIASED, **capacity})
    unlimited = router_pair(BIASED)[0]
    hidden = draw(12, 4, HIDDEN_SIZE, seed=10)
    for each in (router, their_router, unlimited):
        run_router(each, hidden)
    assert torch.equal(router.local_tokens_per_expert, unlimited.local_tokens_per_expert)
    assert len(router.local_tokens_per_expert.unique()) > 1
    assert len(their_router.local_tokens_per_expert.unique()) == 1


def test_evaluation_is_not_counted() -> None:
    """Theirs counts every forward with gradients on."""
    router, their_router = router_pair(BIASED)
    hidden = draw(12, 4, HIDDEN_SIZE, seed=10)
    for each in (router.eval(), their_router.eval()):
        run_router(each, hidden)
    assert not router.local_tokens_per_expert.any()
    assert their_router.local_tokens_per_expert.sum() == 12 * 4 * 2


def test_input_jitter_is_for_training() -> None:
    """Theirs jitters in evaluation too."""
    router, their_router = router_pair({"moe_input_jitter_eps": 0.1})
    hidden = draw(12, 4, HIDDEN_SIZE, seed=10)
    expected = run_router(router_pair({})[0], hidden)["probs"]
    assert torch.equal(run_router(router.eval(), hidden)["probs"], expected)
    assert not torch.equal(run_router(their_router.eval(), hidden)["probs"], expected)
