"""One pass over the experts of a rank: which slots are computed together, how they are multiplied, and scratch memory.

Experts with few slots are taken several at a time: rows are gathered, activated and added up once for all of them,
while they are in the processor's cache, and only the products are made expert by expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dispatchers.host_memory import new_tensor
from dispatchers.permutation import sum_dtype
from moe.gemm import gemm_dtype, multiply_rows

CACHE_LINE = 64  # bytes
# Scratch memory of slots that are computed together, unless one expert has more. Less leaves small operations to one
# thread, more leaves the cache; other devices have no such cache, but many cores.
CHUNK_BYTES = {"cpu": 24 << 20}
CHUNK_BYTES_ELSEWHERE = 1 << 30


@dataclass(frozen=True)
class Slots:
    """Which rows each expert reads.

    Attributes:
        counts: slots of each local expert, on the host; sums to M.
        row_ids: [M] int64 sorted by expert, -1 for padding; None if slot i reads row i (then there is no padding).
        has_padding: whether row_ids holds -1.
        per_source: [L, source ranks] int64, slots of each expert by source, padding apart; for `DeferredGradients`.
        real_counts: slots of each expert without padding, on the host; likewise.
    """

    counts: tuple[int, ...]
    row_ids: Tensor | None = None
    has_padding: bool = False
    per_source: Tensor | None = None
    real_counts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Chunk:
    """Slots that are computed together: m of the M, of n neighbouring experts.

    Attributes:
        slots: where they lie.
        experts: whose they are.
        counts: slots of each, which sum to m.
    """

    slots: slice
    experts: range
    counts: tuple[int, ...]

    def parts(self, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """Yield each expert with its rows of tensors [m, ...]."""
        return zip(self.experts, *(tensor.split(self.counts) for tensor in tensors), strict=True)


def make_chunks(counts: Sequence[int], max_rows: int) -> Iterator[Chunk]:
    """Yield all experts in order, as many at a time as have max_rows slots together, or one that has more."""
    first = start = 0
    while first < len(counts):
        end, stop = first + 1, start + counts[first]
        while end < len(counts) and stop + counts[end] - start <= max_rows:
            stop, end = stop + counts[end], end + 1
        yield Chunk(slice(start, stop), range(first, end), tuple(counts[first:end]))
        first, start = end, stop


def make_tiles(counts: Sequence[int], num_rows: int) -> Iterator[Chunk]:
    """Yield all slots in chunks of num_rows, which divides the count of every expert: one expert each."""
    start = 0
    for expert, count in enumerate(counts):
        for first in range(start, start + count, num_rows):
            yield Chunk(slice(first, first + num_rows), range(expert, expert + 1), (num_rows,))
        start += count


class ExpertLoop:
    """The chunks of one pass, and what is done with their rows.

    Args:
        tokens: [R, H], what slots read; results have as many rows and this dtype.
        slots: which rows each expert reads.
        fc1_shape: [G, F, H] of an expert.
        tile_rows: deterministic mode: every chunk has this many slots of one expert, and every row of an operand of a
            product begins on a cache line, since rounding may depend on where it does.

    Attributes:
        chunks: all slots, in order.
        gemm_dtype: in which products are made.
        sum_dtype: in which activations are computed and rows added up.
    """

    def __init__(self, tokens: Tensor, slots: Slots, fc1_shape: torch.Size, tile_rows: int | None = None) -> None:
        self.device, self.dtype, self.tile_rows = tokens.device, tokens.dtype, tile_rows
        self.gemm_dtype, self.sum_dtype = gemm_dtype(tokens.dtype, tokens.device), sum_dtype(tokens.dtype)
        num_inputs, ffn, hidden = fc1_shape
        slot_bytes = (3 * hidden + (2 * num_inputs + 2) * ffn) * self.sum_dtype.itemsize  # what backward has of one
        max_rows = CHUNK_BYTES.get(tokens.device.type, CHUNK_BYTES_ELSEWHERE) // slot_bytes
        chunks = make_chunks(slots.counts, max_rows) if tile_rows is None else make_tiles(slots.counts, tile_rows)
        self.chunks = tuple(chunks)
        self.max_rows = max((chunk.slots.stop - chunk.slots.start for chunk in self.chunks), default=0)
        self.padding: Tensor | None = None  # [M, 1] bool, True at padding slots
        self.read_ids = slots.row_ids  # [M], the row to read, 0 for padding
        if slots.has_padding and slots.row_ids is not None:
            self.padding = slots.row_ids.unsqueeze(-1) < 0
            self.read_ids = slots.row_ids.clamp(min=0)
        self._scratch: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._weights: dict[str, tuple[int, Tensor]] = {}  # by name: whose weight a buffer holds, and the buffer

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised tensor that outlives the loop, in the dtype of tokens unless told."""
        return new_tensor(shape, dtype or self.dtype, self.device)

    def scratch(self, name: str, chunk: Chunk, *widths: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory [m, *widths] that is used again for the next chunk; dtype: that of products unless told."""
        key = name, widths
        if key not in self._scratch:
            self._scratch[key] = self._aligned(self.max_rows, widths, dtype or self.gemm_dtype)
        return self._scratch[key][: chunk.slots.stop - chunk.slots.start]

    def _aligned(self, num_rows: int, widths: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return uninitialised [num_rows, *widths]; with tiles, every row of a matrix begins on a cache line."""
        if self.tile_rows is None or len(widths) > 1:
            return new_tensor((num_rows, *widths), dtype, self.device)
        (width,) = widths
        stride = width + -width % (CACHE_LINE // dtype.itemsize)
        return new_tensor((num_rows, stride), dtype, self.device)[:, :width]

    def forget_scratch(self) -> None:
        """Free the scratch memory of a loop that is kept."""
        self._scratch.clear()
        self._weights.clear()

    def gather(self, source: Tensor, chunk: Chunk, name: str) -> Tensor:
        """Return the rows that the slots of a chunk read, in the dtype of products: [R, H] -> [m, H] in scratch."""
        if self.read_ids is None:
            return self.cast(source[chunk.slots], name, chunk)
        rows = narrow = self.scratch(name, chunk, source.shape[1])
        if source.dtype != rows.dtype:
            narrow = self.scratch(f"{name} as it is", chunk, source.shape[1], dtype=source.dtype)
        return self._read(source, chunk.slots, rows, narrow)

    def gather_new(self, source: Tensor, slots: slice) -> Tensor:
        """Return the rows that slots read, in the dtype of products: [R, H] -> [m, H] in memory of their own."""
        if self.read_ids is None:
            return source[slots].to(self.gemm_dtype)
        shape = slots.stop - slots.start, source.shape[1]
        rows = self.new(*shape, dtype=self.gemm_dtype)
        return self._read(source, slots, rows, rows if source.dtype == rows.dtype else source.new_empty(shape))

    def _read(self, source: Tensor, slots: slice, rows: Tensor, narrow: Tensor) -> Tensor:
        """Read rows of source through `narrow`, which may be `rows` itself, into rows; both [m, H]."""
        if source.shape[0] == 0 or self.read_ids is None:
            return rows.zero_()  # without rows every slot is padding
        torch.index_select(source, 0, self.read_ids[slots], out=narrow)
        if narrow is not rows:
            rows.copy_(narrow)
        return rows if self.padding is None else rows.masked_fill_(self.padding[slots], 0)

    def multiply(
        self, chunk: Chunk, rows: Tensor, weights: Sequence[Tensor], name: str, out: Tensor, *, transpose: bool = False
    ) -> Tensor:
        """Write every expert's rows @ weight to out, rounded once, and return it.

        Args:
            chunk: whose rows they are.
            rows: [m, k] in the dtype of products.
            weights: of all L experts, [k, n] each.
            name: of the scratch that a weight of another dtype is cast to.
            out: [m, n].
            transpose: weights are [n, k], and rows @ weight.t() is meant.
        """
        direct = out.dtype == self.gemm_dtype and self.tile_rows is None
        product = out if direct else self.scratch(f"product {name}", chunk, out.shape[1])
        used = (self._weight(weights[expert], name, expert) for expert in chunk.experts)
        if self.tile_rows is None:
            multiply_rows(rows, chunk.counts, used, product, transpose=transpose)
        else:
            for weight in used:  # a tile has one expert
                torch.mm(rows, weight.t() if transpose else weight, out=product)
        return out if direct else out.copy_(product)

    def _weight(self, weight: Tensor, name: str, expert: int) -> Tensor:
        """Return a weight in the dtype of products, cast once for all chunks of an expert."""
        if weight.dtype == self.gemm_dtype and self.tile_rows is None:
            return weight
        holder, buffer = self._weights.get(name, (-1, None))
        if buffer is None:
            buffer = self._aligned(weight.shape[0], weight.shape[1:], self.gemm_dtype)
        if holder != expert:
            buffer.copy_(weight)
            self._weights[name] = expert, buffer
        return buffer

    def cast(self, rows: Tensor, name: str, chunk: Chunk, dtype: torch.dtype | None = None) -> Tensor:
        """Return rows [m, ...] in a dtype, that of products unless told: themselves, or a copy in scratch memory."""
        dtype = dtype or self.gemm_dtype
        if rows.dtype == dtype and (self.tile_rows is None or rows.ndim > 2):
            return rows
        return self.scratch(name, chunk, *rows.shape[1:], dtype=dtype).copy_(rows)

    def widen(self, rows: Tensor, name: str, chunk: Chunk) -> Tensor:
        """Return rows [m, ...] in the dtype of sums: themselves, or a copy in scratch memory."""
        return rows if rows.dtype == self.sum_dtype else self.cast(rows, name, chunk, self.sum_dtype)

    def new_sums(self, num_rows: int, width: int) -> Tensor:
        """Return [R, H] to which `add` adds rows."""
        sums = self.new(num_rows, width, dtype=self.sum_dtype)
        return sums if self.read_ids is None else sums.zero_()

    def results(self, chunk: Chunk, sums: Tensor) -> Tensor:
        """Return memory [m, H] for the products that `add` then adds to sums [R, H]: where they end up, or scratch."""
        if self.read_ids is None and sums.dtype == self.gemm_dtype:
            return sums[chunk.slots]
        return self.scratch("y", chunk, sums.shape[1])

    def add(self, rows: Tensor, chunk: Chunk, sums: Tensor) -> None:
        """Add the result of each slot [m, H], in the dtype of sums, to the row that it read; not that of padding."""
        if self.read_ids is None:
            part = sums[chunk.slots]
            if part.data_ptr() != rows.data_ptr():
                part.copy_(rows)
        elif sums.shape[0]:
            if self.padding is not None:
                rows = rows.masked_fill_(self.padding[chunk.slots], 0)
            sums.index_add_(0, self.read_ids[chunk.slots], rows)

    def rounded(self, sums: Tensor) -> Tensor:
        """Return sums [R, H] in the dtype of tokens."""
        return sums if sums.dtype == self.dtype else self.new(*sums.shape).copy_(sums)


def add_per_expert(values: Tensor, biases: Tensor, counts: tuple[int, ...], probs: Tensor | None = None) -> None:
    """Add each expert's bias, times the prob of the slot, to the values [M, ...] of its slots."""
    parts = (None,) * len(counts) if probs is None else probs.split(counts)
    for bias, part, p in zip(biases, values.split(counts), parts, strict=True):
        if p is None:
            part += bias
        else:
            part.addcmul_(p.to(part.dtype).unsqueeze(-1), bias.to(part.dtype))


def sum_per_expert(values: Tensor, counts: tuple[int, ...], out: Tensor) -> None:
    """Write the sum of each expert's values [M, ...] to out [L, ...]."""
    for expert, part in enumerate(values.split(counts)):
        out[expert] = part.sum(0, dtype=sum_dtype(part.dtype))


def dot_per_expert(values: Tensor, biases: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Return each slot's values [M, H] times its expert's bias: [M]."""
    return torch.cat([part @ bias.to(part.dtype) for bias, part in zip(biases, values.split(counts), strict=True)])
