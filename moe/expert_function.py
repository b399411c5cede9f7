"""The expert computation as one autograd function: rows read by index, GEMM, activation x prob, GEMM, rows added up.

It loops over the experts and reads each expert's rows by index while it computes them, so no permuted copy of the
tokens exists. Saved for backward: the dispatched rows, the first GEMM's output, indices and probs. The gather, the
activation and the second GEMM's input are recomputed; expert outputs are never needed, because the prob multiplies
the activation before the second GEMM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dispatchers.permutation import reorder_blocks, sum_dtype
from moe.activations import Activation
from moe.quantization.stored import load_activation, store_activation
from router.gating import no_autocast

CACHE_LINE = 64  # bytes


@dataclass(frozen=True)
class Slots:
    """Which rows each expert reads.

    Attributes:
        counts: slots of each local expert, on the host; sums to M.
        row_ids: [M] int64 sorted by expert, -1 for padding; None if slot i reads row i (then there is no padding).
        has_padding: whether row_ids holds -1.
        per_source: [L, source ranks] int64, slots of each expert by source, padding apart; for `DeferredGradients`.
        real_counts: slots of each expert without padding, on the host; likewise.
    """

    counts: tuple[int, ...]
    row_ids: Tensor | None = None
    has_padding: bool = False
    per_source: Tensor | None = None
    real_counts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of L experts.

    Attributes:
        fc1: [L, G, F, H] in the dtype of tokens.
        fc2: [L, H, F].
        fc1_bias: [L, G, F], or None.
        fc2_bias: [L, H], or None.
    """

    fc1: Tensor
    fc2: Tensor
    fc1_bias: Tensor | None = None
    fc2_bias: Tensor | None = None


def gemm_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which to multiply matrices of dtype on device.

    It is dtype itself, except for bf16 and fp16 on a CPU for which torch has no fast kernel of that type: there its
    own loop takes 20 to 100 times as long as fp32, and multiplying in fp32 and rounding once is faster and closer.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return dtype
    fast = torch.backends.mkldnn.is_available() and (
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if dtype == torch.bfloat16
        else torch.ops.mkldnn._is_mkldnn_fp16_supported()
    )
    return dtype if fast else torch.float32


def expert_mlp(
    tokens: Tensor,
    probs: Tensor | None,
    slots: Slots,
    activation: Activation,
    weights: ExpertWeights,
    deferred: DeferredGradients | None = None,
    *,
    stores_fp8: bool = False,
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
        stores_fp8: keep the first GEMM's output in FP8 until backward.

    Returns:
        [R, H] in the dtype of tokens; rows that no slot reads are 0.

    Raises:
        ValueError: in deterministic mode, counts that are no multiple of its tile.

    Saved for backward: tokens, the first GEMM's output [M, G, F] in the dtype of tokens, row_ids, probs, parameters.
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
            stores_fp8,
        )


