"""What a training run shows while it runs and leaves behind: progress bar, metrics log, pictures, closing table.

    python examples/run_report.py RUN_DIR        draws RUN_DIR/report.png anew from RUN_DIR/metrics.jsonl

Used by rank 0 alone. A record is a dict, one a step: step, loss, lr, grad_norm, tokens_per_s, aux_loss and its like,
bytes by kind and, after an evaluation, eval_loss; a list with a number a MoE layer: load_imbalance, load_entropy,
normalized_load_entropy, num_dead_experts, drop_rate, pad_share; expert_load (E token counts a MoE layer). Losses are
nats per byte, tokens_per_s is over all ranks; the rest is as `moe.MoEMetrics` has it.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from run_picture import MAX_COLUMNS, Record, draw_report, new_figure

MAX_BYTES = 64 * 2**20  # of a log that pictures read in full; of a longer one they read every n-th record


class ProgressBar:
    """One line on the state of the run: redrawn in place on a terminal, else printed at every 5 % of the steps.

    Args:
        total_steps: step at which the run ends.
        first_step: steps done before this run, when it resumes.
        stream: where to write; standard error if None.
    """

    def __init__(self, total_steps: int, first_step: int = 0, stream: TextIO | None = None) -> None:
        self.total_steps = total_steps
        self.first_step = first_step
        self.stream = sys.stderr if stream is None else stream
        self._started = time.monotonic()
        self._print_interval = max(1, math.ceil((total_steps - first_step) / 20))
        self._eval_loss: float | None = None
        self._line_length = 0  # characters of the line that stands on the terminal

    def update(
        self,
        step: int,
        *,
        loss: float,
        tokens_per_s: float,
        imbalance: float,
        eval_loss: float | None = None,
        num_dead_experts: int = 0,
        drop_rate: float = 0.0,
    ) -> None:
        """Show the state after `step` steps, counted from the start of training; the last eval_loss stays in view.

        Dead experts, over all layers, and the drop rate are shown where they are above 0.
        """
        self._eval_loss = self._eval_loss if eval_loss is None else eval_loss
        seconds_per_step = (time.monotonic() - self._started) / max(1, step - self.first_step)
        time_left = timedelta(seconds=round(seconds_per_step * (self.total_steps - step)))
        held_out = "" if self._eval_loss is None else f" | held-out {self._eval_loss:.3f}"
        dead = f" | dead experts {num_dead_experts}" if num_dead_experts else ""
        dropped = f" | dropped {drop_rate:.1%}" if drop_rate else ""
        text = (
            f"step {step}/{self.total_steps} | loss {loss:.3f}{held_out} | {tokens_per_s:,.0f} tokens/s"
            f" | max/mean load {imbalance:.2f}{dead}{dropped} | ETA {time_left}"
        )
        done = step / max(1, self.total_steps)
        if self.stream.isatty():
            columns = shutil.get_terminal_size().columns - 1  # a full last column would wrap the line
            bar_width = min(30, columns - len(text) - 3)
            bar = f"[{'#' * int(done * bar_width):-<{bar_width}}] " if bar_width >= 5 else ""
            line = (bar + text)[:columns]
            print("\r" + line.ljust(min(self._line_length, columns)), end="", file=self.stream, flush=True)
            self._line_length = len(line)
        elif (step - self.first_step) % self._print_interval == 0 or step == self.total_steps or eval_loss is not None:
            print(f"{int(100 * done):3}% | {text}", file=self.stream, flush=True)

    def close(self) -> None:
        """End the line on a terminal, so that what follows starts on a line of its own."""
        if self._line_length:
            print(file=self.stream, flush=True)
            self._line_length = 0


class RunLog:
    """Appends records to directory/metrics.jsonl, a JSON line each, and mirrors them to directory/tensorboard.

    A line that a crash tore is removed when the log is opened. A run, new or resumed, first calls `truncate_after` with
    the number of steps done so far; then the file has each step once. The directory is made if it is missing. With
    use_tensorboard but without its package, a line on standard error says how to get it.
    """

    def __init__(self, directory: str | Path, *, use_tensorboard: bool) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.path = self.directory / "metrics.jsonl"
        self._writer_class: Any = None
        self._writer: Any = None
        if use_tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter

                self._writer_class = SummaryWriter
            except ImportError:
                print('no TensorBoard log; for one: pip install "moe-pipeline[plots]".', file=sys.stderr)
        self._last_step: int | None = None
        self._replace(iterate_metrics(self.path) if self.path.exists() else [])

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record and flush it; NaN and infinity become null.

        Raises:
            ValueError: the log has this step or a later one already.
        """
        step = record["step"]
        if self._last_step is not None and step <= self._last_step:
            last = f"the last one ({self._last_step}) in {self.path}"
            raise ValueError(f"step ({step}) must be greater than {last}; call truncate_after({step - 1}) first.")
        finite = {name: _finite_or_none(value) for name, value in record.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()
        self._last_step = step
        if self._writer_class is not None:
            self._mirror(finite)

    def truncate_after(self, step: int) -> None:
        """Drop the records of later steps; 0 empties the log."""
        self.close()
        self._replace(record for record in iterate_metrics(self.path) if record["step"] <= step)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _replace(self, records: Iterable[Record]) -> None:
        """Make the file hold these records and open it to append; a crash leaves the old file or the new one."""
        scratch = self.path.with_suffix(".partial")
        self._last_step = None
        with scratch.open("w", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record) + "\n")
                self._last_step = record["step"]
        scratch.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def _mirror(self, record: Record) -> None:
        if self._writer is None:  # purge_step hides what an earlier run wrote for this step and later ones
            folder = self.directory / "tensorboard"
            self._writer = self._writer_class(str(folder), purge_step=record["step"], flush_secs=10)
        scalars = dict(record)
        for name, values in record.items():
            if isinstance(values, list):
                scalars |= {f"{name}/moe_layer_{layer}": value for layer, value in enumerate(values, start=1)}
        for name, value in scalars.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, record["step"])


