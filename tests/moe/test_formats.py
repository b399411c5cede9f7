"""Codes of FP8 and FP4: what each means, and rounding to the nearest, checked against the definition of the bits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.quantization.formats import E2M1, E4M3, E5M2, FloatFormat, decode_half, encode
from tests.quantized_reference import round_codes, values_of

FORMATS = [E4M3, E5M2, E2M1]


def codes_of(values: Tensor, fmt: FloatFormat, *, stochastic: bool = False) -> Tensor:
    """Return the unpacked codes of values [n], n even."""
    scaled = values.float().clone().view(1, -1)
    out = torch.empty(1, values.numel() * fmt.bits // 8, dtype=fmt.dtype)
    encode(scaled, fmt, out, stochastic=stochastic)
    if fmt is E2M1:
        return torch.stack([out & 15, out >> 4], dim=-1).flatten()
    return out.view(torch.uint8).flatten()


def expected_codes(values: Tensor, fmt: FloatFormat) -> Tensor:
    """Return the codes by the table, with the sign in the highest bit."""
    codes = round_codes(values.double().numpy(), fmt.name)
    return torch.from_numpy(codes.astype(np.uint8)) | (torch.signbit(values).to(torch.uint8) << (fmt.bits - 1))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_every_code_means_what_its_bits_say(fmt: FloatFormat) -> None:
    expected = torch.tensor(values_of(fmt.name), dtype=torch.float64)
    codes = torch.arange(len(expected), dtype=torch.uint8)
    for sign in (1, -1):
        signed = codes | (0 if sign == 1 else 1 << (fmt.bits - 1))
        packed = (signed[::2] | signed[1::2] << 4) if fmt is E2M1 else signed
        if fmt is not E2M1:
            packed = packed.view(fmt.dtype)
        decoded = decode_half(packed.view(1, -1), fmt)[0].double() * fmt.half_factor
        assert torch.equal(decoded[: len(expected)], sign * expected)
    assert fmt.max == expected[-1]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_ties_go_to_the_even_code_and_their_neighbours_to_the_nearest(fmt: FloatFormat) -> None:
    values = torch.tensor(values_of(fmt.name))
    ties = (values[1:] + values[:-1]) / 2
    up, down = (torch.nextafter(ties, torch.full_like(ties, end)) for end in (torch.inf, -torch.inf))
    cases = torch.cat([values, ties, up, down])
    cases = torch.cat([cases, -cases])
    assert torch.equal(codes_of(cases, fmt), expected_codes(cases, fmt))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@settings(deadline=None, max_examples=60)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=64, max_size=64))
def test_any_fp32_rounds_to_the_nearest_value(fmt: FloatFormat, bits: list[int]) -> None:
    values = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    values = values.nan_to_num(1.0)
    values = torch.where(values.abs() > fmt.max, values.sign() * fmt.max, values)
    values = torch.where(values.abs() < 2.0**-100, values.sign() * 2.0**-100, values)
    assert torch.equal(codes_of(values, fmt), expected_codes(values, fmt))


def test_fp4_saturates() -> None:
    values = torch.tensor([6.5, 7.0, 1e30, -8.0])
    assert codes_of(values, E2M1).tolist() == [7, 7, 7, 15]


def test_stochastic_rounding_takes_neighbours_and_is_unbiased() -> None:
    torch.manual_seed(1)
    wanted = torch.tensor([0.1, 0.3, 1.2, 1.75, 2.4, 3.9, 4.5, 5.9, -0.6, -5.0])
    num_draws = 20000
    codes = codes_of(wanted.repeat(num_draws), E2M1, stochastic=True).view(num_draws, -1)
    table = torch.tensor(values_of("E2M1") + [-v for v in values_of("E2M1")])
    drawn = table[codes.int()]  # [draws, n]
    grid = table.sort().values.unique()
    above = torch.searchsorted(grid, wanted)
    for column, value, i in zip(drawn.t(), wanted, above, strict=True):
        assert set(column.unique().tolist()) <= {grid[i - 1].item(), grid[i].item()}
        gap = (grid[i] - grid[i - 1]).item()
        assert abs(column.mean().item() - value.item()) < 5 * gap / 2 / num_draws**0.5


def test_stochastic_rounding_keeps_what_a_code_can_hold() -> None:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] * 50)
    assert codes_of(values, E2M1, stochastic=True).tolist() == [0, 1, 2, 3, 4, 5, 6, 7] * 50


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_stochastic_rounding_of_fp8_is_refused(fmt: FloatFormat) -> None:
    with pytest.raises(ValueError, match=rf"stochastic \(True\) is there for E2M1, not for {fmt}"):
        codes_of(torch.ones(2), fmt, stochastic=True)
