"""What a training loop calls once per optimizer step, for every router of a model."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from router.balancing import get_updated_expert_bias
from router.collectives import all_reduce_sum
from router.router import TopKRouter


class AllRanks(Protocol):
    """What `update_expert_bias` asks of its groups."""

    @property
    def tp_dp_cp(self) -> dist.ProcessGroup:
        """All ranks."""


def routers_of(model: nn.Module) -> dict[str, TopKRouter]:
    """Return every router of a model once, by its name there, in the order of its modules."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TopKRouter)}


@torch.no_grad()
def update_expert_bias(model: nn.Module, groups: AllRanks) -> int:
    """Move the balancing bias of every router by the load since the last call, and zero the counts.

    Call it after the optimizer step, on every rank. expert_bias moves by moe_router_bias_update_rate. qb_beta becomes
    the mean of the quantiles of all micro-batches and ranks, mixed with the old one by
    moe_router_quantile_balancing_ema, minus its own mean.

    Args:
        model: holds routers anywhere in its modules; the same on every rank.
        groups: the groups that the model was built with; ranks with different tokens are all in tp_dp_cp.

    Returns:
        How many routers have such a bias.

    Collectives: one all_reduce of all counts [sum of E] int64 and one of all sums of quantiles with their numbers
        [sum of E + 1] fp32 over tp_dp_cp, each only if some router needs it. No host sync.

    Source: Megatron-Core finalize_model_grads. Differs: the mean of the quantiles weighs all micro-batches alike, also
        where ranks had different numbers of them.
    """
    routers = routers_of(model).values()
    biased = [router for router in routers if router.expert_bias is not None]
    by_quantile = [router for router in routers if router.qb_beta is not None]
    if biased:
        counts = _sum_over_ranks([_present(router.local_tokens_per_expert) for router in biased], groups)
        for router, count in zip(biased, counts, strict=True):
            bias, rate = _present(router.expert_bias), router.config.moe_router_bias_update_rate
            bias.copy_(get_updated_expert_bias(count, bias, rate))
            _present(router.local_tokens_per_expert).zero_()
    if by_quantile:
        _update_quantiles(by_quantile, groups)
    return len(biased) + len(by_quantile)


def _update_quantiles(routers: list[TopKRouter], groups: AllRanks) -> None:
    """Replace qb_beta of each router by the mean quantile over micro-batches and ranks, and zero the sums."""
    parts = [torch.cat([_present(router.qb_beta_sum), _present(router.qb_beta_count).view(1)]) for router in routers]
    for router, total in zip(routers, _sum_over_ranks(parts, groups), strict=True):
        beta, ema = _present(router.qb_beta), router.config.moe_router_quantile_balancing_ema
        count = total[-1]
        mixed = ema * beta + (1.0 - ema) * total[:-1] / count.clamp(min=1)
        beta.copy_(torch.where(count > 0, mixed - mixed.mean(), beta))
        _present(router.qb_beta_sum).zero_()
        _present(router.qb_beta_count).zero_()


def _sum_over_ranks(parts: list[Tensor], groups: AllRanks) -> tuple[Tensor, ...]:
    """Return each part summed over all ranks, by one all_reduce."""
    counter = getattr(groups, "counter", None)
    total = all_reduce_sum(torch.cat(parts), group=groups.tp_dp_cp, name="tp_dp_cp", counter=counter)
    return total.split([part.numel() for part in parts])


def _present(buffer: Tensor | None) -> Tensor:
    """Return a buffer that the config says is there."""
    assert buffer is not None
    return buffer


@torch.no_grad()
def set_loss_scale(model: nn.Module, scale: float | Tensor) -> None:
    """Tell every router what the main loss is multiplied by before backward, so that its own losses follow.

    Call it before the backward: with the scale of a GradScaler, or with 1 / n where the main loss is divided by n.
    `finalize_gradients` divides by num_microbatches by itself: then leave the scale at 1.

    Args:
        model: holds routers anywhere in its modules.
        scale: a number, or a [] tensor on the model's device, whose value is copied without a host sync.
    """
    for router in routers_of(model).values():
        if isinstance(scale, Tensor):
            router.loss_scale.copy_(scale)
        else:
            router.loss_scale.fill_(scale)


@torch.no_grad()
def reset_global_aux_loss_tracker(model: nn.Module) -> None:
    """Forget the counts of global_aux_loss: a new global batch begins. `finalize_gradients` calls it."""
    for router in routers_of(model).values():
        if router.global_tokens is not None:
            router.global_tokens.zero_()
