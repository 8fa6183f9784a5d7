"""PVT (arXiv 2102.12122) and CSwin (arXiv 2107.00652), which timm lacks, plain and with Visual-Contrast Attention.

Four stages, each a convolution that halves the grid (the first one divides the image by four) and blocks on its tokens;
then the mean of the tokens. The plain PVT is that of the public Agent Attention code (LeapLabTHU/Agent-Attention),
whose settings Table 1 fits: without the class token and the last norm of the original, 2,048 parameters.
Symbols: N images, C channels, H x W grid of a stage, T = H * W tokens, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from timm.layers import DropPath, Mlp, resample_abs_pos_embed, trunc_normal_
from timm.models._features import feature_take_indices
from timm.models.pvt_v2 import Attention as ReducedAttention
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vcagen.networks.attention import as_grid
from vcagen.recognition.block import Block, contrast_attention, contrast_plan, initialise_linear, undecayed
from vcagen.recognition.cross_shaped import CrossShapedAttention


class Stage(nn.Module):
    """Convolution to tokens, their norm, learned positions where it has them, and blocks."""

    def __init__(
        self, embed: nn.Conv2d, blocks: Sequence[Block], *, grid_size: tuple[int, int], positions: bool, dynamic: bool
    ) -> None:
        super().__init__()
        dim = embed.out_channels
        self.embed = embed
        self.embed_norm = nn.LayerNorm(dim)
        self.grid_size, self.dynamic = grid_size, dynamic
        self.pos_embed = nn.Parameter(torch.empty(1, grid_size[0] * grid_size[1], dim)) if positions else None
        self.blocks = nn.ModuleList(blocks)
        self.grad_checkpointing = False
        if self.pos_embed is not None:
            trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, 2 H, 2 W), or (N, C, 4 H, 4 W) in the first stage, -> (N, H, W, D)."""
        x = self.embed(x)
        grid_size = x.shape[2], x.shape[3]
        x = self.embed_norm(x.flatten(2).mT)  # (N, T, D)
        if self.pos_embed is not None:
            x = x + self._positions(self.pos_embed, grid_size)
        for block in self.blocks:
            if self.grad_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, grid_size, use_reentrant=False)
            else:
                x = block(x, grid_size)
        return x.unflatten(1, grid_size)

    def _positions(self, table: Tensor, grid_size: tuple[int, int]) -> Tensor:
        if grid_size == self.grid_size:
            return table
        if not self.dynamic:
            raise ValueError(
                f"img_size: a stage has {grid_size[0]} x {grid_size[1]} tokens and positions for "
                f"{self.grid_size[0]} x {self.grid_size[1]}; give img_size=... or dynamic_img_size=True"
            )
        return resample_abs_pos_embed(table, grid_size, old_size=self.grid_size, num_prefix_tokens=0)


