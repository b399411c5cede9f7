"""TopKRouter against megatron-core's on one process: probs, map, losses in the gradient and in the log, counters."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.parallel import ProcessGroups
from router import TopKRouter, reset_global_aux_loss_tracker, set_loss_scale, update_expert_bias
from tests.parity import megatron
from tests.parity.megatron import HIDDEN_SIZE, draw, router_pair, run_router
from tests.tolerances import assert_close

LOSSES = ["aux_loss", "seq_aux_loss", "global_aux_loss"]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-3, pre-softmax": {"moe_router_topk": 3, "moe_router_pre_softmax": True},
    "top-1, pre-softmax, scaled": {
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "sigmoid": {"moe_router_score_function": "sigmoid"},
    "sqrtsoftplus, groups": {
        "moe_router_score_function": "sqrtsoftplus",
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk": 4,
    },
    "expert bias, groups, scaled": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "router bias": {"add_bias_linear": True},
    "fp64": {"moe_router_dtype": "fp64"},
    "aux loss": {"moe_aux_loss_coeff": 0.3},
    "aux loss, sigmoid": {"moe_aux_loss_coeff": 0.3, "moe_router_score_function": "sigmoid"},
    "aux loss, groups and expert bias": {
        "moe_aux_loss_coeff": 0.3,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
    },
    "sequence loss": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.3},
    "global loss": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.3},
    "list of losses": {"moe_router_load_balancing_type": LOSSES, "moe_aux_loss_coeff": [0.3, 0.2, 0.1]},
    "list of losses, one of them off": {
        "moe_router_load_balancing_type": LOSSES[::-1],
        "moe_aux_loss_coeff": [0.3, 0.0, 0.1],
    },
    "z-loss": {"moe_z_loss_coeff": 0.02},
    "everything, per token": {
        "moe_router_load_balancing_type": LOSSES,
        "moe_aux_loss_coeff": [0.3, 0.2, 0.1],
        "moe_z_loss_coeff": 0.02,
        "calculate_per_token_loss": True,
        "moe_router_score_function": "sqrtsoftplus",
    },
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_z_loss_coeff": 0.02},
    "sinkhorn, top-1": {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
    "quantile balancing": {"moe_router_load_balancing_type": "quantile_balancing"},
    "quantile balancing, pre-softmax": {
        "moe_router_load_balancing_type": "quantile_balancing",
        "moe_router_pre_softmax": True,
        "moe_z_loss_coeff": 0.02,
    },
    "quantile balancing, sigmoid": {
        "moe_router_load_balancing_type": "quantile_balancing",
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": 2.5,
    },
    "capacity": {"moe_expert_capacity_factor": 0.75, "moe_aux_loss_coeff": 0.3},
    "capacity, no drop": {"moe_expert_capacity_factor": 8.0},
}
FUSED = [name for name in CASES if not name.startswith(("sinkhorn", "quantile"))]


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare what `run_router` returned; to fp32, to which theirs computes with fp64 logits too."""
    for name, value in expected.items():
        assert_close(actual[name], value, None if value.dtype == torch.bool else torch.float32, what=name)


def assert_same_state(ours: TopKRouter, theirs: Any) -> None:
    """Compare the counters."""
    if ours.expert_bias is not None:
        assert torch.equal(ours.local_tokens_per_expert, theirs.local_tokens_per_expert.long())
    if ours.qb_beta is not None:
        assert_close(ours.qb_beta_sum, theirs.qb_beta_accum)
        assert ours.qb_beta_count == theirs.qb_beta_count
    if ours.global_tokens is not None:
        assert torch.equal(ours.global_tokens[:-1], theirs.global_tokens_per_expert.long())


@pytest.mark.parametrize(("case", "fusion"), [(name, False) for name in CASES] + [(name, True) for name in FUSED])
def test_a_step_of_two_micro_batches_and_the_next(case: str, fusion: bool) -> None:
    ours, theirs = router_pair({**CASES[case], "moe_router_fusion": fusion})
    for seed in (10, 11, 12):
        if seed == 12:
            reset_global_aux_loss_tracker(ours)
            theirs.reset_global_aux_loss_tracker()
        hidden = draw(12, 4, HIDDEN_SIZE, seed=seed)
        assert_same(run_router(ours, hidden), run_router(theirs, hidden))
        assert_same_state(ours, theirs)


