"""The picture of a training, as PNG."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vcagen.system.files import atomic_file
from vcagen.training.metrics_log import read_log

NOT_LOSSES = (
    "step", "grad_norm", "learning_rate", "images_per_second", "memory_bytes", "seconds", "contrast_stage1",
    "contrast_stage2",
)  # fmt: skip
"""What a line of metrics.jsonl holds beside the loss and its parts."""


@contextmanager
def drawing(path: Path, width: float, height: float) -> Iterator[Any]:
    """Axes to draw on, without a display; saved as PNG at the end. Width and height are in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    yield axes
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")


def plot_losses(run_dir: Path, out: Path | None = None) -> Path:
    """Loss and its parts over the steps of metrics.jsonl: loss.png in the folder `out`, else in that of the run."""
    log, path = read_log(run_dir), (out or run_dir) / "loss.png"
    with drawing(path, 7, 4) as axes:
        names = [name for name in (log[0] if log else {}) if name not in NOT_LOSSES]
        for name in names:
            points = [(line["step"], line[name]) for line in log if line.get(name) is not None]
            axes.plot(*zip(*points, strict=True), label=name, linewidth=2 if name == "loss" else 1)
        if log and all(line[name] > 0 for line in log for name in names if line.get(name) is not None):
            axes.set_yscale("log")
        axes.set(xlabel="step", ylabel="mean since the last point", title=run_dir.resolve().name)
        if names:
            axes.legend()
    return path
