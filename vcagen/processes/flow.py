"""The linear interpolant of SiT (arXiv 2401.08740): from noise at t = 0 to data at t = 1.

    x_t = t x_start + (1 - t) noise,   velocity = x_start - noise

With w the diffusion coefficient, every dx = (velocity + w score) dt + sqrt(2 w) dW has the same marginals.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vcagen.processes.process import Model, check_choice, complete

DIFFUSION_FORMS = ("constant", "SBDM", "sigma", "linear", "decreasing", "increasing-decreasing")


class LinearInterpolant:
    """The process; `t` of every method is a tensor (N,) in [0, 1], or a float."""

    outputs_per_channel = 1

    def interpolate(self, x_start: Tensor, noise: Tensor, t: Tensor | float) -> tuple[Tensor, Tensor]:
        """x_t and the velocity there, both (N, C, H, W)."""
        t = _expand(t, x_start)
        return t * x_start + (1 - t) * noise, x_start - noise

    def score_from_velocity(self, velocity: Tensor, x_t: Tensor, t: Tensor | float) -> Tensor:
        """Gradient of log p_t at x_t, (N, C, H, W), SiT's equation 9: (t velocity - x_t) / (1 - t), singular at 1."""
        t = _expand(t, x_t)
        return (t * velocity - x_t) / (1 - t)

    def diffusion_coefficient(self, t: Tensor | float, form: str) -> Tensor:
        """w at times t, of the shape of t; SBDM is infinite at t = 0.

        Raises:
            ValueError: unknown form.
        """
        check_choice("diffusion_form", form, DIFFUSION_FORMS)
        t = torch.as_tensor(t)
        if form == "constant":
            return torch.ones_like(t)
        if form == "SBDM":
            return (1 - t) / t
        if form in ("sigma", "linear"):  # two names in the public code, the same for this interpolant
            return 1 - t
        if form == "decreasing":
            return 0.25 * (torch.cos(math.pi * t) + 1) ** 2
        return torch.sin(math.pi * t) ** 2  # increasing-decreasing

    def sample_t(
        self, count: int, generator: torch.Generator | None = None, device: torch.device | None = None
    ) -> Tensor:
        """Times (count,) float32, uniform in [0, 1); on the generator's device."""
        return torch.rand(count, generator=generator, device=generator.device if generator else device)

    def losses(
        self,
        model: Model,
        x_start: Tensor,
        y: Tensor,
        *,
        t: Tensor | None = None,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        """Squared error of the velocity `model(x_t, t, y)` at images x_start (N, C, H, W).

        In float32, or float64 for float64 images, whatever autocast does.

        Args:
            model: returns (N, C, H, W).
            x_start: clean images or latents.
            y: labels (N,).
            t: times (N,) in [0, 1]; default: drawn uniformly from `generator`.
            noise: like x_start; default: drawn from `generator`.
            generator: torch's default where None.

        Returns:
            loss: (N,).
        """
        x_start, t, noise = complete(self.sample_t, x_start, t, noise, generator)
        t = t.to(x_start.dtype)
        x_t, velocity = self.interpolate(x_start, noise, t)
        output = model(x_t, t, y).to(x_t.dtype)
        assert output.shape == x_t.shape, (output.shape, x_t.shape)
        return {"loss": (output - velocity).square().flatten(1).mean(1)}


def _expand(t: Tensor | float, like: Tensor) -> Tensor | float:
    """(N,) as (N, 1, 1, 1)."""
    return t.reshape(-1, *[1] * (like.ndim - 1)) if isinstance(t, Tensor) else t
