"""Pictures of runs and tables, as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vcagen.paper.comparison import Line
from vcagen.system.files import atomic_file
from vcagen.training.metrics_log import read_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOT_LOSSES = ("step", "grad_norm", "learning_rate", "images_per_second", "memory_bytes", "seconds")
"""What a line of metrics.jsonl holds beside the loss and its parts."""


COLOURS = {"diffusion": "tab:blue", "flow": "tab:orange"}


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    """A figure that needs no display, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Figure, path: Path) -> Path:
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
    return path


def plot_losses(run: Path, out: Path | None = None) -> Path:
    """Loss and its parts over the steps of metrics.jsonl: loss.png in the folder `out`, else in that of the run."""
    log = read_log(run)
    figure, axes = _figure(7, 4)
    names = [name for name in (log[0] if log else {}) if name not in NOT_LOSSES]
    for name in names:
        points = [(line["step"], line[name]) for line in log if line.get(name) is not None]
        axes.plot(*zip(*points, strict=True), label=name, linewidth=2 if name == "loss" else 1)
    if log and all(line[name] > 0 for line in log for name in names if line.get(name) is not None):
        axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="mean since the last point", title=run.resolve().name)
    if names:
        axes.legend()
    return _save(figure, (out or run) / "loss.png")


def plot_pairs(path: Path, title: str, lines: Sequence[Line]) -> Path:
    """FID over GFLOPs, each network joined with its baseline; published in grey, ours that are comparable in colour."""
    figure, axes = _figure(8, 5.5)
    by_name = {line.row.name: line for line in lines}
    processes = {line.row.name: line.row.config().process.name for line in lines}
    published = {name: line.row.published.get("fid") for name, line in by_name.items()}
    ours = {name: line.mean for name, line in by_name.items() if not line.marks}
    bases = sorted((line for line in lines if line.row.baseline is None), key=lambda line: line.cost.multiply_adds)
    side = dict.fromkeys(COLOURS, 1)  # labels right and left in turn, so that neighbours stay legible
    for line in bases:
        process = processes[line.row.name]
        if (score := ours.get(line.row.name) or published[line.row.name]) is not None:
            axes.annotate(
                line.row.name, (line.cost.multiply_adds / 1e9, score), textcoords="offset points", fontsize=7,
                xytext=(6 * side[process], 4 if process == "diffusion" else -9),
                ha="left" if side[process] > 0 else "right",
            )  # fmt: skip
            side[process] *= -1
    for scores, own in ((published, False), (ours, True)):
        for name, score in scores.items():
            if score is None:
                continue
            line, process = by_name[name], processes[name]
            gflops, colour = line.cost.multiply_adds / 1e9, COLOURS[process] if own else "silver"
            base, marker = line.row.baseline, "o" if process == "diffusion" else "s"
            axes.plot(gflops, score, marker, color=colour, markerfacecolor=colour if base else "white", zorder=2 + own)
            if base is not None and (from_score := scores.get(base)) is not None:
                start = by_name[base].cost.multiply_adds / 1e9
                axes.plot([start, gflops], [from_score, score], "-", color=colour, zorder=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.12)
    axes.set(xlabel="GFLOPs (1e9 multiply-adds)", ylabel="FID", title=title)
    _legend(axes, bool([1 for score in ours.values() if score is not None]))
    return _save(figure, path)


def _legend(axes: Any, own: bool) -> None:
    from matplotlib.lines import Line2D

    kinds = [("published, diffusion", "o", "silver", "silver"), ("published, flow", "s", "silver", "silver")]
    kinds += [("ours, diffusion", "o", COLOURS["diffusion"], COLOURS["diffusion"])] if own else []
    kinds += [("ours, flow", "s", COLOURS["flow"], COLOURS["flow"])] if own else []
    kinds += [("baseline", "o", "black", "white"), ("its variant, joined", "o", "black", "black")]
    handles = [
        Line2D([], [], linestyle="", marker=marker, color=colour, markerfacecolor=face, label=label)
        for label, marker, colour, face in kinds
    ]
    axes.legend(handles=handles, fontsize=8)


def plot_speed(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Speed of contrast over plain attention by number of tokens, from the rows of `bench attention`."""
    figure, axes = _figure(7, 4.5)
    kinds: dict[str, dict[int, float]] = {}
    limits: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["pass"] != "forward":
            name = f"{row['part']}, {row['mode']}, {row['precision']}, width {row['width']}"
            kinds.setdefault(name, {})[row["tokens"]] = row["ratio"]
            limits.setdefault(f"multiply-adds, {row['part']}", {})[row["tokens"]] = row["multiply_add_ratio"]
    for name, points in kinds.items():
        axes.plot(*zip(*sorted(points.items()), strict=True), "o-", label=name)
    for name, points in limits.items():
        axes.plot(*zip(*sorted(points.items()), strict=True), "k--" if "attend" in name else "k:", label=name)
    axes.axhline(1, color="silver", zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="tokens", ylabel="plain / contrast time", title="Forward and backward pass of one attention")
    axes.legend(fontsize=8)
    return _save(figure, path)


def plot_spread(path: Path, title: str, lines: Sequence[Line]) -> Path:
    """Scores of every row: a point a run, the mean, and the standard deviation over the runs."""
    lines = [line for line in lines if line.values and not line.marks]
    figure, axes = _figure(8, 4.5)
    for x, line in enumerate(lines):
        colour = COLOURS[line.row.config().process.name]
        axes.bar(
            x, line.mean, yerr=line.spread, color=colour, alpha=1.0 if line.row.baseline is None else 0.6, capsize=4
        )
        axes.plot([x] * len(line.values), line.values, "k.", markersize=4)
    names = [line.row.name for line in lines]
    axes.set_xticks(range(len(lines)), names, rotation=30, ha="right", fontsize=8)
    axes.set(ylabel=lines[0].scores[0].name if lines else "score", title=title)
    return _save(figure, path)
