"""Rows as FP8 on the wire: E4M3 values with one power-of-two scale per 128 values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 128  # values that share a scale
E4M3_MAX = 448.0
SCALE_BIAS = 127  # a scale byte b means 2 ** (b - 127), as in E8M0
NAN_SCALE = 255  # a block that holds inf or NaN comes out as NaN


def packed_width(hidden_size: int) -> int:
    """Return the bytes of a packed row: one per value, one per block of 128."""
    return hidden_size + -(-hidden_size // BLOCK)


def pack_rows(rows: Tensor) -> Tensor:
    """Quantize rows: values as E4M3 (round to nearest even), then the scale bytes of the row.

    The scale of a block is the smallest power of two that brings its largest magnitude to at most 448. What comes back
    differs from x by at most max(2^-4 |x|, 2^-17 amax), amax the largest magnitude of x's block (for amax below 2^-118
    the smallest scale, 2^-127, makes it 2^-137). Packing what was unpacked changes no value.

    Args:
        rows: [R, H] float; inf or NaN makes its block NaN.

    Returns:
        [R, H + ceil(H / 128)] uint8.

    Source: OCP Microscaling Formats v1.0, section 5.4.1 (E8M0); blocks of 128 as DeepSeek-V3, arXiv:2412.19437, 3.3.2.
    """
    hidden_size = rows.shape[1]
    wide = rows.to(torch.float64 if rows.dtype == torch.float64 else torch.float32)
    num_blocks = packed_width(hidden_size) - hidden_size
    blocks = F.pad(wide, (0, -hidden_size % BLOCK)).view(rows.shape[0], num_blocks, BLOCK)  # [R, blocks, 128]
    amax = blocks.abs().amax(-1)  # [R, blocks]
    mantissa, exponent = torch.frexp(amax / E4M3_MAX)  # amax / 448 = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-SCALE_BIAS, SCALE_BIAS)
    exponent = torch.where(amax == 0, 0, exponent)
    values = torch.ldexp(blocks, -exponent.unsqueeze(-1)).flatten(1)[:, :hidden_size]  # |value| <= 448
    scales = torch.where(torch.isfinite(amax), exponent + SCALE_BIAS, NAN_SCALE).to(torch.uint8)
    return torch.cat([values.to(torch.float8_e4m3fn).view(torch.uint8), scales], dim=1)


def unpack_rows(packed: Tensor, hidden_size: int, dtype: torch.dtype) -> Tensor:
    """Return the rows that were packed: [R, H + ceil(H / 128)] uint8 -> [R, H] of dtype; exact in bf16 and wider."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = packed[:, :hidden_size].contiguous().view(torch.float8_e4m3fn).to(wide)  # [R, H]
    scales = packed[:, hidden_size:]  # [R, blocks]
    factors = torch.ldexp(torch.ones_like(scales, dtype=wide), scales.int() - SCALE_BIAS)  # [R, blocks]
    factors = factors.masked_fill(scales == NAN_SCALE, torch.nan).repeat_interleave(BLOCK, dim=1)[:, :hidden_size]
    return (values * factors).to(dtype)
