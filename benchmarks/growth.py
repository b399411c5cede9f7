"""How the cost of one MoE layer grows with the experts, the tokens and the top-k, beside its GEMM floor.

Legend: `T` tokens, `H` hidden, `F` expert FFN width, `E` experts, `K` top-k. The layer is that of layer.py with the
softmax before the top-k, which K = 1 needs; the floor is its "loop", the same six products cut by the same token counts
and multiplied in the dtype in which the layer multiplies.

Each axis changes one size. All points of an axis are held at once, and in every round each layer and each floor runs
once, so that what slows the machine slows them all. Times are those of forward + backward per token, relative to the
smallest point of the axis in the same round; growth is the median over the rounds.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.floors import DTYPES, Shape, floor_timers, make_weights
from benchmarks.layer import build, set_weights
from benchmarks.report import RESULTS, describe_run, format_run, format_table, report_path, write_named_report
from benchmarks.timing import Timers, Times, measure, ratios, spread, time_step
from moe.gemm import gemm_dtype

BASE = Shape(tokens=2048, hidden=512, ffn=256, experts=64, topk=4)
AXES = {  # axis -> values; the other sizes are BASE's
    "experts": (8, 16, 32, 64, 128, 256),
    "tokens": (256, 512, 1024, 2048, 4096, 8192, 16384),
    "topk": (1, 2, 4, 8, 16),
}
LETTERS = {"experts": "E", "tokens": "T", "topk": "K"}
TINY_BASE = Shape(tokens=40, hidden=32, ffn=24, experts=8, topk=2)
TINY_AXES = {"experts": (4, 8), "tokens": (20, 40, 80), "topk": (1, 2)}


def point_timers(shape: Shape, dtype: torch.dtype, seed: int) -> Timers:
    """Return what times the layer, "moe", and its floor, "loop", at one shape."""
    generator = torch.Generator().manual_seed(seed)
    weights = make_weights(shape, dtype, generator)
    x, y_grad = (torch.randn(shape.tokens, shape.hidden, generator=generator).to(dtype) for _ in range(2))
    layer, forward = build("softmax_pre", *shape[1:], dtype, seed)
    set_weights(layer, weights)
    with torch.no_grad():
        _, routing_map = layer.router(x.unsqueeze(1))  # [T, 1, H] -> [T, E]

    def step() -> float:
        seconds = time_step(layer, forward, x, y_grad)
        layer.zero_grad(set_to_none=True)  # the gradients of all points together would not fit a small machine
        return seconds

    floors = floor_timers(weights, routing_map.sum(dim=0).tolist(), generator)
    multiplied_in = gemm_dtype(dtype, x.device)
    return {"moe": step, "loop": floors["loop" if multiplied_in == dtype else "fp32 loop"]}


def run_axis(axis: str, values: Sequence[int], base: Shape, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every point of an axis; return one entry a point."""
    shapes = [base._replace(**{axis: value}) for value in values]
    points = [point_timers(shape, DTYPES[options.dtype], options.seed) for shape in shapes]
    timers: Timers = {
        f"{name} {value}": timer for value, point in zip(values, points, strict=True) for name, timer in point.items()
    }
    times = measure(f"{axis} {options.dtype}", timers, options.rounds, may_time_once=False)
    return summarize_axis(axis, shapes, times)


def summarize_axis(axis: str, shapes: Sequence[Shape], times: Times) -> list[dict[str, Any]]:
    """Return for each shape of an axis its sizes, times and growth.

    Args:
        axis: the field of Shape that changes.
        shapes: by that field, smallest first.
        times: seconds of "moe VALUE" and "loop VALUE", one a round.

    Returns:
        For each: axis, value, the sizes, and for "moe" and "loop" `us_per_token` and `growth`, both as `spread` gives
        them; `share_of_loop`, the median of floor / time.
    """
    entries = []
    for shape in shapes:
        value = getattr(shape, axis)
        entry = {"axis": axis, "value": value, **shape._asdict()}
        for name in ("moe", "loop"):
            seconds, smallest = times[f"{name} {value}"], times[f"{name} {getattr(shapes[0], axis)}"]
            tokens_ratio = shapes[0].tokens / shape.tokens
            entry[name] = {
                "us_per_token": spread([1e6 * second / shape.tokens for second in seconds]),
                "growth": spread([ratio * tokens_ratio for ratio in ratios(seconds, smallest)]),
            }
        entry["share_of_loop"] = statistics.median(ratios(times[f"loop {value}"], times[f"moe {value}"]))
        entries.append(entry)
    return entries


