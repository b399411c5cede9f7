"""The decision and the loss scores, each as one autograd node that keeps little for backward."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from router.choice import choose_experts
from router.scores import RoutingRule, chosen_weights, log_scores_grad, normalized_scores, normalized_scores_grad

FEWEST_BYTES = ((1 << 15, torch.int16), (1 << 31, torch.int32))  # experts that fit, dtype of their ids


def is_te_installed() -> bool:
    """Whether Transformer Engine can be imported; nothing is imported to find out."""
    return find_spec("transformer_engine") is not None


def backend_of(logits: Tensor, *, fused: bool) -> str | None:
    """Return what fuses the decision of these logits: "te" on CUDA where it is installed, "torch", or None."""
    if not fused:
        return None
    return "te" if logits.is_cuda and is_te_installed() else "torch"


class FusedTopK(torch.autograd.Function):
    """Score + choice + weights + scatter in one node; values are bitwise those of the separate steps.

    Saved for backward: the chosen ids in 2 bytes each and their weights [T, K] (pre-softmax: all scores [T, E]); for
    sigmoid and sqrtsoftplus the slopes [T, K] of their logarithms too.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rule: RoutingRule, expert_bias: Tensor | None, expert_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """[T, E], [E] or None, [T, K] or None -> probs [T, E], routing_map [T, E]; see `router.topk.route`."""
        if expert_ids is None:
            expert_ids = choose_experts(logits, rule, expert_bias)
        slopes = None
        if rule.use_pre_softmax:
            kept = logits.softmax(-1)  # [T, E]
            weights = kept.gather(1, expert_ids)
        else:
            chosen_logits = logits.gather(1, expert_ids)  # [T, K]
            kept = weights = chosen_weights(chosen_logits, rule)
            slopes = log_scores_grad(chosen_logits, rule.score_function)
        if rule.scaling_factor is not None:
            weights = weights * rule.scaling_factor
        probs = torch.zeros_like(logits).scatter_(1, expert_ids, weights)
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, expert_ids, True)
        ctx.mark_non_differentiable(routing_map)
        ctx.set_materialize_grads(False)  # else backward gets a map of zeros
        ids_dtype = next(dtype for limit, dtype in FEWEST_BYTES if logits.shape[1] <= limit)
        ctx.save_for_backward(expert_ids.to(ids_dtype), kept, slopes)
        ctx.rule = rule
        return probs, routing_map

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_probs: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad_probs is None:
            return None, None, None, None
        expert_ids, kept, slopes = ctx.saved_tensors
        rule, expert_ids = ctx.rule, expert_ids.long()
        grad_weights = grad_probs.gather(1, expert_ids)  # [T, E] -> [T, K]
        if rule.scaling_factor is not None:
            grad_weights = grad_weights.mul_(rule.scaling_factor)
        if rule.use_pre_softmax:
            grad_chosen = kept.gather(1, expert_ids).mul_(grad_weights)
            grad_logits = kept * -grad_chosen.sum(-1, keepdim=True)
            return grad_logits.scatter_add_(1, expert_ids, grad_chosen), None, None, None
        if rule.topk == 1:
            grad_chosen = grad_weights.mul_(kept).mul_(slopes)
        else:
            grad_chosen = normalized_scores_grad(kept, slopes, grad_weights)
        return torch.zeros_like(grad_probs).scatter_(1, expert_ids, grad_chosen), None, None, None


class FusedLossScores(torch.autograd.Function):
    """Scores normalised over all experts in one node.

    Saved for backward: scores [T, E]; for sigmoid and sqrtsoftplus the logits too, which the z-loss keeps anyway.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, score_function: str) -> Tensor:
        """[T, E] -> [T, E]; see `normalized_scores`."""
        scores = normalized_scores(logits, score_function)
        ctx.save_for_backward(scores, None if score_function == "softmax" else logits)
        ctx.score_function = score_function
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, logits = ctx.saved_tensors
        slopes = None if logits is None else log_scores_grad(logits, ctx.score_function)
        return normalized_scores_grad(scores, slopes, grad), None
