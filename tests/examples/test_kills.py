"""Ranks are killed at random moments of training and saving: no checkpoint is lost, none is half, and jobs go on."""

import os
import random
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from moe.checkpoint import latest_step
from moe.checkpoint_folders import whole_steps
from tests.examples.test_pretrain_gpt import (
    TINY,
    assert_same_run,
    command,
    environment,
    outputs,
    running_job,
    saved_state,
    train_worker,
)
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a tiny model that saves after every step."""
    file = tmp_path_factory.mktemp("text") / "words.txt"
    choose = random.Random(0).choice
    file.write_text(" ".join(choose(("router", "expert", "token", "gate", "of", "the")) for _ in range(3000)))
    return [*TINY, "--data-path", str(file), "--eval-interval", "1000000", "--save-interval", "1"]


def mortal_worker(flags: list[str], victim: int, delay_s: float) -> int:
    """Train; rank `victim` kills itself after a delay."""
    if dist.get_rank() == victim:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return train_worker(flags)


def kill_again_and_again(flags: list[str], folder: Path, kinds: list[list[str]], seed: int) -> None:
    """Start two ranks with each kind of flags in turn, kill one at a random moment, and look at what is left."""
    random_moment, last = random.Random(seed), 0
    endless = ["--train-iters", "1000000", "--save", str(folder), "--load", str(folder)]
    layout = ["--expert-model-parallel-size", "2", "--distributed-timeout-minutes", "0.1"]
    for kind in kinds:
        victim, delay_s = random_moment.randrange(2), random_moment.uniform(0.5, 4.0)
        with pytest.raises(AssertionError, match=r"died|SIGKILL|exit code"):
            run_ranks(mortal_worker, 2, [*flags, *endless, *layout, *kind], victim, delay_s)
        named = latest_step(folder)
        if named is None:
            assert whole_steps(folder) in ([], [1])
            continue
        assert named >= last, "a checkpoint was lost"
        last = named
        assert last in whole_steps(folder)
        for step in whole_steps(folder):
            saved_state(folder, [*flags, "--ckpt-step", str(step)], step)
    assert last > len(kinds)
    (step, _) = run_ranks(train_worker, 2, [*flags, *endless, *layout, "--exit-interval", str(last + 2)])
    assert step == last + 2 == latest_step(folder)


KINDS = [[], ["--async-save"], ["--use-torch-fsdp2"], ["--async-save", "--use-torch-fsdp2"]]


def test_two_kills_lose_nothing(flags: list[str], tmp_path: Path) -> None:
    kill_again_and_again(flags, tmp_path, [["--async-save"], []], seed=1)


@pytest.mark.slow
def test_twenty_kills_lose_nothing(flags: list[str], tmp_path: Path) -> None:
    kill_again_and_again(flags, tmp_path, KINDS * 5, seed=2)


def test_torchrun_brings_a_job_back_by_itself(flags: list[str], tmp_path: Path) -> None:
    """A rank is killed; torchrun starts both anew, they go on from the last checkpoint, and nothing shows it."""
    run = [*flags, "--train-iters", "40"]
    layout = ["--expert-model-parallel-size", "2", "--distributed-timeout-minutes", "0.5"]
    assert run_ranks(train_worker, 2, [*run, *layout, *outputs(tmp_path / "whole")]) == [40, 40]
    checkpoints, log = tmp_path / "parts" / "checkpoints", tmp_path / "log"
    job_flags = [*run, *layout, *outputs(tmp_path / "parts"), "--load", str(checkpoints), "--async-save"]
    with running_job(job_flags, checkpoints, log, max_restarts=3) as (job, ranks):
        ranks[1].send_signal(signal.SIGKILL)
        assert job.wait(120) == 0, log.read_text()
    resumed = re.search(r"resumed from .*iter_\d+ at step (\d+)", log.read_text())
    assert resumed is not None
    assert 1 <= int(resumed[1]) < 40
    assert_same_run(tmp_path, run, num_steps=40)


def test_a_signal_can_end_a_run_with_a_checkpoint(flags: list[str], tmp_path: Path) -> None:
    checkpoints, log = tmp_path / "checkpoints", tmp_path / "log"
    endless = ["--train-iters", "1000000", "--save-interval", "3", "--exit-signal-handler", "--async-save"]
    with running_job([*flags, *endless, "--save", str(checkpoints)], checkpoints, log) as (job, ranks):
        ranks[0].send_signal(signal.SIGTERM)  # one rank alone: they agree on the step
        assert job.wait(60) == 0, log.read_text()
    last = latest_step(checkpoints)
    assert last is not None
    assert re.search(rf"\| steps +{last} +\|", log.read_text())
    assert subprocess.run(
        command([*flags, "--exit-signal-handler"]), env=environment(), capture_output=True, check=False
    ).stderr.startswith(b"pretrain_gpt.py: --exit-signal-handler belongs to --save")
