"""The expert-parallel benchmark: its arithmetic by hand, what it refuses, and a tiny run on two ranks."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.expert_parallel import format_table, main, parse_arguments, summarize
from benchmarks.expert_parallel_ranks import OURS, PEER, Case, differences, measure_all
from tests.ranks import run_ranks

CASE = Case(shape="tiny", dtype="fp32", rounds=2, peer=False)
FIGURES = {"max_abs_dy": 0.0, "max_abs_ddx": 1e-7, "largest_dy": 1.0, "largest_ddx": 2.0}


def test_a_round_lasts_as_long_as_its_slowest_rank() -> None:
    by_rank = [
        {"alltoall": {**FIGURES, "seconds": [1.0, 5.0, 2.0]}, PEER: {**FIGURES, "seconds": [3.0, 4.0, 3.0]}},
        {"alltoall": {**FIGURES, "seconds": [2.0, 4.0, 1.0]}, PEER: {**FIGURES, "seconds": [1.0, 4.0, 1.0]}},
    ]
    ours, theirs = summarize(CASE, 2, by_rank)
    assert (ours["layer"], ours["ep"], ours["ms"]) == ("alltoall", 2, [2000.0, 5000.0, 2000.0])
    assert ours["ratios"] == [1.5, 0.8, 1.5]
    assert theirs["ms"] == [3000.0, 4000.0, 3000.0]
    assert "ratios" not in theirs
    header, rule, line, _ = format_table([ours, theirs])
    assert len(header) == len(rule) == len(line)
    assert "| 2000.0 (2000.0..5000.0) |" in line
    assert "| 1.50 (0.80..1.50)" in line
    assert "| 2 of 3 " in line


def test_results_that_differ_by_more_than_rounding_are_refused() -> None:
    expected = torch.tensor([4.0, -2.0])
    off_by_one_bit = expected * (1 + torch.finfo(torch.float32).eps)
    found = differences({"a": (expected, expected), "b": (off_by_one_bit, expected)}, "a", "fp32")
    assert found["a"] == {"max_abs_dy": 0.0, "largest_dy": 4.0, "max_abs_ddx": 0.0, "largest_ddx": 4.0}
    assert 0 < found["b"]["max_abs_dy"] < 1e-6
    with pytest.raises(AssertionError, match="'b', 'ddx'"):
        differences({"a": (expected, expected), "b": (expected, expected * 1.001)}, "a", "fp32")


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--ep", "2", "0"]])
def test_refused_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert "must be at least 1" in capsys.readouterr().err


def test_both_dispatchers_give_one_result_on_two_ranks() -> None:
    cases = [CASE, Case(shape="tiny", dtype="bf16", rounds=1, peer=False)]
    for fp32, bf16 in run_ranks(measure_all, 2, cases):
        assert list(fp32) == list(bf16) == list(OURS)
        for name in OURS:
            assert (len(fp32[name]["seconds"]), len(bf16[name]["seconds"])) == (2, 1)
            assert min(fp32[name]["seconds"]) > 0
            assert fp32[name]["max_abs_dy"] < 1e-6 < fp32[name]["largest_dy"]


def test_a_tiny_run_writes_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--tiny", "--report", str(tmp_path)])
    (markdown,), (figures,) = tmp_path.glob("expert_parallel_*.md"), tmp_path.glob("expert_parallel_*.json")
    assert markdown.read_text().strip() == capsys.readouterr().out.strip()
    report = json.loads(figures.read_text())
    assert [(entry["layer"], entry["ep"]) for entry in report["entries"]] == [(name, 2) for name in OURS]
    assert report["run"]["threads"].startswith("1 a rank")
