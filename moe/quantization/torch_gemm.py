"""The products of the experts by PyTorch's grouped kernels: bf16 by grouped_mm, FP8 by scaled_grouped_mm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from moe.quantization.formats import E4M3
from moe.quantization.grouped_gemm import Plain
from moe.quantization.quantize import Block, Quantized, quantize
from moe.quantization.recipes import Operand, QuantizationRecipe

SCALE_TILE = (128, 4)  # rows x blocks of E8M0 scales that the kernels read as one
SCALE_TILE_ROWS = 32


def offsets(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where each expert's slots end, [L] int32."""
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32).to(device, non_blocking=True)


@dataclass(frozen=True)
class GroupedMM:
    """Unquantized products by torch.nn.functional.grouped_mm.

    Attributes:
        counts: slots of each expert.
    """

    counts: tuple[int, ...]

    @property
    def saved_bits(self) -> int | None:
        """See GroupedGemm."""
        return None

    def both(self, x: Tensor, linear: int, operand: Operand) -> tuple[Plain, Plain]:
        """See GroupedGemm."""
        plain = Plain(x)
        return plain, plain

    def by_rows(self, x: Tensor, linear: int, operand: Operand) -> Plain:
        """See GroupedGemm."""
        return Plain(x)

    def by_columns(self, x: Tensor, linear: int, operand: Operand) -> Plain:
        """See GroupedGemm."""
        return Plain(x)

    def weight(self, weight: Tensor, linear: int, *, is_transposed: bool) -> Plain:
        """See GroupedGemm."""
        return Plain(weight if is_transposed else weight.transpose(1, 2))

    def multiply(self, rows: Plain, weight: Plain) -> Tensor:
        """See GroupedGemm; in the dtype of the operands."""
        if rows.values.shape[0] == 0:
            return rows.values.new_empty(0, weight.values.shape[2])
        return F.grouped_mm(rows.values, weight.values, offs=offsets(self.counts, rows.values.device))

    def weight_gradient(self, grad: Plain, x: Plain, out: Tensor) -> None:
        """See GroupedGemm."""
        _write_gradients(
            lambda: F.grouped_mm(grad.values.t(), x.values, offs=offsets(self.counts, out.device)), self.counts, out
        )


