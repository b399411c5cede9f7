"""The benchmarks of emulated dtypes and of the import: their figures, what they refuse, and tiny runs."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import emulation, import_time
from moe import expert_loop


@pytest.fixture(autouse=True)
def _gemm_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what a run changes."""
    monkeypatch.setattr(expert_loop, "gemm_dtype", expert_loop.gemm_dtype)


def test_a_tiny_run_writes_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = ["bf16 in fp32", "fp8 rowwise"]
    threads = str(torch.get_num_threads())
    emulation.main(["--tiny", "--threads", threads, "--layers", *layers, "--report", "--results", str(tmp_path)])
    (markdown,), (figures,) = tmp_path.glob("emulation_*.md"), tmp_path.glob("emulation_*.json")
    assert markdown.read_text() == capsys.readouterr().out
    entries = json.loads(figures.read_text())["entries"]
    assert [entry["layer"] for entry in entries] == ["fp32", *layers]
    assert entries[0]["times_fp32"]["min"] == entries[0]["times_fp32"]["max"] == 1
    assert all(entry["ms"]["min"] > 0 for entry in entries)


def test_a_line_of_the_table() -> None:
    ms = {"median": 2.0, "min": 1.0, "max": 4.0, "q1": 1.5, "q3": 3.0}
    entry = {"shape": "S0", "layer": "fp8 mxfp8", "ms": ms, "times_fp32": {**ms, "median": 1.25, "q1": 1.0, "q3": 1.5}}
    assert list(emulation.format_entry(entry).values()) == ["S0", "fp8 mxfp8", "2.0 (1.0..4.0)", "1.25 (1.00..1.50)"]


@pytest.mark.parametrize("main", [emulation.main, import_time.main])
def test_no_rounds_are_refused(main, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--rounds", "0"])
    assert "--rounds (0) must be at least 1" in capsys.readouterr().err


def test_an_import_above_the_limit_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(import_time, "cpu_seconds", lambda *names: [1.0, 0.05])
    import_time.main(["--rounds", "3", "--limit", "1.1"])
    assert "moe / torch: 1.050" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"above --limit \(1.01\)"):
        import_time.main(["--rounds", "3", "--limit", "1.01"])


def test_imports_in_one_interpreter_are_timed_in_turn() -> None:
    first, again = import_time.cpu_seconds("decimal", "decimal")
    assert 0 < again < first
