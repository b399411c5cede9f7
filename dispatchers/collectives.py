"""Every collective of the dispatchers: rows between ranks with uneven splits, differentiable and checked.

All of them move rows (the first dimension) and are built on one primitive, an all-to-all with a row count per pair of
ranks: gloo has no uneven all-gather or reduce-scatter, and one primitive gives the same summing order everywhere.
Each runs on every rank in forward and in backward, with zero rows too. A group of one rank communicates nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dispatchers.permutation import sum_dtype

MAX_SIGNATURE_DIMS = 6
Splits = Sequence[int]  # rows per rank of the group


def group_of_one() -> dist.ProcessGroup:
    """Return the group of a process that is alone: size 1, rank 0, no backend. Nothing communicates over it."""
    return dist.ProcessGroup(0, 1)  # type: ignore[call-arg]  # the stub lacks this constructor


def all_to_all_rows(
    rows: Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    *,
    group: dist.ProcessGroup,
    check: bool = False,
) -> Tensor:
    """Send consecutive blocks of rows to the ranks of the group and return what they sent here.

    Args:
        rows: [sum(input_splits), ...], the block for rank 0 first.
        output_splits: rows to receive from each rank.
        input_splits: rows to send to each rank.
        group: the ranks that exchange.
        check: debug; compare operation, dtype, shape and splits over the group first (one all_gather, one host sync).

    Returns:
        [sum(output_splits), ...] rank-major: the block from rank 0 first.

    Raises:
        ValueError: splits of the wrong length, negative, or not summing to the rows; with check, a rank that differs.

    Collectives: one all_to_all over group in forward, one in backward.
    """
    _check_splits("all_to_all_rows", rows, input_splits, output_splits, group)
    return _AllToAllRows.apply(rows, tuple(output_splits), tuple(input_splits), group, check)


def all_gather_rows(rows: Tensor, sizes: Sequence[int], *, group: dist.ProcessGroup, check: bool = False) -> Tensor:
    """Return the rows of all ranks of the group, rank-major; the ranks may hold different numbers of rows.

    Args:
        rows: [sizes[rank], ...].
        sizes: rows of each rank.
        group: the ranks that gather.
        check: as in `all_to_all_rows`.

    Returns:
        [sum(sizes), ...], the same on every rank. Backward sums each rank's gradient of its rows over the group.

    Raises:
        ValueError: as in `all_to_all_rows`.

    Collectives: one all_to_all over group in forward (each rank sends its rows to every rank), one in backward.
    """
    _check_sizes("all_gather_rows", sizes, group)
    _check_num_rows("all_gather_rows", rows, sizes, group, num_rows=sizes[group.rank()])
    return _AllGatherRows.apply(rows, tuple(sizes), group, check)


def reduce_scatter_rows(rows: Tensor, sizes: Sequence[int], *, group: dist.ProcessGroup, check: bool = False) -> Tensor:
    """Sum rows over the group and return this rank's part: the inverse direction of `all_gather_rows`.

    Args:
        rows: [sum(sizes), ...] rank-major, this rank's addend for the rows of every rank.
        sizes: rows of each rank.
        group: the ranks that sum.
        check: as in `all_to_all_rows`.

    Returns:
        [sizes[rank], ...] in the dtype of rows, summed in rank order in fp32 (fp64 for fp64) and rounded once.

    Raises:
        ValueError: as in `all_to_all_rows`.

    Collectives: one all_to_all over group in forward, one in backward.
    """
    _check_sizes("reduce_scatter_rows", sizes, group)
    _check_num_rows("reduce_scatter_rows", rows, sizes, group, num_rows=sum(sizes))
    return _ReduceScatterRows.apply(rows, tuple(sizes), group, check)


def all_gather_counts(counts: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Return the counts of every rank of the group.

    Args:
        counts: [E] int64.

    Returns:
        [group size, E] int64, row r from rank r; not differentiable.

    Collectives: one all_gather of [E] int64 over group.
    """
    if group.size() == 1:
        return counts.unsqueeze(0)
    gathered = counts.new_empty(group.size(), counts.shape[0])  # [n, E]
    dist.all_gather(list(gathered.unbind(0)), counts.contiguous(), group=group)
    return gathered


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, output_splits: Splits, input_splits: Splits, group: Any, check: bool) -> Tensor:
        ctx.args = input_splits, output_splits, group, check
        return _exchange("all_to_all_rows", rows, output_splits, input_splits, group, check)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange("all_to_all_rows backward", grad, *ctx.args), None, None, None, None


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: Splits, group: Any, check: bool) -> Tensor:
        ctx.args = sizes, group, check
        return _gather("all_gather_rows", rows, sizes, group, check)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _scatter_sum("all_gather_rows backward", grad, *ctx.args), None, None, None


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: Splits, group: Any, check: bool) -> Tensor:
        ctx.args = sizes, group, check
        return _scatter_sum("reduce_scatter_rows", rows, sizes, group, check)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gather("reduce_scatter_rows backward", grad, *ctx.args), None, None, None


