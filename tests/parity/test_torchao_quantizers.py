"""Codes and scales against torchao's, bit for bit; and, where its definition is another, what exactly differs.

What is compared is its plain PyTorch. It differs in this:
- fp32 scales: it takes a block's largest magnitude, amax, as at least 1e-12; ours holds down to 2^-126 * largest code.
- powers of two: it rounds a log2 in fp32, which may miss by one if amax / largest code is above a power of two by less
  than 2^-18 of it; ours comes from the bits. With amax in bf16 that does not happen.
- E8M0: at the smallest scale, 2^-127, it multiplies by 1, ours by 2^127.
- a block with inf: its scale is inf or 2^127, ours NaN.
- FP4: a tensor below 1e-34 or so gets a scale of 0, or one whose reciprocal is inf; ours is at least 2^-120.
"""

import sys
import types
from importlib import import_module

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.quantization.formats import E2M1, E4M3, E5M2, FloatFormat, decode_half
from moe.quantization.quantize import Block, Quantized, block_amax, quantize
from moe.quantization.recipes import RECIPES
from moe.quantization.torch_gemm import ScaledGroupedMM
from tests.parity import megatron

EPS = 1e-12  # torchao's
LOG2_ERROR = 2.0**-18  # relative: half an ulp of a log2 in [64, 128), times ln 2, is 2^-18.5
FP8 = (E4M3, E5M2)
FP32_BLOCKS = {"1x128": Block(1, 128), "128x1": Block(128, 1), "128x128": Block(128, 128)}


@pytest.fixture(scope="module")
def ao(_peers: None) -> types.SimpleNamespace:
    """The modules of torchao whose functions are compared with ours."""
    names = {
        "float8": "float8.float8_utils",
        "config": "float8.config",
        "mx": "prototype.mx_formats.mx_tensor",
        "mx_config": "prototype.mx_formats.config",
        "mx_kernels": "prototype.mx_formats.kernels",
        "nvfp4": "prototype.mx_formats.nvfp4_tensor",
        "grouped": "prototype.moe_training.kernels.mxfp8.quant",
    }
    modules = types.SimpleNamespace(**{key: import_module(f"torchao.{name}") for key, name in names.items()})
    with pytest.MonkeyPatch.context() as patch:  # after the others, which look whether there is a Triton
        for name, stub in megatron.triton_stubs().items():
            patch.setitem(sys.modules, name, stub)
        modules.blockwise = import_module("torchao.prototype.blockwise_fp8_training.kernels")
    return modules


def bits(x: Tensor) -> Tensor:
    """Return 8-bit codes as bytes, contiguous, the same shape."""
    return x.contiguous().view(torch.uint8)


def draw(shape: tuple[int, int], dtype: torch.dtype, exponent: float, seed: int) -> Tensor:
    """Return [m, n] normal values around 10^exponent, rows and columns of other magnitudes, with blocks of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x *= 10.0 ** (exponent + 2 * torch.randn(shape[0], 1, generator=generator, dtype=torch.float64).clamp(-3, 3))
    x *= 2.0 ** torch.randn(shape[1], generator=generator, dtype=torch.float64)
    x[3] = 0
    x[:128, :128] = 0
    return x.to(dtype)


def draw_bits(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> Tensor:
    """Return [m, n] of random bit patterns, those that are not finite replaced by -0.0."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randint(-(2**31), 2**31, shape, generator=generator)
    x = wide.to(torch.int32).view(dtype) if dtype == torch.float32 else wide.to(torch.int16).view(dtype)
    return torch.where(x.isfinite(), x, -0.0)


