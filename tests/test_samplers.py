"""Samplers and guidance against the public code, closed forms, and call by call."""

import inspect
import math
import weakref

import pytest
import torch
from helpers import close, draw, no_noise, reference, reference_network, u
from torch.utils._python_dispatch import TorchDispatchMode
from torchdiffeq import odeint

from vcagen.processes.diffusion import GaussianDiffusion
from vcagen.processes.flow import LinearInterpolant
from vcagen.processes.guidance import with_cfg
from vcagen.processes.process import NonFiniteError
from vcagen.processes.samplers import (
    ADAPTIVE_METHODS,
    FIXED_METHODS,
    SAMPLERS,
    Sampler,
    ddim_sample,
    ddpm_sample,
    dpmpp_sample,
    fixed_step_samplers,
    ode_sample,
    options_in_use,
    sde_sample,
)

DIT, SIT = reference("dit"), reference("sit")
DIFFUSION, FLOW = GaussianDiffusion(), LinearInterpolant()
X, Y = u((3, 4, 8, 8), 1), torch.tensor([3, 1, 2])
STAGES = {"euler": 1, "midpoint": 2, "heun2": 2, "rk4": 4}


class StoredNoise:
    """Call j draws 1.7 u(shape, first + j)."""

    def __init__(self, first):
        self.k = first

    def __call__(self, x):
        self.k += 1
        return 1.7 * u(x.shape, self.k)


class Counted:
    """A network that counts its calls."""

    def __init__(self, network):
        self.network = network
        self.calls = 0

    def __call__(self, *args):
        self.calls += 1
        return self.network(*args)


def velocity_network():
    network = reference_network()
    return lambda x, t, y: network(x, t, y)[:, :4]


def start(case):
    return case["z_scale"] * u((2, 4, 8, 8), case["z_k"]), torch.tensor(case["y"])


# The public code


def test_ddpm_equals_the_public_code():
    case = DIT["ddpm_sample_10"]
    noise, y = start(case)
    network = Counted(reference_network())
    predict = with_cfg(network, y, cfg_scale=1.0, null_label=10)
    close(ddpm_sample(DIFFUSION, predict, noise, num_steps=10, randn_like=StoredNoise(1100)), case["output"])
    assert network.calls == 10


def test_guided_ddpm_equals_the_public_code():
    case = DIT["ddpm_sample_10_cfg1.5_first3"]
    noise, y = start(case)
    network = Counted(reference_network())
    predict = with_cfg(network, y, cfg_scale=1.5, null_label=10, guided_channels=3)
    close(ddpm_sample(DIFFUSION, predict, noise, num_steps=10, randn_like=StoredNoise(2100)), case["output"])
    assert network.calls == 10


def test_ddim_equals_the_public_code():
    case = DIT["ddim_sample_10"]
    noise, y = start(case)
    network = Counted(reference_network())
    predict = with_cfg(network, y, cfg_scale=1.0, null_label=10)
    close(ddim_sample(DIFFUSION, predict, noise, num_steps=10), case["output"])
    assert network.calls == 10


@pytest.mark.parametrize("num_steps", [1, 2, 10])
def test_dpmpp_equals_algorithm_2_of_its_paper(num_steps):
    """Written out from arXiv 2211.01095 with r_i = h_{i-1} / h_i, on the times that the network was asked at."""
    times, outputs, network = [], [], with_cfg(reference_network(), torch.tensor([3, 7]), cfg_scale=1.5, null_label=10)

    def predict(x, t):
        times.append(t)
        outputs.append(network(x, t))
        return outputs[-1]

    noise = start(DIT["ddim_sample_10"])[0]
    sample = dpmpp_sample(DIFFUSION, predict, noise, num_steps=num_steps)
    alpha = [DIFFUSION.alphas_cumprod[t].sqrt() for t in times]
    sigma = [(1 - DIFFUSION.alphas_cumprod[t]).sqrt() for t in times]
    lam = [(a / s).log() for a, s in zip(alpha, sigma, strict=True)]
    x, images = noise, []
    for i in range(num_steps):
        images.append((x - sigma[i] * outputs[i][:, :4]) / alpha[i])
        if i == num_steps - 1:
            break
        h, direction = lam[i + 1] - lam[i], images[i]
        if i > 0:
            r = (lam[i] - lam[i - 1]) / h
            direction = (1 + 1 / (2 * r)) * images[i] - 1 / (2 * r) * images[i - 1]
        x = sigma[i + 1] / sigma[i] * x - alpha[i + 1] * ((-h).exp() - 1) * direction
    close(sample, images[-1], 1e-12)


