"""What the experts cost on a CPU that lacks the instructions for their dtype: forward + backward beside fp32.

Legend as in `floors.py`. Each layer holds weights of its own; all take turns in every round, in one process, and a
ratio is the layer's time over that of fp32 in the same round. "bf16 in fp32" and "fp16 in fp32" multiply in fp32 and
round once, as the library does where torch has no fast kernel for the dtype; here they do so on every CPU. The recipes
of FP8 and FP4 round their operands exactly and multiply in fp32.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.floors import SHAPES, Shape
from benchmarks.report import RESULTS, describe_run, format_run, format_table, write_named_report
from benchmarks.timing import OURS, Timers, measure, ratios, spread, time_step
from moe import MoEConfig, MoELayer, expert_loop

LAYERS: dict[str, dict[str, Any]] = {
    OURS: {},  # fp32
    "bf16 in fp32": {"params_dtype": torch.bfloat16},
    "fp16 in fp32": {"params_dtype": torch.float16},
    **{f"fp8 {name}": {"fp8": "e4m3", "fp8_recipe": name} for name in ("tensorwise", "rowwise", "blockwise", "mxfp8")},
    "fp4 nvfp4": {"fp4": "e2m1"},
}


def make_timers(shape: Shape, names: Sequence[str], seed: int) -> Timers:
    """Return what times a forward and backward of each layer."""
    timers: Timers = {}
    sizes = {"hidden_size": shape.hidden, "num_moe_experts": shape.experts, "moe_ffn_hidden_size": shape.ffn}
    for name in names:
        torch.manual_seed(seed)
        config = MoEConfig(**sizes, moe_router_topk=shape.topk, moe_router_fusion=True, **LAYERS[name])
        layer = MoELayer(config)
        x, y_grad = (torch.randn(shape.tokens, 1, shape.hidden).to(config.params_dtype) for _ in range(2))
        timers[name] = partial(time_step, layer, layer, x, y_grad)
    return timers


def measure_case(shape_name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return an entry for each layer: its times in ms and their ratio to fp32, both as spreads."""
    times = measure(shape_name, make_timers(SHAPES[shape_name], options.layers, options.seed), options.rounds)
    return [
        {
            "shape": shape_name,
            "layer": "fp32" if name == OURS else name,
            "ms": spread([1e3 * value for value in seconds]),
            "times_fp32": spread(ratios(seconds, times[OURS])),
        }
        for name, seconds in times.items()
    ]


def format_entry(entry: dict[str, Any]) -> dict[str, str]:
    """Return one line of the table, heading -> cell."""
    ms, ratio = entry["ms"], entry["times_fp32"]
    return {
        "shape": entry["shape"],
        "layer": entry["layer"],
        "ms median (min..max)": f"{ms['median']:.1f} ({ms['min']:.1f}..{ms['max']:.1f})",
        "x fp32 (quartiles)": f"{ratio['median']:.2f} ({ratio['q1']:.2f}..{ratio['q3']:.2f})",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every shape, print the table, and write the report if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=["S1", "S2"], help="shapes of floors.py")
    add("--layers", nargs="+", choices=list(LAYERS)[1:], default=list(LAYERS)[1:], help="beside fp32")
    add("--rounds", type=int, default=9, help="timed rounds of each shape")
    add("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    add("--seed", type=int, default=0, help="of weights and tokens")
    add("--report", action="store_true", help="write Markdown and JSON to --results")
    add("--results", type=Path, default=RESULTS, help="folder of the report")
    add("--tiny", action="store_true", help="two rounds of the smallest shape: a smoke test")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds ({options.rounds}) must be at least 1.")
    if options.tiny:
        options.shapes, options.rounds = ["S0"], 2
    options.layers = [OURS, *options.layers]
    torch.set_num_threads(options.threads)
    expert_loop.gemm_dtype = lambda dtype, device: torch.float32
    entries = [entry for name in options.shapes for entry in measure_case(name, options)]
    run = describe_run(f"{options.rounds} rounds, seed {options.seed}")
    lines = ["# Experts without instructions for their dtype", "", *format_run(run)]
    lines += [f"- {name}: {SHAPES[name]}" for name in options.shapes]
    lines += ["", *format_table([format_entry(entry) for entry in entries])]
    print("\n".join(lines))
    if options.report:
        write_named_report("emulation", options.results, {"run": run, "entries": entries}, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
