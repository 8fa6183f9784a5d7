"""From configuration to objects: the only place that maps names to classes and reads the config."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import Tensor

from vcagen.config import command_line as cli
from vcagen.config.options import Config, ModelConfig, ObjectiveConfig, SamplingConfig
from vcagen.data.latents import DataSpec, codec_options
from vcagen.data.vae import DEFAULT_VAE, LatentCodec
from vcagen.networks import weights as checkpoints
from vcagen.networks.cost import Cost, measure
from vcagen.networks.dit import DIT_SIZES, DiT, parse_size
from vcagen.processes.diffusion import GaussianDiffusion
from vcagen.processes.flow import LinearInterpolant
from vcagen.processes.samplers import SAMPLERS, RandnLike, draws_noise, sampler_options, with_cfg
from vcagen.processes.watch import Progress
from vcagen.sampling.noise import Sampler
from vcagen.system.files import sha256


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


def build_model(model: ModelConfig, objective: ObjectiveConfig, data: DataSpec) -> DiT:
    """The network for that data: twice the channels out where the objective learns a variance.

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
            out_channels=data.channels * (2 if objective.name == "diffusion" else 1),
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


def build_cost(model: ModelConfig, objective: ObjectiveConfig, data: DataSpec) -> Cost:
    """What such a network costs; no memory is taken."""
    with torch.device("meta"):
        return measure(build_model(model, objective, data))


def build_objective(objective: ObjectiveConfig) -> GaussianDiffusion | LinearInterpolant:
    """The process that is learned and sampled."""
    return LinearInterpolant() if objective.name == "flow" else GaussianDiffusion(objective.num_timesteps)


@dataclass(frozen=True)
class Run:
    """A trained network with all that sampling needs."""

    model: DiT
    """In eval mode, on the device."""
    objective: GaussianDiffusion | LinearInterpolant
    codec: LatentCodec
    config: Config
    """Of the training run; of a public file what its shapes tell, the rest at its defaults."""
    data: DataSpec
    """Without class names where they are not known."""
    step: int | None
    ema_decay: float | None
    weights_sha256: str

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the latents."""
        return self.data.channels, self.data.height, self.data.width

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the images."""
        scale = self.codec.downsample
        channels = self.codec.channels if self.codec.is_identity else 3
        return channels, self.data.height * scale, self.data.width * scale


def load_run(
    path: str | Path,
    *,
    weights: str | None = None,
    step: int | None = None,
    objective: str | None = None,
    vae: str | None = None,
    device: torch.device | str = "cpu",
) -> Run:
    """Load a run folder of train.py, a weights file of ours, or a public DiT or SiT file.

    Args:
        weights: ema (the default), ema_DECAY or raw.
        step: checkpoint of a run. Default: the newest.
        objective: diffusion (DiT) or flow (SiT) of a public file, where neither its name nor its arguments tell.
        vae: where the VAE is now, if not where the weights say; of a public file which one.

    Raises:
        ValueError: nothing to load there, damaged metadata, weights that do not fit, or a VAE that does not.
    """
    path = Path(path)
    if path.is_dir():
        path = checkpoints.find_weights(path, weights=weights or "ema", step=step)
    elif step is not None:
        raise ValueError(f"step: {path} is one file; steps are of run folders")
    read = checkpoints.read_weights(path, which="raw" if weights == "raw" else "ema")
    if read.metadata is not None:
        if weights not in (None, "ema", read.name):
            raise ValueError(f"weights: {path} holds {read.name}, not {weights}")
        with _damage_named(path):
            config = cli.from_mapping(Config, read.metadata["config"])
            data = DataSpec.from_dict(read.metadata["data"])
            codec = LatentCodec.from_description(data.codec, vae=vae, **codec_options(config.codec, device))
            if codec.channels != data.channels:
                raise ValueError(f"damaged metadata ({codec.channels} and {data.channels} latent channels)")
    else:
        with _damage_named(path):
            found = checkpoints.architecture(read.state_dict)
        config = public_config(path, found, read.args or {}, objective)
        codec = LatentCodec(vae or DEFAULT_VAE, channels=int(found["in_channels"]), device=device)
        side = int(found["grid"] * found["patch_size"])
        num_classes = int(found["num_labels"]) - 1
        description = codec.description()
        data = DataSpec(
            channels=codec.channels, height=side, width=side, num_classes=num_classes, class_names=(),
            image_size=side * codec.downsample, codec=description,
        )  # fmt: skip
    if codec.is_identity and (codec.channels not in (1, 3) or codec.downsample != 1):
        raise ValueError(f"vae: identity; {path} has {codec.channels} latent channels, images have 1 or 3")
    if not codec.is_identity and data.codec["sha256"] is None:
        raise ValueError(f"vae: {vae}; {path} was trained on the pixels, without a VAE")
    with _damage_named(path):
        model = build_model(config.model, config.objective, data)
        checkpoints.load_into(model, read.state_dict)
    metadata = read.metadata or {"step": None, "ema_decay": None}
    return Run(
        model=model.to(device).eval().requires_grad_(False),
        objective=build_objective(config.objective),
        codec=codec,
        config=config,
        data=data,
        step=metadata["step"],
        ema_decay=metadata["ema_decay"],
        weights_sha256=sha256(path),
    )


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turn whatever odd metadata or weights lead to into a ValueError that names the file."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, MemoryError) as error:
        raise ValueError(f"{path}: damaged metadata ({type(error).__name__}: {error})") from error


def public_config(path: Path, found: dict[str, int | float], args: dict[str, Any], objective: str | None) -> Config:
    """The configuration of a public file: named size by the width, process by the argument, else by what is stored.

    Both kinds have twice the output channels, so the shapes do not tell DiT from SiT: training arguments of SiT, or one
    of the two in the file's name, do.

    Raises:
        ValueError: a width of no named size, or a process that cannot be told.
    """
    names = {sizes["hidden_size"]: name for name, sizes in DIT_SIZES.items()}
    if found["hidden_size"] not in names:
        raise ValueError(f"{path}: width {found['hidden_size']}, of no named size; the number of heads is not known")
    if "grid" not in found:
        raise ValueError(f"{path}: pos_embed missing; a public DiT or SiT file has it")
    told = {name for word, name in (("dit", "diffusion"), ("sit", "flow")) if word in path.name.lower()}
    if found["out_channels"] == found["in_channels"] or "path_type" in args:
        told = {"flow"}
    if objective is None and len(told) != 1:
        raise ValueError(
            f"objective: {path} does not tell whether it is DiT or SiT; give --objective diffusion or flow"
        )
    process = ObjectiveConfig(name="flow" if (objective or told.pop()) == "flow" else "diffusion")
    size = f"{names[int(found['hidden_size'])]}/{found['patch_size']}"
    return Config(
        run="",
        model=ModelConfig(size=size, depth=int(found["depth"]), mlp_ratio=found["mlp_ratio"]),
        objective=process,
    )


def build_sampler(
    model: Callable[[Tensor, Tensor, Tensor], Tensor],
    objective: GaussianDiffusion | LinearInterpolant,
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
        latents = SAMPLERS[name](objective, predict, noise, **random, **options, progress=progress)
        return latents, predict.calls

    channels = 2 if isinstance(objective, GaussianDiffusion) else 1
    zero = torch.zeros(1, 1, 1, 1)
    sample(
        zero, torch.zeros(1, dtype=torch.long), randn_like=torch.zeros_like,
        network=lambda x, t, y: x.new_zeros(len(x), channels, 1, 1),
    )  # fmt: skip
    return sample
