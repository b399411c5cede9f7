"""Quantized experts: formats, quantizers, the table of recipes, grouped products."""

from moe.quantization.recipes import RECIPES, QuantizationRecipe

__all__ = ["RECIPES", "QuantizationRecipe"]
