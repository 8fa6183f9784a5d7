"""Samplers and guidance against the public code, closed forms, and call by call."""

import json
import math
import weakref

import pytest
import torch
from helpers import close, draw, no_noise, reference, reference_network, u
from torch.utils._python_dispatch import TorchDispatchMode

from vcagen.bench import samplers as bench
from vcagen.processes.diffusion import GaussianDiffusion
from vcagen.processes.flow import LinearInterpolant
from vcagen.processes.samplers import (
    ADAPTIVE_METHODS,
    SAMPLERS,
    ddim_sample,
    ddpm_sample,
    ode_sample,
    sde_sample,
    with_cfg,
)
from vcagen.processes.watch import NonFiniteError

DIT, SIT = reference("dit"), reference("sit")
DIFFUSION, FLOW = GaussianDiffusion(), LinearInterpolant()
X, Y = u((3, 4, 8, 8), 1), torch.tensor([3, 1, 2])
STAGES = {"euler": 1, "midpoint": 2, "heun2": 2, "heun3": 3, "rk4": 4}


class StoredNoise:
    """Call j draws 1.7 u(shape, first + j)."""

    def __init__(self, first):
        self.k = first

    def __call__(self, x):
        self.k += 1
        return 1.7 * u(x.shape, self.k)


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
    seen = []

    def predict(x, t):
        seen.append(t)
        return x

    for sample in all_samplers(predict, X.float(), num_steps=5, sde={"last_step_size": 0.2}):
        sample()
    assert {t.shape for t in seen} == {(3,)}
    ddpm, ddim, ode, sde = ([t[0].item() for t in seen[i : i + 5]] for i in range(0, 20, 5))
    assert {t.dtype for t in seen[:10]} == {torch.int64}
    assert {t.dtype for t in seen[10:]} == {torch.float32}
    assert ddpm == [999, 749, 500, 250, 0]
    assert ddim == [800, 600, 400, 200, 0]
    assert ode == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])
    assert sde == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])


def all_samplers(predict, noise, num_steps=6, sde=None, **options):
    """Every sampler, given a predict that returns as many channels as the noise has."""
    twice = lambda x, t: predict(x, t).repeat(1, 2, 1, 1)  # noqa: E731
    yield lambda: ddpm_sample(DIFFUSION, twice, noise, num_steps=num_steps, randn_like=draw(), **options)
    yield lambda: ddim_sample(DIFFUSION, twice, noise, num_steps=num_steps, eta=1.0, randn_like=draw(), **options)
    yield lambda: ode_sample(FLOW, predict, noise, num_steps=num_steps, method="euler", **options)
    yield lambda: sde_sample(FLOW, predict, noise, num_steps=num_steps, randn_like=draw(), **(sde or {}), **options)


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
        cfg = {"cfg_scale": 2.0, "null_label": 10, "interval": (0, 500)}
        predict = with_cfg(lambda x, t, y: x[:, :4].repeat(1, 2 if which < 2 else 1, 1, 1), Y, **cfg)
        options = {"num_steps": num_steps, "randn_like": no_noise}
        with Reads() as reads:
            if which == 0:
                ddpm_sample(DIFFUSION, predict, X, **options)
            elif which == 1:
                ddim_sample(DIFFUSION, predict, X, eta=0.5, **options)
            else:
                sde_sample(FLOW, predict, X, **options)
        return reads.count

    for which in range(3):
        assert count(5, which) == count(50, which) <= 10, which


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
    with pytest.raises(ValueError, match="method: dopri5 shrank its steps to nothing at atol 1e-06"):
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
    for sample in (ddpm_sample, ddim_sample):
        with pytest.raises(ValueError, match=f"num_steps: {num_steps}; the schedule has 1 to 1000"):
            sample(DIFFUSION, lambda x, t: x, X, num_steps=num_steps, randn_like=no_noise)


@pytest.mark.parametrize("eta", [-0.1, 1.1, math.nan])
def test_impossible_eta_is_refused(eta):
    with pytest.raises(ValueError, match="eta: "):
        ddim_sample(DIFFUSION, lambda x, t: x, X, num_steps=5, eta=eta, randn_like=no_noise)


def test_samplers_are_listed_by_name():
    assert list(SAMPLERS.items()) == [
        ("ddpm", ddpm_sample), ("ddim", ddim_sample), ("sde", sde_sample), ("ode", ode_sample)
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
