"""Visual-Contrast Attention as one operator on the packed projection: the Triton kernels of `fused_kernels`.

Symbols: N images, T tokens, M heads, d head width, n contrast tokens; `attention.py` has the equations. Nothing of size
T x n is kept, and q, k and v are read, and their gradient is written, in the layout (N, T, 3, M, d) of the projection.

Importing this file needs no Triton: the kernels are imported at the first call. With TRITON_INTERPRET=1 in the
environment they run on the CPU, slowly, for tests.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

MAX_CONTRAST_TOKENS = 128
HEAD_DIMS = range(32, 129)
OLDEST_TRITON = (3, 5)
"""Older ones do not compile loops over tuples of blocks; PyTorch 2.9 brings 3.5."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not(num_contrast_tokens: int, head_dim: int, stages: tuple[str, str]) -> str | None:
    """Why the kernels can't compute an attention of these sizes and stages; None if they can, on a device to come."""
    if stages != ("contrast", "contrast"):
        return f"computes both stages as contrast, not {stages[0]} and {stages[1]}"
    if num_contrast_tokens > MAX_CONTRAST_TOKENS:
        return f"holds up to {MAX_CONTRAST_TOKENS} contrast tokens, not {num_contrast_tokens}"
    if head_dim not in HEAD_DIMS:
        return f"needs heads {HEAD_DIMS[0]} to {HEAD_DIMS[-1]} wide, not {head_dim}"
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed (torch for CUDA brings it)"
    import triton

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
        return f"needs triton 3.5 or newer, which PyTorch 2.9 brings, not {triton.__version__}"
    return None


def column_blocks(head_dim: int) -> tuple[int, int]:
    """Widths, powers of two, of the two blocks in which the kernels hold `head_dim` columns; 0 for no second one."""
    main = 1 << (head_dim.bit_length() - 1)
    rest = max(16, _power_of_two(head_dim - main))
    if main == head_dim:
        return main, 0
    return (main, rest) if rest < main else (2 * main, 0)


def precision(dtype: torch.dtype) -> str:
    """How Triton multiplies float32: exactly, unless torch may use TF32. It means nothing to other types."""
    return "ieee" if dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32 else "tf32"


def launch_options(
    kernel: str, head_dim: int, dtype: torch.dtype, num_tokens: int, capability: tuple[int, int]
) -> dict[str, int]:
    """Rows of a block, warps and pipeline stages of a kernel; docs/benchmarks.md shows what others cost.

    The fewest instructions win, not the fewest spills: with 64 rows four warps share the tensor cores' tiles without
    doing anything twice, which eight would. Exact float32 has no tensor cores, and needs the registers of eight.
    """
    if precision(dtype) == "ieee":
        rows, warps, stages = 32 if kernel == "forward" else 16, 8, 1
    elif dtype == torch.float32:
        rows, warps, stages = 32, 4, 1
    elif head_dim <= 96:
        rows, warps, stages = 64, 4, 2 if head_dim <= 64 and capability[0] == 9 else 1
    else:
        rows, warps, stages = 64 if kernel == "forward" else 32, 4, 1
    return {"B": max(16, min(rows, _power_of_two(num_tokens))), "num_warps": warps, "num_stages": stages}


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def kernel_sizes(
    num_tokens: int, head_dim: int, grid: list[int], contrast_grid: list[int], dtype: torch.dtype
) -> dict[str, Any]:
    """The compile-time sizes that `forward` and `backward` share, by their names there."""
    (height, width), (rows, columns) = grid, contrast_grid
    first, second = column_blocks(head_dim)
    return {
        "n": rows * columns, "d": head_dim, "C": max(16, _power_of_two(rows * columns)),
        "D1": first, "D2": second, "P": _power_of_two(head_dim),
        "T": num_tokens, "PREFIX": num_tokens - height * width, "H": height, "W": width, "h": rows, "w": columns,
        "KH": _largest_bin(height, rows), "KW": _largest_bin(width, columns),
        "PRECISION": precision(dtype),
    }  # fmt: skip