def iterate_metrics(path: str | Path) -> Iterator[Record]:
    """Yield the records of a metrics.jsonl, in order, without a last line that a crash tore.

    Raises:
        ValueError: a line is no record, and not for being torn.
    """
    for _, record in _parse_lines(Path(path), 1):
        yield record


def read_metrics(path: str | Path) -> list[Record]:
    """Return all that `iterate_metrics` yields."""
    return list(iterate_metrics(path))


def sample_metrics(path: str | Path, max_bytes: int = MAX_BYTES) -> list[Record]:
    """Return the records of a metrics.jsonl for pictures, whose time and memory stay bounded however long it is.

    Up to max_bytes, all of them. Of a longer one every n-th, which are about max_bytes, and what lies between only
    where it has an eval_loss: then without lists.

    Raises:
        ValueError: as `iterate_metrics`, for the lines that are read.
    """
    stride = math.ceil(Path(path).stat().st_size / max_bytes)
    records = []
    for number, record in _parse_lines(Path(path), max(1, stride)):
        is_whole = stride <= 1 or number % stride == 0
        records.append(record if is_whole else {key: value for key, value in record.items() if type(value) is not list})
    return records


def _parse_lines(path: Path, stride: int) -> Iterator[tuple[int, Record]]:
    """Yield (number from 0, record) of every stride-th line and of those with an eval_loss."""
    with path.open("rb") as file:
        line, number = file.readline(), -1
        while line:
            following, number = file.readline(), number + 1
            if number % stride == 0 or b'"eval_loss"' in line:
                record = _parse(line)
                if record is not None:
                    yield number, record
                elif following or _is_json(line):
                    text = line.decode(errors="replace").strip()[:40]
                    raise ValueError(
                        f"{path}, line {number + 1} ({text!r}) must be a JSON object with a step; remove it."
                    )
            line = following


def _is_json(line: bytes) -> bool:
    """Whether a line is JSON of any kind."""
    try:
        json.loads(line.decode(errors="replace"))
    except json.JSONDecodeError:
        return False
    return True


def _parse(line: bytes) -> Record | None:
    """Return the record of a line, None if it is none."""
    record = json.loads(line.decode(errors="replace")) if _is_json(line) else None
    return record if isinstance(record, dict) and "step" in record else None


