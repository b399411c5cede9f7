"""The collectives that routing needs, and the groups they run over."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


class Counter(Protocol):
    """What counts collectives: dispatchers.CommunicationCounter is one."""

    def add_reduced(self, operation: str, group: str, num_bytes: int) -> None:
        """Count an all_reduce of num_bytes."""

    def add_rows(self, operation: str, group: str, rank: int, rows_to: Sequence[int], row_bytes: int) -> None:
        """Count a collective that hands rows to each rank."""


def deepcopy_sharing_groups(module: Module, memo: dict[int, Any]) -> Module:
    """Return a copy of a module that shares process groups, and what holds them: they cannot be copied.

    A class that holds groups takes it as its `__deepcopy__`.
    """
    for part in module.modules():
        for value in vars(part).values():
            members = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, nn.Module) else ()
            if any(isinstance(held, dist.ProcessGroup) for held in (value, *members)):
                memo[id(value)] = value
    twin = memo[id(module)] = type(module).__new__(type(module))
    twin.__dict__.update(copy.deepcopy(module.__dict__, memo))
    return twin


def all_reduce_sum(
    values: Tensor, *, group: dist.ProcessGroup | None, name: str = "group", counter: Counter | None = None
) -> Tensor:
    """Return the sum of values over the group, in new storage: any shape and dtype, the same on every rank.

    Args:
        values: this rank's addend.
        group: the ranks that sum; None: this one alone.
        name: what the counter calls the group.
        counter: counts the call and its bytes; None counts nothing.

    Collectives: one all_reduce of the values over group; none if the group has one rank, or is None. No host sync.
    """
    total = values.clone()
    if group is not None and group.size() > 1:
        if counter is not None:
            counter.add_reduced("all_reduce", name, total.nbytes)
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return total


def all_gather_rows(
    rows: Tensor, *, group: dist.ProcessGroup | None, name: str = "group", counter: Counter | None = None
) -> tuple[Tensor, int]:
    """Return the rows of every rank in rank order, and the index of this rank's first row. Not differentiable.

    Args:
        rows: [T, C]; T may differ between ranks.
        group, name, counter: as in `all_reduce_sum`.

    Returns:
        [sum of T, C], the same on every rank, and an index into it.

    Collectives: one all_gather of [1] int64, one of [largest T, C], over group; none if the group has one rank. One
        host sync, for the sizes.
    """
    if group is None or group.size() == 1:
        return rows, 0
    size = torch.tensor([rows.shape[0]], device=rows.device)
    sizes = [torch.empty_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)
    size_list = torch.cat(sizes).tolist()  # sync: the sizes of the parts
    padded = rows.new_zeros(max(size_list), rows.shape[1])
    padded[: rows.shape[0]] = rows
    parts = [torch.empty_like(padded) for _ in size_list]
    if counter is not None:
        counter.add_rows("all_gather sizes", name, group.rank(), [1] * group.size(), size.itemsize)
        row_bytes = padded.itemsize * padded.shape[1]
        counter.add_rows("all_gather rows", name, group.rank(), [padded.shape[0]] * group.size(), row_bytes)
    dist.all_gather(parts, padded, group=group)
    gathered = torch.cat([part[:length] for part, length in zip(parts, size_list, strict=True)])
    return gathered, sum(size_list[: group.rank()])
