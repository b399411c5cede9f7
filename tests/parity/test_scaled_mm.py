"""Our products of quantized operands against torch._scaled_mm, which multiplies the same codes and scales."""

import pytest
import torch
from torch import Tensor

from moe.quantization.formats import E4M3, E5M2
from moe.quantization.grouped_gemm import FC1, ReferenceGemm
from moe.quantization.quantize import Quantized
from moe.quantization.recipes import RECIPES

COUNTS = (48, 16, 80)  # slots of each expert
N, K = 176, 96  # all sizes are multiples of 16, as torch._scaled_mm asks
PRODUCTS = ("forward", "input gradient", "weight gradient")


def operands(is_exact: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [M, K], dy [M, N] and W [L, N, K], fp32.

    If is_exact they are small integers with a 448 in every row and column of every expert: all scales are powers of
    two, all values codes, and all sums integers below 2^24, the same in any order.
    """
    generator, shapes = torch.Generator().manual_seed(3), ((sum(COUNTS), K), (sum(COUNTS), N), (len(COUNTS), N, K))
    if not is_exact:
        return tuple(
            torch.randn(shape, generator=generator) * torch.logspace(-3, 3, shape[-2])[:, None] for shape in shapes
        )
    matrices = []
    for shape in shapes:
        matrix = torch.randint(-4, 5, shape, generator=generator).float()
        parts = matrix.unbind() if matrix.ndim == 3 else matrix.split(COUNTS)
        for part in parts:
            for i in range(max(part.shape)):
                part[i % part.shape[0], i % part.shape[1]] = 448.0
        matrices.append(matrix)
    return tuple(matrices)


def scaled_mm(a: Quantized, b: Quantized) -> Tensor:
    """Return a [m, k] times b [k, n], each with one scale, or one per row of a and column of b: [m, n] fp32."""
    data = b.codes.t().contiguous().t()  # column-major
    is_tensorwise = a.scale.numel() == b.scale.numel() == 1
    scales = [scale.flatten().view(() if is_tensorwise else scale.shape) for scale in (a.scale, b.scale)]
    return torch._scaled_mm(a.codes.contiguous(), data, scales[0], scales[1], out_dtype=torch.float32)


def transpose(matrix: Quantized) -> Quantized:
    """Return the transposed matrix."""
    return Quantized(matrix.codes.t(), matrix.scale.t(), matrix.fmt, matrix.block.t)


def pairs(recipe: str, fp8: str, is_exact: bool) -> dict[str, list[tuple[Tensor, Quantized, Quantized, Tensor]]]:
    """Return for each product and expert: our result, both quantized operands, and the product before quantization."""
    x, grad, weight = operands(is_exact)
    gemm = ReferenceGemm(RECIPES[recipe], fp8, COUNTS)
    rows, columns = gemm.both(x, FC1, "input")
    grad_rows, grad_columns = gemm.both(grad, FC1, "gradient")
    weights = gemm.weight(weight, FC1, is_transposed=False), gemm.weight(weight, FC1, is_transposed=True)
    weight_grad = torch.full_like(weight, torch.nan)
    gemm.weight_gradient(grad_columns, columns, weight_grad)
    out, grad_x = gemm.multiply(rows, weights[0]), gemm.multiply(grad_rows, weights[1])
    result: dict = {name: [] for name in PRODUCTS}
    for e, part in gemm.parts():
        x_e, grad_e, weight_e = x[part].double(), grad[part].double(), weight[e].double()
        result["forward"].append((out[part], rows.parts[e], transpose(weights[0].parts[e]), x_e @ weight_e.t()))
        result["input gradient"].append((grad_x[part], grad_rows.parts[e], weights[1].parts[e], grad_e @ weight_e))
        result["weight gradient"].append(
            (weight_grad[e], transpose(grad_columns.parts[e]), columns.parts[e], grad_e.t() @ x_e)
        )
    return result


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("fp8", ["e4m3", "hybrid"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_sums_that_are_exact_are_the_same_bit_for_bit(recipe: str, fp8: str, product: str) -> None:
    for ours, a, b, exact in pairs(recipe, fp8, True)[product]:
        is_gradient = product != "forward"
        assert (a.fmt, b.fmt) == (E5M2 if is_gradient and fp8 == "hybrid" else E4M3, E4M3)
        assert torch.equal(ours.double(), exact)
        assert torch.equal(scaled_mm(a, b), ours)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("fp8", ["e4m3", "hybrid"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_sums_agree_to_their_rounding(recipe: str, fp8: str, product: str) -> None:
    for ours, a, b, _ in pairs(recipe, fp8, False)[product]:
        left, right = (matrix.codes.double() * matrix.scale.double() for matrix in (a, b))
        exact, magnitude = left @ right, left.abs() @ right.abs()
        # A sum of n products in fp32, u = 2^-24, in any order: each term passes at most n - 1 additions and is rounded
        # as a product; its two factors, code * scale, are rounded once each (or the sum is multiplied by two scales).
        # So the error is at most g(n + 2) * sum |a| |b|, g(i) = i u / (1 - i u).
        roundings = (left.shape[1] + 2) * 2.0**-24
        bound = roundings / (1 - roundings) * magnitude
        for result in (ours, scaled_mm(a, b)):
            assert result.dtype == torch.float32
            assert ((result - exact).abs() <= bound).all()
