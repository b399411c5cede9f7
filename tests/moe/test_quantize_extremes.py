"""Quantizers at the ends of the range, where fp32 itself gives way, and scales against their definition in fp64."""

import pytest
import torch

from moe.quantization.formats import E2M1, E4M3, E5M2, FloatFormat
from moe.quantization.quantize import Block, ScaleFormat, quantize

SMALLEST = 2.0**-149  # the smallest fp32 above 0
FORMATS = [
    (E4M3, "fp32"),
    (E4M3, "pow2"),
    (E4M3, "e8m0"),
    (E5M2, "fp32"),
    (E5M2, "pow2"),
    (E5M2, "e8m0"),
    (E2M1, "e4m3"),
]


@pytest.mark.parametrize(("fmt", "scale_format"), FORMATS, ids=str)
@pytest.mark.parametrize("amax", [0.0, SMALLEST, 1e-42, 1e-38, 1e-34, 1e-20, 1e20, 1e34, 2.9e38, 3e38])
def test_values_come_back_finite_and_zeros_as_zeros(fmt: FloatFormat, scale_format: ScaleFormat, amax: float) -> None:
    x = torch.zeros(3, 64)
    x[0] = amax * torch.linspace(-1, 1, 64)
    x[0, 32] = 0
    result = quantize(x, fmt, Block(1, 32), scale_format).dequantize()
    assert result.isfinite().all()
    assert not result[x == 0].any()
    assert not ((result < 0) & (x > 0) | (result > 0) & (x < 0)).any()
    steps = {E4M3: 2**-4, E5M2: 2**-3, E2M1: 2**-2}[fmt] + 2**-4 * (fmt is E2M1)  # half a code, half a scale in E4M3
    assert (result - x).double().abs().max() <= steps * amax + 2.0**-127


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_scales_in_fp32_are_rounded_once(fmt: FloatFormat) -> None:
    amax = torch.randn(4096, 1).abs() + 1e-3
    multiplier = (fmt.max / amax.double()).float()  # rounding a quotient of two fp32 to fp64 first changes nothing
    assert torch.equal(quantize(amax, fmt, Block(1, None), "fp32").scale, 1 / multiplier)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("scale_format", ["pow2", "e8m0"])
def test_powers_of_two_are_the_smallest_that_suffice(fmt: FloatFormat, scale_format: ScaleFormat) -> None:
    exponents = torch.arange(-100, 100)
    power = torch.ldexp(torch.ones(200), exponents).view(-1, 1)
    exact = fmt.max * power
    for amax, expected in (
        (exact, power),
        (exact.nextafter(torch.tensor(0.0)), power),
        (exact.nextafter(torch.tensor(torch.inf)), 2 * power),
    ):
        quantized = quantize(amax, fmt, Block(1, None), scale_format)
        assert torch.equal(quantized.scale_fp32(), expected)


def test_subnormal_blocks_have_the_smallest_scale_in_e8m0() -> None:
    x = torch.full((1, 32), 2.0**-140)  # over the largest code it is less than an fp32 can hold
    for fmt in (E4M3, E5M2):
        quantized = quantize(x, fmt, Block(1, 32), "e8m0")
        assert quantized.scale.view(torch.uint8).item() == 0
        assert torch.equal(quantized.dequantize() > 0, torch.full((1, 32), fmt is E5M2))
