"""Expert parallelism on gloo ranks: forward + backward of this library's MoE layer beside megatron-core's.

Each of EP ranks is a process of one thread with T tokens of its own and E / EP experts. In every round each layer runs
once, all ranks starting together behind a barrier, and the order rotates by one place a round. A time is that of the
slowest rank; a ratio is theirs / ours of one round, so other load on the machine mostly cancels out. Before anything is
timed, outputs and input gradients of all layers are compared on every rank.

Legend: `T` tokens of a rank, `H` hidden, `F` expert FFN width, `E` experts, `K` top-k, `EP` ranks.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.expert_parallel_ranks import PEER, Case, find_peer, measure_all  # noqa: E402
from benchmarks.floors import DTYPES, SHAPES  # noqa: E402
from benchmarks.report import RESULTS, describe_run, format_run, write_named_report  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

COLUMNS = (
    "shape|dtype|EP|layer|ms median (min..max)|theirs / ours, median (min..max)|rounds faster|max abs dy|max abs ddx"
)


def summarize(case: Case, num_ranks: int, by_rank: Sequence[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return an entry for each layer: what its slowest rank took in each round, and by how much theirs took longer."""
    slowest = {
        name: [max(times) for times in zip(*(entries[name]["seconds"] for entries in by_rank), strict=True)]
        for name in by_rank[0]
    }
    found = []
    for name, seconds in slowest.items():
        entry: dict[str, Any] = {"shape": case.shape, "dtype": case.dtype, "ep": num_ranks, "layer": name}
        entry |= {"ms": [1e3 * value for value in seconds]}
        for key in ("max_abs_dy", "max_abs_ddx", "largest_dy", "largest_ddx"):
            entry[key] = max(entries[name][key] for entries in by_rank)
        if PEER in slowest and name != PEER:
            entry["ratios"] = [theirs / ours for theirs, ours in zip(slowest[PEER], seconds, strict=True)]
        found.append(entry)
    return found


def spread(values: Sequence[float], digits: int) -> str:
    """Return median (min..max)."""
    median, low, high = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{median} ({low}..{high})"


def format_table(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Return an aligned Markdown table."""
    lines = [COLUMNS.split("|")]
    for entry in entries:
        cells = [str(entry[key]) for key in ("shape", "dtype", "ep", "layer")] + [spread(entry["ms"], 1)]
        ratios = entry.get("ratios")
        won = "-" if ratios is None else f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"
        cells += ["-" if ratios is None else spread(ratios, 2), won]
        lines.append(cells + [f"{entry[key]:.1e}" for key in ("max_abs_dy", "max_abs_ddx")])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return [f"| {' | '.join(map(str.ljust, cells, widths))} |" for cells in lines]


def describe(options: argparse.Namespace, has_peer: bool) -> dict[str, Any]:
    """Return what a reader needs to judge the figures."""
    run = describe_run(f"{options.rounds} rounds, seed {options.seed}")
    run["threads"] = f"1 a rank, {os.cpu_count()} cores"
    run["megatron-core"] = "left out"
    if has_peer:
        from tests.parity.megatron import load

        run["megatron-core"] = load("package_info").__version__.split("+")[0]
    return run


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=["S2", "S3"], help="of benchmarks/layer.py; T is a rank's")
    add("--dtypes", nargs="+", choices=DTYPES, default=["fp32"])
    add("--ep", nargs="+", type=int, default=[2, 4], help="numbers of ranks")
    add("--rounds", type=int, default=11, help="timed rounds a case")
    add("--seed", type=int, default=0, help="of weights and tokens")
    add("--no-peer", action="store_true", help="leave megatron-core out")
    add(
        "--report",
        nargs="?",
        type=Path,
        const=RESULTS,
        metavar="FOLDER",
        help="write Markdown and JSON, named after hardware and date, to the folder; default: benchmarks/results",
    )
    add("--tiny", action="store_true", help="the shape `tiny`, two rounds, two ranks, no peer: a smoke test")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.shapes, options.rounds, options.ep, options.no_peer = ["tiny"], 2, [2], True
    if options.rounds < 1 or min(options.ep) < 1:
        parser.error(f"--rounds ({options.rounds}) and --ep ({options.ep}) must be at least 1.")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case on every number of ranks, print the table, and write the report if asked to."""
    options = parse_arguments(arguments)
    has_peer = find_peer() and not options.no_peer
    cases = [
        Case(shape=shape, dtype=dtype, rounds=options.rounds, seed=options.seed, peer=has_peer)
        for shape in options.shapes
        for dtype in options.dtypes
    ]
    entries = []
    for num_ranks in options.ep:
        by_rank = run_ranks(measure_all, num_ranks, cases, timeout_s=3600.0, group_timeout_s=600.0)
        for case, *results in zip(cases, *by_rank, strict=True):
            entries += summarize(case, num_ranks, results)
    run = describe(options, has_peer)
    lines = ["# Expert parallelism", "", *format_run(run)]
    lines += [f"- {name}: {SHAPES[name]}" for name in options.shapes] + ["", *format_table(entries)]
    print("\n".join(lines))
    if options.report:
        write_named_report("expert_parallel", options.report, {"run": run, "entries": entries}, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
