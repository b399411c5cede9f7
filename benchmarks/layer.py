"""Forward + backward time and memory of one MoE layer on the CPU, beside the GEMM floors and optional peers.

Legend: `T` tokens, `H` hidden, `F` expert FFN width, `E` experts, `K` top-k, `R` = T * K routed rows.
The layer is SwiGLU without bias, with a softmax over the selected logits. README.md explains the columns.
As a module this file offers `build` and `set_weights`, the interface that `--peer NAME=MODULE` expects of a peer.
"""

import argparse
import importlib
import itertools
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import peers
from benchmarks.accuracy import measure_accuracy
from benchmarks.breakdown import format_breakdown, measure_breakdown
from benchmarks.floors import DTYPES, FLOORS, SHAPES, Shape, floor_timers, make_weights
from benchmarks.memory import count_saved_bytes, measure_peak_bytes
from benchmarks.report import (
    RESULTS,
    describe_run,
    format_run,
    format_table,
    report_path,
    write_reports,
)
from benchmarks.timing import OURS, Forward, measure, summarize, time_step
from moe import MoEConfig, MoELayer

KIND = "softmax_post"
KINDS: dict[str, dict[str, Any]] = {KIND: {}, "softmax_pre": {"moe_router_pre_softmax": True}}
# Of the layer and its peers, not of floors.
FIGURES = (
    "saved_bytes_per_token",
    "saved_rows",
    "saved_of_stated",
    "peak_bytes_per_token",
    "max_abs_dy",
    "median_abs_dy",
)
Candidates = dict[str, tuple[nn.Module, Forward]]


def build(
    kind: str, hidden: int, ffn: int, experts: int, topk: int, dtype: torch.dtype, seed: int = 0
) -> tuple[nn.Module, Forward]:
    """Return this library's layer and its forward function on [T, H] or [S, B, H].

    Raises:
        ValueError: `kind` is neither "softmax_post", which is compared, nor "softmax_pre", which takes K = 1.
    """
    if kind not in KINDS:
        raise ValueError(f"kind ({kind!r}) must be one of {list(KINDS)}.")
    sizes = {"hidden_size": hidden, "num_moe_experts": experts, "moe_ffn_hidden_size": ffn, "moe_router_topk": topk}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = MoELayer(MoEConfig(**sizes, **KINDS[kind], params_dtype=dtype, moe_router_fusion=True))

    def forward(hidden_states: Tensor) -> Tensor:
        return layer(hidden_states.reshape(-1, 1, hidden)).reshape(hidden_states.shape)  # [T, H] -> [T, 1, H] -> [T, H]

    return layer, forward


def set_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy router.weight [E, H], fc1 [E, 2F, H] (F gate rows, then F up rows) and fc2 [E, H, F] into `build`'s layer.

    Raises:
        ValueError: other names than these three.
    """
    router, experts = module.router, module.experts
    targets = {"router.weight": router.weight, "fc1": experts.linear_fc1.weight, "fc2": experts.linear_fc2.weight}
    if weights.keys() != targets.keys():
        raise ValueError(f"weights ({sorted(weights)}) must be exactly {sorted(targets)}.")
    with torch.no_grad():
        for name, parameter in targets.items():
            parameter.copy_(weights[name].reshape(parameter.shape))  # fc1: [E, 2F, H] -> [E, 2, F, H]


def build_candidates(
    shape: Shape, weights: dict[str, Tensor], options: argparse.Namespace
) -> tuple[Candidates, list[str]]:
    """Build this file's layer as "moe", then the peers, all with the same weights; return also who is left out."""
    sources = {OURS: (__name__, KIND), **options.peer}
    sources |= {
        name: (adapter.module, adapter.kind)
        for name, adapter in options.adapters.items()
        if adapter.max_experts is None or shape.experts <= adapter.max_experts
    }
    candidates = {}
    for name, (module_name, kind) in sources.items():
        source = importlib.import_module(module_name)
        module, forward = source.build(kind, *shape[1:], weights["fc1"].dtype, options.seed)
        source.set_weights(module, weights)
        candidates[name] = module, forward
    left_out = [
        f"{name} (over {adapter.max_experts} experts)"
        for name, adapter in options.adapters.items()
        if name not in sources
    ]
    return candidates, left_out


def measure_memory(candidate: tuple[nn.Module, Forward], x: Tensor, y_grad: Tensor) -> dict[str, Any]:
    """Return the bytes that a candidate saves for backward, the peak of one forward and backward, and its output."""
    module, forward = candidate
    y, saved_bytes = count_saved_bytes(partial(forward, x.detach().requires_grad_()), module.parameters())
    y.backward(y_grad)
    peak_bytes = measure_peak_bytes(partial(time_step, *candidate, x, y_grad))
    module.zero_grad(set_to_none=True)
    return {"saved_bytes": saved_bytes, "peak_bytes": peak_bytes, "y": y.detach()}


