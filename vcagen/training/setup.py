"""From configuration to a Trainer, and the plan that a dry run prints."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType
from torch import Tensor

from vcagen.build import build_accelerator, build_cost, build_model, build_process, build_sampler
from vcagen.config.options import Config, SamplingConfig, TrainConfig, flat
from vcagen.data.latents import DataSpec, open_dataset
from vcagen.data.vae import LatentVAE
from vcagen.networks import weights as checkpoints
from vcagen.networks.cost import activation_bytes, state_bytes
from vcagen.networks.dit import DiT
from vcagen.processes.diffusion import GaussianDiffusion
from vcagen.processes.flow import LinearInterpolant
from vcagen.sampling.image_store import save_grid
from vcagen.sampling.noise import LabelRule, SeededNoise, resolve_sampling
from vcagen.system.run_folder import latest_checkpoint
from vcagen.training.checkpoint import check_same_run, write_config
from vcagen.training.ema import EMA
from vcagen.training.trainer import Trainer, local_part


def build_trainer(config: Config) -> Trainer:
    """All that a training needs, with the run folder claimed; `fit` starts or goes on.

    Raises:
        ValueError: anything that does not fit: data, sizes, options, an existing run of another configuration; or
            another training in the run folder.
    """
    apply_backend_flags(config.train)
    accelerator = build_accelerator(
        mixed_precision=config.train.precision,
        log_with=config.log.trackers or None,
        project_dir=config.run_dir,
    )
    local_part(config.train.batch_size, accelerator.process_index, accelerator.num_processes)
    check_values(config)
    run = Path(config.run_dir)
    check_same_run(run, config)
    dataset, vae = open_dataset(config.data, config.vae, device=accelerator.device)
    check_same_data(run, dataset.spec)
    network = initial_network(config, dataset.spec)
    process = build_process(config.process)
    # Also where no previews are made: it refuses a bad `sampling` section.
    preview = build_preview(config, network, process, vae, dataset.spec, accelerator.device)
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError("fsdp_version: 1 is not supported; configs/accelerate/fsdp.yaml has version 2")
    if config.log.preview_every and accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError("log.preview_every: previews need the whole network on one device; with FSDP set it to 0")
    if config.log.preview_every and accelerator.is_main_process:
        try:
            vae.verify()  # a VAE that cannot be had is told now, not at the first preview
        except ValueError as error:
            raise ValueError(f"{error}; or train without previews by log.preview_every 0") from error
    trainer = Trainer(
        run=run,
        accelerator=accelerator,
        network=network,
        process=process,
        vae=vae,
        dataset=dataset,
        settings=config.train,
        log=config.log,
        checkpoint=config.checkpoint,
        seed=config.seed,
        metadata={"format": 1, "config": asdict(config), "data": dataset.spec.to_dict()},
        horizontal_flip=config.data.horizontal_flip,
        num_workers=config.data.num_workers,
        preview=preview if config.log.preview_every else None,
    )
    trainer.claim()
    if accelerator.is_main_process:
        write_config(run, config)
    accelerator.wait_for_everyone()
    if config.log.trackers:
        shown = {key: v if isinstance(v, int | float | str) else str(v) for key, v in flat(asdict(config)).items()}
        accelerator.init_trackers("vcagen", config=shown)
    return trainer


def apply_backend_flags(train: TrainConfig) -> None:
    """TF32 and deterministic kernels, as configured."""
    torch.backends.cuda.matmul.allow_tf32 = train.tf32
    torch.backends.cudnn.allow_tf32 = train.tf32
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)


def check_values(config: Config) -> None:
    """Raise ValueError, by name, for values that no training can have."""
    train, log, checkpoint = config.train, config.log, config.checkpoint
    if not config.run_dir.strip():
        raise ValueError(f"run_dir: {config.run_dir!r}; needs a folder")
    at_least = {
        "train.steps": (train.steps, 1),
        "train.batch_size": (train.batch_size, 1),
        "train.micro_batch_size": (train.micro_batch_size, 1),
        "train.weight_decay": (train.weight_decay, 0),
        "train.learning_rate": (train.learning_rate, 0),
        "log.log_every": (log.log_every, 1),
        "log.preview_every": (log.preview_every, 0),
        "log.preview_images": (log.preview_images, 1),
        "checkpoint.save_every": (checkpoint.save_every, 1),
        "checkpoint.keep_last": (checkpoint.keep_last, 1),
        "checkpoint.keep_every": (checkpoint.keep_every, 0),
        "data.num_workers": (config.data.num_workers, 0),
    }
    for name, (value, least) in at_least.items():
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"{name}: {value}; needs at least {least}")
    if train.max_grad_norm is not None and not train.max_grad_norm > 0:
        raise ValueError(f"train.max_grad_norm: {train.max_grad_norm}; needs a number above 0")
    if not 0 <= config.seed < 2**63:
        raise ValueError(f"seed: {config.seed} is not in 0..2^63 - 1")
    if not train.ema_decays or len(set(train.ema_decays)) < len(train.ema_decays):
        raise ValueError(f"train.ema_decays: {train.ema_decays}; needs different decays, at least one")
    for decay in train.ema_decays:
        EMA([], decay)  # refuses what it cannot be
    available = [str(tracker.value) for tracker in get_available_trackers()]
    for tracker in log.trackers:
        if tracker not in available:
            raise ValueError(f"log.trackers: {tracker} is not installed; there are {', '.join(available) or 'none'}")


def check_same_data(run: Path, spec: DataSpec) -> None:
    """Raise ValueError where a run goes on with data of other classes, size or VAE than it was started with."""
    newest = latest_checkpoint(run)
    metadata = checkpoints.read_metadata(newest / "model.safetensors") if newest else None
    if metadata is None:
        return
    if differences := spec.differences(DataSpec.from_dict(metadata["data"])):
        raise ValueError(f"data: not that of {newest}: {'; '.join(differences)}")


def initial_network(config: Config, data: DataSpec) -> DiT:
    """The network with the initial weights of the seed, or with those of `init`.

    Another number of classes in `init` gives a new label table, and says so.

    Raises:
        ValueError: weights that do not fit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = build_model(config.model, config.process, data)
    if config.init is not None and latest_checkpoint(config.run_dir) is None:
        path = Path(config.init)
        weights = checkpoints.read_weights(checkpoints.find_weights(path) if path.is_dir() else path).state_dict
        table = "y_embedder.embedding_table.weight"
        ours = network.state_dict()[table]
        if table in weights and weights[table].shape != ours.shape and weights[table].shape[1:] == ours.shape[1:]:
            if int(os.environ.get("RANK", "0")) == 0:
                print(
                    f"init: {path} has {len(weights[table])} labels, this network {len(ours)}: the label table is new",
                    file=sys.stderr,
                )
            weights[table] = ours
        try:
            checkpoints.load_into(network, weights)
        except ValueError as error:
            raise ValueError(f"init: {path}: {error}") from error
    return network


