"""How the benchmarks write: the machine, aligned Markdown tables, and reports named theme, hardware, date."""

import datetime
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"
MAKERS = r"\((r|tm)\)|\b(intel|amd|apple|cpu|processor|genuine|virtual|\d+-core)\b|@.*"  # not part of a CPU's name


def cpu_fields() -> dict[str, str]:
    """Return the fields of /proc/cpuinfo for the last core; none elsewhere."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())}


def cpu_name() -> str:
    """Return the CPU's name as the system gives it."""
    return cpu_fields().get("model name") or platform.processor() or platform.machine()


def hardware_slug(cpu: str, instructions: str, flags: str) -> str:
    """Return CPU and instruction set for a file's name.

    Args:
        cpu: its name, as `cpu_name` gives it.
        instructions: the vector instructions that torch uses.
        flags: the processor's flags, separated by spaces.

    Example: ("Intel(R) Xeon(R) Processor", "AVX512", "fpu amx_bf16") -> "xeon-avx512-amx".
    """
    name = re.sub(MAKERS, " ", cpu.lower())
    words = [*name.split(), instructions, "amx" if "amx_" in flags else ""]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def describe_run(settings: str) -> dict[str, Any]:
    """Return what a reader needs to judge the figures: machine, versions, date, command, settings."""
    flags = cpu_fields().get("flags", "").split()
    return {
        "cpu": cpu_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "bf16_instructions": " ".join(flag for flag in flags if "bf16" in flag) or "none",
        "threads": f"{torch.get_num_threads()} on {os.cpu_count()} cores",
        "torch": f"{torch.__version__}, Python {platform.python_version()}",
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("MALLOC_", "OMP_", "MKL_"))},
        "settings": settings,
    }


def format_run(run: dict[str, Any]) -> list[str]:
    """Return a list item for each thing that `describe_run` found."""
    return [f"- {key.replace('_', ' ')}: {value}" for key, value in run.items()]


def format_table(table: Sequence[dict[str, str]]) -> list[str]:
    """Return an aligned Markdown table of lines that map heading -> cell."""
    rows = [list(table[0]), *(list(cells.values()) for cells in table)]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]


def report_path(theme: str, folder: Path, date: str) -> Path:
    """Return folder/theme_hardware_date without an ending.

    Args:
        theme: what was measured.
        folder: where the report goes.
        date: ISO 8601; the day is kept.
    """
    slug = hardware_slug(cpu_name(), torch.backends.cpu.get_cpu_capability(), cpu_fields().get("flags", ""))
    return folder / f"{theme}_{slug}_{date[:10]}"


def write_reports(paths: Sequence[Path | None], report: dict[str, Any], text: str) -> None:
    """Write the report to every path that is not None: as JSON where it ends in .json, else the text."""
    for path in paths:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = json.dumps(report, indent=1) + "\n" if path.suffix == ".json" else text
            path.write_text(content, encoding="utf-8")


def write_named_report(theme: str, folder: Path, report: dict[str, Any], text: str) -> None:
    """Write the text as Markdown and the report as JSON, named by `report_path` after the date in report["run"]."""
    stem = report_path(theme, folder, report["run"]["date"])
    write_reports([stem.with_name(stem.name + ending) for ending in (".md", ".json")], report, text)
    print(f"written: {stem}.md and .json", file=sys.stderr)
