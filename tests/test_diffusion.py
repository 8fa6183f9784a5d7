"""The diffusion process against the public DiT code, diffusers and closed forms."""

import math

import pytest
import torch
from diffusers import DDPMScheduler
from helpers import close, reference, reference_network, u

from vcagen.processes.diffusion import GaussianDiffusion, _log_probability_of_grey_level

STORED = reference("dit")
SHAPE = (4, 4, 8, 8)


def at(value, *, channels=8):
    """A network whose output is this tensor, or this constant."""
    return lambda x, t, y: value if isinstance(value, torch.Tensor) else x.new_full((len(x), channels, 8, 8), value)


def test_schedule_equals_the_public_code():
    process, case = GaussianDiffusion(), STORED["ddpm_betas"]
    assert process.betas[0].item() == pytest.approx(case["first"], rel=1e-12)
    assert process.betas[-1].item() == pytest.approx(case["last"], rel=1e-12)
    assert process.alphas_cumprod[500].item() == pytest.approx(case["alphas_cumprod_500"], rel=1e-12)
    expected = case["posterior_log_variance_clipped_0_1_999"]
    assert process.posterior_log_variance[[0, 1, 999]].tolist() == pytest.approx(expected, rel=1e-12)


def test_losses_equal_the_public_code():
    case = STORED["ddpm_losses"]
    x_start, noise = u(SHAPE, case["x_start_k"]), case["noise_scale"] * u(SHAPE, case["noise_k"])
    t, y = torch.tensor(case["t"]), torch.tensor(case["y"])
    losses = GaussianDiffusion().losses(reference_network(), x_start, y, t=t, noise=noise)
    for name in ("loss", "mse", "vb"):
        close(losses[name], case[name])


