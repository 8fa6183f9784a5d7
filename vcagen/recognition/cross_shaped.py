"""The cross-shaped window attention of CSwin (arXiv 2107.00652), with its locally enhanced positional encoding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn


class CrossShapedAttention(nn.Module):
    """Half of the heads attend in vertical stripes, half in horizontal ones; without stripes all attend to everything.

    The depthwise 3 x 3 convolution of the values is done in each stripe and added to the output of its heads.

    Args:
        stripe: width of the stripes in tokens; None for none.
        reduction: pixels a token, for the message.

    Raises:
        ValueError: stripes that do not divide the grid, also in `forward`.
    """

    def __init__(
        self, dim: int, num_heads: int, *, grid_size: tuple[int, int], stripe: int | None, reduction: int
    ) -> None:
        super().__init__()
        self.num_heads, self.stripe, self.reduction = num_heads, stripe, reduction
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.value_conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)  # as of VCA, but done in each stripe
        self._windows(grid_size)

    def _windows(self, grid_size: tuple[int, int]) -> list[tuple[int, int]]:
        """Height and width of the stripes of each group of heads."""
        height, width = grid_size
        if self.stripe is None:
            return [(height, width)]
        if height % self.stripe or width % self.stripe:
            raise ValueError(
                f"img_size: stripes of {self.stripe} do not divide the {height} x {width} tokens of a stage; "
                f"choose sides that are multiples of {self.stripe * self.reduction}"
            )
        return [(height, self.stripe), (self.stripe, width)]

    def forward(self, x: Tensor, grid_size: tuple[int, int]) -> Tensor:
        """(N, H * W, D) -> (N, H * W, D)."""
        windows = self._windows(grid_size)
        groups = rearrange(
            self.qkv(x), "n (h w) (three g m d) -> g n h w three m d",
            h=grid_size[0], three=3, g=len(windows), m=self.num_heads // len(windows),
        )  # fmt: skip
        assert self.value_conv.bias is not None
        kernels = (parameter.chunk(len(windows)) for parameter in (self.value_conv.weight, self.value_conv.bias))
        parts = [_attend(*part) for part in zip(groups, windows, *kernels, strict=True)]
        return self.proj(torch.cat(parts, dim=-1))


def _attend(qkv: Tensor, window: tuple[int, int], weight: Tensor, bias: Tensor) -> Tensor:
    """Attention of some heads in windows of h x w: (N, H, W, 3, m, d) -> (N, H * W, m * d)."""
    down, across = qkv.shape[1] // window[0], qkv.shape[2] // window[1]
    q, k, v = rearrange(qkv, "n (a h) (b w) three m d -> three (n a b) m (h w) d", a=down, b=across)
    field = rearrange(v, "n m (h w) d -> n (m d) h w", h=window[0])
    local = F.conv2d(field, weight, bias, padding=1, groups=len(weight))
    out = F.scaled_dot_product_attention(q, k, v) + rearrange(local, "n (m d) h w -> n m (h w) d", m=v.shape[1])
    return rearrange(out, "(n a b) m (h w) d -> n (a h b w) (m d)", a=down, b=across, h=window[0])