def build_preview(
    config: Config,
    network: DiT,
    process: GaussianDiffusion | LinearInterpolant,
    vae: LatentVAE,
    data: DataSpec,
    device: torch.device,
) -> Callable[[Callable[[Tensor, Tensor, Tensor], Tensor], int], None]:
    """What writes previews/step_0000000.png of the same seeds and balanced labels each time.

    Raises:
        ValueError: sampling options that are not possible.
    """
    settings = resolve_sampling(SamplingConfig(), config.sampling, config.process.name)
    indices = range(config.log.preview_images)
    labels = LabelRule("balanced", data.num_classes, data.class_names)
    try:
        build_sampler(network, process, settings, null_label=network.null_label)
    except ValueError as error:
        raise ValueError(f"sampling.{error}") from error

    def preview(averaged: Callable[[Tensor, Tensor, Tensor], Tensor], step: int) -> None:
        noise = SeededNoise(config.seed)
        sample = build_sampler(averaged, process, settings, null_label=network.null_label)
        start = noise.noise(indices, (data.channels, data.height, data.width), device)
        latents, _ = sample(start, labels(indices, noise).to(device), randn_like=noise.randn_like(indices))
        save_grid(Path(config.run_dir) / "previews" / f"step_{step:07d}.png", vae.decode(latents).cpu())

    return preview


def describe_training(config: Config) -> str:
    """The plan of a training: cost, memory, batches, steps; everything is built, nothing is written."""
    accelerator = build_accelerator(mixed_precision=config.train.precision)
    part = local_part(config.train.batch_size, accelerator.process_index, accelerator.num_processes)
    check_values(config)
    check_same_run(Path(config.run_dir), config)
    dataset, vae = open_dataset(config.data, config.vae, device=accelerator.device)
    check_same_data(Path(config.run_dir), dataset.spec)
    network = initial_network(config, dataset.spec)
    build_preview(config, network, build_process(config.process), vae, dataset.spec, accelerator.device)
    cost = build_cost(config.model, config.process, dataset.spec)
    local = part.stop - part.start
    micro = min(config.train.micro_batch_size or local, local)
    with torch.device("meta"):
        meta = build_model(config.model, config.process, dataset.spec)
    emas = len(config.train.ema_decays)
    state, activations = state_bytes(network, emas), activation_bytes(meta, micro)
    images = config.train.steps * config.train.batch_size
    lines = {
        "network": f"{config.model.size} {config.model.attention}, {config.process.name}",
        "parameters": f"{cost.params / 1e6:.2f} M",
        "multiply-adds": f"{cost.multiply_adds / 1e9:.3f} G an image",
        "data": f"{len(dataset)} images of {dataset.spec.num_classes} classes, latents "
        f"{dataset.spec.channels} x {dataset.spec.height} x {dataset.spec.width}",
        "processes": f"{accelerator.num_processes} on {accelerator.device.type}",
        "batch": f"{config.train.batch_size} = {accelerator.num_processes} processes x {local}"
        + (f", in parts of {micro}" if micro < local else ""),
        "steps": f"{config.train.steps}, {images / len(dataset):.1f} epochs of "
        f"{len(dataset) / config.train.batch_size:.1f} steps",
        "memory": f"{state / 2**20:.1f} MiB for weights, gradients, AdamW and {emas} EMA "
        f"({state / cost.params:.1f} bytes a parameter); float32 activations: about {activations / 2**20:.1f} MiB",
        "checkpoint": f"{(state - 4 * cost.params) / 2**20:.1f} MiB each",
    }
    return "\n".join(f"{name:<14} {value}" for name, value in lines.items())
