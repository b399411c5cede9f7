"""What a pass keeps and what it takes: bytes saved for backward, and the growth of resident memory at its peak."""

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from moe import release_host_memory

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def count_saved_bytes(function: Callable[[], Tensor], exclude: Iterable[Tensor]) -> tuple[Tensor, int]:
    """Return a function's output and the bytes of the distinct storages that its live graph keeps for backward.

    A storage counts once and as a whole; those of `exclude` (parameters) do not count. Not seen: tensors that an
    autograd function holds as attributes instead of by `save_for_backward`.
    """
    references: list[weakref.ref[Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept = tensor.detach()  # held by the graph alone, so it dies with it
        references.append(weakref.ref(kept))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        output = function()
    storages = [kept.untyped_storage() for reference in references if (kept := reference()) is not None]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    excluded = {tensor.untyped_storage().data_ptr() for tensor in exclude}
    return output, sum(size for address, size in sizes.items() if address not in excluded)


def measure_peak_bytes(function: Callable[[], object]) -> int | None:
    """Return by how much resident memory grew at its peak while the function ran; None where Linux cannot tell.

    Included is all memory that the process touched anew and did not hold before, at the moment when most of it was
    there: activations, temporary buffers, the gradients that the call leaves, scratch memory of the math libraries at
    its first use. Not included is what lay ready before: weights, input, output gradient. Freed memory that the
    allocator or this library kept is handed back to the system first, so that the call pays for it again. Pages count,
    not bytes: 4 KiB each, 2 MiB in huge pages. Run the function once before, so that it is warm.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if STATUS.exists() else None
    if trim is None:
        return None
    gc.collect()
    release_host_memory()
    trim(0)
    try:
        CLEAR_REFS.write_text("5")  # the high-water mark restarts at what is resident now: proc(5)
    except OSError:
        return None
    before = _high_water_bytes()
    function()
    return _high_water_bytes() - before


def _high_water_bytes() -> int:
    """Return VmHWM."""
    lines = STATUS.read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
