"""The report of a run shows what its records say, for any number of layers, experts and records."""

import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from run_picture import LAYER_FIGURES, MAX_COLUMNS, History, draw_report


def record(step: int, loads: list[list[int]], **fields: Any) -> dict[str, Any]:
    """A record whose figures of layers are step + layer, from 0."""
    figures = {name: [step + layer for layer in range(len(loads))] for name in ("load_imbalance", *LAYER_FIGURES)}
    return {"step": step, "loss": 1.0 / step, "tokens_per_s": 10.0 * step, "expert_load": loads, **figures, **fields}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved, to be asked for what they show."""
    figure_class = pytest.importorskip("matplotlib.figure").Figure
    saved: list[Any] = []
    save = figure_class.savefig

    def save_and_keep(figure: Any, *args: Any, **kwargs: Any) -> None:
        saved.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(figure_class, "savefig", save_and_keep)
    return saved


def titles_of(figure: Any) -> list[str]:
    """Return the titles of the panels, without the colour bars, in the order in which they stand."""
    return [title for axes in figure.axes if (title := axes.get_title(loc="left"))]


def test_few_records_have_a_column_each() -> None:
    records = [
        record(1, [[3, 1], [0, 0]]),
        record(2, [[0, 4], [1, 1]], loss=None, eval_loss=2.5),
        record(4, [[2, 2]] * 2),
    ]
    history = History.of(records)
    assert history.edges.tolist() == [0.5, 1.5, 3.5, 4.5]
    assert history.centres.tolist() == [1, 2, 4]
    assert history.scalars["loss"][1].tolist() == pytest.approx([1.0, math.nan, 0.25], nan_ok=True)
    assert history.scalars["tokens_per_s"].tolist() == [[10, 20, 40]] * 3
    assert history.held_out == [(2, 2.5)]
    assert history.figures["drop_rate"].tolist() == [[1, 2], [2, 3], [4, 5]]
    assert history.shares[:, 0].tolist() == [[1.5, 0.5], [0.0, 2.0], [1.0, 1.0]]
    assert history.shares[0, 1].isnan().all()  # a step without a token
    assert history.last_shares.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_many_records_share_columns() -> None:
    records = [record(step, [[step % 2 * 2, 1]]) for step in range(1, 2 * MAX_COLUMNS + 1)]
    records[0]["loss"] = math.nan
    history = History.of(records)
    assert history.shares.tolist() == [[[1.0, 1.0]]] * MAX_COLUMNS  # 2 + 0 tokens for one expert, 1 + 1 for the other
    assert history.edges[:3].tolist() == [0.5, 2.5, 4.5]
    assert history.edges[-1] == 2 * MAX_COLUMNS + 0.5
    assert history.scalars["loss"][:, 0].tolist() == [0.5, 0.5, 0.5]
    assert history.scalars["loss"][:, 1].tolist() == pytest.approx([1 / 4, (1 / 3 + 1 / 4) / 2, 1 / 3])
    assert history.figures["pad_share"][:2].tolist() == [[1.5], [3.5]]


def test_the_end_is_the_last_tenth_of_the_columns() -> None:
    history = History.of([record(step, [[1, 0]] if step < 20 else [[1, 1]]) for step in range(1, 22)])
    assert history.last_shares.tolist() == [[4 / 3, 2 / 3]]  # of 21 columns three


def test_layers_may_have_different_numbers_of_experts() -> None:
    history = History.of([record(1, [[1, 1, 2, 0], [3, 1]])])
    assert history.shares[0, 0].tolist() == [1.0, 1.0, 2.0, 0.0]
    assert history.shares[0, 1].tolist() == pytest.approx([1.5, 0.5, math.nan, math.nan], nan_ok=True)


def test_records_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"records \(0\) must be at least one"):
        History.of([])
    with pytest.raises(ValueError, match=r"the same layers and experts in all records; it has \[\(2,\), \(3,\)\]"):
        History.of([record(1, [[1, 2]]), record(2, [[1, 2, 3]])])


def test_report_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'draw_report needs matplotlib: .*"moe-pipeline\[plots\]"'):
        draw_report([record(1, [[1]])], tmp_path / "report.png")


def test_few_layers_have_a_map_of_their_experts_each(tmp_path: Path, figures: list[Any]) -> None:
    records = [record(step, [[3, 0, 1], [1, 1, 1]]) for step in (1, 2, 3)]
    draw_report(records, tmp_path / "report.png", "try")
    (figure,) = figures
    assert figure.get_suptitle() == "try: steps 1 to 3; records 3, columns 3"
    titles = titles_of(figure)
    assert titles[:2] == ["Loss, nats per byte", "Throughput, tokens/s over all ranks"]
    assert [title.split(":")[0] for title in titles[2:6]] == [
        "MoE layer 1",
        "last tenth, 1 dead",
        "MoE layer 2",
        "last tenth",
    ]
    assert titles[6:] == [title for title, _, _ in LAYER_FIGURES.values()]
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    mesh = panels[titles[2]].collections[0]
    assert mesh.get_array().tolist() == [[2.25] * 3, [0.0] * 3, [0.75] * 3]  # experts x steps
    assert mesh.to_rgba([0.0]).tolist() == [[0, 0, 0, 1]]
    bars = panels["last tenth, 1 dead"]
    assert [patch.get_width() for patch in bars.patches] == [2.25, 0.0, 0.75]
    assert bars.lines[0].get_ydata() == [1]  # the mark of the dead expert
    dropped = panels["Dropped slots, %"]
    assert [line.get_ydata().tolist() for line in dropped.lines] == [[100, 200, 300], [200, 300, 400]]


def test_many_layers_are_summed_up(tmp_path: Path, figures: list[Any]) -> None:
    records = [record(step, [[2, 0], *[[1, 1]] * 5]) for step in (1, 2)]
    draw_report(records, tmp_path / "report.png")
    panels = {axes.get_title(loc="left"): axes for axes in figures[0].axes}
    load = panels["Max/mean load of each MoE layer (1 = balanced)"].collections[0]
    assert load.get_array().tolist() == [[layer + 1, layer + 2] for layer in range(6)]
    share = panels["Share of tokens x E, last tenth of the run; black: dead (1)"].collections[0]
    assert share.get_array().tolist() == [[2.0, 0.0], *[[1.0, 1.0]] * 5]
    mean, worst = panels["Padding, % of computed slots"].lines
    assert mean.get_ydata().tolist() == [350, 450]
    assert (worst.get_ydata().tolist(), worst.get_label()) == ([600, 700], "layer 6, worst at the end")
    entropy = panels["Entropy of the load / ln E (1 = balanced)"].lines[1]
    assert entropy.get_label() == "layer 1, worst at the end"


NO_NUMBERS = {"loss": math.nan, "tokens_per_s": None}


@pytest.mark.parametrize(
    ("num_layers", "num_experts", "fields"),
    [(0, 0, {}), (1, 8, NO_NUMBERS), (4, 64, {"expert_load": [[0] * 64] * 4}), (5, 8, NO_NUMBERS), (48, 256, {})],
)
def test_any_run_is_drawn_without_a_warning(tmp_path: Path, num_layers: int, num_experts: int, fields: Any) -> None:
    pytest.importorskip("matplotlib")
    records = [record(step, [list(range(num_experts))] * num_layers, **fields) for step in (1, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_report(records[:1], tmp_path / "one.png")
        draw_report(records, tmp_path / "report.png")
    size = (tmp_path / "report.png").read_bytes()[16:24]
    assert 300 < int.from_bytes(size[4:], "big") < 2400  # pixels of its height


def test_a_log_of_older_figures_alone_is_drawn(tmp_path: Path, figures: list[Any]) -> None:
    draw_report([{"step": 1, "loss": 2.0, "expert_load": [[1, 3]] * 6}], tmp_path / "report.png")
    panels = {axes.get_title(loc="left"): axes for axes in figures[0].axes}
    load = panels["Max/mean load of each MoE layer (1 = balanced)"].collections[0]
    assert load.get_array().tolist() == [[1.5]] * 6
    assert panels["Padding, % of computed slots"].texts[0].get_text() == "not recorded"
