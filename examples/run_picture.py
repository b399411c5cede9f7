"""The one picture of a training run, report.png: loss, throughput, expert load, and the figures of every MoE layer.

Records are those of `run_report`; B columns of the picture hold one record each, or neighbours, averaged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Record = dict[str, Any]
MAX_COLUMNS = 240  # of a heat map or a line; more records than this share columns
MAX_PANELS = 4  # MoE layers up to this number have a line and a load map each; more are summed up
LAYER_FIGURES = {  # key of a record -> title, factor, lowest value at the top of the axis
    "normalized_load_entropy": ("Entropy of the load / ln E (1 = balanced)", 1.0, 1.0),
    "num_dead_experts": ("Dead experts (no token in a step), of each layer", 1.0, 1.0),
    "drop_rate": ("Dropped slots, %", 100.0, 1.0),
    "pad_share": ("Padding, % of computed slots", 100.0, 1.0),
}
BLUE, ORANGE, GREY = "#2f6db3", "#c8501e", "0.82"


@dataclass(frozen=True)
class History:
    """A run in B columns; NaN is what no record of a column tells.

    Attributes:
        edges: [B + 1] fp64, steps between which the columns lie.
        centres: [B] fp64, the mean step of each.
        scalars: name -> [3, B] fp64, least, mean and largest value of loss and tokens_per_s.
        held_out: steps with their eval_loss.
        figures: name -> [B, N] fp64, means of load_imbalance and LAYER_FIGURES; a name that no record has is missing.
        shares: [B, N, E] fp64, share of a layer's tokens x its E; NaN for experts that it lacks, and without tokens.
    """

    edges: Tensor
    centres: Tensor
    scalars: dict[str, Tensor]
    held_out: list[tuple[int, float]]
    figures: dict[str, Tensor]
    shares: Tensor

    @classmethod
    def of(cls, records: Sequence[Record]) -> History:
        """Sort records, ascending in their steps, into columns.

        Raises:
            ValueError: no record, or records that differ in layers or experts.
        """
        if not records:
            raise ValueError("records (0) must be at least one; there is nothing to draw.")
        num_columns = min(len(records), MAX_COLUMNS)
        columns = torch.arange(len(records)) * num_columns // len(records)  # [records]
        steps = torch.tensor([float(record["step"]) for record in records], dtype=torch.float64)
        first = torch.searchsorted(columns, torch.arange(num_columns))  # the first record of each column
        edges = torch.cat([steps[first], steps[-1:] + 1.0]) - 0.5
        held_out = [(record["step"], record["eval_loss"]) for record in records if record.get("eval_loss") is not None]
        sizes = _sizes_of(records)
        figures = {
            name: _layer_means(name, records, columns, len(sizes)) for name in ("load_imbalance", *LAYER_FIGURES)
        }
        return cls(
            edges,
            _means(steps.unsqueeze(1), columns).squeeze(1),
            {name: _ranges(name, records, columns) for name in ("loss", "tokens_per_s")},
            held_out,
            {name: values for name, values in figures.items() if not values.isnan().all()} if sizes else {},
            _shares(records, columns, sizes),
        )

    @property
    def last_shares(self) -> Tensor:
        """[N, E] fp64, the mean of shares over the last tenth of the columns, at least one."""
        return self.shares[-math.ceil(self.shares.shape[0] / 10) :].nanmean(0)


def draw_report(records: Sequence[Record], path: str | Path, title: str = "Training run") -> None:
    """Draw the report of a run as one PNG.

    Loss and throughput, with the range inside a column where it holds several records; the load: for up to MAX_PANELS
    MoE layers each expert's share of tokens x E over the steps, and at the end; for more max/mean load, layers x steps,
    and the share, layers x experts, at the end; LAYER_FIGURES over the steps. Black is an expert without a token, grey
    a column that tells nothing.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no record, or records that differ in layers or experts.
    """
    figure = new_figure("draw_report")
    history = History.of(records)
    num_layers = history.shares.shape[1]
    heights = [3.2]
    if num_layers:
        heights += [0.7 + 1.9 * num_layers if num_layers <= MAX_PANELS else min(3.4 + 0.11 * num_layers, 9.0), 5.4]
    heights[0] += 0.4  # the title
    figure.set_size_inches(15.0, sum(heights))
    figure.set_layout_engine("none")  # places in inches: legible whatever the number of layers
    steps = f"steps {records[0]['step']:,} to {records[-1]['step']:,}"
    figure.suptitle(f"{title}: {steps}; records {len(records):,}, columns {len(history.centres)}")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_scalars(history, _panels(parts[0], heights[0], 1, top=0.8)[0])
    if num_layers:
        draw_load = _draw_load_of_each if num_layers <= MAX_PANELS else _draw_load_of_all
        draw_load(history, parts[1], heights[1])
        for name, axes in zip(LAYER_FIGURES, _panels(parts[2], heights[2], 2).flat, strict=True):
            _draw_layer_figure(history, name, axes)
    figure.savefig(path, dpi=110)


def new_figure(function_name: str) -> Any:
    """Return an empty figure that draws without a display and without pyplot's global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f'{function_name} needs matplotlib: pip install "moe-pipeline[plots]".') from error
    figure = Figure(figsize=(8.0, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _panels(figure: Any, height: float, num_rows: int, *, top: float = 0.35, ratios: tuple[int, int] = (1, 1)) -> Any:
    """Return num_rows x 2 axes of a part of a figure; height and the room above are in inches."""
    bottom, gap = 0.5, 0.72
    row = (height - top - bottom - gap * (num_rows - 1)) / num_rows
    places = {"left": 0.045, "right": 0.955, "wspace": 0.16, "hspace": gap / row}
    places |= {"top": 1 - top / height, "bottom": bottom / height, "width_ratios": ratios}
    return figure.subplots(num_rows, 2, squeeze=False, gridspec_kw=places)


def _colour_bar(figure: Any, axes: Any, image: Any) -> None:
    """Draw the colour bar of a map at its right side."""
    figure.colorbar(image, cax=axes.inset_axes([1.012, 0.0, 0.014, 1.0]), extend="max")


def _sizes_of(records: Sequence[Record]) -> tuple[int, ...]:
    """Return E of each layer, the same in all records that have an expert_load; () if none has."""
    sizes = {tuple(map(len, record["expert_load"])) for record in records if record.get("expert_load")}
    if len(sizes) > 1:
        raise ValueError(
            f"expert_load must have the same layers and experts in all records; it has {sorted(sizes)}: remove the"
            " records of one kind."
        )
    return next(iter(sizes), ())


def _means(values: Tensor, columns: Tensor) -> Tensor:
    """[records, n] fp64 -> [B, n], the mean over the records of each column that are not NaN; NaN where all are."""
    known = ~values.isnan()
    shape = (int(columns[-1]) + 1, values.shape[1])
    total = torch.zeros(shape, dtype=torch.float64).index_add_(0, columns, values.nan_to_num(0.0))
    return total / torch.zeros(shape, dtype=torch.float64).index_add_(0, columns, known.double())


def _number(value: Any) -> float:
    """Return value, NaN for what is missing or not finite."""
    return value if isinstance(value, int | float) and math.isfinite(value) else math.nan


def _ranges(name: str, records: Sequence[Record], columns: Tensor) -> Tensor:
    """[3, B]: least, mean and largest value of a number in each column."""
    values = torch.tensor([_number(record.get(name)) for record in records], dtype=torch.float64)
    mean = _means(values.unsqueeze(1), columns).squeeze(1)
    known = ~values.isnan()
    low, high = (
        torch.full_like(mean, start).scatter_reduce_(0, columns[known], values[known], kind)
        for start, kind in ((math.inf, "amin"), (-math.inf, "amax"))
    )
    return torch.stack([low, mean, high]).where(~mean.isnan(), math.nan)


def _layer_means(name: str, records: Sequence[Record], columns: Tensor, num_layers: int) -> Tensor:
    """[B, N]: the mean in each column of what records tell of each layer."""
    unknown = [math.nan] * num_layers
    rows = [record.get(name) or unknown for record in records]
    rows = [list(map(_number, row)) if len(row) == num_layers else unknown for row in rows]
    return _means(torch.tensor(rows, dtype=torch.float64).view(len(rows), num_layers), columns)


def _shares(records: Sequence[Record], columns: Tensor, sizes: Sequence[int]) -> Tensor:
    """[B, N, E]: counts summed over each column, as a share of the layer's tokens, times E."""
    width = max(sizes, default=0)
    counts = torch.zeros(int(columns[-1]) + 1, len(sizes), width, dtype=torch.float64)
    for column, group in groupby(zip(columns.tolist(), records, strict=True), key=itemgetter(0)):
        loads = [record["expert_load"] for _, record in group if record.get("expert_load")]
        for layer, rows in enumerate(zip(*loads, strict=True)):  # [records of the column][E]
            counts[column, layer, : sizes[layer]] = torch.tensor(rows, dtype=torch.float64).sum(0)
    size = torch.tensor(sizes, dtype=torch.float64).view(-1, 1)
    exists = torch.arange(width) < size  # [N, E]
    return (counts * size / counts.sum(-1, keepdim=True)).where(exists, math.nan)  # 0 / 0 is NaN: no token


def _draw_scalars(history: History, panels: Any) -> None:
    """Draw the loss, training and held-out, and beside it the tokens a second."""
    loss_axes, speed_axes = panels
    steps, marker = history.centres.numpy(), "." if len(history.centres) < 30 else ""
    for axes, name, label in ((loss_axes, "loss", "training"), (speed_axes, "tokens_per_s", "tokens/s")):
        low, mean, high = history.scalars[name].numpy()
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.2, linewidth=0)
        axes.plot(steps, mean, color=BLUE, marker=marker, label=label)
        if history.scalars[name].isnan().all():
            axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color="0.4")
        _finish(axes, history)
    if history.held_out:
        label = f"held-out, last {history.held_out[-1][1]:.3f}"
        loss_axes.plot(*zip(*history.held_out, strict=True), "o-", color=ORANGE, markersize=4, linewidth=1, label=label)
    loss_axes.legend(frameon=False, loc="upper right")
    loss_axes.set_title("Loss, nats per byte", loc="left")
    speed_axes.set_title("Throughput, tokens/s over all ranks", loc="left")
    fastest = float(history.scalars["tokens_per_s"].nan_to_num(0.0).max())
    speed_axes.set_ylim(0, 1.08 * fastest or 1.0)
    speed_axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _finish(axes: Any, history: History) -> None:
    """Give axes over steps the range of the run, whole steps and a grid."""
    axes.set_xlim(float(history.edges[0]), float(history.edges[-1]))
    axes.set_xlabel("step")
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    axes.grid(alpha=0.25)


