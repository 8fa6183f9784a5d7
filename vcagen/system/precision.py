"""Kernels where a result must not depend on what is set around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def matrix_products(*, tf32: bool) -> Iterator[None]:
    """Matrix products and convolutions with or without TF32 on GPUs."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No autocast, no TF32, deterministic convolutions, no gradients."""
    with (
        matrix_products(tf32=False),
        torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False),
        torch.autocast(device.type, enabled=False),
        torch.no_grad(),
    ):
        yield
