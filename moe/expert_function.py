"""The expert computation as one autograd function: rows read by index, GEMM, activation x prob, GEMM, rows added up.

It reads rows by index while it computes them, so no permuted copy of the tokens exists. Saved for backward: the
dispatched rows, the first GEMM's output, indices and probs. The gather, the activation and the second GEMM's input are
recomputed; expert outputs are never needed, because the prob multiplies the activation before the second GEMM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe.activations import Activation
from moe.expert_loop import Chunk, ExpertLoop, Slots, add_per_expert, dot_per_expert
from moe.expert_weights import ExpertWeights, WeightSums
from moe.quantization.stored import FirstGemm, load_activation, store_activation
from router.gating import no_autocast

if TYPE_CHECKING:
    from moe.deferred_gradients import DeferredGradients


def expert_mlp(
    tokens: Tensor,
    probs: Tensor | None,
    slots: Slots,
    activation: Activation,
    weights: ExpertWeights,
    deferred: DeferredGradients | None = None,
    *,
    first_gemm: FirstGemm = "keep",
) -> Tensor:
    """Return for each row the sum over its slots of fc2(prob * activation(fc1(row))) + prob * fc2_bias.

    Products run in `gemm_dtype`, activation and sums in fp32 (fp64 for fp64); results are rounded once. Autocast does
    not reach inside.

    Args:
        tokens: [R, H].
        probs: [M] fp32 or fp64, or None for 1.
        slots: which rows each expert reads.
        activation: the activation, which says whether G is 1 or 2.
        weights: what the experts are.
        deferred: takes over the gradients of the weights; None: this call's backward computes them.
        first_gemm: what happens to the first GEMM's output until backward: "keep", "fp8" keep it in FP8, "recompute".

    Returns:
        [R, H] in the dtype of tokens; rows that no slot reads are 0.

    Raises:
        ValueError: in deterministic mode, counts that are no multiple of its tile.

    Saved for backward: tokens, the first GEMM's output [M, G, F] in the dtype of tokens (1 byte a value and 4 a scale
        of 128 in FP8; none if it is recomputed), row_ids, probs, parameters.
    """
    if deferred is not None:
        deferred.check(slots)
        weights = deferred.detached
    with no_autocast(tokens.device):
        return _ExpertMLP.apply(
            tokens,
            probs,
            weights.fc1,
            weights.fc2,
            weights.fc1_bias,
            weights.fc2_bias,
            None if deferred is None else deferred.signal,
            slots,
            activation,
            deferred,
            first_gemm,
        )


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        probs: Tensor | None,
        fc1_weight: Tensor,
        fc2_weight: Tensor,
        fc1_bias: Tensor | None,
        fc2_bias: Tensor | None,
        signal: Tensor | None,
        slots: Slots,
        activation: Activation,
        deferred: DeferredGradients | None,
        first_gemm: FirstGemm,
    ) -> Tensor:
        weights = ExpertWeights(fc1_weight, fc2_weight, fc1_bias, fc2_bias)
        tile_rows = None if deferred is None else deferred.tile_rows
        experts = _Experts(ExpertLoop(tokens, slots, fc1_weight.shape[1:], tile_rows), weights)
        loop, ffn, num_slots = experts.loop, fc2_weight.shape[-1], sum(slots.counts)
        width = fc1_weight.shape[1] * ffn  # G * F
        kept = None if first_gemm == "recompute" else loop.new(num_slots, width)
        out = loop.new_sums(*tokens.shape)  # [R, H]
        for chunk in loop.chunks:
            x = loop.gather(tokens, chunk, "x")  # [m, H]
            first = experts.first(x, chunk, None if kept is None else kept[chunk.slots])  # [m, G, F], wide
            hidden = activation.forward(first, loop.scratch("hidden", chunk, ffn, dtype=loop.sum_dtype))  # [m, F]
            if probs is not None:
                hidden.mul_(probs[chunk.slots].unsqueeze(-1))
            hidden = loop.cast(hidden, "h", chunk)
            y = loop.multiply(chunk, hidden, experts.fc2, "w2", loop.results(chunk, out), transpose=True)  # [m, H]
            y = loop.widen(y, "y wide", chunk)
            if fc2_bias is not None:
                add_per_expert(
                    y, experts.of(fc2_bias, chunk), chunk.counts, None if probs is None else probs[chunk.slots]
                )
            loop.add(y, chunk, out)
        stored = store_activation(None if kept is None else kept.view(-1, *fc1_weight.shape[1:3]), first_gemm)
        parameters = (fc1_weight, fc2_weight, fc1_bias, fc2_bias)
        ctx.save_for_backward(tokens, slots.row_ids, probs, *parameters, *stored.tensors)
        ctx.stored = stored.without_tensors()
        ctx.slots, ctx.activation, ctx.deferred = replace(slots, row_ids=None), activation, deferred
        if deferred is not None:
            ctx.index, deferred.num_calls = deferred.num_calls, deferred.num_calls + 1
        return loop.rounded(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with no_autocast(grad.device):
            return _ExpertMLP.differentiate(ctx, grad)

    @staticmethod
    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments of forward."""
        tokens, row_ids, probs, fc1_weight, fc2_weight, fc1_bias, fc2_bias, *stored = ctx.saved_tensors
        first_output = load_activation(ctx.stored.with_tensors(*stored), tokens.dtype)  # [M, G, F]
        slots, deferred = replace(ctx.slots, row_ids=row_ids), ctx.deferred
        weights = ExpertWeights(fc1_weight, fc2_weight, fc1_bias, fc2_bias)
        tile_rows = None if deferred is None else deferred.tile_rows
        experts = _Experts(ExpertLoop(tokens, slots, fc1_weight.shape[1:], tile_rows), weights)
        loop, ffn, num_slots = experts.loop, fc2_weight.shape[-1], sum(slots.counts)
        num_inputs = fc1_weight.shape[1]
        grad_tokens = loop.new_sums(*tokens.shape)  # [R, H]
        grad_probs = None if probs is None else torch.empty_like(probs)
        sums = WeightSums(weights, ctx.needs_input_grad[2:6])
        kept = None
        if deferred is not None and ctx.needs_input_grad[6]:
            kept = [loop.new(num_slots, width, dtype=loop.gemm_dtype) for width in (ffn, num_inputs * ffn)]
        for chunk in loop.chunks:
            x, dy = loop.gather(tokens, chunk, "x"), loop.gather(grad, chunk, "dy")  # [m, H]
            first = experts.first(x, chunk) if first_output is None else first_output[chunk.slots]
            first = loop.widen(first, "first wide", chunk)  # [m, G, F]
            dh = loop.multiply(chunk, dy, experts.fc2, "w2", loop.scratch("dh", chunk, ffn))  # [m, F]
            dfirst = loop.scratch("dfirst wide", chunk, num_inputs, ffn, dtype=loop.sum_dtype)
            p = None if probs is None else probs[chunk.slots].to(loop.sum_dtype)
            hidden, dp = ctx.activation.forward_backward(
                first,
                loop.widen(dh, "dh wide", chunk),
                p,
                dfirst,
                loop.scratch("hidden", chunk, ffn, dtype=loop.sum_dtype),
            )  # [m, F], [m]
            hidden = loop.cast(hidden, "h", chunk)
            dfirst_cast = loop.cast(dfirst.flatten(1), "dfirst", chunk)  # [m, G * F]
            if kept is None:
                sums.write(chunk, x, dy, hidden, dfirst_cast, p, dfirst)
            else:
                kept[0][chunk.slots], kept[1][chunk.slots] = hidden, dfirst_cast
            if grad_probs is not None and dp is not None:
                if fc2_bias is not None:
                    wide = loop.widen(dy, "dy wide", chunk)
                    dp += dot_per_expert(wide, experts.of(fc2_bias, chunk), chunk.counts)
                grad_probs[chunk.slots] = dp
            dx = loop.multiply(chunk, dfirst_cast, experts.fc1, "w1", loop.results(chunk, grad_tokens))
            loop.add(loop.widen(dx, "y wide", chunk), chunk, grad_tokens)
        if kept is not None:
            ones = grad.new_ones(num_slots, dtype=loop.sum_dtype) if probs is None else probs.to(loop.sum_dtype)
            deferred.keep(ctx.index, loop, slots, tokens, grad, ones, *kept)
        signal = tokens.new_zeros(()) if ctx.needs_input_grad[6] else None
        return loop.rounded(grad_tokens), grad_probs, *sums.gradients, signal, None, None, None, None