def _largest_bin(size: int, bins: int) -> int:
    """Tokens in the largest bin of adaptive pooling, along one side."""
    return max(-(-(i + 1) * size // bins) - i * size // bins for i in range(bins))


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


# Schemas in words: PyTorch 2.6 does not derive them from `list[int]`.
_TENSORS = (
    "Tensor qkv, Tensor? embedding1, Tensor? embedding2, "
    "Tensor lambdas1, Tensor lambdas2, Tensor weight1, Tensor weight2"
)
_OPTIONS = "int[] grid, int[] contrast_grid, bool pool1, bool pool2, float lambda_init"


@torch.library.custom_op(
    "vcagen::contrast_attention",
    mutates_args=(),
    schema=f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def contrast_attention(
    qkv: Tensor,
    embedding1: Tensor | None,
    embedding2: Tensor | None,
    lambdas1: Tensor,
    lambdas2: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    grid: list[int],
    contrast_grid: list[int],
    pool1: bool,
    pool2: bool,
    lambda_init: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both contrast stages, before the output projection.

    Args:
        qkv: queries, keys and values (N, T, 3, M, d); tokens before the grid's H * W last ones are not pooled.
        embedding1, embedding2: e+ and e-, (M, n, d), or None for a stream of pooled queries alone.
        lambdas1, lambdas2: q1, k1, q2, k2 of each stage, (4, d).
        weight1, weight2: of the two RMSNorms, (d,).
        grid, contrast_grid: (H, W) of the tokens and (h, w) of the contrast tokens, h * w = n.
        pool1, pool2: whether t+ and t- contain the pooled queries.
        lambda_init: as in `VisualContrastAttention`.

    Returns:
        The heads' outputs (N, T, M, d), and what the backward pass needs: y and v- (N, M, 2, n, d) in the type of qkv,
        and the log-sum-exps (base 2) of Stage I, (N, M, 2, n), and of Stage II, (N, M, 2, T), in float32.

    Raises:
        ValueError: a device or a type that the kernels do not run on.
    """
    kernels = _kernels(qkv)
    images, tokens, _three, heads, width = qkv.shape
    outputs = _outputs(qkv, contrast_grid)
    sizes = kernel_sizes(tokens, width, grid, contrast_grid, qkv.dtype)
    launch = launch_options("forward", width, qkv.dtype, tokens, _capability(qkv.device))
    with torch.cuda.device_of(qkv):
        kernels.forward[(images * heads,)](
            qkv.contiguous(), embedding1, embedding2, lambdas1, lambdas2, weight1, weight2, *outputs,
            heads, lambda_init, POOL1=pool1, POOL2=pool2, **sizes, **launch,
        )  # fmt: skip
    return outputs


@torch.library.custom_op(
    "vcagen::contrast_attention_backward",
    mutates_args=(),
    schema=f"(Tensor g_out, {_TENSORS}, Tensor saved, Tensor lse1, Tensor lse2, {_OPTIONS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def contrast_attention_backward(
    g_out: Tensor,
    qkv: Tensor,
    embedding1: Tensor | None,
    embedding2: Tensor | None,
    lambdas1: Tensor,
    lambdas2: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    saved: Tensor,
    lse1: Tensor,
    lse2: Tensor,
    grid: list[int],
    contrast_grid: list[int],
    pool1: bool,
    pool2: bool,
    lambda_init: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first seven arguments of `contrast_attention`, an empty one for an embedding that is None."""
    kernels = _kernels(qkv)
    images, tokens, _three, heads, width = qkv.shape
    n = saved.shape[3]
    parameters = embedding1, embedding2, lambdas1, lambdas2, weight1, weight2
    g_qkv, *g_parameters = gradients = _gradients(qkv, *parameters)
    g_streams = lse1.new_empty(images, heads, 2, n, width)
    g_lambdas, g_weights = lse1.new_empty(images, heads, 2), lse1.new_empty(images, heads, 2, width)
    sizes = kernel_sizes(tokens, width, grid, contrast_grid, qkv.dtype)
    launch = launch_options("backward", width, qkv.dtype, tokens, _capability(qkv.device))
    block, columns = 128, 16
    programs = -(-2 * heads * n * width // block) + 2 * -(-width // columns) + 2
    with torch.cuda.device_of(qkv):
        kernels.backward[(images * heads,)](
            qkv.contiguous(), *parameters, saved, lse1, lse2, g_out.contiguous(), g_qkv, g_streams,
            qkv.new_empty(images, heads, n, width), g_lambdas, g_weights, heads, lambda_init,
            POOL1=pool1, POOL2=pool2, **sizes, **launch,
        )  # fmt: skip
        kernels.reduce[(programs,)](
            g_streams, g_lambdas, g_weights, lambdas1, lambdas2,
            *(g if g.numel() else None for g in g_parameters), images, heads, lambda_init,
            n=n, d=width, P=_power_of_two(width), E=block, K=columns,
        )  # fmt: skip
    return gradients


def _kernels(qkv: Tensor) -> Any:
    """The module of the kernels, if they run on this tensor."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if qkv.device.type != "cuda" and not interpreted:
        raise ValueError(f"kernel: fused runs on CUDA devices, not on {qkv.device.type}; kernel: maps runs on any")
    if qkv.dtype not in DTYPES:
        raise ValueError(f"kernel: fused computes in float32, bfloat16 or float16, not {str(qkv.dtype)[6:]}")
    from vcagen.networks import fused_kernels

    return fused_kernels


def _outputs(qkv: Tensor, contrast_grid: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, tokens, _three, heads, width = qkv.shape
    n = contrast_grid[0] * contrast_grid[1]
    return (
        qkv.new_empty(images, tokens, heads, width),
        qkv.new_empty(images, heads, 2, n, width),
        qkv.new_empty(images, heads, 2, n, dtype=torch.float32),
        qkv.new_empty(images, heads, 2, tokens, dtype=torch.float32),
    )


def _gradients(
    qkv: Tensor, embedding1: Tensor | None, embedding2: Tensor | None, *others: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    g1, g2 = (qkv.new_empty(0) if e is None else torch.empty_like(e) for e in (embedding1, embedding2))
    g3, g4, g5, g6 = (torch.empty_like(x) for x in others)
    return torch.empty_like(qkv, memory_format=torch.contiguous_format), g1, g2, g3, g4, g5, g6


@contrast_attention.register_fake
def _(qkv: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _outputs(qkv, arguments[7])


@contrast_attention_backward.register_fake
def _(g_out: Tensor, qkv: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _gradients(qkv, *arguments[:6])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:7], *output[1:])
    ctx.options = inputs[7:]


def _backward(ctx: Any, g_out: Tensor, *_others: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    gradients = contrast_attention_backward(g_out, *saved, *ctx.options)
    return (
        gradients[0],
        *(None if e is None else g for e, g in zip(saved[1:3], gradients[1:3], strict=True)),
        *gradients[3:],
        *(None for _ in ctx.options),
    )


contrast_attention.register_autograd(_backward, setup_context=_save)


def _multiply_adds(qkv_shape: Any, contrast_grid: list[int]) -> int:
    """6 n T D an image, as the maps of `attention.py`; `cost.py` adds the one that the paper counts beside them."""
    images, tokens, _three, heads, width = qkv_shape
    return 6 * images * heads * contrast_grid[0] * contrast_grid[1] * tokens * width


@register_flop_formula(torch.ops.vcagen.contrast_attention)
def _forward_flops(qkv_shape: Any, *arguments: Any, **_shapes: Any) -> int:
    return 2 * _multiply_adds(qkv_shape, arguments[7])


@register_flop_formula(torch.ops.vcagen.contrast_attention_backward)
def _backward_flops(_g_out_shape: Any, qkv_shape: Any, *arguments: Any, **_shapes: Any) -> int:
    return 2 * 2 * _multiply_adds(qkv_shape, arguments[10])
