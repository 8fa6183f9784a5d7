"""Parameters and multiply-adds of one network."""

from __future__ import annotations

from dataclasses import asdict

import torch

from vcagen.build import build_model
from vcagen.config.job_options import CostConfig
from vcagen.data.latents import DataSpec
from vcagen.networks.cost import measure
from vcagen.system.files import write_json


def run(config: CostConfig) -> None:
    """Print the cost of a network.

    Raises:
        ValueError: a network that cannot be built.
    """
    side = config.latent_size
    data = DataSpec(config.channels, side, side, config.num_classes, (), 8 * side, {})
    with torch.device("meta"):
        cost = measure(build_model(config.model, config.process, data))
    print(f"{config.process.name} {config.model.size} {config.model.attention}: {cost} (1e9 multiply-adds)")
    if config.json:
        write_json(config.json, asdict(cost))
