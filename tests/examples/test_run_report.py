"""A run's line, log, pictures and closing table say what happened, and survive crashes, NaN and missing packages."""

import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import run_report
import torch
from run_report import ProgressBar, RunLog, draw_expert_load, draw_loss, read_metrics, sample_metrics, summary_table


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the progress bar sees, in its one element."""
    now = [1000.0]
    monkeypatch.setattr(run_report.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved, to be asked for what they show."""
    figure_class = pytest.importorskip("matplotlib.figure").Figure
    saved: list[Any] = []
    save = figure_class.savefig

    def save_and_keep(figure: Any, *args: Any, **kwargs: Any) -> None:
        saved.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(figure_class, "savefig", save_and_keep)
    return saved


def _records(*steps: int, loss: float = 2.0) -> list[dict[str, Any]]:
    return [{"step": step, "loss": loss + step} for step in steps]


def test_plain_stream_gets_a_full_line_every_5_percent(clock: list[float]) -> None:
    stream = io.StringIO()
    bar = ProgressBar(200, first_step=100, stream=stream)
    for step in range(101, 201):
        clock[0] += 2.0
        eval_loss = 1.875 if step == 152 else None
        bar.update(step, loss=300 / step, tokens_per_s=12345.6, imbalance=1.25, eval_loss=eval_loss)
    bar.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 21  # 20, and the evaluation at a step between
    assert lines[0] == " 52% | step 105/200 | loss 2.857 | 12,346 tokens/s | max/mean load 1.25 | ETA 0:03:10"
    assert [line.split("step ")[1].split("/")[0] for line in lines[9:12]] == ["150", "152", "155"]
    assert ["held-out 1.875" in line for line in lines] == [False] * 10 + [True] * 11
    assert lines[-1].startswith("100% | step 200/200 | loss 1.500 |")
    assert lines[-1].endswith("ETA 0:00:00")


def test_last_step_is_shown_when_steps_are_no_multiple_of_the_interval(clock: list[float]) -> None:
    stream = io.StringIO()
    bar = ProgressBar(41, stream=stream)  # every third step
    for step in range(1, 42):
        bar.update(step, loss=1.0, tokens_per_s=1.0, imbalance=1.0)
    shown = [int(line.split("step ")[1].split("/")[0]) for line in stream.getvalue().splitlines()]
    assert shown == [*range(3, 40, 3), 41]


def test_terminal_line_is_redrawn_within_its_width(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    stream = Terminal()
    bar = ProgressBar(8, stream=stream)
    clock[0] += 10.0
    bar.update(2, loss=2.5, tokens_per_s=98765.0, imbalance=1.5)
    text = "step 2/8 | loss 2.500 | 98,765 tokens/s | max/mean load 1.50 | ETA 0:00:30"
    assert stream.getvalue() == f"\r[{'#' * 7}{'-' * 23}] {text}"

    first_length = len(stream.getvalue()) - 1
    bar.update(4, loss=1.0, tokens_per_s=9.0, imbalance=1.5)
    second = stream.getvalue().split("\r")[2]
    assert len(second) == first_length  # blanks cover what was longer
    assert second.rstrip().endswith("ETA 0:00:10")

    monkeypatch.setenv("COLUMNS", "40")
    bar.update(8, loss=1.0, tokens_per_s=9.0, imbalance=1.5)
    assert stream.getvalue().split("\r")[3] == "step 8/8 | loss 1.000 | 9 tokens/s | max/mean"[:39]
    bar.close()
    bar.close()
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().endswith("\n")


def test_dead_experts_and_drops_are_shown_where_there_are_any(clock: list[float]) -> None:
    stream = io.StringIO()
    bar = ProgressBar(1, stream=stream)
    bar.update(1, loss=1.0, tokens_per_s=1.0, imbalance=2.5, num_dead_experts=3, drop_rate=0.125)
    assert "| max/mean load 2.50 | dead experts 3 | dropped 12.5% | ETA" in stream.getvalue()


def test_records_come_back_as_written_and_at_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "runs" / "a", use_tensorboard=False)
    log.write(
        {"step": 1, "loss": torch.tensor(0.5), "load_imbalance": torch.tensor([1.5, 2.0]), "expert_load": [[3, 1]]}
    )
    log.write({"step": 2, "loss": math.nan, "grad_norm": math.inf, "load_imbalance": [1.0, -math.inf]})
    path = tmp_path / "runs" / "a" / "metrics.jsonl"
    strict = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    expected = [
        {"step": 1, "loss": 0.5, "load_imbalance": [1.5, 2.0], "expert_load": [[3, 1]]},
        {"step": 2, "loss": None, "grad_norm": None, "load_imbalance": [1.0, None]},
    ]
    assert strict == read_metrics(path) == expected
    log.close()


