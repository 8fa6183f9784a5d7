"""How the latents of a VAE come to about unit size, and back: one factor and shift, or a mean and std a channel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vcagen.system.files import reading
from vcagen.system.pickles import read_pickle

SCALE_FIELDS = ("scaling_factor", "shift_factor", "latents_mean", "latents_std")
"""Names in a VAE's config.json and in our descriptions of it."""


class LatentScale:
    """Scales latents z (N, C, h, w) as diffusers' pipelines do, in the same order of operations.

    (z - shift_factor) * scaling_factor, as for Stable Diffusion 3; or, where there is a mean and a std a channel,
    (z - latents_mean) * scaling_factor / latents_std, as for Stable Diffusion XL and, with a factor of 1, LightningDiT.

    Args:
        fields: those of SCALE_FIELDS; `check_scale` has seen them.
    """

    def __init__(self, fields: Mapping[str, Any], device: str | torch.device = "cpu") -> None:
        self.factor, self.shift = float(fields["scaling_factor"]), float(fields["shift_factor"])
        mean, std = fields.get("latents_mean"), fields.get("latents_std")
        self.mean, self.std = (
            None if values is None else torch.tensor(values, device=device).view(-1, 1, 1) for values in (mean, std)
        )

    def scale(self, z: Tensor) -> Tensor:
        """Latents as the VAE makes them to those that a network sees."""
        if self.mean is None or self.std is None:
            return (z - self.shift) * self.factor
        return (z - self.mean) * self.factor / self.std

    def unscale(self, latents: Tensor) -> Tensor:
        """The inverse of `scale`."""
        if self.mean is None or self.std is None:
            return latents / self.factor + self.shift
        return latents * self.std / self.factor + self.mean

    def std_of(self, moments: Tensor) -> float:
        """Std, over all elements, of the scaled latents that moments (N, 2C, h, w) give: mean and log-variance."""
        mean, log_variance = moments.double().chunk(2, dim=1)
        slope = self.factor if self.std is None else self.factor / self.std
        variance = self.scale(mean).var(correction=0) + (log_variance.clamp(-30, 20).exp() * slope**2).mean()
        return math.sqrt(variance.item())


def check_scale(fields: Mapping[str, Any], channels: int) -> None:
    """Check what a VAE's config.json or an option says of the scale.

    Raises:
        ValueError: a factor that is not positive, a number that is not finite, a mean without a std, as many of them as
            there are no channels, or a shift beside a mean.
    """
    factor, shift, mean, std = (fields[name] for name in SCALE_FIELDS)
    if not (_numbers([factor]) and factor > 0):
        raise ValueError(f"scaling_factor: {factor}; needs a positive number")
    if not _numbers([shift]):
        raise ValueError(f"shift_factor: {shift}; needs a number")
    if (mean is None) != (std is None):
        raise ValueError(f"{'latents_std' if mean is None else 'latents_mean'} is there without the other of the two")
    if mean is None:
        return
    for name, values in (("latents_mean", mean), ("latents_std", std)):
        if not (isinstance(values, list) and _numbers(values) and len(values) == channels):
            raise ValueError(f"{name}: {values!s:.60}; needs {channels} numbers, one a channel")
    if min(std) <= 0:
        raise ValueError(f"latents_std: {min(std)}; needs positive numbers")
    if shift:
        raise ValueError(f"shift_factor: {shift}; latents_mean shifts already, channel by channel")


def read_statistics(path: str | Path) -> dict[str, list[float]]:
    """latents_mean and latents_std of LightningDiT's latents_stats.pt: {"mean": (1, C, 1, 1), "std": (1, C, 1, 1)}.

    Raises:
        ValueError: another file.
    """
    stored = read_pickle(path)
    with reading(path):
        return {f"latents_{name}": stored[name].double().flatten().tolist() for name in ("mean", "std")}


def _numbers(values: list[Any]) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values)
