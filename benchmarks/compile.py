"""A transformer block compiled by torch.compile beside the same block in eager mode: forward + backward on the CPU.

Legend as in `floors.py`. Both blocks hold the same weights and take turns in every round, in one process; a ratio is
compiled / eager of one round, so other load on the machine cancels out. Compilation itself is outside of the rounds.
"""

import argparse
import copy
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.floors import DTYPES, SHAPES, Shape
from benchmarks.report import describe_run
from benchmarks.timing import Timers, measure, ratios, spread, time_call, time_step
from moe import MoETransformerBlock, TransformerConfig

SEQUENCE = 512  # tokens of a sequence, at most


def make_block(shape: Shape, dtype: torch.dtype) -> MoETransformerBlock:
    """Return a block with a fused router, a balancing loss and a z-loss."""
    torch.manual_seed(0)
    config = TransformerConfig(
        hidden_size=shape.hidden,
        num_moe_experts=shape.experts,
        moe_router_topk=shape.topk,
        moe_ffn_hidden_size=shape.ffn,
        num_attention_heads=max(shape.hidden // 64, 1),
        num_layers=1,
        vocab_size=32,
        moe_router_fusion=True,
        moe_aux_loss_coeff=0.01,
        moe_z_loss_coeff=0.001,
        params_dtype=dtype,
    )
    return MoETransformerBlock(config)


def measure_case(name: str, dtype_name: str, rounds: int, backend: str) -> str:
    """Return a row of the table."""
    shape, dtype = SHAPES[name], DTYPES[dtype_name]
    eager = make_block(shape, dtype)
    twin = copy.deepcopy(eager)
    torch._dynamo.reset()
    compiled = torch.compile(twin, fullgraph=True, backend=backend)
    length = min(shape.tokens, SEQUENCE)
    x, y_grad = (torch.randn(length, shape.tokens // length, shape.hidden).to(dtype) for _ in range(2))
    compile_s = time_call(time_step, twin, compiled, x, y_grad)
    timers: Timers = {"eager": partial(time_step, eager, eager, x, y_grad)}
    timers["compiled"] = partial(time_step, twin, compiled, x, y_grad)
    times = measure(f"{name} {dtype_name}", timers, rounds, may_time_once=False)
    cells = [f"{name} {tuple(shape)}", dtype_name, f"{compile_s:.1f}"]
    for way in ("eager", "compiled"):
        found = spread([1e3 * seconds for seconds in times[way]])
        cells.append(f"{found['median']:.2f} ({found['min']:.2f}..{found['max']:.2f})")
    ratio = ratios(times["compiled"], times["eager"])
    found = spread(ratio)
    cells.append(f"**{statistics.median(ratio):.3f}** ({found['q1']:.3f}..{found['q3']:.3f})")
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["S0", "S2"], help="shapes of floors.py")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32"], help="dtypes of the parameters")
    parser.add_argument("--rounds", type=int, default=21, help="timed rounds of each case")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    parser.add_argument("--tiny", action="store_true", help="the tiny shape, two rounds: a smoke test")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    shapes, rounds = (["tiny"], 2) if options.tiny else (options.shapes, options.rounds)
    run = describe_run(f"{rounds} rounds, seed 0")
    lines = [
        f"{run['date'][:10]}, {run['cpu']} ({run['instructions']}), torch {torch.__version__.split('+')[0]},"
        f" {options.threads} thread(s), {rounds} rounds, backend {options.backend}.",
        "",
        "| shape (T, H, F, E, K) | dtype | first s | eager ms median (min..max) | compiled ms | compiled / eager |",
        "|---|---|---|---|---|---|",
    ]
    lines += [measure_case(name, dtype, rounds, options.backend) for name in shapes for dtype in options.dtypes]
    print("\n".join(lines))
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