class _Experts:
    """What the products of a loop read.

    Attributes:
        loop: the rows.
        fc1: [G * F, H] of each expert.
        fc2: [H, F] of each expert.
    """

    def __init__(self, loop: ExpertLoop, weights: ExpertWeights) -> None:
        self.loop, self.weights = loop, weights
        self.fc1, self.fc2 = weights.fc1.flatten(1, 2).unbind(0), weights.fc2.unbind(0)

    def of(self, values: Tensor, chunk: Chunk) -> Tensor:
        """Return the values [L, ...] of a chunk's experts."""
        return values[chunk.experts.start : chunk.experts.stop]

    def first(self, x: Tensor, chunk: Chunk, out: Tensor | None = None) -> Tensor:
        """Return the first GEMM's output for rows x [m, H]: [m, G, F] in the dtype of sums.

        It is rounded to the dtype of tokens before, in `out` [m, G * F] if given.
        """
        loop, (num_inputs, ffn) = self.loop, self.weights.fc1.shape[1:3]
        if out is None:
            out = loop.scratch("first", chunk, num_inputs * ffn, dtype=loop.dtype)
        loop.multiply(chunk, x, self.fc1, "w1", out, transpose=True)
        first = out.unflatten(1, (num_inputs, ffn))
        if self.weights.fc1_bias is not None:
            add_per_expert(first, self.of(self.weights.fc1_bias, chunk), chunk.counts)
        return loop.widen(first, "first wide", chunk)
