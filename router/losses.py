"""Losses that keep a router healthy, and the functions that attach them to the graph of the main loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from router.fused import FusedLossScores, backend_of
from router.scores import check_score_function, normalized_scores


def compute_routing_scores_for_aux_loss(
    logits: Tensor, topk: int, score_function: str, fused: bool = False, padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the plain top-k choice and the scores over all experts that balancing losses use.

    No bias, no group limit and no capacity enters either of them.

    Args:
        logits: [T, E] fp32 or fp64, or a narrower float dtype, computed in fp32.
        topk: experts per token.
        score_function: "softmax" (over all E), or "sigmoid" or "sqrtsoftplus" (divided by the sum over all E).
        fused: one autograd node that keeps the logits alone; on CUDA Transformer Engine's kernel if it is installed.
        padding_mask: [T] bool, True = padding: such rows choose nothing and score 0.

    Returns:
        routing_map [T, E] bool, first as in Megatron-Core; scores [T, E] fp32 or fp64, rows sum to 1 (padding: 0).

    Raises:
        ValueError: logits are not [T, E], topk out of range, or an unknown score function.

    Source: Megatron-Core moe_utils, function of the same name. Differs: the normalisation is exact for any logits.
    """
    check_score_function(score_function)
    if logits.dim() != 2 or not 1 <= topk <= logits.shape[1]:
        raise ValueError(f"topk ({topk}) must lie between 1 and the experts of logits [T, E] ({list(logits.shape)}).")
    wide = logits.float() if logits.itemsize < 4 else logits
    routing_map, scores = loss_scores(wide, topk, score_function, backend=backend_of(logits, fused=fused))
    if padding_mask is None:
        return routing_map, scores
    padding = padding_mask.unsqueeze(-1)  # [T, 1]
    return routing_map & ~padding, scores.masked_fill(padding, 0.0)


def loss_scores(
    logits: Tensor, topk: int, score_function: str, *, backend: str | None, routing_map: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return routing_map and scores [T, E] as `compute_routing_scores_for_aux_loss`.

    Args:
        logits, topk, score_function: as there.
        backend: as in `route`.
        routing_map: [T, E] bool, the top-k if it is known already.
    """
    if backend == "te":
        from router.fused_te import fused_loss_scores, takes_logits

        if takes_logits(logits):
            return fused_loss_scores(logits, topk, score_function)
    fused = backend is not None
    scores = FusedLossScores.apply(logits, score_function) if fused else normalized_scores(logits, score_function)
    if routing_map is not None:
        return routing_map, scores
    chosen = logits.detach().topk(topk, dim=-1).indices  # the order of logits is that of scores, without saturated ties
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, chosen, True), scores


class _WeightedSum(torch.autograd.Function):
    """Sum of values times weights over the last dimension; backward has the weights of this very forward.

    They are no saved tensors, which activation checkpointing would replace by those of a repeated forward: counts of a
    global batch go on in between.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, weights: Tensor) -> Tensor:
        ctx.weights = weights
        return (values * weights).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.unsqueeze(-1) * ctx.weights, None


