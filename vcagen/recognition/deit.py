"""DeiT (arXiv 2012.12877): timm's VisionTransformer with Visual-Contrast Attention in all blocks."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vcagen.recognition.block import Block, contrast_block, refuse, undecayed

NOT_OURS = (
    "qk_norm", "scale_attn_norm", "init_values", "attn_drop_rate", "proj_drop_rate", "patch_drop_rate", "weight_init",
    "fix_init",
)  # fmt: skip


class ContrastVisionTransformer(VisionTransformer):  # type: ignore[misc]  # timm has no types
    """A plain vision transformer with Visual-Contrast Attention; prefix tokens are neither pooled nor convolved.

    Args:
        contrast_grid: rows and columns of the contrast tokens, or one number for both.
        attention_options: further options of `VisualContrastAttention`, those of Tables 3 and 4 among them.
        options: those of timm's VisionTransformer. `dynamic_img_size` takes images of any size and aspect ratio.

    Raises:
        ValueError: a contrast grid that is not possible, or an option of timm's plain attention.
    """

    def __init__(
        self,
        *,
        contrast_grid: int | Sequence[int] = 7,
        attention_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        refuse(options, NOT_OURS)
        super().__init__(**options)
        for index, plain in enumerate(self.blocks):
            self.blocks[index] = contrast_block(
                Block, plain, grid_size=self.patch_embed.grid_size, block_index=index, contrast_grid=contrast_grid,
                num_prefix_tokens=self.num_prefix_tokens, attention_options=attention_options,
            )  # fmt: skip

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that are not decayed."""
        return super().no_weight_decay() | undecayed(self)

    def _tokens(self, images: Tensor, keep: Container[int], stop: int | None) -> tuple[Tensor, list[Tensor]]:
        """Tokens after the first `stop` blocks, and after each of those in `keep`: (N, T, D)."""
        grid_size = self.patch_embed.dynamic_feat_size(images.shape[-2:])
        x = self.norm_pre(self._pos_embed(self.patch_embed(images)))
        kept = []
        for index, block in enumerate(self.blocks[:stop]):
            if self.grad_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, grid_size, use_reentrant=False)
            else:
                x = block(x, grid_size)
            if index in keep:
                kept.append(x)
        return x, kept

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Images (N, C, H, W) -> tokens (N, T, D), prefix tokens first."""
        refuse({"attn_mask": attn_mask is not None, "is_causal": is_causal}, ("attn_mask", "is_causal"))
        return self.norm(self._tokens(x, (), None)[0])

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        """Tokens after the blocks `indices`, as timm's VisionTransformer gives them."""
        refuse({"attn_mask": attn_mask is not None, "is_causal": is_causal}, ("attn_mask", "is_causal"))
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt: {output_fmt!r} is not NCHW or NLC")
        take, last = feature_take_indices(len(self.blocks), indices)
        grid_size = self.patch_embed.dynamic_feat_size(x.shape[-2:])
        x, kept = self._tokens(x, take, last + 1 if stop_early else None)
        kept = [self.norm(tokens) for tokens in kept] if norm else kept
        prefix = [tokens[:, : self.num_prefix_tokens] for tokens in kept]
        features = [tokens[:, self.num_prefix_tokens :] for tokens in kept]
        if output_fmt == "NCHW":
            features = [tokens.mT.unflatten(2, grid_size).contiguous() for tokens in features]
        with_prefix = return_prefix_tokens and self.num_prefix_tokens > 0
        if output_dict:
            return {
                "image_intermediates": features,
                **({"image_intermediates_prefix": prefix} if with_prefix else {}),
                **({} if intermediates_only else {"image_features": self.norm(x)}),
            }
        found = list(zip(features, prefix, strict=True)) if with_prefix else features
        return found if intermediates_only else (self.norm(x), found)
