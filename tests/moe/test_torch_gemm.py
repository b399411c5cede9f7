"""The products of experts by torch's grouped kernels: grouped_mm as it runs on a CPU, scaled_grouped_mm by a stand-in.

The stand-in asks for what the kernels ask for, reads scales where they read them, and leaves unwritten what they do.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moe.quantization.grouped_gemm import FC1, ReferenceGemm
from moe.quantization.quantize import e8m0_to_fp32
from moe.quantization.recipes import RECIPES
from moe.quantization.torch_gemm import GroupedMM, ScaledGroupedMM, offsets, tile_scales
from tests.tolerances import assert_close

N, K = 224, 160  # multiples of 32, not of 128
COUNTS = [(32, 0, 96), (0, 160, 0, 0), (64, 32, 0), (0, 0, 32)]
NO_SLOTS = (0, 0)
RECIPE_NAMES = ["rowwise", "mxfp8"]


def operands(counts: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [M, K], dy [M, N] and W [L, N, K], rows and columns of many magnitudes, one row of zeros."""
    generator = torch.Generator().manual_seed(len(counts) + sum(counts))
    shapes = ((sum(counts), K), (sum(counts), N), (len(counts), N, K))
    matrices = []
    for shape in shapes:
        rows = torch.exp2(torch.randint(-6, 7, (*shape[:-1], 1), generator=generator).float())
        columns = torch.exp2(torch.randint(-6, 7, shape[-1:], generator=generator).float())
        matrices.append((torch.randn(shape, generator=generator) * rows * columns).to(dtype))
        matrices[-1][..., 1:2, :] = 0
    return tuple(matrices)


def slices(counts: tuple[int, ...]) -> list[slice]:
    """Return each expert's slots."""
    ends = torch.tensor(counts).cumsum(0).tolist()
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def leave_unwritten(out: Tensor, offs: Tensor) -> Tensor:
    """Fill with NaN what kernels leave of weight gradients [L, N, K]: experts without slots."""
    counts = offs.diff(prepend=offs.new_zeros(1))
    return out.masked_fill((counts == 0).view(-1, 1, 1), torch.nan) if out.ndim == 3 else out


@pytest.fixture
def _unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    real = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda a, b, *, offs: leave_unwritten(real(a, b, offs=offs), offs))


