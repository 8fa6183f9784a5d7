"""The fused kernels: their speed beside the maps and flash attention, and what the compiler makes of them."""

from __future__ import annotations

import itertools
import math
import os
import re
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vcagen.bench._timing import in_turns
from vcagen.config.job_options import KernelsBenchConfig
from vcagen.networks import fused
from vcagen.networks.attention import VisualContrastAttention, split_qkv
from vcagen.networks.kernel_times import Times, keep_times, shape_key
from vcagen.paper.table import markdown
from vcagen.system.files import write_json

MULTIPROCESSOR = {80: (2048, 163), 86: (1536, 99), 89: (1536, 99), 90: (2048, 227), 100: (2048, 227), 120: (1536, 99)}
"""Compute capability -> threads and KiB of shared memory of a multiprocessor (CUDA C Programming Guide, table 30)."""
REGISTERS = 65536
TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
HEADER = ["kernel", "sm", "type", "d", "rows", "warps", "stages"]
HEADER += ["registers", "stack", "spills", "KiB", "blocks", "k instr."]
INPUT_TYPED = {"qkv", "out", "saved", "g_out", "g_qkv", "g_y_rows"}
"""Arguments in the type of the projection; the other pointers are float32."""


@dataclass(frozen=True)
class Compiled:
    """One kernel for one capability."""

    kernel: str
    capability: int
    head_dim: int
    precision: str
    rows: int
    warps: int
    stages: int
    registers: int
    """Of a thread."""
    stack: int
    """Bytes of a thread in local memory: spilled registers."""
    spills: int
    """Instructions that read or write them."""
    shared: int
    """Bytes of shared memory of a block."""
    blocks: int
    """Blocks that fit on a multiprocessor."""
    instructions: int
    """Of all warps of a block, with each loop counted as often as it goes round: what occupies the issue slots."""


def run(config: KernelsBenchConfig) -> None:
    """Print a table: a row a shape that is timed, or a row a kernel and capability that is compiled.

    Raises:
        ValueError: no GPU to time on, sizes that the kernels do not take, a capability that is not known here.
    """
    for width in config.head_dims:
        if reason := fused.why_not(math.prod(config.contrast_grid), width, ("contrast", "contrast")):
            raise ValueError(f"head_dims: fused {reason}")
    rows = _compile(config) if config.compile_only else _time(config)
    if config.json is not None:
        write_json(config.json, {**asdict(config), "rows": rows})


def _time(config: KernelsBenchConfig) -> list[dict[str, Any]]:
    """Time each shape, and keep the times where that is asked for."""
    if not torch.cuda.is_available():
        raise ValueError("device: no GPU here; --compile_only needs none")
    cases = itertools.product(config.precisions, config.head_dims, config.token_sides)
    rows = [_time_shape(config, *case) for case in cases]
    gpu = torch.cuda.get_device_name()
    print(gpu)
    print(markdown(list(rows[0]), [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in r.values()] for r in rows]))
    if config.save:
        times = {row["shape"]: Times(maps_ms=row["maps_ms"], fused_ms=row["fused_ms"]) for row in rows}
        print(f"kept in {keep_times(gpu, times)}")
    return rows


