"""The diffusion process of DiT: linear betas, learned-range variance, hybrid loss, respacing.

    x_t = sqrt(alpha_bar_t) x_0 + sqrt(1 - alpha_bar_t) noise,   t = 0 (clean) ... num_timesteps - 1 (noise)

The network gives 2C channels for C: the noise, and where the log-variance of p(x_{t-1} | x_t) lies between its lower
bound (-1: the posterior's) and its upper bound (1: beta_t). Nichol and Dhariwal, arXiv 2102.09672, equations 15 and 16;
conventions of the public DiT code, which samples without clipping.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vcagen.processes.process import Model, check_choice, complete

SPACINGS = ("ddpm", "ddim", "log_snr")


class Gaussian(NamedTuple):
    """p(x_{t-1} | x_t) as the network sees it; each (N, C, H, W)."""

    mean: Tensor
    log_variance: Tensor
    pred_xstart: Tensor


class GaussianDiffusion:
    """A schedule of `num_timesteps` steps, or the `timesteps` kept of it.

    `t` of every method counts the kept steps, from 0: an int, or a tensor (N,) of them on the device of the images.
    The schedule is float64; results have the precision of the images.

    Attributes:
        num_timesteps: number of kept steps.
        timesteps: their times in the full schedule, increasing; what the network is given.
        betas, alphas_cumprod, log_snr, posterior_log_variance: float64 tensors (num_timesteps,); log_snr of the signal
            and noise in x_t; the last with its first entry, which is -infinity, replaced by the second.
    """

    outputs_per_channel = 2

    def __init__(self, num_timesteps: int = 1000, *, timesteps: Sequence[int] | None = None) -> None:
        if num_timesteps < 1:
            raise ValueError(f"num_timesteps: {num_timesteps}; needs at least 1")
        self.full_num_timesteps = num_timesteps
        self.timesteps = list(range(num_timesteps) if timesteps is None else timesteps)
        self.num_timesteps = len(self.timesteps)

        scale = 1000 / num_timesteps
        full_betas = torch.linspace(scale * 1e-4, scale * 0.02, num_timesteps, dtype=torch.float64).clamp(max=0.999)
        alpha_bar = (1 - full_betas).cumprod(0)[self.timesteps]
        alpha_bar_before = torch.cat([alpha_bar.new_ones(1), alpha_bar[:-1]])
        self.alphas_cumprod = alpha_bar
        self.log_snr = alpha_bar.log() - (1 - alpha_bar).log()
        self.betas = 1 - alpha_bar / alpha_bar_before
        variance = self.betas * (1 - alpha_bar_before) / (1 - alpha_bar)
        variance[0] = variance[1] if self.num_timesteps > 1 else self.betas[0]
        self.posterior_log_variance = variance.log()

        self._schedule = {
            "timestep": torch.tensor(self.timesteps),
            "signal": alpha_bar.sqrt(),
            "noise": (1 - alpha_bar).sqrt(),
            "x_start_of_x_t": alpha_bar.rsqrt(),
            "x_start_of_noise": (1 / alpha_bar - 1).sqrt(),
            "mean_of_x_start": self.betas * alpha_bar_before.sqrt() / (1 - alpha_bar),
            "mean_of_x_t": (1 - self.betas).sqrt() * (1 - alpha_bar_before) / (1 - alpha_bar),
            "min_log_variance": self.posterior_log_variance,
            "max_log_variance": self.betas.log(),
        }
        self._host = {name: values.tolist() for name, values in self._schedule.items()}
        self._device: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}

    def respace(self, num_steps: int, spacing: Literal["ddpm", "ddim", "log_snr"] = "ddpm") -> GaussianDiffusion:
        """Keep `num_steps` of the full schedule: the same process, seen at fewer times.

        ddpm spreads them evenly from the first to the last and rounds, ddim takes multiples of an integer stride, as
        the public code; where no stride gives exactly that many, multiples of the fraction, rounded down. log_snr
        takes the steps nearest to those that divide the range of log_snr evenly, with the noisiest end and without the
        cleanest; where several fall on one step, the next free ones.

        Raises:
            ValueError: fewer than 1 step or more than the schedule has; unknown spacing.
        """
        full = self.full_num_timesteps
        if not 1 <= num_steps <= full:
            raise ValueError(f"num_steps: {num_steps}; the schedule has 1 to {full}")
        check_choice("spacing", spacing, SPACINGS)
        if spacing == "ddim":
            stride = math.ceil(full / num_steps)
            kept = list(range(0, full, stride))
            if len(kept) != num_steps:
                kept = [i * full // num_steps for i in range(num_steps)]
        elif spacing == "log_snr":
            log_snr = GaussianDiffusion(full).log_snr  # falling
            wanted = log_snr[0] + (log_snr[-1] - log_snr[0]) * torch.arange(1, num_steps + 1)[:, None] / num_steps
            kept = []
            for i, nearest in enumerate((log_snr - wanted).abs().argmin(1).tolist()):
                kept.append(min(max(nearest, kept[-1] + 1 if kept else 0), full - num_steps + i))
        else:
            kept, position = [], 0.0
            for _ in range(num_steps):
                kept.append(round(position))
                position += (full - 1) / max(num_steps - 1, 1)  # summed, not multiplied: rounds as the public code
        return GaussianDiffusion(full, timesteps=kept)

    def q_sample(self, x_start: Tensor, t: Tensor | int, noise: Tensor) -> Tensor:
        """x_t of q(x_t | x_0), (N, C, H, W) from images and standard normal noise of that shape."""
        return self._at("signal", t, x_start) * x_start + self._at("noise", t, x_start) * noise

    def q_posterior(self, x_start: Tensor, x_t: Tensor, t: Tensor | int) -> tuple[Tensor, Tensor]:
        """Mean (N, C, H, W) and log-variance, which broadcasts to it, of q(x_{t-1} | x_t, x_0)."""
        mean = self._at("mean_of_x_start", t, x_t) * x_start + self._at("mean_of_x_t", t, x_t) * x_t
        log_variance = self._at("min_log_variance", t, x_t)
        return mean, log_variance if isinstance(log_variance, Tensor) else mean.new_full((), log_variance)

    def x_start_from_noise(self, noise: Tensor, x_t: Tensor, t: Tensor | int) -> Tensor:
        """The x_0 that this noise makes into x_t; not clipped."""
        return self._at("x_start_of_x_t", t, x_t) * x_t - self._at("x_start_of_noise", t, x_t) * noise

    def p_mean_variance(self, output: Tensor, x_t: Tensor, t: Tensor | int) -> Gaussian:
        """p(x_{t-1} | x_t) from the network's output (N, 2C, H, W) at x_t (N, C, H, W)."""
        assert output.shape[1] == 2 * x_t.shape[1], (output.shape, x_t.shape)
        noise, fraction = output.to(x_t.dtype).chunk(2, dim=1)
        x_start = self.x_start_from_noise(noise, x_t, t)
        mean = self._at("mean_of_x_start", t, x_t) * x_start + self._at("mean_of_x_t", t, x_t) * x_t
        low, high = self._at("min_log_variance", t, x_t), self._at("max_log_variance", t, x_t)
        log_variance = fraction * ((high - low) / 2) + (high + low) / 2
        return Gaussian(mean, log_variance, x_start)

    def sample_t(
        self, count: int, generator: torch.Generator | None = None, device: torch.device | None = None
    ) -> Tensor:
        """Kept steps (count,) int64, uniform; on the generator's device."""
        device = generator.device if generator else device
        return torch.randint(self.num_timesteps, (count,), generator=generator, device=device)

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
        """Hybrid loss of the network `model(x_t, t, y)` at images x_start (N, C, H, W).

        mse on the noise plus vb, the variational term in bits a dimension, which trains the variance only: the mean in
        it is detached. In float32, or float64 for float64 images, whatever autocast does.

        Args:
            model: gets x_t, times of the full schedule (N,) int64, and y; returns (N, 2C, H, W).
            x_start: clean images or latents.
            y: labels (N,).
            t: kept steps (N,) int64; default: drawn uniformly from `generator`.
            noise: like x_start; default: drawn from `generator`.
            generator: torch's default where None.

        Returns:
            loss = mse + vb, mse, vb: each (N,).
        """
        x_start, t, noise = complete(self.sample_t, x_start, t, noise, generator)
        x_t = self.q_sample(x_start, t, noise)
        output = model(x_t, self._table("timestep", x_t.device, torch.int64)[t], y).to(x_t.dtype)
        assert output.shape[1] == 2 * x_t.shape[1], (output.shape, x_t.shape)

        predicted, fraction = output.chunk(2, dim=1)
        mse = (noise - predicted).square().flatten(1).mean(1)
        vb = self._variational_bits(torch.cat([predicted.detach(), fraction], dim=1), x_start, x_t, t)
        return {"loss": mse + vb, "mse": mse, "vb": vb}

    def _variational_bits(self, output: Tensor, x_start: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """KL(q(x_{t-1} | x_t, x_0) || p), at t = 0 the decoder's negative log-likelihood: bits a dimension (N,)."""
        true_mean, true_log_variance = self.q_posterior(x_start, x_t, t)
        p = self.p_mean_variance(output, x_t, t)
        difference = true_log_variance - p.log_variance
        kl = 0.5 * (difference.exp() - 1 - difference + (true_mean - p.mean).square() * (-p.log_variance).exp())
        nll = -_log_probability_of_grey_level(x_start, p.mean, p.log_variance)
        first = (t == 0).reshape(-1, *[1] * (x_t.ndim - 1))
        return torch.where(first, nll, kl).flatten(1).mean(1) / math.log(2)

    def _at(self, name: str, t: Tensor | int, like: Tensor) -> Tensor | float:
        """An entry of the schedule: a float for an int, (N, 1, 1, 1) for steps (N,)."""
        if isinstance(t, int):
            return float(self._host[name][t])
        return self._table(name, like.device, like.dtype)[t].reshape(-1, *[1] * (like.ndim - 1))

    def _table(self, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        """A row of the schedule, moved to the device once."""
        key = (name, device, dtype)
        if key not in self._device:
            self._device[key] = self._schedule[name].to(device, dtype)
        return self._device[key]


def _log_probability_of_grey_level(x: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """Log-probability of the 8-bit grey level around x in [-1, 1] under a Gaussian; the outer levels are open.

    Ho et al., arXiv 2006.11239, equation 13, with the tanh approximation of the normal distribution that the public
    code uses.
    """
    scale = (-0.5 * log_variance).exp()
    below_upper = _normal_cdf((x - mean + 1 / 255) * scale)
    below_lower = _normal_cdf((x - mean - 1 / 255) * scale)
    inside = torch.where(x > 0.999, 1 - below_lower, below_upper - below_lower)
    return torch.where(x < -0.999, below_upper, inside).clamp(min=1e-12).log()


def _normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
