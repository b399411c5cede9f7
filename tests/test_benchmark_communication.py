"""The communication benchmark: its formulas by hand, its measured ranks, and its verdict."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.communication import computed, figures_per_token, judge, main, pairs_of_ranks, summarize
from benchmarks.dispatcher_ranks import Case

ROOT = Path(__file__).parents[1]
# Rank 0 holds e0 e1, rank 1 e2 e3. Rank 0: t0 -> e0 e1, t1 -> e1 e2; rank 1: t0 -> e2 e3.
CASE = Case(
    hidden_size=256,
    topk=2,
    maps=(torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0]]).bool(), torch.tensor([[0, 0, 1, 1]]).bool()),
)


def test_formulas_by_hand() -> None:
    pairs, distinct = pairs_of_ranks(CASE)
    assert pairs.tolist() == [[3, 1], [0, 2]]
    assert distinct.tolist() == [[2, 1], [0, 1]]
    alltoall, deduplicated = computed("alltoall", CASE)["dispatch"], computed("deduplicated", CASE)["dispatch"]
    packed, gathered = computed("deduplicated fp8", CASE)["dispatch"], computed("allgather", CASE)["dispatch"]
    assert alltoall["row_bytes"].tolist() == [[3 * 512, 512], [0, 2 * 512]]
    assert alltoall["metadata_bytes"].tolist() == [[4 * 8 + 12, 4 * 8 + 4], [4 * 8, 4 * 8 + 8]]
    assert deduplicated["row_bytes"].tolist() == [[2 * 512, 512], [0, 512]]
    assert deduplicated["metadata_bytes"].tolist() == [[7 * 8 + 18, 7 * 8 + 6], [7 * 8, 7 * 8 + 12]]
    assert packed["row_bytes"].tolist() == [[2 * 258, 258], [0, 258]]
    assert gathered["rows"].tolist() == [[2, 2], [1, 1]]
    assert computed("alltoall", CASE)["combine"]["rows"].tolist() == [[3, 0], [1, 2]]
    figures = figures_per_token("deduplicated", CASE, only_others=True)
    assert figures["dispatch"]["rows"] == pytest.approx(1 / 3)


def test_the_verdict_follows_the_ratios() -> None:
    entry = summarize("deduplicated fp8", CASE, "computed") | {"experts": 64, "topk": 8, "ep": 8, "hidden": 1024}
    for ratio, holds in ((0.39, True), (0.41, False)):
        for where in ("handed_over", "to_others"):
            entry[where]["of_alltoall"] = {"dispatch": ratio, "dispatch + combine": 0.5}
        lines, verdict = judge([entry])
        assert verdict is holds
        assert ("MISSED" in lines[1]) is not holds
        assert "MISSED" not in lines[2]


def test_rows_must_be_told_from_metadata() -> None:
    with pytest.raises(ValueError, match=r"hidden_size \(4\) must be more than the experts \(4\)"):
        Case(hidden_size=4, topk=2, maps=CASE.maps)


def test_an_unknown_dispatcher_is_refused() -> None:
    with pytest.raises(ValueError, match=r"name \('pigeon'\) must be one of"):
        computed("pigeon", CASE)


def test_a_tiny_run_measures_what_the_formulas_say(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    result = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "communication.py"), "--tiny", "--markdown", str(report)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for name in ("alltoall", "deduplicated fp8", "allgather"):
        assert f" {name} |" in report.read_text()
    assert "measured" in report.read_text()
    assert main.__doc__