@pytest.mark.parametrize("num_steps", [3, 10, 20])
def test_dpmpp_equals_the_solver_of_diffusers_on_the_same_times(num_steps):
    from diffusers import DPMSolverMultistepScheduler

    noise, network = X.float(), lambda x, t: torch.tanh(x.flip(1) + t / 1000).repeat(1, 2, 1, 1)
    scheduler = DPMSolverMultistepScheduler(beta_start=1e-4, beta_end=0.02, beta_schedule="linear")
    scheduler.set_timesteps(timesteps=DIFFUSION.respace(num_steps, "log_snr").timesteps[::-1])
    x = noise
    for t in scheduler.timesteps:
        x = scheduler.step(network(x, int(t))[:, :4], t, x, return_dict=False)[0]
    close(dpmpp_sample(DIFFUSION, network, noise, num_steps=num_steps), x, 1e-5)


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
    network = Counted(velocity_network())
    predict = with_cfg(network, y, cfg_scale=1.0, null_label=10)
    options = {"num_steps": case["num_steps"], "last_step_size": case["last_step_size"]}
    drawn = StoredNoise(1100)
    sample = sde_sample(FLOW, predict, noise, diffusion_form=form, last_step=last, randn_like=drawn, **options)
    close(sample, case["output"])
    assert network.calls == 10
    assert drawn.k == 1109


# Calls, steps, memory, synchronisation


def runs(num_steps):
    """Every sampler with a fixed number of steps, as a function of predict, and its network calls."""
    noise = torch.zeros(1, 1, 1, 1)
    yield lambda predict: ddpm_sample(DIFFUSION, predict, noise, num_steps=num_steps, randn_like=no_noise), 2, num_steps
    yield lambda predict: ddim_sample(DIFFUSION, predict, noise, num_steps=num_steps), 2, num_steps
    yield lambda predict: dpmpp_sample(DIFFUSION, predict, noise, num_steps=num_steps), 2, num_steps
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
        network = Counted(lambda x, t, y, c=channels: x.expand(1, c, 1, 1))
        sample(with_cfg(network, Y[:1], cfg_scale=1.0, null_label=None))
        assert network.calls == expected


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 29, 49, 57, 103, 197, 399])
def test_calls_are_steps_times_stages(num_steps):
    calls_are_counted(num_steps)


@pytest.mark.slow
def test_calls_are_steps_times_stages_for_every_count():
    for num_steps in range(1, 400):
        calls_are_counted(num_steps)


def test_times_are_integers_of_the_full_schedule_or_floats_of_the_flow():
    seen = []

    def predict(x, time):
        seen.append(time)
        return x

    for sample in all_samplers(predict, X.float(), num_steps=5, sde={"last_step_size": 0.2}):
        sample()
    ddpm, ddim, dpmpp, ode, sde = (seen[i : i + 5] for i in range(0, 25, 5))
    assert {type(time) for time in ddpm + ddim + dpmpp} == {int}
    assert {type(time) for time in ode + sde} == {float}
    assert ddpm == [999, 749, 500, 250, 0]
    assert ddim == [800, 600, 400, 200, 0]
    log_snr = DIFFUSION.log_snr
    wanted = [log_snr[-1].lerp(log_snr[0], i / 5) for i in range(5)]
    assert dpmpp == [int((log_snr - value).abs().argmin()) for value in wanted]
    assert ode == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])
    assert sde == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])


def all_samplers(predict, noise, num_steps=6, sde=None, **options):
    """Every sampler, given a predict that returns as many channels as the noise has."""
    twice = lambda x, t: predict(x, t).repeat(1, 2, 1, 1)  # noqa: E731
    yield lambda: ddpm_sample(DIFFUSION, twice, noise, num_steps=num_steps, randn_like=draw(), **options)
    yield lambda: ddim_sample(DIFFUSION, twice, noise, num_steps=num_steps, eta=1.0, randn_like=draw(), **options)
    yield lambda: dpmpp_sample(DIFFUSION, twice, noise, num_steps=num_steps, **options)
    yield lambda: ode_sample(FLOW, predict, noise, num_steps=num_steps, method="euler", **options)
    yield lambda: sde_sample(FLOW, predict, noise, num_steps=num_steps, randn_like=draw(), **(sde or {}), **options)


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
        cfg = {"cfg_scale": 2.0, "null_label": 10, "interval": (0, 500)}
        predict = with_cfg(lambda x, t, y: x[:, :4].repeat(1, 2 if which < 3 else 1, 1, 1), Y, **cfg)
        options = {"num_steps": num_steps, "randn_like": no_noise}
        with Reads() as reads:
            if which == 0:
                ddpm_sample(DIFFUSION, predict, X, **options)
            elif which == 1:
                ddim_sample(DIFFUSION, predict, X, eta=0.5, **options)
            elif which == 2:
                dpmpp_sample(DIFFUSION, predict, X, **options)
            elif which == 3:
                ode_sample(FLOW, predict, X, method="rk4", **options)
            else:
                sde_sample(FLOW, predict, X, **options)
        return reads.count

    for which in range(5):
        assert count(5, which) == count(50, which) <= 10, which


