"""The expert computation as one autograd function: rows read by index, GEMM, activation x prob, GEMM, rows added up.

It loops over the experts and reads each expert's rows by index while it computes them, so no permuted copy of the
tokens exists. Saved for backward: the dispatched rows, the first GEMM's output, indices and probs. The gather, the
activation and the second GEMM's input are recomputed; expert outputs are never needed, because the prob multiplies
the activation before the second GEMM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe.activations import Activation
from router.gating import no_autocast


@dataclass(frozen=True)
class Slots:
    """Which rows each expert reads.

    Attributes:
        counts: slots of each local expert, on the host; sums to M.
        row_ids: [M] int64 sorted by expert, -1 for padding; None if slot i reads row i (then there is no padding).
        has_padding: whether row_ids holds -1.
    """

    counts: tuple[int, ...]
    row_ids: Tensor | None = None
    has_padding: bool = False


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
    fc1_weight: Tensor,
    fc2_weight: Tensor,
    fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None,
) -> Tensor:
    """Return for each row the sum over its slots of fc2(prob * activation(fc1(row))) + prob * fc2_bias.

    Products run in `gemm_dtype`, activation and sums in fp32 (fp64 for fp64); results are rounded once. Autocast does
    not reach inside.

    Args:
        tokens: [R, H].
        probs: [M] fp32 or fp64, or None for 1.
        slots: which rows each expert reads.
        activation: the activation, which says whether G is 1 or 2.
        fc1_weight: [L, G, F, H] in the dtype of tokens.
        fc2_weight: [L, H, F].
        fc1_bias: [L, G, F], or None.
        fc2_bias: [L, H], or None.

    Returns:
        [R, H] in the dtype of tokens; rows that no slot reads are 0.

    Saved for backward: tokens, the first GEMM's output [M, G, F] in the dtype of tokens, row_ids, probs, parameters.
    """
    with no_autocast(tokens.device):
        return _ExpertMLP.apply(tokens, probs, fc1_weight, fc2_weight, fc1_bias, fc2_bias, slots, activation)


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
        slots: Slots,
        activation: Activation,
    ) -> Tensor:
        loop = _ExpertLoop(tokens, slots)
        fc1_output = tokens.new_empty(sum(slots.counts), *fc1_weight.shape[1:3])  # [M, G, F]
        out = loop.new_sums(tokens)  # [R, H]
        for expert, part in loop.parts():
            x = loop.gather(tokens, part, "x")  # [m, H]
            _matmul(x, loop.cast(fc1_weight[expert].flatten(0, 1), "w1").t(), out=fc1_output[part].flatten(1))
            if fc1_bias is not None:
                fc1_output[part] += fc1_bias[expert]
            hidden = activation.forward(fc1_output[part].to(loop.sum_dtype))  # [m, G, F] -> [m, F]
            if probs is not None:
                hidden.mul_(probs[part].unsqueeze(-1))
            y = loop.buffer("y", part, tokens.shape[1])  # [m, H]
            torch.mm(loop.cast(hidden, "h"), loop.cast(fc2_weight[expert], "w2").t(), out=y)
            y = y.to(loop.sum_dtype)
            if fc2_bias is not None:
                bias = fc2_bias[expert].to(y.dtype)
                y = y + bias if probs is None else y.addr_(probs[part].to(y.dtype), bias)
            loop.add(y, part, out)
        ctx.save_for_backward(tokens, slots.row_ids, probs, fc1_output, fc1_weight, fc2_weight, fc2_bias)
        ctx.slots, ctx.activation, ctx.has_fc1_bias = replace(slots, row_ids=None), activation, fc1_bias is not None
        return out.to(tokens.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tokens, row_ids, probs, fc1_output, fc1_weight, fc2_weight, fc2_bias = ctx.saved_tensors
        loop = _ExpertLoop(tokens, replace(ctx.slots, row_ids=row_ids))
        grad_tokens = loop.new_sums(tokens)  # [R, H]
        grad_probs = None if probs is None else torch.empty_like(probs)
        grad_fc1 = _new_gradient(fc1_weight) if ctx.needs_input_grad[2] else None  # [L, G, F, H]
        grad_fc2 = _new_gradient(fc2_weight) if ctx.needs_input_grad[3] else None  # [L, H, F]
        grad_fc1_bias = torch.empty_like(fc1_weight[..., 0]) if ctx.has_fc1_bias else None
        grad_fc2_bias = None if fc2_bias is None else torch.empty_like(fc2_bias)
        for expert, part in loop.parts():
            x, dy = loop.gather(tokens, part, "x"), loop.gather(grad, part, "dy")  # [m, H]
            w1 = loop.cast(fc1_weight[expert].flatten(0, 1), "w1")  # [G * F, H]
            dh = torch.mm(dy, loop.cast(fc2_weight[expert], "w2")).to(loop.sum_dtype)  # [m, F]
            first = fc1_output[part].to(loop.sum_dtype)
            dfirst = torch.empty_like(first)  # [m, G, F]
            p = None if probs is None else probs[part].to(loop.sum_dtype)
            hidden, dp = ctx.activation.forward_backward(first, dh, p, dfirst)  # [m, F], [m]
            if grad_fc2 is not None:
                _matmul(dy.t(), loop.cast(hidden, "h"), out=grad_fc2[expert])  # [H, F]
            dfirst_cast = loop.cast(dfirst.flatten(1), "dfirst")
            if grad_fc1 is not None:
                _matmul(dfirst_cast.t(), x, out=grad_fc1[expert].flatten(0, 1))  # [G * F, H]
            dx = torch.mm(dfirst_cast, w1, out=loop.buffer("y", part, tokens.shape[1]))  # [m, H]
            loop.add(dx.to(loop.sum_dtype), part, grad_tokens)
            if grad_fc1_bias is not None:
                grad_fc1_bias[expert] = dfirst.sum(0)
            if grad_fc2_bias is not None:
                dy = dy.to(loop.sum_dtype)
                grad_fc2_bias[expert] = dy.sum(0) if p is None else p @ dy
                dp = None if dp is None else dp + dy @ fc2_bias[expert].to(dy.dtype)
            if grad_probs is not None:
                grad_probs[part] = dp
        return grad_tokens.to(tokens.dtype), grad_probs, grad_fc1, grad_fc2, grad_fc1_bias, grad_fc2_bias, None, None


class _ExpertLoop:
    """One pass over the experts: their parts of the slots, and scratch buffers that every expert uses again."""

    def __init__(self, tokens: Tensor, slots: Slots) -> None:
        """tokens: [R, H]."""
        self.counts = slots.counts
        self.padding: Tensor | None = None  # [M] bool, True at padding slots
        self.read_ids = slots.row_ids  # [M], the row to read, 0 for padding
        if slots.has_padding and slots.row_ids is not None:
            self.padding = slots.row_ids < 0
            self.read_ids = slots.row_ids.clamp(min=0)
        self.gemm_dtype = gemm_dtype(tokens.dtype, tokens.device)
        self.sum_dtype = torch.float64 if tokens.dtype == torch.float64 else torch.float32
        self.device = tokens.device
        self.buffers: dict[str, Tensor] = {}

    def parts(self) -> Iterator[tuple[int, slice]]:
        """Yield each expert with its part of the M slots."""
        start = 0
        for expert, count in enumerate(self.counts):
            yield expert, slice(start, start + count)
            start += count

    def new_sums(self, like: Tensor) -> Tensor:
        """Return zeros of the shape of `like` [R, H] to add rows to."""
        return torch.zeros(like.shape, dtype=self.sum_dtype, device=self.device)

    def buffer(self, name: str, part: slice, width: int) -> Tensor:
        """Return scratch [m, width] in the dtype of GEMMs, m the length of the part; its content is arbitrary."""
        if name not in self.buffers:
            self.buffers[name] = torch.empty(max(self.counts), width, dtype=self.gemm_dtype, device=self.device)
        return self.buffers[name][: part.stop - part.start]

    def gather(self, source: Tensor, part: slice, name: str) -> Tensor:
        """Return the rows that the slots of a part read, in the dtype of GEMMs: [R, H] -> [m, H]."""
        if self.read_ids is None:
            return source[part].to(self.gemm_dtype)
        rows = self.buffer(name, part, source.shape[1])
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