@pytest.mark.usefixtures("_unwritten")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", [*COUNTS, (7, 0, 1), NO_SLOTS], ids=str)
def test_grouped_mm_against_a_loop(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    x, grad, weight = operands(counts, dtype)
    gemm = GroupedMM(counts)
    rows, columns = gemm.both(x, FC1, "input")
    grad_rows, grad_columns = gemm.by_rows(grad, FC1, "gradient"), gemm.by_columns(grad, FC1, "gradient")
    out = gemm.multiply(rows, gemm.weight(weight, FC1, is_transposed=False))
    grad_x = gemm.multiply(grad_rows, gemm.weight(weight, FC1, is_transposed=True))
    assert (out.shape, out.dtype, grad_x.shape, grad_x.dtype) == ((sum(counts), N), dtype, (sum(counts), K), dtype)
    for out_dtype in (dtype, torch.float32):
        weight_grad = torch.full(weight.shape, torch.nan, dtype=out_dtype)
        gemm.weight_gradient(grad_columns, columns, weight_grad)
        for e, part in enumerate(slices(counts)):
            x_e, grad_e, weight_e = x[part].double(), grad[part].double(), weight[e].double()
            assert_close(out[part], x_e @ weight_e.t())
            assert_close(grad_x[part], grad_e @ weight_e)
            assert_close(weight_grad[e], grad_e.t() @ x_e, dtype)
            assert counts[e] or not weight_grad[e].any()
    assert gemm.saved_bits is None


def position(row: int, block: int, num_blocks: int) -> int:
    """Return at which byte the scale of a row and block lies, of so many blocks padded to a multiple of 4."""
    tile = row // 128 * (num_blocks // 4) + block // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (160, 7), (300, 12), (257, 5), (0, 5), (33, 0)], ids=str)
def test_tiled_scales_element_by_element(shape: tuple[int, int]) -> None:
    rows, blocks = shape
    scale = torch.randint(1, 255, shape, dtype=torch.uint8)
    padded = rows + -rows % 128, blocks + -blocks % 4
    expected = torch.zeros(padded[0] * padded[1], dtype=torch.uint8)
    for row in range(rows):
        for block in range(blocks):
            expected[position(row, block, padded[1])] = scale[row, block]
    for stored in (scale, scale.t().contiguous().t()):
        tiled = tile_scales(stored.view(torch.float8_e8m0fnu))
        assert tiled.shape == padded
        assert tiled.dtype == torch.float8_e8m0fnu
        assert tiled.is_contiguous()
        assert torch.equal(tiled.view(torch.uint8).flatten(), expected)


def read_tiles(scale: Tensor, start: int, rows: int, blocks: int) -> Tensor:
    """Return the scales [rows, blocks] that lie in tiles from a byte on, fp64."""
    num_blocks = blocks + -blocks % 4
    places = [[start + position(row, block, num_blocks) for block in range(blocks)] for row in range(rows)]
    used = torch.tensor(places, dtype=torch.int64).view(rows, blocks)
    return e8m0_to_fp32(scale.flatten()[used]).double()


class Kernel:
    """torch.nn.functional.scaled_grouped_mm as its CUDA kernels see it.

    Source: aten/src/ATen/native/cuda/GroupedBlas.cpp and ScaledGroupMM.cu of PyTorch (rowwise), mx8mx8bf16_grouped of
        FBGEMM (mxfp8).
    """

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(
        self,
        mat_a: Tensor,
        mat_b: Tensor,
        *,
        scale_a: Tensor,
        scale_recipe_a: F.ScalingType,
        scale_b: Tensor,
        scale_recipe_b: F.ScalingType,
        swizzle_a: F.SwizzleType,
        swizzle_b: F.SwizzleType,
        offs: Tensor,
        output_dtype: torch.dtype,
    ) -> Tensor:
        """Return a [M, K] b [L, K, N] by groups of rows: [M, N]; or a [M, K] b [K, N] by groups of K: [L, M, N]."""
        self.num_calls += 1
        is_rowwise = scale_recipe_a == F.ScalingType.RowWise
        kind, swizzle = (
            (F.ScalingType.RowWise, F.SwizzleType.NO_SWIZZLE)
            if is_rowwise
            else (F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4)
        )
        assert (scale_recipe_a, scale_recipe_b, swizzle_a, swizzle_b) == (kind, kind, swizzle, swizzle)
        assert output_dtype == torch.bfloat16
        self._check_by_meta(mat_a, mat_b, scale_a, scale_b, offs)
        for mat in (mat_a, mat_b):
            assert mat.dtype == torch.float8_e4m3fn
        assert mat_a.stride()[-1] == mat_b.stride()[-2] == 1  # the contraction
        assert mat_a.shape[-1] % 16 == mat_b.shape[-2] % 16 == mat_b.shape[-1] % 16 == 0
        ends = offs.tolist()
        groups = list(zip([0, *ends[:-1]], ends, strict=True))
        is_2d = mat_b.ndim == 2
        assert ends[-1] == mat_a.shape[1 if is_2d else 0]
        multiple = 16 if is_rowwise else 32  # scales of 32 values each: a group must not share them
        assert all((end - start) % multiple == 0 for start, end in groups)
        by = self._rowwise if is_rowwise else self._blockwise
        parts = by(mat_a.double(), mat_b.double(), scale_a, scale_b, groups, is_2d)
        if not is_2d:
            return torch.cat(parts).to(output_dtype)
        return leave_unwritten(torch.stack(parts).to(output_dtype), offs)

    def _check_by_meta(self, mat_a: Tensor, mat_b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> None:
        """Let torch check shapes, dtypes and strides."""
        tensors = [tensor.to("meta") for tensor in (mat_a, mat_b, scale_a, scale_b, offs)]
        assert [t.stride() for t in tensors[:2]] == [mat_a.stride(), mat_b.stride()]
        out = torch._scaled_grouped_mm(*tensors, out_dtype=torch.bfloat16)
        groups = () if mat_b.ndim == 3 else (len(offs),)
        assert out.shape == (*groups, mat_a.shape[0], mat_b.shape[-1])

    def _rowwise(
        self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, groups: list, is_2d: bool
    ) -> list[Tensor]:
        """Return each group's product, its operands rounded to fp32, as the reference rounds them."""
        a, b = a.float(), b.float()
        rows, columns = a.shape[0], b.shape[-1]
        parts = []
        for e, (start, end) in enumerate(groups):
            if is_2d:
                left = a[:, start:end] * scale_a.view(len(groups), rows)[e, :, None]
                right = b[start:end] * scale_b.view(len(groups), columns)[e]
            else:
                left = a[start:end] * scale_a[start:end, None]
                right = b[e] * scale_b[e]
            parts.append(left.double() @ right.double())
        return parts

    def _blockwise(
        self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, groups: list, is_2d: bool
    ) -> list[Tensor]:
        """Return each group's product; each group's scales begin where those of the one before it end."""

        def up(size: int, multiple: int) -> int:
            return size + -size % multiple

        rows, columns, parts = a.shape[0], b.shape[-1], []
        start_a = start_b = 0  # bytes
        for e, (start, end) in enumerate(groups):
            if is_2d:
                left, right, blocks = a[:, start:end], b[start:end].t(), (end - start) // 32
                sizes = up(rows, 128) * up(blocks, 4), up(columns, 128) * up(blocks, 4)
            else:
                left, right, blocks = a[start:end], b[e].t(), a.shape[1] // 32
                sizes = up(end - start, 128) * up(blocks, 4), up(columns, 128) * up(blocks, 4)
            scaled = [
                mat * read_tiles(scale, first, mat.shape[0], blocks).repeat_interleave(32, 1)
                for mat, scale, first in ((left, scale_a, start_a), (right, scale_b, start_b))
            ]
            parts.append(scaled[0] @ scaled[1].t())
            start_a, start_b = start_a + sizes[0], start_b + sizes[1]
        assert (start_a, start_b) == (scale_a.numel(), scale_b.numel())
        return parts


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The stand-in, in place of torch's function."""
    kernel = Kernel()
    monkeypatch.setattr(F, "scaled_grouped_mm", kernel, raising=False)
    return kernel


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_scaled_grouped_mm_against_the_reference(kernel: Kernel, counts: tuple[int, ...], recipe: str) -> None:
    """The sums are in fp64 on both sides, the rounding to bf16 is the last step of both: bit for bit."""
    x, grad, weight = operands(counts, torch.bfloat16)
    gemm = ScaledGroupedMM(counts, RECIPES[recipe])
    reference = ReferenceGemm(RECIPES[recipe], "e4m3", counts, torch.float64)
    results = []
    for backend, dtype in ((gemm, torch.float32), (reference, torch.float64)):
        rows, columns = backend.both(x, FC1, "input")
        grad_rows, grad_columns = backend.both(grad, FC1, "gradient")
        weight_grad = torch.full(weight.shape, torch.nan, dtype=dtype)
        backend.weight_gradient(grad_columns, columns, weight_grad)
        forward = backend.multiply(rows, backend.weight(weight, FC1, is_transposed=False))
        grad_x = backend.multiply(grad_rows, backend.weight(weight, FC1, is_transposed=True))
        results.append((forward, grad_x, weight_grad))
    assert kernel.num_calls == 3
    for ours, expected in zip(*results, strict=True):
        assert expected.any()
        assert torch.equal(ours.to(torch.bfloat16), expected.to(torch.bfloat16))
    assert (results[0][0].dtype, results[0][1].dtype) == (torch.bfloat16, torch.bfloat16)
    assert (gemm.saved_bits, reference.saved_bits) == (8, 8)


@pytest.mark.usefixtures("_unwritten")
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_weight_gradients_of_plain_values(kernel: Kernel, recipe: str) -> None:
    counts = COUNTS[0]
    x, grad, weight = operands(counts, torch.bfloat16)
    gemm = ScaledGroupedMM(counts, RECIPES[recipe], quantizes_wgrad=False)
    weight_grad, expected = torch.full(weight.shape, torch.nan), torch.empty_like(weight)
    gemm.weight_gradient(gemm.by_columns(grad, FC1, "gradient"), gemm.by_columns(x, FC1, "input"), weight_grad)
    GroupedMM(counts).weight_gradient(*(gemm.by_columns(v, FC1, "input") for v in (grad, x)), expected)
    assert torch.equal(weight_grad, expected.float())
    assert (gemm.saved_bits, kernel.num_calls) == (None, 0)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_no_slots_at_all(kernel: Kernel, recipe: str) -> None:
    x, grad, weight = operands(NO_SLOTS, torch.bfloat16)
    gemm = ScaledGroupedMM(NO_SLOTS, RECIPES[recipe])
    (rows, columns), (_, grad_columns) = gemm.both(x, FC1, "input"), gemm.both(grad, FC1, "gradient")
    assert gemm.multiply(rows, gemm.weight(weight, FC1, is_transposed=False)).shape == (0, N)
    weight_grad = torch.full(weight.shape, torch.nan)
    gemm.weight_gradient(grad_columns, columns, weight_grad)
    assert not weight_grad.any()
    assert kernel.num_calls == 0


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_operands_come_back_from_their_tensors(kernel: Kernel, recipe: str) -> None:
    counts = COUNTS[0]
    x, _, weight = operands(counts, torch.bfloat16)
    gemm = ScaledGroupedMM(counts, RECIPES[recipe])
    rows, weights = gemm.by_rows(x, FC1, "input"), gemm.weight(weight, FC1, is_transposed=False)
    restored = [operand.without_tensors().with_tensors(*operand.tensors) for operand in (rows, weights)]
    assert all(tensor.numel() == 0 for tensor in rows.without_tensors().tensors)
    assert torch.equal(gemm.multiply(*restored), gemm.multiply(rows, weights))


def test_offsets_are_ends_in_int32() -> None:
    ends = offsets((3, 0, 5), torch.device("cpu"))
    assert torch.equal(ends, torch.tensor([3, 3, 8], dtype=torch.int32))
    assert ends.dtype == torch.int32