def test_resumed_log_has_each_step_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path, use_tensorboard=False)
    for record in _records(1, 2, 3, 4):
        log.write(record)
    log.close()

    resumed = RunLog(tmp_path, use_tensorboard=False)
    with pytest.raises(ValueError, match=r"step \(3\) must be greater than the last one \(4\).*truncate_after\(2\)"):
        resumed.write({"step": 3})
    resumed.truncate_after(2)
    for record in _records(3, 4, 5, loss=7.0):
        resumed.write(record)
    resumed.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == _records(1, 2) + _records(3, 4, 5, loss=7.0)

    fresh = RunLog(tmp_path, use_tensorboard=False)
    fresh.truncate_after(0)
    fresh.write({"step": 1})
    fresh.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3, "lo\n', "\0\0\0", '{"step": 3, "n": "\udc80'])
def test_a_torn_last_line_is_dropped_and_written_over(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = "".join(json.dumps(record) + "\n" for record in _records(1, 2))
    path.write_bytes((whole + torn).encode(errors="surrogateescape"))
    assert read_metrics(path) == _records(1, 2)
    log = RunLog(tmp_path, use_tensorboard=False)
    log.write(_records(3)[0])
    log.close()
    assert read_metrics(path) == _records(1, 2, 3)


def test_a_last_line_torn_before_its_end_of_line_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    log = RunLog(tmp_path, use_tensorboard=False)
    log.write({"step": 3})
    log.close()
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3}]


@pytest.mark.parametrize("line", ["[1]", '{"loss": 1.0}'])
def test_a_last_line_that_is_whole_and_no_record_is_an_error(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 .* must be a JSON object with a step"):
        read_metrics(path)


@pytest.mark.parametrize("line", ['{"step": 1, "lo', "[1]", '{"loss": 1.0}'])
def test_a_broken_line_that_is_not_the_last_is_an_error(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 .* must be a JSON object with a step"):
        read_metrics(path)


def test_tensorboard_mirrors_scalars_and_forgets_steps_done_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def record(step: int, loss: float) -> dict[str, Any]:
        lists = {"load_imbalance": [1.5, step], "pad_share": [0.25, math.nan], "expert_load": [[1, 2], [3, 4]]}
        return {"step": step, "loss": loss, "lr": math.nan, **lists}

    log = RunLog(tmp_path, use_tensorboard=True)
    for step in (1, 2, 3, 4):
        log.write(record(step, loss=0.5))
    log.close()
    resumed = RunLog(tmp_path, use_tensorboard=True)
    resumed.truncate_after(2)
    resumed.write(record(3, loss=0.25))
    resumed.close()

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    of_layers = ["load_imbalance/moe_layer_1", "load_imbalance/moe_layer_2", "loss", "pad_share/moe_layer_1"]
    assert sorted(events.Tags()["scalars"]) == of_layers
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 0.5), (3, 0.25)]
    assert [event.value for event in events.Scalars("load_imbalance/moe_layer_2")] == [1.0, 2.0, 3.0]


def test_without_tensorboard_a_line_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    log = RunLog(tmp_path, use_tensorboard=True)
    log.write({"step": 1, "loss": 2.0})
    log.close()
    assert capsys.readouterr().err == 'no TensorBoard log; for one: pip install "moe-pipeline[plots]".\n'
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (draw_loss, draw_expert_load):
        with pytest.raises(ImportError, match=rf'{draw.__name__} needs matplotlib: .*"moe-pipeline\[plots\]"'):
            draw([{"step": 1, "loss": 1.0, "expert_load": [[1]]}], tmp_path / "picture.png")


def test_loss_picture_shows_raw_smoothed_held_out_and_baseline(tmp_path: Path, figures: list[Any]) -> None:
    losses = [6.0, 3.0, None, 1.0, 2.0]
    records: list[dict[str, Any]] = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=11)]
    records[1]["eval_loss"] = 4.0
    records[4]["eval_loss"] = 2.5
    draw_loss(records, tmp_path / "loss.png", unigram_nats=3.25)

    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    (axes,) = figures[0].axes
    raw, smooth, held_out, unigram = axes.lines
    assert list(raw.get_xdata()) == [11, 12, 13, 14, 15]
    assert list(raw.get_ydata()) == pytest.approx([6.0, 3.0, math.nan, 1.0, 2.0], nan_ok=True)
    assert list(smooth.get_ydata()) == pytest.approx([4.5, 4.5, 2.0, 1.5, 1.5])  # three neighbours, the gap left out
    assert held_out.get_xydata().tolist() == [[12.0, 4.0], [15.0, 2.5]]
    assert set(unigram.get_ydata()) == {3.25}
    assert unigram.get_linestyle() == "--"
    assert "nats per byte" in axes.get_ylabel()
    assert [text.get_text() for text in axes.get_legend().get_texts()][2:] == [
        "held-out, last 2.500",
        "byte frequencies alone, 3.250",
    ]