def _exchange(
    name: str, rows: Tensor, output_splits: Splits, input_splits: Splits, group: dist.ProcessGroup, check: bool
) -> Tensor:
    """rows [sum(input_splits), ...] -> [sum(output_splits), ...]."""
    if group.size() == 1:
        return rows.view_as(rows)
    if check:
        _compare_over_group(name, rows, output_splits, input_splits, group)
    received = rows.new_empty(sum(output_splits), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), list(output_splits), list(input_splits), group=group)
    return received


def _gather(name: str, rows: Tensor, sizes: Splits, group: dist.ProcessGroup, check: bool) -> Tensor:
    """rows [sizes[rank], ...] -> [sum(sizes), ...]."""
    copies = rows.repeat(group.size(), *[1] * (rows.ndim - 1))  # the same rows for every rank
    return _exchange(name, copies, sizes, [rows.shape[0]] * group.size(), group, check)


def _scatter_sum(name: str, rows: Tensor, sizes: Splits, group: dist.ProcessGroup, check: bool) -> Tensor:
    """rows [sum(sizes), ...] -> [sizes[rank], ...]."""
    own = sizes[group.rank()]
    addends = _exchange(name, rows, [own] * group.size(), sizes, group, check).view(group.size(), own, *rows.shape[1:])
    return addends.sum(0, dtype=sum_dtype(rows.dtype)).to(rows.dtype)  # [n, sizes[rank], ...] -> [sizes[rank], ...]


def _check_sizes(name: str, sizes: Splits, group: dist.ProcessGroup) -> None:
    """Raise ValueError unless sizes holds a row count for each rank."""
    if len(sizes) != group.size() or min(sizes) < 0:
        raise ValueError(f"{name}: sizes ({list(sizes)}) must be {group.size()} numbers >= 0, one per rank.")


def _check_num_rows(name: str, rows: Tensor, sizes: Splits, group: dist.ProcessGroup, num_rows: int) -> None:
    """rows: [num_rows, ...]."""
    if rows.shape[0] != num_rows:
        raise ValueError(
            f"{name}: rows ({rows.shape[0]}) must be {num_rows} on rank {group.rank()} for sizes {list(sizes)}."
        )


def _check_splits(
    name: str, rows: Tensor, input_splits: Splits, output_splits: Splits, group: dist.ProcessGroup
) -> None:
    """rows: [sum(input_splits), ...]."""
    rank, size = group.rank(), group.size()
    for what, splits in (("input_splits", input_splits), ("output_splits", output_splits)):
        if len(splits) != size or min(splits) < 0:
            raise ValueError(
                f"{name}: {what} ({list(splits)}) on rank {rank} must be {size} numbers >= 0, one per rank."
            )
    if rows.shape[0] != sum(input_splits):
        raise ValueError(
            f"{name}: rows ({rows.shape[0]}) on rank {rank} must equal the sum of input_splits {list(input_splits)}"
            f" = {sum(input_splits)}."
        )
    if input_splits[rank] != output_splits[rank]:
        raise ValueError(
            f"{name}: rank {rank} sends itself {input_splits[rank]} rows but expects {output_splits[rank]} of itself."
        )


def _compare_over_group(
    name: str, rows: Tensor, output_splits: Splits, input_splits: Splits, group: dist.ProcessGroup
) -> None:
    """Raise ValueError on every rank if operation, dtype, trailing shape or splits do not fit together.

    rows: [sum(input_splits), ...].
    """
    header = [crc32(name.encode()), crc32(str(rows.dtype).encode()), *rows.shape[1:]]
    if len(header) > MAX_SIGNATURE_DIMS:
        raise ValueError(f"{name}: rows have {rows.ndim} dimensions; at most {MAX_SIGNATURE_DIMS - 1} can be checked.")
    header += [-1] * (MAX_SIGNATURE_DIMS - len(header))
    own = torch.tensor([*header, *input_splits, *output_splits], dtype=torch.int64, device=rows.device)
    table = all_gather_counts(own, group=group).tolist()  # sync: debug check of every rank's call
    size = group.size()
    signatures = [tuple(line[:MAX_SIGNATURE_DIMS]) for line in table]
    common = Counter(signatures).most_common(1)[0][0]  # of equal counts the first: that of the lowest rank
    for rank, signature in enumerate(signatures):
        if signature != common:
            raise ValueError(
                f"{name}: rank {rank} of the group differs from rank {signatures.index(common)} in operation, dtype or"
                f" row shape; here (rank {group.rank()}): {name}, {rows.dtype}, row shape {list(rows.shape[1:])}."
            )
    for source in range(size):
        for target in range(size):
            sent = table[source][MAX_SIGNATURE_DIMS + target]
            expected = table[target][MAX_SIGNATURE_DIMS + size + source]
            if sent != expected:
                raise ValueError(f"{name}: rank {source} sends {sent} rows to rank {target}, which expects {expected}.")
