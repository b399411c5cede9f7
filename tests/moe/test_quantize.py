"""Quantizers: scales by their definition, values against a table of codes, and what one block does to others."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe.quantization import quantize as quantize_module
from moe.quantization.formats import E2M1, E4M3, E5M2, FloatFormat
from moe.quantization.quantize import Block, Quantized, block_amax, dequantize_all, hadamard, quantize
from tests.quantized_reference import Rule, quantized

CASES: dict[str, tuple[FloatFormat, Block, Any]] = {
    "tensor": (E4M3, Block(None, None), "fp32"),
    "tensor, E5M2": (E5M2, Block(None, None), "fp32"),
    "row": (E4M3, Block(1, None), "fp32"),
    "column": (E5M2, Block(None, 1), "fp32"),
    "1x128": (E4M3, Block(1, 128), "pow2"),
    "128x1": (E4M3, Block(128, 1), "fp32"),
    "128x128": (E4M3, Block(128, 128), "pow2"),
    "1x32": (E4M3, Block(1, 32), "e8m0"),
    "32x1, E5M2": (E5M2, Block(32, 1), "e8m0"),
    "1x16": (E2M1, Block(1, 16), "e4m3"),
    "16x1": (E2M1, Block(16, 1), "e4m3"),
    "16x16": (E2M1, Block(16, 16), "e4m3"),
}
SHAPE = (256, 384)
SMALL = (64, 96)  # for the oracle, which walks through the blocks


def matrix(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return values whose blocks have very different magnitudes, with zeros in between."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SHAPE, generator=generator)
    x *= torch.randn(SHAPE[0], 1, generator=generator).mul(3).exp() * torch.randn(SHAPE[1], generator=generator).exp()
    x[torch.rand(SHAPE, generator=generator) < 0.05] = 0
    return x.to(dtype)


def rule_of(case: tuple[FloatFormat, Block, Any]) -> Rule:
    """Return the same case for the oracle."""
    fmt, block, scale = case
    return Rule(fmt.name, scale, (block.rows or 0, block.cols or 0))


def bits(result: Quantized) -> list[list[int]]:
    """Return every byte of codes and scales."""
    return [tensor.reshape(-1).view(torch.uint8).tolist() for tensor in result.tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_values_equal_the_table_of_codes(name: str, dtype: torch.dtype) -> None:
    rows, cols = SHAPE if "128" in name else SMALL
    x = matrix()[:rows, :cols].clamp(-6e4, 6e4).to(dtype).contiguous()
    before, version = x.clone(), x._version
    result = quantize(x, *CASES[name])
    expected = torch.from_numpy(quantized(x, rule_of(CASES[name])))
    assert torch.equal(result.dequantize(torch.float64), expected.float().double())
    assert torch.equal(x, before)
    assert x._version == version
    for other in (torch.float32, torch.bfloat16):
        assert torch.equal(result.dequantize(other), expected.float().to(other))


@pytest.mark.parametrize("exponent", [-140, -100, -30, 0, 30, 90])
@pytest.mark.parametrize("name", ["tensor", "row", "1x128", "1x32", "1x16"])
def test_any_magnitude(name: str, exponent: int) -> None:
    shape = SHAPE if "128" in name else SMALL
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 2.0**exponent
    x = x.float()
    result, expected = quantize(x, *CASES[name]).dequantize(torch.float64), quantized(x, rule_of(CASES[name]))
    scale = x.double().abs().max()
    assert torch.allclose(result / scale, torch.from_numpy(expected) / scale, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_zeros_have_a_finite_scale_and_come_back_as_zeros(name: str) -> None:
    for x in (torch.zeros(SHAPE), -torch.zeros(SHAPE)):
        result = quantize(x, *CASES[name])
        assert torch.isfinite(result.scale_fp32()).all()
        assert torch.equal(result.dequantize(), torch.zeros(SHAPE))
    x = matrix()
    x[:128] = 0
    result = quantize(x, *CASES[name])
    assert torch.isfinite(result.scale_fp32()).all()
    assert torch.equal(result.dequantize()[:128], torch.zeros(128, SHAPE[1]))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", CASES)
def test_non_finite_values_show_in_their_block_and_nowhere_else(name: str, bad: float) -> None:
    fmt, block, scale = CASES[name]
    x = matrix()
    x[130, 259] = bad
    result = quantize(x, fmt, block, scale).dequantize()
    rows, cols = block.sizes(SHAPE)
    hit = torch.zeros(SHAPE, dtype=torch.bool)
    if scale == "e4m3":  # the tensor's scale spans all
        hit[:] = True
    else:
        top, left = 130 // rows * rows, 259 // cols * cols
        hit[top : top + rows, left : left + cols] = True
    assert result[hit].isnan().all()
    clean = matrix()
    assert torch.equal(result[~hit], quantize(clean, fmt, block, scale).dequantize()[~hit])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[1].rows or case[1].cols])
def test_a_block_does_not_depend_on_other_blocks(name: str) -> None:
    fmt, block, scale = CASES[name]
    x = matrix()
    x[200, 300] = 2.0 * x.abs().max() if scale == "e4m3" else x[200, 300]  # the tensor's largest stays where it is
    other = x.clone()
    rows, cols = block.sizes(SHAPE)
    hit = torch.zeros(SHAPE, dtype=torch.bool)
    hit[: rows if rows < SHAPE[0] else SHAPE[0], : cols if cols < SHAPE[1] else SHAPE[1]] = True
    other[hit] *= -3.7
    before, after = (quantize(values, fmt, block, scale).dequantize() for values in (x, other))
    assert torch.equal(before[~hit], after[~hit])
    assert not torch.equal(before[hit], after[hit])


@pytest.mark.parametrize("name", CASES)
def test_parts_of_the_rows_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantize(matrix(), *CASES[name])
    monkeypatch.setattr(quantize_module, "CHUNK_ELEMENTS", 5000)
    parts = quantize(matrix(), *CASES[name])
    assert bits(parts) == bits(whole)
    assert torch.equal(parts.dequantize(), whole.dequantize())


@pytest.mark.parametrize("name", CASES)
def test_a_transposed_or_strided_matrix_gives_the_same_values(name: str) -> None:
    fmt, block, scale = CASES[name]
    x = matrix()[:, :256].contiguous()
    strided = torch.empty(256, 512)[:, ::2].copy_(x)
    assert bits(quantize(strided, fmt, block, scale)) == bits(quantize(x, fmt, block, scale))
    across = quantize(x.t(), fmt, block.t, scale).dequantize()
    assert torch.equal(across.t(), quantize(x, fmt, block, scale).dequantize())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (0, 0)])
def test_nothing_is_a_matrix_too(name: str, shape: tuple[int, int]) -> None:
    assert quantize(torch.empty(shape), *CASES[name]).dequantize().shape == shape


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((4, 130), "1x128"),
        ((130, 4), "128x1"),
        ((3, 33), "1x32"),
        ((8, 24), "1x16"),
        ((8,), "row"),
        ((1, 2, 4), "row"),
        ((), "row"),
    ],
)
def test_shapes_that_the_block_does_not_divide_are_refused(shape: tuple[int, ...], name: str) -> None:
    with pytest.raises(ValueError, match="must be a matrix that blocks of"):
        quantize(torch.ones(shape), *CASES[name])


def test_a_given_magnitude_saturates_and_zero_means_none() -> None:
    x = torch.tensor([[1.0, -2.0, 500.0, -1e6]])
    given = quantize(x, E4M3, Block(None, None), "fp32", given_amax=torch.tensor(448.0))
    assert given.dequantize().tolist() == [[1.0, -2.0, 448.0, -448.0]]
    assert given.scale.item() == 1.0
    own = quantize(x, E4M3, Block(None, None), "fp32")
    assert bits(quantize(x, E4M3, Block(None, None), "fp32", given_amax=torch.tensor(0.0))) == bits(own)
    x[0, 0] = torch.inf
    assert quantize(x, E4M3, Block(None, None), "fp32", given_amax=torch.tensor(448.0)).dequantize().isnan().all()


@pytest.mark.parametrize("power", [-126, -8, 0, 9, 100])
def test_a_power_of_two_scale_is_the_smallest_that_does_not_saturate(power: int) -> None:
    for scale_format in ("pow2", "e8m0"):
        for factor, expected in ((1.0, power), (1.0 + 2**-20, power + 1), (1.0 - 2**-20, power), (0.5, power - 1)):
            x = torch.full((1, 32), 448.0 * 2.0**power * factor)
            scale = quantize(x, E4M3, Block(1, 32), scale_format).scale_fp32().double().item()
            assert scale == 2.0 ** max(expected, -126 if scale_format == "pow2" else -127)


def test_amax_is_per_block() -> None:
    x = torch.arange(-24.0, 24.0).view(4, 12)
    assert block_amax(x, Block(2, 4)).tolist() == [[24.0, 20.0, 16.0], [15.0, 19.0, 23.0]]
    assert block_amax(x, Block(None, None)).tolist() == [[24.0]]


def test_hadamard_keeps_products_and_spreads_outliers() -> None:
    x, y = torch.randn(64, 5, dtype=torch.float64), torch.randn(64, 7, dtype=torch.float64)
    assert torch.allclose(hadamard(x).double().t() @ hadamard(y).double(), x.t() @ y, atol=1e-5)
    outlier = torch.zeros(32, 1)
    outlier[3] = 8.0
    spread = hadamard(outlier)
    assert spread[:16].abs().tolist() == [[2.0]] * 16
    assert torch.equal(spread[16:], torch.zeros(16, 1))
    columns = hadamard(torch.eye(16)).numpy() * 4
    assert np.array_equal(np.abs(columns), np.ones((16, 16)))
    assert len({tuple(row) for row in np.sign(columns)}) == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_many_matrices_come_back_as_each_alone(name: str, dtype: torch.dtype) -> None:
    many = [quantize(x.contiguous() * 10.0**power, *CASES[name]) for power, x in enumerate(matrix().split(128))]
    many.append(quantize(matrix()[:0], *CASES[name]))
    together = list(dequantize_all(many, dtype))
    assert len(together) == len(many)
    for result, one in zip(together, many, strict=True):
        assert result.dtype == dtype
        assert torch.equal(result, one.dequantize(dtype))


@pytest.mark.parametrize("fmt", [E4M3, E2M1])
def test_an_extreme_matrix_leaves_the_others_alone(fmt: FloatFormat) -> None:
    usual = torch.linspace(-1, 1, 64).view(2, 32)
    many = [quantize(usual * factor, fmt, Block(1, 32), "fp32") for factor in (1.0, 3e38, 1e-35, 1e-38)]
    for result, one in zip(dequantize_all(many, torch.float32), many, strict=True):
        assert result.isfinite().all()
        assert torch.equal(result, one.dequantize())


def test_no_matrices_come_back_as_none() -> None:
    assert list(dequantize_all([], torch.float32)) == []
