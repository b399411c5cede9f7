"""Which dtype and which library multiply matrices on a device."""

from __future__ import annotations

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


def multiply_rows(rows: Tensor, part: slice, weight: Tensor, out: Tensor) -> None:
    """Write rows[part] @ weight to out[part].

    On the CPUs of `prefers_onednn` large fp32 products are made by oneDNN, everything else by torch.mm. What oneDNN
    adds to part, so that few numbers of rows occur, are neighbours among rows; their results are dropped.

    Args:
        rows: [m, k].
        part: of the m rows.
        weight: [k, n] in the dtype of rows.
        out: [m, n] in the dtype of rows.
    """
    num_rows = part.stop - part.start
    if not _takes_onednn(num_rows, weight):
        torch.mm(rows[part], weight, out=out[part])
        return
    added = -num_rows % ROW_STEP
    start, stop = part.start, part.stop + added
    if stop > len(rows):  # take them from before
        start, stop = max(0, part.start - added), part.stop
    result = torch.ops.mkldnn._linear_pointwise(rows[start:stop], weight.t(), None, "none", [], "")
    out[part] = result[part.start - start : part.stop - start]


def _takes_onednn(num_rows: int, weight: Tensor) -> bool:
    """Return whether oneDNN multiplies num_rows by a weight [k, n]."""
    return (
        weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and num_rows * weight.numel() >= SMALLEST_ONEDNN
        and num_rows * weight.shape[1] * weight.itemsize <= LARGEST_ONEDNN_RESULT
        and prefers_onednn()
        and bool(torch.backends.mkldnn.enabled)
    )


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
