"""benchmarks/growth.py: growth by hand, and a tiny run with its files."""

import json
from pathlib import Path

import pytest

from benchmarks.floors import Shape
from benchmarks.growth import format_entry, main, parse_arguments, summarize_axis
from benchmarks.report import report_path


def test_growth_is_the_time_per_token_over_that_of_the_smallest_in_the_same_round() -> None:
    shapes = [Shape(tokens, 8, 8, 4, 2) for tokens in (10, 40)]
    times = {"moe 10": [1.0, 2.0, 1.0], "moe 40": [2.0, 4.0, 8.0], "loop 10": [0.5] * 3, "loop 40": [1.0, 1.0, 4.0]}
    smallest, largest = summarize_axis("tokens", shapes, times)
    assert (smallest["value"], largest["value"], largest["tokens"]) == (10, 40, 40)
    assert smallest["moe"]["growth"] == dict.fromkeys(("median", "min", "max", "q1", "q3"), 1.0)
    assert largest["moe"]["growth"]["median"] == 0.5  # of 2/4, 2/4, 8/4
    assert largest["moe"]["growth"]["max"] == 2.0
    assert largest["moe"]["us_per_token"]["median"] == 1e6 * 4.0 / 40
    assert largest["loop"]["growth"]["median"] == 0.5  # of 2/4, 2/4, 8/4
    assert largest["share_of_loop"] == 0.5  # of 1/2, 1/4, 4/8
    cells = format_entry(largest)
    assert (cells["axis"], cells["value"], cells["growth (quartiles)"]) == ("T", "40", "0.50 (0.50..1.25)")
    assert (cells["growth over the floor's"], cells["of loop"]) == ("1.00", "0.50")


def test_tiny_run_writes_table_figures_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    main(["--tiny", "--rounds", "2", "--threads", "1", "--report", "--results", str(tmp_path)])
    path = report_path("growth", tmp_path, json.loads(next(tmp_path.glob("*.json")).read_text())["run"]["date"])
    entries = json.loads(path.with_name(f"{path.name}.json").read_text())["entries"]
    assert [(entry["axis"], entry["value"]) for entry in entries] == [
        *(("experts", 4), ("experts", 8)),
        *(("tokens", 20), ("tokens", 40), ("tokens", 80)),
        *(("topk", 1), ("topk", 2)),
    ]
    for entry in entries:
        assert entry[entry["axis"]] == entry["value"]
        assert entry["moe"]["us_per_token"]["min"] > 0
        assert entry["share_of_loop"] > 0
    picture = path.with_name(f"{path.name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    text = path.with_name(f"{path.name}.md").read_text()
    assert f"]({path.name}.png)" in text
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert table == [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(entries)


def test_command_line_refuses_a_picture_without_a_panel(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--report", "--axes", "tokens"], ["--rounds", "0"]):
        with pytest.raises(SystemExit):
            parse_arguments(arguments)
        assert ("needs all axes" if "--axes" in arguments else "must be at least 1") in capsys.readouterr().err
