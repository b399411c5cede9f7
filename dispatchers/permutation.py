"""Orders of rows inside one rank: by expert, back to tokens, and chunks of rows. Nothing here communicates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dispatchers.host_memory import new_tensor

CAST_ROWS = 512  # rows that are cast at once on a CPU before they are added up: they stay in its cache


def permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None = None, num_out_tokens: int | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Copy each token once for every expert it is routed to, sorted by expert, token order inside an expert.

    Example: routing_map [[1, 0], [1, 1]] gives the rows t0 t1 | t1 and sorted_indices [0, 1, 1].

    Args:
        tokens: [T, H].
        routing_map: [T, E] bool, True where routed.
        probs: [T, E], or None.
        num_out_tokens: M, the True entries of routing_map, if the caller knows it; None counts them (one host sync).

    Returns:
        permuted_tokens [M, H]; permuted_probs [M], or None without probs; sorted_indices [M] int64, the token of each
        row.

    Source: Megatron-Core moe_utils, function of the same name. Differs: returns three values; the pad offsets and
        counts of its fused kernel are None on this path there.
    """
    sorted_indices, expert_ids = routed_slots(routing_map, num_out_tokens)
    permuted_probs = None if probs is None else slot_probs(probs, sorted_indices, expert_ids)
    return gather_rows(tokens, sorted_indices), permuted_probs, sorted_indices


def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
) -> Tensor:
    """Add the rows of `permute` up to tokens, weighted by probs if given.

    Args:
        permuted_tokens: [M, H] sorted by expert.
        sorted_indices: [M] int64, the token of each row.
        restore_shape: (T, H).
        probs: [T, E] weights, or None for a plain sum.
        routing_map: [T, E] bool, needed with probs.

    Returns:
        [T, H] in the dtype of permuted_tokens, summed in fp32 (fp64 for fp64) and rounded once.

    Raises:
        ValueError: probs without routing_map.

    Source: Megatron-Core moe_utils, function of the same name. Differs: that one adds in the dtype of the rows.
    """
    if probs is not None:
        if routing_map is None:
            raise ValueError("probs (given) need routing_map (None): it says which entries of probs were routed.")
        token_ids, expert_ids = routed_slots(routing_map, permuted_tokens.shape[0])
        weights = slot_probs(probs, token_ids, expert_ids)
        permuted_tokens = (permuted_tokens * weights.unsqueeze(-1)).to(permuted_tokens.dtype)  # [M, H]
    return sum_rows(permuted_tokens, sorted_indices, restore_shape[0])