def test_p_mean_variance_equals_the_public_code():
    process, case = GaussianDiffusion().respace(10), STORED["ddpm_p_mean_variance_respaced10"]
    x, index = u(SHAPE, case["x_k"]), torch.tensor(case["respaced_index"])
    output = reference_network()(x, torch.tensor(process.timesteps)[index], torch.tensor(case["y"]))
    together = process.p_mean_variance(output, x, index)
    for name in ("mean", "log_variance", "pred_xstart"):
        close(getattr(together, name), case[name])
    for row, i in enumerate(case["respaced_index"]):  # a number instead of a tensor: what the samplers pass
        for one, all_rows in zip(
            process.p_mean_variance(output[row : row + 1], x[row : row + 1], i), together, strict=True
        ):
            torch.testing.assert_close(one[0], all_rows[row], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", STORED["respaced_timesteps"])
def test_respaced_timesteps_equal_the_public_code(name):
    spacing = "ddim" if name.startswith("ddim") else "ddpm"
    process = GaussianDiffusion().respace(int(name.removeprefix("ddim")), spacing)
    assert process.timesteps == STORED["respaced_timesteps"][name]


@pytest.mark.parametrize("spacing", ["ddpm", "ddim"])
def test_every_step_count_keeps_that_many_times_of_the_same_process(spacing):
    full = GaussianDiffusion()
    strides = {len(range(0, 1000, stride)): stride for stride in range(1000, 0, -1)}  # the smallest stride wins
    for num_steps in range(1, 1001):
        process = full.respace(num_steps, spacing)
        times = process.timesteps
        assert len(times) == process.num_timesteps == num_steps
        assert times[0] == 0
        assert sorted(set(times)) == times
        assert 1000 - 1000 / num_steps - 1 <= times[-1] <= 999
        if spacing == "ddpm" and num_steps > 1:
            assert times[-1] == 999
        if spacing == "ddim" and num_steps in strides:
            assert times == list(range(0, 1000, strides[num_steps]))
        assert torch.equal(process.alphas_cumprod, full.alphas_cumprod[times])
        torch.testing.assert_close((1 - process.betas).cumprod(0), process.alphas_cumprod, rtol=1e-9, atol=0)
        assert process.posterior_log_variance.isfinite().all()


@pytest.mark.parametrize("full", [1, 7, 1000])
def test_log_snr_spacing_is_even_and_never_repeats_a_step(full):
    whole = GaussianDiffusion(full)
    for num_steps in {1, 2, 3, 10, 20, 50, 250, 999, 1000}:
        if num_steps > full:
            continue
        process = whole.respace(num_steps, "log_snr")
        assert len(set(process.timesteps)) == num_steps
        assert sorted(process.timesteps) == process.timesteps
        assert 0 <= process.timesteps[0] <= process.timesteps[-1] == full - 1
        assert torch.equal(process.log_snr, whole.log_snr[process.timesteps])
        if full == 1000 and num_steps <= 20:  # more would fall on the same steps at the clean end
            ends = torch.cat([whole.log_snr[:1], process.log_snr])
            torch.testing.assert_close(ends.diff(), ends.diff().mean().expand(num_steps), rtol=0.3, atol=0)
    assert whole.respace(full, "log_snr").timesteps == list(range(full))


@pytest.mark.parametrize("num_steps", [-1, 0, 1001])
def test_step_count_outside_the_schedule_is_refused(num_steps):
    with pytest.raises(ValueError, match=f"num_steps: {num_steps}; the schedule has 1 to 1000"):
        GaussianDiffusion().respace(num_steps)


def test_unknown_spacing_and_empty_schedule_are_refused():
    with pytest.raises(ValueError, match="spacing: even; choose from ddpm, ddim, log_snr"):
        GaussianDiffusion().respace(10, "even")
    with pytest.raises(ValueError, match="num_timesteps: 0"):
        GaussianDiffusion(0)


@pytest.mark.parametrize(("num_steps", "steps"), [(1000, [0, 1, 2, 500, 999]), (10, range(10))])
def test_steps_equal_diffusers(num_steps, steps):
    scheduler = DDPMScheduler(
        1000, beta_start=1e-4, beta_end=0.02, variance_type="learned_range", clip_sample=False,
        timestep_spacing="leading",
    )  # fmt: skip
    scheduler.alphas_cumprod = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0)  # was float32
    scheduler.set_timesteps(num_steps)
    process = GaussianDiffusion().respace(num_steps, "ddim")
    assert scheduler.timesteps.flip(0).tolist() == process.timesteps
    x, output = u(SHAPE, 1), u((4, 8, 8, 8), 2)
    for i in steps:
        expected = scheduler.step(output, process.timesteps[i], x, generator=torch.Generator().manual_seed(i))
        p = process.p_mean_variance(output, x, i)
        noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        previous = p.mean + (0.5 * p.log_variance).exp() * noise if i else p.mean
        close(p.pred_xstart, expected.pred_original_sample, 1e-9)
        close(previous, expected.prev_sample, 1e-9)


def test_q_sample_has_the_moments_of_the_schedule():
    process = GaussianDiffusion()
    generator = torch.Generator().manual_seed(0)
    for t in (0, 250, 999):
        alpha_bar = process.alphas_cumprod[t].item()
        noise = torch.randn(400, 500, 1, 1, generator=generator, dtype=torch.float64)
        x_t = process.q_sample(torch.full_like(noise, 3.0), torch.full((400,), t), noise)
        assert x_t.mean().item() == pytest.approx(3 * math.sqrt(alpha_bar), abs=0.01)
        assert x_t.var().item() == pytest.approx(1 - alpha_bar, rel=0.02)


def test_posterior_is_that_of_the_joint_gaussian():
    """q(x_{t-1} | x_t, x_0) by conditioning the joint Gaussian of x_{t-1} and x_t."""
    process = GaussianDiffusion()
    for t in (1, 10, 999):
        before, now, beta = process.alphas_cumprod[t - 1], process.alphas_cumprod[t], process.betas[t]
        gain = (1 - beta).sqrt() * (1 - before) / (1 - now)
        mean, log_variance = process.q_posterior(torch.ones(1, 1), torch.full((1, 1), 2.0), torch.tensor([t]))
        expected = before.sqrt() + gain * (2 - now.sqrt())
        assert mean.item() == pytest.approx(expected.item(), rel=1e-5)
        assert log_variance.exp().item() == pytest.approx((beta * (1 - before) / (1 - now)).item(), rel=1e-5)


