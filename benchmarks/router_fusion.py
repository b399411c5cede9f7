"""The fused router decision beside the unfused one on the CPU: process time of forward + backward, and saved bytes.

Legend: `T` tokens, `H` hidden size, `E` experts, `K` top-k. Each case is a whole TopKRouter, so its small gate is in
both times; backward starts from a random gradient of probs. In every round each way runs once, the order alternating; a
ratio is the median over the rounds of unfused / fused, so other load on the machine cancels out.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.memory import count_saved_bytes
from benchmarks.report import describe_run
from router import RouterConfig, TopKRouter

SIGMOID = {"moe_router_score_function": "sigmoid"}
CASES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "pre-softmax, scaled": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "sigmoid": SIGMOID,
    "sqrtsoftplus": {"moe_router_score_function": "sqrtsoftplus"},
    "sigmoid, bias, 4 of 8 groups": {
        **SIGMOID,
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
    },
}
HIDDEN_SIZE = 32
SIZES = [(4096, 64, 8), (4096, 256, 8)]  # T, E, K


def measure(size: tuple[int, int, int], fields: dict[str, Any], rounds: int) -> dict[str, float]:
    """Return milliseconds of process time, saved bytes per token, and their ratios unfused / fused."""
    num_tokens, num_experts, topk = size
    sizes = {"hidden_size": HIDDEN_SIZE, "num_moe_experts": num_experts, "moe_router_topk": topk}
    hidden = torch.randn(num_tokens, HIDDEN_SIZE)
    ways: dict[str, Callable[[], Tensor]] = {}
    for name in ("fused", "unfused"):
        torch.manual_seed(0)
        router = TopKRouter(RouterConfig(**sizes, **fields, init_method_std=0.2, moe_router_fusion=name == "fused"))
        ways[name] = lambda router=router: router(hidden)[0]
    gradient = torch.randn_like(ways["fused"]())
    saved = {name: count_saved_bytes(way, [hidden])[1] / num_tokens for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _, names in zip(range(rounds + 1), itertools.cycle([("fused", "unfused"), ("unfused", "fused")])):
        for name in names:
            started = time.process_time()
            ways[name]().backward(gradient)
            times[name].append(1e3 * (time.process_time() - started))
    pairs = list(zip(times["unfused"], times["fused"], strict=True))[1:]  # without the first, which warms up
    return {
        "fused_ms": statistics.median(fused for _, fused in pairs),
        "unfused_ms": statistics.median(unfused for unfused, _ in pairs),
        "time_ratio": statistics.median(unfused / fused for unfused, fused in pairs),
        "fused_bytes": saved["fused"],
        "unfused_bytes": saved["unfused"],
        "bytes_ratio": saved["unfused"] / saved["fused"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31, help="timed rounds of each case")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    parser.add_argument("--tiny", action="store_true", help="small sizes, two rounds: a smoke test")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    sizes, rounds = ([(64, 16, 4)], 2) if options.tiny else (SIZES, options.rounds)
    run = describe_run(f"{rounds} rounds, seed 0")
    lines = [
        f"{run['date'][:10]}, {run['cpu']} ({run['instructions']}), torch {torch.__version__.split('+')[0]},"
        f" {options.threads} thread(s), {rounds} rounds, fp32, process time; saved bytes are per token.",
        "",
        "| T, E, K | case | fused ms | unfused ms | unfused / fused | fused bytes | unfused bytes | unfused / fused |",
        "|---|---|---|---|---|---|---|---|",
    ]
    losses = {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001}
    for size, (name, case), with_losses in itertools.product(sizes, CASES.items(), (False, True)):
        found = measure(size, {**case, **losses} if with_losses else case, rounds)
        label = f"{name}, with aux and z-loss" if with_losses else name
        lines.append(
            f"| {', '.join(map(str, size))} | {label} | {found['fused_ms']:.2f} | {found['unfused_ms']:.2f} |"
            f" **{found['time_ratio']:.2f}** | {found['fused_bytes']:.0f} | {found['unfused_bytes']:.0f} |"
            f" **{found['bytes_ratio']:.2f}** |"
        )
    print("\n".join(lines))
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
