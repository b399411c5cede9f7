"""Checks of a collective's sizes: what one rank can see, and in debug mode what only a comparison can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

MAX_SIGNATURE_DIMS = 6


def check_sizes(name: str, sizes: Sequence[int], group: dist.ProcessGroup) -> None:
    """Raise ValueError unless sizes holds a row count for each rank."""
    if len(sizes) != group.size() or min(sizes) < 0:
        raise ValueError(f"{name}: sizes ({list(sizes)}) must be {group.size()} numbers >= 0, one per rank.")


def check_num_rows(name: str, rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup, num_rows: int) -> None:
    """rows: [num_rows, ...]."""
    if rows.shape[0] != num_rows:
        raise ValueError(
            f"{name}: rows ({rows.shape[0]}) must be {num_rows} on rank {group.rank()} for sizes {list(sizes)}."
        )


def check_splits(
    name: str, rows: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], group: dist.ProcessGroup
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


def signature(name: str, rows: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]) -> Tensor:
    """Return what the other ranks must know of a call to compare it: [6 + 2 n] int64; rows [sum(input_splits), ...].

    Raises:
        ValueError: rows of more than 5 dimensions.
    """
    header = [crc32(name.encode()), crc32(str(rows.dtype).encode()), *rows.shape[1:]]
    if len(header) > MAX_SIGNATURE_DIMS:
        raise ValueError(f"{name}: rows have {rows.ndim} dimensions; at most {MAX_SIGNATURE_DIMS - 1} can be checked.")
    header += [-1] * (MAX_SIGNATURE_DIMS - len(header))
    return torch.tensor([*header, *input_splits, *output_splits], dtype=torch.int64, device=rows.device)


def compare(name: str, rows: Tensor, table: list[list[int]], group: dist.ProcessGroup) -> None:
    """Raise ValueError on every rank if operation, dtype, trailing shape or splits do not fit together.

    Args:
        name: the operation here.
        rows: [sum(input_splits), ...] here.
        table: the signatures of all ranks.
        group: the ranks.
    """
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
