"""Every way to route through a layer over ranks: outputs and gradients of the reference for the router's own decision.

The decision of each rank depends on its own tokens alone, so a router on one process takes it too; what it should be is
tested in tests/router. Here: that the layer carries it out on any number of ranks, whatever its counts are.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe import (
    MoEConfig,
    MoELayer,
    ProcessGroups,
    RoutingRecords,
    collect_metrics,
    finalize_gradients,
    recompute,
    update_expert_bias,
)
from tests import reference
from tests.distributed.test_layer import factorings, failures_of, full, nan_memory
from tests.ranks import run_ranks
from tests.tolerances import assert_close

NUM_EXPERTS, HIDDEN, FFN = 8, 12, 20
TOKENS = (5, 0, 19, 9)
SIGMOID = {"moe_router_score_function": "sigmoid"}
BIASED = {**SIGMOID, "moe_router_enable_expert_bias": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "groups, bias, scaled": {
        **BIASED,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_topk": 4,
    },
    "sqrtsoftplus, fused": {"moe_router_score_function": "sqrtsoftplus", "moe_router_fusion": True},
    "capacity": {"moe_expert_capacity_factor": 0.6},
    "capacity by position, recomputed": {
        "moe_expert_capacity_factor": 0.6,
        "moe_token_drop_policy": "position",
        "moe_layer_recompute": True,
    },
    "padded to capacity": {
        "moe_expert_capacity_factor": 1.5,
        "moe_pad_expert_input_to_capacity": True,
        "moe_expert_capacity_tokens": max(TOKENS),
    },
    "capacity, padded map": {"moe_expert_capacity_factor": 0.6, "moe_router_padding_for_quantization": True},
    "rounded": {"moe_token_rounding_policy": "nearest", "moe_token_rounding_multiple": 4},
    "rounded up, padded map": {
        "moe_token_rounding_policy": "up",
        "moe_token_rounding_multiple": 2,
        "moe_router_padding_for_quantization": True,
    },
    "expert choice": {"moe_router_type": "expert_choice"},
    "zero-computation experts": {
        "moe_num_null_experts": 2,
        "moe_num_identity_experts": 1,
        "moe_num_constant_experts": 2,
    },
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "quantiles": {"moe_router_load_balancing_type": "quantile_balancing"},
    "balanced": {"moe_router_force_load_balancing": "balanced"},
}


def config_of(option: str) -> MoEConfig:
    sizes = {"hidden_size": HIDDEN, "num_moe_experts": NUM_EXPERTS, "moe_ffn_hidden_size": FFN, "moe_router_topk": 2}
    exact = {"params_dtype": torch.float64, "moe_router_dtype": "fp64", "init_method_std": 0.5}
    return MoEConfig(**{**sizes, **exact, **OPTIONS[option]})


def build(option: str, groups: ProcessGroups | None) -> MoELayer:
    torch.manual_seed(3)
    layer = MoELayer(config_of(option), groups)
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(torch.linspace(-0.3, 0.3, NUM_EXPERTS))
    return layer


def draw(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """hidden states [S, 1, H], the gradient of the output, and a padding mask [S, 1]."""
    generator = torch.Generator().manual_seed(rank)
    hidden, gradient = torch.randn(2, TOKENS[rank], 1, HIDDEN, generator=generator, dtype=torch.float64)
    return hidden, gradient, torch.rand(TOKENS[rank], 1, generator=generator) < 0.3


def expected_of(option: str, ep_size: int, padded: bool) -> dict[str, Tensor]:
    """Output and gradients on this rank's tokens, by the reference; expert gradients are means over the ranks."""
    alone = build(option, None)
    alone.router.ep_size = ep_size  # for the forced balance, which takes ranks in turn
    hidden, gradient, padding = draw(dist.get_rank())
    leaf = hidden.requires_grad_()
    tokens = leaf.view(-1, HIDDEN)
    probs, routing_map = alone.router(leaf, padding if padded else None)
    act = partial(reference.activation, "silu")
    fc1, fc2 = alone.experts.linear_fc1.weight, alone.experts.linear_fc2.weight
    output = reference.experts(tokens, probs[:, :NUM_EXPERTS], routing_map[:, :NUM_EXPERTS], fc1, fc2, act)
    if alone.zero_experts is not None:
        output = output + alone.zero_experts(tokens, probs[:, NUM_EXPERTS:])
    output = output.view_as(hidden)
    leaves = {"hidden": leaf, "router": alone.router.weight, "fc1": fc1, "fc2": fc2}
    gradients = torch.autograd.grad(output, list(leaves.values()), gradient, allow_unused=True, materialize_grads=True)
    found = dict(zip(leaves, gradients, strict=True))
    for name in ("router", "fc1", "fc2"):
        dist.all_reduce(found[name])
        found[name] /= dist.get_world_size()
    return {"output": output.detach(), **found}