def describe_candidates(
    candidates: Candidates, shape: Shape, x: Tensor, y_grad: Tensor, stated_bytes: int
) -> dict[str, dict[str, Any]]:
    """Return for each candidate the figures that need no clock.

    Args:
        candidates: of `build_candidates`.
        shape: its sizes.
        x, y_grad: [T, H], input and gradient of the output.
        stated_bytes: what backward needs.
    """
    rows, figures = shape.tokens * shape.topk, {}
    with torch.no_grad():
        expected = candidates[OURS][1](x).float()
    for name, candidate in candidates.items():
        found = measure_memory(candidate, x, y_grad)
        distance = (found["y"].float() - expected).abs().amax(dim=1)  # [T, H] -> [T]
        saved_bytes, peak_bytes = found["saved_bytes"], found["peak_bytes"]
        figures[name] = {
            "kind": "layer" if name == OURS else "peer",
            "saved_bytes": saved_bytes,
            "saved_bytes_per_token": saved_bytes / shape.tokens,
            "saved_rows": saved_bytes / (rows * shape.hidden * x.itemsize),
            "saved_of_stated": saved_bytes / stated_bytes,
            "peak_bytes_per_token": None if peak_bytes is None else peak_bytes / shape.tokens,
            "max_abs_dy": distance.max().item(),
            "median_abs_dy": distance.median().item(),
        }
    return figures


