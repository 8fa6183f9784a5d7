"""Parameters, multiply-adds and memory of one network."""

from __future__ import annotations

from dataclasses import asdict

import torch

from vcagen.build import build_model
from vcagen.config.job_options import CostConfig
from vcagen.data.latents import DataSpec
from vcagen.networks.cost import activation_bytes, measure, state_bytes
from vcagen.system.files import write_json


def run(config: CostConfig) -> None:
    """Print the cost of a network.

    Raises:
        ValueError: a network that cannot be built.
    """
    side = config.latent_size
    data = DataSpec(config.channels, side, side, config.num_classes, (), 8 * side, {})
    with torch.device("meta"):
        model = build_model(config.model, config.process, data)
    cost, state = measure(model), state_bytes(model, num_emas=1)
    # Of one image more: the bfloat16 copies of the weights do not count.
    whole, half = (activation_bytes(model, 2, name) - activation_bytes(model, 1, name) for name in ("no", "bf16"))
    print(f"{config.process.name} {config.model.size} {config.model.attention}: {cost} (1e9 multiply-adds)")
    print(
        f"training: {state / 2**30:.2f} GiB of weights, gradients, AdamW and one EMA; an image more keeps "
        f"{whole / 2**20:.0f} MiB for the backward pass, in bf16 {half / 2**20:.0f} MiB"
    )
    if config.json:
        memory = {"state_bytes": state, "activation_bytes": {"float32": whole, "bf16": half}}
        write_json(config.json, {**asdict(cost), **memory})
