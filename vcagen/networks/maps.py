"""Where Visual-Contrast Attention looks: the maps of both stages, computed beside the forward pass.

Symbols as in `attention.py`: N batch, M heads, T tokens, d width of a head, n contrast tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from vcagen.networks.attention import VisualContrastAttention, _logits, _softmax, split_qkv

Grid = tuple[int, int] | None
"""(H, W) of tokens, or None for that of the layer."""


@dataclass(frozen=True)
class StageMaps:
    """The attention of one stage. Each row is a softmax: it sums to one."""

    positive: Tensor
    """A+: (N, M, n, T) in Stage I, (N, M, T, n) in Stage II. The first map of a differential stage, the one map of a
    vanilla stage."""
    negative: Tensor | None
    """A-, of the same shape; None of a vanilla stage."""
    lambda_: float
    """What A- is multiplied by before it is taken away; 0 of a vanilla stage."""

    @property
    def difference(self) -> Tensor:
        """A+ - lambda A-, which the stage applies to its values."""
        return self.positive if self.negative is None else self.positive - self.lambda_ * self.negative

    @property
    def contrast(self) -> Tensor | None:
        """Mean |A+ - A-| over mean A+: 0 where both streams look alike, at most 2. None of a vanilla stage."""
        return None if self.negative is None else (self.positive - self.negative).abs().mean() / self.positive.mean()


@dataclass(frozen=True)
class ContrastMaps:
    """The maps of one layer at one input."""

    stage1: StageMaps
    stage2: StageMaps
    grid_size: tuple[int, int]
    """(H, W) of the tokens; those before the last H * W are prefix tokens."""
    contrast_grid: tuple[int, int]
    """(h, w) of the contrast tokens."""
    scale: Tensor
    """What the norm between the stages multiplies each contrast token by, without its d weights: (N, M, n)."""

    def through(self, queries: slice | Sequence[int] = slice(None)) -> Tensor:
        """Which tokens these queries take values from, through both stages, of either sign: (N, M, queries, T).

        D2 diag(scale) D1, where D is A+ - lambda A-: the linear map from the values, multiplied by the weights of the
        norm between the stages, to the heads' output before the last norm.
        """
        return (self.stage2.difference[:, :, queries] * self.scale.unsqueeze(-2)) @ self.stage1.difference


@torch.no_grad()
def contrast_maps(attn: VisualContrastAttention, x: Tensor, grid_size: Grid = None) -> ContrastMaps:
    """The maps of a layer at its input x (N, T, D), in the precision of its weights, whatever autocast does.

    `grid_size` (H, W) is that of these tokens, where it is not that of the layer.

    They are checked against `attend`, whose output they must give.

    Raises:
        ValueError: a token count that does not fit the grid.
    """
    with torch.autocast(x.device.type, enabled=False):
        q, k, v = _qkv(attn, x)
        out = attn.attend(q, k, v, grid_size)
        stage1, stage2 = _stages(attn, q, k, grid_size)
        values = stage1.difference.to(v.dtype) @ v  # (N, M, n, d)
        scale = torch.ones_like(values[..., 0])
        if attn.norm1 is not None:
            squares = values.to(stage1.positive.dtype).square().mean(-1)
            scale = (1 - attn.lambda_init) * (squares + (attn.norm1.eps or 0.0)).rsqrt()
            values = attn._normalise(values, attn.norm1).to(v.dtype)
        again = stage2.difference.to(v.dtype) @ values
        if attn.norm2 is not None:
            again = attn._normalise(again, attn.norm2).to(v.dtype)
    rounded = v.dtype.itemsize < 4 or (v.is_cuda and torch.backends.cuda.matmul.allow_tf32)
    error = (again - out).abs().max() / out.abs().max()
    assert error <= (2e-2 if rounded else 1e-5), f"the maps are not those of attend: {error:.1e} apart"
    return ContrastMaps(stage1, stage2, grid_size or attn.grid_size, attn.contrast_grid, scale)


def layer_names(network: nn.Module) -> dict[VisualContrastAttention, str]:
    """The layers of VCA in a network, in order, named by the numbers of its lists: block 3, or block 1.0 in stages.

    Raises:
        ValueError: it has none.
    """
    found = {
        layer: f"block {'.'.join(re.findall(r'[0-9]+', name))}"
        for name, layer in network.named_modules()
        if isinstance(layer, VisualContrastAttention)
    }
    if not found:
        raise ValueError("attention: this network has no Visual-Contrast Attention, whose two streams the maps show")
    return found


@contextmanager
def watching(
    network: nn.Module, see: Callable[[VisualContrastAttention, Tensor, Grid], None]
) -> Iterator[None]:  # fmt: skip
    """Call see(layer, its input (N, T, D), grid) whenever a layer of VCA in the network is about to be called."""

    def hook(layer: VisualContrastAttention, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        see(layer, given[0], given[1] if len(given) > 1 else named.get("grid_size"))

    layers = [layer for layer in network.modules() if isinstance(layer, VisualContrastAttention)]
    handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def mean_contrast(network: nn.Module, call: Callable[[], object]) -> dict[str, float]:
    """How far the streams differ while `call` runs the network: `StageMaps.contrast`, the mean over its layers.

    Returns:
        contrast_stage1 and contrast_stage2, each as far as a layer has two streams there.
    """
    seen: dict[str, list[Tensor]] = {}

    def see(attn: VisualContrastAttention, x: Tensor, grid_size: Grid) -> None:
        with torch.autocast(x.device.type, enabled=False):
            q, k, _ = _qkv(attn, x)
            for key, stage in zip(("contrast_stage1", "contrast_stage2"), _stages(attn, q, k, grid_size), strict=True):
                if (contrast := stage.contrast) is not None:
                    seen.setdefault(key, []).append(contrast)

    with watching(network, see):
        call()
    return {key: float(torch.stack(values).mean()) for key, values in seen.items()}


def _qkv(attn: VisualContrastAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    qkv = attn.qkv(x.to(attn.qkv.weight.dtype))
    return split_qkv(rearrange(qkv, "n t (three m d) -> n t three m d", three=3, m=attn.num_heads))


def _stages(attn: VisualContrastAttention, q: Tensor, k: Tensor, grid_size: Grid) -> tuple[StageMaps, StageMaps]:
    """The maps of both stages for queries and keys (N, M, T, d), in float32 or better, by the products of `attend`."""
    pooled = attn._pool(q, grid_size)  # (N, M, n, d)
    scaled, streams = attn._scaled(pooled), attn._streams(pooled)
    stage1: dict[str, Callable[[], Sequence[Tensor]]] = {
        "contrast": lambda: _softmax(_logits(streams, k)).chunk(2, dim=-2),
        "differential": lambda: _halves(pooled, k),
        "vanilla": lambda: [_softmax(_logits(scaled, k))],
    }
    stage2: dict[str, Callable[[], Sequence[Tensor]]] = {
        "contrast": lambda: _softmax(rearrange(_logits(q, streams), "n m t (s c) -> n m t s c", s=2)).unbind(-2),
        "differential": lambda: _halves(q, pooled),
        "vanilla": lambda: [_softmax(_logits(q, scaled))],
    }
    return (
        _stage(attn, stage1[attn.stage1](), attn.lambda1),
        _stage(attn, stage2[attn.stage2](), attn.lambda2),
    )


def _stage(attn: VisualContrastAttention, maps: Sequence[Tensor], vectors: Tensor | None) -> StageMaps:
    if vectors is None:
        return StageMaps(maps[0], None, 0.0)
    return StageMaps(maps[0], maps[1], float(attn._lambda(vectors)))


def _halves(rows: Tensor, columns: Tensor) -> list[Tensor]:
    """The maps of the two halves of each head."""
    scale = (rows.shape[-1] // 2) ** -0.5
    return [_softmax(_logits(r * scale, c)) for r, c in zip(rows.chunk(2, -1), columns.chunk(2, -1), strict=True)]