def switch_load_balancing_loss_func(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    topk: int,
    num_experts: int,
    moe_aux_loss_coeff: float,
    fused: bool = False,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """Return the Switch load-balancing loss, coeff * E * sum_e f_e * P_e.

    f_e is the share of all slots that went to expert e, P_e the mean score of expert e. A balanced router gives coeff.

    Args:
        probs: [..., T, E], scores over all E experts (before top-k), this rank's tokens.
        tokens_per_expert: [..., E], counts over the group that the loss spans.
        total_num_tokens: tokens (not slots) over that same group; an int or a [...] tensor.
        topk: K, slots per token.
        num_experts: E.
        moe_aux_loss_coeff: weight of the loss.
        fused: on CUDA use Transformer Engine's kernel if it is installed; for [T, E] alone.
        padding_mask: [..., T] bool, True = padding: the scores of such rows do not count.

    Returns:
        [...] in the dtype of probs; this rank's share: shares add up to the loss over the group. 0 without tokens.

    Source: Switch Transformers, arXiv:2101.03961, section 2.2, equations 4-6; f_e divided by topk for K > 1.
        Megatron-Core moe_utils, function of the same name. Differs: there True in padding_mask means valid.
    """
    if padding_mask is not None:
        probs = probs.masked_fill(padding_mask.unsqueeze(-1), 0.0)
    if probs.dim() == 2 and backend_of(probs, fused=fused) == "te":
        from router.fused_te import fused_aux_loss, takes_logits

        if takes_logits(probs):
            return fused_aux_loss(probs, tokens_per_expert, total_num_tokens, topk, num_experts, moe_aux_loss_coeff)
    total = torch.as_tensor(total_num_tokens, device=probs.device).clamp(min=1).to(probs.dtype)
    scale = num_experts * moe_aux_loss_coeff / (topk * total * total)
    weights = tokens_per_expert.to(probs.dtype) * scale.unsqueeze(-1)  # [..., E]
    return _WeightedSum.apply(probs.sum(-2), weights)  # [..., T, E] -> [..., E] -> [...]


class _LogSumExp(torch.autograd.Function):
    """logits.logsumexp(-1), with one [T, E] tensor in backward instead of three."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        sums = logits.logsumexp(-1)  # [T, E] -> [T]
        ctx.save_for_backward(logits, sums)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        logits, sums = ctx.saved_tensors
        return (logits - sums.unsqueeze(-1)).exp_().mul_(grad.unsqueeze(-1))


def z_loss_func(
    logits: Tensor,
    z_loss_coeff: float,
    padding_mask: Tensor | None = None,
    *,
    total_num_tokens: int | Tensor | None = None,
) -> Tensor:
    """Return the router z-loss, coeff * mean_t logsumexp(logits_t)^2, which keeps logits small.

    Args:
        logits: [T, E] fp32 or fp64.
        z_loss_coeff: weight of the loss.
        padding_mask: [T] bool, True = padding: such rows do not count.
        total_num_tokens: tokens over the group that the mean spans; None: the valid rows of logits.

    Returns:
        [] in the dtype of logits; this rank's share of the mean. 0 without tokens.

    Source: ST-MoE, arXiv:2202.08906, section 3.3, equation 5.
    """
    squares = _LogSumExp.apply(logits).square()  # [T, E] -> [T]
    if padding_mask is not None:
        squares = squares.masked_fill(padding_mask, 0.0)
    if total_num_tokens is None:
        total_num_tokens = logits.shape[0] if padding_mask is None else padding_mask.logical_not().sum()
    total = torch.as_tensor(total_num_tokens, device=logits.device).clamp(min=1).to(logits.dtype)
    return squares.sum() * z_loss_coeff / total


@dataclass(frozen=True)
class Sequences:
    """Which sequence each of T tokens belongs to.

    Attributes:
        num_sequences: N, the same on every rank that shares the sequences.
        ids: [T] int64, 0 .. N - 1, or N for a token of none; None: token t belongs to sequence t % N, the order of
            [S, B] tokens with N = B.
    """

    num_sequences: int
    ids: Tensor | None = None

    @classmethod
    def of(cls, shape: torch.Size, cu_seqlens: Tensor | None) -> Sequences:
        """Return the sequences of hidden states.

        Args:
            shape: [S, B, H], or [T, H] for one sequence.
            cu_seqlens: [N + 1] int, the offsets of N packed sequences in this rank's tokens, ascending from 0; tokens
                after the last offset belong to none. Needs B = 1. None: B sequences.

        Raises:
            ValueError: cu_seqlens is no vector of ints, or B is not 1; on the CPU also offsets that do not start at 0,
                do not ascend or pass the last token. Elsewhere, and in a compiled graph, values are not read, because
                that is a host sync.
        """
        batch = torch.Size(shape[1:-1]).numel()
        if cu_seqlens is None:
            return cls(batch)
        if not isinstance(cu_seqlens, Tensor):
            raise ValueError(f"cu_seqlens ({type(cu_seqlens).__name__}) must be a tensor of [sequences + 1] integers.")
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or len(cu_seqlens) < 2:
            raise ValueError(
                f"cu_seqlens ({list(cu_seqlens.shape)}, {cu_seqlens.dtype}) must be [sequences + 1] integers."
            )
        if batch != 1:
            raise ValueError(
                f"cu_seqlens packs sequences in one row, but the batch of {list(shape)} is {batch}; use 1."
            )
        if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
            offsets = cu_seqlens.tolist()
            if offsets[0] != 0 or offsets != sorted(offsets) or offsets[-1] > shape[0]:
                raise ValueError(
                    f"cu_seqlens ({offsets}) must ascend from 0 to at most the {shape[0]} tokens of this rank."
                )
        tokens = torch.arange(shape[0], device=cu_seqlens.device)
        ends = cu_seqlens[1:].to(torch.int64)
        return cls(len(cu_seqlens) - 1, torch.searchsorted(ends, tokens, right=True))

    def sum(self, values: Tensor) -> Tensor:
        """Add up the rows of each sequence: [T, C] -> [N, C]."""
        if self.ids is None:
            length = len(values) // max(self.num_sequences, 1)
            return values.view(length, self.num_sequences, values.shape[-1]).sum(0)
        sums = values.new_zeros(self.num_sequences + 1, values.shape[-1]).index_add(0, self.ids, values)
        return sums[:-1]


class _AttachLoss(torch.autograd.Function):
    """Identity on a tensor; in backward the loss gets the gradient `scale`, as it is then."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
        ctx.scale, ctx.loss_dtype, ctx.device = scale, loss.dtype, loss.device
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, torch.ones((), dtype=ctx.loss_dtype, device=ctx.device) * ctx.scale, None


def attach_loss(tensor: Tensor, loss: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Return tensor unchanged, with scale * loss added to whatever is minimised through it.

    Args:
        tensor: any shape; must lie on the way to the main loss.
        loss: [].
        scale: factor on the gradient of loss, read in backward; the main loss is not changed in value.

    Returns:
        The values of tensor. Use the returned tensor: without it the loss has no effect.
    """
    return _AttachLoss.apply(tensor, loss, scale)


class _OnBackward(torch.autograd.Function):
    """Identity; runs an action once, in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, action: Callable[[], None]) -> Tensor:
        ctx.action = action
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.action is not None:
            ctx.action()
        ctx.action = None
        return grad, None


def on_backward(tensor: Tensor, action: Callable[[], None]) -> Tensor:
    """Return tensor unchanged; the action runs once, when the gradient of the returned tensor is there.

    A forward that activation checkpointing repeats in backward has no gradient of its own (non-reentrant), or is the
    only one that has (reentrant): so what the action counts is counted once in either case. If tensor takes no
    gradient, the action runs at once, unless this forward is a repetition inside a backward.
    """
    if tensor.requires_grad:
        return _OnBackward.apply(tensor, action)
    is_repetition = torch._C._current_graph_task_id() != -1  # as torch.utils.checkpoint asks it
    if not is_repetition:
        action()
    return tensor