class DeferredGradients:
    """Computes the gradients of the weights once for several calls of `expert_mlp`, after the backward of all of them.

    So does a dispatch in several parts: the gradients of its rows travel while those of the next part are computed, and
    the weights' gradients are one product per expert, not one per part. Until then each part keeps the second GEMM's
    input [M, F] and the gradient of the first one's output [M, G, F].

    In deterministic mode every expert's rows are brought into the order of source rank and part, which is that of the
    tokens, before they are multiplied, and rows are computed in tiles of one shape: results are bitwise the same for
    any number of parts and of source ranks.

    Args:
        weights: what the experts are.
        tile_rows: rows of a tile, which divides the slots of every expert: deterministic mode. None: whole experts.
    """

    def __init__(self, weights: ExpertWeights, tile_rows: int | None = None) -> None:
        self.tile_rows = tile_rows
        self.num_calls = 0
        self.parts: dict[int, _Part] = {}
        tensors = (weights.fc1, weights.fc2, weights.fc1_bias, weights.fc2_bias)
        self.detached = ExpertWeights(*(None if t is None else t.detach() for t in tensors))  # type: ignore[arg-type]
        self.signal: Tensor = _WeightGradients.apply(*tensors, self)  # [], carries no value: backward runs in its order

    def check(self, slots: Slots) -> None:
        """Raise ValueError if the counts do not fit the tiles."""
        if self.tile_rows is not None and any(count % self.tile_rows for count in slots.counts):
            raise ValueError(f"counts ({slots.counts}) must be multiples of the tile ({self.tile_rows} rows).")

    def compute(self, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        """Return the gradients of fc1, fc2, fc1_bias and fc2_bias where needed, and forget the parts."""
        parts = [self.parts[index] for index in sorted(self.parts)]
        self.parts = {}
        sums = _WeightSums(self.detached, needs)
        for expert in range(self.detached.fc1.shape[0]):
            rows = [part.rows_of(expert) for part in parts]
            joined = [torch.cat(pieces) if len(parts) > 1 else pieces[0] for pieces in zip(*rows, strict=True)]
            if self.tile_rows is not None and len(parts) > 1:
                order = self._order(parts, expert)
                joined = [piece.index_select(0, order) for piece in joined]
            x, dy, hidden, dfirst, p = joined
            sums.write(expert, x, dy, hidden, dfirst, p)
        return sums.gradients

    @staticmethod
    def _order(parts: list[_Part], expert: int) -> Tensor:
        """Return the places of an expert's slots, which lie by part and source, in the order of source and part."""
        sizes = torch.stack([part.slots.per_source[expert] for part in parts])  # type: ignore[index]  # [parts, sources]
        blocks = torch.arange(sizes.numel(), device=sizes.device).view(sizes.shape)
        num_rows = sum(part.count_of(expert) for part in parts)
        return reorder_blocks(sizes.reshape(-1), blocks.t().reshape(-1), num_rows)


@dataclass(frozen=True)
class _Part:
    """What one call of `expert_mlp` leaves for the weights' gradients: tokens and grad [R, H], the rest by slot."""

    loop: _ExpertLoop
    slots: Slots
    tokens: Tensor
    grad: Tensor
    probs: Tensor
    hidden: Tensor
    dfirst: Tensor
    starts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        counts = self.slots.counts
        object.__setattr__(self, "starts", tuple(sum(counts[:expert]) for expert in range(len(counts))))

    def count_of(self, expert: int) -> int:
        """Slots of an expert: real ones where they are known, else with padding, whose rows are zeros."""
        return (self.slots.real_counts or self.slots.counts)[expert]

    def rows_of(self, expert: int) -> tuple[Tensor, ...]:
        """Return x, dy [m, H], hidden [m, F], dfirst [m, G * F] and probs [m] of an expert's slots."""
        part = slice(self.starts[expert], self.starts[expert] + self.count_of(expert))
        x, dy = (self.loop.gather(source, part) for source in (self.tokens, self.grad))
        return x, dy, self.hidden[part], self.dfirst[part], self.probs[part]


class _WeightGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fc1: Tensor, fc2: Tensor, fc1_bias: Tensor | None, fc2_bias: Tensor | None, deferred: Any
    ) -> Tensor:
        ctx.deferred = deferred
        return fc1.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with no_autocast(grad.device):
            return *ctx.deferred.compute(ctx.needs_input_grad[:4]), None