class Pyramid(nn.Module, ABC):
    """Four stages and a classifier, under timm's conventions; a family says what its plain attention is.

    Args:
        contrast_depths: how many blocks of each stage, from its first, have Visual-Contrast Attention in its place.
        contrast_grids: rows and columns of their contrast tokens, by stage, or one number for both.
        attention_options: further options of `VisualContrastAttention`.
        dynamic_img_size: resample the positions to images of other sizes.
        global_pool: avg, or empty for logits of every token.
        drop_rate, drop_path_rate: dropout before the classifier; stochastic depth of the last block (the first has 0).

    Raises:
        ValueError: a value that is not possible, by name; in `forward`, a size that does not fit.
    """

    kernels: ClassVar[Sequence[int]]
    paddings: ClassVar[Sequence[int]]
    """Of the convolutions before the stages; their strides are 4, 2, 2, 2."""
    positions: ClassVar[bool]
    """Whether each stage learns positions."""
    final_norm: ClassVar[bool]
    norm_eps: ClassVar[float]

    def __init__(
        self,
        *,
        depths: Sequence[int],
        embed_dims: Sequence[int],
        num_heads: Sequence[int],
        mlp_ratios: Sequence[float],
        contrast_depths: Sequence[int] = (0, 0, 0, 0),
        contrast_grids: Sequence[int | Sequence[int]] = (3, 4, 7, 7),
        attention_options: Mapping[str, Any] | None = None,
        img_size: int | Sequence[int] = 224,
        dynamic_img_size: bool = False,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        plan = contrast_plan(depths, contrast_depths, contrast_grids)
        norm = partial(nn.LayerNorm, eps=self.norm_eps)
        grid_size, channels, index, stages = as_grid("img_size", img_size), in_chans, 0, []
        for stage, (depth, dim, heads) in enumerate(zip(depths, embed_dims, num_heads, strict=True)):
            embed = nn.Conv2d(channels, dim, self.kernels[stage], 4 if stage == 0 else 2, self.paddings[stage])
            grid_size = _grid_after(embed, grid_size)
            blocks = []
            for position in range(depth):
                if (stage, position) in plan:
                    attn: nn.Module = contrast_attention(
                        dim, heads, grid_size=grid_size, block_index=index, contrast_grid=plan[stage, position],
                        attention_options=attention_options,
                    )  # fmt: skip
                else:
                    attn = self.plain_attention(stage, dim, heads, grid_size)
                mlp, rate = Mlp(dim, int(dim * mlp_ratios[stage])), drop_path_rate * index / max(1, sum(depths) - 1)
                blocks.append(Block(attn, norm(dim), norm(dim), mlp, DropPath(rate), DropPath(rate)))
                index += 1
            stages.append(Stage(embed, blocks, grid_size=grid_size, positions=self.positions, dynamic=dynamic_img_size))
            channels = dim
        self.stages = nn.ModuleList(stages)
        self.feature_info = [
            {"num_chs": dim, "reduction": 4 * 2**stage, "module": f"stages.{stage}"}
            for stage, dim in enumerate(embed_dims)
        ]
        self.in_chans = in_chans
        self.num_features = self.head_hidden_size = channels
        self.norm = norm(channels) if self.final_norm else nn.Identity()
        self.head_drop = nn.Dropout(drop_rate)
        self.global_pool = ""
        self.reset_classifier(num_classes, global_pool)
        initialise_linear(self)
        self.to(device=device, dtype=dtype)

    @abstractmethod
    def plain_attention(self, stage: int, dim: int, num_heads: int, grid_size: tuple[int, int]) -> nn.Module:
        """The attention of the blocks of a stage that have no other."""

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that are not decayed."""
        return {name for name, _ in self.named_parameters() if name.endswith("pos_embed")} | undecayed(self)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns of the parameters of each layer, for layer-wise learning rates."""
        before = r"^stages\.(\d+)\.(?:embed|embed_norm|pos_embed)"
        fine = [(before, (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None), (r"^norm", (99999,))]
        return {"stem": r"^stages\.0\.(?:embed|pos_embed)", "blocks": r"^stages\.(\d+)" if coarse else fine}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass, or not."""
        for stage in self.modules():
            if isinstance(stage, Stage):
                stage.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        """The linear layer before the logits."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier, none for 0 classes, and another pooling if one is given.

        Raises:
            ValueError: another pooling than avg and none.
        """
        if global_pool not in (None, "avg", ""):
            raise ValueError(f"global_pool: {global_pool!r} is not 'avg' or ''")
        if global_pool is not None:
            self.global_pool = global_pool
        self.num_classes = num_classes
        self.head: nn.Module = nn.Linear(self.num_features, num_classes) if num_classes > 0 else nn.Identity()
        initialise_linear(self.head)
        self.head.to(next(self.parameters())).train(self.training)

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (N, C, H', W') -> (N, H, W, D) of the last stage."""
        for index, stage in enumerate(self.stages):
            x = stage(x if index == 0 else x.permute(0, 3, 1, 2))
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """(N, H, W, D) -> logits (N, num_classes), or what the classifier reads."""
        x = self.head_drop(x.mean(dim=(1, 2)) if self.global_pool == "avg" else x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, C, H', W') -> logits (N, num_classes)."""
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """What the stages `indices` give, (N, D, H, W), alone or after `forward_features`, as timm's pyramids.

        Raises:
            ValueError: another format than NCHW.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt: {output_fmt!r}; features are NCHW")
        take, last = feature_take_indices(len(self.stages), indices)
        features = []
        for index, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            x = stage(x if index == 0 else x.permute(0, 3, 1, 2))
            final = index == len(self.stages) - 1
            if index in take:
                features.append((self.norm(x) if final and norm else x).permute(0, 3, 1, 2).contiguous())
            x = self.norm(x) if final else x
        return features if intermediates_only else (x, features)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages, the norm and the classifier that features of the stages `indices` do not need."""
        take, last = feature_take_indices(len(self.stages), indices)
        shorter = last < len(self.stages) - 1
        self.stages = self.stages[: last + 1]
        if prune_norm or shorter:
            self.norm = nn.Identity()
        if shorter:
            self.num_features = self.head_hidden_size = self.feature_info[last]["num_chs"]
        if prune_head or shorter:
            self.reset_classifier(0, "")
        return take


def _grid_after(embed: nn.Conv2d, size: tuple[int, int]) -> tuple[int, int]:
    """Grid of the tokens that a convolution makes of an image or grid of that size."""
    (kernel, _), (stride, _), padding = embed.kernel_size, embed.stride, embed.padding[0]
    assert isinstance(padding, int)
    height, width = ((side + 2 * padding - kernel) // stride + 1 for side in size)
    return height, width


class PyramidVisionTransformer(Pyramid):
    """PVT v1: keys and values at an 8th, a 4th, half and the whole of the grid's side, by stage."""

    kernels, paddings, positions, final_norm, norm_eps = (4, 2, 2, 2), (0, 0, 0, 0), True, False, 1e-6

    def plain_attention(self, stage: int, dim: int, num_heads: int, grid_size: tuple[int, int]) -> nn.Module:
        """PVT's spatial-reduction attention; it is timm's of PVT v2."""
        return ReducedAttention(dim, num_heads, sr_ratio=(8, 4, 2, 1)[stage])


class CSwinTransformer(Pyramid):
    """CSwin: stripes of 1, 2 and 7 tokens by stage, none in the last one; overlapping convolutions, no positions."""

    kernels, paddings, positions, final_norm, norm_eps = (7, 3, 3, 3), (2, 1, 1, 1), False, True, 1e-5

    def plain_attention(self, stage: int, dim: int, num_heads: int, grid_size: tuple[int, int]) -> nn.Module:
        """CSwin's cross-shaped windows."""
        stripe = (1, 2, 7, None)[stage]
        return CrossShapedAttention(dim, num_heads, grid_size=grid_size, stripe=stripe, reduction=4 * 2**stage)
