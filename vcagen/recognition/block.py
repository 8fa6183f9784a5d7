"""The transformer block of all four families, and Visual-Contrast Attention in the place of timm's attention.

Symbols: N batch, H x W grid of tokens, T tokens (H * W, and a class token before them in DeiT), D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from timm.layers import trunc_normal_
from torch import Tensor, nn

from vcagen.networks.attention import VisualContrastAttention, as_grid, make_attention


class Block(nn.Module):
    """x + attn(norm1(x)), then x + mlp(norm2(x)), each with stochastic depth; names as in timm's blocks."""

    def __init__(
        self,
        attn: nn.Module,
        norm1: nn.Module,
        norm2: nn.Module,
        mlp: nn.Module,
        drop_path1: nn.Module,
        drop_path2: nn.Module,
    ) -> None:
        super().__init__()
        self.norm1, self.attn, self.drop_path1 = norm1, attn, drop_path1
        self.norm2, self.mlp, self.drop_path2 = norm2, mlp, drop_path2

    def forward(self, x: Tensor, grid_size: tuple[int, int]) -> Tensor:
        """Tokens (N, T, D) on their grid (H, W) -> (N, T, D)."""
        x = x + self.drop_path1(self.attn(self.norm1(x), grid_size))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


class GridBlock(Block):
    """A block among Swin's, whose tokens come as a grid. It has no window, so that no size of one concerns it."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """(N, H, W, D) -> (N, H, W, D)."""
        grid_size = x.shape[1], x.shape[2]
        return super().forward(x.flatten(1, 2), grid_size).unflatten(1, grid_size)

    def set_input_size(self, **sizes: Any) -> None:
        """Nothing: the grid comes with the call."""


def contrast_attention(
    dim: int, num_heads: int, *, attention_options: Mapping[str, Any] | None, **options: Any
) -> VisualContrastAttention:
    """Visual-Contrast Attention with the convolution of the values, its linear layers initialised as timm's.

    Raises:
        ValueError: an option that it does not have, or a value that is not possible.
    """
    layer = make_attention("vca", dim, num_heads, **{"value_conv": True, **options, **(attention_options or {})})
    assert isinstance(layer, VisualContrastAttention)
    initialise_linear(layer)
    return layer


def contrast_block(cls: type[Block], like: Any, **options: Any) -> Block:
    """A block with the parts of timm's block `like`, on its device and in its type, but for the attention."""
    plain = like.attn
    layer = contrast_attention(plain.qkv.in_features, plain.num_heads, qkv_bias=plain.qkv.bias is not None, **options)
    return cls(layer.to(plain.qkv.weight), like.norm1, like.norm2, like.mlp, like.drop_path1, like.drop_path2)


def contrast_plan(
    depths: Sequence[int], contrast_depths: Sequence[int], contrast_grids: Sequence[int | Sequence[int]]
) -> dict[tuple[int, int], tuple[int, int]]:
    """The blocks with Visual-Contrast Attention, by stage and position in it, and their contrast grids.

    Raises:
        ValueError: not one depth and one grid a stage, or more blocks than a stage has.
    """
    for name, values in (("contrast_depths", contrast_depths), ("contrast_grids", contrast_grids)):
        if len(values) != len(depths):
            raise ValueError(f"{name}: {len(values)} values for {len(depths)} stages")
    for depth, count in zip(depths, contrast_depths, strict=True):
        if not 0 <= count <= depth:
            raise ValueError(f"contrast_depths: {count} of the {depth} blocks of a stage")
    grids = [as_grid("contrast_grids", grid) for grid in contrast_grids]
    return {(stage, position): grids[stage] for stage, count in enumerate(contrast_depths) for position in range(count)}


def initialise_linear(module: nn.Module) -> None:
    """Linear layers as timm's transformers start: weights from a truncated normal of std 0.02, biases zero."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def undecayed(model: nn.Module) -> set[str]:
    """Names of the embeddings and lambda vectors, which weight decay leaves alone (as norms and biases, by timm)."""
    return {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, VisualContrastAttention)
        for name, _ in module.named_parameters(recurse=False)
    }


def refuse(options: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Options of timm's networks that Visual-Contrast Attention has no place for.

    Raises:
        ValueError: one of them is set.
    """
    for name in names:
        if options.get(name):
            raise ValueError(f"{name}: Visual-Contrast Attention does not have it")
