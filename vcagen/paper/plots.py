"""Pictures of tables, as PNG."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vcagen.paper.comparison import ComparedRow
from vcagen.training.plots import drawing

STYLES = {"diffusion": ("tab:blue", "o"), "flow": ("tab:orange", "s")}
"""Colour and marker of a process; a user's own has others."""


def plot_pairs(path: Path, title: str, rows: Sequence[ComparedRow]) -> Path:
    """FID over GFLOPs, each network joined with its baseline; published in grey, ours that are comparable in colour."""
    with drawing(path, 8, 5.5) as axes:
        by_name = {row.row.name: row for row in rows}
        published = {name: row.row.published.get("fid") for name, row in by_name.items()}
        ours = {name: None if row.marks else row.mean for name, row in by_name.items()}
        order = sorted(rows, key=lambda row: (_style(row), row.cost.multiply_adds))
        # Labels stand right and left in turn, so that neighbours stay legible.
        right = [row.row.name for row in order if row.row.baseline is None][::2]
        for scores, whose in ((published, "published"), (ours, "ours")):
            for name, score in scores.items():
                if score is None:
                    continue
                base, gflops = by_name[name].row.baseline, by_name[name].cost.multiply_adds / 1e9
                process, colour, marker = _style(by_name[name])
                colour = colour if whose == "ours" else "silver"
                axes.plot(gflops, score, marker, color=colour, markerfacecolor=colour if base else "white",
                          label=f"{whose}, {process}, {'variant' if base else 'baseline'}")  # fmt: skip
                if base is not None and (start := scores.get(base)) is not None:
                    axes.plot([by_name[base].cost.multiply_adds / 1e9, gflops], [start, score], color=colour, zorder=1)
                if base is None and scores is (published if ours[name] is None else ours):
                    x, y = 6 if name in right else -6, 4 if process == "diffusion" else -9
                    axes.annotate(name, (gflops, score), xytext=(x, y), textcoords="offset points", fontsize=7,
                                  ha="left" if x > 0 else "right")  # fmt: skip
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.margins(x=0.12)
        axes.set(xlabel="GFLOPs (1e9 multiply-adds)", ylabel="FID", title=title)
        handles, labels = axes.get_legend_handles_labels()
        if kinds := dict(zip(labels, handles, strict=True)):
            axes.legend(kinds.values(), kinds.keys(), fontsize=8)
    return path


def plot_spread(path: Path, title: str, rows: Sequence[ComparedRow]) -> Path:
    """Scores of every row that is comparable: a point a run, the mean, and the standard deviation over the runs."""
    rows = [row for row in rows if row.values and not row.marks]
    with drawing(path, 8, 4.5) as axes:
        for x, row in enumerate(rows):
            alpha = 1.0 if row.row.baseline is None else 0.6
            axes.bar(x, row.mean, yerr=row.spread, color=_style(row)[1], alpha=alpha, capsize=4)
            axes.plot([x] * len(row.values), row.values, "k.", markersize=4)
        axes.set_xticks(range(len(rows)), [row.row.name for row in rows], rotation=30, ha="right", fontsize=8)
        axes.set(ylabel=rows[0].scores[0].name if rows else "score", title=title)
    return path


def plot_steps(path: Path, title: str, rows: Sequence[ComparedRow]) -> Path:
    """Scores over the training steps, of all evaluations that are called as the newest: mean and range of the runs.

    A network has the colour of its baseline, which is dashed.
    """
    bases = list(dict.fromkeys(row.row.baseline or row.row.name for row in rows))
    with drawing(path, 8, 4.5) as axes:
        for row in rows:
            colour = f"C{bases.index(row.row.baseline or row.row.name)}"
            by_step: dict[int, list[float]] = {}
            for run in row.runs:
                for score in run.scores:
                    if score.name == run.scores[0].name and score.facts.get("step") is not None:
                        by_step.setdefault(score.facts["step"], []).append(score.value)
            if by_step and not row.marks:
                steps, values = zip(*sorted(by_step.items()), strict=True)
                means = [statistics.fmean(found) for found in values]
                ends = [[m - min(found) for m, found in zip(means, values, strict=True)],
                        [max(found) - m for m, found in zip(means, values, strict=True)]]  # fmt: skip
                axes.errorbar(steps, means, yerr=ends, marker=_style(row)[2], color=colour, capsize=3,
                              linestyle="--" if row.row.baseline is None else "-", label=row.row.name,
                              markerfacecolor="white" if row.row.baseline is None else colour)  # fmt: skip
        name = next((row.scores[0].name for row in rows if row.scores), "score")
        axes.set(xlabel="training steps", ylabel=name, title=title)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    return path


def plot_samples(path: Path, title: str, rows: Sequence[ComparedRow], count: int = 20) -> Path:
    """The first images of the first run of every row, one below the other: image i of all comes from the same noise."""
    strips = {}
    for row in rows:
        files = [score.folder / "images" / f"{i:06d}.png" for score in row.scores[:1] for i in range(count)]
        if files and all(file.exists() for file in files):
            strips[row.row.name] = np.concatenate([np.asarray(Image.open(file).convert("RGB")) for file in files], 1)
    height, width, _ = max((strip.shape for strip in strips.values()), default=(1, count, 3))
    with drawing(path, 11, 0.6 + 9.5 * max(len(strips), 1) * height / width) as axes:
        axes.grid(visible=False)
        for i, strip in enumerate(strips.values()):
            axes.imshow(strip, extent=(0, count, -i - 1, -i), interpolation="nearest")
        axes.set_title(title, fontsize=9)
        axes.set(xlim=(0, count), ylim=(-max(len(strips), 1), 0), xticks=[])
        axes.set_yticks([-i - 0.5 for i in range(len(strips))], list(strips), fontsize=8)
    return path


def _style(row: ComparedRow) -> tuple[str, str, str]:
    """Name, colour and marker of a row's process."""
    process = row.row.config().process.name
    return process, *STYLES.get(process, ("tab:green", "^"))
