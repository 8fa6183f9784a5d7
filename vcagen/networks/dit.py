"""DiT (arXiv 2212.09748): the one backbone of DiT and SiT, with any registered attention.

Symbols: N batch, C latent channels, H, W latent height and width, p patch size, T = (H / p) (W / p) tokens, D width.
Names of parameters and initialisation are those of the public code (facebookresearch/DiT), so that its files load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from einops import rearrange
from timm.layers import Mlp, PatchEmbed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vcagen.networks.attention import as_grid, make_attention

DIT_SIZES: dict[str, dict[str, int]] = {
    "S": {"hidden_size": 384, "depth": 12, "num_heads": 6},
    "B": {"hidden_size": 768, "depth": 12, "num_heads": 12},
    "L": {"hidden_size": 1024, "depth": 24, "num_heads": 16},
    "XL": {"hidden_size": 1152, "depth": 28, "num_heads": 16},
}


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x (1 + scale) + shift, with shift and scale (N, D) the same for all tokens of x (N, T, D)."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TimestepEmbedder(nn.Module):
    """Sinusoids of t through an MLP. Integers of DDPM and the unscaled [0, 1] of flows both come in as they are."""

    def __init__(self, hidden_size: int, num_frequencies: int = 128) -> None:
        super().__init__()
        self.num_frequencies = num_frequencies
        self.mlp = nn.Sequential(
            nn.Linear(2 * num_frequencies, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )

    def forward(self, t: Tensor) -> Tensor:
        """(N,) -> (N, D)."""
        # Not a buffer: casting the network to half precision would round it, and 999 times the error is large.
        steps = torch.arange(self.num_frequencies, dtype=torch.float32, device=t.device)
        angles = t.float()[:, None] * torch.exp(-math.log(10_000) * steps / self.num_frequencies)
        sinusoids = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return self.mlp(sinusoids.to(next(self.mlp.parameters()).dtype))


class LabelEmbedder(nn.Module):
    """A vector a class, and one more for the null label where labels are dropped in training."""

    def __init__(self, num_labels: int, hidden_size: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(num_labels, hidden_size)

    def forward(self, y: Tensor) -> Tensor:
        """(N,) -> (N, D)."""
        return self.embedding_table(y)


class DiTBlock(nn.Module):
    """Attention and MLP, each between a modulated LayerNorm and a gate (adaLN-Zero)."""

    def __init__(self, hidden_size: int, attention: nn.Module, mlp_ratio: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = attention
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(hidden_size, int(hidden_size * mlp_ratio), act_layer=lambda: nn.GELU(approximate="tanh"))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Tokens (N, T, D) and condition (N, D) -> (N, T, D)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))


class FinalLayer(nn.Module):
    """Modulated LayerNorm and the projection of each token to its patch."""

    def __init__(self, hidden_size: int, patch_size: int, out_channels: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(hidden_size, patch_size * patch_size * out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Tokens (N, T, D) and condition (N, D) -> patches (N, T, p * p * out_channels)."""
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class DiT(nn.Module):
    """Diffusion transformer on a latent image, conditioned on time and class.

    Args:
        input_size: latent height and width, or one number for both; divisible by the patch size.
        out_channels: channels of the prediction: those of the input for flow, twice as many with a learned variance.
        num_classes: classes 0 .. num_classes - 1.
        class_dropout_prob: kept for the training loop, which drops labels; 0 makes a network without a null label.
        attention: name in ATTENTION, for every block; `attention_options` are its keyword arguments.
        gradient_checkpointing: recompute the blocks in the backward pass.

    Attributes:
        null_label: the label of "no class", equal to num_classes; None in a network without one.

    Raises:
        ValueError: a value that is not possible, by name.
    """

    def __init__(
        self,
        *,
        input_size: int | Sequence[int],
        patch_size: int,
        in_channels: int,
        out_channels: int,
        hidden_size: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        num_classes: int,
        class_dropout_prob: float = 0.1,
        attention: str = "mhsa",
        attention_options: Mapping[str, object] | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        height, width = as_grid("input_size", input_size)
        positive = {
            "patch_size": patch_size, "in_channels": in_channels, "out_channels": out_channels, "depth": depth,
            "hidden_size": hidden_size, "num_heads": num_heads, "mlp_ratio": mlp_ratio, "num_classes": num_classes,
        }  # fmt: skip
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(f"{name}: {value} is not positive")
        if not 1 <= hidden_size * mlp_ratio < 2**24:
            raise ValueError(f"mlp_ratio: {mlp_ratio} times the width {hidden_size} is not between 1 and 2^24")
        if height % patch_size or width % patch_size:
            raise ValueError(f"patch_size: {height} x {width} is not divisible by {patch_size}")
        if hidden_size % 4:
            raise ValueError(f"hidden_size: {hidden_size} is not divisible by 4, as the position table needs")
        if not 0 <= class_dropout_prob <= 1:
            raise ValueError(f"class_dropout_prob: {class_dropout_prob} is not between 0 and 1")
        if wrong := [key for key in attention_options or {} if not isinstance(key, str)]:
            raise ValueError(f"attention_options: {wrong[0]!r} is not the name of an option")
        if own := {"dim", "num_heads", "grid_size", "block_index", "num_prefix_tokens"} & set(attention_options or {}):
            raise ValueError(f"attention_options: {', '.join(sorted(own))}: set by the network itself")
        self.input_size = (height, width)
        self.grid_size = (height // patch_size, width // patch_size)
        self.patch_size = patch_size
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.num_classes = num_classes
        self.class_dropout_prob = class_dropout_prob
        self.null_label = num_classes if class_dropout_prob > 0 else None
        self.gradient_checkpointing = gradient_checkpointing

        self.x_embedder = PatchEmbed(self.input_size, patch_size, in_channels, hidden_size)
        self.t_embedder = TimestepEmbedder(hidden_size)
        self.y_embedder = LabelEmbedder(num_classes + (self.null_label is not None), hidden_size)
        # Fixed, but a parameter as in the public code: it is counted and saved with the others.
        self.pos_embed = nn.Parameter(sincos_positions(self.grid_size, hidden_size), requires_grad=False)
        self.blocks = nn.ModuleList()
        for index in range(depth):
            layer = make_attention(
                attention,
                hidden_size,
                num_heads,
                grid_size=self.grid_size,
                block_index=index,
                **(attention_options or {}),
            )
            self.blocks.append(DiTBlock(hidden_size, layer, mlp_ratio))
        self.final_layer = FinalLayer(hidden_size, patch_size, out_channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as the public code: Xavier for linear layers, N(0, 0.02^2) for embeddings, zero for the gates."""
        for name, parameter in self.named_parameters():
            if name.endswith(".bias") or "adaLN_modulation" in name or name.startswith("final_layer."):
                nn.init.zeros_(parameter)
            elif name.startswith(("t_embedder.", "y_embedder.")):
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith(".weight") and parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter.flatten(1))

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Predict at x (N, C, H, W), times t (N,) and labels y (N,): (N, out_channels, H, W)."""
        assert x.shape[1:] == (self.in_channels, *self.input_size), x.shape
        x = self.x_embedder(x) + self.pos_embed  # (N, T, D)
        c = self.t_embedder(t) + self.y_embedder(y)  # (N, D)
        for block in self.blocks:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(block, x, c, use_reentrant=False)  # (N, T, D)
            else:
                x = block(x, c)  # (N, T, D)
        x = self.final_layer(x, c)  # (N, T, p * p * out_channels)
        return self.unpatchify(x)  # (N, out_channels, H, W)

    def unpatchify(self, patches: Tensor) -> Tensor:
        """(N, T, p * p * out_channels) -> (N, out_channels, H, W)."""
        rows, p = self.grid_size[0], self.patch_size
        return rearrange(patches, "n (r s) (p q c) -> n c (r p) (s q)", r=rows, p=p, q=p)


def sincos_positions(grid_size: tuple[int, int], dim: int) -> Tensor:
    """Fixed sine-cosine table (1, T, dim): half of the channels for the column, half for the row."""
    height, width = grid_size
    frequencies = 10_000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    rows, columns = (torch.outer(torch.arange(side, dtype=torch.float64), frequencies) for side in (height, width))
    rows, columns = (torch.cat([angles.sin(), angles.cos()], dim=1) for angles in (rows, columns))  # (side, dim / 2)
    table = torch.cat([columns.repeat(height, 1), rows.repeat_interleave(width, dim=0)], dim=1)
    return table.float().unsqueeze(0)


def parse_size(size: str) -> dict[str, int]:
    """hidden_size, depth, num_heads and patch_size of a name such as S/2.

    Raises:
        ValueError: not one of the sizes, or no patch size.
    """
    name, _, patch = size.partition("/")
    if name not in DIT_SIZES or not patch.isdecimal() or int(patch) < 1:
        raise ValueError(f"size: {size!r} is not one of {', '.join(DIT_SIZES)}, a slash, and a patch size such as 2")
    return {**DIT_SIZES[name], "patch_size": int(patch)}
