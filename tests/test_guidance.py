"""Classifier-free guidance: against the public code, and call by call."""

import math

import pytest
import torch
from helpers import close, draw, reference, reference_network, u

from vcagen.processes.diffusion import GaussianDiffusion
from vcagen.processes.flow import LinearInterpolant
from vcagen.processes.guidance import with_cfg
from vcagen.processes.samplers import ddpm_sample, ode_sample, sde_sample

DIT = reference("dit")
DIFFUSION, FLOW = GaussianDiffusion(), LinearInterpolant()


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
TIME = 500
NULL = torch.full((3,), 10)


def test_guidance_on_three_channels_equals_the_public_code():
    case = DIT["dit_forward_cfg_first3"]
    x, t, y = u((1, 4, 8, 8), case["x_k"]), torch.tensor([case["t"]]), torch.tensor([case["y"]])
    predict = with_cfg(reference_network(), y, cfg_scale=case["cfg_scale"], null_label=10, guided_channels=3)
    close(predict(x, int(t)), case["output"])


def test_scale_1_is_the_plain_call_bit_for_bit():
    network = Recorder()
    output = with_cfg(network, Y, cfg_scale=1.0, null_label=10)(X, TIME)
    assert network.batches == [3]
    assert network.seen[0][0] is X
    assert torch.equal(output, Recorder()(X, T, Y))


def test_scale_0_is_one_unconditional_call():
    network = Recorder()
    output = with_cfg(network, Y, cfg_scale=0.0, null_label=10)(X, TIME)
    assert network.batches == [3]
    assert torch.equal(output, Recorder()(X, T, NULL))


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.5, 4.0, -1.0])
@pytest.mark.parametrize("guided", [None, 1, 3, 4])
def test_guidance_is_one_doubled_call_and_leaves_the_variance_conditional(scale, guided):
    network = Recorder()
    output = with_cfg(network, Y, cfg_scale=scale, null_label=10, guided_channels=guided)(X, TIME)
    cond, uncond = Recorder()(X, T, Y), Recorder()(X, T, NULL)
    count = 4 if guided is None else guided
    torch.testing.assert_close(output[:, :count], (uncond + scale * (cond - uncond))[:, :count], rtol=1e-12, atol=1e-12)
    if scale == 0 and count == 4:
        assert network.batches == [3]
    else:
        assert network.batches == [6]
        assert torch.equal(output[:, count:], cond[:, count:])


def test_variance_channels_are_never_guided():
    outputs = [
        with_cfg(Recorder(), Y, cfg_scale=1.5, null_label=10, guided_channels=guided)(X, TIME) for guided in (None, 6)
    ]
    assert torch.equal(*outputs)


def test_interval_bounds_belong_to_it_also_as_float32_times():
    guided = []
    for interval in ((0.1, 0.3), (0.2, 0.6), (0.7, 0.9)):
        network = Recorder(4)
        predict = with_cfg(network, Y, cfg_scale=1.5, null_label=10, interval=interval)
        ode_sample(FLOW, predict, torch.zeros(3, 4, 2, 2), num_steps=10, method="euler")
        guided.append([step for step, batch in enumerate(network.batches) if batch == 6])
    assert guided == [[1, 2, 3], [2, 3, 4, 5, 6], [7, 8, 9]]


def test_interval_is_closed():
    for interval, guides in (((0.0, 1.0), True), ((0.3, 0.3), True), ((0.31, 1.0), False), ((0.0, 0.29), False)):
        network = Recorder(4)
        with_cfg(network, Y, cfg_scale=2.0, null_label=10, interval=interval)(X, 0.3)
        assert network.batches == [6 if guides else 3], interval


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize(("time", "dtype"), [(500, torch.int64), (0.25, torch.float32)])
def test_the_network_gets_the_time_of_each_image(scale, time, dtype):
    network = Recorder()
    with_cfg(network, Y, cfg_scale=scale, null_label=10)(X.float(), time)
    x, t, _ = network.seen[0]
    assert t.dtype == dtype
    assert t.tolist() == [time] * len(x)


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
    assert torch.equal(with_cfg(Recorder(), Y, cfg_scale=1.0, null_label=None)(X, TIME), Recorder()(X, T, Y))
