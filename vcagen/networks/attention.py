"""Visual-Contrast Attention (arXiv 2511.00833) and the registry of attentions.

Symbols: N batch, M heads, T tokens on an H x W grid, D width, d = D / M, n = h * w contrast tokens on an h x w grid.
q, k, v are (N, M, T, d). The maps are n x T in Stage I and T x n in Stage II: nothing is ever T x T.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from einops import rearrange, reduce, repeat
from timm.layers.attention import Attention
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vcagen.networks import fused

Stage = Literal["contrast", "differential", "vanilla"]
Tokens = Literal["pool", "emb", "pool+emb"]
Kernel = Literal["maps", "fused"]


class VisualContrastAttention(nn.Module):
    """Attention in two stages through n contrast tokens, linear in the number of tokens.

    Stage I pools the queries to n tokens, adds two learned embeddings and lets both streams attend to all keys; the
    difference of the two attention maps, applied to v, is the contrast map V (n x d). Stage II lets every query attend
    to both streams of tokens, and applies the difference of those two maps to V. Together 6 n T D multiply-adds.

    The ablations of Tables 3 and 4 are options. `stage1` and `stage2`: contrast; differential (the original
    Differential Transformer inside the stage, on pooled tokens, with q, k and tokens split in two halves); vanilla (one
    plain softmax attention with the pooled tokens). `positive_tokens` and `negative_tokens`: what a stream is made of.

    Args:
        dim: width D of the input and of the output.
        num_heads: number of heads M; dim / num_heads must be even.
        grid_size: (H, W) of the token grid, or H for a square one.
        block_index: 0-based index of the block, for lambda_init = 0.8 - 0.6 exp(-0.3 * block_index) (arXiv 2410.05258).
        contrast_grid: (h, w) of the contrast tokens, larger than the token grid if you like.
        num_prefix_tokens: tokens before the grid (a class token); they are left out of the pooling and the convolution.
        value_conv: add a depthwise 3 x 3 convolution of v, with bias, to the heads' output before the projection. The
            paper does not tell of it, but the parameters of its Table 1 contain it; the public Agent Attention code
            has it there.
        kernel: maps, plain PyTorch; or fused, both stages in one CUDA kernel a direction (`fused.py`), which takes
            both stages as contrast, up to 128 contrast tokens and heads 32 to 128 wide.
        recompute_maps: compute the maps again in the backward pass rather than keep them (kernel maps only).

    Raises:
        ValueError: a value that is not possible, by name; in `forward`, a token count that does not fit the grid, or
            a mask.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        grid_size: int | Sequence[int],
        block_index: int = 0,
        contrast_grid: int | Sequence[int] = (8, 8),
        stage1: Stage = "contrast",
        stage2: Stage = "contrast",
        positive_tokens: Tokens = "pool+emb",
        negative_tokens: Tokens = "pool+emb",
        qkv_bias: bool = True,
        num_prefix_tokens: int = 0,
        value_conv: bool = False,
        kernel: Kernel = "maps",
        recompute_maps: bool = False,
    ) -> None:
        super().__init__()
        head_dim = _head_dim(dim, num_heads)
        if head_dim % 2:
            raise ValueError(f"num_heads: {num_heads} heads of dim {dim} are {head_dim} wide; the width must be even")
        for name, value, valid in (
            ("stage1", stage1, get_args(Stage)),
            ("stage2", stage2, get_args(Stage)),
            ("positive_tokens", positive_tokens, get_args(Tokens)),
            ("negative_tokens", negative_tokens, get_args(Tokens)),
            ("kernel", kernel, get_args(Kernel)),
        ):
            if value not in valid:
                raise ValueError(f"{name}: {value!r} is not one of {', '.join(valid)}")
        if block_index < 0:
            raise ValueError(f"block_index: {block_index} is negative")
        if num_prefix_tokens < 0:
            raise ValueError(f"num_prefix_tokens: {num_prefix_tokens} is negative")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.grid_size = as_grid("grid_size", grid_size)
        self.contrast_grid = as_grid("contrast_grid", contrast_grid)
        self.num_prefix_tokens = num_prefix_tokens
        self.num_tokens = self._count(self.grid_size)
        self.num_contrast_tokens = math.prod(self.contrast_grid)
        self.stage1, self.stage2 = stage1, stage2
        self.positive_tokens, self.negative_tokens = positive_tokens, negative_tokens
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * block_index)
        if kernel == "fused" and (reason := fused.why_not(self.num_contrast_tokens, head_dim, (stage1, stage2))):
            raise ValueError(f"kernel: fused {reason}; kernel: maps computes any")
        if kernel == "fused" and recompute_maps:
            raise ValueError("recompute_maps: kernel: fused keeps no maps")
        self.kernel, self.recompute_maps = kernel, recompute_maps

        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        contrast = "contrast" in (stage1, stage2)
        self.positive_embedding = self._embedding() if contrast and "emb" in positive_tokens else None
        self.negative_embedding = self._embedding() if contrast and "emb" in negative_tokens else None
        self.lambda1, self.norm1 = self._lambda_and_norm(stage1)
        self.lambda2, self.norm2 = self._lambda_and_norm(stage2)
        self.value_conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim) if value_conv else None
        self.reset_parameters()

    def _embedding(self) -> nn.Parameter:
        return nn.Parameter(torch.empty(self.num_heads, self.num_contrast_tokens, self.head_dim))

    def _lambda_and_norm(self, stage: Stage) -> tuple[nn.Parameter | None, nn.RMSNorm | None]:
        if stage == "vanilla":
            return None, None
        return nn.Parameter(torch.empty(4, self.head_dim)), nn.RMSNorm(self.head_dim, eps=1e-5)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw embeddings and lambda vectors: std 0.02 within two deviations, and 0.1 (arXiv 2410.05258)."""
        for embedding in (self.positive_embedding, self.negative_embedding):
            if embedding is not None:
                nn.init.trunc_normal_(embedding, std=0.02, a=-0.04, b=0.04)
        for vectors in (self.lambda1, self.lambda2):
            if vectors is not None:
                vectors.copy_(0.1 * torch.randn_like(vectors))

    def forward(
        self,
        x: Tensor,
        grid_size: tuple[int, int] | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """(N, T, D) -> (N, T, D).

        `grid_size` (H, W) is that of these tokens, where it is not that of the constructor: the contrast tokens stay as
        many. Blocks of timm give `attn_mask` and `is_causal`; both must be off.
        """
        if attn_mask is not None or is_causal:
            raise ValueError("attn_mask, is_causal: pooled queries see all tokens, so there is nothing to mask")
        qkv = rearrange(self.qkv(x), "n t (three m d) -> n t three m d", three=3, m=self.num_heads)
        if self.kernel == "fused":
            v = qkv[:, :, 2].transpose(1, 2)  # (N, M, T, d)
            out = self.attend_packed(qkv, grid_size).flatten(2)
        else:
            attend = self.attend
            if self.recompute_maps and torch.is_grad_enabled():
                attend = partial(checkpoint, self.attend, use_reentrant=False, preserve_rng_state=False)
            q, k, v = split_qkv(qkv)
            out = rearrange(attend(q, k, v, grid_size), "n m t d -> n t (m d)")
        if self.value_conv is not None:
            out = out + self._convolve(self.value_conv, v, grid_size or self.grid_size)
        return self.proj(out)

    def _convolve(self, value_conv: nn.Conv2d, v: Tensor, grid_size: tuple[int, int]) -> Tensor:
        """The values convolved on their grid, zero for prefix tokens: (N, M, T, d) -> (N, T, D)."""
        field = rearrange(v[:, :, self.num_prefix_tokens :], "n m (h w) d -> n (m d) h w", h=grid_size[0])
        return F.pad(rearrange(value_conv(field), "n c h w -> n (h w) c"), (0, 0, self.num_prefix_tokens, 0))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid_size: tuple[int, int] | None = None) -> Tensor:
        """Both stages, before the convolution and the projection: three (N, M, T, d) -> (N, M, T, d)."""
        self._check_tokens(q.shape[2], grid_size)
        pooled = self._pool(q, grid_size)  # (N, M, n, d)
        streams = self._streams(pooled) if "contrast" in (self.stage1, self.stage2) else None  # (N, M, 2n, d)
        return self._stage2(q, pooled, streams, self._stage1(pooled, streams, k, v))

    def attend_packed(self, qkv: Tensor, grid_size: tuple[int, int] | None = None) -> Tensor:
        """`attend` of a packed projection by the kernels of `fused.py`: (N, T, 3, M, d) -> (N, T, M, d)."""
        self._check_tokens(qkv.shape[1], grid_size)
        assert self.lambda1 is not None
        assert self.lambda2 is not None
        assert self.norm1 is not None
        assert self.norm2 is not None
        out, *_saved = fused.contrast_attention(
            qkv, self.positive_embedding, self.negative_embedding, self.lambda1, self.lambda2,
            self.norm1.weight, self.norm2.weight, list(grid_size or self.grid_size), list(self.contrast_grid),
            "pool" in self.positive_tokens, "pool" in self.negative_tokens, self.lambda_init,
        )  # fmt: skip
        return out

    def _count(self, grid_size: tuple[int, int]) -> int:
        return self.num_prefix_tokens + math.prod(grid_size)

    def _check_tokens(self, count: int, grid_size: tuple[int, int] | None) -> None:
        height, width = grid_size or self.grid_size
        if count != self._count((height, width)):
            raise ValueError(
                f"grid_size: {height} x {width} with {self.num_prefix_tokens} prefix tokens holds "
                f"{self._count((height, width))} tokens, the input has {count}"
            )

    def _stage1(self, pooled: Tensor, streams: Tensor | None, k: Tensor, v: Tensor) -> Tensor:
        """The contrast map V, (N, M, n, d)."""
        if self.stage1 == "vanilla":
            return _softmax(_logits(self._scaled(pooled), k)).to(v.dtype) @ v
        assert self.lambda1 is not None
        assert self.norm1 is not None
        if self.stage1 == "differential":
            values = self._halves_map(pooled, k, self._lambda(self.lambda1)).to(v.dtype) @ v
        else:
            assert streams is not None
            positive, negative = _softmax(_logits(streams, k)).chunk(2, dim=-2)  # (N, M, n, T)
            difference = positive - self._lambda(self.lambda1) * negative
            values = difference.to(v.dtype) @ v  # the paper's v+ - lambda v-, with one product in place of two
        return self._normalise(values, self.norm1).to(v.dtype)

    def _stage2(self, q: Tensor, pooled: Tensor, streams: Tensor | None, values: Tensor) -> Tensor:
        """The head outputs, (N, M, T, d)."""
        if self.stage2 == "vanilla":
            return _softmax(_logits(q, self._scaled(pooled))).to(values.dtype) @ values
        assert self.lambda2 is not None
        assert self.norm2 is not None
        if self.stage2 == "differential":
            difference = self._halves_map(q, pooled, self._lambda(self.lambda2))
        else:
            assert streams is not None
            both = _softmax(rearrange(_logits(q, streams), "n m t (two c) -> n m t two c", two=2))  # (N, M, T, 2, n)
            difference = both[..., 0, :] - self._lambda(self.lambda2) * both[..., 1, :]
        return self._normalise(difference.to(values.dtype) @ values, self.norm2).to(values.dtype)

    def _pool(self, q: Tensor, grid_size: tuple[int, int] | None = None) -> Tensor:
        """Average pooling of the query grid to the contrast grid, by PyTorch's adaptive bins."""
        (height, width), (rows, columns) = grid_size or self.grid_size, self.contrast_grid
        q = q[:, :, self.num_prefix_tokens :]
        if height % rows == 0 and width % columns == 0:
            return reduce(q, "n m (r a c b) d -> n m (r c) d", "mean", r=rows, c=columns, a=height // rows)
        if rows % height == 0 and columns % width == 0:  # every bin lies in one token
            return repeat(q, "n m (r c) d -> n m (r a c b) d", r=height, a=rows // height, b=columns // width)
        if q.is_cuda and torch.are_deterministic_algorithms_enabled():
            return pool_by_products(q, (height, width), self.contrast_grid)
        field = rearrange(q, "n m (h w) d -> n (m d) h w", h=height)
        pooled = F.adaptive_avg_pool2d(field, self.contrast_grid)
        return rearrange(pooled, "n (m d) r c -> n m (r c) d", m=self.num_heads)

    def _streams(self, pooled: Tensor) -> Tensor:
        """Tokens t+ and t- one after the other, already divided by sqrt(d): (N, M, 2n, d)."""
        parts = []
        for tokens, embedding in (
            (self.positive_tokens, self.positive_embedding),
            (self.negative_tokens, self.negative_embedding),
        ):
            if embedding is None:
                parts.append(pooled)
            elif tokens == "emb":
                parts.append(embedding.to(pooled.dtype).expand_as(pooled))
            else:
                parts.append(pooled + embedding.to(pooled.dtype))
        return self._scaled(torch.cat(parts, dim=-2))

    def _scaled(self, tokens: Tensor) -> Tensor:
        # The n tokens are scaled rather than the logits: n << T.
        return tokens * self.head_dim**-0.5

    def _halves_map(self, rows: Tensor, columns: Tensor, lambda_: Tensor) -> Tensor:
        """softmax(r1 c1^T / sqrt(d / 2)) - lambda softmax(r2 c2^T / sqrt(d / 2)) of the two halves of each head."""
        scale = (self.head_dim // 2) ** -0.5
        first, second = (
            _softmax(_logits(r * scale, c)) for r, c in zip(rows.chunk(2, -1), columns.chunk(2, -1), strict=True)
        )
        return first - lambda_ * second

    def _lambda(self, vectors: Tensor) -> Tensor:
        vectors = _at_least_float32(vectors)  # q1, k1, q2, k2
        first, second = (vectors[0::2] * vectors[1::2]).sum(dim=1).exp()
        return first - second + self.lambda_init

    def _normalise(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        """(1 - lambda_init) * RMSNorm(x) over each head, the factor folded into the d weights."""
        x = _at_least_float32(x)
        weight = norm.weight.to(x.dtype) * (1 - self.lambda_init)
        return F.rms_norm(x, norm.normalized_shape, weight, norm.eps)


def pool_by_products(q: Tensor, grid_size: tuple[int, int], contrast_grid: tuple[int, int]) -> Tensor:
    """Adaptive average pooling (N, M, H * W, d) -> (N, M, h * w, d) whose gradient has one order of sums on any device.

    PyTorch's own has none on GPUs and is refused under deterministic algorithms.
    """
    shares = [
        F.adaptive_avg_pool1d(torch.eye(side, device=q.device, dtype=q.dtype), bins)  # (side, bins)
        for side, bins in zip(grid_size, contrast_grid, strict=True)
    ]
    field = rearrange(q, "n m (h w) d -> n m h w d", h=grid_size[0])
    pooled = torch.einsum("nmhwd,hr,wc->nmrcd", field, *shares)
    return rearrange(pooled, "n m r c d -> n m (r c) d")


class _SplitQKV(torch.autograd.Function):
    """The unbinding of a packed projection, with its gradient packed in one step.

    Autograd's own stacks the three gradients as (3, N, M, T, d) and then copies the stack into the projection's order.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.permute(2, 0, 3, 1, 4).unbind()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.stack([gradient.transpose(1, 2) for gradient in gradients], dim=2)


def split_qkv(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a packed projection: (N, T, 3, M, d) -> three (N, M, T, d)."""
    q, k, v = _SplitQKV.apply(qkv)
    return q, k, v


class _Logits(torch.autograd.Function):
    """rows columns^T, with a gradient for the columns in their own layout.

    Autograd's own is a transposed view: to copy it into the gradient of q, k and v costs more than both softmaxes.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, columns: Tensor) -> Tensor:
        logits = rows @ columns.mT
        ctx.dtypes = rows.dtype, columns.dtype
        ctx.save_for_backward(rows.to(logits.dtype), columns.to(logits.dtype))  # as autocast has used them
        return logits

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = ctx.saved_tensors
        return (gradient @ columns).to(ctx.dtypes[0]), (gradient.mT @ rows).to(ctx.dtypes[1])


def _logits(rows: Tensor, columns: Tensor) -> Tensor:
    logits: Tensor = _Logits.apply(rows, columns)
    return logits


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _head_dim(dim: int, num_heads: int) -> int:
    if num_heads < 1 or dim % num_heads:
        raise ValueError(f"num_heads: width {dim} is not divisible by {num_heads} heads")
    return dim // num_heads


def as_grid(name: str, size: int | Sequence[int]) -> tuple[int, int]:
    """(height, width) of a size given as one integer or two.

    Raises:
        ValueError: not one or two positive integers; `name` says whose.
    """
    pair = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise ValueError(f"{name}: {size!r} is not a positive integer or a pair (height, width) of them")
    return pair[0], pair[1]


class PlainAttention(Attention):  # type: ignore[misc]  # timm has no types
    """timm's multi-head self-attention, without its other options; see `split_qkv`."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, D) -> (N, T, D)."""
        q, k, v = split_qkv(rearrange(self.qkv(x), "n t (three m d) -> n t three m d", three=3, m=self.num_heads))
        if self.fused_attn:
            x = F.scaled_dot_product_attention(q, k, v)
        else:
            x = ((q * self.scale) @ k.mT).softmax(dim=-1) @ v
        return self.proj(rearrange(x, "n m t d -> n t (m d)"))


def plain_attention(
    dim: int,
    num_heads: int,
    *,
    grid_size: int | Sequence[int],
    block_index: int = 0,
    qkv_bias: bool = True,
    num_prefix_tokens: int = 0,
) -> nn.Module:
    """Multi-head self-attention under the registry's signature; the grid and the index mean nothing to it."""
    _head_dim(dim, num_heads)
    return PlainAttention(dim, num_heads, qkv_bias=qkv_bias)


ATTENTION: dict[str, Callable[..., nn.Module]] = {"mhsa": plain_attention, "vca": VisualContrastAttention}


def make_attention(
    name: str, dim: int, num_heads: int, *, grid_size: int | Sequence[int], block_index: int = 0, **options: object
) -> nn.Module:
    """The attention registered as `name`.

    Raises:
        ValueError: unknown name, an option that this attention does not have, or a value it refuses.
    """
    if name not in ATTENTION:
        raise ValueError(f"attention: {name!r} is not one of {', '.join(ATTENTION)}")
    constructor = ATTENTION[name]
    if unknown := options.keys() - inspect.signature(constructor).parameters.keys():
        raise ValueError(f"attention_options: {name} has no option {', '.join(sorted(unknown))}")
    return constructor(dim, num_heads, grid_size=grid_size, block_index=block_index, **options)
