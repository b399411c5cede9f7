"""Which dtype and which library multiply matrices on a device."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

# Below this many multiplications of a product a kernel made for its size, 0.5 ms each, does not pay.
SMALLEST_ONEDNN = 1 << 24
LARGEST_ONEDNN_RESULT = 32 << 20  # bytes; the C library asks the system for a larger one anew each time
ROW_STEP = 8  # oneDNN makes a kernel for each number of rows; rounded up to this, few numbers occur


def gemm_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which to multiply matrices of dtype on device.

    It is dtype itself, except for bf16 and fp16 on a CPU for which torch has no fast kernel of that type: there its
    own loop takes 20 to 100 times as long as fp32, and multiplying in fp32 and rounding once is faster and closer.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return dtype
    fast = torch.backends.mkldnn.is_available() and (
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if dtype == torch.bfloat16
        else torch.ops.mkldnn._is_mkldnn_fp16_supported()
    )
    return dtype if fast else torch.float32


def describe_gemms(dtype: torch.dtype, device: torch.device) -> str:
    """Return in which dtype and by which library matrices of dtype are multiplied, for people."""
    multiplied_in = gemm_dtype(dtype, device)
    takes_onednn = multiplied_in == torch.float32 and device.type == "cpu" and prefers_onednn()
    return f"GEMMs {multiplied_in} by {'oneDNN and ' if takes_onednn else ''}torch.mm"


def multiply_rows(
    rows: Tensor, counts: tuple[int, ...], weights: Iterable[Tensor], out: Tensor, *, transpose: bool = False
) -> None:
    """Write each expert's rows @ weight to its rows of out.

    On the CPUs of `prefers_onednn` large fp32 products are made by oneDNN, everything else by torch.mm. What oneDNN
    adds to an expert's rows, so that few numbers of rows occur, are neighbours; their results are dropped.

    Args:
        rows: [m, k], sorted by expert.
        counts: rows of each expert, which sum to m.
        weights: of these experts, [k, n] each in the dtype of rows; each is read before the next is asked for.
        out: [m, n] in the dtype of rows.
        transpose: weights are [n, k], and rows @ weight.t() is meant.
    """
    by_onednn, stop = _rows_for_onednn(rows, out), 0
    for count, part, weight, product in zip(counts, rows.split(counts), weights, out.split(counts), strict=True):
        stop += count
        if count not in by_onednn:
            torch.mm(part, weight.t() if transpose else weight, out=product)
            continue
        start, added = stop - count, -count % ROW_STEP
        if added:
            first = start if stop + added <= len(rows) else max(0, start - added)  # take them from before
            part, start = rows[first : first + count + added], start - first
        result = torch.ops.mkldnn._linear_pointwise.default(
            part, weight if transpose else weight.t(), None, "none", [], ""
        )
        product.copy_(result[start : start + count] if added else result)


def _rows_for_onednn(rows: Tensor, out: Tensor) -> range:
    """Return how many of rows [m, k] an expert must have for oneDNN to make its part of out [m, n]."""
    if (
        rows.dtype != torch.float32
        or rows.device.type != "cpu"
        or not prefers_onednn()
        or not torch.backends.mkldnn.enabled
    ):
        return range(0)
    (width, height), itemsize = (rows.shape[1], out.shape[1]), out.itemsize
    return range(-(-SMALLEST_ONEDNN // (width * height)), LARGEST_ONEDNN_RESULT // (height * itemsize) + 1)


@cache
def prefers_onednn() -> bool:
    """Return whether oneDNN multiplies fp32 faster than torch.mm on this CPU: AMD's with AVX-512.

    torch.mm is MKL's, which took 1.1 to 1.6 times as long there on products of 2^26 multiplications and more. Other
    CPUs were not measured.
    """
    backends = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    if not backends or not hasattr(torch.cpu, "get_capabilities"):
        return False
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_f")) and str(capabilities.get("cpu_name")).startswith("AMD")
