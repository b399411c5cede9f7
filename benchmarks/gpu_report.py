"""Run the tests that need a CUDA device, time the experts' backends on it, and write one report.

    make gpu                                        # in the project's environment
    make gpu GPU_PYTHON=python3                     # in one that is there already, with torch, einops and pytest

The report goes to benchmarks/results/gpu_CARD_DATE.md. Times are medians over rounds by CUDA events, all backends in
turn in every round; TFLOP/s count the six products of forward and backward alone.
"""

from __future__ import annotations

import datetime
import re
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from moe import MoEConfig, MoELayer
from moe.quantization.recipes import RECIPES

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {
    "T 8192, H 2048, F 1408, E 64, K 6": (8192, 2048, 1408, 64, 6),
    "T 8192, H 4096, F 14336, E 8, K 2": (8192, 4096, 14336, 8, 2),
}
ROUNDS = 11


def settings(shape: tuple[int, ...]) -> dict[str, MoEConfig]:
    """Return what can be built here for a shape (T, H, F, E, K), by name."""
    _, hidden, ffn, num_experts, topk = shape
    sizes = {"hidden_size": hidden, "moe_ffn_hidden_size": ffn, "num_moe_experts": num_experts, "moe_router_topk": topk}
    fields: dict[str, dict] = {"bf16, reference": {}, "bf16, torch": {"moe_expert_backend": "torch"}}
    fields["bf16, te"] = {"moe_expert_backend": "te"}
    for name, recipe in RECIPES.items():
        quantized = {"fp4": "e2m1"} if recipe.bits == 4 else {"fp8": "e4m3", "fp8_recipe": name}
        if recipe.torch_capability == torch.cuda.get_device_capability()[0]:
            fields[f"{name}, torch"] = {**quantized, "moe_expert_backend": "torch"}
        if recipe.te_capability and torch.cuda.get_device_capability() >= recipe.te_capability:
            fields[f"{name}, te"] = {**quantized, "moe_expert_backend": "te"}
    return {name: MoEConfig(**sizes, **more, params_dtype=torch.bfloat16) for name, more in fields.items()}


def time_shape(shape: tuple[int, ...]) -> list[str]:
    """Return the rows of the table for a shape."""
    num_tokens, hidden, ffn, _, topk = shape
    x = torch.randn(num_tokens, 1, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    times: dict[str, list[float]] = {}
    layers: dict[str, MoELayer] = {}
    missing = []
    for name, config in settings(shape).items():
        try:
            with torch.device("cuda"):
                layers[name] = MoELayer(config)
            layers[name](x).sum().backward()
            times[name] = []
        except (ImportError, ValueError, RuntimeError) as error:  # the report says why a backend is not in the table
            layers.pop(name, None)
            missing.append(f"| {name} | {str(error).splitlines()[0][:160]} | | |")
    for _ in range(ROUNDS):
        for name, layer in layers.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            layer.zero_grad()
            start.record()
            layer(x).sum().backward()
            stop.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(stop))
    flops = 3 * 2 * num_tokens * topk * 3 * hidden * ffn
    first = next(iter(times), None)
    rows = []
    for name, measured in times.items():
        ratio = statistics.median(base / own for base, own in zip(times[first], measured, strict=True))
        median = statistics.median(measured)
        rows.append(f"| {name} | {median:.2f} | {flops / median / 1e9:.0f} | {ratio:.2f} |")
    return rows + missing


def main() -> None:
    """Test, time, write."""
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: make gpu needs one; make test runs everything else.")
    card, date = torch.cuda.get_device_name(), datetime.date.today().isoformat()
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rs", "tests/gpu"]
    tests = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(tests.stdout[-4000:], tests.stderr[-2000:])
    lines = [f"# {card}, {date}", "", f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}. `make gpu`", ""]
    lines += ["## Tests", "", "```", *tests.stdout.strip().splitlines()[-40:], "```", ""]
    for name, shape in SHAPES.items():
        lines += [f"## Forward + backward of a layer: {name}", ""]
        lines += [
            "| experts | ms | TFLOP/s | times as fast as the first |",
            "|---|---|---|---|",
            *time_shape(shape),
            "",
        ]
        torch.cuda.empty_cache()
    slug = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    report = ROOT / "benchmarks" / "results" / f"gpu_{slug}_{date}.md"
    report.write_text("\n".join(lines))
    print(report.read_text())
    sys.exit(tests.returncode)


if __name__ == "__main__":
    main()
