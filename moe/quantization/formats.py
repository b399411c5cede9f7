"""Number formats of 8 and 4 bits: what a code means, and rounding to the nearest one, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FloatFormat:
    """A format of eight or fewer bits.

    Attributes:
        name: as the papers write it.
        max: the largest finite magnitude.
        bits: of a code.
        dtype: of the tensor that holds the codes; E2M1 packs two codes in a byte, the first in the low half.
        half_factor: what the code, placed into an fp16 as `_as_half` does, must be multiplied by.
    """

    name: str
    max: float
    bits: int
    dtype: torch.dtype
    half_factor: float

    def __str__(self) -> str:
        return self.name


# Source: OCP 8-bit Floating Point Specification (OFP8) v1.0, table 1; OCP Microscaling Formats v1.0, table 5 (E2M1).
E4M3 = FloatFormat("E4M3", 448.0, 8, torch.float8_e4m3fn, 2.0**8)
E5M2 = FloatFormat("E5M2", 57344.0, 8, torch.float8_e5m2, 1.0)
E2M1 = FloatFormat("E2M1", 6.0, 4, torch.uint8, 2.0**14)

_EXPONENT_BITS = 0x7F800000  # of an fp32
_ROUNDER = 1.5 * 2.0**22  # adding and subtracting p times this rounds an fp32 in [p, 2p) to a multiple of p/2


def packed_width(width: int, fmt: FloatFormat) -> int:
    """Return how many elements of fmt.dtype hold `width` codes."""
    return width * fmt.bits // 8


def encode(values: Tensor, fmt: FloatFormat, out: Tensor, *, stochastic: bool = False) -> None:
    """Round values to the format and write their codes.

    To nearest, ties to the even code. Magnitudes that round to more than the largest are for the caller to clamp,
    except in E2M1, where they become the largest. Stochastic rounding takes the upper or the lower neighbour with the
    probability that makes the expectation the value; its random numbers come from torch's default generator of the
    device.

    Args:
        values: [m, n] fp32; overwritten.
        fmt: the format.
        out: [m, packed_width(n)] of fmt.dtype.
        stochastic: for E2M1 alone.

    Raises:
        ValueError: stochastic rounding to another format.
    """
    if fmt is E2M1:
        return _encode_e2m1(values, out, stochastic=stochastic)
    if stochastic:
        raise ValueError(f"stochastic (True) is there for E2M1, not for {fmt}.")
    out.copy_(values)
    return None


def _encode_e2m1(values: Tensor, out: Tensor, *, stochastic: bool) -> None:
    """Round values [m, n] and pack the codes, two in a byte.

    Divided by half_factor, the smallest normal numbers of E2M1 and fp16 coincide, so the fp16 has the code in its upper
    bits.
    """
    smallest, largest = 1 / E2M1.half_factor, E2M1.max / E2M1.half_factor
    signs = values.view(torch.int32).bitwise_right_shift(28).to(torch.uint8).bitwise_and_(8)  # bit 3 of a code
    magnitudes = values.abs_().mul_(1 / E2M1.half_factor).clamp_(max=largest)
    # Codes in [p, 2p), p a power of two, are p/2 apart; below the smallest normal number as far as above it.
    power = magnitudes.view(torch.int32).bitwise_and(_EXPONENT_BITS).view(torch.float32).clamp_(min=smallest)
    if stochastic:
        step = power.mul_(0.5)
        magnitudes.div_(step).add_(torch.rand_like(magnitudes)).floor_().mul_(step).clamp_(max=largest)
    else:
        rounder = power.mul_(_ROUNDER)
        magnitudes.add_(rounder).sub_(rounder)
    codes = magnitudes.to(torch.float16).view(torch.int16).bitwise_right_shift_(9).to(torch.uint8)
    pairs = codes.bitwise_and_(7).bitwise_or_(signs).view(torch.int16)  # the second code lies in the upper byte
    out.copy_(pairs.bitwise_or_(pairs.bitwise_right_shift(4)))


def decode_half(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """Return the values of codes divided by fmt.half_factor: [m, packed_width(n)] -> [m, n] fp16, exact.

    The bits of a code are shifted to where fp16 has sign, exponent and mantissa: a few cheap passes, where a
    conversion or a table takes several times as long on a CPU. The NaN of E4M3 comes out finite: a block with NaN has a
    NaN scale.
    """
    if fmt is E4M3:  # s eeee mmm -> s 0eeee mmm 0000000
        bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
        return bits.bitwise_and_(~0x4000).view(torch.float16)  # the sign was extended into bit 14
    if fmt is E5M2:
        return codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(8).view(torch.float16)
    wide = codes.to(torch.int16)
    pairs = wide.bitwise_or_(wide.bitwise_left_shift(4)).bitwise_and_(0x0F0F)  # two codes, a byte each
    bits = pairs.view(torch.uint8).to(torch.int16)  # 0000 seem -> s 000ee m 000000000
    sign = bits.bitwise_and(8).bitwise_left_shift_(12)
    return bits.bitwise_and_(7).bitwise_left_shift_(9).bitwise_or_(sign).view(torch.float16)
