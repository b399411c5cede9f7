"""Collectives with uneven splits against what they mean, their checks, and that a mistake never hangs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dispatchers import RankGroup, all_gather_counts, all_gather_rows, all_to_all_rows, reduce_scatter_rows
from dispatchers.collectives import group_of_one
from tests.ranks import run_ranks

SENT = ((1, 2, 0, 3), (0, 0, 0, 0), (4, 1, 2, 0), (2, 0, 1, 1))  # rows from rank (line) to rank (column)
SIZES = (2, 0, 3, 1)  # rows of each rank
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
TRAILING = ((), (3,), (2, 3))


def block(source: int, target: int, num_rows: int, trailing: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return rows that tell where they come from and go to; every value is a whole number below 256."""
    values = source * 64 + target * 16 + torch.arange(num_rows)
    columns = torch.arange(torch.Size(trailing).numel()).view(trailing)
    return (values.view(-1, *[1] * len(trailing)) + 4 * columns * (len(trailing) > 0)).remainder(256).to(dtype)


def strided(tensor: Tensor) -> Tensor:
    """Return the same values in non-contiguous memory, as a leaf that wants gradients where it can."""
    spread = tensor.new_zeros(*tensor.shape, 2)
    spread[..., 0] = tensor
    return spread[..., 0].requires_grad_(tensor.is_floating_point())


def all_to_all_case(trailing: tuple[int, ...], dtype: torch.dtype, check: bool) -> dict[str, bool]:
    rank, size = dist.get_rank(), dist.get_world_size()
    input_splits, output_splits = SENT[rank][:size], [SENT[source][rank] for source in range(size)]
    rows = strided(torch.cat([block(rank, t, n, trailing, dtype) for t, n in enumerate(input_splits)]))
    output = all_to_all_rows(rows, output_splits, input_splits, group=RankGroup(dist.group.WORLD, check=check))
    expected = torch.cat([block(s, rank, n, trailing, dtype) for s, n in enumerate(output_splits)])
    found = {"all_to_all": torch.equal(output, expected)}
    if rows.requires_grad:
        output.backward(255 - expected)  # the gradient that goes home says which row it belongs to
        found["all_to_all backward"] = rows.grad is not None and torch.equal(rows.grad, 255 - rows.detach())
    return found


def all_gather_case(trailing: tuple[int, ...], dtype: torch.dtype, check: bool) -> dict[str, bool]:
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = strided(block(rank, 0, SIZES[rank], trailing, dtype))
    output = all_gather_rows(rows, SIZES[:size], group=RankGroup(dist.group.WORLD, check=check))
    expected = torch.cat([block(source, 0, SIZES[source], trailing, dtype) for source in range(size)])
    found = {"all_gather": torch.equal(output, expected)}
    if rows.requires_grad:
        owner = torch.arange(size).repeat_interleave(torch.tensor(SIZES[:size])).view(-1, *[1] * len(trailing))
        output.backward(((rank + 1) * (owner + 1)).expand(output.shape).to(dtype))
        total = size * (size + 1) // 2 * (rank + 1)  # sum over the ranks that hold a copy
        found["all_gather backward"] = rows.grad is not None and bool((rows.grad == total).all())
    return found