def sort_chunks_by_idxs(
    input: Tensor, split_sizes: Tensor | Sequence[int], sorted_idxs: Tensor | Sequence[int], probs: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Reorder chunks of rows: output = the chunks input[sorted_idxs[0]], input[sorted_idxs[1]], ...

    Example: rows a b b c with split_sizes [1, 2, 1] and sorted_idxs [2, 0, 1] become c a b b.

    Args:
        input: [R, ...].
        split_sizes: rows of each chunk, summing to R; a tensor is copied to the host.
        sorted_idxs: a permutation of the chunks.
        probs: [R] carried along, or None.

    Returns:
        output [R, ...]; permuted_probs [R], or None without probs.

    Raises:
        ValueError: split_sizes do not sum to R, or sorted_idxs is no permutation of the chunks.

    Source: Megatron-Core moe_utils, function of the same name.
    """
    sizes = split_sizes.tolist() if isinstance(split_sizes, Tensor) else list(split_sizes)  # sync: chunk sizes
    order = sorted_idxs.tolist() if isinstance(sorted_idxs, Tensor) else list(sorted_idxs)  # sync: chunk order
    if sum(sizes) != input.shape[0] or min(sizes, default=0) < 0:
        raise ValueError(f"split_sizes ({sizes}) must be >= 0 and sum to the rows of input ({input.shape[0]}).")
    if sorted(order) != list(range(len(sizes))):
        raise ValueError(f"sorted_idxs ({order}) must be a permutation of the {len(sizes)} chunks.")
    chunks = input.split(sizes)
    output = torch.cat([chunks[i] for i in order]) if order else input.clone()
    if probs is None:
        return output, None
    prob_chunks = probs.split(sizes)
    return output, torch.cat([prob_chunks[i] for i in order]) if order else probs.clone()


def routed_slots(routing_map: Tensor, num_slots: int | None = None) -> tuple[Tensor, Tensor]:
    """List the True entries of a routing map by expert, then by token.

    Args:
        routing_map: [T, E] bool.
        num_slots: M, how many there are; None counts them (one host sync).

    Returns:
        token_ids [M] int64, expert_ids [M] int64.
    """
    if num_slots is None:
        num_slots = int(routing_map.sum())  # sync: the caller gave no count
    num_tokens = routing_map.shape[0]
    places = torch.nonzero_static(routing_map.t().flatten(), size=num_slots).squeeze(1)  # [M], expert * T + token
    expert_ids = places.div(max(num_tokens, 1), rounding_mode="floor")
    return places - expert_ids * num_tokens, expert_ids


def column_counts(routing_map: Tensor) -> Tensor:
    """Count the True entries of each column: [T, E] bool -> [E] int64.

    A sum on a CPU first casts its whole input to the dtype of the sum, 8 bytes an entry for int64. Here bytes add up as
    bytes, block on block, and only what is left is cast.
    """
    num_tokens, num_experts = routing_map.shape
    blocks = math.gcd(num_tokens, 128)  # at most 255: a byte holds the sum over the blocks
    size = num_tokens // blocks
    summed = routing_map.view(torch.uint8).reshape(blocks, size * num_experts).sum(0, dtype=torch.uint8)
    return summed.view(size, num_experts).sum(0)


def slot_probs(probs: Tensor, token_ids: Tensor, expert_ids: Tensor) -> Tensor:
    """Return probs [T, E] at the slots token_ids [M], expert_ids [M] -> [M]."""
    return _SlotProbs.apply(probs, token_ids * probs.shape[1] + expert_ids)


def reorder_blocks(sizes: Tensor, order: Tensor, num_rows: int) -> Tensor:
    """Return where rows stand that lie in blocks, when the blocks are read in another order.

    Example: sizes [1, 2, 1], order [2, 0, 1]: the rows a b b c are read as c a b b, from the places [3, 0, 1, 2].

    Args:
        sizes: [N] int64, rows of each block as they lie.
        order: [N or fewer] int64, the blocks in the order of reading.
        num_rows: rows in the blocks of `order`.

    Returns:
        [num_rows] int64. No host sync.
    """
    starts = (sizes.cumsum(0) - sizes)[order]
    sizes = sizes[order]
    shift = starts - (sizes.cumsum(0) - sizes)  # from a row's place in the order of reading to where it lies
    return torch.arange(num_rows, device=sizes.device) + shift.repeat_interleave(sizes, output_size=num_rows)


def expert_major(counts: Tensor, num_rows: int) -> Tensor:
    """Return where rows that arrived rank-major stand when they are read expert-major.

    Example: counts [[1, 2], [1, 1]]; the rows r0e0 r0e1 r0e1 r1e0 r1e1 are read in the order 0 3 | 1 2 4, that is
    # r0e0 r0e1 | r1e0 r1e1 (rank-major) -> r0e0 r1e0 | r0e1 r1e1 (expert-major)

    Args:
        counts: [source ranks, L] int64, rows of each source rank for each local expert.
        num_rows: R, the sum of counts.

    Returns:
        [R] int64.
    """
    blocks = torch.arange(counts.numel(), device=counts.device).view(counts.shape)
    return reorder_blocks(counts.reshape(-1), blocks.t().reshape(-1), num_rows)


def pad_slots(
    row_ids: Tensor, probs: Tensor, tokens_per_expert: Tensor, padded_per_expert: Tensor, num_padded: int
) -> tuple[Tensor, Tensor]:
    """Append padding slots (row -1, prob 0) to each expert's slots.

    Example: row_ids [5, 7 | 6], counts [2, 1], padded [2, 2] -> [5, 7 | 6, -1].

    Args:
        row_ids: [M] int64, sorted by expert.
        probs: [M].
        tokens_per_expert: [L] int64, slots before.
        padded_per_expert: [L] int64, slots after; nowhere smaller.
        num_padded: sum of padded_per_expert.

    Returns:
        row_ids [num_padded] int64, probs [num_padded].
    """
    num_added = padded_per_expert - tokens_per_expert
    shift = (num_added.cumsum(0) - num_added).repeat_interleave(tokens_per_expert, output_size=row_ids.shape[0])
    places = torch.arange(row_ids.shape[0], device=row_ids.device) + shift  # [M], where each slot moves to
    padded_row_ids = row_ids.new_full((num_padded,), -1).index_copy_(0, places, row_ids)
    return padded_row_ids, probs.new_zeros(num_padded).scatter(0, places, probs)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to add up rows of dtype: fp32 for narrower floats, else dtype itself."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def gather_rows(source: Tensor, row_ids: Tensor, *, ordered: bool = False) -> Tensor:
    """Return source[row_ids]: [T, H], [M] int64 -> [M, H]. Backward is `sum_rows`."""
    return _GatherRows.apply(source, row_ids, ordered)


def sum_rows(rows: Tensor, row_ids: Tensor, num_rows: int, *, ordered: bool = False) -> Tensor:
    """Add rows up: out[row_ids[i]] += rows[i].

    Args:
        rows: [M, H].
        row_ids: [M] int64.
        num_rows: rows of the result.
        ordered: add the rows of each sum in the order in which they lie, one after the other and without atomic adds,
            on every device. A CPU does so anyway.

    Returns:
        [num_rows, H] in the dtype of rows, added in fp32 (fp64 for fp64) and rounded once.
    """
    return _SumRows.apply(rows, row_ids, num_rows, ordered)


def _select_rows(rows: Tensor, row_ids: Tensor) -> Tensor:
    """[R, H], [M] -> [M, H]."""
    out = new_tensor((row_ids.shape[0], *rows.shape[1:]), rows.dtype, rows.device)
    return torch.index_select(rows, 0, row_ids, out=out)


def _sum_rows(rows: Tensor, row_ids: Tensor, num_rows: int, ordered: bool) -> Tensor:
    """[M, H], [M] -> [num_rows, H]."""
    if ordered and rows.device.type != "cpu":
        return _sum_rows_in_order(rows, row_ids, num_rows)
    out = new_tensor((num_rows, *rows.shape[1:]), sum_dtype(rows.dtype), rows.device).zero_()
    if rows.dtype == out.dtype:
        return out.index_add_(0, row_ids, rows)
    size = CAST_ROWS if rows.device.type == "cpu" else max(rows.shape[0], 1)
    for ids, part in zip(row_ids.split(size), rows.split(size), strict=True):
        out.index_add_(0, ids, part.to(out.dtype))
    return out.to(rows.dtype)


def _sum_rows_in_order(rows: Tensor, row_ids: Tensor, num_rows: int) -> Tensor:
    """`_sum_rows` by sorting and adding up segments, each by one thread per column in order."""
    sorted_ids, order = row_ids.sort(stable=True)
    offsets = torch.searchsorted(sorted_ids, torch.arange(num_rows + 1, device=rows.device))  # [num_rows + 1]
    wide = rows.index_select(0, order).to(sum_dtype(rows.dtype))
    return torch.segment_reduce(wide, "sum", offsets=offsets, axis=0, unsafe=True, initial=0).to(rows.dtype)


class _SlotProbs(torch.autograd.Function):
    """Entries of probs [T, E] at places [M], each token * E + expert; keeps the places alone."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape = probs.shape
        return probs.reshape(-1).index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape.numel()).index_add_(0, places, grad).view(ctx.shape), None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, row_ids: Tensor, ordered: bool) -> Tensor:
        ctx.save_for_backward(row_ids)
        ctx.num_rows, ctx.ordered = source.shape[0], ordered
        return _select_rows(source, row_ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (row_ids,) = ctx.saved_tensors
        return _sum_rows(grad, row_ids, ctx.num_rows, ctx.ordered), None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_ids: Tensor, num_rows: int, ordered: bool) -> Tensor:
        ctx.save_for_backward(row_ids)
        return _sum_rows(rows, row_ids, num_rows, ordered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (row_ids,) = ctx.saved_tensors
        return _select_rows(grad, row_ids), None, None, None
