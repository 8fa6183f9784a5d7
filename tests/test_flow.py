"""The linear interpolant against the public SiT code and closed forms."""

import pytest
import torch
from helpers import close, reference, reference_network, u

from vcagen.processes.flow import DIFFUSION_FORMS, LinearInterpolant

STORED = reference("sit")
SHAPE = (4, 4, 8, 8)
FLOW = LinearInterpolant()


def times(case):
    return torch.tensor(case["t"], dtype=torch.float64)


def test_losses_equal_the_public_code():
    case, network = STORED["flow_losses"], reference_network()
    x_start, noise = u(SHAPE, case["x1_k"]), case["x0_scale"] * u(SHAPE, case["x0_k"])
    losses = FLOW.losses(
        lambda x, t, y: network(x, t, y)[:, :4], x_start, torch.tensor(case["y"]), t=times(case), noise=noise
    )
    close(losses["loss"], case["loss"])


def test_score_equals_the_public_code():
    case = STORED["score_from_velocity"]
    velocity, x_t = u(SHAPE, case["velocity_k"]), u(SHAPE, case["x_k"])
    score = FLOW.score_from_velocity(velocity, x_t, times(case))
    close(score, case["score"])
    for row, t in enumerate(case["t"]):
        assert torch.equal(FLOW.score_from_velocity(velocity[row], x_t[row], t), score[row])


@pytest.mark.parametrize("form", DIFFUSION_FORMS)
def test_coefficients_equal_the_public_code(form):
    case = STORED["diffusion_coefficient"]
    stored = case["inccreasing-decreasing" if form == "increasing-decreasing" else form]  # the public spelling
    assert FLOW.diffusion_coefficient(times(case), form).tolist() == pytest.approx(stored, rel=1e-6)


def test_unknown_form_is_refused():
    with pytest.raises(ValueError, match="diffusion_form: sine; choose from constant, SBDM, sigma"):
        FLOW.diffusion_coefficient(torch.zeros(1), "sine")


def test_path_goes_from_noise_to_data_at_the_velocity():
    x_start, noise = u(SHAPE, 1), u(SHAPE, 2)
    start, velocity = FLOW.interpolate(x_start, noise, torch.zeros(4, dtype=torch.float64))
    end, _ = FLOW.interpolate(x_start, noise, 1.0)
    middle, _ = FLOW.interpolate(x_start, noise, torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))
    assert torch.equal(start, noise)
    assert torch.equal(end, x_start)
    torch.testing.assert_close(middle[2], noise[2] + 0.3 * velocity[2])


def test_score_of_gaussian_data_is_exact():
    """Data N(0.7, 2^2): x_t is N(0.7 t, 4 t^2 + (1 - t)^2), and its score is known."""
    x, t = u(SHAPE, 1), torch.tensor([0.0, 0.2, 0.5, 0.99], dtype=torch.float64).reshape(4, 1, 1, 1)
    variance = 4 * t**2 + (1 - t) ** 2
    velocity = 0.7 + (4 * t - (1 - t)) / variance * (x - 0.7 * t)
    torch.testing.assert_close(FLOW.score_from_velocity(velocity, x, t.flatten()), -(x - 0.7 * t) / variance)


def test_losses_repeat_from_a_generator_and_draw_times_uniformly():
    seen = []

    def model(x, t, y):
        seen.append(t)
        return torch.zeros_like(x)

    x_start, y, state = torch.zeros(20_000, 1, 1, 1), torch.zeros(20_000), torch.get_rng_state()
    first, again, other = (
        FLOW.losses(model, x_start, y, generator=torch.Generator().manual_seed(seed))["loss"] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())
    assert first.mean().item() == pytest.approx(1, abs=0.05)  # the velocity is the noise alone
    counts = torch.histc(seen[0], 10, 0, 1)
    assert counts.sum() == 20_000
    assert (counts - 2000).abs().max() < 200


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_losses_are_float32_whatever_the_network_returns(dtype):
    x_start, noise, t = u(SHAPE, 1).to(dtype), u(SHAPE, 2), torch.tensor([0.0, 0.1, 0.5, 0.9], dtype=torch.float64)
    output = u(SHAPE, 3).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        loss = FLOW.losses(lambda x, t, y: output, x_start, t, t=t, noise=noise)["loss"]
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = (output.double() - (x_start.double() - noise)).square().flatten(1).mean(1)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
