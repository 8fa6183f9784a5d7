"""What training and sampling need of a process between noise and data."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

import torch
from torch import Tensor

Model = Callable[[Tensor, Tensor, Tensor], Tensor]
"""model(x_t, t, y): (N, C, H, W), times (N,) and labels (N,) to (N, out_channels, H, W)."""


class Process(Protocol):
    """A process that a network learns."""

    outputs_per_channel: int
    """Output channels of the network for each of the image; 2 with a learned variance."""

    def sample_t(self, count: int, generator: torch.Generator) -> Tensor:
        """Training times (count,) on the generator's device."""
        ...

    def losses(self, model: Model, x_start: Tensor, y: Tensor, *, t: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """ "loss", which is minimised, and its parts, each (N,), at images (N, C, H, W) and labels (N,)."""
        ...


class NonFiniteError(ValueError):
    """Images with NaN or infinity; `rows` are their positions in the batch."""

    def __init__(self, what: str, rows: list[int]) -> None:
        super().__init__(f"{what} of batch row {', '.join(map(str, rows))}: not finite")
        self.rows = rows


def non_finite_rows(x: Tensor) -> list[int]:
    """Positions of what is not finite in x (N, ...). Waits for the device."""
    finite = x.flatten(1).isfinite().all(1)
    return [] if bool(finite.all()) else finite.logical_not().nonzero()[:, 0].tolist()


def refuse_non_finite(x: Tensor, what: str) -> None:
    """Raise NonFiniteError where an image of x (N, ...) is not finite. Waits for the device."""
    if rows := non_finite_rows(x):
        raise NonFiniteError(what, rows)


def complete(
    sample_t: Callable[..., Tensor], x_start: Tensor, t: Tensor | None, noise: Tensor | None,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Images in float32 or float64, and on their device the times and noise given, or drawn on the generator's."""
    x_start = x_start.to(torch.promote_types(x_start.dtype, torch.float32))
    source = generator.device if generator else x_start.device
    if t is None:
        t = sample_t(len(x_start), generator, source)
    if noise is None:
        noise = torch.randn(x_start.shape, generator=generator, device=source, dtype=x_start.dtype)
    return x_start, t.to(x_start.device), noise.to(x_start)


def check_choice(option: str, value: str, choices: Collection[str]) -> None:
    """Raise ValueError where the value of an option is none of the choices."""
    if value not in choices:
        raise ValueError(f"{option}: {value}; choose from {', '.join(choices)}")
