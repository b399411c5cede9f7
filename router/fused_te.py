"""Transformer Engine's fused router kernels, for CUDA tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from transformer_engine.pytorch.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

from router.scores import RoutingRule


def takes_logits(logits: Tensor) -> bool:
    """Whether the kernels take these values: not fp64, and at least one token."""
    return logits.dtype != torch.float64 and logits.shape[0] > 0


def takes(logits: Tensor, rule: RoutingRule) -> bool:
    """Whether the kernel decides as the rule says: group scores are sums of the best topk // group_topk."""
    usual = rule.group_topk is None or rule.group_score_topk in (None, rule.topk // rule.group_topk)
    return usual and takes_logits(logits)


def fused_topk(logits: Tensor, rule: RoutingRule, expert_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return probs [T, E] in the dtype of logits, and routing_map [T, E] bool; see `router.topk.route`."""
    return fused_topk_with_score_function(
        logits=logits.contiguous(),
        topk=rule.topk,
        use_pre_softmax=rule.use_pre_softmax,
        num_groups=rule.num_groups,
        group_topk=rule.group_topk,
        scaling_factor=rule.scaling_factor,
        score_function=rule.score_function,
        expert_bias=expert_bias,
    )


def fused_loss_scores(logits: Tensor, topk: int, score_function: str) -> tuple[Tensor, Tensor]:
    """Return routing_map [T, E] bool and scores [T, E] fp32; see `router.losses.loss_scores`."""
    return fused_compute_score_for_moe_aux_loss(logits=logits.contiguous(), topk=topk, score_function=score_function)


def fused_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    topk: int,
    num_experts: int,
    coeff: float,
) -> Tensor:
    """Return the switch loss [] of scores [T, E]; see `router.losses.switch_load_balancing_loss_func`."""
    if tokens_per_expert.dtype not in (torch.int32, torch.int64):
        tokens_per_expert = tokens_per_expert.float()
    if isinstance(total_num_tokens, Tensor):
        total_num_tokens = total_num_tokens.to(torch.int64)
    return fused_moe_aux_loss(
        probs=probs.contiguous(),
        tokens_per_expert=tokens_per_expert,
        total_num_tokens=total_num_tokens,
        num_experts=num_experts,
        topk=topk,
        coeff=coeff,
    )
