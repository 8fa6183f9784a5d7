"""Samplers and guidance against the public code, closed forms, and call by call."""

import json
import math
import weakref
from itertools import pairwise

import pytest
import torch
from helpers import close, reference, reference_network, u
from torch.utils._python_dispatch import TorchDispatchMode
from torchdiffeq._impl.odeint import SOLVERS

from vcagen.bench import samplers as bench
from vcagen.diffusion import GaussianDiffusion
from vcagen.flow import DIFFUSION_FORMS, LinearInterpolant
from vcagen.samplers import (
    ADAPTIVE_METHODS,
    FIXED_METHODS,
    LAST_STEPS,
    SAMPLERS,
    NonFiniteError,
    ddim_sample,
    ddpm_sample,
    ode_sample,
    sde_sample,
    with_cfg,
)

DIT, SIT = reference("dit"), reference("sit")
DIFFUSION, FLOW = GaussianDiffusion(), LinearInterpolant()
STAGES = {"euler": 1, "midpoint": 2, "heun2": 2, "heun3": 3, "rk4": 4}


class StoredNoise:
    """Call j draws 1.7 u(shape, first + j)."""

    def __init__(self, first):
        self.k = first

    def __call__(self, x):
        self.k += 1
        return 1.7 * u(x.shape, self.k)


def draw(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype)


def no_noise(x):
    return torch.zeros_like(x)


def velocity_network():
    network = reference_network()
    return lambda x, t, y: network(x, t, y)[:, :4]


def start(case):
    return case["z_scale"] * u((2, 4, 8, 8), case["z_k"]), torch.tensor(case["y"])


# The public code


def test_ddpm_equals_the_public_code():
    case = DIT["ddpm_sample_10"]
    noise, y = start(case)
    predict = with_cfg(reference_network(), y, cfg_scale=1.0, null_label=10)
    close(ddpm_sample(DIFFUSION, predict, noise, num_steps=10, randn_like=StoredNoise(1100)), case["output"])
    assert predict.calls == 10


def test_guided_ddpm_equals_the_public_code():
    case = DIT["ddpm_sample_10_cfg1.5_first3"]
    noise, y = start(case)
    predict = with_cfg(reference_network(), y, cfg_scale=1.5, null_label=10, guided_channels=3)
    close(ddpm_sample(DIFFUSION, predict, noise, num_steps=10, randn_like=StoredNoise(2100)), case["output"])
    assert predict.calls == 10


def test_ddim_equals_the_public_code():
    case = DIT["ddim_sample_10"]
    noise, y = start(case)
    predict = with_cfg(reference_network(), y, cfg_scale=1.0, null_label=10)
    close(ddim_sample(DIFFUSION, predict, noise, num_steps=10), case["output"])
    assert predict.calls == 10


@pytest.mark.parametrize(("name", "method"), [("ode_euler", "euler"), ("ode_heun2", "heun2"), ("ode_dopri5", "dopri5")])
def test_ode_equals_the_public_code(name, method):
    case = SIT[name]
    noise, y = start(case)
    predict = with_cfg(velocity_network(), y, cfg_scale=1.0, null_label=10)
    num_steps = None if method == "dopri5" else case["intervals"]
    close(ode_sample(FLOW, predict, noise, num_steps=num_steps, method=method), case["output"])


@pytest.mark.parametrize("name", [name for name in SIT if name.startswith("sde_")])
def test_sde_equals_the_public_code(name):
    case, (_, _, form, last) = SIT[name], name.split("_")
    noise, y = start(case)
    predict = with_cfg(velocity_network(), y, cfg_scale=1.0, null_label=10)
    options = {"num_steps": case["num_steps"], "last_step_size": case["last_step_size"]}
    drawn = StoredNoise(1100)
    sample = sde_sample(FLOW, predict, noise, diffusion_form=form, last_step=last, randn_like=drawn, **options)
    close(sample, case["output"])
    assert predict.calls == 10
    assert drawn.k == 1109


# Guidance


