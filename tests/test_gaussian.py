"""Samplers with the exact network of Gaussian data N(0.7, 2^2): moments, convergence, every method and form."""

import math
from itertools import pairwise

import pytest
import torch
from helpers import draw, u

from vcagen.processes.diffusion import GaussianDiffusion
from vcagen.processes.flow import DIFFUSION_FORMS, LinearInterpolant
from vcagen.processes.samplers import (
    ADAPTIVE_METHODS,
    FIXED_METHODS,
    LAST_STEPS,
    ddim_sample,
    ddpm_sample,
    dpmpp_sample,
    ode_sample,
    sde_sample,
)

DIFFUSION, FLOW = GaussianDiffusion(), LinearInterpolant()
MEAN, STD = 0.7, 2.0


def exact_velocity(x, t):
    return MEAN + (t * STD**2 - (1 - t)) / (t**2 * STD**2 + (1 - t) ** 2) * (x - t * MEAN)


def exact_noise(process):
    """Noise and variance fraction of the exact reverse process."""
    rows = {}
    for i, t in enumerate(process.timesteps):
        now, beta = process.alphas_cumprod[i].item(), process.betas[i].item()
        before = process.alphas_cumprod[i - 1].item() if i else 1.0
        variance = 1 / ((1 - beta) / beta + 1 / (before * STD**2 + 1 - before))
        low, high = process.posterior_log_variance[i].item(), math.log(beta)
        rows[t] = now, 2 * (math.log(variance) - low) / (high - low) - 1 if i else 0.0

    def predict(x, t):
        now, fraction = rows[t]
        noise = math.sqrt(1 - now) / (now * STD**2 + 1 - now) * (x - math.sqrt(now) * MEAN)
        return torch.cat([noise, torch.full_like(x, fraction)], dim=1)

    return predict


def gaussian(sample):
    x = sample(draw(1)(torch.empty(100_000, 1, 1, 1)))
    assert x.mean().item() == pytest.approx(MEAN, abs=0.03)
    assert x.var().item() == pytest.approx(STD**2, rel=0.05)


@pytest.mark.parametrize("num_steps", [250, pytest.param(1000, marks=pytest.mark.slow)])
def test_ddpm_of_gaussian_data(num_steps):
    predict = exact_noise(DIFFUSION.respace(num_steps))
    gaussian(lambda noise: ddpm_sample(DIFFUSION, predict, noise, num_steps=num_steps, randn_like=draw()))


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ddim_of_gaussian_data(eta):
    predict = exact_noise(DIFFUSION.respace(250, "ddim"))
    gaussian(lambda noise: ddim_sample(DIFFUSION, predict, noise, num_steps=250, eta=eta, randn_like=draw()))


def test_dpmpp_of_gaussian_data_is_of_second_order():
    """The ODE sends x_T to the data by one line: mean to mean, standard deviation to standard deviation."""
    noise = torch.tensor([-1.5, -0.3, 0.4, 2.0], dtype=torch.float64).reshape(4, 1, 1, 1)
    last = DIFFUSION.alphas_cumprod[-1].item()
    exact = MEAN + STD * (noise - math.sqrt(last) * MEAN) / math.sqrt(last * STD**2 + 1 - last)
    errors = [
        (dpmpp_sample(DIFFUSION, exact_noise(DIFFUSION), noise, num_steps=n) - exact).abs().max().item()
        for n in (20, 40, 80, 160)
    ]
    for coarse, fine in pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(2, abs=0.25)


@pytest.mark.parametrize("method", ["euler", "heun2", "dopri5"])
def test_ode_of_gaussian_data(method):
    num_steps = None if method == "dopri5" else 250
    gaussian(lambda noise: ode_sample(FLOW, exact_velocity, noise, num_steps=num_steps, method=method))


@pytest.mark.slow
@pytest.mark.parametrize("form", DIFFUSION_FORMS)
@pytest.mark.parametrize("last_step", LAST_STEPS)
def test_sde_of_gaussian_data(form, last_step):
    gaussian(
        lambda noise: sde_sample(
            FLOW, exact_velocity, noise, num_steps=250, diffusion_form=form, last_step=last_step, randn_like=draw()
        )
    )


