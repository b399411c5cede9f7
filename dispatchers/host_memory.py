"""Memory for large rows on the host, in huge pages where the system has them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

SMALLEST_ADVISED = 4 << 20  # bytes; less comes from memory that the allocator keeps


def new_rows(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialised memory of a shape, dtype and device, from torch's allocator.

    The host's allocator takes a large block from the system anew each time, and the system hands it out page by page as
    it is first written: with pages of 4 KiB that takes longer than moving the rows. Linux is asked for pages of 2 MiB
    (MADV_HUGEPAGE), which it may refuse without harm; elsewhere the memory is ordinary. In a virtual machine that gives
    free memory back to its host, a block that is asked for after a pause costs more in huge pages, not less: 32 MiB,
    allocated and filled back to back, took 3 ms instead of 12, after half a second 18 to 47 instead of 11.
    """
    rows = torch.empty(shape, dtype=dtype, device=device)
    if type(rows) is Tensor and rows.device.type == "cpu" and rows.nbytes >= SMALLEST_ADVISED:
        advise_huge_pages(rows.data_ptr(), rows.nbytes)
    return rows


def advise_huge_pages(address: int, num_bytes: int) -> int | None:
    """Ask for huge pages in the whole pages of a block; returns 0 if that was taken, None where it cannot be asked."""
    function = _madvise()
    if function is None:
        return None
    first = address + -address % mmap.PAGESIZE
    length = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    return int(function(first, length, mmap.MADV_HUGEPAGE))


@cache
def _madvise() -> Any:
    """Return the C library's madvise(address, length, advice), or None on a system without it."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return function