class _WeightSums:
    """The gradients of the weights of all experts, written expert by expert."""

    def __init__(self, weights: ExpertWeights, needs: tuple[bool, ...]) -> None:
        fc1, fc2 = weights.fc1, weights.fc2
        self.fc1 = _new_gradient(fc1) if needs[0] else None  # [L, G, F, H]
        self.fc2 = _new_gradient(fc2) if needs[1] else None  # [L, H, F]
        self.fc1_bias = None if weights.fc1_bias is None or not needs[2] else torch.empty_like(weights.fc1_bias)
        self.fc2_bias = None if weights.fc2_bias is None or not needs[3] else torch.empty_like(weights.fc2_bias)

    @property
    def gradients(self) -> tuple[Tensor | None, ...]:
        """Of fc1, fc2, fc1_bias, fc2_bias."""
        return self.fc1, self.fc2, self.fc1_bias, self.fc2_bias

    def write(
        self,
        expert: int,
        x: Tensor,
        dy: Tensor,
        hidden: Tensor,
        dfirst: Tensor,
        p: Tensor | None,
        dfirst_wide: Tensor | None = None,
    ) -> None:
        """Write one expert's.

        Args:
            expert: which.
            x, dy: [m, H], the rows that its slots read and the gradients of their results, in the dtype of GEMMs.
            hidden: [m, F], the second GEMM's input, in the dtype of GEMMs.
            dfirst: [m, G * F], the gradient of the first GEMM's output, in the dtype of GEMMs.
            p: [m] weights of the slots, or None for 1.
            dfirst_wide: [m, G, F], dfirst in the dtype of sums, for the bias; None: dfirst itself.
        """
        if self.fc2 is not None:
            _matmul(dy.t(), hidden, out=self.fc2[expert])  # [H, F]
        if self.fc1 is not None:
            _matmul(dfirst.t(), x, out=self.fc1[expert].flatten(0, 1))  # [G * F, H]
        if self.fc1_bias is not None:
            wide = dfirst if dfirst_wide is None else dfirst_wide
            self.fc1_bias[expert] = wide.sum(0, dtype=sum_dtype(wide.dtype)).view_as(self.fc1_bias[expert])
        if self.fc2_bias is not None:
            wide = dy if p is None else dy.to(p.dtype)
            self.fc2_bias[expert] = wide.sum(0) if p is None else p @ wide


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
        stores_fp8: bool,
    ) -> Tensor:
        loop = _ExpertLoop(tokens, slots, None if deferred is None else deferred.tile_rows)
        fc1_output = tokens.new_empty(sum(slots.counts), *fc1_weight.shape[1:3])  # [M, G, F]
        out = loop.new_sums(tokens)  # [R, H]
        for expert, part in loop.parts():
            x = loop.gather(tokens, part, "x")  # [m, H]
            w1 = loop.weight(fc1_weight[expert].flatten(0, 1), "w1", expert)  # [G * F, H]
            loop.matmul(x, w1.t(), out=fc1_output[part].flatten(1))
            if fc1_bias is not None:
                fc1_output[part] += fc1_bias[expert]
            hidden = activation.forward(fc1_output[part].to(loop.sum_dtype))  # [m, G, F] -> [m, F]
            if probs is not None:
                hidden.mul_(probs[part].unsqueeze(-1))
            y = loop.buffer("y", part, tokens.shape[1])  # [m, H]
            torch.mm(loop.cast(hidden, "h"), loop.weight(fc2_weight[expert], "w2", expert).t(), out=y)
            y = y.to(loop.sum_dtype)
            if fc2_bias is not None:
                bias = fc2_bias[expert].to(y.dtype)
                y = y + bias if probs is None else y.addr_(probs[part].to(y.dtype), bias)
            loop.add(y, part, out)
        stored = store_activation(fc1_output, stores_fp8)
        parameters = (fc1_weight, fc2_weight, fc1_bias, fc2_bias)
        ctx.save_for_backward(tokens, slots.row_ids, probs, *parameters, *stored.tensors)
        ctx.stored = stored.without_tensors()
        ctx.slots, ctx.activation, ctx.deferred = replace(slots, row_ids=None), activation, deferred
        if deferred is not None:
            ctx.index, deferred.num_calls = deferred.num_calls, deferred.num_calls + 1
        return out.to(tokens.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with no_autocast(grad.device):
            return _ExpertMLP.differentiate(ctx, grad)

    @staticmethod
    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments of forward."""
        tokens, row_ids, probs, fc1_weight, fc2_weight, fc1_bias, fc2_bias, *stored = ctx.saved_tensors
        fc1_output = load_activation(ctx.stored.with_tensors(*stored), tokens.dtype)  # [M, G, F]
        slots, deferred = replace(ctx.slots, row_ids=row_ids), ctx.deferred
        loop = _ExpertLoop(tokens, slots, None if deferred is None else deferred.tile_rows)
        grad_tokens = loop.new_sums(tokens)  # [R, H]
        grad_probs = None if probs is None else torch.empty_like(probs)
        sums = _WeightSums(ExpertWeights(fc1_weight, fc2_weight, fc1_bias, fc2_bias), ctx.needs_input_grad[2:6])
        kept = None
        if deferred is not None and ctx.needs_input_grad[6]:
            ffn, num_inputs = fc2_weight.shape[-1], fc1_weight.shape[1]
            kept = [loop.new_slots(fc1_output.shape[0], width) for width in (ffn, num_inputs * ffn)]
        for expert, part in loop.parts():
            x, dy = loop.gather(tokens, part, "x"), loop.gather(grad, part, "dy")  # [m, H]
            w1 = loop.weight(fc1_weight[expert].flatten(0, 1), "w1", expert)  # [G * F, H]
            dh = loop.buffer("dh", part, fc2_weight.shape[-1])  # [m, F]
            torch.mm(dy, loop.weight(fc2_weight[expert], "w2", expert), out=dh)
            first = fc1_output[part].to(loop.sum_dtype)
            dfirst = torch.empty_like(first)  # [m, G, F]
            p = None if probs is None else probs[part].to(loop.sum_dtype)
            hidden, dp = ctx.activation.forward_backward(first, dh.to(loop.sum_dtype), p, dfirst)  # [m, F], [m]
            hidden, dfirst_cast = loop.cast(hidden, "h"), loop.cast(dfirst.flatten(1), "dfirst")
            if kept is None:
                sums.write(expert, x, dy, hidden, dfirst_cast, p, dfirst)
            else:
                kept[0][part], kept[1][part] = hidden, dfirst_cast
            dx = torch.mm(dfirst_cast, w1, out=loop.buffer("y", part, tokens.shape[1]))  # [m, H]
            loop.add(dx.to(loop.sum_dtype), part, grad_tokens)
            if fc2_bias is not None and dp is not None:
                dp = dp + dy.to(loop.sum_dtype) @ fc2_bias[expert].to(loop.sum_dtype)
            if grad_probs is not None:
                grad_probs[part] = dp
        if kept is not None:
            weights = grad.new_ones(fc1_output.shape[0], dtype=loop.sum_dtype) if probs is None else probs
            deferred.parts[ctx.index] = _Part(loop, slots, tokens, grad, weights.to(loop.sum_dtype), *kept)
        signal = tokens.new_zeros(()) if ctx.needs_input_grad[6] else None
        return grad_tokens.to(tokens.dtype), grad_probs, *sums.gradients, signal, None, None, None, None


class _ExpertLoop:
    """One pass over the experts: their parts of the slots, and scratch buffers that every expert uses again."""

    def __init__(self, tokens: Tensor, slots: Slots, tile_rows: int | None = None) -> None:
        """tokens: [R, H]; tile_rows: rows of a part, or None for all of an expert."""
        self.counts, self.tile_rows = slots.counts, tile_rows
        self.padding: Tensor | None = None  # [M] bool, True at padding slots
        self.read_ids = slots.row_ids  # [M], the row to read, 0 for padding
        if slots.has_padding and slots.row_ids is not None:
            self.padding = slots.row_ids < 0
            self.read_ids = slots.row_ids.clamp(min=0)
        self.gemm_dtype = gemm_dtype(tokens.dtype, tokens.device)
        self.sum_dtype = sum_dtype(tokens.dtype)
        self.device = tokens.device
        self.buffers: dict[str, Tensor] = {}
        self.weight_of: dict[str, int] = {}  # whose weights a buffer holds

    def parts(self) -> Iterator[tuple[int, slice]]:
        """Yield each expert with its part of the M slots; with tiles, in parts of that many slots."""
        start = 0
        for expert, count in enumerate(self.counts):
            step = self.tile_rows or count
            for first in range(start, start + count, step) if step else (start,):
                yield expert, slice(first, first + step)
            start += count

    def new_sums(self, like: Tensor) -> Tensor:
        """Return zeros of the shape of `like` [R, H] to add rows to."""
        return torch.zeros(like.shape, dtype=self.sum_dtype, device=self.device)

    def buffer(self, name: str, part: slice, width: int) -> Tensor:
        """Return scratch [m, width] in the dtype of GEMMs, m the length of the part; its content is arbitrary."""
        if name not in self.buffers:
            self.buffers[name] = self.aligned(self.tile_rows or max(self.counts), width)
        return self.buffers[name][: part.stop - part.start]

    def aligned(self, num_rows: int, width: int) -> Tensor:
        """Return uninitialised [num_rows, width] in the dtype of GEMMs; with tiles, every row begins on 64 bytes.

        A product's rounding may depend on where a row begins in memory, and so on its place in the tile.
        """
        per_line = CACHE_LINE // self.gemm_dtype.itemsize if self.tile_rows else 1
        stride = width + -width % per_line
        return torch.empty(num_rows, stride, dtype=self.gemm_dtype, device=self.device)[:, :width]

    def new_slots(self, num_slots: int, width: int) -> Tensor:
        """Return uninitialised [num_slots, width] in the dtype of GEMMs, which outlives the loop."""
        return torch.empty(num_slots, width, dtype=self.gemm_dtype, device=self.device)

    def matmul(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Write a @ b to out: [m, k], [k, n] -> [m, n]."""
        if self.tile_rows is None:
            _matmul(a, b, out)
        else:
            product = self.buffer("product", slice(0, a.shape[0]), b.shape[1])
            out.copy_(torch.mm(a, b, out=product))

    def weight(self, tensor: Tensor, name: str, expert: int) -> Tensor:
        """Return an expert's weight [m, n] in the dtype of GEMMs, cast once for all its parts."""
        if self.tile_rows is None:
            return self.cast(tensor, name)
        if self.weight_of.get(name) != expert:
            self.weight_of[name] = expert
            if name not in self.buffers:
                self.buffers[name] = self.aligned(*tensor.shape)
            self.buffers[name].copy_(tensor)
        return self.buffers[name]

    def gather(self, source: Tensor, part: slice, name: str | None = None) -> Tensor:
        """Return the rows that the slots of a part read, in the dtype of GEMMs: [R, H] -> [m, H].

        They are in the scratch buffer `name`, or in new memory without one.
        """
        if self.read_ids is None:
            return source[part].to(self.gemm_dtype)
        width = source.shape[1]
        rows = self.new_slots(part.stop - part.start, width) if name is None else self.buffer(name, part, width)
        if source.shape[0] == 0:
            return rows.zero_()  # without rows every slot is padding
        if source.dtype == self.gemm_dtype:
            torch.index_select(source, 0, self.read_ids[part], out=rows)
        else:
            rows.copy_(source.index_select(0, self.read_ids[part]))
        return rows if self.padding is None else rows.masked_fill_(self.padding[part].unsqueeze(-1), 0)

    def add(self, rows: Tensor, part: slice, sums: Tensor) -> None:
        """Add the result of each slot [m, H] to the row that it read; results of padding slots are dropped."""
        if self.read_ids is None:
            sums[part] += rows
            return
        if sums.shape[0] == 0:
            return
        if self.padding is not None:
            rows = rows.masked_fill(self.padding[part].unsqueeze(-1), 0)
        sums.index_add_(0, self.read_ids[part], rows)

    def cast(self, tensor: Tensor, name: str) -> Tensor:
        """Return a [m, n] tensor in the dtype of GEMMs: itself, or a copy in scratch memory."""
        if self.tile_rows is not None:
            return self.buffer(name, slice(0, tensor.shape[0]), tensor.shape[1]).copy_(tensor)
        if tensor.dtype == self.gemm_dtype:
            return tensor
        if name not in self.buffers or self.buffers[name].numel() < tensor.numel():
            self.buffers[name] = torch.empty(tensor.numel(), dtype=self.gemm_dtype, device=self.device)
        return self.buffers[name].flatten()[: tensor.numel()].view(tensor.shape).copy_(tensor)


def _new_gradient(weight: Tensor) -> Tensor:
    """Return memory for the gradient of a weight [L, ...], contiguous: products are written through views of it."""
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def _matmul(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write a @ b to out [m, n], rounding once if out has another dtype: [m, k], [k, n]."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(torch.mm(a, b))