def _time_shape(config: KernelsBenchConfig, precision: str, width: int, side: int) -> dict[str, Any]:
    """Milliseconds of forward and backward pass of plain flash attention, the maps and the fused kernels, in turns."""
    device, dtype, heads = torch.device("cuda"), getattr(torch, precision), config.num_heads
    maps, fused_layer = (
        VisualContrastAttention(
            heads * width, heads, grid_size=side, contrast_grid=config.contrast_grid, kernel=kernel
        ).to(device)
        for kernel in ("maps", "fused")
    )  # fmt: skip
    batch = max(1, config.batch_tokens // side**2)
    qkv = torch.randn(batch, side**2, 3, heads, width, device=device, dtype=dtype, requires_grad=True)

    def both_passes(attention: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        gradient = torch.randn_like(attention(qkv))
        return lambda: attention(qkv).backward(gradient)

    attentions: dict[str, Callable[[Tensor], Tensor]] = {
        "flash": lambda x: F.scaled_dot_product_attention(*split_qkv(x)),
        "maps": lambda x: maps.attend(*split_qkv(x)),
        "fused": fused_layer.attend_packed,
    }
    works = {f"{name}_ms": both_passes(attention) for name, attention in attentions.items()}
    turns = in_turns(works, seconds=config.seconds, device=device)
    times = {name: 1e3 * statistics.median(seconds) for name, seconds in turns.items()}
    return {"shape": shape_key(maps, dtype), "batch": batch, **times}


def _compile(config: KernelsBenchConfig) -> list[dict[str, Any]]:
    """Compile both kernels for every capability, type and width."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("compile_only: TRITON_INTERPRET is set; the interpreter compiles nothing")
    if unknown := set(config.capabilities) - MULTIPROCESSOR.keys():
        raise ValueError(f"capabilities: {unknown.pop()} is not one of {', '.join(map(str, MULTIPROCESSOR))}")
    rows = []
    for case in itertools.product(("forward", "backward"), config.capabilities, config.precisions, config.head_dims):
        kernel, capability, precision, width = case
        dtype, tokens = getattr(torch, precision), config.token_sides[0] ** 2
        chosen = fused.launch_options(kernel, width, dtype, tokens, divmod(capability, 10))
        settings = itertools.product(
            config.rows or [chosen["B"]], config.warps or [chosen["num_warps"]], config.stages or [chosen["num_stages"]]
        )
        rows += [compile_kernel(*case, *setting, config) for setting in settings]
    print(markdown(HEADER, [_cells(row) for row in rows]))
    return [asdict(row) for row in rows]


def compile_kernel(
    kernel: str, capability: int, precision: str, head_dim: int, rows: int, warps: int, stages: int,
    config: KernelsBenchConfig,
) -> Compiled:  # fmt: skip
    """Compile one kernel with contrast tokens of pooled queries and embeddings."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver
    from triton.compiler import ASTSource

    from vcagen.networks import fused_kernels

    function = getattr(fused_kernels, kernel)
    side, dtype = config.token_sides[0], getattr(torch, precision)
    constants = {
        "POOL1": True, "POOL2": True, "B": rows,
        **fused.kernel_sizes(side**2, head_dim, [side, side], list(config.contrast_grid), dtype),
    }  # fmt: skip

    scalars = {"M": "i32", "lambda_init": "fp32"}

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in scalars:
            return scalars[name]
        return f"*{TYPES[precision if name in INPUT_TYPED else 'float32']}"

    signature = {name: type_of(name) for name in function.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")
    }  # as torch's allocator aligns them
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": stages}
    )
    tools = Path(driver.__file__).parent / "bin"
    usage, code = _disassemble(tools, compiled.asm["cubin"])
    registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "STACK"))
    shared = int(compiled.metadata.shared)
    return Compiled(
        kernel, capability, head_dim, precision, rows, warps, stages, registers, stack,
        sum("LDL" in line or "STL" in line for line in code if line), shared,
        _blocks(capability, registers, warps, shared), warps * _executed(code, -(-(side**2) // rows)),
    )  # fmt: skip


def _disassemble(tools: Path, cubin: bytes) -> tuple[str, list[str]]:
    """Resource usage, and the lines of instructions and of labels."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout
            for command in ([tools / "cuobjdump", "-res-usage"], [tools / "nvdisasm"])
        )
    return usage, [line for line in code.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,}\*/.*;|\.L_x_\d+:", line)]


def _executed(code: list[str], rounds: int) -> int:
    """Instructions of one warp, if each loop of at least 40 of them goes `rounds` times; smaller loops wait or pool."""
    labels: dict[str, int] = {}
    count = extra = 0
    for line in code:
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = count
            continue
        count += 1
        target = re.search(r"\bBRA\b.*?(\.L_x_\d+)", line)
        if target and count - labels.get(target[1], count) >= 40:
            extra += (rounds - 1) * (count - labels[target[1]])
    return count + extra


def _blocks(capability: int, registers: int, warps: int, shared: int) -> int:
    """Blocks of a multiprocessor by registers (given out in eights), threads and shared memory (1 KiB more a block)."""
    threads, kibibytes = MULTIPROCESSOR[capability]
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    return min(by_registers, threads // (32 * warps), kibibytes * 1024 // (shared + 1024))


def _cells(row: Compiled) -> list[str]:
    numbers = row.head_dim, row.rows, row.warps, row.stages, row.registers, row.stack, row.spills
    return [
        row.kernel, str(row.capability), row.precision, *map(str, numbers), f"{row.shared / 1024:.0f}", str(row.blocks),
        f"{row.instructions / 1000:.0f}",
    ]  # fmt: skip
