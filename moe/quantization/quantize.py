"""Quantizers: a matrix as codes with one scale per block, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from dispatchers.host_memory import new_tensor
from moe.quantization.formats import E4M3, FloatFormat, decode_half, encode, packed_width

ScaleFormat = Literal["fp32", "pow2", "e8m0", "e4m3"]

E8M0_NAN = 255  # an E8M0 byte b means 2^(b - 127), as the exponent's field of an fp32 does
SMALLEST_BLOCK_SCALE = torch.finfo(torch.float8_e4m3fn).tiny  # of nvfp4, relative to the tensor's scale
LARGEST_MULTIPLIER = 2.0**126  # its reciprocal is a normal number
SMALLEST_TENSOR_SCALE = 2.0**-120  # of nvfp4: times the smallest block scale it is the smallest normal fp32
CHUNK_ELEMENTS = 1 << 19  # on a CPU: intermediates of a few MiB stay in the cache
_MANTISSA_BITS, _MANTISSA_SIZE = 0x007FFFFF, 23  # of an fp32
_SMALLEST_E8M0 = 0x00400000  # 2^-127 as the bits of an fp32


@dataclass(frozen=True)
class Block:
    """The elements that share a scale: rows x cols; None is the whole dimension."""

    rows: int | None
    cols: int | None

    def sizes(self, shape: torch.Size | tuple[int, int]) -> tuple[int, int]:
        """Return the block's sizes in a matrix of this shape."""
        return self.rows or max(shape[0], 1), self.cols or max(shape[1], 1)

    @property
    def t(self) -> Block:
        """The block of the transposed matrix."""
        return Block(self.cols, self.rows)

    def __str__(self) -> str:
        return "tensor" if self.rows is self.cols is None else f"{self.rows or 'all'}x{self.cols or 'all'}"


