"""From options to objects: sampling options resolved, registries named, accelerate checked."""

import platform

import pytest
from accelerate.state import AcceleratorState, GradientState
from helpers import python

from vcagen.build import build_model, build_process, rehearse, resolve_sampling, sampler_options
from vcagen.config.options import ModelConfig, ProcessConfig, SamplingConfig, VcaOptions
from vcagen.data.latents import DataSpec
from vcagen.networks.attention import VisualContrastAttention
from vcagen.system.processes import build_accelerator

DATA = DataSpec(4, 8, 8, 10, (), 64, {})


def test_settings_come_from_what_was_given_then_the_run_then_the_recipe():
    recipe = SamplingConfig()
    dit = resolve_sampling(recipe, {}, "diffusion")
    assert (dit.sampler, dit.cfg_scale, dit.num_images, dit.labels) == ("ddpm", 1.0, 50_000, "random")
    assert sampler_options(dit) == {"num_steps": 250}
    sit = resolve_sampling(recipe, {}, "flow")
    assert sit.sampler == "sde"
    assert sampler_options(sit) == {
        "num_steps": 250, "diffusion_form": "sigma", "last_step": "Mean", "last_step_size": 0.04,
    }  # fmt: skip
    run = SamplingConfig(num_steps=50, cfg_scale=2.0, labels="balanced")
    both = resolve_sampling(run, {"cfg_scale": 1.5, "sampler": "ddim"}, "diffusion")
    assert (both.sampler, both.num_steps, both.eta, both.cfg_scale, both.labels) == ("ddim", 50, 0.0, 1.5, "balanced")
    ode = resolve_sampling(run, {"sampler": "ode"}, "flow")
    assert sampler_options(ode) == {"method": "dopri5", "atol": 1e-6, "rtol": 1e-3}
    euler = resolve_sampling(recipe, {"sampler": "ode", "method": "euler"}, "flow")
    assert sampler_options(euler) == {"method": "euler", "num_steps": 250}


@pytest.mark.parametrize(
    ("options", "process", "message"),
    [
        ({"sampler": "sde"}, "diffusion", "sampler: sde is not for a diffusion model; choose ddpm or ddim or dpmpp"),
        ({"sampler": "ddpm"}, "flow", "sampler: ddpm is not for a flow model; choose sde or ode"),
        ({"eta": 0.0}, "diffusion", "eta: ddpm does not use it"),
        ({"sampler": "ode", "num_steps": 250}, "flow", "num_steps: ode dopri5 does not use it"),
        ({"sampler": "ode", "method": "euler", "atol": 1e-5}, "flow", "atol: ode euler does not use it"),
        ({"steps": 3}, "flow", "steps: unknown option"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options, process, message):
    with pytest.raises(ValueError, match=message):
        resolve_sampling(SamplingConfig(), options, process)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"sampler": "ode", "method": "heun"}, "method: heun; choose from euler"),
     ({"diffusion_form": "x"}, "diffusion_form: x"), ({"last_step": "mean"}, "last_step: mean"),
     ({"cfg_scale": 2.0}, "no null label"), ({"cfg_interval": (0.6, 0.4)}, "cfg_interval")],
)  # fmt: skip
def test_a_rehearsal_finds_what_the_sampler_refuses(options, message):
    settings = resolve_sampling(SamplingConfig(), options, "flow")
    with pytest.raises(ValueError, match=message):
        rehearse(settings, build_process(ProcessConfig("flow")), null_label=None)


def test_names_of_registries_are_checked():
    with pytest.raises(ValueError, match=r"process\.name: score; choose from diffusion, flow"):
        build_process(ProcessConfig("score"))
    with pytest.raises(ValueError, match=r"model\.attention: 'vcb' is not one of mhsa, vca"):
        build_model(ModelConfig(attention="vcb"), ProcessConfig(), DATA)
    with pytest.raises(ValueError, match=r"model\.size: 'M/2'"):
        build_model(ModelConfig(size="M/2"), ProcessConfig(), DATA)
    with pytest.raises(ValueError, match=r"model\.attention_options: mhsa has no option stage1"):
        build_model(ModelConfig(attention_options=VcaOptions(stage1="vanilla")), ProcessConfig(), DATA)


def test_attention_options_reach_the_attention():
    options = VcaOptions(contrast_grid=(2, 2), stage2="vanilla")
    small = ModelConfig("S/1", "vca", options, hidden_size=16, depth=1, num_heads=2)
    network = build_model(small, ProcessConfig("flow"), DATA)
    attention = network.blocks[0].attn
    assert isinstance(attention, VisualContrastAttention)
    assert (attention.contrast_grid, attention.stage1, attention.stage2) == ((2, 2), "contrast", "vanilla")
    assert (network.patch_size, network.out_channels) == (1, 4)


def test_the_schedule_has_the_steps_asked_for():
    assert build_process(ProcessConfig(num_timesteps=50)).num_timesteps == 50


def test_gradients_do_not_depend_on_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    try:
        assert build_accelerator().gradient_accumulation_steps == 1
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


CODE = """
import resource, torch
from vcagen.system.processes import build_accelerator

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

build_accelerator()
before = resident()
blocks = [torch.ones(16 << 20, dtype=torch.uint8) for _ in range(10)]
del blocks
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_freed_memory_stays_with_the_process():
    assert int(python("-c", CODE)[0]) > 150 << 20
