"""From configuration to objects: the only place that maps names to classes and reads the config."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator

from vcagen.config import ModelConfig, ObjectiveConfig
from vcagen.diffusion import GaussianDiffusion
from vcagen.dit import DiT, parse_size
from vcagen.flow import LinearInterpolant
from vcagen.latents import DataSpec


def build_accelerator(**options: Any) -> Accelerator:
    """accelerate's Accelerator on the GPU, or on the CPU where there is none, also under torchrun.

    Raises:
        ValueError: the launcher started more processes than accelerate joined.
    """
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), **options)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise ValueError(
            f"WORLD_SIZE: the launcher started {launched} processes, accelerate joined {accelerator.num_processes}; "
            "on CPU launch with torchrun --nproc_per_node"
        )
    return accelerator


def build_model(model: ModelConfig, objective: ObjectiveConfig, data: DataSpec) -> DiT:
    """The network for that data: twice the channels out where the objective learns a variance.

    Raises:
        ValueError: a size, attention or option that does not exist or does not fit the data.
    """
    shape = parse_size(model.size)
    for name in ("hidden_size", "depth", "num_heads", "patch_size"):
        if (value := getattr(model, name)) is not None:
            shape[name] = value
    try:
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


def build_objective(objective: ObjectiveConfig) -> GaussianDiffusion | LinearInterpolant:
    """The process that is learned and sampled."""
    return LinearInterpolant() if objective.name == "flow" else GaussianDiffusion(objective.num_timesteps)