def test_loss_picture_without_a_loss_is_refused(tmp_path: Path, figures: list[Any]) -> None:
    for records in ([], [{"step": 1, "loss": None}]):
        with pytest.raises(ValueError, match=rf"records \({len(records)}\) must hold at least one loss"):
            draw_loss(records, tmp_path / "loss.png")
    draw_loss([{"step": 1, "loss": 2.0}], tmp_path / "loss.png")
    assert figures[0].axes[0].lines[1].get_ydata().tolist() == [2.0]


def test_load_picture_shows_share_times_experts_of_each_layer(tmp_path: Path, figures: list[Any]) -> None:
    records = [
        {"step": 5, "expert_load": [[1, 1, 2, 0], [4, 4, 4, 4]]},
        {"step": 6, "loss": 1.0},
        {"step": 7, "expert_load": [[0, 0, 12, 0], [0, 0, 0, 0]]},
    ]
    draw_expert_load(records, tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG\r\n")
    first, second, colour_bar = figures[0].axes
    mesh = first.collections[0]
    assert mesh.get_array().tolist() == [[1.0, 0.0], [1.0, 0.0], [2.0, 4.0], [0.0, 0.0]]  # [experts, steps]
    assert mesh.get_coordinates()[0, :, 0].tolist() == [4.5, 6.5, 7.5]
    assert second.collections[0].get_array()[:, 0].tolist() == [1.0] * 4
    assert second.collections[0].get_array().mask[:, 1].all()  # a step without a token has no colour
    assert (mesh.norm(0.0), mesh.norm(1.0)) == (0.0, 0.5)
    assert mesh.norm is second.collections[0].norm
    assert colour_bar.get_ylabel() == "share of tokens x E"
    assert [axes.get_title(loc="left") for axes in (first, second)] == ["MoE layer 1", "MoE layer 2"]


def test_load_picture_adds_up_the_counts_of_many_steps(tmp_path: Path, figures: list[Any]) -> None:
    records = [{"step": step, "expert_load": [[step % 2 * 2, 1]]} for step in range(1, 481)]  # 240 pairs
    draw_expert_load(records, tmp_path / "load.png")
    values = figures[0].axes[0].collections[0].get_array()
    assert values.shape == (2, 240)
    assert set(values.ravel().tolist()) == {1.0}  # 2 + 0 tokens for one expert, 1 + 1 for the other


def test_load_picture_of_records_that_do_not_fit_is_refused(tmp_path: Path, figures: list[Any]) -> None:
    for loads in ([], [[[1, 2]], [[1, 2, 3]]], [[[1, 2], [1, 2, 3]]]):
        records = [{"step": step, "expert_load": load} for step, load in enumerate(loads)]
        with pytest.raises(ValueError, match=r"expert_load must be \[layers\]\[E\] with one size"):
            draw_expert_load(records, tmp_path / "load.png")


def test_pictures_read_a_sample_of_a_long_log(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = [{"step": step, "loss": 1.0, "expert_load": [[step, 9]]} for step in range(1, 101)]
    whole[4]["eval_loss"] = 2.0
    path.write_text("".join(json.dumps(record) + "\n" for record in whole) + '{"step": 101, "lo')
    assert sample_metrics(path) == whole
    sampled = sample_metrics(path, max_bytes=path.stat().st_size // 10 + 1)
    thinned = {name: value for name, value in whole[4].items() if name != "expert_load"}
    assert sampled == [whole[0], thinned, *whole[10::10]]


def test_command_draws_the_report_anew(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, run_report.__file__, str(tmp_path)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert "metrics.jsonl" in refused.stderr
    assert "Traceback" not in refused.stderr
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null, "expert_load": [[2, 0]]}\n')
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (drawn.returncode, drawn.stdout.strip()) == (0, str(tmp_path / "report.png")), drawn.stderr
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_summary_table_is_a_box_with_the_figures() -> None:
    options: dict[str, Any] = {"num_steps": 1200, "num_tokens": 614400, "seconds": 192.0, "train_loss": 1.5}
    options |= {"unigram_nats": 3.2, "load_imbalance": [1.25, 1.5], "files": [Path("runs/loss.png"), "runs/a"]}
    assert summary_table(heldout_loss=2 * math.log(2), **options).splitlines() == [
        "+---------------------------------------+",
        "| steps             1,200               |",
        "| tokens            614,400             |",
        "| time              0:03:12             |",
        "| tokens/s          3,200               |",
        "| training loss     1.500 nats per byte |",
        "| held-out loss     1.386 nats per byte |",
        "| unigram baseline  3.200 nats per byte |",
        "| bits per byte     2.000 (held-out)    |",
        "| max/mean load     1.25  1.50          |",
        "| file written      runs/loss.png       |",
        "| file written      runs/a              |",
        "+---------------------------------------+",
    ]
    unevaluated = summary_table(heldout_loss=None, **options)
    assert "held-out loss     not evaluated " in unevaluated
    assert "bits per byte     2.164 (training)" in unevaluated
