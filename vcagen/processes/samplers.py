"""Samplers: pure functions from noise and `predict(x_t, t)` to a sample; guidance is a closure around the network.

`t` is (N,), the same for the batch: int64 times of the full schedule for ddpm and ddim, floats from 0 (noise) to
1 (data) for ode and sde. Only the current state is kept. No step waits for the device (adaptive ODE methods do, and the
fixed ones compare a time once a step); coefficients are floats known before the loop.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchdiffeq import odeint

from vcagen.processes.diffusion import GaussianDiffusion
from vcagen.processes.flow import LinearInterpolant
from vcagen.processes.watch import Progress, Watch

Model = Callable[[Tensor, Tensor, Tensor], Tensor]
Predict = Callable[[Tensor, Tensor], Tensor]
RandnLike = Callable[[Tensor], Tensor]

FIXED_METHODS = ("euler", "midpoint", "heun2", "heun3", "rk4", "explicit_adams", "implicit_adams", "fixed_adams")
ADAPTIVE_METHODS = ("dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun", "scipy_solver")
LAST_STEPS = ("Mean", "Tweedie", "Euler", "none")
SDE_START = 0.01
"""Where the SDE starts when its coefficient is infinite at 0: near, and 10 steps of SBDM are still stable."""


@dataclass
class Guided:
    """predict(x_t, t) of a class-conditional network: see `with_cfg`. `calls` counts the network calls so far."""

    model: Model
    y: Tensor
    cfg_scale: float
    null_label: int | None
    guided_channels: int | None
    interval: tuple[float, float] | None
    calls: int = 0

    def __call__(self, x_t: Tensor, t: Tensor, *, time: float | None = None) -> Tensor:
        """The network's (N, out_channels, H, W) at x_t; `time` is t where the host knows it (else t is read back)."""
        self.calls += 1
        if self.cfg_scale == 1.0 or self.null_label is None or not self._guides(t, time):
            return self.model(x_t, t, self.y)
        y_null = torch.full_like(self.y, self.null_label)
        channels = min(x_t.shape[1], self.guided_channels or x_t.shape[1])
        if self.cfg_scale == 0.0 and channels >= x_t.shape[1]:
            return self.model(x_t, t, y_null)
        both = self.model(torch.cat([x_t, x_t]), torch.cat([t, t]), torch.cat([self.y, y_null]))  # (2N, out, H, W)
        cond, uncond = both.to(x_t.dtype).chunk(2)
        guided = torch.lerp(uncond[:, :channels], cond[:, :channels], self.cfg_scale)
        return torch.cat([guided, cond[:, channels:]], dim=1)

    def _guides(self, t: Tensor, time: float | None) -> bool:
        if self.interval is None:
            return True
        low, high = self.interval
        rounding = 1e-6  # solvers keep times from 0 to 1 in float32
        return low - rounding <= (float(t[0]) if time is None else time) <= high + rounding


def with_cfg(
    model: Model,
    y: Tensor,
    *,
    cfg_scale: float,
    null_label: int | None,
    guided_channels: int | None = None,
    interval: tuple[float, float] | None = None,
) -> Guided:
    """Classifier-free guidance: uncond + cfg_scale (cond - uncond).

    One network call a step: the plain conditional one where the scale is 1 or t outside the interval, the unconditional
    one where it is 0, and otherwise one on the doubled batch.

    Args:
        model: model(x_t, t, y) -> (N, out_channels, H, W).
        y: labels (N,).
        cfg_scale: 1 is off, 0 unconditional.
        null_label: label of "no class", None for a network without.
        guided_channels: guide only the first ones (3 repeats published DiT numbers). Default: as many as x_t has;
            variance channels come from the conditional pass (at scale 0 from the only one).
        interval: guide only where low <= t <= high, in the process's own time. Default: everywhere.

    Raises:
        ValueError: guidance without a null label; a scale that is not finite; no channels; an empty interval.
    """
    if not abs(cfg_scale) <= torch.finfo(torch.float32).max:
        raise ValueError(f"cfg_scale: {cfg_scale}; needs a finite number of float32's range")
    if cfg_scale != 1.0 and null_label is None:
        raise ValueError(f"cfg_scale: {cfg_scale}; this network has no null label, so only 1.0 is possible")
    if guided_channels is not None and guided_channels < 1:
        raise ValueError(f"guided_channels: {guided_channels}; needs at least 1")
    if interval is not None and not interval[0] <= interval[1]:
        raise ValueError(f"cfg_interval: {interval}; the first time must not be above the second")
    return Guided(model, y, cfg_scale, null_label, guided_channels, interval)


