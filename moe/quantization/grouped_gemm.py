"""The three products of the experts' linears, with quantized operands: the contract of backends and the reference.

A linear's weight is [N, K]. For each expert with m slots:

    forward         y [m, N]  = x [m, K]    W^T      contracts over K
    input gradient  dx [m, K] = dy [m, N]   W        contracts over N
    weight gradient dW [N, K] = dy^T [N, m] x        contracts over slots

Each operand is quantized along the contraction, once, from the values in high precision: so x and dy are quantized
"by rows" (along features) for one product and "by columns" (along slots) for the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dispatchers.host_memory import new_tensor
from dispatchers.permutation import sum_dtype
from moe.quantization.delayed import DelayedScaling
from moe.quantization.quantize import Block, Quantized, block_amax, dequantize_all, hadamard, quantize
from moe.quantization.recipes import Operand, QuantizationRecipe

FC1, FC2 = 0, 1  # which linear


class GroupedGemm(Protocol):
    """A backend: multiplies the operands of all experts, whose slots lie one expert after the other.

    An operand is in a form of the backend's own. What it consists of is its `tensors`; `without_tensors` describes it,
    and that has `with_tensors` to restore it: so operands are saved for backward.
    """

    @property
    def saved_bits(self) -> int | None:
        """Bits of a value quantized by columns, as it may be saved for backward; None: values are saved as they are."""

    def both(self, x: Tensor, linear: int, operand: Operand) -> tuple[Any, Any]:
        """Return x [M, K] quantized by rows and by columns."""

    def by_rows(self, x: Tensor, linear: int, operand: Operand) -> Any:
        """Return x [M, K] quantized along features."""

    def by_columns(self, x: Tensor, linear: int, operand: Operand) -> Any:
        """Return x [M, K] quantized along slots."""

    def weight(self, weight: Tensor, linear: int, *, is_transposed: bool) -> Any:
        """Return the weights [L, N, K], quantized along K for the forward product, or along N (is_transposed)."""

    def multiply(self, rows: Any, weight: Any) -> Tensor:
        """Return rows [M, K] times W^T: [M, N]; or [M, N] times W: [M, K] with a transposed weight."""

    def weight_gradient(self, grad: Any, x: Any, out: Tensor) -> None:
        """Write each expert's grad^T x to out [L, N, K]; zeros for an expert without slots."""


@dataclass(frozen=True)
class PerExpert:
    """One operand: a quantized matrix for each expert."""

    parts: tuple[Quantized, ...]
    is_transposed: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those of every expert, in order."""
        return tuple(tensor for part in self.parts for tensor in part.tensors)

    def with_tensors(self, *tensors: Tensor) -> PerExpert:
        """Return the same with other tensors, in the order of `tensors`."""
        each = len(tensors) // max(len(self.parts), 1)
        parts = (part.with_tensors(*tensors[i * each : (i + 1) * each]) for i, part in enumerate(self.parts))
        return replace(self, parts=tuple(parts))

    def without_tensors(self) -> PerExpert:
        """Return the description alone."""
        return replace(self, parts=tuple(part.without_tensors() for part in self.parts))


@dataclass(frozen=True)
class Plain:
    """One operand as it is."""

    values: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The values."""
        return (self.values,)

    def with_tensors(self, *tensors: Tensor) -> Plain:
        """Return the same with other values."""
        return Plain(*tensors)

    def without_tensors(self) -> Plain:
        """Return the description alone."""
        return Plain(self.values.new_empty(0))


