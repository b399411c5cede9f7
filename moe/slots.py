"""What lies around the experts' products, one differentiable step each: rows to slots, activation, slots to rows.

For backends whose products are autograd functions themselves. Sums are made in the dtype of sums and rounded once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dispatchers.permutation import sum_dtype
from moe.activations import Activation
from moe.expert_loop import Slots, add_per_expert, dot_per_expert, sum_per_expert
from moe.expert_weights import ExpertWeights
from moe.grouped_function import Rows, weigh_activation


def gather_slots(tokens: Tensor, slots: Slots) -> Tensor:
    """Return the row of every slot: tokens [R, H] -> [M, H], zeros for padding. Saved for backward: row_ids."""
    return _Gather.apply(tokens, slots.row_ids, slots)


def weighted_activation(first: Tensor, probs: Tensor, activation: Activation) -> Tensor:
    """Return prob * activation: first [M, G, F], probs [M] -> [M, F] in the dtype of first. Saved: both inputs."""
    return _WeightedActivation.apply(first, probs, activation)


def add_slots(y: Tensor, probs: Tensor, bias: Tensor | None, slots: Slots, num_rows: int) -> Tensor:
    """Return for each row the sum of y + prob * bias over its slots.

    Args:
        y: [M, H].
        probs: [M].
        bias: [L, H], or None.
        slots: which row each slot belongs to; results of padding are dropped.
        num_rows: R.

    Returns:
        [R, H] in the dtype of y.

    Saved for backward: row_ids, and with a bias probs and bias.
    """
    return _Add.apply(y, probs, bias, slots.row_ids, slots, num_rows)


def attached_zeros(tokens: Tensor, probs: Tensor, weights: ExpertWeights) -> Tensor:
    """Return zeros of the shape of tokens [R, H], through which everything has a gradient of zeros."""
    out = tokens.new_zeros(tokens.shape)
    for part in (tokens, probs, weights.fc1, weights.fc2, weights.fc1_bias, weights.fc2_bias):
        if part is not None:
            out = out + part.flatten()[:0].sum().to(out.dtype)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, row_ids: Tensor | None, slots: Slots) -> Tensor:
        ctx.save_for_backward(row_ids)
        ctx.slots, ctx.num_rows = replace(slots, row_ids=None), tokens.shape[0]
        return Rows(slots, tokens.shape[0]).gather(tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows = Rows(replace(ctx.slots, row_ids=ctx.saved_tensors[0]), ctx.num_rows)
        return rows.add(grad.to(sum_dtype(grad.dtype))).to(grad.dtype), None, None


class _WeightedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, probs: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(first, probs)
        ctx.activation = activation
        return weigh_activation(activation, first, probs, first.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, probs = ctx.saved_tensors
        wide = first.to(sum_dtype(first.dtype))
        dfirst, weights = torch.empty_like(wide), probs.to(wide.dtype)
        _, dp = ctx.activation.forward_backward(wide, grad.to(wide.dtype, copy=True), weights, dfirst)
        return dfirst.to(first.dtype), dp.to(probs.dtype), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        probs: Tensor,
        bias: Tensor | None,
        row_ids: Tensor | None,
        slots: Slots,
        num_rows: int,
    ) -> Tensor:
        ctx.save_for_backward(row_ids, *(() if bias is None else (probs, bias)))
        ctx.slots, ctx.num_rows = replace(slots, row_ids=None), num_rows
        out = y.to(sum_dtype(y.dtype), copy=bias is not None)
        if bias is not None:
            add_per_expert(out, bias, slots.counts, probs)
        return Rows(slots, num_rows).add(out).to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        row_ids, *biased = ctx.saved_tensors
        dy = Rows(replace(ctx.slots, row_ids=row_ids), ctx.num_rows).gather(grad)  # [R, H] -> [M, H]
        dp = dbias = None
        if biased:
            (probs, bias), counts = biased, ctx.slots.counts
            wide = dy.to(sum_dtype(dy.dtype))
            dp = dot_per_expert(wide, bias, counts).to(probs.dtype)
            if ctx.needs_input_grad[2]:
                dbias = torch.empty_like(bias)
                sum_per_expert(wide * probs.to(wide.dtype).unsqueeze(-1), counts, dbias)
        return dy, dp, dbias, None, None, None
