"""What is seen of a sampler at work: how many steps are done, and whether an image is still finite."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Progress = Callable[[int], None]


class NonFiniteError(ValueError):
    """The state of image `batch_index` was not finite after step `step`, counted from 1."""

    def __init__(self, step: int, batch_index: int) -> None:
        super().__init__(f"sampling: not finite after step {step} at batch index {batch_index}")
        self.step = step
        self.batch_index = batch_index


class Watch:
    """Reports steps, and keeps the magnitudes of the images after each on the device until `finish` reads them."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.magnitudes: list[Tensor] = []

    def step(self, x: Tensor) -> None:
        """A step has led to x (N, ...)."""
        self.magnitudes.append(_magnitude(x))
        if self.progress is not None:
            self.progress(len(self.magnitudes))

    def require_finite(self, x: Tensor) -> None:
        """Wait for the device and raise NonFiniteError where x, of the step that is being made, is not finite."""
        bad = (~_magnitude(x).isfinite()).nonzero()
        if len(bad):
            raise NonFiniteError(len(self.magnitudes) + 1, int(bad[0]))

    def finish(self) -> None:
        """Raise NonFiniteError where a state was not finite."""
        bad = (~torch.stack(self.magnitudes).isfinite()).nonzero()  # rows by step, then image
        if len(bad):
            raise NonFiniteError(int(bad[0, 0]) + 1, int(bad[0, 1]))


def _magnitude(x: Tensor) -> Tensor:
    """Largest absolute value of each image (N,), NaN where one is NaN: one kernel, and it cannot overflow."""
    return torch.linalg.vector_norm(x.flatten(1), ord=math.inf, dim=1)
