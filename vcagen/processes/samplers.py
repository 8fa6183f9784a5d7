"""Samplers: pure functions from noise and `predict(x_t, time)` to a sample.

`time` is an int of the full schedule for diffusion, and a float from 0 (noise) to 1 (data) for ode and sde. Only
the current state is kept. No step waits for the device, but those of adaptive ODE methods; coefficients are floats
known before the loop. `randn_like` draws the noise of a step; samplers without noise ignore it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torchdiffeq import odeint

from vcagen.processes.diffusion import GaussianDiffusion
from vcagen.processes.flow import LinearInterpolant
from vcagen.processes.guidance import Predict
from vcagen.processes.process import check_choice, refuse_non_finite

RandnLike = Callable[[Tensor], Tensor]

FIXED_METHODS = {"euler": 1, "midpoint": 2, "heun2": 2, "rk4": 4}
"""ODE method of fixed steps -> network calls of a step."""
ADAPTIVE_METHODS = ("dopri5",)
LAST_STEPS = ("Mean", "Tweedie", "Euler", "none")
SDE_START = 0.01
"""Where the SDE starts when its coefficient is infinite at 0: near, and 10 steps of SBDM are still stable."""


@torch.no_grad()
def ddpm_sample(
    diffusion: GaussianDiffusion, predict: Predict, noise: Tensor, *, num_steps: int, randn_like: RandnLike
) -> Tensor:
    """Ancestral sampling (arXiv 2006.11239, algorithm 2) on respaced steps, as DiT: `num_steps` network calls.

    Args:
        diffusion: the process.
        predict: returns (N, 2C, H, W): noise and variance fraction.
        noise: standard normal (N, C, H, W).
        num_steps: 1 to the steps of the schedule.
        randn_like: called num_steps - 1 times, noisiest step first.

    Raises:
        ValueError: num_steps outside the schedule.
    """
    process = diffusion.respace(num_steps)
    x = noise
    for i in reversed(range(num_steps)):
        p = process.p_mean_variance(predict(x, process.timesteps[i]), x, i)
        x = p.mean if i == 0 else torch.addcmul(p.mean, (0.5 * p.log_variance).exp(), randn_like(x))
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
    x = noise
    for i in reversed(range(num_steps)):
        predicted = predict(x, process.timesteps[i])[:, : x.shape[1]].to(x.dtype)
        x_start = process.x_start_from_noise(predicted, x, i)
        alpha_bar, before = alpha_bars[i], alpha_bars[i - 1] if i > 0 else 1.0
        sigma = eta * math.sqrt((1 - before) / (1 - alpha_bar) * (1 - alpha_bar / before))
        x = math.sqrt(before) * x_start + math.sqrt(1 - before - sigma**2) * predicted
        if sigma > 0 and randn_like is not None:
            x = x + sigma * randn_like(x)
    return x


@torch.no_grad()
def dpmpp_sample(
    diffusion: GaussianDiffusion,
    predict: Predict,
    noise: Tensor,
    *,
    num_steps: int,
    randn_like: RandnLike | None = None,
) -> Tensor:
    """DPM-Solver++(2M) (arXiv 2211.01095, algorithm 2), steps even in log-SNR: `num_steps` network calls.

    The network sees its own integer times. The last step is of first order and ends at the clean image. As
    `ddpm_sample`, without noise.

    Raises:
        ValueError: as `ddpm_sample`.
    """
    process = diffusion.respace(num_steps, "log_snr")
    alpha_bars, lambdas = process.alphas_cumprod.tolist(), (process.log_snr / 2).tolist()
    x, before, h_before = noise, noise, math.inf  # no slope at the first step
    for i in reversed(range(num_steps)):
        predicted = predict(x, process.timesteps[i])[:, : x.shape[1]].to(x.dtype)
        x_start = process.x_start_from_noise(predicted, x, i)
        if i == 0:
            break
        h = lambdas[i - 1] - lambdas[i]
        midway = x_start + h / (2 * h_before) * (x_start - before)
        shrink = math.sqrt((1 - alpha_bars[i - 1]) / (1 - alpha_bars[i]))
        x = shrink * x - math.sqrt(alpha_bars[i - 1]) * math.expm1(-h) * midway
        before, h_before = x_start, h
    return x_start


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
    randn_like: RandnLike | None = None,
) -> Tensor:
    """Solve dx/dt = velocity from 0 to 1, by torchdiffeq where the steps are adaptive.

    torchdiffeq's fixed steps would wait for the device, since it asks there after each whether the end is reached.

    Args:
        flow: the process.
        predict: returns the velocity (N, C, H, W).
        noise: standard normal (N, C, H, W).
        num_steps: intervals of a fixed-step method, each with as many network calls as the method has stages; None for
            an adaptive one.
        method: a name of torchdiffeq: FIXED_METHODS, ADAPTIVE_METHODS.
        atol: absolute tolerance of adaptive methods, above 0. The error is that of the whole batch.
        rtol: relative tolerance, above 0.

    Raises:
        ValueError: unknown method; num_steps missing or given where it must not be; tolerances that are not positive,
            or too small for this flow; NonFiniteError for a velocity of an adaptive method that is not finite.
    """
    adaptive = method in ADAPTIVE_METHODS
    check_choice("method", method, (*FIXED_METHODS, *ADAPTIVE_METHODS))
    if adaptive and num_steps is not None:
        raise ValueError(f"num_steps: {num_steps}; {method} chooses its own steps: leave it out, set atol and rtol")
    if not adaptive and (num_steps is None or num_steps < 1):
        raise ValueError(f"num_steps: {num_steps}; {method} needs at least 1")
    for name, value in (("atol", atol), ("rtol", rtol)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name}: {value}; needs a number above 0")

    if num_steps is not None:
        return _fixed_steps(lambda x, time: predict(x, time).to(x.dtype), noise, method, num_steps)

    def velocity(t: Tensor, x: Tensor) -> Tensor:
        v = predict(x, float(t)).to(x.dtype)
        refuse_non_finite(v, "velocity")  # NaN would shrink the steps to nothing
        return v

    ends = noise.new_tensor([0.0, 1.0])
    try:
        x: Tensor = odeint(velocity, noise, ends, atol=atol, rtol=rtol, method=method)[-1]
    except AssertionError as error:
        if "underflow in dt" not in str(error):
            raise
        cause = f"the flow explodes, or the tolerances are too small: atol {atol}, rtol {rtol}"
        raise ValueError(f"method: {method} shrank its steps to nothing; {cause}") from error
    return x


def _fixed_steps(velocity: Predict, x: Tensor, method: str, num_steps: int) -> Tensor:
    """Steps of equal length from 0 to 1. The order of operations is torchdiffeq's: samples are equal in every bit."""
    times = torch.linspace(0, 1, num_steps + 1, dtype=torch.float64).tolist()
    for t0, t1 in itertools.pairwise(times):
        dt = t1 - t0
        k1 = velocity(x, t0)
        if method == "euler":
            x = x + dt * k1
        elif method == "midpoint":
            x = x + dt * velocity(x + k1 * (0.5 * dt), t0 + 0.5 * dt)
        elif method == "heun2":
            k2 = velocity(x + dt * k1, t1)
            x = x + dt * (0.5 * k1 + 0.5 * k2)
        else:  # the 3/8 rule
            k2 = velocity(x + dt * k1 * (1 / 3), t0 + dt * (1 / 3))
            k3 = velocity(x + dt * (k2 - k1 * (1 / 3)), t0 + dt * (2 / 3))
            k4 = velocity(x + dt * (k1 - k2 + k3), t1)
            x = x + (k1 + 3 * (k2 + k3) + k4) * dt * 0.125
    return x


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
) -> Tensor:
    """Euler-Maruyama of SiT's SDE (arXiv 2401.08740), score and drift from one velocity: `num_steps` network calls.

    Args:
        flow: the process.
        predict: returns the velocity (N, C, H, W).
        noise: standard normal (N, C, H, W).
        num_steps: network calls, the last step among them.
        diffusion_form: one of vcagen.processes.flow.DIFFUSION_FORMS.
        last_step: Mean (drift without noise), Tweedie (the expected data), Euler (the ODE's step), or none: all steps
            alike.
        last_step_size: the last step goes from 1 - last_step_size to 1 (where it is the only one, the whole way).
        randn_like: called for every step but the last one, or for all where that is none.

    Raises:
        ValueError: unknown form or last step; sizes out of range.
    """
    last_step = last_step or "none"
    check_choice("last_step", last_step, LAST_STEPS)
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

    x = noise
    for i in range(num_steps):
        velocity = predict(x, times[i]).to(x.dtype)
        drift = velocity + weights[i] * flow.score_from_velocity(velocity, x, times[i])
        if i < num_noisy:
            x = x + dt * drift + math.sqrt(2 * weights[i] * dt) * randn_like(x)
        elif last_step == "Mean":
            x = x + (1 - end) * drift
        else:  # Euler's step is Tweedie's x / t + (1 - t)^2 / t score for this interpolant
            x = x + (1 - end) * velocity
    return x


