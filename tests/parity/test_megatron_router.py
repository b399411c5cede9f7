"""TopKRouter against megatron-core's on one process: probs, map, losses in the gradient, counters, over the options."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe.parallel import ProcessGroups
from router import RouterConfig, TopKRouter, update_expert_bias
from tests.parity import megatron
from tests.tolerances import assert_close

theirs = megatron.load("router")
HIDDEN_SIZE, NUM_EXPERTS = 16, 8
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
    "sequence loss": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.3},
    "global loss": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.3},
    "list of losses": {"moe_router_load_balancing_type": LOSSES, "moe_aux_loss_coeff": [0.3, 0.2, 0.1]},
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
    "quantile balancing, sigmoid": {
        "moe_router_load_balancing_type": "quantile_balancing",
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": 2.5,
    },
    "capacity": {"moe_expert_capacity_factor": 0.75, "moe_aux_loss_coeff": 0.3},
    "capacity, no drop": {"moe_expert_capacity_factor": 8.0},
}
OURS_ALONE = {"moe_router_dtype": "fp32"}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def build_theirs(fields: dict[str, Any]) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN_SIZE,
        num_attention_heads=4,
        num_moe_experts=NUM_EXPERTS,
        moe_ffn_hidden_size=8,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        **{
            "add_bias_linear": False,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_router_dtype": "fp32",
            **fields,
        },
    )
    groups = ProcessGroupCollection()
    for name in ("tp", "cp", "tp_cp", "tp_dp_cp"):
        setattr(groups, name, dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        router = theirs.TopKRouter(config, pg_collection=groups)
    router.set_layer_number(1)
    return router.train()


def build_pair(fields: dict[str, Any]) -> tuple[TopKRouter, Any]:
    config = RouterConfig(hidden_size=HIDDEN_SIZE, num_moe_experts=NUM_EXPERTS, **fields)
    pair = TopKRouter(config), build_theirs(fields)
    with torch.no_grad():
        for router in pair:
            router.weight.copy_(draw(NUM_EXPERTS, HIDDEN_SIZE, seed=1) / 2)
            if router.bias is not None:
                router.bias.copy_(draw(NUM_EXPERTS, seed=2))
            for name in ("expert_bias", "qb_beta"):
                if getattr(router, name) is not None:
                    getattr(router, name).copy_(draw(NUM_EXPERTS, seed=3) / 4)
    return pair


def run(router: Any, hidden: Tensor, *arguments: Tensor) -> dict[str, Tensor]:
    """One forward and backward: results, and the gradients added to those that are there."""
    hidden = hidden.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:  # where their gate would move a weight from the CPU
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        probs, routing_map = router(hidden, *arguments)
    (probs * draw(*probs.shape, seed=4)).sum().backward()
    named = {"probs": probs, "routing_map": routing_map, "hidden": hidden.grad, "weight": router.weight.grad}
    return named if router.bias is None else {**named, "bias": router.bias.grad}


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_two_micro_batches(case: str, fusion: bool) -> None:
    fields = CASES[case]
    ours, other = build_pair(fields)
    takes_fusion = not any(kind in str(fields) for kind in ("sinkhorn", "quantile"))
    if fusion and takes_fusion:
        ours = TopKRouter(RouterConfig(**{**vars(ours.config), "moe_router_fusion": True}))
        ours.load_state_dict(build_pair(fields)[0].state_dict())
    for seed in (10, 11):  # the second adds its counts to those of the first
        hidden = draw(12, 4, HIDDEN_SIZE, seed=seed)
        actual, expected = run(ours, hidden), run(other, hidden)
        for name, value in expected.items():
            assert_close(actual[name], value, None if value.dtype == torch.bool else torch.float32, what=name)
    if ours.expert_bias is not None:
        assert torch.equal(ours.local_tokens_per_expert, other.local_tokens_per_expert.long())
    if ours.qb_beta is not None:
        assert torch.equal(ours.qb_beta_sum, other.qb_beta_accum)
        assert ours.qb_beta_count == other.qb_beta_count
    if ours.global_tokens is not None:
        assert torch.equal(ours.global_tokens[:-1], other.global_tokens_per_expert.long())


@pytest.mark.parametrize("case", ["aux loss", "global loss", "z-loss", "everything, per token"])
def test_padding_mask(case: str) -> None:
    """Only what counts: Megatron-Core still routes padding tokens. Here they are routed nowhere."""
    fields = {**CASES[case], "moe_router_score_function": "sigmoid"}
    if case.startswith("everything"):  # Differs: Megatron-Core divides each sequence by the mean number of valid tokens
        fields = {**fields, "moe_router_load_balancing_type": LOSSES[::2], "moe_aux_loss_coeff": [0.3, 0.1]}
    ours, other = build_pair(fields)
    hidden, padding = draw(12, 4, HIDDEN_SIZE, seed=10), draw(12, 4, seed=6) > 0.4
    results = []
    for router in (ours, other):
        inputs = hidden.clone().requires_grad_()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
            probs, routing_map = router(inputs, padding)
        valid = ~padding.flatten()
        (probs[valid] * draw(48, NUM_EXPERTS, seed=4)[valid]).sum().backward()
        results.append((probs[valid], routing_map[valid], inputs.grad, router.weight.grad))
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)


def test_evaluation_has_no_losses_and_the_same_choice() -> None:
    for case in ("list of losses", "sinkhorn", "quantile balancing", "capacity"):
        ours, other = build_pair(CASES[case])
        hidden = draw(12, 4, HIDDEN_SIZE, seed=10)
        actual, expected = run(ours.eval(), hidden), run(other.eval(), hidden)
        for name, value in expected.items():
            assert_close(actual[name], value, None if value.dtype == torch.bool else torch.float32, what=name)


def test_bias_and_quantile_updates() -> None:
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

    ours, other = build_pair(CASES["expert bias, groups, scaled"])
    hidden = draw(12, 4, HIDDEN_SIZE, seed=10)
    run(ours, hidden)
    run(other, hidden)
    expected = get_updated_expert_bias(other.local_tokens_per_expert, other.expert_bias, 1e-3, dist.group.WORLD)
    assert update_expert_bias(ours, ProcessGroups.build()) == 1
    assert_close(ours.expert_bias, expected)
    assert not ours.local_tokens_per_expert.any()

    from megatron.core.distributed import finalize_model_grads

    ours, other = build_pair({**CASES["quantile balancing"], "moe_router_quantile_balancing_ema": 0.25})
    for seed in (10, 11):
        run(ours, draw(12, 4, HIDDEN_SIZE, seed=seed))
        run(other, draw(12, 4, HIDDEN_SIZE, seed=seed))
    assert update_expert_bias(ours, ProcessGroups.build()) == 1
    with pytest.MonkeyPatch.context() as patch:  # gloo has no mean; of one rank it is the value
        patch.setattr(dist, "all_reduce", lambda *args, **kwargs: None)
        module = finalize_model_grads.__globals__
        module["_update_router_qb_beta"]([other], other.config, dist.group.WORLD)
    assert_close(ours.qb_beta, other.qb_beta)