def _share_colours(shares: Tensor) -> dict[str, Any]:
    """Return colours for shares x E: blue below 1, white at 1, red above, black at 0, grey for NaN."""
    from matplotlib import colormaps
    from matplotlib.colors import TwoSlopeNorm

    colours = colormaps["RdBu_r"].with_extremes(under="black", bad=GREY)
    largest = shares[~shares.isnan()]
    top = max(2.0, float(largest.quantile(0.998))) if 0 < largest.numel() < 2**24 else 2.0
    return {"cmap": colours, "norm": TwoSlopeNorm(vmin=1e-9, vcenter=1.0, vmax=top)}


def _draw_map(axes: Any, edges: Tensor, values: Tensor, colours: dict[str, Any], first: int) -> Any:
    """Draw values [rows, columns], NaN grey; rows are numbered from `first`, upwards."""
    rows = torch.arange(values.shape[0] + 1) + first - 0.5
    axes.set_facecolor(GREY)
    image = axes.pcolormesh(edges.numpy(), rows.numpy(), values.numpy(), rasterized=True, **colours)
    axes.locator_params(axis="y", nbins=min(12, values.shape[0] + 1), integer=True)
    return image


def _draw_load_of_each(history: History, figure: Any, height: float) -> None:
    """For each layer: experts x steps, and beside it each expert's share at the end."""
    num_layers, last = history.shares.shape[1], history.last_shares
    grid = _panels(figure, height, num_layers, ratios=(3, 1))
    colours = _share_colours(history.shares)
    for layer, (axes, bars) in enumerate(grid):
        size = int((~last[layer].isnan()).sum()) or last.shape[1]
        shares = history.shares[:, layer, :size]
        image = _draw_map(axes, history.edges, shares.T, colours, 0)
        axes.set_title(f"MoE layer {layer + 1}: share of tokens x E, by expert; black: none", loc="left", fontsize=10)
        axes.set_ylabel("expert")
        axes.set_xlabel("step" if layer == num_layers - 1 else "")
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        _colour_bar(figure, axes, image)
        bars.sharey(axes)
        shares = last[layer, :size]
        bars.barh(range(size), shares.tolist(), height=1.0 if size > 32 else 0.8, color=BLUE)
        dead = (shares == 0).nonzero().flatten().tolist()
        bars.plot([0] * len(dead), dead, "x", color="black", clip_on=False, markersize=4 if size > 32 else 6)
        bars.axvline(1.0, color="0.3", linewidth=0.8, linestyle="--")
        bars.set_xlim(0, max(1.1, 1.05 * float(shares.nan_to_num(0.0).max())))
        bars.set_title(f"last tenth{f', {len(dead)} dead' if dead else ''}", loc="left", fontsize=10)


