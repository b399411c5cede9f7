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
            out[top : top + rows, left : left + cols] = restored.astype(np.float32)
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
    outer = max(single(tensor_amax) / single(448 * largest), single(2.0**-120))
    relative = min(max(float(single(single(amax) / single(largest)) / outer), 2.0**-6), 448.0)
    inner = values_of("E4M3")[int(round_codes(np.array([relative]), "E4M3")[0])]
    with np.errstate(over="ignore"):
        multiplier = min(float(single(1) / outer / single(inner)), 2.0**126)
    return multiplier, float(single(outer) * single(inner))


# What each recipe does with inputs and gradients (blocks along slots or features x contraction) and with weights.
BLOCKS = {
    "tensorwise": ("fp32", (0, 0), (0, 0)),
    "delayed": ("fp32", (0, 0), (0, 0)),
    "rowwise": ("fp32", (1, 0), (1, 0)),
    "blockwise": ("pow2", (1, 128), (128, 128)),
    "mxfp8": ("e8m0", (1, 32), (1, 32)),
    "nvfp4": ("e4m3", (1, 16), (16, 16)),
}


@dataclass(frozen=True)
class Experts:
    """One expert's quantized products in fp64.

    Attributes:
        recipe: a key of BLOCKS.
        fp8: "hybrid" (gradients in E5M2) or "e4m3"; without meaning for nvfp4.
        transform: what nvfp4 does to the operands of weight gradients, [m, n] -> [m, n].
    """

    recipe: str
    fp8: str
    transform: object = None

    def operand(self, x: Tensor, kind: str, *, along_rows: bool) -> Tensor:
        """Return the quantized values of x [m, n], an "input", "weight" or "gradient".

        Args:
            x: the values.
            kind: what they are.
            along_rows: whether the product sums over the rows of x, not over its columns.
        """
        scale, block, weight_block = BLOCKS[self.recipe]
        block = weight_block if kind == "weight" else block
        fmt = "E5M2" if kind == "gradient" and self.fp8 == "hybrid" else "E4M3"
        is_fp4 = self.recipe == "nvfp4"
        if is_fp4 and along_rows and kind != "weight":
            x = self.transform(x)
        rule = Rule("E2M1" if is_fp4 else fmt, scale, block[::-1] if along_rows else block)
        return torch.from_numpy(quantized(x, rule, half_up=is_fp4 and kind == "gradient"))

    def run(self, x: Tensor, p: Tensor, dy: Tensor, weights: dict[str, Tensor], act: object) -> dict[str, Tensor]:
        """Return the results of one expert and the gradients of sum(y * dy).

        Args:
            x, dy: [m, H] fp64, m a multiple of what the recipe asks for.
            p: [m], the weights of the slots.
            weights: fc1 [G, F, H], fc2 [H, F] and, if there are biases, fc1_bias [G, F] and fc2_bias [H].
            act: [m, G, F] -> [m, F].
        """
        fc1 = weights["fc1"].flatten(0, 1)  # [G * F, H]
        shape = (x.shape[0], *weights["fc1"].shape[:2])
        first = self.operand(x, "input", along_rows=False) @ self.operand(fc1, "weight", along_rows=False).t()
        first = first.view(shape) + weights.get("fc1_bias", 0)
        with torch.enable_grad():
            leaf, prob = first.detach().requires_grad_(), p.detach().requires_grad_()
            hidden = act(leaf) * prob.unsqueeze(-1)  # [m, F]
        fc2 = weights["fc2"]
        y = self.operand(hidden, "input", along_rows=False) @ self.operand(fc2, "weight", along_rows=False).t()
        out = {"y": y + p.unsqueeze(-1) * weights.get("fc2_bias", torch.zeros(1))}
        dh = self.operand(dy, "gradient", along_rows=False) @ self.operand(fc2, "weight", along_rows=True)
        dfirst, out["probs"] = torch.autograd.grad(hidden, (leaf, prob), dh)
        out["fc2"] = self.operand(dy, "gradient", along_rows=True).t() @ self.operand(hidden, "input", along_rows=True)
        flat = dfirst.flatten(1)
        out["tokens"] = self.operand(flat, "gradient", along_rows=False) @ self.operand(fc1, "weight", along_rows=True)
        fc1_grad = self.operand(flat, "gradient", along_rows=True).t() @ self.operand(x, "input", along_rows=True)
        out["fc1"] = fc1_grad.view(weights["fc1"].shape)
        if "fc1_bias" in weights:
            out["fc1_bias"], out["fc2_bias"] = dfirst.sum(0), p @ dy
            out["probs"] = out["probs"] + dy @ weights["fc2_bias"]
        return out