def format_entry(entry: dict[str, Any]) -> dict[str, str]:
    """Return one line of the table, heading -> cell."""
    layer, floor = entry["moe"], entry["loop"]
    return {
        "axis": LETTERS[entry["axis"]],
        "value": str(entry["value"]),
        "us per token (min..max)": "{median:.2f} ({min:.2f}..{max:.2f})".format(**layer["us_per_token"]),
        "growth (quartiles)": "{median:.2f} ({q1:.2f}..{q3:.2f})".format(**layer["growth"]),
        "floor us per token": f"{floor['us_per_token']['median']:.2f}",
        "floor's growth (quartiles)": "{median:.2f} ({q1:.2f}..{q3:.2f})".format(**floor["growth"]),
        "growth over the floor's": f"{layer['growth']['median'] / floor['growth']['median']:.2f}",
        "of loop": f"{entry['share_of_loop']:.2f}",
    }


def format_report(report: dict[str, Any], base: Shape, picture: str | None = None) -> str:
    """Return machine, sizes and table as Markdown, and the picture where there is one."""
    sizes = ", ".join(f"{field} {value}" for field, value in base._asdict().items())
    lines = [*format_run(report["run"]), f"- sizes that an axis does not change: {sizes}", ""]
    lines += format_table([format_entry(entry) for entry in report["entries"]])
    if picture:
        lines += ["", f"![Growth of the cost per token with E, T and K]({picture})"]
    return "\n".join([*lines, ""])


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw one panel an axis: growth of the layer and of its floor, logarithmic, with the quartiles of the rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    titles = {"experts": "experts E", "tokens": "tokens T", "topk": "top-k K"}
    figure, panels = pyplot.subplots(1, len(titles), figsize=(11, 3.6), sharey=True, layout="constrained")
    for panel, (axis, title) in zip(panels, titles.items(), strict=True):
        entries = [entry for entry in report["entries"] if entry["axis"] == axis]
        values = [entry["value"] for entry in entries]
        for name, label, colour, style in (
            ("moe", "layer, forward + backward", "#1f5fa8", "o-"),
            ("loop", "its GEMM floor", "#8a8a8a", "s--"),
        ):
            growth = [entry[name]["growth"] for entry in entries]
            panel.plot(values, [found["median"] for found in growth], style, color=colour, label=label, markersize=4)
            quartiles = ([found[q] for found in growth] for q in ("q1", "q3"))
            panel.fill_between(values, *quartiles, color=colour, alpha=0.15, linewidth=0)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.set_xticks(values, [f"{value // 1024}k" if value % 1024 == 0 else str(value) for value in values])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(lambda tick, _: f"{tick:g}")
        panel.set_xlabel(title)
        panel.grid(visible=True, alpha=0.3)
        fixed = [f"{letter} {entries[0][other]}" for other, letter in LETTERS.items() if other != axis]
        panel.set_title(", ".join([*fixed, f"H {entries[0]['hidden']}", f"F {entries[0]['ffn']}"]), fontsize=9)
    panels[0].set_ylabel("time per token, smallest = 1")
    panels[0].legend(frameon=False, fontsize=9)
    figure.suptitle(f"{report['run']['cpu']}, {report['run']['settings']}", fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--axes", nargs="+", choices=AXES, default=list(AXES))
    add("--dtype", choices=DTYPES, default="fp32")
    add("--rounds", type=int, default=7, help="timed rounds of each axis")
    add("--threads", type=int, default=torch.get_num_threads(), help="torch's intra-op threads")
    add("--seed", type=int, default=0, help="of weights and inputs")
    add("--tiny", action="store_true", help="small sizes: a smoke test")
    add("--report", action="store_true", help="write growth_HARDWARE_DATE.md, .json and .png (needs matplotlib)")
    add("--results", type=Path, default=RESULTS, help="folder of --report")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds ({options.rounds}) must be at least 1.")
    if options.report and set(options.axes) != set(AXES):
        parser.error(f"--report needs all axes, not {options.axes}: its picture has a panel for each.")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every axis, print the table, and write what was asked for."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    base, axes = (TINY_BASE, TINY_AXES) if options.tiny else (BASE, AXES)
    run = describe_run(f"{options.dtype}, {options.rounds} rounds, seed {options.seed}")
    report: dict[str, Any] = {"run": run, "entries": []}
    for axis in options.axes:
        report["entries"] += run_axis(axis, axes[axis], base, options)
    print(format_report(report, base))
    if options.report:
        path = report_path("growth", options.results, run["date"])
        text = format_report(report, base, f"{path.name}.png")
        write_named_report("growth", options.results, report, text)
        draw(report, path.with_name(f"{path.name}.png"))


if __name__ == "__main__":
    main()