class Recorder:
    """A network that keeps its arguments and answers with numbers that depend on all of them."""

    def __init__(self, channels=8):
        self.channels = channels
        self.seen = []

    def __call__(self, x, t, y):
        self.seen.append((x, t, y))
        weight = torch.linspace(0.1, 0.9, self.channels, dtype=x.dtype).reshape(1, -1, 1, 1)
        condition = (torch.sin(y.to(x.dtype)) + t.to(x.dtype) / 1000).reshape(-1, 1, 1, 1)
        return torch.tanh(weight * x.mean(1, keepdim=True) + condition)

    @property
    def batches(self):
        return [len(x) for x, _, _ in self.seen]


X, T, Y = u((3, 4, 8, 8), 1), torch.full((3,), 500), torch.tensor([3, 1, 2])
NULL = torch.full((3,), 10)


def test_guidance_on_three_channels_equals_the_public_code():
    case = DIT["dit_forward_cfg_first3"]
    x, t, y = u((1, 4, 8, 8), case["x_k"]), torch.tensor([case["t"]]), torch.tensor([case["y"]])
    predict = with_cfg(reference_network(), y, cfg_scale=case["cfg_scale"], null_label=10, guided_channels=3)
    close(predict(x, t), case["output"])


def test_scale_1_is_the_plain_call_bit_for_bit():
    network = Recorder()
    output = with_cfg(network, Y, cfg_scale=1.0, null_label=10)(X, T)
    assert network.batches == [3]
    assert network.seen[0][0] is X
    assert torch.equal(output, Recorder()(X, T, Y))


def test_scale_0_is_one_unconditional_call():
    network = Recorder()
    output = with_cfg(network, Y, cfg_scale=0.0, null_label=10)(X, T)
    assert network.batches == [3]
    assert torch.equal(output, Recorder()(X, T, NULL))


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.5, 4.0, -1.0])
@pytest.mark.parametrize("guided", [None, 1, 3, 4])
def test_guidance_is_one_doubled_call_and_leaves_the_variance_conditional(scale, guided):
    network = Recorder()
    output = with_cfg(network, Y, cfg_scale=scale, null_label=10, guided_channels=guided)(X, T)
    cond, uncond = Recorder()(X, T, Y), Recorder()(X, T, NULL)
    count = 4 if guided is None else guided
    torch.testing.assert_close(output[:, :count], (uncond + scale * (cond - uncond))[:, :count], rtol=1e-12, atol=1e-12)
    if scale == 0 and count == 4:
        assert network.batches == [3]
    else:
        assert network.batches == [6]
        assert torch.equal(output[:, count:], cond[:, count:])


@pytest.mark.parametrize("time", [0.3, None])
def test_interval_is_closed_and_the_host_time_is_only_a_shortcut(time):
    t = torch.full((3,), 0.3, dtype=torch.float64)
    for interval, guides in (((0.0, 1.0), True), ((0.3, 0.3), True), ((0.31, 1.0), False), ((0.0, 0.29), False)):
        network = Recorder(4)
        with_cfg(network, Y, cfg_scale=2.0, null_label=10, interval=interval)(X, t, time=time)
        assert network.batches == [6 if guides else 3], interval


def both_families(network, **cfg):
    predict = with_cfg(network, Y, null_label=10, **cfg)
    if network.channels == 8:
        return ddpm_sample(DIFFUSION, predict, X, num_steps=10, randn_like=draw())
    return sde_sample(FLOW, predict, X, num_steps=10, randn_like=draw())


@pytest.mark.parametrize(("channels", "interval"), [(8, (1000, 2000)), (4, (0.97, 1.0))])
def test_interval_that_covers_no_step_equals_scale_1(channels, interval):
    network = Recorder(channels)
    sample = both_families(network, cfg_scale=4.0, interval=interval)
    assert torch.equal(sample, both_families(Recorder(channels), cfg_scale=1.0))
    assert network.batches == [3] * 10


