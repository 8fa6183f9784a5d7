"""The processes of a command: accelerate's view of them, checked."""

from __future__ import annotations

import ctypes
import os
import sys
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs


def build_accelerator(*, patient: bool = False, **options: Any) -> Accelerator:
    """accelerate's Accelerator on the GPU, or on the CPU where there is none, also under torchrun.

    Patient processes wait a day for one that measures a reference or encodes the last shard.

    Raises:
        ValueError: the launcher started more processes than accelerate joined.
    """
    keep_freed_memory()
    # Gradients live in DDP's buckets instead of beside them; no buffer of ours changes.
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)
    handlers = [ddp, InitProcessGroupKwargs(timeout=timedelta(days=1))] if patient else [ddp]
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=handlers, **options)
    accelerator.gradient_accumulation_steps = 1  # the trainer accumulates itself, whatever the environment says
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        found = f"{launched} processes were started, {accelerator.num_processes} joined by accelerate"
        raise ValueError(f"WORLD_SIZE: {found}; on CPU launch with torchrun --nproc_per_node")
    return accelerator


def any_process(accelerator: Accelerator, condition: bool | torch.Tensor) -> bool:
    """Whether the condition holds in any process. All call it; it waits for the device."""
    return bool(accelerator.gather(torch.tensor([float(condition)], device=accelerator.device)).any())


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, where the C library is glibc.

    glibc gives the end of its heap back to the system after a training step and takes it again, page by page, in the
    next: on CPU a twentieth of a compiled step with VCA, and nothing with a network that happens to end otherwise.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
        mallopt(m_trim_threshold, -1)  # never
        mallopt(m_mmap_threshold, 32 << 20)  # bytes: as far as its own rule goes, which ends with the line above
