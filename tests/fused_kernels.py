"""Cases of the fused kernels against float64, run by test_fused.py in processes of their own.

python fused_kernels.py CHECK[=CASE;CASE ...] ... Triton is interpreted, and mended where that is wrong in bfloat16;
with FUSED_DEVICE=cuda the kernels run on the GPU.
"""

import copy
import itertools
import os
import sys

os.environ["TRITON_INTERPRET"] = "0" if "FUSED_DEVICE" in os.environ else "1"

import numpy as np
import torch
import triton.language as tl
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from triton.runtime import interpreter

from vcagen.networks.attention import VisualContrastAttention
from vcagen.networks.fused import contrast_attention

DEVICE = os.environ.get("FUSED_DEVICE", "cpu")
POOL_EMB = ("pool+emb", "pool+emb")
FAST = {  # images, heads, head width, grid, contrast grid, prefix tokens, tokens of both streams
    "narrow": (2, 2, 32, (4, 4), (2, 2), 0, POOL_EMB),
    "two blocks of columns": (1, 1, 72, (4, 6), (2, 3), 0, POOL_EMB),
    "bins overlap": (1, 1, 36, (5, 7), (3, 2), 0, POOL_EMB),
    "prefix": (1, 1, 32, (3, 5), (4, 4), 2, POOL_EMB),
    "bins repeat": (1, 1, 32, (4, 4), (8, 8), 0, POOL_EMB),
    "several blocks": (1, 1, 32, (10, 10), (2, 2), 0, POOL_EMB),
    "one token": (1, 1, 32, (1, 1), (2, 2), 0, POOL_EMB),
    "one contrast token": (1, 1, 32, (3, 3), (1, 1), 0, POOL_EMB),
    "pool, emb": (2, 1, 32, (4, 4), (2, 2), 0, ("pool", "emb")),
    "emb, pool+emb": (1, 1, 32, (4, 4), (2, 2), 1, ("emb", "pool+emb")),
    "emb, emb": (1, 1, 32, (4, 4), (2, 2), 0, ("emb", "emb")),
}
FULL = {
    "S": (1, 2, 64, (16, 16), (8, 8), 0, POOL_EMB),
    "XL": (1, 1, 72, (16, 16), (8, 8), 0, POOL_EMB),
    "widest": (1, 1, 128, (8, 8), (8, 8), 0, POOL_EMB),
    "96 wide": (1, 1, 96, (8, 8), (4, 4), 0, POOL_EMB),
    "class token": (2, 1, 64, (14, 14), (7, 7), 1, POOL_EMB),
    "class token, bins overlap": (1, 1, 64, (14, 14), (8, 8), 1, POOL_EMB),
    "odd": (1, 1, 64, (15, 17), (7, 7), 0, POOL_EMB),
    "128 contrast tokens": (1, 1, 32, (16, 16), (8, 16), 0, POOL_EMB),
    "pool, pool+emb": (1, 1, 64, (8, 8), (4, 4), 1, ("pool", "pool+emb")),
}


def mend_bfloat16():
    """In the interpreter, products of bfloat16 by value, not by bits, and casts to it that round to nearest."""
    if DEVICE != "cpu":
        return

    def widened(bits):
        return (bits.astype(np.uint32) << 16).view(np.float32)

    def rounded(values):
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

    convert = interpreter._convert_float

    def convert_float(values, source, target, rounding):
        if source == tl.float32 and target == tl.bfloat16:
            return rounded(values).reshape(values.shape)
        return convert(values, source, target, rounding)

    def create_dot(self, a, b, total, *_precision):
        a, b = (widened(x.data) if x.dtype.scalar == tl.bfloat16 else x.data.astype(np.float32) for x in (a, b))
        return interpreter.TensorHandle(np.matmul(a, b) + total.data, total.dtype.scalar)

    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = create_dot