def run_case(shape_name: str, dtype_name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one shape in one dtype; return its sizes and one entry a floor, layer or peer."""
    shape, dtype = SHAPES[shape_name], DTYPES[dtype_name]
    generator = torch.Generator().manual_seed(options.seed)
    weights = make_weights(shape, dtype, generator)
    x, y_grad = (torch.randn(shape.tokens, shape.hidden, generator=generator).to(dtype) for _ in range(2))
    candidates, left_out = build_candidates(shape, weights, options)
    layer, forward = candidates[OURS]
    with torch.no_grad():
        _, routing_map = layer.router(x.unsqueeze(1))  # [T, 1, H] -> [T, E]
    counts = routing_map.sum(dim=0).tolist()
    rows = shape.tokens * shape.topk
    stated_bytes = (x.numel() + rows * 2 * shape.ffn) * dtype.itemsize + rows * (8 + 4)  # x, fc1 output, ids, probs
    figures = describe_candidates(candidates, shape, x, y_grad, stated_bytes)
    floors = floor_timers(weights, counts, generator)
    steps = {name: partial(time_step, *candidate, x, y_grad) for name, candidate in candidates.items()}
    times = measure(f"{shape_name} {dtype_name}", {**floors, **steps}, options.rounds)
    for name, adapter in options.adapters.items():
        if name in figures:
            figures[name]["multiplies_in"] = adapter.multiplies_in or dtype_name
    entries = [
        {"name": name, **figures.get(name, {"kind": "floor"}), **summarize(name, times, floors, shape.tokens)}
        for name in times
    ]
    case = {"shape": shape_name, "dtype": dtype_name, **shape._asdict(), "stated_bytes": stated_bytes}
    case |= {"tokens_per_expert_min": min(counts), "tokens_per_expert_max": max(counts), "left_out": left_out}
    if dtype != torch.float32:
        case["relative_errors"] = measure_accuracy(layer, forward, x, weights)
    if options.breakdown:
        case["breakdown"] = measure_breakdown(layer, forward, x, y_grad, options.rounds)
    return case | {"entries": entries}


def format_row(case: dict[str, Any], entry: dict[str, Any]) -> dict[str, str]:
    """Return one line of the table, heading -> cell."""
    once = entry["ms_min"] == entry["ms_max"]
    cells = {
        "shape": case["shape"],
        "dtype": case["dtype"],
        "what": entry["name"] + (" floor" if entry["kind"] == "floor" else ""),
        "ms median (min..max)": f"{entry['ms_median']:.2f} "
        + ("(once)" if once else f"({entry['ms_min']:.2f}..{entry['ms_max']:.2f})"),
        "ms quartiles": "-" if once else f"{entry['ms_q1']:.2f}..{entry['ms_q3']:.2f}",
        "tokens/s": f"{entry['tokens_per_second']:.0f}",
    }
    for floor in FLOORS:
        share = entry["share_of_floor"].get(floor)
        cells[f"of {floor}"] = "-" if share is None else f"{share:.2f}"
    cells["x ours (quartiles)"] = format_ratio(entry) if entry["kind"] == "peer" else "-"
    for name in FIGURES:
        value = entry.get(name)
        cells[name.replace("_", " ")] = "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return cells


def format_ratio(entry: dict[str, Any]) -> str:
    """Return the median and the quartiles of an entry's time / our time."""
    return "{median:.2f} ({q1:.2f}..{q3:.2f})".format(**entry["times_ours"])


def describe_case(case: dict[str, Any]) -> list[str]:
    """Return what the table does not say: sizes, the best peer, who is left out, errors against fp64."""
    name = f"{case['shape']} {case['dtype']}"
    sizes = ", ".join(f"{field} {case[field]}" for field in Shape._fields)
    lines = [f"{name}: {sizes}, tokens per expert {case['tokens_per_expert_min']}..{case['tokens_per_expert_max']}"]
    all_peers = [entry for entry in case["entries"] if entry["kind"] == "peer"]
    beside = [entry for entry in all_peers if entry.get("multiplies_in", case["dtype"]) == case["dtype"]]
    if beside:
        best = min(beside, key=lambda entry: entry["times_ours"]["median"])
        lines.append(
            f"{name}: the best peer is {best['name']} with {format_ratio(best)} x ours in the same round,"
            f" {best['times_ours']['min']:.2f} at least"
        )
    lines += [
        f"{name}: {entry['name']} multiplies in {entry['multiplies_in']} and does not count among the peers"
        for entry in all_peers
        if entry not in beside
    ]
    if case["left_out"]:
        lines.append(f"{name}: left out {', '.join(case['left_out'])}")
    errors = [
        f"{what} {found['max']:.2e}, {found['median']:.2e}" for what, found in case.get("relative_errors", {}).items()
    ]
    if errors:
        lines.append(f"{name}: a token's |dy| / |y| against fp64 on one routing, max and median: {'; '.join(errors)}")
    return [f"- {line}" for line in lines]


def format_report(report: dict[str, Any]) -> str:
    """Return machine, sizes and tables as Markdown whose columns are aligned."""
    cases = report["cases"]
    lines = format_run(report["run"]) + [line for case in cases for line in describe_case(case)]
    lines += ["", *format_table([format_row(case, entry) for case in cases for entry in case["entries"]])]
    broken_down = [case for case in cases if "breakdown" in case]
    if broken_down:
        lines += ["", "Share of this library's forward + backward that each stage takes:", ""]
        lines += format_table([line for case in broken_down for line in format_breakdown(case)])
    return "\n".join([*lines, ""])


def parse_peer(text: str) -> tuple[str, tuple[str, str]]:
    """Parse NAME=MODULE[:KIND] into (name, (module name, kind))."""
    name, _, target = text.partition("=")
    module_name, _, kind = target.partition(":")
    if not module_name or name in ("", OURS, *FLOORS, *peers.ADAPTERS):
        raise argparse.ArgumentTypeError(f"peer ({text!r}) must be NAME=MODULE[:KIND] with a name of its own.")
    return name, (module_name, kind or KIND)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=["S3", "S5"])
    add("--tiny", dest="shapes", action="store_const", const=["tiny"], help="the shape `tiny` alone: a smoke test")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    add("--rounds", type=int, default=7, help="timed rounds a case")
    add("--threads", type=int, default=torch.get_num_threads(), help="torch's intra-op threads")
    add("--seed", type=int, default=0, help="of weights and inputs")
    known = ", ".join(["all", *peers.PACKAGES, *peers.ADAPTERS])
    add("--peers", nargs="+", default=[], metavar="NAME", help=f"compare with these: {known}")
    add("--peer", action="append", default=[], type=parse_peer, metavar="NAME=MODULE[:KIND]")
    add("--breakdown", action="store_true", help="also the share of each stage in this library's layer")
    add("--report", action="store_true", help="write layer_HARDWARE_DATE.md and .json to --results")
    add("--results", type=Path, default=RESULTS, help="folder of --report")
    add("--json", type=Path, help="also write everything here")
    add("--markdown", type=Path, help="also write the table here")
    return parser


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; exit with 2 where it is wrong or a peer is not installed."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    names = [name for name, _ in options.peer]
    if len(set(names)) < len(names) or options.rounds < 1:
        parser.error(f"--peer names ({names}) must differ, and --rounds ({options.rounds}) must be at least 1.")
    try:
        options.adapters = peers.choose(options.peers)
        options.versions = peers.versions(options.adapters)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    options.peer = dict(options.peer)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case, print the tables, and write the files that were asked for after each case."""
    warnings.filterwarnings("ignore")  # of the peers
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    run = describe_run(f"{options.rounds} rounds, seed {options.seed}")
    if options.versions:
        run["peers"] = ", ".join(f"{package} {version}" for package, version in options.versions.items())
    paths = [options.json, options.markdown]
    if options.report:
        path = report_path("layer", options.results, run["date"])
        paths += [path.with_name(path.name + ending) for ending in (".md", ".json")]
    report: dict[str, Any] = {"run": run, "cases": []}
    for shape_name, dtype_name in itertools.product(options.shapes, options.dtypes):
        report["cases"].append(run_case(shape_name, dtype_name, options))
        write_reports(paths, report, format_report(report))
    print(format_report(report))


if __name__ == "__main__":
    main()