def expand(blocks: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return what a value per block is for each element: [blocks, blocks] -> [m, n]."""
    rows, cols = shape[0] // blocks.shape[0], shape[1] // blocks.shape[1]
    return blocks.repeat_interleave(rows, 0).repeat_interleave(cols, 1)


def is_close_above_power(ratio: Tensor) -> Tensor:
    """Return where a positive ratio, fp64, is above a power of two, but less than a log2 in fp32 can tell."""
    mantissa, _ = torch.frexp(ratio)  # in [0.5, 1)
    return (mantissa > 0.5) & (mantissa * 2 - 1 < LOG2_ERROR)


def power_at_least(ratio: Tensor) -> Tensor:
    """Return the smallest power of two that is at least a positive ratio, fp64."""
    mantissa, exponent = torch.frexp(ratio)
    return torch.ldexp(torch.ones_like(ratio), torch.where(mantissa == 0.5, exponent - 1, exponent))


def assert_same_blocks(ours: Quantized, codes: Tensor, scale: Tensor, where: Tensor) -> None:
    """Fail unless codes [m, n] and scales agree bit for bit in the blocks [blocks, blocks] selected."""
    assert ours.scale.shape == where.shape
    assert torch.equal(ours.scale[where], scale.reshape(where.shape)[where])
    selected = expand(where, ours.shape)
    assert torch.equal(bits(ours.codes)[selected], bits(codes)[selected])


inputs = st.tuples(
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.floats(-30, 30),
    st.sampled_from([(128, 384), (384, 256), (256, 128)]),
    st.integers(0, 2**31),
    st.booleans(),
)
some = settings(max_examples=25)


def make(drawn: tuple) -> Tensor:
    """Return the matrix [m, n] that a draw of `inputs` stands for."""
    dtype, exponent, shape, seed, is_bits = drawn
    return draw_bits(shape, dtype, seed) if is_bits else draw(shape, dtype, exponent, seed)


def fp32_scaled(ao: types.SimpleNamespace, x: Tensor, fmt: FloatFormat, block: Block, power: bool) -> tuple:
    """Return torchao's codes [m, n] and the scale to multiply them by, one per tensor or [m, 1]."""
    kinds = ao.config.ScalingGranularity
    options = {} if block.rows is None else {"scaling_granularity": kinds.AXISWISE, "axiswise_dim": -1}
    scale = ao.float8.tensor_to_scale(x, fmt.dtype, round_scales_to_power_of_2=power, **options)
    return ao.float8.to_fp8_saturated(x.float() * scale, fmt.dtype), 1 / scale


@some
@given(inputs)
@example((torch.bfloat16, 0.0, (128, 384), 0, True))
@example((torch.float32, 0.0, (384, 256), 1, True))
@example((torch.bfloat16, -7.0, (384, 256), 2, False))
@example((torch.float32, -11.0, (384, 256), 3, False))
def test_tensorwise_and_rowwise(ao: types.SimpleNamespace, drawn: tuple) -> None:
    x = make(drawn)
    for fmt in FP8:
        for block in (Block(None, None), Block(1, None)):
            amax = block_amax(x, block)
            for scale_format in ("fp32", "pow2"):
                codes, scale = fp32_scaled(ao, x, fmt, block, scale_format == "pow2")
                ours = quantize(x, fmt, block, scale_format)
                where = amax >= EPS
                if scale_format == "pow2":
                    where &= ~is_close_above_power(amax.double() / fmt.max)
                assert_same_blocks(ours, codes, scale, where)
                zero = expand(amax == 0, x.shape)
                assert torch.equal(bits(ours.codes)[zero], bits(codes)[zero])


@pytest.mark.parametrize("fmt", FP8, ids=str)
def test_scales_in_fp32_are_the_nearest_fp32(fmt: FloatFormat) -> None:
    amax = draw((999, 1), torch.float32, 0.0, 5).abs() + 1e-30
    multiplier = (fmt.max / amax.double()).float()  # one fp64 rounding of a quotient of fp32 does not matter
    assert torch.equal(quantize(amax, fmt, Block(1, None), "fp32").scale, 1 / multiplier)


@pytest.mark.parametrize("fmt", FP8, ids=str)
def test_fp32_scales_of_tiny_blocks(ao: types.SimpleNamespace, fmt: FloatFormat) -> None:
    x = torch.tensor([1e-12, -0.9e-12, 3e-16, 5e-30, 0.0]).view(5, 1).repeat(1, 16)
    codes, scale = fp32_scaled(ao, x, fmt, Block(1, None), False)
    ours = quantize(x, fmt, Block(1, None), "fp32")
    assert torch.equal(scale[1:], scale[:1].expand(4, 1))  # theirs: that of 1e-12
    assert torch.equal(ours.scale[0], scale[0])
    assert torch.equal(ours.codes.float().abs()[:4], torch.full((4, 16), fmt.max))  # ours: the largest code
    assert (codes.float().abs()[1:4] < fmt.max).all()
    theirs = (codes.float() * scale)[1:4]
    assert ((ours.dequantize()[1:4] - x[1:4]).abs() <= (theirs - x[1:4]).abs()).all()


@pytest.mark.parametrize("fmt", FP8, ids=str)
def test_powers_of_two_beside_an_exact_one(ao: types.SimpleNamespace, fmt: FloatFormat) -> None:
    exponents = torch.arange(-40, 100)
    power = torch.ldexp(torch.ones(140), exponents).view(-1, 1)
    exact = fmt.max * power
    above, below = exact.nextafter(torch.tensor(torch.inf)), exact.nextafter(torch.tensor(0.0))
    for amax, expected in ((exact, power), (above, 2 * power), (below, power)):
        x = torch.cat([amax, amax / 3], 1)
        ours = quantize(x, fmt, Block(1, None), "pow2")
        codes, scale = fp32_scaled(ao, x, fmt, Block(1, None), True)
        where = ours.scale == scale
        assert torch.equal(ours.scale, expected)
        assert torch.equal(ours.scale.double(), power_at_least(amax.double() / fmt.max))
        assert where.all() == (amax is not above)  # theirs keeps the power: the largest saturates
        assert torch.equal(scale[~where], ours.scale[~where] / 2)
        assert_same_blocks(ours, codes, scale, where)


@some
@given(inputs)
@example((torch.bfloat16, 0.0, (128, 384), 0, True))
@example((torch.float32, 2.0, (384, 256), 1, False))
def test_blockwise(ao: types.SimpleNamespace, drawn: tuple) -> None:
    x = make(drawn)
    quantizers = {
        "1x128": ao.blockwise.torch_blockwise_scale_act_quant_lhs,
        "128x1": ao.blockwise.torch_blockwise_scale_act_quant_rhs,
        "128x128": ao.blockwise.torch_blockwise_scale_weight_quant,
    }
    for name, block in FP32_BLOCKS.items():
        codes, scale = quantizers[name](x)
        ours, amax = quantize(x, E4M3, block, "fp32"), block_amax(x, block)
        assert_same_blocks(ours, codes, scale, amax >= EPS * 1.01)  # bf16: its rounding of 1e-12 is the limit
        zero = expand(amax == 0, x.shape)
        assert torch.equal(bits(ours.codes)[zero], bits(codes)[zero])


def test_blocks_that_are_not_finite(ao: types.SimpleNamespace) -> None:
    x = draw((128, 384), torch.float32, 0.0, 7)
    x[9, 130], x[20, 140] = torch.nan, torch.inf
    codes, scale = ao.blockwise.torch_blockwise_scale_act_quant_lhs(x)
    ours, finite = quantize(x, E4M3, FP32_BLOCKS["1x128"], "fp32"), torch.ones(128, 3, dtype=torch.bool)
    finite[9, 1] = finite[20, 1] = False
    assert_same_blocks(ours, codes, scale, finite & (block_amax(x, FP32_BLOCKS["1x128"]) > 0))
    assert torch.equal(ours.scale.isnan(), ~finite)
    assert scale[9, 1].isnan()
    assert scale[20, 1].isinf()  # theirs, where ours is NaN
    scale, _ = ao.mx.to_mx(x, torch.float8_e4m3fn, 32, ao.mx_config.ScaleCalculationMode.RCEIL)
    scale, ours_scale = bits(scale), bits(quantize(x, E4M3, Block(1, 32), "e8m0").scale)
    assert scale[9, 4] == ours_scale[9, 4] == 255
    assert (scale[20, 4], ours_scale[20, 4]) == (254, 255)
    scale[20, 4] = 255
    assert torch.equal(scale, ours_scale)


@some
@given(inputs)
@example((torch.bfloat16, 0.0, (128, 384), 0, True))
@example((torch.float32, 0.0, (384, 256), 1, True))
@example((torch.float32, -36.0, (384, 256), 2, False))
def test_mxfp8(ao: types.SimpleNamespace, drawn: tuple) -> None:
    x, block = make(drawn), RECIPES["mxfp8"].block
    for fmt in FP8:
        scale, codes = ao.mx.to_mx(x, fmt.dtype, 32, ao.mx_config.ScaleCalculationMode.RCEIL)
        ours = quantize(x, fmt, block, "e8m0")
        ratio = block_amax(x, block).double() / fmt.max
        expected = torch.where(ratio > 0, power_at_least(ratio), 0.0).clamp(min=2.0**-127)
        assert torch.equal(ours.scale_fp32().double(), expected)
        is_close, byte, ours_byte = is_close_above_power(ratio), bits(scale), bits(ours.scale)
        if x.dtype == torch.bfloat16:
            assert not is_close.any()
        assert torch.equal(byte[~is_close], ours_byte[~is_close])
        assert ((ours_byte - byte)[is_close] <= 1).all()
        where = (byte == ours_byte) & ((byte > 0) | (ratio == 0))
        selected = expand(where, x.shape)
        assert torch.equal(bits(ours.codes)[selected], bits(codes)[selected])
        for dtype in (torch.float32, torch.bfloat16):
            theirs = ao.mx.to_dtype(ours.codes, ours.scale, fmt.dtype, 32, dtype)
            assert torch.equal(ours.dequantize(dtype), theirs)


@pytest.mark.parametrize("fmt", FP8, ids=str)
def test_mxfp8_beside_an_exact_power_of_two(ao: types.SimpleNamespace, fmt: FloatFormat) -> None:
    exponents = torch.arange(-100, 100)
    exact = fmt.max * torch.ldexp(torch.ones(200), exponents)
    for amax, steps in ((exact, 0), (exact.nextafter(torch.tensor(torch.inf)), 1), (exact.nextafter(-exact), 0)):
        x = torch.outer(amax, torch.linspace(1, -0.5, 32))
        scale, codes = ao.mx.to_mx(x, fmt.dtype, 32, ao.mx_config.ScaleCalculationMode.RCEIL)
        ours = quantize(x, fmt, Block(1, 32), "e8m0")
        assert torch.equal(bits(ours.scale).int().flatten(), exponents.int() + 127 + steps)
        missing = bits(ours.scale).int() - bits(scale).int()
        assert ((missing == 0) | (missing == steps)).all()
        assert (missing.flatten()[exponents.abs() > 8] == steps).all()  # theirs: one too small, the largest saturates
        assert_same_blocks(ours, codes, scale, missing == 0)


def test_mxfp8_at_the_smallest_scale(ao: types.SimpleNamespace) -> None:
    x = torch.linspace(-1, 1, 32).mul(448 * 2.0**-127).view(1, 32)
    scale, codes = ao.mx.to_mx(x, torch.float8_e4m3fn, 32, ao.mx_config.ScaleCalculationMode.RCEIL)
    ours = quantize(x, E4M3, Block(1, 32), "e8m0")
    assert bits(scale).item() == bits(ours.scale).item() == 0
    assert not codes.float().any()  # theirs: divided by 1
    assert torch.equal(ours.codes.float(), (x.double() * 2.0**127).to(torch.float8_e4m3fn).float())


@some
@given(inputs)
@example((torch.bfloat16, 0.0, (128, 384), 0, True))
@example((torch.float32, 0.0, (384, 256), 1, True))
@example((torch.float32, -30.0, (384, 256), 2, False))
def test_nvfp4(ao: types.SimpleNamespace, drawn: tuple) -> None:
    x = make(drawn)
    tensor_scale = ao.nvfp4.per_tensor_amax_to_scale(x.abs().max())
    scale, codes = ao.nvfp4.nvfp4_quantize(x, 16, tensor_scale)
    ours = quantize(x, E2M1, RECIPES["nvfp4"].block, "e4m3")
    assert torch.equal(ours.tensor_scale, tensor_scale)
    assert torch.equal(bits(ours.scale), bits(scale))
    assert torch.equal(ours.codes, codes)
    values = ao.mx_kernels.f4_unpacked_to_f32(ao.mx_kernels.unpack_uint4(codes))
    assert torch.equal(ours.dequantize(), values * expand(scale.float() * tensor_scale, x.shape))


@pytest.mark.parametrize("amax", [0.0, 1e-40, 1e-36, 1e-33])
def test_nvfp4_of_a_tiny_tensor_is_finite(ao: types.SimpleNamespace, amax: float) -> None:
    """Theirs divides by a scale of 0, or by one whose reciprocal overflows; ours comes back, zeros as zeros."""
    x = torch.zeros(32, 64)
    x[0, :4] = amax * torch.tensor([1.0, -1.0, 0.5, -0.5])
    ours = quantize(x, E2M1, RECIPES["nvfp4"].block, "e4m3")
    result = ours.dequantize()
    assert result.isfinite().all()
    assert not result[x == 0].any()
    assert not ours.codes[1:].any()
    assert (result - x).abs().max() <= max(amax / 16, 2.0**-127)  # half a step of a code is 1/6 * 1/4, scales 1/16


def test_every_fp4_code_and_tie(ao: types.SimpleNamespace) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    table = ao.mx_kernels.f4_unpacked_to_f32(codes)
    packed = ao.mx_kernels.pack_uint4(codes).view(1, -1)
    assert torch.equal((decode_half(packed, E2M1).float() * E2M1.half_factor).flatten(), table)
    ties = torch.tensor([0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    around = torch.cat([ties, ties.nextafter(torch.tensor(9.0)), ties[1:].nextafter(torch.tensor(0.0))])
    values = torch.cat([around, -around, torch.zeros(12)]).clamp(-6, 6).view(4, 16)
    values[:, 0] = 6.0  # so that a block's scale is the same in all
    scale, expected = ao.nvfp4.nvfp4_quantize(values, 16, ao.nvfp4.per_tensor_amax_to_scale(values.amax()))
    ours = quantize(values, E2M1, Block(1, 16), "e4m3")
    assert torch.equal(ours.codes, expected)
    assert torch.equal(bits(ours.scale), bits(scale))


@pytest.mark.parametrize("counts", [(32, 0, 160, 64), (0, 96, 0, 32), (256,), (0, 0, 128)])
def test_swizzled_scales_of_grouped_gemms(ao: types.SimpleNamespace, counts: tuple[int, ...]) -> None:
    """Those of rows, columns and weights lie where torchao's references for the kernels put them."""
    num_slots, width, num_experts = sum(counts), 384, len(counts)
    x = draw((num_slots + 128, width), torch.float32, 0.0, 11)[128:]
    weight = draw((num_experts * 160, width), torch.float32, 0.0, 13).view(num_experts, 160, width)
    gemm, scale_format = ScaledGroupedMM(counts, RECIPES["mxfp8"]), "e8m0"
    offsets = torch.tensor(counts).cumsum(0)

    theirs, starts = ao.grouped.torch_to_blocked_2d_M_groups(
        bits(quantize(x, E4M3, Block(1, 32), scale_format).scale), offsets
    )
    rows = gemm.by_rows(x, 0, "input").scale
    assert rows.shape == (starts[-1], width // 32)
    assert torch.equal(bits(rows), theirs[: starts[-1]])

    by_columns = torch.cat([quantize(part, E4M3, Block(32, 1), scale_format).scale for part in x.split(counts)])
    theirs, starts = ao.grouped.torch_to_blocked_2d_K_groups(bits(by_columns.t()), offsets // 32)
    columns = gemm.by_columns(x, 0, "input").scale
    assert columns.shape == (width, starts[-1])
    assert torch.equal(bits(columns).flatten(), theirs.flatten()[: columns.numel()])

    for is_transposed in (False, True):
        matrices = weight.transpose(1, 2) if is_transposed else weight
        scales = torch.stack([quantize(matrix, E4M3, Block(1, 32), scale_format).scale for matrix in matrices])
        theirs = ao.grouped.torch_to_blocked_per_group_3d(bits(scales))
        assert torch.equal(bits(gemm.weight(weight, 0, is_transposed=is_transposed).scale), theirs)
