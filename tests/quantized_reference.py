"""The oracle of quantized experts: codes by a table of all values, products in fp64, no code shared with the library.

Everything is slow and plain: a value is rounded by looking at its neighbours in the sorted list of a format's values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# name: exponent bits, mantissa bits, bias, how many of the highest codes are no numbers
LAYOUTS = {"E4M3": (4, 3, 7, 1), "E5M2": (5, 2, 15, 4), "E2M1": (2, 1, 1, 0)}


def values_of(fmt: str) -> list[float]:
    """Return the non-negative values of a format in the order of their codes, by the definition of its bits."""
    exponent_bits, mantissa_bits, bias, num_special = LAYOUTS[fmt]
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits) - num_special):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        if exponent == 0:
            values.append(mantissa * 2.0 ** (1 - bias - mantissa_bits))
        else:
            values.append((1 + mantissa * 2.0**-mantissa_bits) * 2.0 ** (exponent - bias))
    return values


def round_codes(x: np.ndarray, fmt: str, *, half_up: bool = False) -> np.ndarray:
    """Return the code without sign of each |x|: the nearest value's, of two equally near ones the even code's.

    Args:
        x: fp64; magnitudes above the largest value become it.
        fmt: the format.
        half_up: of two equally near values take the upper one instead.
    """
    values = np.array(values_of(fmt))
    magnitude = np.minimum(np.abs(x), values[-1])
    lower = np.clip(np.searchsorted(values, magnitude, side="right") - 1, 0, len(values) - 2)
    below, above = magnitude - values[lower], values[lower + 1] - magnitude
    upper_wins = (above < below) | ((above == below) & ((lower % 2 == 1) | half_up))
    return lower + upper_wins


@dataclass(frozen=True)
class Rule:
    """How an operand is quantized: format, scale ("fp32", "pow2", "e8m0", "e4m3") and block (rows, cols; 0: all)."""

    fmt: str
    scale: str
    block: tuple[int, int]


def quantized(x: Tensor, rule: Rule, *, half_up: bool = False) -> np.ndarray:
    """Return the values that x [m, n] has after it was quantized and came back, fp64."""
    matrix = x.detach().double().numpy().astype(np.float32)
    out = np.zeros(matrix.shape)
    largest = values_of(rule.fmt)[-1]
    rows, cols = rule.block[0] or max(matrix.shape[0], 1), rule.block[1] or max(matrix.shape[1], 1)
    tensor_amax = float(np.abs(matrix).max(initial=0.0))
    for top in range(0, matrix.shape[0], rows):
        for left in range(0, matrix.shape[1], cols):
            block = matrix[top : top + rows, left : left + cols]
            amax = float(np.abs(block).max(initial=0.0))
            multiplier, scale = _scales(amax, tensor_amax, largest, rule.scale)
            scaled = (block * np.float32(multiplier)).astype(np.float64)
            codes = round_codes(scaled, rule.fmt, half_up=half_up)
            restored = np.array(values_of(rule.fmt))[codes] * np.sign(scaled) * scale
            out[top : top + rows, left : left + cols] = restored
    return out


def _scales(amax: float, tensor_amax: float, largest: float, kind: str) -> tuple[float, float]:
    """Return what a block is multiplied by, and what its codes are."""
    single = np.float32
    if kind in ("fp32", "pow2"):
        if amax == 0:
            return 1.0, 1.0
        with np.errstate(over="ignore"):
            multiplier = min(float(single(largest) / single(amax)), 2.0**126)
        if kind == "pow2":
            multiplier = 2.0 ** math.floor(math.log2(multiplier))
        return multiplier, float(single(1) / single(multiplier))
    if kind == "e8m0":
        quotient = float(single(amax) / single(largest))
        exponent = -127 if quotient == 0 else max(min(math.frexp(quotient)[1], 127), -127)
        if quotient and math.frexp(quotient)[0] == 0.5:
            exponent = max(exponent - 1, -127)
        return 2.0**-exponent, 2.0**exponent
    outer = max(single(tensor_amax) / single(448 * largest), np.finfo(np.float32).tiny)
    relative = min(max(float(single(single(amax) / single(largest)) / outer), 2.0**-6), 448.0)
    inner = values_of("E4M3")[int(round_codes(np.array([relative]), "E4M3")[0])]
    with np.errstate(over="ignore"):
        multiplier = min(float(single(1) / outer / single(inner)), 2.0**126)
    return multiplier, float(single(outer) * single(inner))
