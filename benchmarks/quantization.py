"""What quantization costs: time of the quantizers, rows that padding adds, bytes kept for backward, errors.

    python benchmarks/quantization.py --output benchmarks/results/quantization_DATE.md

Time: quantize and dequantize a matrix of 4096 x 1024 fp32 beside copying it, in one process, round by round; the ratio
is the median over rounds. "copy" is x.clone() (new memory, as the quantizer's results are), "copy, warm" is y.copy_(x)
into memory that is already there. Rows, bytes and errors are counted or computed, not timed.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from moe import GroupedMLP, MoEConfig, pad_routing_map
from moe.quantization.quantize import Quantized, quantize
from moe.quantization.recipes import RECIPES

SHAPE = (4096, 1024)
LIMIT = 6.0  # times a copy


def milliseconds(function: Callable[[], object]) -> float:
    """Return how long one call takes."""
    started = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - started)


def quantizer_rows(shape: tuple[int, int], rounds: int) -> list[list[str]]:
    """Return a row of the table for each recipe and direction."""
    x = torch.randn(shape)
    target = torch.empty_like(x)
    rows = []
    for name, recipe in RECIPES.items():
        fmt = recipe.format_of("input", "e4m3")
        for direction, block in (("rows", recipe.block), ("columns", recipe.block.t)):
            if direction == "columns" and block == recipe.block:
                continue
            kept: list[Quantized] = []

            def forth(fmt=fmt, block=block, recipe=recipe, kept=kept) -> None:
                kept[:] = [quantize(x, fmt, block, recipe.scale_format)]

            def back(kept=kept) -> None:
                kept[0].dequantize()

            calls = {"copy": x.clone, "warm": lambda: target.copy_(x), "forth": forth, "back": back}
            for function in calls.values():
                function()
            times = [{key: milliseconds(function) for key, function in calls.items()} for _ in range(rounds)]
            both = [t["forth"] + t["back"] for t in times]
            medians = {key: statistics.median(t[key] for t in times) for key in calls}
            ratio = statistics.median(b / t["copy"] for b, t in zip(both, times, strict=True))
            warm = statistics.median(b / t["warm"] for b, t in zip(both, times, strict=True))
            error = ((kept[0].dequantize() - x).norm() / x.norm()).item()
            cells = [f"{medians[key]:.2f}" for key in calls]
            rows.append([name, direction, str(block), *cells, f"{ratio:.1f}", f"{warm:.1f}", f"{error:.4f}"])
    return rows


def padding_rows(num_tokens: int) -> list[list[str]]:
    """Return for sizes of a layer the share of slots that padding of the map and of slots adds."""
    rows = []
    for num_experts, topk, ep in ((8, 2, 1), (8, 2, 8), (64, 8, 8), (256, 8, 8), (256, 8, 64)):
        for skew in (0.0, 1.0):
            generator = torch.Generator().manual_seed(0)
            preference = torch.randn(num_experts, generator=generator) * skew
            maps = []
            for _ in range(ep):
                logits = torch.randn(num_tokens, num_experts, generator=generator) + preference
                chosen = logits.topk(topk, dim=1).indices
                maps.append(torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter_(1, chosen, True))
            counts = torch.stack([routing_map.sum(0) for routing_map in maps])  # [ranks, E]
            cells = []
            for multiple in (16, 32, 128):
                padded = torch.stack([pad_routing_map(routing_map, multiple).sum(0) for routing_map in maps])
                by_slots = (-counts.sum(0) % multiple).sum() / counts.sum()
                by_map = (padded - counts).sum() / counts.sum()
                cells += [f"{by_map:.1%}", f"{by_slots:.1%}"]
            load = "even" if skew == 0 else "skewed"
            rows.append([f"{num_experts}, {topk}, {ep}", str(num_tokens), load, *cells])
    return rows


def saved_bytes(config: MoEConfig, num_rows: int, slots_per_row: int) -> float:
    """Return the bytes that the experts keep for backward, per slot, without ids and probs."""
    from dispatchers import ExpertInput

    experts, num_experts = GroupedMLP(config), config.num_moe_experts
    counts = (num_rows * slots_per_row // num_experts,) * num_experts
    row_ids = torch.arange(num_rows).repeat(slots_per_row)
    num_slots = len(row_ids)
    tokens = torch.randn(num_rows, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    probs = torch.rand(num_slots, requires_grad=True)
    expert_input = ExpertInput.padded(tokens, row_ids, probs, torch.tensor(counts), counts, config.pad_multiple)
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in experts.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        experts(expert_input)
    return (sum(kept.values()) - 12 * num_slots) / num_slots


def saved_rows(hidden: int, ffn: int, num_rows: int) -> list[list[str]]:
    """Return the bytes kept per slot in every recipe, as a share of bf16's."""
    sizes = {"hidden_size": hidden, "moe_ffn_hidden_size": ffn, "num_moe_experts": 8, "params_dtype": torch.bfloat16}
    settings: dict[str, dict] = {"bf16": {}}
    for name, recipe in RECIPES.items():
        settings[name] = {"fp4": "e2m1"} if recipe.bits == 4 else {"fp8": "e4m3", "fp8_recipe": name}
    rows = []
    for name, fields in settings.items():
        cells = []
        for slots_per_row in (1, 8):
            for stores in (False, True):
                config = MoEConfig(**sizes, **fields, activation_func_fp8_input_store=stores)
                plain = saved_bytes(MoEConfig(**sizes), num_rows, slots_per_row)
                kept = saved_bytes(config, num_rows, slots_per_row)
                cells.append(f"{kept:,.0f} ({kept / plain:.2f})")
        rows.append([name, *cells])
    return rows


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    shape, rounds, num_tokens = ((256, 256), 2, 512) if args.tiny else (SHAPE, args.rounds, 4096)
    columns = ["recipe", "along", "block", "copy ms", "copy, warm ms", "quantize ms", "dequantize ms"]
    quantizers = quantizer_rows(shape, rounds)
    worst = max(float(row[-3]) for row in quantizers if RECIPES[row[0]].bits == 8)
    multiples = [f"{how} to {multiple}" for multiple in (16, 32, 128) for how in ("map", "slots")]
    sizes = [f"{s} slot{'s' * (s > 1)} a row{store}" for s in (1, 8) for store in ("", ", FP8 store")]
    hidden, ffn = (128, 128) if args.tiny else (1024, 704 // 128 * 128)
    report = "\n".join(
        [
            f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}."
            f" `python benchmarks/quantization.py{' --tiny' if args.tiny else ''}`",
            f"\n## Quantizers, {shape[0]} x {shape[1]} fp32, {rounds} rounds\n",
            markdown([*columns, "both / copy", "both / warm copy", "relative error"], quantizers),
            f"Slowest FP8 recipe: {worst:.1f} times a copy (at most {LIMIT:.0f} asked for).",
            f"\n## Slots that padding adds, T = {num_tokens} a rank\n",
            markdown(["E, K, EP", "T", "load", *multiples], padding_rows(num_tokens)),
            f"## Bytes kept for backward per slot, H = {hidden}, F = {ffn}, gated, bf16 (share of bf16's)\n",
            markdown(["recipe", *sizes], saved_rows(hidden, ffn, 512)),
        ]
    )
    print(report)
    if args.output:
        args.output.write_text(f"# Quantization\n\n{report}")


if __name__ == "__main__":
    main()
