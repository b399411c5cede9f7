"""Quantized experts: the table of recipes. The quantized GEMMs themselves are not part of this version."""

from moe.quantization.recipes import RECIPES, QuantizationRecipe

__all__ = ["RECIPES", "QuantizationRecipe"]