@pytest.mark.parametrize(("channels", "interval"), [(8, (300, 700)), (4, (0.25, 0.6))])
def test_doubled_batch_only_inside_the_interval(channels, interval):
    network = Recorder(channels)
    sample = both_families(network, cfg_scale=4.0, interval=interval)
    assert not torch.equal(sample, both_families(Recorder(channels), cfg_scale=1.0))
    for x, t, _ in network.seen:
        assert len(x) == (6 if interval[0] <= float(t[0]) <= interval[1] else 3)
    assert 3 <= network.batches.count(6) <= 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cfg_scale": 1.5, "null_label": None}, "cfg_scale: 1.5; this network has no null label"),
        ({"cfg_scale": 0.0, "null_label": None}, "cfg_scale: 0.0"),
        ({"cfg_scale": math.nan, "null_label": 10}, "cfg_scale: nan"),
        ({"cfg_scale": 2.0, "null_label": 10, "guided_channels": 0}, "guided_channels: 0"),
        ({"cfg_scale": 2.0, "null_label": 10, "interval": (0.6, 0.4)}, "cfg_interval: "),
    ],
)
def test_impossible_guidance_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        with_cfg(Recorder(), Y, **options)


def test_a_network_without_null_label_can_be_sampled_unguided():
    assert torch.equal(with_cfg(Recorder(), Y, cfg_scale=1.0, null_label=None)(X, T), Recorder()(X, T, Y))


# Closed forms: data N(0.7, 2^2)

MEAN, STD = 0.7, 2.0


def exact_velocity(x, t):
    t = t.reshape(-1, 1, 1, 1)
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
        now, fraction = rows[int(t[0])]
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


@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("heun2", 2), ("heun3", 3), ("rk4", 4)])
def test_order_of_convergence(method, order):
    """The flow of Gaussian data sends noise z to 0.7 + 2 z."""
    noise = torch.tensor([-1.5, -0.3, 0.4, 2.0], dtype=torch.float64).reshape(4, 1, 1, 1)
    errors = [
        (ode_sample(FLOW, exact_velocity, noise, num_steps=n, method=method) - (MEAN + STD * noise)).abs().max().item()
        for n in (40, 80, 160)
    ]
    for coarse, fine in pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.25)


@pytest.mark.parametrize("method", FIXED_METHODS + ADAPTIVE_METHODS)
def test_every_method_solves_the_gaussian_flow(method):
    noise = u((4, 1, 1, 1), 1)
    num_steps = None if method in ADAPTIVE_METHODS else 400
    x = ode_sample(FLOW, exact_velocity, noise, num_steps=num_steps, method=method)
    torch.testing.assert_close(x, MEAN + STD * noise, rtol=0, atol=0.02)


def test_methods_are_those_of_torchdiffeq():
    assert set(FIXED_METHODS + ADAPTIVE_METHODS) == set(SOLVERS)


# Calls, steps, memory, synchronisation


def runs(num_steps):
    """Every sampler with a fixed number of steps, as a function of predict, and its network calls."""
    noise = torch.zeros(1, 1, 1, 1)
    yield lambda predict: ddpm_sample(DIFFUSION, predict, noise, num_steps=num_steps, randn_like=no_noise), 2, num_steps
    yield lambda predict: ddim_sample(DIFFUSION, predict, noise, num_steps=num_steps), 2, num_steps
    for last_step in ("Mean", "none"):
        yield (
            lambda predict, last_step=last_step: sde_sample(
                FLOW, predict, noise, num_steps=num_steps, last_step=last_step, randn_like=no_noise
            ),
            1,
            num_steps,
        )
    for method, stages in STAGES.items():
        yield (
            lambda predict, method=method: ode_sample(FLOW, predict, noise, num_steps=num_steps, method=method),
            1,
            stages * num_steps,
        )


def calls_are_counted(num_steps):
    for sample, channels, expected in runs(num_steps):
        predict = with_cfg(lambda x, t, y, c=channels: x.expand(1, c, 1, 1), Y[:1], cfg_scale=1.0, null_label=None)
        sample(predict)
        assert predict.calls == expected


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 29, 49, 57, 103, 197, 399])
def test_calls_are_steps_times_stages(num_steps):
    calls_are_counted(num_steps)


@pytest.mark.slow
def test_calls_are_steps_times_stages_for_every_count():
    for num_steps in range(1, 400):
        calls_are_counted(num_steps)


