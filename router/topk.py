"""From logits to the routing decision: score function, top-k, and the two dense results probs and routing_map."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def topk_routing_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    *,
    score_function: str = "softmax",
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """Choose topk experts for each token and weight them.

    softmax: weights are the softmax over the chosen logits, or with use_pre_softmax the chosen entries of the softmax
    over all E, not renormalised. sigmoid: the chosen scores divided by their sum (topk = 1: the score itself).

    Args:
        logits: [T, E] fp32 or fp64.
        topk: experts per token, 1 <= topk <= E.
        use_pre_softmax: softmax before the choice instead of after it.
        score_function: "softmax" or "sigmoid".
        fused: one autograd function for score, choice and scatter. Values are bitwise those of the unfused path. It
            saves the routing map and the K chosen logits (pre-softmax: all E scores) instead of every intermediate.

    Returns:
        probs [T, E] in the dtype of logits, zero where not routed; routing_map [T, E] bool, True where routed.
        Read-only from here on: the fused path needs the map again in backward.

    Raises:
        ValueError: logits are not [T, E], topk out of range, an unknown score function, or topk = 1 with softmax after
            the choice, whose gradient is zero.

    Source: Megatron-Core moe_utils, function of the same name. Differs: the choice compares logits, not scores, so
        saturated scores do not tie; the sigmoid normalisation is exact for any scores (no 1e-20 under the fraction).
    """
    _check(topk, use_pre_softmax, score_function)
    if fused:
        return _FusedTopK.apply(logits, topk, use_pre_softmax, score_function)
    expert_ids = choose_experts(logits, topk)
    if use_pre_softmax:
        weights = logits.softmax(-1).gather(1, expert_ids)  # [T, E] -> [T, K]
    else:
        weights = _weights(logits.gather(1, expert_ids), score_function)  # [T, K]
    return _scatter(logits, expert_ids, weights)


def _check(topk: int, use_pre_softmax: bool, score_function: str) -> None:
    if score_function not in ("softmax", "sigmoid"):
        raise ValueError(f"score_function ({score_function!r}) must be 'softmax' or 'sigmoid'.")
    if use_pre_softmax and score_function != "softmax":
        raise ValueError(f"use_pre_softmax (True) belongs to score_function 'softmax', not to {score_function!r}.")
    if topk == 1 and score_function == "softmax" and not use_pre_softmax:
        raise ValueError("topk (1) with softmax after the choice has no gradient; use_pre_softmax=True or 'sigmoid'.")


def choose_experts(logits: Tensor, topk: int) -> Tensor:
    """[T, E] -> [T, K] int64 expert ids, ascending in each row: the order in which the routing map lists them."""
    if logits.dim() != 2:
        raise ValueError(f"logits ({tuple(logits.shape)}) must have two dimensions, tokens and experts.")
    if not 1 <= topk <= logits.shape[1]:
        raise ValueError(f"topk ({topk}) must lie between 1 and the number of experts ({logits.shape[1]}).")
    return logits.detach().topk(topk, dim=-1).indices.sort(dim=-1).values


def _weights(chosen_logits: Tensor, score_function: str) -> Tensor:
    """[T, K] logits of the chosen experts -> [T, K] weights.

    s / sum(s) of sigmoid scores is the softmax of their logarithms: it stays normalised where the scores underflow.
    """
    if score_function == "softmax":
        return chosen_logits.softmax(-1)
    return chosen_logits.sigmoid() if chosen_logits.shape[-1] == 1 else F.logsigmoid(chosen_logits).softmax(-1)


def _weights_grad(chosen_logits: Tensor, grad_weights: Tensor, score_function: str) -> Tensor:
    """Gradient of `_weights` with respect to chosen_logits: [T, K], [T, K] -> [T, K]."""
    weights = _weights(chosen_logits, score_function)
    if score_function == "sigmoid" and weights.shape[-1] == 1:
        return grad_weights * weights * (1 - weights)
    grad = weights * grad_weights
    grad = grad - weights * grad.sum(-1, keepdim=True)
    return grad if score_function == "softmax" else grad * (-chosen_logits).sigmoid()


def _scatter(logits: Tensor, expert_ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """[T, K] ids and weights -> probs [T, E], routing_map [T, E] bool."""
    probs = torch.zeros_like(logits).scatter(1, expert_ids, weights)
    routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, expert_ids, True)
    return probs, routing_map


class _FusedTopK(torch.autograd.Function):
    """Score + top-k + scatter in one node. Saves the routing map, and what the gradient needs beside it."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, topk: int, use_pre_softmax: bool, score_function: str
    ) -> tuple[Tensor, Tensor]:
        expert_ids = choose_experts(logits, topk)
        if use_pre_softmax:
            kept = logits.softmax(-1)  # [T, E]
            weights = kept.gather(1, expert_ids)
        else:
            kept = logits.gather(1, expert_ids)  # [T, K]
            weights = _weights(kept, score_function)
        probs, routing_map = _scatter(logits, expert_ids, weights)
        ctx.mark_non_differentiable(routing_map)
        ctx.save_for_backward(routing_map, kept)
        ctx.topk, ctx.use_pre_softmax, ctx.score_function = topk, use_pre_softmax, score_function
        return probs, routing_map

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_probs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        routing_map, kept = ctx.saved_tensors
        num_tokens = routing_map.shape[0]
        expert_ids = torch.nonzero_static(routing_map, size=num_tokens * ctx.topk)[:, 1].view(num_tokens, ctx.topk)
        grad_weights = grad_probs.gather(1, expert_ids)  # [T, E] -> [T, K]
        if ctx.use_pre_softmax:
            grad_chosen = kept.gather(1, expert_ids) * grad_weights
            grad_logits = kept * -grad_chosen.sum(-1, keepdim=True)
            return grad_logits.scatter_add_(1, expert_ids, grad_chosen), None, None, None
        grad_chosen = _weights_grad(kept, grad_weights, ctx.score_function)
        return torch.zeros_like(grad_probs).scatter_(1, expert_ids, grad_chosen), None, None, None