def _draw_load_of_all(history: History, figure: Any, height: float) -> None:
    """Max/mean load, layers x steps; beside it every expert's share at the end, layers x experts."""
    from matplotlib import colormaps

    last = history.last_shares
    imbalance = history.shares.nan_to_num(-1.0).amax(-1)  # where a log has no load_imbalance: of the column
    imbalance = history.figures.get("load_imbalance", imbalance)
    imbalance = imbalance.where(imbalance > 0, math.nan)
    known = imbalance[~imbalance.isnan()]
    top = max(2.0, float(known.quantile(0.998))) if known.numel() else 2.0
    steps_axes, experts_axes = _panels(figure, height, 1)[0]
    colours = {"cmap": colormaps["viridis"].with_extremes(bad=GREY), "vmin": 1.0, "vmax": top}
    image = _draw_map(steps_axes, history.edges, imbalance.T, colours, 1)
    steps_axes.set_title("Max/mean load of each MoE layer (1 = balanced)", loc="left")
    steps_axes.set_xlabel("step")
    steps_axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    _colour_bar(figure, steps_axes, image)
    expert_edges = torch.arange(last.shape[1] + 1) - 0.5
    image = _draw_map(experts_axes, expert_edges, last, _share_colours(last), 1)
    num_dead = int((last == 0).sum())
    experts_axes.set_title(f"Share of tokens x E, last tenth of the run; black: dead ({num_dead})", loc="left")
    experts_axes.set_xlabel("expert")
    experts_axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    _colour_bar(figure, experts_axes, image)
    for axes in (steps_axes, experts_axes):
        axes.set_ylabel("MoE layer")
        axes.invert_yaxis()