@dataclass(frozen=True)
class ScaledRows:
    """An operand of 8 bits whose experts lie one after the other.

    Attributes:
        codes: by rows [M, K]; by columns [N, M], slots along the row; a weight [L, N, K], K the contraction.
        scale: as scaled_grouped_mm reads it.
    """

    codes: Tensor
    scale: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Both."""
        return self.codes, self.scale

    def with_tensors(self, *tensors: Tensor) -> ScaledRows:
        """Return the same with other tensors."""
        return ScaledRows(*tensors)

    def without_tensors(self) -> ScaledRows:
        """Return the description alone."""
        return replace(self, codes=self.codes.new_empty(0), scale=self.scale.new_empty(0))


@dataclass(frozen=True)
class ScaledGroupedMM:
    """Products in E4M3 by torch.nn.functional.scaled_grouped_mm, on compute capability 9 (rowwise) or 10 (mxfp8).

    What the kernels ask for: the contraction contiguous in both operands; slots of an expert a multiple of the recipe's
    row_multiple; rowwise scales as fp32 numbers, [M] for rows, [L, N] for weights, and [L * N] for columns, which have
    one scale per expert; E8M0 scales in tiles of 128 rows x 4 blocks, each expert's padded to whole tiles that lie one
    after the other, as [sum of padded slots, padded blocks] for rows, [L, padded N * padded blocks] for weights, and
    [padded N, sum of padded blocks] for columns.

    Source: aten/src/ATen/native/cuda/GroupedBlas.cpp of PyTorch (shapes); mx8mx8bf16_grouped of FBGEMM (where each
        expert's scales start).

    Attributes:
        counts: slots of each expert.
        recipe: rowwise or mxfp8.
        quantizes_wgrad: False multiplies weight gradients by grouped_mm.
    """

    counts: tuple[int, ...]
    recipe: QuantizationRecipe
    quantizes_wgrad: bool = True

    @property
    def saved_bits(self) -> int | None:
        """See GroupedGemm."""
        return self.recipe.bits if self.quantizes_wgrad else None

    @property
    def is_rowwise(self) -> bool:
        """Whether a row has one scale; else every 32 values have one."""
        return self.recipe.block.cols is None

    def both(self, x: Tensor, linear: int, operand: Operand) -> tuple[ScaledRows, ScaledRows | Plain]:
        """See GroupedGemm."""
        return self.by_rows(x, linear, operand), self.by_columns(x, linear, operand)

    def by_rows(self, x: Tensor, linear: int, operand: Operand) -> ScaledRows:
        """See GroupedGemm."""
        quantized = self._quantize(x, self.recipe.block)
        if self.is_rowwise:
            return ScaledRows(quantized.codes, quantized.scale.flatten())
        return ScaledRows(
            quantized.codes, torch.cat([tile_scales(part) for part in quantized.scale.split(self.counts)])
        )

    def by_columns(self, x: Tensor, linear: int, operand: Operand) -> ScaledRows | Plain:
        """See GroupedGemm."""
        if not self.quantizes_wgrad:
            return Plain(x)
        parts = [self._quantize(part, self.recipe.block.t) for part in x.split(self.counts)]
        codes = torch.cat([part.codes for part in parts]).t().contiguous()  # [M, N] -> [N, M]
        if self.is_rowwise:
            return ScaledRows(codes, torch.cat([part.scale.flatten() for part in parts]))  # [L * N]
        tiles = [tile_scales(part.scale.t()) for part in parts]  # each [N up to 128, blocks up to 4]
        return ScaledRows(codes, torch.cat([part.flatten() for part in tiles]).view(tiles[0].shape[0], -1))

    def weight(self, weight: Tensor, linear: int, *, is_transposed: bool) -> ScaledRows:
        """See GroupedGemm."""
        matrices = weight.transpose(1, 2) if is_transposed else weight  # [L, N, K], contraction last
        quantized = [self._quantize(matrix.contiguous(), self.recipe.weight_block) for matrix in matrices]
        codes = torch.stack([matrix.codes for matrix in quantized])
        if self.is_rowwise:
            return ScaledRows(codes, torch.stack([matrix.scale.flatten() for matrix in quantized]))
        return ScaledRows(codes, torch.stack([tile_scales(matrix.scale).flatten() for matrix in quantized]))

    def multiply(self, rows: ScaledRows, weight: ScaledRows) -> Tensor:
        """See GroupedGemm; in bf16."""
        if rows.codes.shape[0] == 0:
            return rows.codes.new_empty(0, weight.codes.shape[1], dtype=torch.bfloat16)
        return self._scaled_grouped_mm(rows, ScaledRows(weight.codes.transpose(1, 2), weight.scale))

    def weight_gradient(self, grad: ScaledRows | Plain, x: ScaledRows | Plain, out: Tensor) -> None:
        """See GroupedGemm."""
        if isinstance(grad, Plain) or isinstance(x, Plain):
            GroupedMM(self.counts).weight_gradient(grad, x, out)  # type: ignore[arg-type]  # both are plain
            return
        _write_gradients(lambda: self._scaled_grouped_mm(grad, ScaledRows(x.codes.t(), x.scale)), self.counts, out)

    def _scaled_grouped_mm(self, a: ScaledRows, b: ScaledRows) -> Tensor:
        kind = F.ScalingType.RowWise if self.is_rowwise else F.ScalingType.BlockWise1x32
        swizzle = F.SwizzleType.NO_SWIZZLE if self.is_rowwise else F.SwizzleType.SWIZZLE_32_4_4
        return F.scaled_grouped_mm(  # type: ignore[attr-defined]  # not in torch's stubs
            a.codes,
            b.codes,
            scale_a=a.scale,
            scale_recipe_a=kind,
            scale_b=b.scale,
            scale_recipe_b=kind,
            swizzle_a=swizzle,
            swizzle_b=swizzle,
            offs=offsets(self.counts, a.codes.device),
            output_dtype=torch.bfloat16,
        )

    def _quantize(self, x: Tensor, block: Block) -> Quantized:
        return quantize(x, E4M3, block, self.recipe.scale_format)


def tile_scales(scale: Tensor) -> Tensor:
    """Bring E8M0 scales [rows, blocks] into the order in which the kernels read them.

    Tiles of 128 rows x 4 blocks lie one after the other, row by row of tiles; within a tile row r and block b lie at
    byte (r % 32) * 16 + (r // 32) * 4 + b. Missing rows and blocks of the last tiles are 0.

    Returns:
        [rows up to 128, blocks up to 4] in that order.

    Source: cuBLAS documentation, section "1D Block Scaling Factors Layout".
    """
    tile_rows, tile_blocks = SCALE_TILE
    rows, blocks = scale.shape
    padded_rows, padded_blocks = rows + -rows % tile_rows, blocks + -blocks % tile_blocks
    padded = torch.zeros(padded_rows, padded_blocks, dtype=torch.uint8, device=scale.device)
    padded[:rows, :blocks] = scale.view(torch.uint8) if scale.is_contiguous() else scale.contiguous().view(torch.uint8)
    num_tiles = (padded_rows // tile_rows, padded_blocks // tile_blocks)
    tiles = padded.view(num_tiles[0], tile_rows // SCALE_TILE_ROWS, SCALE_TILE_ROWS, num_tiles[1], tile_blocks)
    order = tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_blocks)
    return order.contiguous().view(torch.float8_e8m0fnu)


def _write_gradients(product: Callable[[], Tensor], counts: tuple[int, ...], out: Tensor) -> None:
    """Write a product [L, N, K] to out, and zeros for experts without slots, which kernels may leave unwritten."""
    if sum(counts) == 0:
        out.zero_()
        return
    out.copy_(product())
    for expert, count in enumerate(counts):
        if count == 0:
            out[expert].zero_()