class Sampler(NamedTuple):
    """A sampler as the options see it."""

    function: Callable[..., Tensor]
    """function(process, predict, noise, *, randn_like, **options) -> (N, C, H, W)."""
    process: str
    """Name of its process."""
    options: tuple[str, ...]
    """Its options, by their names in SamplingConfig."""


SAMPLERS = {
    "ddpm": Sampler(ddpm_sample, "diffusion", ("num_steps",)),
    "ddim": Sampler(ddim_sample, "diffusion", ("num_steps", "eta")),
    "dpmpp": Sampler(dpmpp_sample, "diffusion", ("num_steps",)),
    "sde": Sampler(sde_sample, "flow", ("num_steps", "diffusion_form", "last_step", "last_step_size")),
    "ode": Sampler(ode_sample, "flow", ("method", "num_steps", "atol", "rtol")),
}
"""By name; the first of a process is its default, that of the papers."""


def options_in_use(name: str, method: str) -> tuple[str, ...]:
    """Options of a sampler that matter: adaptive ODE methods have tolerances in the place of steps."""
    options = SAMPLERS[name].options
    if "method" not in options:
        return options
    idle = ("num_steps",) if method in ADAPTIVE_METHODS else ("atol", "rtol")
    return tuple(option for option in options if option not in idle)


def fixed_step_samplers(process: str) -> dict[str, tuple[dict[str, str], int]]:
    """The samplers of a process that take a number of steps, a method of them for itself.

    Returns:
        Name, such as `ode heun2` -> the options that choose it, and its network calls of a step.
    """
    found: dict[str, tuple[dict[str, str], int]] = {}
    for name, sampler in SAMPLERS.items():
        if sampler.process != process or "num_steps" not in sampler.options:
            continue
        if "method" in sampler.options:
            for method, calls in FIXED_METHODS.items():
                found[f"{name} {method}"] = {"sampler": name, "method": method}, calls
        else:
            found[name] = {"sampler": name}, 1
    return found