def draw_loss(records: Sequence[Record], path: str | Path, unigram_nats: float | None = None) -> None:
    """Draw the loss over the steps as a PNG: training, held-out, and what byte frequencies alone (unigram_nats) reach.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no record has a loss; single steps without one leave a gap.
    """
    figure = new_figure("draw_loss")
    import numpy as np

    steps = [record["step"] for record in records]
    loss = np.array([record.get("loss") for record in records], dtype=float)  # None becomes NaN
    known = np.isfinite(loss)
    if not known.any():
        raise ValueError(f"records ({len(records)}) must hold at least one loss; there is nothing to draw.")
    window = np.ones(2 * min(len(loss) // 60 + 1, (len(loss) - 1) // 2) + 1)
    num_known = np.convolve(known, window, "same")
    total = np.convolve(np.where(known, loss, 0.0), window, "same")
    smooth = np.where(num_known > 0, total / np.maximum(num_known, 1), np.nan)

    axes = figure.add_subplot()
    marker = "." if len(loss) < 30 else ""
    axes.plot(steps, loss, color="#2f6db3", marker=marker, linewidth=0.8, alpha=0.4, label="training, each record")
    axes.plot(steps, smooth, color="#2f6db3", linewidth=2.0, label=f"training, running mean of {len(window)}")
    held_out = [(record["step"], record["eval_loss"]) for record in records if record.get("eval_loss") is not None]
    if held_out:
        label = f"held-out, last {held_out[-1][1]:.3f}"
        axes.plot(*zip(*held_out, strict=True), "o-", color="#c8501e", markersize=5, linewidth=1.0, label=label)
    if unigram_nats is not None:
        axes.axhline(unigram_nats, color="0.4", linestyle="--", label=f"byte frequencies alone, {unigram_nats:.3f}")
    axes.set(title="Loss while training", xlabel="step", ylabel="cross-entropy, nats per byte")
    in_bits = axes.secondary_yaxis("right", functions=(lambda y: y / math.log(2), lambda y: y * math.log(2)))
    in_bits.set_ylabel("bits per byte")
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(path, dpi=140)


def draw_expert_load(records: Sequence[Record], path: str | Path) -> None:
    """Draw each MoE layer's share of tokens x E as a PNG, experts x steps: white balanced, red more, blue less.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no record has an expert_load, or they differ in layers or experts.
    """
    figure = new_figure("draw_expert_load")
    import numpy as np
    from matplotlib.colors import TwoSlopeNorm

    loads = {record["step"]: record["expert_load"] for record in records if record.get("expert_load")}
    sizes = {tuple(map(len, load)) for load in loads.values()}
    if len(sizes) != 1 or len(set(*sizes)) != 1:
        raise ValueError(f"expert_load must be [layers][E] with one size in all records; it is {sorted(sizes)}.")
    steps = list(loads)
    starts = np.unique(np.linspace(0, len(steps), min(len(steps), MAX_COLUMNS), endpoint=False).astype(int))
    counts = np.add.reduceat(np.array(list(loads.values()), dtype=float), starts)  # [columns, layers, E]
    totals = counts.sum(-1, keepdims=True)
    relative = counts * counts.shape[-1] / np.where(totals > 0, totals, np.nan)
    norm = TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=max(2.0, np.percentile(np.nan_to_num(relative), 99.8)))
    step_edges = [steps[start] - 0.5 for start in starts] + [steps[-1] + 0.5]
    expert_edges = np.arange(counts.shape[-1] + 1) - 0.5

    num_layers = counts.shape[1]
    num_columns = 1 if num_layers <= 4 else 2 if num_layers <= 12 else 4
    num_rows = math.ceil(num_layers / num_columns)
    figure.set_size_inches(4.0 + 4.0 * num_columns, 1.2 + 1.7 * num_rows)
    grid = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[num_layers:]:
        axes.set_visible(False)
    for layer, axes in enumerate(grid.flat[:num_layers]):
        image = axes.pcolormesh(step_edges, expert_edges, relative[:, layer].T, cmap="RdBu_r", norm=norm)
        axes.set_title(f"MoE layer {layer + 1}", fontsize=10, loc="left")
        axes.locator_params(nbins=5, integer=True)
        axes.set_ylabel("expert" if layer % num_columns == 0 else "")
        if layer + num_columns >= num_layers:
            axes.set_xlabel("step")
            axes.tick_params(labelbottom=True)
    figure.colorbar(image, ax=grid, label="share of tokens x E", extend="max", pad=0.02, aspect=12 * num_rows)
    figure.suptitle("Expert load while training (1 = balanced)")
    figure.savefig(path, dpi=140)


def summary_table(
    *,
    num_steps: int,
    num_tokens: int,
    seconds: float,
    train_loss: float,
    heldout_loss: float | None,
    unigram_nats: float,
    load_imbalance: Sequence[float],
    files: Sequence[str | Path],
) -> str:
    """Return the box of text that ends a run; tokens are over all ranks, losses in nats per byte."""
    measured, text_name = (train_loss, "training") if heldout_loss is None else (heldout_loss, "held-out")
    rows = [
        ("steps", f"{num_steps:,}"),
        ("tokens", f"{num_tokens:,}"),
        ("time", str(timedelta(seconds=round(seconds)))),
        ("tokens/s", f"{num_tokens / seconds:,.0f}" if seconds > 0 else "?"),
        ("training loss", f"{train_loss:.3f} nats per byte"),
        ("held-out loss", "not evaluated" if heldout_loss is None else f"{heldout_loss:.3f} nats per byte"),
        ("unigram baseline", f"{unigram_nats:.3f} nats per byte"),
        ("bits per byte", f"{measured / math.log(2):.3f} ({text_name})"),
    ]
    loads = [f"{imbalance:.2f}" for imbalance in load_imbalance]
    rows += [("max/mean load", "  ".join(loads[first : first + 8])) for first in range(0, len(loads), 8)]
    rows += [("file written", str(file)) for file in files]
    lines = [f"{name:<16}  {value}" for name, value in rows]
    width = max(map(len, lines))
    border = f"+{'-' * (width + 2)}+"
    return "\n".join([border, *(f"| {line:<{width}} |" for line in lines), border])


def _finite_or_none(value: Any) -> Any:
    """Return value as JSON has it: tensors as lists, NaN and infinity as None, in lists too."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_finite_or_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main() -> None:
    """Draw the report of the run in the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Draw report.png of a run from its metrics.jsonl.")
    parser.add_argument("run_dir", type=Path, help="folder that holds metrics.jsonl")
    folder = parser.parse_args().run_dir
    try:
        draw_report(sample_metrics(folder / "metrics.jsonl"), folder / "report.png", folder.resolve().name)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))
    print(folder / "report.png")


if __name__ == "__main__":
    main()