def test_times_are_integers_of_the_full_schedule_or_floats_of_the_flow():
    network = Recorder()
    ddpm_sample(DIFFUSION, with_cfg(network, Y, cfg_scale=1.0, null_label=10), X, num_steps=10, randn_like=no_noise)
    assert [t.tolist() for _, t, _ in network.seen] == [[t] * 3 for t in reversed(DIFFUSION.respace(10).timesteps)]
    assert all(t.dtype == torch.int64 for _, t, _ in network.seen)
    network = Recorder(4)
    sde_sample(
        FLOW, with_cfg(network, Y, cfg_scale=1.0, null_label=10), X.float(), num_steps=5, last_step_size=0.2,
        randn_like=no_noise,
    )  # fmt: skip
    assert [t[0].item() for _, t, _ in network.seen] == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])
    assert all(t.dtype == torch.float32 for _, t, _ in network.seen)


def all_samplers(predict, noise, num_steps=6, **options):
    """Every sampler, given a predict that returns as many channels as the noise has."""
    twice = lambda x, t: predict(x, t).repeat(1, 2, 1, 1)  # noqa: E731
    yield lambda: ddpm_sample(DIFFUSION, twice, noise, num_steps=num_steps, randn_like=draw(), **options)
    yield lambda: ddim_sample(DIFFUSION, twice, noise, num_steps=num_steps, eta=1.0, randn_like=draw(), **options)
    yield lambda: ode_sample(FLOW, predict, noise, num_steps=num_steps, method="euler", **options)
    yield lambda: sde_sample(FLOW, predict, noise, num_steps=num_steps, randn_like=draw(), **options)


def test_progress_counts_steps():
    done = []
    for sample in all_samplers(lambda x, t: x, X, progress=done.append):
        sample()
        assert done == [1, 2, 3, 4, 5, 6]
        done.clear()
    ode_sample(FLOW, lambda x, t: x, X, method="dopri5", progress=done.append)
    assert done == list(range(1, len(done) + 1))
    assert len(done) > 1


def test_samples_repeat_bit_for_bit_and_leave_the_global_state_alone():
    state = torch.get_rng_state()
    for sample in all_samplers(lambda x, t: torch.sin(x), X):
        assert torch.equal(sample(), sample())
    assert torch.equal(state, torch.get_rng_state())


def test_only_the_current_state_is_kept_and_no_graph():
    alive = []

    def predict(x, t):
        alive.append(weakref.ref(x))
        assert sum(ref() is not None for ref in alive) <= 4, "old states are still in memory"
        return x * weight

    weight = torch.ones(1, requires_grad=True, dtype=torch.float64)
    for sample in all_samplers(predict, X, num_steps=20):
        alive.clear()
        assert not sample().requires_grad


