"""The smallest example stays small, and runs."""

import math
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "moe_layer.py"


def test_it_runs_and_prints_what_it_did() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 30
    result = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=120, check=False, cwd=EXAMPLE.parents[1]
    )
    assert result.returncode == 0, result.stderr
    last = result.stdout.splitlines()[-1]
    shape, counts = re.fullmatch(r"output \[(.*)\] tokens per expert \[(.*)\]", last).groups()
    assert shape == "16, 4, 64"
    assert sum(map(int, counts.split(","))) == 16 * 4 * 2
    figures = [float(figure) for figure in re.findall(r"\b(?:\d+\.?\d*|nan|inf)\b", result.stdout)]
    assert len(figures) > 10
    assert all(map(math.isfinite, figures))
