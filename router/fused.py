"""The decision and the loss scores, each as one autograd node that keeps little for backward."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from router.choice import choose_experts, scatter_weights
from router.scores import (
    RoutingRule,
    chosen_weights,
    chosen_weights_grad,
    normalized_scores,
    normalized_scores_grad,
)

FEWEST_BYTES = ((1 << 15, torch.int16), (1 << 31, torch.int32))  # experts that fit, dtype of their ids


def is_te_installed() -> bool:
    """Whether Transformer Engine can be imported; nothing is imported to find out."""
    return find_spec("transformer_engine") is not None


class FusedTopK(torch.autograd.Function):
    """Score + choice + weights + scatter in one node; values are bitwise those of the separate steps.

    Saved for backward: the chosen ids in 2 bytes each, and the chosen logits [T, K] (pre-softmax: all scores [T, E]).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rule: RoutingRule, expert_bias: Tensor | None, expert_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """[T, E], [E] or None, [T, K] or None -> probs [T, E], routing_map [T, E]; see `router.topk.route`."""
        if expert_ids is None:
            expert_ids = choose_experts(logits, rule, expert_bias)
        if rule.use_pre_softmax:
            kept = logits.softmax(-1)  # [T, E]
            weights = kept.gather(1, expert_ids)
        else:
            kept = logits.gather(1, expert_ids)  # [T, K]
            weights = chosen_weights(kept, rule)
        if rule.scaling_factor is not None:
            weights = weights * rule.scaling_factor
        probs, routing_map = scatter_weights(logits, expert_ids, weights)
        ctx.mark_non_differentiable(routing_map)
        ids_dtype = next(dtype for limit, dtype in FEWEST_BYTES if logits.shape[1] <= limit)
        ctx.save_for_backward(expert_ids.to(ids_dtype), kept)
        ctx.rule, ctx.num_experts = rule, logits.shape[1]
        return probs, routing_map

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_probs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        expert_ids, kept = ctx.saved_tensors
        rule, expert_ids = ctx.rule, expert_ids.long()
        grad_weights = grad_probs.gather(1, expert_ids)  # [T, E] -> [T, K]
        if rule.scaling_factor is not None:
            grad_weights = grad_weights * rule.scaling_factor
        if rule.use_pre_softmax:
            grad_chosen = kept.gather(1, expert_ids) * grad_weights
            grad_logits = kept * -grad_chosen.sum(-1, keepdim=True)
            return grad_logits.scatter_add_(1, expert_ids, grad_chosen), None, None, None
        grad_chosen = chosen_weights_grad(kept, grad_weights, rule)
        return torch.zeros_like(grad_probs).scatter_(1, expert_ids, grad_chosen), None, None, None


class FusedLossScores(torch.autograd.Function):
    """Scores normalised over all experts in one node. Saved for backward: the logits [T, E] themselves."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, score_function: str) -> Tensor:
        """[T, E] -> [T, E]; see `normalized_scores`."""
        ctx.save_for_backward(logits)
        ctx.score_function = score_function
        return normalized_scores(logits, score_function)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        return normalized_scores_grad(logits, grad, ctx.score_function), None