def test_vb_trains_the_variance_only():
    output = u((4, 8, 8, 8), 5).requires_grad_()
    t = torch.tensor([0, 1, 500, 999])
    losses = GaussianDiffusion().losses(at(output), u(SHAPE, 6), t, t=t, noise=u(SHAPE, 7))
    (vb,) = torch.autograd.grad(losses["vb"].sum(), output, retain_graph=True)
    (mse,) = torch.autograd.grad(losses["mse"].sum(), output)
    assert (vb[:, :4] == 0).all()
    assert (vb[:, 4:] != 0).flatten(1).any(1).all()
    assert (mse[:, 4:] == 0).all()


def test_vb_of_the_true_noise_is_the_divergence_of_the_variances():
    process, noise = GaussianDiffusion(), u(SHAPE, 7)
    t = torch.tensor([1, 10, 500, 999])
    for fraction in (-1.0, 1.0):
        output = torch.cat([noise, torch.full_like(noise, fraction)], dim=1)
        losses = process.losses(at(output), u(SHAPE, 6), t, t=t, noise=noise)
        log_ratio = process.posterior_log_variance[t] - process.betas[t].log() if fraction > 0 else torch.zeros(4)
        expected = 0.5 * (log_ratio.exp() - 1 - log_ratio) / math.log(2)
        torch.testing.assert_close(losses["vb"], expected.double(), rtol=1e-6, atol=1e-10)
        assert losses["mse"].abs().max() == 0


@pytest.mark.parametrize(("mean", "log_variance"), [(0.1, -1.0), (-1.2, -6.0), (0.99, -9.8)])
def test_probabilities_of_the_grey_levels_sum_to_one(mean, log_variance):
    levels = torch.linspace(-1, 1, 256, dtype=torch.float64)
    logs = _log_probability_of_grey_level(levels, torch.full_like(levels, mean), torch.full_like(levels, log_variance))
    assert logs.exp().sum().item() == pytest.approx(1, abs=1e-9)


def test_losses_repeat_from_a_generator_and_leave_the_global_state_alone():
    process, x_start, y = GaussianDiffusion(), u(SHAPE, 1), torch.zeros(4)
    state = torch.get_rng_state()
    first, again, other = (
        process.losses(at(0.1), x_start, y, generator=torch.Generator().manual_seed(seed))["loss"] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())


def test_steps_are_drawn_uniformly_and_the_network_sees_times_of_the_full_schedule():
    process, seen = GaussianDiffusion().respace(10), []

    def model(x, t, y):
        seen.append(t)
        return x.new_zeros(len(x), 2, 1, 1)

    process.losses(model, torch.zeros(20_000, 1, 1, 1), torch.zeros(20_000), generator=torch.Generator().manual_seed(0))
    times, counts = seen[0].unique(return_counts=True)
    assert seen[0].dtype == torch.int64
    assert times.tolist() == process.timesteps
    assert (counts - 2000).abs().max() < 200


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_losses_are_float32_whatever_the_network_returns(dtype):
    """A network in bfloat16 that is right to its precision: the difference is not rounded again."""
    x_start, noise, t = u(SHAPE, 1).to(dtype), u(SHAPE, 2), torch.tensor([0, 1, 500, 999])
    output = u((4, 8, 8, 8), 3).bfloat16()
    exact = GaussianDiffusion().losses(at(output.double()), x_start.double(), t, t=t, noise=noise)
    with torch.autocast("cpu", torch.bfloat16):
        losses = GaussianDiffusion().losses(at(output), x_start, t, t=t, noise=noise)
    for name, value in losses.items():
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(value.double(), exact[name], rtol=2e-4, atol=2e-5)