@torch.no_grad()
def ddpm_sample(
    diffusion: GaussianDiffusion,
    predict: Predict,
    noise: Tensor,
    *,
    num_steps: int,
    randn_like: RandnLike,
    progress: Progress | None = None,
) -> Tensor:
    """Ancestral sampling on respaced steps, as DiT: `num_steps` network calls.

    Args:
        diffusion: the process.
        predict: returns (N, 2C, H, W): noise and variance fraction.
        noise: standard normal (N, C, H, W).
        num_steps: 1 to the steps of the schedule.
        randn_like: draws the noise of a step; called num_steps - 1 times, noisiest step first.
        progress: called with the number of steps done.

    Raises:
        ValueError: num_steps outside the schedule; NonFiniteError for a state that is not finite.
    """
    process = diffusion.respace(num_steps)
    x, watch = noise, Watch(progress)
    for i in reversed(range(num_steps)):
        p = process.p_mean_variance(_call(predict, x, process.timesteps[i]), x, i)
        x = p.mean if i == 0 else torch.addcmul(p.mean, (0.5 * p.log_variance).exp(), randn_like(x))
        watch.step(x)
    watch.finish()
    return x


@torch.no_grad()
def ddim_sample(
    diffusion: GaussianDiffusion,
    predict: Predict,
    noise: Tensor,
    *,
    num_steps: int,
    eta: float = 0.0,
    randn_like: RandnLike | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """DDIM (arXiv 2010.02502, equation 12) on its own spacing: `num_steps` network calls. As `ddpm_sample`, with:

    Args:
        eta: 0 is deterministic, 1 has the variance of DDPM's posterior.
        randn_like: needed where eta is above 0.

    Raises:
        ValueError: as `ddpm_sample`; eta outside 0 to 1.
    """
    if not 0 <= eta <= 1:
        raise ValueError(f"eta: {eta}; needs 0 to 1")
    if eta > 0 and randn_like is None:
        raise ValueError(f"randn_like: missing; eta {eta} draws noise")
    process = diffusion.respace(num_steps, "ddim")
    alpha_bars = process.alphas_cumprod.tolist()
    x, watch = noise, Watch(progress)
    for i in reversed(range(num_steps)):
        predicted = _call(predict, x, process.timesteps[i])[:, : x.shape[1]].to(x.dtype)
        x_start = process.x_start_from_noise(predicted, x, i)
        alpha_bar, before = alpha_bars[i], alpha_bars[i - 1] if i > 0 else 1.0
        sigma = eta * math.sqrt((1 - before) / (1 - alpha_bar) * (1 - alpha_bar / before))
        x = math.sqrt(before) * x_start + math.sqrt(1 - before - sigma**2) * predicted
        if sigma > 0 and randn_like is not None:
            x = x + sigma * randn_like(x)
        watch.step(x)
    watch.finish()
    return x


@torch.no_grad()
def ode_sample(
    flow: LinearInterpolant,
    predict: Predict,
    noise: Tensor,
    *,
    num_steps: int | None = None,
    method: str = "dopri5",
    atol: float = 1e-6,
    rtol: float = 1e-3,
    progress: Progress | None = None,
) -> Tensor:
    """Solve dx/dt = velocity from 0 to 1 by torchdiffeq.

    Args:
        flow: the process.
        predict: returns the velocity (N, C, H, W).
        noise: standard normal (N, C, H, W).
        num_steps: intervals of a fixed-step method, each with as many network calls as the method has stages; None for
            an adaptive one.
        method: a name of torchdiffeq: FIXED_METHODS, ADAPTIVE_METHODS.
        atol: absolute tolerance of adaptive methods, above 0. The error is that of the whole batch.
        rtol: relative tolerance, above 0.
        progress: called with the number of steps done (of accepted steps).

    Raises:
        ValueError: unknown method; num_steps missing or given where it must not be; tolerances that are not positive,
            or too small for this flow; NonFiniteError for a state that is not finite.
    """
    adaptive = method in ADAPTIVE_METHODS
    if not adaptive and method not in FIXED_METHODS:
        raise ValueError(f"method: {method}; choose from {', '.join(FIXED_METHODS + ADAPTIVE_METHODS)}")
    if adaptive and num_steps is not None:
        raise ValueError(
            f"num_steps: {num_steps}; {method} chooses its own steps: leave it out (null), set atol and rtol"
        )
    if not adaptive and (num_steps is None or num_steps < 1):
        raise ValueError(f"num_steps: {num_steps}; {method} needs at least 1")
    for name, value in (("atol", atol), ("rtol", rtol)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name}: {value}; needs a number above 0")

    watch = Watch(progress)
    options: dict[str, Any] = {}
    if num_steps is not None:
        grid = torch.linspace(0, 1, num_steps + 1, dtype=torch.float64)  # on the host, so that times are known there
        options["grid_constructor"] = lambda func, y0, t: grid
    velocity = _Velocity(predict, watch, method)
    ends = noise.new_tensor([0.0, 1.0])
    try:
        x: Tensor = odeint(velocity, noise, ends, atol=atol, rtol=rtol, method=method, options=options)[-1]
    except AssertionError as error:
        if "underflow in dt" not in str(error):
            raise
        raise ValueError(
            f"method: {method} shrank its steps to nothing at atol {atol}, rtol {rtol}; "
            "the flow explodes, or the tolerances are too small"
        ) from error
    watch.step(x)
    watch.finish()
    return x


class _Velocity:
    """What torchdiffeq integrates, with the callbacks that it looks for."""

    def __init__(self, predict: Predict, watch: Watch, method: str) -> None:
        self.predict = predict
        self.watch = watch
        self.adaptive = method in ADAPTIVE_METHODS
        if not self.adaptive:
            self.callback_step = self._step
        elif method != "scipy_solver":
            self.callback_accept_step = self._step
        self.first = not self.adaptive

    def __call__(self, t: Tensor, x: Tensor) -> Tensor:
        velocity = _call(self.predict, x, float(t)).to(x.dtype)
        if self.adaptive:  # such a method reads its error back at every step, and NaN would shrink its steps to nothing
            self.watch.require_finite(velocity)
        return velocity

    def _step(self, t: Tensor, x: Tensor, dt: Tensor) -> None:
        """Called before a fixed step and after an adaptive one."""
        if not self.first:
            self.watch.step(x)
        self.first = False


@torch.no_grad()
def sde_sample(
    flow: LinearInterpolant,
    predict: Predict,
    noise: Tensor,
    *,
    num_steps: int,
    diffusion_form: str = "sigma",
    last_step: str | None = "Mean",
    last_step_size: float = 0.04,
    randn_like: RandnLike,
    progress: Progress | None = None,
) -> Tensor:
    """Euler-Maruyama of SiT's SDE, score and drift from the same velocity: `num_steps` network calls.

    Args:
        flow: the process.
        predict: returns the velocity (N, C, H, W).
        noise: standard normal (N, C, H, W).
        num_steps: network calls, the last step among them.
        diffusion_form: one of vcagen.processes.flow.DIFFUSION_FORMS.
        last_step: Mean (drift without noise), Tweedie (the expected data), Euler (the ODE's step), or none: all steps
            alike.
        last_step_size: the last step goes from 1 - last_step_size to 1 (where it is the only one, the whole way).
        randn_like: draws the noise of a step; called for every step but the last one, or for all where that is none.
        progress: called with the number of steps done.

    Raises:
        ValueError: unknown form or last step; sizes out of range; NonFiniteError for a state that is not finite.
    """
    last_step = last_step or "none"
    if last_step not in LAST_STEPS:
        raise ValueError(f"last_step: {last_step}; choose from {', '.join(LAST_STEPS)}")
    if num_steps < 1:
        raise ValueError(f"num_steps: {num_steps}; needs at least 1")
    if last_step != "none" and not 0 < last_step_size < 1:
        raise ValueError(f"last_step_size: {last_step_size}; needs a number between 0 and 1")
    at_zero = flow.diffusion_coefficient(torch.zeros(1, dtype=torch.float64), diffusion_form)
    start = 0.0 if at_zero.isfinite().all() else SDE_START
    if last_step == "none":
        num_noisy, end = num_steps, 1.0
    else:
        num_noisy = num_steps - 1
        end = max(1 - last_step_size, start) if num_noisy else start
    dt = (end - start) / max(num_noisy, 1)
    times = [start + i * dt for i in range(num_noisy)] + [end] * (num_steps - num_noisy)
    weights = flow.diffusion_coefficient(torch.tensor(times, dtype=torch.float64), diffusion_form).tolist()

    x, watch = noise, Watch(progress)
    for i in range(num_steps):
        velocity = _call(predict, x, times[i]).to(x.dtype)
        drift = velocity + weights[i] * flow.score_from_velocity(velocity, x, times[i])
        if i < num_noisy:
            x = x + dt * drift + math.sqrt(2 * weights[i] * dt) * randn_like(x)
        elif last_step == "Mean":
            x = x + (1 - end) * drift
        else:  # Euler's step is Tweedie's x / t + (1 - t)^2 / t score for this interpolant
            x = x + (1 - end) * velocity
        watch.step(x)
    watch.finish()
    return x


SAMPLERS: dict[str, Callable[..., Tensor]] = {
    "ddpm": ddpm_sample,
    "ddim": ddim_sample,
    "sde": sde_sample,
    "ode": ode_sample,
}
"""By name, of each process the recipe's first. A sampler's first argument is named for its process, and its other
keywords than randn_like and progress are its options, by their names in SamplingConfig."""


def samplers_of(process: str) -> list[str]:
    """Names of the samplers of "diffusion" or "flow"."""
    return [name for name in SAMPLERS if process in _arguments(name)]


def sampler_options(name: str) -> list[str]:
    """Names of the options of a sampler."""
    keywords = [key for key, argument in _arguments(name).items() if argument.kind is argument.KEYWORD_ONLY]
    return [key for key in keywords if key not in ("randn_like", "progress")]


def draws_noise(name: str) -> bool:
    """Whether a sampler takes the noise of its steps."""
    return "randn_like" in _arguments(name)


def _arguments(name: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(SAMPLERS[name]).parameters


def _call(predict: Predict, x: Tensor, time: float) -> Tensor:
    """predict(x, t) with t (N,): int64 for an int."""
    dtype = torch.int64 if isinstance(time, int) else x.dtype
    t = torch.full((len(x),), time, device=x.device, dtype=dtype)
    return predict(x, t, time=time) if isinstance(predict, Guided) else predict(x, t)
