"""Ranks start, report and end as run_ranks promises, in processes of their own and in place."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import run_ranks

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif("RANK" in os.environ, reason="starts its own ranks")


def _rank_and_sum(offset: float) -> tuple[int, torch.Tensor]:
    total = torch.tensor([dist.get_rank() + offset], dtype=torch.float64)
    dist.all_reduce(total)
    return dist.get_rank(), total


def _add_in_place(values: torch.Tensor) -> None:
    values += 1 + dist.get_rank()


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError(f"marker of rank {rank}")
    dist.barrier()


def _exit_on(rank: int, code: int) -> None:
    if dist.get_rank() == rank:
        os._exit(code)
    dist.barrier()


def _kill_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _barrier_without(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)
    dist.barrier()


def _return_unpicklable() -> object:
    return lambda: None


def _threads() -> int:
    return torch.get_num_threads()


def _mesh_sum() -> float:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("ep", "dp"))
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=mesh["ep"].get_group())
    return total.item()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_rank_order(world_size: int) -> None:
    results = run_ranks(_rank_and_sum, world_size, 0.5)
    total = sum(range(world_size)) + 0.5 * world_size
    assert results == [(rank, torch.tensor([total], dtype=torch.float64)) for rank in range(world_size)]


def test_each_rank_has_a_copy_of_the_arguments() -> None:
    values = torch.zeros(3)
    run_ranks(_add_in_place, 2, values)
    assert torch.equal(values, torch.zeros(3))


def test_ranks_compute_with_one_thread() -> None:
    assert run_ranks(_threads, 2) == [1, 1]


def test_a_traceback_names_its_rank_alone() -> None:
    with pytest.raises(AssertionError) as failure:
        run_ranks(_raise_on, 2, 1)
    message = str(failure.value)
    assert "_raise_on failed on 1 of 2 ranks" in message
    assert "rank 1:\nTraceback" in message
    assert "KeyError: 'marker of rank 1'" in message


def test_a_rank_that_exits_is_named_first() -> None:
    with pytest.raises(AssertionError, match=r"ranks\.\nrank 1 died without a traceback: exit code 3\."):
        run_ranks(_exit_on, 2, 1, 3)


def test_a_rank_that_is_killed_is_named_first() -> None:
    with pytest.raises(AssertionError, match=r"ranks\.\nrank 0 died without a traceback: killed by SIGKILL\."):
        run_ranks(_kill_on, 2, 0)


def test_a_collective_without_its_peer_ends_at_the_group_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)on 1 of 2 ranks.*rank 1:\nTraceback.*[Tt]imed out"):
        run_ranks(_barrier_without, 2, 0, group_timeout_s=1.0)
    assert time.monotonic() - start < 30


def test_a_rank_that_never_ends_is_killed_at_the_timeout() -> None:
    with pytest.raises(AssertionError, match=r"rank 0 was still running at the timeout and was killed\."):
        run_ranks(_barrier_without, 1, 0, timeout_s=3.0)


def test_a_result_that_cannot_be_pickled_is_a_failure() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0:\nTraceback.*_return_unpicklable"):
        run_ranks(_return_unpicklable, 1)


def test_a_world_of_no_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"world_size \(0\) must be at least 1"):
        run_ranks(_threads, 0)


IN_PLACE_TESTS = """
import torch.distributed as dist
import pytest
from tests.ranks import run_ranks
from tests.test_ranks import _mesh_sum, _raise_on, _rank_and_sum

def test_runs_here():
    assert run_ranks(_rank_and_sum, 2, 0.0) == [(0, 1.0), (1, 1.0)]

def test_skips_other_sizes():
    run_ranks(_rank_and_sum, 4, 0.0)

def test_fails_on_every_rank():
    with pytest.raises((KeyError, RuntimeError)):
        run_ranks(_raise_on, 2, 1)

def test_goes_on_after_a_failure():
    assert run_ranks(_mesh_sum, 2) == [1.0, 1.0]
    assert run_ranks(_mesh_sum, 2) == [1.0, 1.0]
    assert not dist.is_initialized()
"""


def test_torchrun_runs_workers_in_place(tmp_path: Path) -> None:
    (tmp_path / "test_in_place.py").write_text(IN_PLACE_TESTS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    pytest_arguments = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-c", "pyproject.toml", str(tmp_path)]
    run = subprocess.run(
        [*launch, *pytest_arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(re.findall("3 passed, 1 skipped", run.stdout)) == 2, run.stdout
    assert "needs 4 ranks, and this job has 2" in run.stdout
