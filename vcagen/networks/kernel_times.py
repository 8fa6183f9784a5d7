"""Which kernel of Visual-Contrast Attention is the faster one on a GPU: measured, not guessed."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import torch

from vcagen.networks import fused
from vcagen.networks.attention import VisualContrastAttention
from vcagen.system.files import FORMAT, read_json, write_json


class Times(TypedDict):
    """Milliseconds of a forward and backward pass."""

    maps_ms: float
    fused_ms: float


class TimesFile(TypedDict):
    """kernel_times.json."""

    times: dict[str, dict[str, Times]]
    """GPU -> shape -> times."""


KNOWN: dict[str, dict[str, Times]] = {}
"""GPU -> shape -> times. No GPU has been measured yet; `vcagen bench kernels --save` keeps the times of a user's GPU on
his machine."""


def times_file() -> Path:
    """Where the times of this machine are kept."""
    return Path(torch.hub.get_dir()) / "vcagen" / "kernel_times.json"


def read_times() -> dict[str, dict[str, Times]]:
    """The known times with those of this machine."""
    file = times_file()
    return {**KNOWN, **(read_json(file, TimesFile)["times"] if file.exists() else {})}


def keep_times(gpu: str, times: dict[str, Times]) -> Path:
    """Add times by shape to those of this machine; returns the file."""
    known = read_times()
    write_json(times_file(), {"format": FORMAT, "times": {**known, gpu: {**known.get(gpu, {}), **times}}})
    return times_file()


def try_fused(attention: VisualContrastAttention, dtype: torch.dtype, device: torch.device) -> None:
    """Run the fused kernels of that attention once, both ways, on one image of zeros.

    Raises:
        ValueError: this device cannot run them, for want of shared memory or otherwise.
    """
    sizes = (1, attention.num_tokens, 3, attention.num_heads, attention.head_dim)
    qkv = torch.zeros(sizes, device=device, dtype=dtype, requires_grad=True)
    try:
        attention.to_empty(device=device).attend_packed(qkv).sum().backward()
    except Exception as error:  # Triton and its compiler have classes of their own
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"kernel: fused does not run here ({reason}); take maps") from error


def shape_key(attention: VisualContrastAttention, dtype: torch.dtype) -> str:
    """What decides the speed of the kernels."""
    sizes = f"d {attention.head_dim}, T {attention.num_tokens}, n {attention.num_contrast_tokens}"
    return f"{sizes}, {str(dtype).removeprefix('torch.')}"


def fused_wins(attention: VisualContrastAttention, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the fused kernels were measured to be faster than the maps for that attention on that device."""
    stages = (attention.stage1, attention.stage2)
    if device.type != "cuda" or fused.why_not(attention.num_contrast_tokens, attention.head_dim, stages):
        return False
    times = read_times().get(torch.cuda.get_device_name(device), {}).get(shape_key(attention, dtype))
    return times is not None and times["fused_ms"] < times["maps_ms"]
