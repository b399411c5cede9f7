"""The main job: exact resume, death of a rank, refusals told once, and what it leaves on the disk."""

import contextlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pretrain_gpt
import psutil
import pytest
import torch
import torch.distributed as dist
from pretrain_gpt import Trainer, build_parser, check_arguments, num_microbatches
from run_report import RunLog
from text_data import ByteCorpus, find_text_files
from torch import Tensor

from moe import ProcessGroups, TransformerConfig
from moe.arguments import config_from_args, field_comments
from moe.checkpoint import latest_step
from moe.checkpoint_state import model_state, optimizer_state
from moe.metrics import BYTES, FIGURES, LOSSES
from tests.ranks import run_ranks

SCRIPT = Path(pretrain_gpt.__file__)
# fmt: off
TINY = [
    "--hidden-size", "16", "--num-layers", "2", "--num-attention-heads", "2", "--num-experts", "4",
    "--moe-ffn-hidden-size", "8", "--seq-length", "16", "--micro-batch-size", "2", "--eval-iters", "1",
    "--eval-interval", "5", "--lr-warmup-iters", "2", "--sample-bytes", "4",
]
ORIGINAL_REPORT = [
    "--num-experts", "8", "--expert-model-parallel-size", "8", "--moe-token-dispatcher-type", "alltoall",
    "--moe-router-fusion", "--moe-router-padding-for-quantization",
]
# fmt: on
FP8 = ["--fp8-format", "hybrid", "--moe-ffn-hidden-size", "16"]
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("text")
    words = ("router", "expert", "token", "gate", "of", "the")
    choose = random.Random(0).choice
    (folder / "words.txt").write_text(" ".join(choose(words) for _ in range(3000)))
    return str(folder)


@pytest.fixture
def tiny(text: str) -> list[str]:
    """Flags of a tiny model on a small text."""
    return [*TINY, "--data-path", text]


def command(flags: list[str], num_ranks: int = 0, max_restarts: int = 0) -> list[str]:
    """Return the command line: plain for 0 ranks, else under torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    torchrun += ["--max-restarts", str(max_restarts)]
    return [sys.executable, *(torchrun if num_ranks else []), str(SCRIPT), *flags]


def environment() -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**ours, "OMP_NUM_THREADS": "1"}


def run_job(flags: list[str], num_ranks: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(flags, num_ranks), capture_output=True, text=True, timeout=TIMEOUT_S, env=environment(), check=False
    )


def make_trainer(flags: list[str]) -> Trainer:
    """Return the trainer of these flags on this rank."""
    args = build_parser().parse_args(flags)
    check_arguments(args)
    files, _ = find_text_files(args.data_path)
    return Trainer(args, config_from_args(args, TransformerConfig), ByteCorpus.from_files(files))


def _plain_log(directory: Path, *, use_tensorboard: bool) -> RunLog:
    assert use_tensorboard
    return RunLog(directory, use_tensorboard=False)


def train_worker(flags: list[str]) -> int:
    """Train on this rank without pictures and TensorBoard, which take longer than a tiny training."""
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    plain_log = mock.patch.object(pretrain_gpt, "RunLog", _plain_log)
    with quiet[0], quiet[1], plain_log, mock.patch.object(Trainer, "report"):
        trainer = make_trainer(flags)
        trainer.train()
    if trainer.log:
        trainer.log.close()
    return trainer.step


def saved_state(folder: Path, flags: list[str], step: int | None = None) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint, by default the latest, read into a fresh model on one process."""
    trainer = make_trainer([*flags, "--load", str(folder)])
    assert trainer.step == (step or latest_step(folder))
    state = model_state(trainer.model) | optimizer_state(trainer.model, trainer.optimizer)
    return {name: tensor.clone() for name, tensor in state.items()}