@dataclass(frozen=True)
class ReferenceGemm:
    """Multiplies the dequantized operands in fp32 (fp64 for fp64), expert by expert: on any device, exact rounding.

    Attributes:
        recipe: the row of the table.
        fp8: "hybrid", "e4m3", or None with an FP4 recipe.
        counts: slots of each expert.
        dtype: of the values that operands are made of.
        quantizes_wgrad: False leaves the operands of weight gradients as they are.
        delayed: the scales of the delayed recipe.
        records: whether magnitudes are collected for the next scales.
    """

    recipe: QuantizationRecipe
    fp8: str | None
    counts: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    quantizes_wgrad: bool = True
    delayed: DelayedScaling | None = None
    records: bool = False

    @property
    def saved_bits(self) -> int | None:
        """See GroupedGemm."""
        return self.recipe.bits if self.quantizes_wgrad else None

    def parts(self) -> Iterator[tuple[int, slice]]:
        """Yield each expert and its slots."""
        start = 0
        for expert, count in enumerate(self.counts):
            yield expert, slice(start, start + count)
            start += count

    def both(self, x: Tensor, linear: int, operand: Operand) -> tuple[Any, Any]:
        """See GroupedGemm. They are one and the same if a scale spans whole tensors."""
        rows = self.by_rows(x, linear, operand)
        is_same = self.recipe.block == self.recipe.block.t and self.quantizes_wgrad
        return rows, rows if is_same else self.by_columns(x, linear, operand)

    def by_rows(self, x: Tensor, linear: int, operand: Operand) -> PerExpert:
        """See GroupedGemm."""
        return PerExpert(self._quantize_all(x, self.counts, self.recipe.block_of(operand), linear, operand))

    def by_columns(self, x: Tensor, linear: int, operand: Operand) -> PerExpert | Plain:
        """See GroupedGemm."""
        if not self.quantizes_wgrad:
            return Plain(x)
        x = hadamard(x) if self.recipe.has_random_rounding else x
        return PerExpert(self._quantize_all(x, self.counts, self.recipe.block_of(operand).t, linear, operand))

    def weight(self, weight: Tensor, linear: int, *, is_transposed: bool) -> PerExpert:
        """See GroupedGemm."""
        block = self.recipe.weight_block.t if is_transposed else self.recipe.weight_block
        sizes = (weight.shape[1],) * weight.shape[0]
        return PerExpert(self._quantize_all(weight.flatten(0, 1), sizes, block, linear, "weight"), is_transposed)

    def multiply(self, rows: PerExpert, weight: PerExpert) -> Tensor:
        """See GroupedGemm; the result is in fp32, or fp64 for fp64."""
        dtype, first = sum_dtype(self.dtype), weight.parts[0]
        num_features = first.shape[1] if weight.is_transposed else first.shape[0]
        out = new_tensor((sum(self.counts), num_features), dtype, first.codes.device)
        slots = {expert: part for expert, part in self.parts() if self.counts[expert]}
        pairs = zip(self._dequantized(rows, slots), self._dequantized(weight, slots), strict=True)
        for part, (x, w) in zip(slots.values(), pairs, strict=True):
            torch.mm(x, w if weight.is_transposed else w.t(), out=out[part])
        return out

    def weight_gradient(self, grad: PerExpert | Plain, x: PerExpert | Plain, out: Tensor) -> None:
        """See GroupedGemm."""
        slots = {expert: part for expert, part in self.parts() if self.counts[expert]}
        for expert in set(range(len(self.counts))) - slots.keys():
            out[expert].zero_()
        pairs = zip(self._dequantized(grad, slots), self._dequantized(x, slots), strict=True)
        for expert, (left, right) in zip(slots, pairs, strict=True):
            if out.dtype == left.dtype:
                torch.mm(left.t(), right, out=out[expert])
            else:
                out[expert].copy_(torch.mm(left.t(), right))

    def _dequantized(self, operand: PerExpert | Plain, slots: dict[int, slice]) -> Iterator[Tensor]:
        """Yield the matrices of some experts in the dtype of sums."""
        dtype = sum_dtype(self.dtype)
        if isinstance(operand, Plain):
            return (operand.values[part].to(dtype) for part in slots.values())
        return dequantize_all([operand.parts[expert] for expert in slots], dtype)

    def _quantize_all(
        self, x: Tensor, sizes: tuple[int, ...], block: Block, linear: int, operand: Operand
    ) -> tuple[Quantized, ...]:
        """Quantize the operands of all experts, x [sum(sizes), ...]: in one go if no scale reaches over two of them."""
        rows = block.rows
        if (
            rows is None
            or self.delayed is not None
            or self.recipe.scale_format == "e4m3"
            or any(n % rows for n in sizes)
        ):
            return tuple(self._quantize(part, block, e, linear, operand) for e, part in enumerate(x.split(sizes)))
        return self._quantize(x, block, 0, linear, operand).split(sizes)

    def _quantize(self, x: Tensor, block: Block, expert: int, linear: int, operand: Operand) -> Quantized:
        """Quantize one expert's operand."""
        recipe, given = self.recipe, None
        fmt = recipe.format_of(operand, self.fp8)
        if self.delayed is not None:
            if self.records:
                self.delayed.record(block_amax(x, block)[0, 0], expert, linear, operand)
            given = self.delayed.amax_of(expert, linear, operand)
        stochastic = recipe.has_random_rounding and operand == "gradient"
        return quantize(x, fmt, block, recipe.scale_format, given_amax=given, stochastic=stochastic)