@pytest.mark.parametrize("case", ["plain", "router bias", "everything, per token"])
def test_bf16(case: str) -> None:
    """Weights and tokens in bf16, decisions in fp32: no choice flips."""
    ours, theirs = router_pair({**CASES[case], "params_dtype": torch.bfloat16})
    hidden = draw(12, 4, HIDDEN_SIZE, seed=10).bfloat16()
    actual, expected = run_router(ours, hidden), run_router(theirs, hidden)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        assert_close(actual[name], value, what=name)


@st.composite
def router_fields(draw_from: st.DrawFn) -> dict[str, Any]:
    """Draw settings that both routers take, sizes included."""
    num_groups, size = draw_from(st.sampled_from([1, 2, 4])), draw_from(st.integers(2, 5))
    function = draw_from(st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"]))
    group_topk = draw_from(st.none() | st.integers(1, num_groups))
    topk = draw_from(st.integers(group_topk or 1, (group_topk or num_groups) * size))
    kinds = draw_from(st.lists(st.sampled_from(LOSSES), unique=True))
    fields: dict[str, Any] = {
        "hidden_size": draw_from(st.sampled_from([8, 24])),
        "num_moe_experts": num_groups * size,
        "moe_router_topk": topk,
        "moe_router_score_function": function,
        "moe_router_pre_softmax": function == "softmax" and (topk == 1 or draw_from(st.booleans())),
        "moe_router_enable_expert_bias": function != "softmax" and draw_from(st.booleans()),
        "moe_router_topk_scaling_factor": draw_from(st.sampled_from([None, 0.5, 16.0])),
        "moe_z_loss_coeff": draw_from(st.sampled_from([0.0, 0.05])),
        "add_bias_linear": draw_from(st.booleans()),
        "calculate_per_token_loss": draw_from(st.booleans()),
        "moe_router_fusion": draw_from(st.booleans()),
    }
    if group_topk is not None:
        fields |= {"moe_router_num_groups": num_groups, "moe_router_group_topk": group_topk}
    if kinds:
        coeffs = [draw_from(st.sampled_from([0.05, 0.3])) for _ in kinds]
        fields |= {"moe_router_load_balancing_type": kinds, "moe_aux_loss_coeff": coeffs}
    if not fields["moe_router_enable_expert_bias"] and draw_from(st.booleans()):
        fields["moe_expert_capacity_factor"] = draw_from(st.sampled_from([0.5, 1.0, 1.5]))
    return fields


@settings(max_examples=150)
@given(fields=router_fields(), sequence=st.integers(1, 9), batch=st.integers(1, 4), seed=st.integers(0, 99))
def test_drawn_settings(fields: dict[str, Any], sequence: int, batch: int, seed: int) -> None:
    ours, theirs = router_pair(fields)
    for micro_batch in range(2):
        hidden = draw(sequence, batch, fields["hidden_size"], seed=2 * seed + micro_batch)
        assert_same(run_router(ours, hidden), run_router(theirs, hidden))
        assert_same_state(ours, theirs)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_padding_to_capacity(policy: str) -> None:
    """Which rows pad is open in theirs, and with "position" which ones stay."""
    fields = {**CASES["capacity"], "moe_token_drop_policy": policy, "moe_pad_expert_input_to_capacity": True}
    ours, theirs = router_pair(fields)
    hidden = draw(12, 4, HIDDEN_SIZE, seed=10)
    actual, expected = run_router(ours, hidden), run_router(theirs, hidden)
    assert torch.equal(actual.pop("routing_map").sum(0), expected.pop("routing_map").sum(0))
    if policy == "probs":
        assert_same(actual, expected)


@pytest.mark.parametrize("case", ["aux loss", "sequence loss", "global loss", "z-loss", "everything, per token"])
def test_padding_mask(case: str) -> None:
    """What counts: Megatron-Core routes padding tokens, ours routes them nowhere. Each sequence pads as many tokens."""
    ours, theirs = router_pair({**CASES[case], "moe_router_score_function": "sigmoid"})
    padding = torch.stack([draw(12, seed=seed).argsort() < 5 for seed in range(4)], dim=1)  # [S, B]
    for seed in (10, 11):
        hidden = draw(12, 4, HIDDEN_SIZE, seed=seed)
        assert_same(run_router(ours, hidden, padding), run_router(theirs, hidden, padding))
        assert_same_state(ours, theirs)


@pytest.mark.parametrize("case", ["list of losses", "sinkhorn", "quantile balancing", "capacity", "z-loss"])
def test_evaluation_has_no_losses_and_the_same_choice(case: str) -> None:
    ours, theirs = router_pair(CASES[case])
    hidden = draw(12, 4, HIDDEN_SIZE, seed=10)
    assert_same(run_router(ours.eval(), hidden), run_router(theirs.eval(), hidden))


def test_logged_losses() -> None:
    tracker = megatron.load("transformer.moe.moe_logging").MoEMetricsTracker()
    fields = {**CASES["list of losses"], "moe_z_loss_coeff": 0.02, "moe_router_score_function": "sigmoid"}
    ours, theirs = router_pair(fields)
    hidden = draw(12, 4, HIDDEN_SIZE, seed=10)
    module = type(theirs).attach_and_log_load_balancing_loss.__globals__
    with mock.patch.dict(module, get_moe_metrics_tracker=lambda: tracker):
        run_router(theirs, hidden)
    run_router(ours, hidden)
    prefixes = {"aux_loss": "", "seq_aux_loss": "seq_", "global_aux_loss": "global_"}
    names = {name: f"{prefix}load_balancing_loss" for name, prefix in prefixes.items()} | {"z_loss": "z_loss"}
    for name, their_name in names.items():
        assert_close(getattr(ours, name), tracker._metrics[their_name].values[0], what=name)


def test_loss_scale() -> None:
    """Megatron-Core keeps one scale for the process, ours in each router."""
    scaler = megatron.load("transformer.moe.moe_utils").MoEAuxLossAutoScaler
    ours, theirs = router_pair({**CASES["list of losses"], "moe_z_loss_coeff": 0.02})
    set_loss_scale(ours, 16.0)
    hidden = draw(12, 4, HIDDEN_SIZE, seed=10)
    with mock.patch.object(scaler, "main_loss_backward_scale", torch.tensor(16.0)):
        assert_same(run_router(ours, hidden), run_router(theirs, hidden))


def test_update_of_the_expert_bias() -> None:
    finalize = megatron.load("distributed.finalize_model_grads")
    ours, theirs = router_pair(CASES["expert bias, groups, scaled"])
    for seed in (10, 11):
        hidden = draw(12, 4, HIDDEN_SIZE, seed=seed)
        run_router(ours, hidden)
        run_router(theirs, hidden)
    finalize._update_router_expert_bias([theirs], theirs.config, dist.group.WORLD)
    assert update_expert_bias(ours, ProcessGroups.build()) == 1
    assert torch.equal(ours.expert_bias, theirs.expert_bias)
    assert not ours.local_tokens_per_expert.any()


@pytest.mark.parametrize("ema", [0.0, 0.25])
def test_update_of_the_quantiles(ema: float) -> None:
    finalize = megatron.load("distributed.finalize_model_grads")
    ours, theirs = router_pair({**CASES["quantile balancing"], "moe_router_quantile_balancing_ema": ema})
    for seed in (10, 11):
        hidden = draw(12, 4, HIDDEN_SIZE, seed=seed)
        run_router(ours, hidden)
        run_router(theirs, hidden)
    with mock.patch.object(dist, "all_reduce"):  # gloo has no mean; of one rank it is the value
        finalize._update_router_qb_beta([theirs], theirs.config, dist.group.WORLD)
    assert update_expert_bias(ours, ProcessGroups.build()) == 1
    assert_close(ours.qb_beta, theirs.qb_beta)
    assert not ours.qb_beta_sum.any()
    assert not ours.qb_beta_count
