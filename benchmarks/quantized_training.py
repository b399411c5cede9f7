"""Train the same small language model in every recipe, and compare the held-out loss with that of bf16.

    python benchmarks/quantized_training.py --output-dir runs/quantized

Every run is examples/pretrain_gpt.py with the same seed, data and sizes; only the experts' numbers differ. Writes
quantized_training.md (the table) and quantized_training.png beside the runs. A finished run is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
MODEL = ["--bf16", "--num-layers", "2", "--hidden-size", "128", "--num-attention-heads", "4", "--num-experts", "8"]
MODEL += ["--moe-router-topk", "2", "--moe-ffn-hidden-size", "256", "--seq-length", "128", "--micro-batch-size", "8"]
MODEL += ["--lr", "1e-3", "--lr-warmup-iters", "30", "--sample-bytes", "0"]
DELAYED = ["--fp8-recipe", "delayed", "--fp8-amax-history-len", "16", "--fp8-amax-compute-algo", "max"]
RUNS = {
    "bf16": [],
    "bf16, fp64 router": ["--moe-router-dtype", "fp64"],  # the same up to rounding: what differs is chance
    "tensorwise": ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"],
    "delayed": ["--fp8-format", "hybrid", *DELAYED],
    "rowwise": ["--fp8-format", "e4m3", "--fp8-recipe", "rowwise"],
    "blockwise": ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"],
    "mxfp8": ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"],
    "nvfp4": ["--fp4-format", "e2m1"],
    "mxfp8, FP8 store": ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8", "--activation-func-fp8-input-store"],
    "delayed, FP8 weights": ["--fp8-format", "hybrid", *DELAYED, "--fp8-param-gather"],
}
BASELINE = "bf16"
ALLOWED = {"nvfp4": 0.03}  # of the baseline's loss; 0.01 for the others
ALLOWED_FP8 = 0.01


def train(name: str, folder: Path, steps: int, eval_iters: int) -> list[dict]:
    """Run one training unless its log is complete, and return its records."""
    log = folder / "metrics.jsonl"
    if not log.exists() or len(read(log)) < steps:
        flags = ["--train-iters", str(steps), "--eval-interval", "50", "--eval-iters", str(eval_iters)]
        command = [sys.executable, str(ROOT / "examples" / "pretrain_gpt.py"), *MODEL, *flags, *RUNS[name]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([*command, "--output-dir", str(folder)], check=True, env=environment)
    return read(log)


def read(log: Path) -> list[dict]:
    """Return the records of a metrics log."""
    return [json.loads(line) for line in log.read_text().splitlines()]


def table(results: dict[str, list[dict]], steps: int) -> str:
    """Return the table of held-out losses as Markdown, the recipes that miss their bound marked."""
    baseline = results[BASELINE][-1]["eval_loss"]
    lines = [
        f"Held-out loss after {steps} steps, nats per byte; PyTorch {torch.__version__}, CPU, reference backend.",
        "",
        "| experts in | flags | held-out loss | beside bf16 | allowed |",
        "|---|---|---|---|---|",
    ]
    for name, records in results.items():
        loss = records[-1]["eval_loss"]
        bound = ALLOWED.get(name, ALLOWED_FP8)
        beside, allowed = f"{loss / baseline - 1:+.2%}", f"{bound:.0%}"
        if name == BASELINE:
            beside = allowed = ""
        flags = " ".join(RUNS[name])
        lines.append(f"| {name} | {f'`{flags}`' if flags else ''} | {loss:.4f} | {beside} | {allowed} |")
    return "\n".join(lines) + "\n"


def draw(results: dict[str, list[dict]], path: Path) -> None:
    """Draw the held-out loss of every run over its steps, and its distance from bf16."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (losses, distances) = plt.subplots(1, 2, figsize=(11, 4.2))
    baseline = [record["eval_loss"] for record in results[BASELINE] if "eval_loss" in record]
    for name, records in results.items():
        points = [(record["step"], record["eval_loss"]) for record in records if "eval_loss" in record]
        steps, values = zip(*points, strict=True)
        style = {"color": "black", "linewidth": 2.2} if name == BASELINE else {"linewidth": 1.2}
        losses.plot(steps, values, label=name, **style)
        if name != BASELINE:
            ratio = [100 * (value / base - 1) for value, base in zip(values, baseline, strict=True)]
            distances.plot(steps, ratio, label=name)
    losses.set(xlabel="step", ylabel="held-out loss, nats per byte", title="Held-out loss")
    distances.axhline(100 * ALLOWED_FP8, color="grey", linestyle=":", linewidth=1)
    distances.axhline(100 * ALLOWED["nvfp4"], color="grey", linestyle="--", linewidth=1)
    distances.set(xlabel="step", ylabel="%", title="Above bf16 (dotted: 1 %, dashed: 3 %)")
    losses.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Run what is missing, then write table and picture; exit with 1 if a recipe misses its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/quantized"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--eval-iters", type=int, default=32, help="micro-batches in one look at the held-out text")
    parser.add_argument("--recipes", nargs="*", choices=RUNS, default=list(RUNS), help="bf16 is always among them")
    parser.add_argument("--tiny", action="store_true", help="two steps of two runs, to see that it works; no bounds")
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.eval_iters, args.recipes = 2, 1, ["mxfp8"]
    names = [name for name in RUNS if name in args.recipes or name == BASELINE]
    results = {
        name: train(name, args.output_dir / name.replace(", ", "-").replace(" ", "-"), args.steps, args.eval_iters)
        for name in names
    }
    text = table(results, args.steps)
    (args.output_dir / "quantized_training.md").write_text(text)
    draw(results, args.output_dir / "quantized_training.png")
    print(text)
    baseline = results[BASELINE][-1]["eval_loss"]
    missed = [n for n in names if results[n][-1]["eval_loss"] > baseline * (1 + ALLOWED.get(n, ALLOWED_FP8))]
    if missed and not args.tiny:
        sys.exit(f"above the bound: {', '.join(missed)}")


if __name__ == "__main__":
    main()