def reduce_scatter_case(trailing: tuple[int, ...], dtype: torch.dtype, check: bool) -> dict[str, bool]:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [block(0, 0, SIZES[target], trailing, dtype) + target for target in range(size)]
    rows = strided(torch.cat(parts) * (rank + 1))
    output = reduce_scatter_rows(rows, SIZES[:size], group=RankGroup(dist.group.WORLD, check=check))
    found = {"reduce_scatter": torch.equal(output, parts[rank] * (size * (size + 1) // 2))}
    if rows.requires_grad:
        output.backward(parts[rank] + 1)  # every rank's addend for a row gets the gradient of the sum
        found["reduce_scatter backward"] = rows.grad is not None and torch.equal(rows.grad, torch.cat(parts) + 1)
    return found


def meaning_worker() -> list[str]:
    cases: list[Callable[[tuple[int, ...], torch.dtype, bool], dict[str, bool]]]
    cases = [all_to_all_case, all_gather_case, reduce_scatter_case]
    wrong = []
    for trailing in TRAILING:
        for dtype in DTYPES:
            for case in cases:
                results = case(trailing, dtype, dtype == torch.float64)
                wrong += [f"{name} of {dtype} rows {trailing}" for name, is_right in results.items() if not is_right]
    counts = torch.arange(6).view(3, 2)[:, 0] + 10 * dist.get_rank()  # not contiguous
    expected = [[0 + 10 * r, 2 + 10 * r, 4 + 10 * r] for r in range(dist.get_world_size())]
    gathered = all_gather_counts(counts, group=RankGroup(dist.group.WORLD))
    if gathered.tolist() != expected or gathered.dtype != torch.int64:
        wrong.append(f"all_gather_counts: {gathered}")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values_and_gradients_mean_what_the_names_say(world_size: int) -> None:
    assert run_ranks(meaning_worker, world_size) == [[]] * world_size


def exactness_worker() -> tuple[list[float], list[int], list[float]]:
    rank = dist.get_rank()
    narrow = torch.tensor([256.0 if rank == 0 else 1.0, 0.0, 0.0, 0.0], dtype=torch.bfloat16)
    whole = torch.tensor([1 << 53 if rank == 0 else 1, 0, 0, 0])
    sizes = (1, 1, 1, 1)
    rows = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    all_gather_rows(rows, sizes, group=RankGroup(dist.group.WORLD)).backward(
        torch.full((4,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    )
    assert rows.grad is not None
    return (
        reduce_scatter_rows(narrow, sizes, group=RankGroup(dist.group.WORLD)).tolist(),
        reduce_scatter_rows(whole, sizes, group=RankGroup(dist.group.WORLD)).tolist(),
        rows.grad.tolist(),
    )


def test_bf16_adds_up_in_fp32_and_integers_exactly() -> None:
    results = run_ranks(exactness_worker, 4)
    # 256 + 1 + 1 + 1 = 259 is rounded to 260; in bf16 each 1 is lost
    assert results[0] == ([260.0], [(1 << 53) + 3], [260.0])
    assert [result[2] for result in results] == [[260.0]] * 4


def test_a_group_of_one_needs_no_backend_and_copies_no_rows() -> None:
    group = RankGroup(group_of_one(), check=True)
    assert (group.size, group.rank) == (1, 0)
    rows = torch.randn(3, 2, requires_grad=True)
    output = all_to_all_rows(rows, [3], [3], group=group)
    assert output.data_ptr() == rows.data_ptr()
    for moved in (output, all_gather_rows(rows, [3], group=group), reduce_scatter_rows(rows, [3], group=group)):
        assert torch.equal(moved, rows)
        (gradient,) = torch.autograd.grad(moved, rows, 2 * torch.ones(3, 2))
        assert gradient.tolist() == [[2.0, 2.0]] * 3
    counts = torch.tensor([1, 2])
    assert all_gather_counts(counts, group=group).tolist() == [[1, 2]]


RANK_1_OF_3 = RankGroup(dist.ProcessGroup(1, 3))  # no backend: an error must come before any communication


@pytest.mark.parametrize(
    ("output_splits", "input_splits", "text"),
    [
        ([1, 1, 0], [1, 1], r"input_splits \(\[1, 1\]\) on rank 1 must be 3 numbers >= 0"),
        ([1, 1], [1, 1, 0], r"output_splits \(\[1, 1\]\) on rank 1 must be 3 numbers >= 0"),
        ([1, 1, 0], [3, -1, 0], r"input_splits \(\[3, -1, 0\]\) on rank 1 must be 3 numbers >= 0"),
        ([1, 1, -1], [1, 1, 0], r"output_splits \(\[1, 1, -1\]\) on rank 1 must be"),
        ([1, 1, 0], [1, 1, 1], r"rows \(2\) on rank 1 must equal the sum of input_splits \[1, 1, 1\] = 3"),
        ([1, 2, 0], [1, 1, 0], "rank 1 sends itself 1 rows but expects 2 of itself"),
        ([], [], r"input_splits \(\[\]\) on rank 1 must be 3 numbers"),
    ],
)
def test_all_to_all_refuses(output_splits: list[int], input_splits: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        all_to_all_rows(torch.zeros(2, 1), output_splits, input_splits, group=RANK_1_OF_3)


@pytest.mark.parametrize(
    ("collective", "sizes", "text"),
    [
        (all_gather_rows, [2], r"all_gather rows: sizes \(\[2\]\) must be 3 numbers >= 0"),
        (all_gather_rows, [], r"sizes \(\[\]\) must be 3 numbers"),
        (all_gather_rows, [0, 2, -1], r"sizes \(\[0, 2, -1\]\) must be 3 numbers >= 0"),
        (all_gather_rows, [2, 1, 2], r"rows \(2\) must be 1 on rank 1 for sizes \[2, 1, 2\]"),
        (reduce_scatter_rows, [2], r"reduce_scatter rows: sizes \(\[2\]\) must be 3 numbers >= 0"),
        (reduce_scatter_rows, [2, 1, -1], r"sizes \(\[2, 1, -1\]\) must be 3 numbers >= 0"),
        (reduce_scatter_rows, [1, 1, 1], r"rows \(2\) must be 3 on rank 1 for sizes \[1, 1, 1\]"),
    ],
)
def test_gather_and_scatter_refuse(collective: Callable[..., Tensor], sizes: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        collective(torch.zeros(2, 1), sizes, group=RANK_1_OF_3)


def test_rows_of_too_many_dimensions_cannot_be_checked() -> None:
    with pytest.raises(ValueError, match="rows have 6 dimensions; at most 5 can be checked"):
        all_to_all_rows(
            torch.zeros(1, 1, 1, 1, 1, 1), [0, 1, 0], [0, 1, 0], group=RankGroup(RANK_1_OF_3.group, check=True)
        )


def call_with_a_mistake(mistake: str, odd: int) -> str:
    """Exchange one row with every rank; rank `odd` makes the mistake. Return what this rank is told."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ones, rows = [1] * size, torch.zeros(size, 2)
    output_splits, input_splits = ones, ones
    if rank == odd and mistake == "dtype":
        rows = rows.double()
    if rank == odd and mistake == "shape":
        rows = rows.repeat(1, 2)
    if rank == odd and mistake == "dimensions":
        rows = rows.unsqueeze(1)
    if rank == odd and mistake == "sent":
        input_splits = [n + (target == (odd + 1) % size) for target, n in enumerate(ones)]
        rows = torch.zeros(size + 1, 2)
    if rank == odd and mistake == "expected":
        output_splits = [n + (source == (odd + 1) % size) for source, n in enumerate(ones)]
    try:
        if rank == odd and mistake == "operation":
            all_gather_rows(rows[:1], ones, group=RankGroup(dist.group.WORLD, check=True))
        else:
            all_to_all_rows(rows, output_splits, input_splits, group=RankGroup(dist.group.WORLD, check=True))
    except ValueError as error:
        return str(error)
    return "no error"


MISTAKES = ("dtype", "shape", "dimensions", "operation", "sent", "expected", "none")


def mistakes_worker() -> dict[tuple[str, int], str]:
    size = dist.get_world_size()
    return {(mistake, odd): call_with_a_mistake(mistake, odd) for mistake in MISTAKES for odd in range(size)}


def test_with_check_every_rank_raises_and_names_the_odd_one() -> None:
    for told in run_ranks(mistakes_worker, 4):
        for (mistake, odd), text in told.items():
            peer = (odd + 1) % 4
            if mistake == "none":
                assert text == "no error"
            elif mistake == "sent":
                assert f"rank {odd} sends 2 rows to rank {peer}, which expects 1" in text, (mistake, odd)
            elif mistake == "expected":
                assert f"rank {peer} sends 1 rows to rank {odd}, which expects 2" in text, (mistake, odd)
            else:
                assert f"rank {odd} of the group differs from rank" in text, (mistake, odd)


def mismatched_worker(num_expected: int) -> Any:
    rank = dist.get_rank()
    output_splits = [1, num_expected] if rank == 0 else [1, 1]
    return all_to_all_rows(torch.zeros(2, 1 << 12), output_splits, [1, 1], group=RankGroup(dist.group.WORLD)).shape


@pytest.mark.parametrize("num_expected", [0, 3])
def test_mismatched_splits_without_check_end_all_the_same(num_expected: int) -> None:
    # What the backend makes of it is its own affair (gloo may abort the process); that it ends is ours.
    told = ""
    try:
        run_ranks(mismatched_worker, 2, num_expected, group_timeout_s=2.0, timeout_s=30.0)
    except AssertionError as error:
        told = str(error)
    assert "was still running at the timeout" not in told
