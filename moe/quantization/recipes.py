"""The table of quantization recipes: what each asks of the rows that an expert's GEMMs contract over."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class QuantizationRecipe:
    """One row of the table.

    Attributes:
        row_multiple: every non-empty expert's slot count must be a multiple of this, because wgrad contracts over it.
    """

    row_multiple: int


# Source: Transformer Engine 2.20, get_align_size_for_quantization; 128 where its grouped kernels ask for whole tiles.
RECIPES = {
    "delayed": QuantizationRecipe(row_multiple=16),
    "tensorwise": QuantizationRecipe(row_multiple=16),
    "rowwise": QuantizationRecipe(row_multiple=16),
    "blockwise": QuantizationRecipe(row_multiple=128),
    "mxfp8": QuantizationRecipe(row_multiple=32),
    "nvfp4": QuantizationRecipe(row_multiple=128),
}
