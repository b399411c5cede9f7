"""Losses that keep a router healthy, and the function that attaches them to the graph of the main loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from router.topk import choose_experts


def compute_routing_scores_for_aux_loss(logits: Tensor, topk: int, score_function: str) -> tuple[Tensor, Tensor]:
    """Return the plain top-k choice and the scores over all experts that balancing losses use.

    Args:
        logits: [T, E] fp32 or fp64.
        topk: experts per token.
        score_function: "softmax" (over all E) or "sigmoid" (divided by the sum over all E).

    Returns:
        routing_map [T, E] bool, first as in Megatron-Core; scores [T, E] in the dtype of logits, each row sums to 1.

    Raises:
        ValueError: logits are not [T, E], topk out of range, or an unknown score function.

    Source: Megatron-Core moe_utils, function of the same name.
    """
    if score_function not in ("softmax", "sigmoid"):
        raise ValueError(f"score_function ({score_function!r}) must be 'softmax' or 'sigmoid'.")
    scores = logits.softmax(-1) if score_function == "softmax" else F.logsigmoid(logits).softmax(-1)
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, choose_experts(logits, topk), True)
    return chosen, scores


def switch_load_balancing_loss_func(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    topk: int,
    num_experts: int,
    moe_aux_loss_coeff: float,
) -> Tensor:
    """Return the Switch load-balancing loss, coeff * E * sum_e f_e * P_e.

    f_e is the share of all slots that went to expert e, P_e the mean score of expert e. A balanced router gives coeff.

    Args:
        probs: [T, E], scores over all E experts (before top-k), this rank's tokens.
        tokens_per_expert: [E] int64, counts over the group that the loss spans.
        total_num_tokens: tokens (not slots) over that same group; an int or a [] int64 tensor.
        topk: K, slots per token.
        num_experts: E.
        moe_aux_loss_coeff: weight of the loss.

    Returns:
        [] in the dtype of probs; this rank's share: shares add up to the loss over the group. 0 without tokens.

    Source: Switch Transformers, arXiv:2101.03961, section 2.2, equations 4-6; f_e divided by topk for K > 1.
    """
    total = torch.as_tensor(total_num_tokens, device=probs.device).clamp(min=1).to(probs.dtype)
    scale = num_experts * moe_aux_loss_coeff / (topk * total * total)
    return torch.dot(probs.sum(0), tokens_per_expert.to(probs.dtype)) * scale  # [T, E], [E] -> []


def z_loss_func(logits: Tensor, z_loss_coeff: float, total_num_tokens: int | Tensor | None = None) -> Tensor:
    """Return the router z-loss, coeff * mean_t logsumexp(logits_t)^2, which keeps logits small.

    Args:
        logits: [T, E] fp32 or fp64.
        z_loss_coeff: weight of the loss.
        total_num_tokens: tokens over the group that the mean spans; None: the T of logits.

    Returns:
        [] in the dtype of logits; this rank's share of the mean. 0 without tokens.

    Source: ST-MoE, arXiv:2202.08906, section 3.3, equation 5.
    """
    total = logits.shape[0] if total_num_tokens is None else total_num_tokens
    total = torch.as_tensor(total, device=logits.device).clamp(min=1).to(logits.dtype)
    return logits.logsumexp(-1).square().sum() * z_loss_coeff / total  # [T, E] -> []


class _AttachLoss(torch.autograd.Function):
    """Identity on a tensor; in backward the loss gets the gradient `scale`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.loss_dtype, ctx.device = scale, loss.dtype, loss.device
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, torch.full((), ctx.scale, dtype=ctx.loss_dtype, device=ctx.device), None


def attach_loss(tensor: Tensor, loss: Tensor, scale: float = 1.0) -> Tensor:
    """Return tensor unchanged, with scale * loss added to whatever is minimised through it.

    Args:
        tensor: any shape; must lie on the way to the main loss.
        loss: [].
        scale: factor on the gradient of loss; the main loss is not changed in value.

    Returns:
        The values of tensor. Use the returned tensor: without it the loss has no effect.
    """
    return _AttachLoss.apply(tensor, loss, scale)
