"""From configuration to objects: the only place that maps names to classes and reads the config."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import Tensor

from vcagen.config.options import ModelConfig, ProcessConfig, SamplingConfig
from vcagen.data.latents import DataSpec
from vcagen.networks.cost import Cost, measure
from vcagen.networks.dit import DiT, parse_size
from vcagen.processes.diffusion import GaussianDiffusion
from vcagen.processes.flow import LinearInterpolant
from vcagen.processes.samplers import SAMPLERS, RandnLike, draws_noise, sampler_options, with_cfg
from vcagen.processes.watch import Progress


def build_accelerator(*, patient: bool = False, **options: Any) -> Accelerator:
    """accelerate's Accelerator on the GPU, or on the CPU where there is none, also under torchrun.

    Patient processes wait a day for one that measures a reference or encodes the last shard.

    Raises:
        ValueError: the launcher started more processes than accelerate joined.
    """
    keep_freed_memory()
    # Gradients live in DDP's buckets instead of beside them; no buffer of ours changes.
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)
    handlers = [ddp, InitProcessGroupKwargs(timeout=timedelta(days=1))] if patient else [ddp]
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=handlers, **options)
    accelerator.gradient_accumulation_steps = 1  # the trainer accumulates itself, whatever the environment says
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise ValueError(
            f"WORLD_SIZE: the launcher started {launched} processes, accelerate joined {accelerator.num_processes}; "
            "on CPU launch with torchrun --nproc_per_node"
        )
    return accelerator


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, where the C library is glibc.

    glibc gives the end of its heap back to the system after a training step and takes it again, page by page, in the
    next: on CPU a twentieth of a compiled step with VCA, and nothing with a network that happens to end otherwise.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
        mallopt(m_trim_threshold, -1)  # never
        mallopt(m_mmap_threshold, 32 << 20)  # bytes: as far as its own rule goes, which ends with the line above


def build_model(model: ModelConfig, process: ProcessConfig, data: DataSpec) -> DiT:
    """The network for that data: twice the channels out where the process learns a variance.

    Raises:
        ValueError: a size, attention or option that does not exist or does not fit the data.
    """
    try:
        shape = parse_size(model.size)
        for name in ("hidden_size", "depth", "num_heads", "patch_size"):
            if (value := getattr(model, name)) is not None:
                shape[name] = value
        return DiT(
            input_size=(data.height, data.width),
            in_channels=data.channels,
            out_channels=data.channels * (2 if process.name == "diffusion" else 1),
            mlp_ratio=model.mlp_ratio,
            num_classes=data.num_classes,
            class_dropout_prob=model.class_dropout_prob,
            attention=model.attention,
            attention_options=model.attention_options,
            gradient_checkpointing=model.gradient_checkpointing,
            **shape,
        )
    except ValueError as error:
        raise ValueError(f"model.{error}") from error


def build_cost(model: ModelConfig, process: ProcessConfig, data: DataSpec) -> Cost:
    """What such a network costs; no memory is taken."""
    with torch.device("meta"):
        return measure(build_model(model, process, data))


def build_process(process: ProcessConfig) -> GaussianDiffusion | LinearInterpolant:
    """The process that is learned and sampled."""
    return LinearInterpolant() if process.name == "flow" else GaussianDiffusion(process.num_timesteps)


class Sampler(Protocol):
    """Noise (N, C, H, W) and labels (N,) to latents (N, C, H, W), and the number of network calls that took."""

    def __call__(
        self, noise: Tensor, y: Tensor, *, randn_like: RandnLike, progress: Progress | None = None
    ) -> tuple[Tensor, int]: ...


def build_sampler(
    model: Callable[[Tensor, Tensor, Tensor], Tensor],
    process: GaussianDiffusion | LinearInterpolant,
    settings: SamplingConfig,
    *,
    null_label: int | None,
    bf16: bool = False,
) -> Sampler:
    """The sampler of resolved settings: noise and labels to latents and the number of network calls.

    Args:
        settings: from `vcagen.sampling.noise.resolve_sampling`.
        null_label: of the network, which may come wrapped.
        bf16: autocast of the network; the state stays in float32.

    Raises:
        ValueError: settings that the sampler or the guidance refuses; found by a rehearsal with a zero network.
    """
    name, cfg_scale = settings.sampler, settings.cfg_scale
    assert name is not None and cfg_scale is not None, "settings must be resolved"  # noqa: PT018
    options = {option: getattr(settings, option) for option in sampler_options(name)}
    options = {option: value for option, value in options.items() if value is not None}

    def sample(
        noise: Tensor, y: Tensor, *, randn_like: RandnLike, progress: Progress | None = None, network: Any = model
    ) -> tuple[Tensor, int]:
        def autocast(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
                return network(x, t, y).float()

        predict = with_cfg(
            autocast, y, cfg_scale=cfg_scale, null_label=null_label,
            guided_channels=settings.guided_channels, interval=settings.cfg_interval,
        )  # fmt: skip
        random = {"randn_like": randn_like} if draws_noise(name) else {}
        latents = SAMPLERS[name](process, predict, noise, **random, **options, progress=progress)
        return latents, predict.calls

    channels = 2 if isinstance(process, GaussianDiffusion) else 1
    zero = torch.zeros(1, 1, 1, 1)
    sample(
        zero, torch.zeros(1, dtype=torch.long), randn_like=torch.zeros_like,
        network=lambda x, t, y: x.new_zeros(len(x), channels, 1, 1),
    )  # fmt: skip
    return sample