class Case:
    """A layer with random parameters that matter, a packed projection and a gradient of the output."""

    def __init__(self, images, heads, width, grid, contrast_grid, prefix, tokens, zero=False):
        torch.manual_seed(0)
        self.layer = VisualContrastAttention(
            heads * width, heads, grid_size=grid, block_index=3, contrast_grid=contrast_grid, num_prefix_tokens=prefix,
            positive_tokens=tokens[0], negative_tokens=tokens[1], kernel="fused",
        )  # fmt: skip
        for name, parameter in self.layer.named_parameters():
            if "embedding" in name:
                torch.nn.init.normal_(parameter, 0, 0.5)
            elif "norm" in name:
                torch.nn.init.normal_(parameter, 1, 0.3)
                if zero:
                    parameter.data["norm2" in name :: 4] = 0
            elif "lambda" in name and zero:
                parameter.data[1:3] = 0
        self.qkv = torch.randn(images, self.layer.num_tokens, 3, heads, width)
        self.qkv[:, :, 0] *= 1.5
        self.gradient = torch.randn(images, self.layer.num_tokens, heads, width)

    def run(self, kernel, dtype, exact_of=None):
        """Output and all gradients, in float64; with `exact_of`, of inputs rounded to that type."""
        layer = copy.deepcopy(self.layer).to(torch.float64 if dtype == torch.float64 else torch.float32)
        qkv = self.qkv.to(exact_of or dtype).to(dtype).detach().clone().requires_grad_()
        gradient = self.gradient.to(exact_of or dtype).to(dtype)
        if kernel == "fused":
            out = layer.attend_packed(qkv)
        else:
            out = layer.attend(*qkv.permute(2, 0, 3, 1, 4)).transpose(1, 2)
        out.backward(gradient)
        parts = dict(zip(("q", "k", "v"), qkv.grad.unbind(2), strict=True))
        parts |= {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
        return {name: x.double() for name, x in {"out": out.detach(), **parts}.items()}


def errors(answers, exact):
    """Error of each output, relative to its size, or to 0.1 where it vanishes (all but v with one token)."""
    assert answers.keys() == exact.keys(), answers.keys() ^ exact.keys()
    return {name: ((answers[name] - exact[name]).norm() / exact[name].norm().clamp_min(0.1)).item() for name in exact}


def float32(case):
    exact, fused, maps = (
        case.run(kernel, dtype)
        for kernel, dtype in (("maps", torch.float64), ("fused", torch.float32), ("maps", torch.float32))
    )
    ours, theirs = errors(fused, exact), errors(maps, exact)
    print({name: f"{error:.1e} {theirs[name]:.1e}" for name, error in ours.items()})
    for name, error in ours.items():  # RMSNorm is scale-free, so the gradients of lambda are sums that cancel
        assert error < 1e-5 or ("lambda" in name and error < 1e-4 + 2 * theirs[name]), (name, error, theirs[name])
    return fused


def half(case, dtype):
    """No worse than the maps. Gradients that are sums which cancel, of lambda and those that vanish: near to them.

    Their error is that of the terms, so it is taken relative to the largest gradient.
    """
    exact = case.run("maps", torch.float64, exact_of=dtype)
    fused = case.run("fused", dtype)
    ours, theirs = errors(fused, exact), errors(case.run("maps", dtype), exact)
    print({name: f"{error:.1e} {theirs[name]:.1e}" for name, error in ours.items()})
    largest = max(value.norm() for name, value in exact.items() if name != "out")
    for name, error in ours.items():
        if "lambda" in name or exact[name].norm() < 1e-6:
            assert (fused[name] - exact[name]).norm() < 0.05 * largest, (name, error, theirs[name])
        else:
            assert error < (2 if "norm" in name else 1.1) * theirs[name] + 1e-3, (name, error, theirs[name])


def check_float32(names):
    for name in names:
        print(name)
        float32(Case(*{**FAST, **FULL}[name]))


def check_half(names):
    mend_bfloat16()
    for name in names:
        for dtype in (torch.bfloat16, torch.float16):
            print(name, dtype)
            half(Case(*{**FAST, **FULL}[name]), dtype)


def check_repeats():
    case = Case(*FAST["two blocks of columns"])
    first, second = (case.run("fused", torch.float32) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def check_zero_weights():
    """Gradients where a weight is zero, a quarter of both norms, and two of the lambda vectors."""
    gradients = float32(Case(*FAST["narrow"], zero=True))
    assert all(gradients[f"norm{stage}.weight"][stage - 1 :: 4].abs().min() > 0 for stage in (1, 2))
    assert all(gradients[f"lambda{stage}"].abs().max() > 0 for stage in (1, 2))


def arguments(case):
    layer = case.layer
    return (
        case.qkv.requires_grad_(), layer.positive_embedding, layer.negative_embedding, layer.lambda1, layer.lambda2,
        layer.norm1.weight, layer.norm2.weight, list(layer.grid_size), list(layer.contrast_grid), True,
        layer.negative_tokens != "emb", layer.lambda_init,
    )  # fmt: skip


def check_operator(names):
    for name in names:
        print(torch.library.opcheck(contrast_attention, arguments(Case(*FAST[name]))))


def check_compiles(backends):
    """One graph, the eager values; with and without autocast."""
    layer = Case(*FAST["narrow"]).layer
    x = torch.randn(2, 16, 64)

    def step(module, autocast):
        layer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            out = module(x)
        out.float().square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in layer.parameters())]

    for backend, autocast in itertools.product(backends, (False, True)):
        torch.compiler.reset()
        compiled = step(torch.compile(layer, fullgraph=True, backend=backend), autocast)
        torch.testing.assert_close(compiled, step(layer, autocast), rtol=1e-4, atol=1e-4)


def check_checkpointing():
    layer = Case(*FAST["narrow"]).layer
    x = torch.randn(2, 16, 64)
    gradients = []
    for forward in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        layer.zero_grad()
        forward(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in layer.parameters()])
    assert all(map(torch.equal, *gradients))


def check_autocast():
    """Under autocast the kernels work in bfloat16, with parameters and their gradients in float32."""
    mend_bfloat16()
    layer = Case(*FAST["narrow"]).layer
    with torch.autocast(DEVICE, torch.bfloat16):
        out = layer(torch.randn(2, 16, 64))
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


def check_grid():
    """A grid at the call and the convolution of the values, as with the maps."""
    torch.manual_seed(0)
    options = {"contrast_grid": 2, "num_prefix_tokens": 1, "value_conv": True}
    layer = VisualContrastAttention(64, 2, grid_size=4, kernel="fused", **options)
    maps = VisualContrastAttention(64, 2, grid_size=4, **options)
    maps.load_state_dict(layer.state_dict())
    x = torch.randn(2, 16, 64)
    outputs = [module(x, (3, 5)) for module in (layer, maps)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    for output in outputs:
        output.square().sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, maps.get_parameter(name).grad, rtol=1e-3, atol=1e-4)


def check_flops():
    """Multiply-adds are those of the maps, in both directions."""
    counts = []
    for kernel in ("maps", "fused"):
        layer = Case(*FAST["narrow"]).layer
        layer.kernel = kernel
        with FlopCounterMode(display=False) as counter:
            layer(torch.randn(2, 16, 64, requires_grad=True)).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1], counts


if __name__ == "__main__":
    torch.set_default_device(DEVICE)
    for argument in sys.argv[1:]:
        function, _, names = argument.partition("=")
        globals()[f"check_{function}"](*([names.split(";")] if names else []))