@pytest.mark.parametrize("form", DIFFUSION_FORMS)
@pytest.mark.parametrize("last_step", LAST_STEPS)
@pytest.mark.parametrize("num_steps", [10, 250])
def test_sde_moments_equal_those_of_its_own_recursion(form, last_step, num_steps):
    """The network is linear, so mean and variance of Euler-Maruyama are exact: written out here, and the last steps'
    own bias with them. The sampler's are read off samples that differ in one draw only.
    """
    flow = LinearInterpolant()
    first = 0.01 if form == "SBDM" else 0.0
    end = 1.0 if last_step == "none" else 0.96
    noisy = num_steps if last_step == "none" else num_steps - 1
    dt = (end - first) / noisy
    mean, variance = 0.0, 1.0
    for i in range(num_steps):
        t = min(first + i * dt, end)
        w = flow.diffusion_coefficient(torch.tensor(t, dtype=torch.float64), form).item()
        v_slope = (t * STD**2 - (1 - t)) / (t**2 * STD**2 + (1 - t) ** 2)
        s_slope = -1 / (t**2 * STD**2 + (1 - t) ** 2)
        last = i == noisy
        h, w = (1 - end, w if last_step == "Mean" else 0.0) if last else (dt, w)
        slope = v_slope + w * s_slope
        mean = mean + h * (MEAN + slope * (mean - t * MEAN))
        variance = variance * (1 + h * slope) ** 2 + (0.0 if last else 2 * w * dt)

    def sample(noise, unit=None):
        """One draw is 1, all others 0: the coefficient of that draw in the sample."""
        calls = iter(range(num_steps))
        return sde_sample(
            flow, exact_velocity, torch.full((1, 1, 1, 1), noise, dtype=torch.float64), num_steps=num_steps,
            diffusion_form=form, last_step=last_step, randn_like=lambda x: torch.full_like(x, next(calls) == unit),
        ).item()  # fmt: skip

    base = sample(0.0)
    draws = range(noisy) if num_steps == 10 else []
    total = (sample(1.0) - base) ** 2 + sum((sample(0.0, unit) - base) ** 2 for unit in draws)
    assert base == pytest.approx(mean, rel=1e-9)
    if num_steps == 10:
        assert total == pytest.approx(variance, rel=1e-9)
    else:  # and with many steps that exact variance is the data's, but for the noise that the last step leaves out
        assert mean == pytest.approx(MEAN, abs=0.02)
        assert variance == pytest.approx(STD**2, rel=0.035)


def test_sbdm_from_zero_is_finite_and_stable_with_few_steps():
    for num_steps in (1, 2, 10, 50):
        x = sde_sample(
            FLOW, exact_velocity, draw(1)(torch.empty(10_000, 1, 1, 1)), num_steps=num_steps, diffusion_form="SBDM",
            randn_like=draw(),
        )  # fmt: skip
        assert x.isfinite().all()
        if num_steps >= 10:
            assert x.var().item() == pytest.approx(STD**2, rel=0.1)


@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("heun2", 2), ("rk4", 4)])
def test_order_of_convergence(method, order):
    """The flow of Gaussian data sends noise z to 0.7 + 2 z."""
    noise = torch.tensor([-1.5, -0.3, 0.4, 2.0], dtype=torch.float64).reshape(4, 1, 1, 1)
    errors = [
        (ode_sample(FLOW, exact_velocity, noise, num_steps=n, method=method) - (MEAN + STD * noise)).abs().max().item()
        for n in (40, 80, 160)
    ]
    for coarse, fine in pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.25)


@pytest.mark.parametrize("method", [*FIXED_METHODS, *ADAPTIVE_METHODS])
def test_every_method_solves_the_gaussian_flow(method):
    noise = u((4, 1, 1, 1), 1)
    num_steps = None if method in ADAPTIVE_METHODS else 400
    x = ode_sample(FLOW, exact_velocity, noise, num_steps=num_steps, method=method)
    torch.testing.assert_close(x, MEAN + STD * noise, rtol=0, atol=0.02)
