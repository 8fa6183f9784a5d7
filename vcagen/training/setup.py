"""From configuration to a Trainer."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, broadcast_object_list

from vcagen.build import build_process, resolve_kernel, with_kernel
from vcagen.config.options import Config, ModelConfig, TrainConfig
from vcagen.data.image_set import ImageSet
from vcagen.data.latents import DataSpec, MomentsDataset, open_dataset, open_given
from vcagen.evaluation.features import EXTRACTORS
from vcagen.processes.process import Process, check_choice
from vcagen.system.files import prefixing
from vcagen.system.processes import build_accelerator
from vcagen.system.run_folder import latest_checkpoint
from vcagen.training.checkpoint import check_same_data, check_same_run, saved_config
from vcagen.training.initial import initial_network, with_model_of_init
from vcagen.training.plots import plot_losses
from vcagen.training.trainer import Trainer, local_part


def run(config: Config) -> None:
    """Train, or print the plan of a dry run."""
    trainer = build_trainer(with_model_of_init(config))
    main = trainer.accelerator.is_main_process
    if not config.dry_run:
        trainer.fit()
        if main:
            plot_losses(trainer.run_dir)
    elif main:
        print(trainer.plan())
    trainer.accelerator.end_training()


def build_trainer(
    config: Config, *, dataset: ImageSet | MomentsDataset | None = None, process: Process | None = None
) -> Trainer:
    """All that a training needs. Nothing is written before `fit`.

    Args:
        dataset: images, or moments with their labels, in place of those that `config.data` names.
        process: in place of the one that `config.process` names, by which the run is sampled later.

    Raises:
        ValueError: data, sizes or options that do not fit, or an existing run of another configuration.
    """
    check_options(config)
    apply_backend_flags(config.train)
    accelerator = build_accelerator(mixed_precision=config.train.precision)
    local_part(config.train.batch_size, accelerator.process_index, accelerator.num_processes)
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError("fsdp_version: 1 is not supported; configs/accelerate/fsdp.yaml has version 2")
    if config.log.preview_every and accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError("log.preview_every: previews need the whole network on one device; with FSDP set it to 0")
    run_dir = Path(config.run_dir)
    check_same_run(run_dir, config)
    if dataset is None:
        data, vae = open_dataset(config.data, config.vae, device=accelerator.device)
    else:
        data, vae = open_given(dataset, config.vae, device=accelerator.device)
    check_same_data(run_dir, data.spec)
    config = replace(config, model=_resolved_model(config, data.spec, accelerator))
    named = build_process(config.process)
    if process is not None and process.outputs_per_channel != named.outputs_per_channel:
        theirs, ours = process.outputs_per_channel, named.outputs_per_channel
        name = type(process).__name__
        raise ValueError(f"process: {name} has {theirs} outputs a channel, {config.process.name} {ours}")
    trainer = Trainer(
        config,
        accelerator=accelerator,
        network=initial_network(config, data.spec),
        process=process or named,
        vae=vae,
        dataset=data,
    )
    with prefixing("sampling."):
        trainer.averaged_run().sampling()
    if config.log.preview_every and accelerator.is_main_process and not config.dry_run:
        with prefixing("previews need the VAE (log.preview_every 0 makes none): "):
            vae.verify()  # now, not at the first preview
    return trainer


def _resolved_model(config: Config, data: DataSpec, accelerator: Accelerator) -> ModelConfig:
    """The model options with the attention's kernel decided: a run keeps its own, the first process decides for all."""
    model, newest = config.model, latest_checkpoint(config.run_dir)
    if model.attention_options.kernel == "auto" and newest is not None:
        model = with_kernel(model, saved_config(newest).model.attention_options.kernel)
    (model,) = broadcast_object_list([resolve_kernel(model, data, config.train.precision, accelerator.device)])
    return model


def check_options(config: Config) -> None:
    """Raise ValueError for options whose types say nothing wrong and that no training can have."""
    if not config.run_dir.strip():
        raise ValueError(f"run_dir: {config.run_dir!r}; needs a folder")
    if config.run_dir.encode(errors="ignore").decode() != config.run_dir:
        raise ValueError(f"run_dir: {config.run_dir}: not UTF-8, which safetensors needs")
    check_choice("sampling.extractor", config.sampling.extractor, EXTRACTORS)
    decays = config.train.ema_decays
    if not decays or len(set(decays)) < len(decays):
        raise ValueError(f"train.ema_decays: {decays}; needs different decays, at least one")
    available = [str(tracker.value) for tracker in get_available_trackers()]
    for tracker in config.log.trackers:
        if tracker not in available:
            raise ValueError(f"log.trackers: {tracker} is not installed; there are {', '.join(available) or 'none'}")


def apply_backend_flags(train: TrainConfig) -> None:
    """TF32 and deterministic kernels, as configured."""
    torch.backends.cuda.matmul.allow_tf32 = train.tf32
    torch.backends.cudnn.allow_tf32 = train.tf32
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
