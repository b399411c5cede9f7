"""Forward + backward time and saved bytes of one MoE layer on the CPU, beside the GEMM floors and optional peers.

Legend: `T` tokens, `H` hidden, `F` expert FFN width, `E` experts, `K` top-k, `R` = T * K routed rows.
The layer is SwiGLU without bias, with a softmax over the selected logits. README.md explains the columns.
As a module this file offers `build` and `set_weights`, the interface that `--peer NAME=MODULE` expects of a peer.
"""

import argparse
import datetime
import gc
import importlib
import itertools
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe import MoEConfig, MoELayer

Shape = namedtuple("Shape", ["tokens", "hidden", "ffn", "experts", "topk"])  # T, H, F, E, K
SHAPES = {
    "S0": Shape(512, 256, 256, 8, 2),
    "S1": Shape(2048, 512, 1408, 8, 2),
    "S2": Shape(2048, 512, 256, 32, 4),
    "S3": Shape(2048, 512, 256, 64, 8),
    "S4": Shape(2048, 512, 256, 128, 8),
    "S5": Shape(4096, 1024, 704, 8, 2),
    "S6": Shape(4096, 1024, 512, 64, 4),
    "S7": Shape(4096, 1024, 256, 128, 8),
    "S8": Shape(4096, 512, 1408, 32, 2),
    "tiny": Shape(60, 32, 24, 6, 2),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KIND = "softmax_post"
FLOORS = ("dense", "loop", "fp32 loop")
FIGURES = ("saved_bytes_per_token", "saved_rows", "saved_of_stated", "max_abs_dy", "median_abs_dy")  # not of floors
Gemm = tuple[Tensor, Tensor, Tensor]  # left [m, k], right [k, n], out [m, n]
Forward = Callable[[Tensor], Tensor]  # [T, H] -> [T, H]
Candidates = dict[str, tuple[nn.Module, Forward]]
Timers = dict[str, Callable[[], float]]  # each returns seconds


def build(
    kind: str, hidden: int, ffn: int, experts: int, topk: int, dtype: torch.dtype, seed: int = 0
) -> tuple[nn.Module, Forward]:
    """Return this library's layer and its forward function on [T, H] or [S, B, H].

    Raises:
        ValueError: `kind` is not "softmax_post", the one routing that is compared.
    """
    if kind != KIND:
        raise ValueError(f"kind ({kind!r}) must be {KIND!r}, the one routing that is compared.")
    sizes = {"hidden_size": hidden, "num_moe_experts": experts, "moe_ffn_hidden_size": ffn, "moe_router_topk": topk}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = MoELayer(MoEConfig(**sizes, params_dtype=dtype, moe_router_fusion=True))

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


def count_saved_bytes(function: Callable[[], Tensor], exclude: Iterable[Tensor]) -> tuple[Tensor, int]:
    """Return a function's output and the bytes of the distinct storages that its live graph keeps for backward.

    A storage counts once and as a whole; those of `exclude` (parameters) do not count. Not seen: tensors that an
    autograd function holds as attributes instead of by `save_for_backward`.
    """
    references: list[weakref.ref[Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept = tensor.detach()  # held by the graph alone, so it dies with it
        references.append(weakref.ref(kept))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        output = function()
    storages = [kept.untyped_storage() for reference in references if (kept := reference()) is not None]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    excluded = {tensor.untyped_storage().data_ptr() for tensor in exclude}
    return output, sum(size for address, size in sizes.items() if address not in excluded)


def make_weights(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Return canonical weights, drawn in fp32 and rounded to `dtype`, so that every dtype has the same values."""
    _, hidden, ffn, experts, _ = shape
    sizes = {"router.weight": (experts, hidden), "fc1": (experts, 2 * ffn, hidden), "fc2": (experts, hidden, ffn)}
    draws = {name: torch.randn(size, generator=generator) / math.sqrt(size[-1]) for name, size in sizes.items()}
    return {name: weight.to(dtype) for name, weight in draws.items()}


def floor_gemms(weights: dict[str, Tensor], counts: Sequence[int], generator: torch.Generator) -> dict[str, list[Gemm]]:
    """Return the GEMMs of a forward and backward over random rows, with outputs in place.

    "dense": six GEMMs over all R rows with the first expert's weights. "loop": the same six, cut into one expert-major
    span of rows an expert by the `counts` of tokens; an expert without tokens has none.
    """
    fc1, fc2 = weights["fc1"], weights["fc2"]
    rows, widths = sum(counts), (fc1.shape[2], fc2.shape[2], fc1.shape[1], fc2.shape[1])  # R, (H, F, 2F, H)
    x, act, fc1_grad, y_grad = (torch.randn(rows, width, generator=generator).to(fc1.dtype) for width in widths)
    fc1_out, y, x_grad, act_grad = (torch.empty_like(t) for t in (fc1_grad, y_grad, x, act))
    fc1_wgrad, fc2_wgrad = torch.empty_like(fc1), torch.empty_like(fc2)

    def six(span: slice, expert: int) -> list[Gemm]:
        return [
            (x[span], fc1[expert].t(), fc1_out[span]),  # [n, H] @ [H, 2F]
            (act[span], fc2[expert].t(), y[span]),  # [n, F] @ [F, H]
            (y_grad[span], fc2[expert], act_grad[span]),  # [n, H] @ [H, F]
            (y_grad[span].t(), act[span], fc2_wgrad[expert]),  # [H, n] @ [n, F]
            (fc1_grad[span], fc1[expert], x_grad[span]),  # [n, 2F] @ [2F, H]
            (fc1_grad[span].t(), x[span], fc1_wgrad[expert]),  # [2F, n] @ [n, H]
        ]

    ends = enumerate(itertools.accumulate(counts))
    spans = [(slice(end - counts[expert], end), expert) for expert, end in ends if counts[expert]]
    return {"dense": six(slice(0, rows), 0), "loop": [gemm for span in spans for gemm in six(*span)]}


def run_gemms(gemms: list[Gemm], compute_dtype: torch.dtype) -> None:
    """Multiply into the outputs; operands of another dtype are cast for each GEMM and the result is rounded back."""
    for left, right, out in gemms:
        if out.dtype == compute_dtype:
            torch.mm(left, right, out=out)
        else:
            out.copy_(torch.mm(left.to(compute_dtype), right.to(compute_dtype)))


def time_step(module: nn.Module, forward: Forward, x: Tensor, y_grad: Tensor) -> float:
    """Return the seconds of one forward and backward; x needs a gradient, parameter gradients start as None."""
    module.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    return time_call(lambda: forward(x).backward(y_grad))


def time_call(function: Callable[..., object], *arguments: object) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def summarize(name: str, times: dict[str, list[float]], floors: Iterable[str], tokens: int) -> dict[str, Any]:
    """Return median and spread of the times, and the median over the rounds of floor / time."""
    seconds = times[name]
    ratios = {floor: [a / b for a, b in zip(times[floor], seconds, strict=True)] for floor in floors}
    return {
        "ms_median": 1e3 * statistics.median(seconds),
        "ms_min": 1e3 * min(seconds),
        "ms_max": 1e3 * max(seconds),
        "tokens_per_second": tokens / statistics.median(seconds),
        "share_of_floor": {floor: statistics.median(values) for floor, values in ratios.items()},
    }


def measure(label: str, floors: Timers, steps: Timers, rounds: int) -> dict[str, list[float]]:
    """Time floors and steps, interleaved and rotated by one place a round; return the seconds by name.

    A floor that takes over a second and ten times the fastest one (bf16 without bf16 instructions) is timed once
    and stands for every round.
    """
    for timer in floors.values():
        timer()
    first = {name: timer() for name, timer in floors.items()}
    slow = {name for name, seconds in first.items() if seconds > max(1.0, 10 * min(first.values()))}
    times = {name: [first[name]] * rounds if name in slow else [] for name in (*floors, *steps)}
    calls = [(name, timer) for name, timer in (floors | steps).items() if name not in slow]
    for index in range(rounds):
        gc.collect()
        start = index % len(calls)
        for name, call in calls[start:] + calls[:start]:
            times[name].append(call())
        latest = ", ".join(f"{name} {1e3 * times[name][-1]:.2f}" for name, _ in calls)
        print(f"{label} round {index + 1}/{rounds}, ms: {latest}", file=sys.stderr, flush=True)
    return times


def build_candidates(shape: Shape, weights: dict[str, Tensor], options: argparse.Namespace) -> Candidates:
    """Build this file's layer as "moe", then the peers, all with the same weights."""
    candidates = {}
    for name, (module_name, kind) in {"moe": (__name__, KIND), **options.peers}.items():
        source = importlib.import_module(module_name)
        module, forward = source.build(kind, *shape[1:], weights["fc1"].dtype, options.seed)
        source.set_weights(module, weights)
        candidates[name] = module, forward
    return candidates


def run_case(shape_name: str, dtype_name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one shape in one dtype; return its sizes and one entry a floor, layer or peer."""
    shape, dtype = SHAPES[shape_name], DTYPES[dtype_name]
    generator = torch.Generator().manual_seed(options.seed)
    weights = make_weights(shape, dtype, generator)
    x, y_grad = (torch.randn(shape.tokens, shape.hidden, generator=generator).to(dtype) for _ in range(2))
    candidates = build_candidates(shape, weights, options)
    with torch.no_grad():
        expected = candidates["moe"][1](x)
        _, routing_map = candidates["moe"][0].router(x.unsqueeze(1))  # [T, 1, H] -> [T, E]
    counts = routing_map.sum(dim=0).tolist()
    gemms = floor_gemms(weights, counts, generator)
    floors = {name: partial(time_call, run_gemms, gemms[name], dtype) for name in ("dense", "loop")}
    if dtype != torch.float32:
        floors["fp32 loop"] = partial(time_call, run_gemms, gemms["loop"], torch.float32)
    rows = shape.tokens * shape.topk
    stated_bytes = (x.numel() + rows * 2 * shape.ffn) * dtype.itemsize + rows * (8 + 4)  # x, fc1 output, ids, probs
    figures: dict[str, dict[str, Any]] = {name: {"kind": "floor"} for name in floors}
    for name, (module, forward) in candidates.items():
        y, saved_bytes = count_saved_bytes(partial(forward, x.detach().requires_grad_()), module.parameters())
        y.backward(y_grad)
        distance = (y.detach().float() - expected.float()).abs().amax(dim=1)  # [T, H] -> [T]
        figures[name] = {
            "kind": "peer" if name in options.peers else "layer",
            "saved_bytes": saved_bytes,
            "saved_bytes_per_token": saved_bytes / shape.tokens,
            "saved_rows": saved_bytes / (rows * shape.hidden * dtype.itemsize),
            "saved_of_stated": saved_bytes / stated_bytes,
            "max_abs_dy": distance.max().item(),
            "median_abs_dy": distance.median().item(),
        }
    steps = {name: partial(time_step, *candidate, x, y_grad) for name, candidate in candidates.items()}
    times = measure(f"{shape_name} {dtype_name}", floors, steps, options.rounds)
    entries = [{"name": name, **figures[name], **summarize(name, times, floors, shape.tokens)} for name in times]
    case = {"shape": shape_name, "dtype": dtype_name, **shape._asdict(), "stated_bytes": stated_bytes}
    return case | {"tokens_per_expert_min": min(counts), "tokens_per_expert_max": max(counts), "entries": entries}


def describe_run(options: argparse.Namespace) -> dict[str, Any]:
    """Return what a reader needs to judge the figures: machine, versions, date, command, settings."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())}
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "bf16_instructions": " ".join(flag for flag in fields.get("flags", "").split() if "bf16" in flag) or "none",
        "threads": f"{torch.get_num_threads()} on {os.cpu_count()} cores",
        "torch": f"{torch.__version__}, Python {platform.python_version()}",
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("MALLOC_", "OMP_", "MKL_"))},
        "settings": f"{options.rounds} rounds, seed {options.seed}",
    }


def format_row(case: dict[str, Any], entry: dict[str, Any]) -> dict[str, str]:
    """Return one line of the table, heading -> cell."""
    spread = f"{entry['ms_min']:.2f}..{entry['ms_max']:.2f}" if entry["ms_min"] < entry["ms_max"] else "once"
    cells = {
        "shape": case["shape"],
        "dtype": case["dtype"],
        "what": entry["name"] + (" floor" if entry["kind"] == "floor" else ""),
        "ms median (min..max)": f"{entry['ms_median']:.2f} ({spread})",
        "tokens/s": f"{entry['tokens_per_second']:.0f}",
    }
    for floor in FLOORS:
        share = entry["share_of_floor"].get(floor)
        cells[f"of {floor}"] = "-" if share is None else f"{share:.2f}"
    for name in FIGURES:
        value = entry.get(name)
        cells[name.replace("_", " ")] = "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return cells


def format_report(report: dict[str, Any]) -> str:
    """Return machine, sizes and table as Markdown whose columns are aligned."""
    header = [f"- {key.replace('_', ' ')}: {value}" for key, value in report["run"].items()]
    for case in report["cases"]:
        sizes = ", ".join(f"{name} {case[name]}" for name in Shape._fields)
        spread = f"{case['tokens_per_expert_min']}..{case['tokens_per_expert_max']}"
        header.append(f"- {case['shape']} {case['dtype']}: {sizes}, tokens per expert {spread}")
    table = [format_row(case, entry) for case in report["cases"] for entry in case["entries"]]
    rows = [list(table[0]), *(list(cells.values()) for cells in table)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return "\n".join([*header, "", *lines, ""])


def parse_peer(text: str) -> tuple[str, tuple[str, str]]:
    """Parse NAME=MODULE[:KIND] into (name, (module name, kind))."""
    name, _, target = text.partition("=")
    module_name, _, kind = target.partition(":")
    if not module_name or name in ("", "moe", *FLOORS):
        raise argparse.ArgumentTypeError(f"peer ({text!r}) must be NAME=MODULE[:KIND] with a name of its own.")
    return name, (module_name, kind or KIND)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=["S3", "S5"])
    add("--tiny", dest="shapes", action="store_const", const=["tiny"], help="the shape `tiny` alone: a smoke test")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    add("--rounds", type=int, default=7, help="timed rounds a case")
    add("--threads", type=int, default=torch.get_num_threads(), help="torch's intra-op threads")
    add("--seed", type=int, default=0, help="of weights and inputs")
    add("--peer", dest="peers", action="append", default=[], type=parse_peer, metavar="NAME=MODULE[:KIND]")
    add("--json", type=Path, help="write everything here")
    add("--markdown", type=Path, help="write the table here")
    options = parser.parse_args(arguments)
    names = [name for name, _ in options.peers]
    if len(set(names)) < len(names) or options.rounds < 1:
        parser.error(f"--peer names ({names}) must differ, and --rounds ({options.rounds}) must be at least 1.")
    options.peers = dict(options.peers)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case, print the table, and write the files that were asked for after each case."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {"run": describe_run(options), "cases": []}
    for shape_name, dtype_name in itertools.product(options.shapes, options.dtypes):
        report["cases"].append(run_case(shape_name, dtype_name, options))
        for path, text in ((options.json, json.dumps(report, indent=1)), (options.markdown, format_report(report))):
            if path:
                path.write_text(text)
    print(format_report(report))


if __name__ == "__main__":
    main()
