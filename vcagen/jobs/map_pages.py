"""Pages that show the maps of Visual-Contrast Attention, each one figure of matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from PIL import Image
from torch import Tensor

from vcagen.networks.maps import ContrastMaps
from vcagen.sampling.image_store import to_pil

Array = npt.NDArray[Any]

WIDTH = 8.0
"""Inches. Text of 8 points stays legible where a page is shown 800 pixels wide."""
COLUMNS = 6
"""Blocks of one page."""
SIGNED, WEIGHT = "RdBu_r", "magma"
"""Colours of what has either sign, and of attention weights."""


@dataclass(frozen=True)
class Input:
    """One input of the network: a row of a page."""

    name: str
    picture: Array
    """The input as a picture: uint8 (H, W, C), grey where C is 1."""
    clean: Array
    """The same without noise, for its outline."""


def contrast_page(inputs: Sequence[Input], maps: Mapping[str, ContrastMaps], *, head: int | None = None) -> Figure:
    """Stage I: a row an input, a column a block; each patch is red where the positive stream weighs it more.

    Args:
        maps: up to COLUMNS layers by name, whose Stage I has two streams.
        head: one head. Default: the mean over heads.
    """
    page = _Page("Stage I: patches that the positive stream weighs more (red), the negative more (blue)",
                 inputs, ["input", *maps])  # fmt: skip
    for column, layer in enumerate(maps.values(), start=1):
        shares = preference(layer, head)
        limit = max(float(np.quantile(np.abs(shares), 0.98)), 1e-9)
        page.draw(column, shares, SIGNED, (-limit, limit))
        page.outline(column)
        page.bar(column, column, percent)
    return page.figure


def query_page(
    inputs: Sequence[Input], name: str, layer: ContrastMaps, query: tuple[int, int], *, head: int | None = None
) -> Figure:
    """Stage II, and both stages in one: a row an input; what one patch attends to.

    The columns: the patch; A+ and A- over the contrast tokens; A+ - A- on its own scale; and, on the image, the patches
    that it takes values from through both stages.

    Args:
        name: of the layer.
        query: row and column of the patch on the token grid, from 0.
        head: one head. Default: the mean over heads.
    """
    (rows, columns), (y, x) = layer.grid_size, query
    token = layer.stage1.positive.shape[3] - rows * columns + y * columns + x
    lambdas = f"lambda {layer.stage1.lambda_:.2f} in Stage I, {layer.stage2.lambda_:.2f} in Stage II"
    streams = [
        _mean(weights[:, :, token], head).reshape(-1, *layer.contrast_grid)
        for weights in (layer.stage2.positive, layer.stage2.negative)
        if weights is not None
    ]
    titles = ["A+", "A-", "A+ - A-"] if len(streams) == 2 else ["A"]
    page = _Page(f"{name}: what the patch in row {y}, column {x} attends to ({lambdas})",
                 inputs, ["query", *titles, "through both stages"])  # fmt: skip
    top = max(float(weights.max()) for weights in streams)
    for column, weights in enumerate(streams, start=1):
        page.draw(column, weights, WEIGHT, (0, top))
    page.bar(1, len(streams), _digits)
    if len(streams) == 2:
        page.draw(3, streams[0] - streams[1], SIGNED)
        page.bar(3, 3, lambda value: _digits(value, "+"))
    page.draw(-1, _on_grid(_mean(layer.through([token])[:, :, 0], head), layer), SIGNED, on_image=True)
    page.bar(-1, -1, lambda value: _digits(value, "+"))
    for column in (0, -1):
        page.mark(column, query, layer.grid_size)
    return page.figure


def preference(layer: ContrastMaps, head: int | None = None) -> Array:
    """By which share the positive stream weighs each patch more, from -2 to 2: (N, H, W).

    (A+ - A-) over the mean of both, each summed over the contrast tokens, of one head or of the mean over heads.
    """
    assert layer.stage1.negative is not None, "a vanilla stage has no second stream"
    positive, negative = (
        _mean(weights.sum(2), head) for weights in (layer.stage1.positive, layer.stage1.negative)
    )  # (N, T)
    return _on_grid((positive - negative) / ((positive + negative) / 2), layer)


def _mean(weights: Tensor, head: int | None) -> Array:
    """(N, M, ...) -> (N, ...), of one head or all."""
    chosen = weights.mean(1) if head is None else weights[:, head]
    return chosen.float().cpu().numpy()


def _on_grid(values: Array, layer: ContrastMaps) -> Array:
    """(N, T) -> (N, H, W), without prefix tokens."""
    rows, columns = layer.grid_size
    return values[:, values.shape[1] - rows * columns :].reshape(-1, rows, columns)


class _Page:
    """A figure with a row of pictures an input, a title above each column, and colour bars below.

    Args:
        titles: of the columns; the first one holds the inputs.
    """

    def __init__(self, title: str, inputs: Sequence[Input], titles: Sequence[str]) -> None:
        self.inputs = inputs
        cell = min((WIDTH - 0.4) / len(titles), 2.4)
        height, width = inputs[0].picture.shape[:2]
        size = (0.4 + cell * len(titles), 0.95 + cell * height / width * len(inputs))
        layout = ConstrainedLayoutEngine(w_pad=0.04, h_pad=0.03)
        self.figure = Figure(figsize=size, dpi=150, layout=layout)
        self.figure.suptitle(fill(title, int(13 * size[0])), fontsize=10)
        self.grid = self.figure.add_gridspec(
            len(inputs) + 1, len(titles), height_ratios=[cell * height / width] * len(inputs) + [0.12]
        )
        places = [[self.figure.add_subplot(self.grid[row, column]) for column in range(len(titles))]
                  for row in range(len(inputs))]  # fmt: skip
        self.axes: Array = np.array(places, dtype=object)
        for axis, text in zip(self.axes[0], titles, strict=True):
            axis.set_title(text, fontsize=9)
        for axis, one in zip(self.axes[:, 0], inputs, strict=True):
            axis.set_ylabel(one.name, fontsize=8)
            axis.imshow(np.asarray(to_pil(one.picture).convert("RGB")), interpolation="nearest")
        for axis in self.axes.flat:
            axis.set(xticks=[], yticks=[], aspect="equal")

    def draw(
        self, column: int, values: Array, colours: str, limits: tuple[float, float] | None = None, *,
        on_image: bool = False,
    ) -> None:  # fmt: skip
        """Values (N, rows, columns) over the places of the inputs, or on the images, which small ones let through.

        Default limits: to the largest of either sign.
        """
        largest = max(float(np.abs(values).max()), 1e-9)
        low, high = limits or (-largest, largest)
        for axis, one, image in zip(self.axes[:, column], self.inputs, values, strict=True):
            height, width = one.picture.shape[:2]
            alpha = np.sqrt(np.abs(image) / largest) if on_image else None
            axis.imshow(image, colours, vmin=low, vmax=high, extent=(-0.5, width - 0.5, height - 0.5, -0.5),
                        interpolation="nearest", alpha=alpha, zorder=1)  # fmt: skip
            if on_image:
                grey = 0.5 + 0.5 * np.asarray(to_pil(one.clean).convert("L")) / 255
                axis.imshow(grey, "gray", vmin=0, vmax=1, interpolation="nearest", zorder=0)

    def outline(self, column: int) -> None:
        """The line between the dark and the bright of each image, coarse where the image is large."""
        for axis, one in zip(self.axes[:, column], self.inputs, strict=True):
            height, width = one.clean.shape[:2]
            scale = min(1.0, 48 / max(height, width))
            grey = to_pil(one.clean).convert("L")
            small = grey.resize((round(width * scale), round(height * scale)), Image.Resampling.BOX)
            light = np.asarray(small, dtype=np.float64)
            middle = float(np.quantile(light, [0.05, 0.95]).mean())
            if light.min() < middle < light.max():
                y, x = ((np.arange(side) + 0.5) / scale - 0.5 for side in light.shape)
                axis.contour(x, y, light, levels=[middle], colors="white", linewidths=2)
                axis.contour(x, y, light, levels=[middle], colors="black", linewidths=0.9)

    def mark(self, column: int, query: tuple[int, int], grid_size: tuple[int, int]) -> None:
        """Frame the patch of the query."""
        for axis, one in zip(self.axes[:, column], self.inputs, strict=True):
            height, width = (side / count for side, count in zip(one.picture.shape[:2], grid_size, strict=True))
            corner = query[1] * width - 0.5, query[0] * height - 0.5
            for colour, line in (("black", 2.6), ("lime", 1.4)):
                axis.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=colour, linewidth=line))

    def bar(self, first: int, last: int, text: Callable[[float], str]) -> None:
        """A colour bar below columns of the same colours, with the numbers of its ends."""
        count = self.axes.shape[1]
        place = self.figure.add_subplot(self.grid[-1, first % count : last % count + 1])
        shown = self.axes[0, first].images[0]
        bar = self.figure.colorbar(shown, cax=place, orientation="horizontal", ticks=[shown.norm.vmin, shown.norm.vmax])
        assert bar.solids is not None
        bar.solids.set_alpha(1)
        low, high = bar.ax.set_xticklabels([text(shown.norm.vmin), text(shown.norm.vmax)], fontsize=8)
        low.set_horizontalalignment("left")
        high.set_horizontalalignment("right")


def percent(share: float) -> str:
    """A share in percent, with its sign: short enough for half a column, so a small one has one digit."""
    value = 100 * share
    if abs(value) >= 0.1 or value == 0:
        return f"{_digits(value, '+')} %"
    return f"{value:+.1g} %" if abs(value) >= 0.01 else f"{value:+.0e} %".replace("e-0", "e-")


def _digits(value: float, sign: str = "") -> str:
    """Two digits, or all before the point."""
    return f"{value:{sign}.0f}" if abs(value) >= 10 else f"{value:{sign}.2g}"
