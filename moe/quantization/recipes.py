"""The table of quantization recipes: formats, what shares a scale, and what each asks of shapes and hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe.quantization.formats import E2M1, E4M3, E5M2, FloatFormat
from moe.quantization.quantize import Block, ScaleFormat

Operand = Literal["input", "weight", "gradient"]


@dataclass(frozen=True, kw_only=True)
class QuantizationRecipe:
    """One row of the table. Blocks are given as along the other dimension x along the contraction.

    Attributes:
        block: what shares a scale in an input or a gradient.
        weight_block: what shares a scale in a weight.
        scale_format: the format of scales.
        row_multiple: every non-empty expert's slot count must be a multiple of this, because wgrad contracts over it.
        width_multiple: H and F (of a rank) must be multiples of this.
        bits: of a value.
        torch_capability: the compute capability (major) on which torch multiplies such operands; None: nowhere.
        te_capability: the lowest compute capability on which Transformer Engine does; None: it has no such recipe.
        te_name: its recipe class there.
        has_history: whether scales come from the magnitudes of earlier steps.
        has_random_rounding: stochastic rounding of gradients, and a Hadamard transform of wgrad's operands.
    """

    block: Block
    weight_block: Block
    scale_format: ScaleFormat
    row_multiple: int
    width_multiple: int
    bits: int = 8
    torch_capability: int | None = None
    te_capability: tuple[int, int] | None = None
    te_name: str | None = None
    has_history: bool = False
    has_random_rounding: bool = False

    def format_of(self, operand: Operand, fp8: str | None) -> FloatFormat:
        """Return an operand's format; fp8 is "hybrid" (gradients in E5M2) or "e4m3"."""
        if self.bits == 4:
            return E2M1
        return E5M2 if operand == "gradient" and fp8 == "hybrid" else E4M3

    def block_of(self, operand: Operand) -> Block:
        """Return what shares a scale, other dimension x contraction."""
        return self.weight_block if operand == "weight" else self.block


TENSOR = Block(None, None)

# Source: Transformer Engine 2.20: get_align_size_for_quantization, and 128 where its grouped kernels ask for whole
# tiles; the recipes' defaults. rowwise: torch.nn.functional.scaled_grouped_mm. Capabilities: check_*_support there, and
# aten/src/ATen/native/cuda/GroupedBlas.cpp of PyTorch 2.10.
RECIPES = {
    "tensorwise": QuantizationRecipe(
        block=TENSOR,
        weight_block=TENSOR,
        scale_format="fp32",
        row_multiple=16,
        width_multiple=16,
        te_capability=(8, 9),
        te_name="Float8CurrentScaling",
    ),
    "delayed": QuantizationRecipe(
        block=TENSOR,
        weight_block=TENSOR,
        scale_format="fp32",
        row_multiple=16,
        width_multiple=16,
        te_capability=(8, 9),
        te_name="DelayedScaling",
        has_history=True,
    ),
    "rowwise": QuantizationRecipe(
        block=Block(1, None),
        weight_block=Block(1, None),
        scale_format="fp32",
        row_multiple=16,
        width_multiple=16,
        torch_capability=9,
    ),
    "blockwise": QuantizationRecipe(
        block=Block(1, 128),
        weight_block=Block(128, 128),
        scale_format="pow2",
        row_multiple=128,
        width_multiple=128,
        te_capability=(9, 0),
        te_name="Float8BlockScaling",
    ),
    "mxfp8": QuantizationRecipe(
        block=Block(1, 32),
        weight_block=Block(1, 32),
        scale_format="e8m0",
        row_multiple=32,
        width_multiple=32,
        torch_capability=10,
        te_capability=(10, 0),
        te_name="MXFP8BlockScaling",
    ),
    "nvfp4": QuantizationRecipe(
        block=Block(1, 16),
        weight_block=Block(16, 16),
        scale_format="e4m3",
        row_multiple=128,
        width_multiple=16,
        bits=4,
        te_capability=(10, 0),
        te_name="NVFP4BlockScaling",
        has_random_rounding=True,
    ),
}
FP8_RECIPES = tuple(name for name, recipe in RECIPES.items() if recipe.bits == 8)
FP4_RECIPES = tuple(name for name, recipe in RECIPES.items() if recipe.bits == 4)