# Bad states and bad input


@pytest.mark.parametrize("method", ADAPTIVE_METHODS)
def test_non_finite_velocity_ends_an_adaptive_method(method):
    def predict(x, time):
        return torch.where((torch.arange(3) == 2).reshape(-1, 1, 1, 1) & (time > 0.3), math.nan, x)

    with pytest.raises(NonFiniteError, match="velocity of batch row 2: not finite") as caught:
        ode_sample(FLOW, predict, X, method=method)
    assert caught.value.rows == [2]


def test_flow_that_explodes():
    """dx/dt = x^2 from 2 is infinite at t = 0.5."""
    noise = torch.full((1, 1, 1, 1), 2.0)
    assert not ode_sample(FLOW, lambda x, t: x**2, noise, num_steps=50, method="euler").isfinite().all()
    with pytest.raises(ValueError, match=r"method: dopri5 shrank its steps to nothing; .* atol 1e-06"):
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
        ode_sample(FLOW, lambda x, t: x, X.float(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"diffusion_form": "increasing"}, "diffusion_form: increasing; choose from constant"),
        ({"last_step": "mean"}, "last_step: mean; choose from Mean, Tweedie, Euler, none"),
        ({"last_step_size": 0.0}, "last_step_size: 0.0"),
        ({"last_step_size": 1.0}, "last_step_size: 1.0"),
        ({"num_steps": 0}, "num_steps: 0"),
    ],
)
def test_impossible_sde_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sde_sample(FLOW, lambda x, t: x, X, **{"num_steps": 5, "randn_like": no_noise, **options})


@pytest.mark.parametrize("num_steps", [0, 1001])
def test_impossible_step_count_of_a_diffusion_is_refused(num_steps):
    for sample in (ddpm_sample, ddim_sample, dpmpp_sample):
        with pytest.raises(ValueError, match=f"num_steps: {num_steps}; the schedule has 1 to 1000"):
            sample(DIFFUSION, lambda x, t: x, X, num_steps=num_steps, randn_like=no_noise)


@pytest.mark.parametrize("eta", [-0.1, 1.1, math.nan])
def test_impossible_eta_is_refused(eta):
    with pytest.raises(ValueError, match="eta: "):
        ddim_sample(DIFFUSION, lambda x, t: x, X, num_steps=5, eta=eta, randn_like=no_noise)


@pytest.mark.parametrize("method", FIXED_METHODS)
@pytest.mark.parametrize("num_steps", [1, 7, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fixed_steps_are_those_of_torchdiffeq_bit_for_bit(method, num_steps, dtype):
    noise, grid = X.to(dtype), torch.linspace(0, 1, num_steps + 1, dtype=torch.float64)
    times = []

    def predict(x, time):
        times.append(time)
        return torch.tanh(x.flip(1)) + (5 * torch.tensor(time, dtype=x.dtype)).sin() * x

    ours = ode_sample(FLOW, predict, noise, num_steps=num_steps, method=method)
    assert 0 == min(times) <= max(times) <= 1 + 1e-12
    assert len(times) == num_steps * FIXED_METHODS[method]
    expected = odeint(
        lambda t, x: predict(x, float(t)), noise, noise.new_tensor([0.0, 1.0]), method=method,
        options={"grid_constructor": lambda func, y0, t: grid},
    )[-1]  # fmt: skip
    assert torch.equal(ours, expected)


def test_fixed_step_samplers_are_those_with_a_number_of_steps():
    assert fixed_step_samplers("diffusion") == {name: ({"sampler": name}, 1) for name in ("ddpm", "ddim", "dpmpp")}
    flow = fixed_step_samplers("flow")
    assert list(flow) == ["sde", *(f"ode {method}" for method in FIXED_METHODS)]
    assert flow["ode rk4"] == ({"sampler": "ode", "method": "rk4"}, 4)


def test_samplers_say_their_process_and_options():
    functions = [("ddpm", ddpm_sample), ("ddim", ddim_sample), ("dpmpp", dpmpp_sample), ("sde", sde_sample),
                 ("ode", ode_sample)]  # fmt: skip
    assert [(name, sampler.function) for name, sampler in SAMPLERS.items()] == functions
    assert [sampler.process for sampler in SAMPLERS.values()] == [*["diffusion"] * 3, *["flow"] * 2]
    for sampler in SAMPLERS.values():
        assert isinstance(sampler, Sampler)
        keywords = inspect.signature(sampler.function).parameters.keys() - {"diffusion", "flow", "predict", "noise"}
        assert keywords == {"randn_like", *sampler.options}
    for method in FIXED_METHODS:
        assert options_in_use("ode", method) == ("method", "num_steps")
    assert options_in_use("ode", "dopri5") == ("method", "atol", "rtol")
    assert options_in_use("ddim", "dopri5") == ("num_steps", "eta")
