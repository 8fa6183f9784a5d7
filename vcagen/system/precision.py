"""Exact kernels, where a result must not depend on what training or sampling has set around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No autocast, no TF32, deterministic convolutions, no gradients."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    try:
        with (
            torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False),
            torch.autocast(device.type, enabled=False),
            torch.no_grad(),
        ):
            yield
    finally:
        matmul.allow_tf32 = before
