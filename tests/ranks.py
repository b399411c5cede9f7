"""Start ranks for a distributed test, or run it in place under torchrun.

    from tests.ranks import run_ranks

    def _sum_of_ranks(offset):                      # a top-level function, so that it can be pickled
        value = torch.tensor(dist.get_rank() + offset)
        dist.all_reduce(value)
        return value.item()

    def test_sum():
        assert run_ranks(_sum_of_ranks, 2, 10) == [21, 21]

Under `torchrun --nproc-per-node N -m pytest` every call whose world size is N runs in these processes; others skip.
"""

import functools
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from types import TracebackType
from typing import Any

import pytest
import torch
import torch.distributed as dist

# After the first failure, how long the other ranks have to report theirs: one that died can make a peer report first.
GRACE_S = 0.5
EXIT_S = 20.0

_in_place_calls = itertools.count()  # the same on every rank, because every rank runs the same tests


@dataclass(frozen=True)
class _Failure:
    rank: int
    text: str
    has_traceback: bool


def run_ranks(
    worker: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0, group_timeout_s: float = 20.0
) -> list[Any]:
    """Run `worker(*args)` on every rank of a fresh gloo group and return the results by rank.

    Args:
        worker: a top-level function; it reads rank and world size from torch.distributed.
        world_size: number of processes, 1 or more; each computes with one thread.
        args: picklable; every rank gets its own copy, and the caller gets a copy of what the worker returns.
        timeout_s: for the whole call; ranks that still run are killed. Unused under torchrun.
        group_timeout_s: for a collective or a rendezvous whose peer does not come.

    Returns:
        One value per rank, in rank order.

    Raises:
        AssertionError: a rank raised (its traceback is in the message), died or ran too long; the others are killed.
    """
    __tracebackhide__ = True
    if world_size < 1:
        raise ValueError(f"world_size ({world_size}) must be at least 1.")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _run_in_place(worker, world_size, args, group_timeout_s)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    payload = pickle.dumps((worker, args))
    ranks = [_start(rank, world_size, store.port, group_timeout_s, payload) for rank in range(world_size)]
    try:
        results, failures = _collect(ranks, time.monotonic() + timeout_s)
        if not failures:
            failures = _release(ranks)
    finally:
        for process, connection in ranks:
            process.kill()
            process.join()
            connection.close()
    if failures:
        raise AssertionError(_describe(worker, world_size, failures))
    return [results[rank] for rank in range(world_size)]


@functools.cache
def _forkserver() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.tensor", "torch._dynamo", "pytest"])
    return context


def _start(rank: int, world_size: int, port: int, group_timeout_s: float, payload: bytes) -> tuple[Any, Connection]:
    ours, theirs = _forkserver().Pipe()
    process = _forkserver().Process(
        target=_rank_main, args=(rank, world_size, port, group_timeout_s, payload, theirs), daemon=True
    )
    process.start()
    theirs.close()  # the end of file then tells that the rank died
    return process, ours


def _rank_main(
    rank: int, world_size: int, port: int, group_timeout_s: float, payload: bytes, connection: Connection
) -> None:
    torch.set_num_threads(1)
    # The hostname of a laptop may resolve to an address that nothing listens on.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with ExitStack() as stack:
        stack.push(functools.partial(_send_traceback, connection))
        timeout = timedelta(seconds=group_timeout_s)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        worker, args = pickle.loads(payload)
        # Plain pickle copies tensors; the pickler of multiprocessing would share memory that ends with this process.
        connection.send_bytes(pickle.dumps((True, worker(*args))))
    # A group that stays until all ranks have reported makes no peer fail by going away.
    connection.recv_bytes()
    dist.destroy_process_group()


def _send_traceback(
    connection: Connection, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> bool:
    """Tell the parent what left the block, as the exit callback of an ExitStack, and stop it there."""
    if error is not None:
        connection.send_bytes(pickle.dumps((False, "".join(traceback.format_exception(error)))))
    return True


def _collect(ranks: list[tuple[Any, Connection]], deadline: float) -> tuple[dict[int, Any], list[_Failure]]:
    """Wait until every rank has reported, one has failed and the grace is over, or the deadline has passed."""
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    end = deadline
    while waiting and (left_s := end - time.monotonic()) > 0:
        for connection in multiprocessing.connection.wait(list(waiting), left_s):
            rank = waiting.pop(connection)
            try:
                succeeded, value = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                failures.append(_Failure(rank, f"died without a traceback: {_exit_cause(ranks[rank][0])}", False))
                continue
            if succeeded:
                results[rank] = value
            else:
                failures.append(_Failure(rank, value, True))
        if failures:
            end = min(end, time.monotonic() + GRACE_S)
    if not failures:
        failures = [
            _Failure(rank, "was still running at the timeout and was killed", False) for rank in waiting.values()
        ]
    return results, failures


def _release(ranks: list[tuple[Any, Connection]]) -> list[_Failure]:
    for _, connection in ranks:
        connection.send_bytes(b"")
    failures = []
    for rank, (process, _) in enumerate(ranks):
        process.join(EXIT_S)
        if process.exitcode != 0:
            failures.append(
                _Failure(rank, f"did not end well after its worker returned: {_exit_cause(process)}", False)
            )
    return failures


def _exit_cause(process: Any) -> str:
    process.join(EXIT_S)
    code = process.exitcode
    if code is None:
        return "it still runs"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _describe(worker: Callable[..., Any], world_size: int, failures: list[_Failure]) -> str:
    # A rank that died is the cause of the errors that its peers then report.
    ordered = sorted(failures, key=lambda failure: failure.has_traceback)
    lines = [f"{worker.__module__}.{worker.__qualname__} failed on {len(failures)} of {world_size} ranks."]
    for failure in ordered:
        lines.append(
            f"rank {failure.rank}:\n{failure.text.rstrip()}"
            if failure.has_traceback
            else f"rank {failure.rank} {failure.text}."
        )
    return "\n".join(lines)


@functools.cache
def _env_store(group_timeout_s: float) -> tuple[dist.Store, int, int]:
    return next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=group_timeout_s))))


@contextmanager
def _in_place_group(store: dist.Store, rank: int, world_size: int, group_timeout_s: float) -> Iterator[None]:
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=group_timeout_s)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _run_in_place(
    worker: Callable[..., Any], world_size: int, args: tuple[Any, ...], group_timeout_s: float
) -> list[Any]:
    """Run the worker as this rank of the job, in a group of its own so that a failed test does not spoil the next."""
    __tracebackhide__ = True
    if int(os.environ["WORLD_SIZE"]) != world_size:
        pytest.skip(f"needs {world_size} ranks, and this job has {os.environ['WORLD_SIZE']}")
    env_store, rank, _ = _env_store(group_timeout_s)
    store = dist.PrefixStore(f"run_ranks/{next(_in_place_calls)}", env_store)
    with _in_place_group(store, rank, world_size, group_timeout_s):
        results: list[Any] = [None] * world_size
        dist.all_gather_object(results, worker(*args))
    return results