def _draw_layer_figure(history: History, name: str, axes: Any) -> None:
    """Draw one of LAYER_FIGURES: a line a layer, or the mean, the range and the worst of many layers."""
    from matplotlib import colormaps

    title, factor, lowest_top = LAYER_FIGURES[name]
    axes.set_title(title, loc="left")
    _finish(axes, history)
    if name not in history.figures:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color="0.4")
        return
    values, steps = factor * history.figures[name], history.centres.numpy()  # [B, N]
    marker, num_layers = "." if len(steps) < 30 else "", values.shape[1]
    if num_layers <= MAX_PANELS:
        for layer in range(num_layers):
            colour = colormaps["viridis"](0.85 * layer / max(1, num_layers - 1))
            axes.plot(steps, values[:, layer].numpy(), marker=marker, color=colour, label=f"layer {layer + 1}")
    else:
        known = values[~values.isnan().all(1)][-1]  # [N], the last column that tells something
        is_better_high = name == "normalized_load_entropy"
        worst = int(known.nan_to_num(math.inf).argmin() if is_better_high else known.nan_to_num(-1.0).argmax())
        low, high = values.nan_to_num(math.inf).amin(1), values.nan_to_num(-math.inf).amax(1)
        is_known = low <= high
        low, high = low.where(is_known, math.nan), high.where(is_known, math.nan)
        axes.fill_between(steps, low.numpy(), high.numpy(), color=BLUE, alpha=0.2, linewidth=0, label="all layers")
        axes.plot(steps, values.nanmean(1).numpy(), color=BLUE, marker=marker, label="mean")
        label = f"layer {worst + 1}, worst at the end"
        axes.plot(steps, values[:, worst].numpy(), color=ORANGE, marker=marker, linewidth=1.0, label=label)
    known = values[~values.isnan()]
    top = max(lowest_top, float(known.max()))
    bottom = float(known.min()) if name == "normalized_load_entropy" else 0.0
    margin = 0.04 * max(top - bottom, 0.01)
    axes.set_ylim(bottom - margin, top + margin)
    if name == "num_dead_experts":
        axes.locator_params(axis="y", integer=True, min_n_ticks=1)
    axes.legend(frameon=False, loc="best", fontsize=9)
