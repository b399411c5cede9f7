"""Every collective of the dispatchers: rows between ranks with uneven splits, differentiable, checked and counted.

All of them move rows (the first dimension) and are built on one primitive, an all-to-all with a row count per pair of
ranks: gloo has no uneven all-gather or reduce-scatter, and one primitive gives the same summing order everywhere.
Each runs on every rank in forward and in backward, with zero rows too. A group of one rank communicates nothing.

Every call starts a transfer and returns at once; `wait()` gives its rows. Whatever runs in between runs while the rows
travel. In backward the node of `wait` starts the transfer of the gradient and the node of the start waits for it, so
what ran in between in forward has its backward in between too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dispatchers.accounting import CommunicationCounter
from dispatchers.checks import check_num_rows, check_sizes, check_splits, compare, signature
from dispatchers.fp8_rows import pack_rows, packed_width, unpack_rows
from dispatchers.host_memory import new_tensor
from dispatchers.permutation import sum_dtype

Splits = Sequence[int]  # rows per rank of the group
Payload = Literal[
    "plain", "fp8", "fp8 both ways"
]  # what crosses: rows as they are, or packed in forward (and backward)


def group_of_one() -> dist.ProcessGroup:
    """Return the group of a process that is alone: size 1, rank 0, no backend. Nothing communicates over it."""
    return dist.ProcessGroup(0, 1)  # type: ignore[call-arg]  # the stub lacks this constructor


@dataclass(frozen=True)
class RankGroup:
    """A process group as the collectives see it.

    Attributes:
        group: the ranks.
        name: what the counter and errors call it.
        check: debug; before each collective compare operation, dtype, shape and splits over the group (one more
            all_gather and one host sync each).
        counter: counts calls, rows and bytes; None counts nothing.
    """

    group: dist.ProcessGroup
    name: str = "group"
    check: bool = False
    counter: CommunicationCounter | None = None

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.group.rank()

    def announce(self, operation: str, rows: Tensor, input_splits: Splits, output_splits: Splits) -> None:
        """Check and count a collective that is about to run: rows [sum(input_splits), ...]."""
        if self.check:
            own = signature(operation, rows, output_splits, input_splits)
            compare(operation, rows, _all_gather(own, self).tolist(), self.group)  # sync: debug check of every call
        if self.counter is not None:
            row_bytes = rows.itemsize * rows.shape[1:].numel()
            self.counter.add_rows(operation, self.name, self.rank, input_splits, row_bytes)


class RowsInFlight:
    """Rows that are on their way. `wait` returns them, differentiably; it is called once.

    Args:
        arriving: [rows to receive, ...], filled when the transfer is over.
        transfer: the transfer, or None if there is nothing to wait for.
    """

    def __init__(self, arriving: Tensor, transfer: _Transfer | None = None) -> None:
        self.arriving, self.transfer = arriving, transfer

    def wait(self) -> Tensor:
        """Return the rows once they are here. On CUDA the current stream waits, not the host."""
        return self.arriving if self.transfer is None else _Arrive.apply(self.arriving, self.transfer)


def start_all_to_all_rows(
    rows: Tensor,
    output_splits: Splits,
    input_splits: Splits,
    *,
    group: RankGroup,
    what: str = "rows",
    payload: Payload = "plain",
) -> RowsInFlight:
    """Send consecutive blocks of rows to the ranks of the group, and receive what they send here.

    Args:
        rows: [sum(input_splits), ...], the block for rank 0 first.
        output_splits: rows to receive from each rank.
        input_splits: rows to send to each rank.
        group: the ranks that exchange.
        what: names the rows in the counter and in errors.
        payload: "plain" sends rows as they are. "fp8" sends rows [R, H] packed (`pack_rows`, with its error bound) and
            gradients as they are; "fp8 both ways" packs gradients too.

    Returns:
        The transfer of [sum(output_splits), ...] rank-major: the block from rank 0 first.

    Raises:
        ValueError: splits of the wrong length, negative, or not summing to the rows; with check, a rank that differs.

    Collectives: one all_to_all over group in forward, one in backward.
    """
    return _start(f"all_to_all {what}", rows, output_splits, input_splits, group, payload)


def all_to_all_rows(
    rows: Tensor, output_splits: Splits, input_splits: Splits, *, group: RankGroup, what: str = "rows"
) -> Tensor:
    """`start_all_to_all_rows`, waited for."""
    return start_all_to_all_rows(rows, output_splits, input_splits, group=group, what=what).wait()


def start_all_gather_rows(
    rows: Tensor, sizes: Splits, *, group: RankGroup, what: str = "rows", payload: Payload = "plain"
) -> RowsInFlight:
    """Gather the rows of all ranks of the group, rank-major; the ranks may hold different numbers of rows.

    Args:
        rows: [sizes[rank], ...].
        sizes: rows of each rank.
        group: the ranks that gather.
        what, payload: as in `start_all_to_all_rows`.

    Returns:
        The transfer of [sum(sizes), ...], the same on every rank. Backward sums each rank's gradient of its rows over
        the group.

    Raises:
        ValueError: as in `start_all_to_all_rows`.

    Collectives: one all_to_all over group in forward (each rank sends its rows to every rank), one in backward.
    """
    check_sizes(f"all_gather {what}", sizes, group.group)
    check_num_rows(f"all_gather {what}", rows, sizes, group.group, num_rows=sizes[group.rank])
    if group.size == 1:
        return RowsInFlight(rows.view_as(rows))
    copies = _Copies.apply(rows, group.size)  # [n * sizes[rank], ...], the same rows for every rank
    return _start(f"all_gather {what}", copies, sizes, [rows.shape[0]] * group.size, group, payload)


def all_gather_rows(rows: Tensor, sizes: Splits, *, group: RankGroup, what: str = "rows") -> Tensor:
    """`start_all_gather_rows`, waited for."""
    return start_all_gather_rows(rows, sizes, group=group, what=what).wait()


class SumInFlight:
    """Addends that are on their way; `wait` returns their sum."""

    def __init__(self, addends: RowsInFlight, num_ranks: int) -> None:
        self.addends, self.num_ranks = addends, num_ranks

    def wait(self) -> Tensor:
        """Return the sum once all addends are here."""
        if self.num_ranks == 1:
            return self.addends.wait()
        return _SumCopies.apply(self.addends.wait(), self.num_ranks)


def start_reduce_scatter_rows(rows: Tensor, sizes: Splits, *, group: RankGroup, what: str = "rows") -> SumInFlight:
    """Sum rows over the group and keep this rank's part: the inverse direction of `start_all_gather_rows`.

    Args:
        rows: [sum(sizes), ...] rank-major, this rank's addend for the rows of every rank.
        sizes: rows of each rank.
        group: the ranks that sum.
        what: as in `start_all_to_all_rows`.

    Returns:
        The transfer of [sizes[rank], ...] in the dtype of rows, summed in rank order in fp32 (fp64 for fp64) and
        rounded once.

    Raises:
        ValueError: as in `start_all_to_all_rows`.

    Collectives: one all_to_all over group in forward, one in backward.
    """
    check_sizes(f"reduce_scatter {what}", sizes, group.group)
    check_num_rows(f"reduce_scatter {what}", rows, sizes, group.group, num_rows=sum(sizes))
    own = [sizes[group.rank]] * group.size
    return SumInFlight(_start(f"reduce_scatter {what}", rows, own, sizes, group, "plain"), group.size)


def reduce_scatter_rows(rows: Tensor, sizes: Splits, *, group: RankGroup, what: str = "rows") -> Tensor:
    """`start_reduce_scatter_rows`, waited for."""
    return start_reduce_scatter_rows(rows, sizes, group=group, what=what).wait()


def all_gather_counts(counts: Tensor, *, group: RankGroup) -> Tensor:
    """Return the counts of every rank of the group.

    Args:
        counts: [C] int64.

    Returns:
        [group size, C] int64, row r from rank r; not differentiable.

    Collectives: one all_gather of [C] int64 over group.
    """
    if group.size == 1:
        return counts.unsqueeze(0)
    ones = [1] * group.size
    group.announce("all_gather counts", counts.unsqueeze(0), ones, ones)
    return _all_gather(counts, group)


def _all_gather(values: Tensor, group: RankGroup) -> Tensor:
    """[C] -> [n, C], neither checked nor counted."""
    gathered = values.new_empty(group.size, values.shape[0])
    dist.all_gather(list(gathered.unbind(0)), values.contiguous(), group=group.group)
    return gathered


def _start(
    operation: str, rows: Tensor, output_splits: Splits, input_splits: Splits, group: RankGroup, payload: Payload
) -> RowsInFlight:
    """Start an all-to-all of rows [sum(input_splits), ...]."""
    check_splits(operation, rows, input_splits, output_splits, group.group)
    if group.size == 1:
        return RowsInFlight(rows.view_as(rows))
    transfer = _Transfer(operation, tuple(output_splits), tuple(input_splits), group, payload)
    return RowsInFlight(_Depart.apply(rows, transfer), transfer)


class _Transfer:
    """One all-to-all of rows and, in backward, that of their gradients the other way."""

    def __init__(
        self, operation: str, output_splits: Splits, input_splits: Splits, group: RankGroup, payload: Payload
    ) -> None:
        self.operation, self.group = operation, group
        self.output_splits, self.input_splits = output_splits, input_splits
        self.packs_forward, self.packs_backward = payload != "plain", payload == "fp8 both ways"
        self.under_way: _UnderWay | None = None

    def launch(self, rows: Tensor) -> Tensor:
        """Start the way there: rows [sum(input_splits), ...] -> memory for [sum(output_splits), ...]."""
        self.under_way = _UnderWay(
            self.operation, rows, self.output_splits, self.input_splits, self.group, self.packs_forward
        )
        return self.under_way.target

    def launch_backward(self, grad: Tensor) -> None:
        """Start the way back: grad [sum(output_splits), ...]."""
        self.under_way = _UnderWay(
            f"{self.operation} backward", grad, self.input_splits, self.output_splits, self.group, self.packs_backward
        )

    def land(self) -> Tensor:
        """Wait for what was started last and return it."""
        if self.under_way is None:
            raise RuntimeError(f"{self.operation}: wait() was called twice, or without a start.")
        target, self.under_way = self.under_way.land(), None
        return target


class _UnderWay:
    """An all-to-all that has been started: what it sends and receives stays alive until `land`."""

    def __init__(
        self, operation: str, rows: Tensor, output_splits: Splits, input_splits: Splits, group: RankGroup, packs: bool
    ) -> None:
        """rows: [sum(input_splits), ...]."""
        self.target = new_tensor((sum(output_splits), *rows.shape[1:]), rows.dtype, rows.device)
        self.sent = pack_rows(rows) if packs else rows.contiguous()
        width = (packed_width(rows.shape[1]),) if packs else rows.shape[1:]
        size = (sum(output_splits), *width)
        self.packed = new_tensor(size, self.sent.dtype, self.sent.device) if packs else None
        group.announce(operation, self.sent, input_splits, output_splits)
        received = self.target if self.packed is None else self.packed
        self.work = dist.all_to_all_single(
            received, self.sent, list(output_splits), list(input_splits), group=group.group, async_op=True
        )

    def land(self) -> Tensor:
        """Wait and return [sum(output_splits), ...] in the dtype of what was sent."""
        self.work.wait()
        if self.packed is not None:
            self.target.copy_(unpack_rows(self.packed, self.target.shape[1], self.target.dtype))
        return self.target


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.launch(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.transfer.land(), None  # _Arrive's backward, which came before, started it


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        rows = transfer.land()
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.transfer.launch_backward(grad)
        return grad, None  # only its shape counts: _Depart's backward takes what arrives


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_copies: int) -> Tensor:
        ctx.num_copies = num_copies
        return rows.repeat(num_copies, *[1] * (rows.ndim - 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _sum_copies(grad, ctx.num_copies), None


class _SumCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_copies: int) -> Tensor:
        ctx.num_copies = num_copies
        return _sum_copies(rows, num_copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.repeat(ctx.num_copies, *[1] * (grad.ndim - 1)), None


def _sum_copies(rows: Tensor, num_copies: int) -> Tensor:
    """Add up blocks of rows in order, in fp32 or fp64: [n * r, ...] -> [r, ...]."""
    addends = rows.view(num_copies, rows.shape[0] // num_copies, *rows.shape[1:])
    return addends.sum(0, dtype=sum_dtype(rows.dtype)).to(rows.dtype)
