"""The shapes that the benchmarks share, the weights they start from, and the products that no layer can do without.

Legend: `T` tokens, `H` hidden, `F` expert FFN width, `E` experts, `K` top-k, `R` = T * K routed rows.
"""

import itertools
import math
from collections import namedtuple
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.timing import Timers, time_call

Shape = namedtuple("Shape", ["tokens", "hidden", "ffn", "experts", "topk"])  # T, H, F, E, K
SHAPES = {
    "S0": Shape(512, 256, 256, 8, 2),
    "S1": Shape(2048, 512, 1408, 8, 2),
    "S2": Shape(2048, 512, 256, 32, 4),
    "S3": Shape(2048, 512, 256, 64, 8),
    "S4": Shape(2048, 512, 256, 128, 8),
    "S5": Shape(4096, 1024, 704, 8, 2),
    "S6": Shape(4096, 1024, 512, 64, 4),
    "S7": Shape(4096, 1024, 256, 128, 8),
    "S8": Shape(4096, 512, 1408, 32, 2),
    "tiny": Shape(60, 32, 24, 6, 2),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FLOORS = ("dense", "loop", "fp32 loop")
Gemm = tuple[Tensor, Tensor, Tensor]  # left [m, k], right [k, n], out [m, n]


def make_weights(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Return canonical weights, drawn in fp32 and rounded to `dtype`, so that every dtype has the same values."""
    _, hidden, ffn, experts, _ = shape
    sizes = {"router.weight": (experts, hidden), "fc1": (experts, 2 * ffn, hidden), "fc2": (experts, hidden, ffn)}
    draws = {name: torch.randn(size, generator=generator) / math.sqrt(size[-1]) for name, size in sizes.items()}
    return {name: weight.to(dtype) for name, weight in draws.items()}


def floor_gemms(weights: dict[str, Tensor], counts: Sequence[int], generator: torch.Generator) -> dict[str, list[Gemm]]:
    """Return the GEMMs of a forward and backward over random rows, with outputs in place.

    "dense": six GEMMs over all R rows with the first expert's weights. "loop": the same six, cut into one expert-major
    span of rows an expert by the `counts` of tokens; an expert without tokens has none.
    """
    fc1, fc2 = weights["fc1"], weights["fc2"]
    rows, widths = sum(counts), (fc1.shape[2], fc2.shape[2], fc1.shape[1], fc2.shape[1])  # R, (H, F, 2F, H)
    x, act, fc1_grad, y_grad = (torch.randn(rows, width, generator=generator).to(fc1.dtype) for width in widths)
    fc1_out, y, x_grad, act_grad = (torch.empty_like(t) for t in (fc1_grad, y_grad, x, act))
    fc1_wgrad, fc2_wgrad = torch.empty_like(fc1), torch.empty_like(fc2)

    def six(span: slice, expert: int) -> list[Gemm]:
        return [
            (x[span], fc1[expert].t(), fc1_out[span]),  # [n, H] @ [H, 2F]
            (act[span], fc2[expert].t(), y[span]),  # [n, F] @ [F, H]
            (y_grad[span], fc2[expert], act_grad[span]),  # [n, H] @ [H, F]
            (y_grad[span].t(), act[span], fc2_wgrad[expert]),  # [H, n] @ [n, F]
            (fc1_grad[span], fc1[expert], x_grad[span]),  # [n, 2F] @ [2F, H]
            (fc1_grad[span].t(), x[span], fc1_wgrad[expert]),  # [2F, n] @ [n, H]
        ]

    ends = enumerate(itertools.accumulate(counts))
    spans = [(slice(end - counts[expert], end), expert) for expert, end in ends if counts[expert]]
    return {"dense": six(slice(0, rows), 0), "loop": [gemm for span in spans for gemm in six(*span)]}


def run_gemms(gemms: list[Gemm], compute_dtype: torch.dtype) -> None:
    """Multiply into the outputs; operands of another dtype are cast for each GEMM and the result is rounded back."""
    for left, right, out in gemms:
        if out.dtype == compute_dtype:
            torch.mm(left, right, out=out)
        else:
            out.copy_(torch.mm(left.to(compute_dtype), right.to(compute_dtype)))


def floor_timers(weights: dict[str, Tensor], counts: Sequence[int], generator: torch.Generator) -> Timers:
    """Return what times each floor: "dense", "loop", and in other dtypes than fp32 "fp32 loop".

    Args:
        weights: of `make_weights`; their dtype is that of the floors.
        counts: tokens of each expert.
        generator: draws the rows.
    """
    dtype, gemms = weights["fc1"].dtype, floor_gemms(weights, counts, generator)
    floors: Timers = {name: partial(time_call, run_gemms, gemms[name], dtype) for name in ("dense", "loop")}
    if dtype != torch.float32:
        floors["fp32 loop"] = partial(time_call, run_gemms, gemms["loop"], torch.float32)
    return floors
