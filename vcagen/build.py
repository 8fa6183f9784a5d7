"""From options to networks, processes and samplers: the only place that maps names to classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from vcagen.config.options import SAMPLING_OPTIONS, ModelConfig, ProcessConfig, SamplingConfig, VcaOptions
from vcagen.data.latents import DataSpec
from vcagen.networks.attention import VisualContrastAttention
from vcagen.networks.dit import DiT, parse_size
from vcagen.networks.kernel_times import fused_wins, try_fused
from vcagen.processes import PROCESSES
from vcagen.processes.guidance import with_cfg
from vcagen.processes.process import Process, check_choice
from vcagen.processes.samplers import SAMPLERS, options_in_use
from vcagen.system.files import prefixing


def build_model(model: ModelConfig, process: ProcessConfig, data: DataSpec) -> DiT:
    """The network for that data, with the output channels that the process asks for.

    Raises:
        ValueError: a size, process, attention or option that does not exist or does not fit the data.
    """
    arguments = network_arguments(model, process, data)
    with prefixing("model."):
        return DiT(**arguments)


def network_arguments(model: ModelConfig, process: ProcessConfig, data: DataSpec) -> dict[str, Any]:
    """The keyword arguments of DiT that these options are.

    Raises:
        ValueError: a size or process that does not exist.
    """
    check_choice("process.name", process.name, PROCESSES)
    changed = {name: value for name, value in asdict(model.attention_options).items()
               if value != getattr(VcaOptions(), name)}  # fmt: skip
    if changed.get("kernel") == "maps":  # the networks' own default
        del changed["kernel"]
    with prefixing("model."):
        shape = parse_size(model.size)
    for name in ("hidden_size", "depth", "num_heads"):
        if (value := getattr(model, name)) is not None:
            shape[name] = value
    return {
        "input_size": (data.height, data.width),
        "in_channels": data.channels,
        "out_channels": data.channels * PROCESSES[process.name].outputs_per_channel,
        "mlp_ratio": model.mlp_ratio,
        "num_classes": data.num_classes,
        "class_dropout_prob": model.class_dropout_prob,
        "attention": model.attention,
        "attention_options": changed,
        "gradient_checkpointing": model.gradient_checkpointing,
        **shape,
    }


def resolve_kernel(model: ModelConfig, data: DataSpec, precision: str, device: torch.device) -> ModelConfig:
    """The model options with `kernel: auto` decided: fused where it was measured to be faster on this GPU, else maps.

    Raises:
        ValueError: fused on a device that does not run it.
    """
    kernel = model.attention_options.kernel
    if kernel == "fused" and device.type != "cuda":
        raise ValueError(f"model.attention_options.kernel: fused runs on CUDA devices, not on {device.type}; take maps")
    if kernel == "maps":
        return model
    with torch.device("meta"):
        attention = build_model(model, ProcessConfig(), data).blocks[0].attn
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    if kernel == "fused":
        assert isinstance(attention, VisualContrastAttention), "no other attention has this option"
        with prefixing("model.attention_options."):
            try_fused(attention, dtype, device)
        return model
    wins = isinstance(attention, VisualContrastAttention) and fused_wins(attention, dtype, device)
    return with_kernel(model, "fused" if wins else "maps")


def with_kernel(model: ModelConfig, kernel: Literal["auto", "maps", "fused"]) -> ModelConfig:
    """The model options with that kernel; maps run on any device."""
    return replace(model, attention_options=replace(model.attention_options, kernel=kernel))


def build_process(process: ProcessConfig) -> Process:
    """The process that is learned and sampled.

    Raises:
        ValueError: unknown process.
    """
    check_choice("process.name", process.name, PROCESSES)
    constructor: Callable[..., Process] = PROCESSES[process.name]
    takes_steps = "num_timesteps" in inspect.signature(constructor).parameters
    return constructor(num_timesteps=process.num_timesteps) if takes_steps else constructor()


def resolve_sampling(recipe: SamplingConfig, given: dict[str, Any], process: str) -> SamplingConfig:
    """The recipe of a run with the options that were given, its sampler named.

    Raises:
        ValueError: a sampler of another process, or an option that was given and would do nothing.
    """
    values = {name: getattr(recipe, name) for name in SAMPLING_OPTIONS}
    for option in given.keys() - values.keys():
        raise ValueError(f"{option}: unknown option; those of sampling are {', '.join(SAMPLING_OPTIONS)}")
    values |= given
    choices = [name for name, sampler in SAMPLERS.items() if sampler.process == process]
    name = values["sampler"] or next(iter(choices), None)
    if name not in choices:
        raise ValueError(f"sampler: {name} is not for a {process} model; choose {' or '.join(choices) or 'another'}")
    used = options_in_use(name, values["method"])
    idle = {option for sampler in SAMPLERS.values() for option in sampler.options} - set(used)
    for option in sorted(idle & given.keys()):
        which = f"{name} {values['method']}" if "method" in used else name
        raise ValueError(f"{option}: {which} does not use it; it uses {', '.join(used)}")
    return SamplingConfig(**{**values, "sampler": name})


def build_sampler(settings: SamplingConfig) -> Callable[..., Tensor]:
    """sampler(process, predict, noise, randn_like=...) of resolved settings, with its options."""
    assert settings.sampler is not None, "resolve_sampling names the sampler"
    return partial(SAMPLERS[settings.sampler].function, **sampler_options(settings))


def sampler_options(settings: SamplingConfig) -> dict[str, Any]:
    """The options that the sampler of resolved settings uses."""
    assert settings.sampler is not None, "resolve_sampling names the sampler"
    return {name: getattr(settings, name) for name in options_in_use(settings.sampler, settings.method)}


def rehearse(settings: SamplingConfig, process: Process, *, null_label: int | None) -> None:
    """Run the sampler of resolved settings with a network that returns zeros.

    Raises:
        ValueError: settings that the sampler or the guidance refuses.
    """

    def zero(x_t: Tensor, t: Tensor, y: Tensor) -> Tensor:
        return x_t.new_zeros(len(x_t), process.outputs_per_channel, 1, 1)

    predict = with_cfg(
        zero, torch.zeros(1, dtype=torch.long), cfg_scale=settings.cfg_scale, null_label=null_label,
        guided_channels=settings.guided_channels, interval=settings.cfg_interval,
    )  # fmt: skip
    build_sampler(settings)(process, predict, torch.zeros(1, 1, 1, 1), randn_like=torch.zeros_like)
