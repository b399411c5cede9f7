"""Large tensors on the host, in memory that is used again instead of being taken from the system anew.

The C library gives a large block back to the system when it is freed and takes a new one when it is asked for; the
system then hands it out page by page, zeroed, as it is first written, which takes longer than most of what a layer
does with it. CUDA tensors have a caching allocator against that; torch's tensors on the host have none.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

SMALLEST_KEPT = 1 << 20  # bytes; less comes from memory that the C library keeps by itself
STEPS = 32  # sizes of blocks between a power of two and the next
SLACK = 1.25  # by how much a block may be larger than what it serves


class HostMemory:
    """Blocks of host memory, each lent to one tensor at a time.

    A block is free when no tensor, view, array or storage refers to it any more: whoever keeps a tensor keeps its
    values. A storage that was resized, or shared with other processes, is not lent again. What is held is at most what
    was in use at one time, plus what rounding block sizes adds (at most 1/32).

    Attributes:
        most_used: bytes, the most that was lent at one time as far as this object knows.
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []  # the one not used for longest first
        self._lock = threading.Lock()
        self.most_used = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks, lent or free."""
        return sum(block.num_bytes for block in self._blocks)

    def take(self, num_bytes: int) -> torch.UntypedStorage:
        """Return a storage of at least num_bytes with arbitrary content that nobody uses."""
        size = _block_size(num_bytes)
        with self._lock:
            self._blocks = [block for block in self._blocks if block.is_whole]
            fitting = [block for block in self._blocks if size <= block.num_bytes <= SLACK * size and block.is_free]
            block = min(fitting, key=lambda block: block.num_bytes, default=None)
            if block is None:
                block = self._grow(size)
            else:
                self._blocks.remove(block)
            self._blocks.append(block)
            return block.storage

    def release(self) -> int:
        """Give all free blocks back; returns how many bytes."""
        with self._lock:
            before = self.held_bytes
            self._blocks = [block for block in self._blocks if not block.is_free]
            self.most_used = self.held_bytes
            return before - self.held_bytes

    def _grow(self, size: int) -> _Block:
        """Return a new block, and give back free ones that would make it more than was ever in use."""
        held, lent = self.held_bytes, sum(block.num_bytes for block in self._blocks if not block.is_free)
        self.most_used = max(self.most_used, lent + size)
        for block in list(self._blocks):
            if held + size <= self.most_used:
                break
            if block.is_free:
                self._blocks.remove(block)
                held -= block.num_bytes
        return _Block(size)


class _Block:
    """One storage.

    Attributes:
        num_bytes: its size.
        storage: the one Python object of it; each tensor on it refers to what that object stands for.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.storage = torch.UntypedStorage(num_bytes)
        self.address = self.storage._cdata
        self.free_counts = self._counts()

    @property
    def is_free(self) -> bool:
        """Whether no tensor is on the storage and nobody else holds its Python object."""
        return self._counts() == self.free_counts

    @property
    def is_whole(self) -> bool:
        """Whether nobody resized the storage, or shared it with a process whose references do not show here."""
        return self.storage.nbytes() == self.num_bytes and not self.storage.is_shared()

    def _counts(self) -> tuple[int, int]:
        """Return how many refer to the Python object, and to what it stands for; nothing public counts those."""
        return sys.getrefcount(self.storage), torch._C._storage_Use_Count(self.address)


HOST_MEMORY = HostMemory()


def release_host_memory() -> int:
    """Give the memory back that large tensors on the host left behind and that nobody uses now.

    Returns:
        How many bytes.

    Source: torch.cuda.empty_cache does so for CUDA. Differs: only tensors of this library.
    """
    return HOST_MEMORY.release()


def new_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised contiguous tensor of a shape, dtype and device.

    A large one on the host lies in memory that an earlier one left; see HostMemory and `release_host_memory`.
    """
    like = torch.empty(0, dtype=dtype, device=device)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    reuses = num_bytes >= SMALLEST_KEPT and type(like) is Tensor and like.device.type == "cpu"
    # In deterministic mode torch fills what it allocates, which shows values that nobody wrote.
    if not reuses or torch.are_deterministic_algorithms_enabled():
        return torch.empty(shape, dtype=dtype, device=device)
    return like.set_(HOST_MEMORY.take(num_bytes), 0, shape, ())


def _block_size(num_bytes: int) -> int:
    """Return the next of the sizes of blocks, so that what varies a little shares blocks."""
    step = max(1, (1 << (num_bytes - 1).bit_length()) // (2 * STEPS))
    return num_bytes + -num_bytes % step