def check(option: str, groups: ProcessGroups, padded: bool) -> list[str]:
    expected = expected_of(option, groups.ep.size(), padded)
    layer = build(option, groups)
    hidden, gradient, padding = draw(dist.get_rank())
    hidden.requires_grad_()
    output = layer(hidden, padding) if padded else layer(hidden)
    output.backward(gradient)
    finalize_gradients(layer, groups)
    weights = {"router": layer.router, "fc1": layer.experts.linear_fc1, "fc2": layer.experts.linear_fc2}
    actual = {"output": output, "hidden": hidden.grad, **{name: full(m.weight.grad) for name, m in weights.items()}}
    update_expert_bias(layer, groups)
    collect_metrics(layer, groups)
    found = []
    for name, value in expected.items():
        try:
            assert_close(actual[name], value, what=name)
        except AssertionError as error:
            found.append(str(error))
    return found


def worker(option: str) -> list[str]:
    found = []
    with nan_memory():
        for ep, etp in factorings(dist.get_world_size()):
            groups = ProcessGroups.build(ep, etp)
            for padded in (False, True):
                lines = check(option, groups, padded)
                found += [f"ep {ep}, etp {etp}, padding {padded}: {line}" for line in lines]
    return found


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_option_on_every_factoring(world_size: int, option: str) -> None:
    assert failures_of(run_ranks(worker, world_size, option)) == ""


def per_token_worker() -> list[str]:
    """Losses are sums over valid tokens: gradients are those of the sum over all ranks, divided by all valid tokens."""
    found = []
    for ep, etp in factorings(dist.get_world_size()):
        groups = ProcessGroups.build(ep, etp)
        expected = expected_of("groups, bias, scaled", ep, padded=True)
        torch.manual_seed(3)
        config = replace(config_of("groups, bias, scaled"), calculate_per_token_loss=True)
        layer = MoELayer(config, groups)
        layer.router.expert_bias.copy_(torch.linspace(-0.3, 0.3, NUM_EXPERTS))
        hidden, gradient, padding = draw(dist.get_rank())
        layer(hidden, padding).backward(gradient)
        num_tokens = (~padding).sum()
        finalize_gradients(layer, groups, num_microbatches=3, num_tokens=num_tokens)
        dist.all_reduce(num_tokens)
        weights = {"router": layer.router, "fc1": layer.experts.linear_fc1, "fc2": layer.experts.linear_fc2}
        for name, module in weights.items():
            wanted = expected[name] * dist.get_world_size() / num_tokens
            try:
                assert_close(full(module.weight.grad), wanted, what=f"ep {ep}, etp {etp}, {name}")
            except AssertionError as error:
                found.append(str(error))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_per_token_losses_with_uneven_counts(world_size: int) -> None:
    assert failures_of(run_ranks(per_token_worker, world_size)) == ""


def replay_worker(use_reentrant: bool) -> list[bool]:
    """Record, recompute and replay under expert parallelism: the same collectives on every rank, the same results."""
    groups = ProcessGroups.build(expert_model_parallel_size=dist.get_world_size())
    layer = build("capacity", groups)
    hidden, gradient, _ = draw(dist.get_rank())
    hidden.requires_grad_()
    results, records = [], RoutingRecords()
    for how in ("plain", "recompute", "record", "replay"):
        hidden.grad = None
        layer.zero_grad()
        if how in ("record", "replay"):
            with getattr(records, how)(layer):
                output = layer(hidden)
                output.backward(gradient)
        else:
            output = layer(hidden) if how == "plain" else recompute(layer, hidden, use_reentrant=use_reentrant)
            output.backward(gradient)
        results.append([output.detach(), hidden.grad.clone(), full(layer.experts.linear_fc1.weight.grad)])
    return [torch.equal(left, right) for result in results[1:] for left, right in zip(results[0], result, strict=True)]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_replay_and_recompute_over_ranks(world_size: int, use_reentrant: bool) -> None:
    for same in run_ranks(replay_worker, world_size, use_reentrant):
        assert same == [True] * 9


def free_row_worker(option: str) -> int:
    """Only the first rank has a token that the replay leaves to the router."""
    groups = ProcessGroups.build(tensor_model_parallel_size=dist.get_world_size())
    layer, records = build(option, groups), RoutingRecords()
    ids = torch.arange(6).view(3, 2)
    records.set("router", ids.index_fill(0, torch.tensor([1]), -1) if dist.get_rank() == 0 else ids)
    with records.replay(layer):
        layer(torch.randn(3, 1, HIDDEN, dtype=torch.float64)).sum().backward()
    return int(layer.router.tokens_per_expert.sum())


@pytest.mark.parametrize("option", ["quantiles", "sinkhorn"])
def test_a_free_row_on_one_rank_alone_holds_nobody_up(option: str) -> None:
    assert run_ranks(free_row_worker, 2, option) == [6, 6]