def records_of(folder: Path) -> list[dict[str, Any]]:
    """Return the run's log without what depends on the clock."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if name != "tokens_per_s"} for record in records]


def assert_same_run(folder: Path, flags: list[str], num_steps: int) -> None:
    """Assert that folder/whole and folder/parts hold the same checkpoint, bit by bit, and the same log."""
    whole, parts = (saved_state(folder / name / "checkpoints", flags) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert any(name.endswith("exp_avg_sq") for name in whole)
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []
    assert [record["step"] for record in records_of(folder / "whole")] == list(range(1, num_steps + 1))
    assert records_of(folder / "whole") == records_of(folder / "parts")


def outputs(folder: Path) -> list[str]:
    return ["--save", str(folder / "checkpoints"), "--output-dir", str(folder)]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--moe-router-fusion", "--moe-router-padding-for-quantization"],
        ["--moe-layer-recompute", "--global-batch-size", "8"],
        [
            *[
                "--moe-router-score-function",
                "sigmoid",
                "--moe-router-enable-expert-bias",
                "--calculate-per-token-loss",
            ],
            *[
                "--moe-router-load-balancing-type",
                "seq_aux_loss",
                "global_aux_loss",
                "--moe-aux-loss-coeff",
                "0.01",
                "0.02",
            ],
            *["--moe-expert-capacity-factor", "1.2", "--global-batch-size", "8"],
        ],
    ],
    ids=["plain", "fusion and padding", "recompute and accumulation", "bias, list of losses, capacity, per token"],
)
def test_a_resumed_run_ends_bitwise_where_the_uninterrupted_one_does(
    tiny: list[str], tmp_path: Path, options: list[str]
) -> None:
    assert_exact_resume(tiny, tmp_path, options, ["--expert-model-parallel-size", "2"])


TENSOR_PARALLEL = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-tensor-parallel-size", "2"]


@pytest.mark.parametrize(
    "layout",
    [["--use-torch-fsdp2", "--expert-model-parallel-size", "2"], ["--use-torch-fsdp2"], TENSOR_PARALLEL],
    ids=["FSDP2, EP", "FSDP2", "TP, ETP"],
)
def test_a_resumed_run_is_exact_in_every_layout(tiny: list[str], tmp_path: Path, layout: list[str]) -> None:
    assert_exact_resume(tiny, tmp_path, ["--global-batch-size", "4"], layout)


def assert_exact_resume(tiny: list[str], tmp_path: Path, options: list[str], shared: list[str]) -> None:
    flags = [*tiny, *options, "--train-iters", "10"]
    parts = [*flags, *shared, *outputs(tmp_path / "parts")]
    assert run_ranks(train_worker, 2, [*flags, *shared, *outputs(tmp_path / "whole")]) == [10, 10]
    assert run_ranks(train_worker, 2, [*parts, "--exit-interval", "5"]) == [5, 5]
    assert run_ranks(train_worker, 2, [*parts, "--load", str(tmp_path / "parts" / "checkpoints")]) == [10, 10]
    assert_same_run(tmp_path, flags, num_steps=10)


@pytest.mark.slow
def test_100_steps_equal_50_and_50_under_torchrun(tiny: list[str], tmp_path: Path) -> None:
    flags = [*tiny, "--train-iters", "100"]
    shared = ["--expert-model-parallel-size", "2"]
    parts = [*flags, *shared, *outputs(tmp_path / "parts")]
    for job in (
        [*flags, *shared, *outputs(tmp_path / "whole")],
        [*parts, "--exit-interval", "50"],
        [*parts, "--load", str(tmp_path / "parts" / "checkpoints")],
    ):
        result = run_job(job, num_ranks=2)
        assert result.returncode == 0, result.stderr
    assert "resumed from" in result.stdout
    assert_same_run(tmp_path, flags, num_steps=100)


@contextlib.contextmanager
def running_job(
    flags: list[str], checkpoints: Path, log: Path, max_restarts: int = 0
) -> Iterator[tuple[subprocess.Popen, list]]:
    """Start two ranks, wait for their first checkpoint, give the job and its ranks; end what is left of them."""
    line = command(flags, 2, max_restarts)
    with log.open("w") as stream:
        job = subprocess.Popen(line, stdout=stream, stderr=subprocess.STDOUT, env=environment())
    children: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not (checkpoints / "latest_checkpointed_iteration.txt").exists():
            assert job.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        children = psutil.Process(job.pid).children(recursive=True)
        by_rank = {child.environ()["RANK"]: child for child in children if SCRIPT.name in " ".join(child.cmdline())}
        yield job, [by_rank["0"], by_rank["1"]]
    finally:
        for process in [*children, job]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        job.wait(TIMEOUT_S)


def endless(tiny: list[str], checkpoints: Path) -> list[str]:
    """Return the flags of two ranks that save often and end by nothing but an accident."""
    return [
        *tiny, "--expert-model-parallel-size", "2", "--train-iters", "1000000", "--eval-interval", "1000000",
        "--save-interval", "5", "--save", str(checkpoints), "--distributed-timeout-minutes", "0.1",
    ]  # fmt: skip


def test_a_killed_rank_ends_the_job_and_a_restart_goes_on(tiny: list[str], tmp_path: Path) -> None:
    checkpoints, log = tmp_path / "checkpoints", tmp_path / "log"
    flags = endless(tiny, checkpoints)
    with running_job(flags, checkpoints, log) as (job, ranks):
        ranks[1].send_signal(signal.SIGKILL)
        assert job.wait(60) != 0
    output = log.read_text()
    assert re.search(r"rank\s+: 1 \(local_rank: 1\)\n\s+exitcode\s+: -9 \(pid: \d+\)\s+\(SIGKILL\)", output)
    assert re.search(r"^rank 0: stopped in step \d+: .*(Connection|closed|signal)", output, flags=re.MULTILINE)
    assert f"--load {checkpoints} goes on from the last checkpoint" in output
    last = latest_step(checkpoints)
    assert last is not None
    assert last % 5 == 0

    flags[flags.index("--train-iters") + 1] = str(last + 2)
    result = run_job([*flags, "--load", str(checkpoints)], num_ranks=2)
    assert result.returncode == 0, result.stderr
    assert f"resumed from {checkpoints / f'iter_{last:07d}'} at step {last}" in result.stdout
    assert re.search(r"\| steps +2 +\|", result.stdout)
    assert latest_step(checkpoints) == last + 2


def test_a_rank_that_hangs_ends_its_peer_at_the_timeout(tiny: list[str], tmp_path: Path) -> None:
    checkpoints, log = tmp_path / "checkpoints", tmp_path / "log"
    with running_job(endless(tiny, checkpoints), checkpoints, log) as (_, ranks):
        ranks[1].send_signal(signal.SIGSTOP)
        psutil.wait_procs([ranks[0]], timeout=60)
        assert not ranks[0].is_running() or ranks[0].status() == psutil.STATUS_ZOMBIE
    output = log.read_text()
    assert re.search(r"^rank 0: stopped in step \d+: .*(Timed out|timeout)", output, flags=re.MULTILINE | re.IGNORECASE)
    assert "A closed connection, a timeout or a signal says that another rank died" in output


def test_a_signal_from_outside_ends_a_run_without_a_traceback(tiny: list[str], tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    flags = [*tiny, "--train-iters", "1000000", "--save", str(checkpoints), "--save-interval", "5"]
    job = subprocess.Popen(command(flags), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not (checkpoints / "latest_checkpointed_iteration.txt").exists():
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        job.send_signal(signal.SIGTERM)
        _, errors = job.communicate(timeout=60)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 1
    assert re.search(r"rank 0: stopped in step \d+: ended by a signal from outside\n", errors)
    assert "Traceback" not in errors


def test_a_signal_inside_a_library_that_wraps_it_is_still_called_a_signal(tiny: list[str], tmp_path: Path) -> None:
    def interrupted_save(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt as error:  # as torch.distributed.checkpoint does
            raise RuntimeError("writing failed on 1 of 1 ranks") from error

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with mock.patch.object(pretrain_gpt, "save_checkpoint", interrupted_save):
            code, errors = refusal([*tiny, "--train-iters", "1", "--save", str(tmp_path)])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert code == 1
    assert "rank 0: stopped in step 2: ended by a signal from outside\n" in errors


def test_fp8_with_a_width_that_it_cannot_have_is_refused_once(tiny: list[str]) -> None:
    result = run_job([*tiny, *ORIGINAL_REPORT, "--fp8-format", "hybrid"], num_ranks=8)
    assert result.returncode != 0
    assert result.stderr.count("moe_ffn_hidden_size (8) must be divisible by 16 for recipe 'delayed'") == 1
    assert str(SCRIPT) + '", line' not in result.stderr  # the one traceback there may be is torchrun's own


@pytest.mark.parametrize("fp8", [[], FP8], ids=["bf16", "fp8"])
def test_the_original_report_trains(tiny: list[str], tmp_path: Path, fp8: list[str]) -> None:
    flags = [*tiny, *ORIGINAL_REPORT, *fp8, "--train-iters", "3", "--output-dir", str(tmp_path)]
    assert run_ranks(train_worker, 8, flags) == [3] * 8
    losses = [record["loss"] for record in records_of(tmp_path)]
    assert losses[2] < losses[1] < losses[0] < 5.7  # ln 256 = 5.55
    tokens = [sum(load) for record in records_of(tmp_path) for load in record["expert_load"]]
    assert tokens == [8 * 2 * 16 * 2] * 6  # ranks x B x S x K, in 3 steps of 2 layers: padding is not counted


@pytest.mark.slow
def test_the_original_report_trains_under_torchrun(tiny: list[str]) -> None:
    result = run_job([*tiny, *ORIGINAL_REPORT, *FP8, "--train-iters", "3"], num_ranks=8)
    assert result.returncode == 0, result.stderr
    assert "delayed hybrid, rounded exactly" in result.stdout
    assert "ep=8, etp=1, local_experts=1, pad_multiple=16" in result.stdout


def refusal(flags: list[str]) -> tuple[Any, str]:
    """Run main with these flags in this process; return its exit code and what it wrote to standard error."""
    errors, argv = io.StringIO(), sys.argv
    sys.argv = [str(SCRIPT), *flags]
    try:
        with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as caught:
            pretrain_gpt.main()
    finally:
        sys.argv = argv
    return caught.value.code, errors.getvalue()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--fp16"], r"--fp16 needs loss scaling"),
        (["--data-path", "{tmp}/missing"], r"text path \(.*missing\) must be a file or folder that exists"),
        (["--data-path", "{tmp}"], r"text path .* must hold a text file"),
        (["--global-batch-size", "3"], r"--global-batch-size \(3\) must be divisible by --micro-batch-size \(2\)"),
        (["--global-batch-size", "0"], r"--global-batch-size \(0\)"),
        (["--expert-model-parallel-size", "2"], r"The number of ranks \(1\).*expert_model_parallel_size \(2\)"),
        (["--moe-layer-freq", "__import__('os')"], r"is neither a number nor a list"),
        (["--moe-layer-freq", "[1]*3"], r"moe_layer_freq \(\(1, 1, 1\)\).*num_layers \(2\)"),
        (["--fp8-format", "hybrid"], r"moe_ffn_hidden_size \(8\) must be divisible by 16"),
        (["--moe-expert-backend", "te"], r"moe_expert_backend \('te'\) needs Transformer Engine"),
        (["--no-such-flag"], r"unrecognized arguments: --no-such-flag"),
        (["--activation-func", "relu"], r"invalid choice: 'relu'"),
        (["--exit-interval", "-3"], r"--exit-interval \(-3\)"),
        (["--lr", "nan"], r"--lr \(nan\)"),
        (["--sample-bytes", "-1"], r"--sample-bytes \(-1\)"),
        (["--distributed-timeout-minutes", "0"], r"--distributed-timeout-minutes \(0.0\)"),
        (["--vocab-size", "100"], r"--vocab-size \(100\) must be at least 256"),
        (["--seq-length", "1000000"], r"seq_length \+ 1 = 1000001"),
        (["--load", "{file}"], r"--load \(.*file\) must be a folder"),
        (["--ckpt-step", "5"], r"--ckpt-step \(5\).*--load"),
        (["--save", "{file}"], r"FileExistsError.*file"),
        (["--save", "{file}/below"], r"NotADirectoryError.*below"),
        (["--output-dir", "{file}"], r"FileExistsError.*file"),
        (["--save", "/proc"], r"/proc"),
    ],
)
def test_what_the_user_can_mend_is_one_line(
    tiny: list[str], tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    file = tmp_path / "file"
    file.write_text("kept")
    places = {"tmp": tmp_path / "empty", "file": file}
    code, errors = refusal([*tiny, "--train-iters", "1", *(flag.format(**places) for flag in flags)])
    assert code == 2
    assert re.fullmatch(rf"pretrain_gpt\.py: .*{message}.*\n", errors), errors
    assert "step 1" not in capsys.readouterr().out
    assert file.read_text() == "kept"


def test_a_wrong_flag_ends_a_process_with_2_and_one_line(tiny: list[str]) -> None:
    result = run_job([*tiny, "--fp8-format", "hybrid"])
    assert result.returncode == 2
    assert result.stderr.startswith("pretrain_gpt.py: moe_ffn_hidden_size (8)")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-experts", "3", "--expert-model-parallel-size", "2"], r"num_moe_experts \(3\).*\(2\)"),
        (["--expert-model-parallel-size", "3"], r"The number of ranks \(2\).*expert_model_parallel_size \(3\)"),
        (["--tensor-model-parallel-size", "2"], r"tensor_model_parallel_size \(2\) needs sequence_parallel"),
        (
            ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--seq-length", "15"],
            r"--seq-length \(15\) must be divisible by --tensor-model-parallel-size \(2\)",
        ),
        (["--context-parallel-size", "2"], r"context_parallel_size \(2\) must be 1"),
        (["--global-batch-size", "6"], r"--global-batch-size \(6\).*data-parallel ranks \(2\) = 4"),
        (["--moe-router-topk", "9"], r"moe_router_topk \(9\)"),
    ],
)
def test_ranks_leave_together_and_one_tells_why(tiny: list[str], flags: list[str], message: str) -> None:
    (code, first), (other_code, second) = run_ranks(refusal, 2, [*tiny, *flags])
    assert (code, other_code, second) == (2, 2, "")
    assert re.fullmatch(rf"pretrain_gpt\.py: .*{message}.*\n", first), first


def lonely_refusal(flags: list[str]) -> tuple[Any, str]:
    """Run main with a data path that rank 1 lacks."""
    path = flags[flags.index("--data-path") + 1]
    return refusal([*flags, "--data-path", f"{path}/missing" if dist.get_rank() == 1 else path])


def test_what_goes_wrong_on_one_rank_names_it(tiny: list[str]) -> None:
    (code, first), (other_code, second) = run_ranks(lonely_refusal, 2, tiny)
    assert (code, other_code, second) == (2, 2, "")
    assert re.fullmatch(r"pretrain_gpt\.py: rank 1: text path \(.*missing\) must be .*\n", first), first


def test_fewer_tokens_than_ranks_and_dense_layers_train(tiny: list[str], tmp_path: Path) -> None:
    flags = [*tiny, "--train-iters", "2", "--expert-model-parallel-size", "2"]
    assert run_ranks(train_worker, 2, [*flags, "--seq-length", "1", "--micro-batch-size", "1"]) == [2, 2]
    assert train_worker([*tiny, "--train-iters", "2", "--moe-layer-freq", "[0]*1+[1]*1", *outputs(tmp_path)]) == 2
    assert [len(record["expert_load"]) for record in records_of(tmp_path)] == [1, 1]
    dense = [*tiny, "--train-iters", "2", "--moe-layer-freq", "[0]*2", "--output-dir", str(tmp_path / "dense")]
    make_trainer(dense).train()
    assert records_of(tmp_path / "dense")[1]["expert_load"] == []
    assert sorted(path.name for path in (tmp_path / "dense").glob("*.png")) == ["loss.png", "report.png"]


def test_a_damaged_newest_checkpoint_is_refused_and_an_older_one_loads(tiny: list[str], tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    flags = [*tiny, "--save", str(checkpoints), "--save-interval", "2", "--load", str(checkpoints)]
    assert train_worker([*flags, "--train-iters", "4"]) == 4
    index = checkpoints / "iter_0000004" / "index.json"
    whole = index.read_bytes()
    index.write_bytes(whole[:-20])
    code, errors = refusal([*flags, "--train-iters", "6"])
    assert code == 2
    assert re.fullmatch(r"pretrain_gpt\.py: .*is damaged.*whole one is step=2.*--ckpt-step STEP loads.*\n", errors)
    assert make_trainer([*flags, "--train-iters", "6", "--ckpt-step", "2"]).step == 2
    index.write_bytes(whole)
    (checkpoints / "latest_checkpointed_iteration.txt").unlink()  # a crash before the first checkpoint was named
    assert make_trainer([*flags, "--train-iters", "6"]).step == 4


def test_hyper_parameters_of_a_resumed_run_come_from_its_flags(tiny: list[str], tmp_path: Path) -> None:
    flags = [*tiny, "--train-iters", "2", "--save", str(tmp_path), "--load", str(tmp_path)]
    train_worker([*flags, "--weight-decay", "0.5", "--adam-beta2", "0.9"])
    groups = make_trainer([*flags, "--weight-decay", "0.25", "--adam-beta2", "0.99"]).optimizer.param_groups
    assert {group["weight_decay"] for group in groups} == {0.25, 0.0}
    assert {group["betas"] for group in groups} == {(0.9, 0.99)}


def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(tiny: list[str], tmp_path: Path) -> None:
    trainer = make_trainer([*tiny, "--save", str(tmp_path), "--save-interval", "1"])
    trainer.train_step()
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    with torch.no_grad():
        trainer.model.output_layer.weight[3, 3] = float("nan")
    with pytest.raises(FloatingPointError, match="the loss is nan and the gradient norm nan: stopped before"):
        trainer.train()
    assert trainer.step == 1
    assert latest_step(tmp_path) is None
    after = trainer.model.state_dict()
    assert all(torch.equal(after[name], weights[name]) for name in weights if "embedding" in name)


def losses_of(flags: list[str], num_ranks: int, folder: Path) -> list[float]:
    flags = [*flags, "--output-dir", str(folder)]
    assert (run_ranks(train_worker, 2, flags) if num_ranks == 2 else [train_worker(flags)])[0] == 3
    return [record["loss"] for record in records_of(folder)]


@pytest.mark.parametrize(
    ("precision", "tolerance"), [([], 1e-5), (["--fp64", "--moe-router-dtype", "fp64"], 1e-9)], ids=["fp32", "fp64"]
)
def test_one_process_has_the_losses_of_two_ranks(
    tiny: list[str], tmp_path: Path, precision: list[str], tolerance: float
) -> None:
    flags = [*tiny, *precision, "--train-iters", "3", "--moe-aux-loss-coeff", "0"]
    sharded = losses_of([*flags, "--expert-model-parallel-size", "2"], 2, tmp_path / "two")
    accumulated = losses_of([*flags, "--global-batch-size", "4"], 1, tmp_path / "accumulated")
    in_one_go = losses_of([*flags, "--micro-batch-size", "4"], 1, tmp_path / "one")
    assert len(set(sharded)) == 3
    assert accumulated == pytest.approx(sharded, rel=tolerance, abs=0)
    assert in_one_go == pytest.approx(sharded, rel=tolerance, abs=0)


def test_micro_batches_of_a_step() -> None:
    args = build_parser().parse_args(["--micro-batch-size", "3", "--global-batch-size", "12"])
    assert num_microbatches(args, ProcessGroups.build()) == 4
    args.global_batch_size = None
    assert num_microbatches(args, ProcessGroups.build()) == 1


def test_one_process_without_torchrun_leaves_log_pictures_and_figures(tiny: list[str], tmp_path: Path) -> None:
    result = run_job([*tiny, "--train-iters", "15", "--lr", "1e-2", "--output-dir", str(tmp_path)])
    assert result.returncode == 0, result.stderr
    records = records_of(tmp_path)
    names = {"step", "loss", "lr", "grad_norm", "expert_load", *FIGURES, *BYTES, *LOSSES}
    assert [record.keys() ^ names for record in records] == [
        {"eval_loss"} if record["step"] % 5 == 0 else set() for record in records
    ]
    held_out = [record["eval_loss"] for record in records if "eval_loss" in record]
    assert held_out[2] < held_out[1] < held_out[0]
    assert held_out[2] < 4.5  # from ln 256 = 5.55
    for picture in ("loss.png", "expert_load.png", "report.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    assert re.search(r"\| unigram baseline +\d\.\d{3} nats per byte +\|", result.stdout)
    assert f"| held-out loss     {held_out[2]:.3f} nats per byte" in result.stdout
    assert "--- sampled after 'import '" in result.stdout


def test_help_has_the_comment_of_every_field() -> None:
    help_text = re.sub(r"\s", "", build_parser().format_help())
    for name, comment in field_comments(TransformerConfig).items():
        if name != "params_dtype":
            assert re.sub(r"\s", "", comment) in help_text, name
