"""Visual-Contrast Attention beside fused scaled_dot_product_attention: the attention alone, and whole layers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vcagen.bench._timing import in_turns, open_device, ratio
from vcagen.config.job_options import AttentionBenchConfig
from vcagen.networks.attention import VisualContrastAttention, make_attention
from vcagen.paper.table import markdown
from vcagen.system.files import write_json
from vcagen.training.plots import drawing


@dataclass(frozen=True)
class Shape:
    """Width, width of a head, tokens and side of the contrast grid of an attention."""

    width: int
    head_width: int
    tokens: int
    contrast_side: int
    value_conv: bool = False


RECOGNITION = (Shape(192, 64, 196, 7, True), Shape(96, 32, 3136, 3, True))
"""DeiT-T, and the first stage of Swin-T, at 224 x 224."""


@dataclass(frozen=True)
class Case:
    """One comparison."""

    part: str
    shape: Shape
    precision: str
    mode: str


def run(config: AttentionBenchConfig) -> None:
    """Print a table, one row a comparison and pass: milliseconds, their ratio, and that of the multiply-adds."""
    for tokens in config.tokens:
        if math.isqrt(tokens) ** 2 != tokens:
            raise ValueError(f"tokens: {tokens} is not a square number")
    for width in config.widths:
        if width % config.head_width:
            raise ValueError(f"widths: {width} is not a multiple of {config.head_width}, the width of a head")
    device = open_device(config.device, config.threads)
    config = replace(config, batch_tokens=config.batch_tokens or (2048 if device.type == "cpu" else 65_536))
    shapes = [
        Shape(width, config.head_width, tokens, config.contrast_side)
        for width in config.widths
        for tokens in config.tokens
    ]
    cases = [
        Case(part, shape, precision, mode)
        for part in config.parts
        for shape in (RECOGNITION if config.recognition else shapes)
        for precision in config.precisions
        for mode in config.modes
    ]
    rows = [row for case in cases for row in _measure(case, config, device)]
    print(_table(rows))
    print("\nratio: plain / contrast, median over turns. near: ratio / multiply-add ratio.")
    if config.json is not None:
        write_json(config.json, {**asdict(config), "threads": torch.get_num_threads(), "rows": rows})
    if config.plot is not None:
        plot_speed(Path(config.plot), rows)


def multiply_add_ratio(part: str, shape: Shape) -> float:
    """Multiply-adds of plain attention over those of contrast attention.

    A layer's projections are 4 D a token and channel, and the convolution of the values 9.
    """
    projections = 4 * shape.width if part == "layer" else 0
    convolution = 9 if part == "layer" and shape.value_conv else 0
    return (projections + 2 * shape.tokens) / (projections + convolution + 6 * shape.contrast_side**2)


def _measure(case: Case, config: AttentionBenchConfig, device: torch.device) -> list[dict[str, Any]]:
    torch.compiler.reset()
    assert config.batch_tokens is not None, "`run` sets it"
    batch = max(1, config.batch_tokens // case.shape.tokens)
    plain, contrast, inputs = _pair(case, batch, device)
    if case.mode == "compiled":
        plain, contrast = torch.compile(plain), torch.compile(contrast)
    expected = multiply_add_ratio(case.part, case.shape)
    rows = []
    for name, work in (("forward", _forward), ("forward + backward", _forward_backward)):
        works = {"plain": work(plain, inputs), "contrast": work(contrast, inputs)}
        times = in_turns(works, seconds=config.seconds, device=device)
        faster = ratio(times["plain"], times["contrast"])
        rows.append(
            {
                **{"part": case.part, **asdict(case.shape), "precision": case.precision, "mode": case.mode},
                "pass": name,
                "batch": batch,
                "plain_ms": 1e3 * statistics.median(times["plain"]),
                "contrast_ms": 1e3 * statistics.median(times["contrast"]),
                "ratio": faster,
                "multiply_add_ratio": expected,
                "near": faster / expected,
            }
        )
    return rows


def _pair(
    case: Case, batch: int, device: torch.device
) -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    """Plain attention, contrast attention, and inputs for both."""
    dtype = getattr(torch, case.precision)
    shape, side = case.shape, math.isqrt(case.shape.tokens)
    heads = shape.width // shape.head_width

    def layer(name: str, **options: Any) -> nn.Module:
        return make_attention(name, shape.width, heads, grid_size=side, **options).to(device, dtype)

    vca = layer("vca", contrast_grid=shape.contrast_side, value_conv=shape.value_conv)
    if case.part == "layer":
        return layer("mhsa"), vca, _random((batch, shape.tokens, shape.width), 1, dtype, device)
    assert isinstance(vca, VisualContrastAttention)
    heads_shape = (batch, heads, shape.tokens, shape.head_width)
    return F.scaled_dot_product_attention, vca.attend, _random(heads_shape, 3, dtype, device)


def _random(shape: Sequence[int], count: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=generator).to(device, dtype) for _ in range(count)]
    return [x.requires_grad_() for x in inputs]


def _forward(attention: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], object]:
    @torch.no_grad()
    def work() -> None:
        attention(*inputs)

    return work


def _forward_backward(attention: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], object]:
    gradient = torch.randn_like(inputs[0])

    def work() -> None:
        attention(*inputs).backward(gradient)

    return work


def _table(rows: list[dict[str, Any]]) -> str:
    header = ["part", "D", "N", "n", "batch", "precision", "mode", "pass"]
    header += ["plain ms", "contrast ms", "ratio", "multiply-adds", "near"]
    cells = [
        [
            row["part"],
            *(str(row[key]) for key in ("width", "tokens")),
            str(row["contrast_side"] ** 2),
            *(str(row[key]) for key in ("batch", "precision", "mode", "pass")),
            *(f"{row[key]:.2f}" for key in ("plain_ms", "contrast_ms", "ratio", "multiply_add_ratio", "near")),
        ]
        for row in rows
    ]
    return markdown(header, cells)


def plot_speed(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Speed of contrast over plain attention by number of tokens, from the rows of `bench attention`."""
    with drawing(path, 7, 4.5) as axes:
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
    return path