class Reads(TorchDispatchMode):
    """Counts the values that the host reads from tensors: each would wait for a device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


def test_no_step_waits_for_the_device():
    """Guidance with an interval, over few and many steps: the same number of reads."""

    def count(num_steps, which):
        network = Recorder(4)
        predict = with_cfg(network, Y, cfg_scale=2.0, null_label=10, interval=(0, 500))
        twice = with_cfg(
            lambda x, t, y: network(x, t, y).repeat(1, 2, 1, 1), Y, cfg_scale=2.0, null_label=10, interval=(0, 500)
        )
        with Reads() as reads:
            if which == "ddpm":
                ddpm_sample(DIFFUSION, twice, X, num_steps=num_steps, randn_like=no_noise)
            elif which == "ddim":
                ddim_sample(DIFFUSION, twice, X, num_steps=num_steps, eta=0.5, randn_like=no_noise)
            else:
                sde_sample(FLOW, predict, X, num_steps=num_steps, randn_like=no_noise)
        return reads.count

    for which in ("ddpm", "ddim", "sde"):
        assert count(5, which) == count(50, which), which


# Bad states and bad input


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", range(4))
def test_non_finite_state_names_step_and_image(which, value):
    calls = []

    def predict(x, t):
        calls.append(1)
        output = 0.1 * x
        if len(calls) == 3:
            output[1, 2, 0, 0] = value
        if len(calls) == 4:
            output[0] = value
        return output

    sample = list(all_samplers(predict, X))[which]
    with pytest.raises(NonFiniteError, match="not finite after step 3 at batch index 1") as caught:
        sample()
    assert (caught.value.step, caught.value.batch_index) == (3, 1)
    assert len(calls) == 6  # read at the end, not step by step


@pytest.mark.parametrize("method", ADAPTIVE_METHODS)
def test_non_finite_state_ends_an_adaptive_method(method):
    def predict(x, t):
        return torch.where((t > 0.3).reshape(-1, 1, 1, 1) & (torch.arange(3) == 2).reshape(-1, 1, 1, 1), math.nan, x)

    with pytest.raises(NonFiniteError, match="batch index 2"):
        ode_sample(FLOW, predict, X, method=method)


def test_flow_that_explodes_ends_with_an_error():
    """dx/dt = x^2 from 2 is infinite at t = 0.5."""
    noise = torch.full((1, 1, 1, 1), 2.0)
    with pytest.raises(NonFiniteError, match="batch index 0"):
        ode_sample(FLOW, lambda x, t: x**2, noise, num_steps=50, method="euler")
    with pytest.raises(ValueError, match="method: dopri5 shrank its steps to nothing at atol 1e-06, rtol 0.001"):
        ode_sample(FLOW, lambda x, t: x**2, noise, method="dopri5")


def test_large_finite_states_are_not_mistaken():
    x = sde_sample(FLOW, lambda x, t: x, 1e37 * torch.ones(2, 4, 32, 32), num_steps=2, randn_like=no_noise)
    assert x.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "heun", "num_steps": 5}, "method: heun; choose from euler, .*heun2.*dopri5"),
        ({"method": "dopri5", "num_steps": 5}, "num_steps: 5; dopri5 chooses its own steps"),
        ({"method": "euler"}, "num_steps: None; euler needs at least 1"),
        ({"method": "euler", "num_steps": 0}, "num_steps: 0"),
        ({"method": "dopri5", "atol": 0.0}, "atol: 0.0"),
        ({"method": "dopri5", "rtol": math.nan}, "rtol: nan"),
    ],
)
def test_impossible_ode_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ode_sample(FLOW, exact_velocity, X.float(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"diffusion_form": "inccreasing-decreasing"}, "diffusion_form: inccreasing-decreasing; choose from constant"),
        ({"last_step": "mean"}, "last_step: mean; choose from Mean, Tweedie, Euler, none"),
        ({"last_step_size": 0.0}, "last_step_size: 0.0"),
        ({"last_step_size": 1.0}, "last_step_size: 1.0"),
        ({"num_steps": 0}, "num_steps: 0"),
    ],
)
def test_impossible_sde_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sde_sample(FLOW, exact_velocity, X, **{"num_steps": 5, "randn_like": no_noise, **options})


@pytest.mark.parametrize("num_steps", [0, 1001])
def test_impossible_step_count_of_a_diffusion_is_refused(num_steps):
    for sample in (ddpm_sample, ddim_sample):
        with pytest.raises(ValueError, match=f"num_steps: {num_steps}; the schedule has 1 to 1000"):
            sample(DIFFUSION, lambda x, t: x, X, num_steps=num_steps, randn_like=no_noise)


@pytest.mark.parametrize("eta", [-0.1, 1.1, math.nan])
def test_impossible_eta_is_refused(eta):
    with pytest.raises(ValueError, match="eta: "):
        ddim_sample(DIFFUSION, lambda x, t: x, X, num_steps=5, eta=eta, randn_like=no_noise)


def test_samplers_are_listed_by_name():
    assert list(SAMPLERS.items()) == [
        ("ddpm", ddpm_sample), ("ddim", ddim_sample), ("ode", ode_sample), ("sde", sde_sample)
    ]  # fmt: skip


# Benchmark


def test_benchmark_reports_every_sampler_below_5_percent(tmp_path, capsys):
    bench.main(["--batch", "2", "--num_steps", "4", "--repeats", "2", "--json", str(tmp_path / "out.json")])
    result = json.loads((tmp_path / "out.json").read_text())
    assert {row["sampler"].split()[0] for row in result["samplers"]} == set(SAMPLERS)
    table = capsys.readouterr().out
    for row in result["samplers"]:
        assert row["sampler"] in table
        assert 0 < row["percent_of_forward"] < 5
    calls = {row["sampler"]: row["calls"] for row in result["samplers"]}
    assert (calls["ddpm"], calls["ode heun2"], calls["sde sigma"]) == (4, 8, 4)
    with pytest.raises(ValueError, match="repeats: 0"):
        bench.main(["--repeats", "0"])