@dataclass(frozen=True)
class Quantized:
    """A matrix [m, n] of codes. Element (i, j) is code * scale of its block (* tensor_scale).

    Attributes:
        codes: [m, packed_width(n)] in the dtype of fmt.
        scale: [blocks of rows, blocks of columns]: fp32 ("fp32", "pow2"), float8_e8m0fnu or float8_e4m3fn. NaN for a
            block that held inf or NaN.
        fmt: the format of the codes.
        block: what shares a scale.
        tensor_scale: [] fp32 under a scale in E4M3, else None.
    """

    codes: Tensor
    scale: Tensor
    fmt: FloatFormat
    block: Block
    tensor_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """[m, n]."""
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.fmt.bits

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What has to be kept to restore it with `with_tensors`."""
        return (self.codes, self.scale) if self.tensor_scale is None else (self.codes, self.scale, self.tensor_scale)

    def with_tensors(self, *tensors: Tensor) -> Quantized:
        """Return the same with other tensors, in the order of `tensors`."""
        codes, scale, *rest = tensors
        return replace(self, codes=codes, scale=scale, tensor_scale=rest[0] if rest else None)

    def without_tensors(self) -> Quantized:
        """Return what `with_tensors` is called on: the description alone."""
        empty = self.codes.new_empty(0, 0)
        return replace(self, codes=empty, scale=empty, tensor_scale=None)

    def split(self, sizes: Sequence[int]) -> tuple[Quantized, ...]:
        """Return views of neighbouring rows, `sizes` of them each: multiples of the block's rows."""
        rows = self.block.rows or max(self.shape[0], 1)
        scales = self.scale.split([size // rows for size in sizes])
        parts = zip(self.codes.split(list(sizes)), scales, strict=True)
        return tuple(replace(self, codes=codes, scale=scale) for codes, scale in parts)

    def scale_fp32(self) -> Tensor:
        """Return the scale of each block as fp32, the tensor's included."""
        return _scale_fp32(self.scale, self.tensor_scale)

    def dequantize(self, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """Return the matrix [m, n], rounded to dtype once; fp32 and fp64 hold code * scale as fp32 does."""
        return self._times(*_factors(self.fmt, self.scale_fp32()), dtype, out)

    def _times(self, factors: Tensor, late: float, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Return `decode_half` of the codes times the factor of their block and times late."""
        shape = self.shape
        out = torch.empty(shape, dtype=dtype, device=self.codes.device) if out is None else out
        for rows, blocks in _row_chunks(shape, self.block, out.device):
            values = decode_half(self.codes[rows], self.fmt)
            target = out[rows] if out.dtype == torch.float32 else torch.empty(values.shape, device=out.device)
            _multiply(values, factors[blocks], self.block, out=target)
            if late != 1.0:
                target.mul_(late)
            if target.dtype != out.dtype:
                out[rows].copy_(target)
        return out


def dequantize_all(matrices: Sequence[Quantized], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield what `dequantize` returns for each of some matrices of one format: one by one, their scales at once.

    With many small matrices most of the time would go into scales.
    """
    if not matrices:
        return
    fmt, sizes = matrices[0].fmt, [matrix.scale.numel() for matrix in matrices]
    scale, tensor_scale = torch.cat([matrix.scale.flatten() for matrix in matrices]), None
    given = [matrix.tensor_scale for matrix in matrices if matrix.tensor_scale is not None]
    if given:
        tensor_scale = torch.cat([one.expand(size) for one, size in zip(given, sizes, strict=True)])
    factors, late = _factors(fmt, _scale_fp32(scale, tensor_scale))
    if late != 1.0 and scale.device.type == "cpu":  # some scale is extreme; that of another matrix must not feel it
        yield from (matrix.dequantize(dtype) for matrix in matrices)
        return
    for matrix, part in zip(matrices, factors.split(sizes), strict=True):
        yield matrix._times(part.view(matrix.scale.shape), late, dtype)


def quantize(
    x: Tensor,
    fmt: FloatFormat,
    block: Block,
    scale_format: ScaleFormat,
    *,
    given_amax: Tensor | None = None,
    stochastic: bool = False,
) -> Quantized:
    """Quantize a matrix: in each block the largest magnitude becomes (nearly) the largest code.

    The scale of a block with the largest magnitude amax is, to be divided by:
    - "fp32": amax / fmt.max.
    - "pow2": the smallest power of two that is at least that.
    - "e8m0": likewise, as a byte, 2^-127 to 2^127.
    - "e4m3": amax / fmt.max relative to the tensor's scale amax_of_tensor / (fmt.max * 448), rounded to E4M3.

    A block of zeros has a finite scale and comes back as zeros. A block with inf or NaN has a NaN scale and comes back
    as NaN. Values are divided in fp32 (multiplied by the reciprocal, as kernels do) and rounded as `encode` says.

    Args:
        x: [m, n] float; fp64 is rounded to fp32 first.
        fmt: the format of codes.
        block: what shares a scale; must divide the shape.
        scale_format: the format of scales.
        given_amax: [] fp32, what to take for the largest magnitude where it is above 0; larger ones saturate. With
            "fp32" and "pow2".
        stochastic: stochastic rounding, for E2M1.

    Raises:
        ValueError: a shape that the block does not divide.

    Source: torch.nn.functional.scaled_mm (fp32 scales); OCP Microscaling Formats v1.0, section 6.3, with the exponent
        rounded up as cuBLAS and Transformer Engine do; Pretraining LLMs with NVFP4, arXiv:2509.25149, appendix C.
    """
    shape = (x.shape[0], x.shape[-1]) if x.ndim else (0, 0)
    sizes = block.sizes(shape)
    if x.ndim != 2 or shape[0] % sizes[0] or shape[1] % sizes[1] or shape[1] * fmt.bits % 8:
        raise ValueError(f"x {list(x.shape)} must be a matrix that blocks of {sizes[0]} x {sizes[1]} divide.")
    amax = block_amax(x, block)
    tensor_scale = None
    if scale_format == "e4m3":
        scale, multiplier, tensor_scale = _two_level_scale(amax, fmt.max)
    elif scale_format == "e8m0":
        scale, multiplier = _e8m0_scale(amax, fmt.max)
    else:
        if given_amax is not None:
            amax = torch.where((given_amax > 0) & amax.isfinite(), given_amax, amax)
        multiplier = _fp32_multiplier(amax, fmt.max, is_power_of_2=scale_format == "pow2")
        scale = 1 / multiplier
    codes = new_tensor((shape[0], packed_width(shape[1], fmt)), fmt.dtype, x.device)
    chunks = _row_chunks(shape, block, x.device)
    scratch = _scratch(x, chunks)
    for rows, blocks in chunks:
        values = scratch[: rows.stop - rows.start]
        _multiply(x[rows], multiplier[blocks], block, out=values)
        if given_amax is not None:
            values.clamp_(-fmt.max, fmt.max)
        encode(values, fmt, codes[rows], stochastic=stochastic)
    return Quantized(codes, scale, fmt, block, tensor_scale)


def block_amax(x: Tensor, block: Block) -> Tensor:
    """Return the largest magnitude of each block, inf or NaN where it holds one: [m, n] -> [blocks, blocks] fp32."""
    num_rows, num_cols = x.shape
    block_rows, block_cols = block.sizes(x.shape)
    parts = []
    chunks = _row_chunks(x.shape, block, x.device)
    scratch = _scratch(x, chunks)
    for rows, _ in chunks:
        magnitudes = scratch[: rows.stop - rows.start]
        if x.dtype == torch.float32:
            torch.abs(x[rows], out=magnitudes)
        else:
            magnitudes.copy_(x[rows]).abs_()
        if block_cols > 1:
            magnitudes = _amax_of_runs(magnitudes, block_cols)
        if block.rows is None:
            magnitudes = magnitudes.amax(0, keepdim=True)
        elif block_rows > 1:
            magnitudes = magnitudes.view(-1, block_rows, magnitudes.shape[1]).amax(1)
        parts.append(magnitudes.clone() if magnitudes.data_ptr() == scratch.data_ptr() else magnitudes)
    if not parts or num_cols == 0:
        blocks_of_rows = 1 if block.rows is None else num_rows // block_rows
        return x.new_zeros(blocks_of_rows, 1 if block.cols is None else num_cols // block_cols, dtype=torch.float32)
    joined = torch.cat(parts) if len(parts) > 1 else parts[0]
    return joined.amax(0, keepdim=True) if block.rows is None else joined


def hadamard(x: Tensor) -> Tensor:
    """Return 16 rows at a time times a random orthogonal matrix: [m, n] -> [m, n] fp32, m a multiple of 16.

    It is the Hadamard matrix of order 16 over 4, its columns multiplied by fixed random signs. Two matrices transformed
    so have the product x^T y of the originals, but outliers are spread over 16 rows.

    Source: Pretraining LLMs with NVFP4, arXiv:2509.25149, section 4.2 and appendix C.
    """
    matrix = _hadamard_matrix(x.device)
    blocks = x.float().view(-1, 16, x.shape[1])  # [m / 16, 16, n]
    return torch.einsum("rk,bkn->brn", matrix, blocks).reshape(x.shape)


def e8m0_to_fp32(scale: Tensor) -> Tensor:
    """Return the powers of two that bytes of E8M0 stand for, NaN for 255."""
    byte = scale.view(torch.uint8).int()
    return _power_of_two(byte).masked_fill(byte == E8M0_NAN, torch.nan)


def _power_of_two(byte: Tensor) -> Tensor:
    """Return 2^(byte - 127) as fp32: byte int32, 0 to 254, which is the exponent's field but for 0 (a subnormal)."""
    return torch.where(byte == 0, _SMALLEST_E8M0, byte.bitwise_left_shift(_MANTISSA_SIZE)).view(torch.float32)


def _scale_fp32(scale: Tensor, tensor_scale: Tensor | None) -> Tensor:
    """Return scales as fp32, times that of their tensor if there is one."""
    scale = e8m0_to_fp32(scale) if scale.dtype == torch.float8_e8m0fnu else scale.float()
    return scale if tensor_scale is None else scale * tensor_scale


def _factors(fmt: FloatFormat, scale: Tensor) -> tuple[Tensor, float]:
    """Return what to multiply what `decode_half` returns by: a factor of each scale, and what is left of it for later.

    The part of fmt.half_factor that an fp32 would not hold together with a scale is left. Only on a CPU, where a pass
    is dear and a look at the scales is not, is it 1 where it can be.
    """
    is_needed = scale.device.type != "cpu" or bool((scale > 2.0**127 / fmt.half_factor).any())
    late = fmt.half_factor if is_needed else 1.0
    return scale * (fmt.half_factor / late), late


def _amax_of_runs(magnitudes: Tensor, run: int) -> Tensor:
    """Return the largest of every `run` neighbours in a row: [m, n] -> [m, n / run]."""
    if run <= 16:  # reductions this short are slow; pooling is not
        return F.max_pool1d(magnitudes.unsqueeze(1), run).squeeze(1)
    return magnitudes.view(magnitudes.shape[0], -1, run).amax(-1)


def _fp32_multiplier(amax: Tensor, largest: float, *, is_power_of_2: bool) -> Tensor:
    """Return what to multiply a block by: largest / amax, or the largest power of two that is at most that."""
    quotient = torch.full_like(amax, largest) / amax  # a number over a tensor would be rounded twice, as a reciprocal
    multiplier = quotient.clamp(max=LARGEST_MULTIPLIER)
    if is_power_of_2:
        multiplier = multiplier.view(torch.int32).bitwise_and(~_MANTISSA_BITS).view(torch.float32)
    return torch.where(amax == 0, 1.0, multiplier).masked_fill(~amax.isfinite(), torch.nan)


def _e8m0_scale(amax: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Return the scale of each block as E8M0, and its reciprocal."""
    quotient = (amax / torch.full_like(amax, largest)).view(torch.int32)
    byte = (quotient + _MANTISSA_BITS).bitwise_right_shift(_MANTISSA_SIZE)  # the exponent's field, rounded up
    byte = torch.where(quotient <= _SMALLEST_E8M0, 0, byte).clamp(max=E8M0_NAN - 1)
    is_bad = ~amax.isfinite()
    multiplier = _power_of_two(E8M0_NAN - 1 - byte).masked_fill(is_bad, torch.nan)
    byte = byte.masked_fill(is_bad, E8M0_NAN).to(torch.uint8)
    return byte.view(torch.float8_e8m0fnu), multiplier


def _two_level_scale(amax: Tensor, largest: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scale of each block as E4M3, what to multiply the block by, and the scale of the tensor [] fp32."""
    tensor_scale = amax.amax() if amax.numel() else amax.new_zeros(())
    # Divided by tensors: some devices divide by a number through its rounded reciprocal.
    tensor_scale = (tensor_scale / torch.full_like(tensor_scale, E4M3.max * largest)).clamp(min=SMALLEST_TENSOR_SCALE)
    relative = (amax / torch.full_like(amax, largest) / tensor_scale).clamp(SMALLEST_BLOCK_SCALE, E4M3.max)
    scale = relative.to(torch.float8_e4m3fn)
    multiplier = 1 / tensor_scale / scale.float()
    is_bad = ~tensor_scale.isfinite()
    return scale, multiplier.masked_fill(is_bad, torch.nan), tensor_scale.masked_fill(is_bad, torch.nan)


def _multiply(x: Tensor, factors: Tensor, block: Block, out: Tensor) -> None:
    """Write x [m, n] times its block's factor [blocks, blocks] to out, fp32."""
    rows, cols = block.sizes(x.shape)
    if rows == x.shape[0] and cols == x.shape[1]:
        torch.mul(x, factors, out=out)
        return
    by_block = (factors.shape[0], -1, factors.shape[1], cols)
    torch.mul(x.reshape(by_block), factors[:, None, :, None], out=out.view(by_block))


def _row_chunks(shape: torch.Size | tuple[int, int], block: Block, device: torch.device) -> list[tuple[slice, slice]]:
    """Return parts of the rows, and which rows of blocks belong to each.

    On a CPU a part is as large as stays in the cache; elsewhere there is one.
    """
    num_rows, num_cols = shape
    if num_rows == 0 or num_cols == 0:
        return []
    per_chunk = num_rows
    if device.type == "cpu":
        unit = block.rows or 1
        per_chunk = max(CHUNK_ELEMENTS // num_cols // unit, 1) * unit
    chunks = []
    for start in range(0, num_rows, per_chunk):
        stop = min(start + per_chunk, num_rows)
        blocks = slice(None) if block.rows is None else slice(start // block.rows, stop // block.rows)
        chunks.append((slice(start, stop), blocks))
    return chunks


def _scratch(x: Tensor, chunks: list[tuple[slice, slice]]) -> Tensor:
    """Return uninitialised fp32 memory for any of the chunks of x [m, n]; the first is the largest."""
    return torch.empty(chunks[0][0].stop if chunks else 0, x.shape[1], device=x.device)


def _hadamard_matrix(device: torch.device) -> Tensor:
    """Return the orthogonal matrix of `hadamard`, [16, 16] fp32."""
    matrix = torch.ones(1, 1)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], dtype=torch.float32)
    return (matrix * signs / 4).to(device)
