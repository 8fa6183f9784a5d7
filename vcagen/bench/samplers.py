"""What a sampler costs beside its network: its own time a network call, against a DiT-S/2 forward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vcagen.bench._networks import dit_s2
from vcagen.bench._timing import fastest, open_device
from vcagen.config import command_line as cli
from vcagen.processes.diffusion import GaussianDiffusion
from vcagen.processes.flow import DIFFUSION_FORMS, LinearInterpolant
from vcagen.processes.samplers import ddim_sample, ddpm_sample, ode_sample, sde_sample, with_cfg
from vcagen.system.files import write_json


@dataclass(frozen=True)
class SamplersBenchConfig:
    """Time a network call of each sampler with a network that returns its input, beside a DiT-S/2 forward."""

    batch: int = 8
    """Latents (4, 32, 32) a network call."""
    num_steps: int = 50
    """Steps of each sampler."""
    repeats: int = 5
    """Measurements of each; the fastest counts."""
    device: str = "cpu"
    """Device to measure on."""
    json: str | None = None
    """File to write the numbers to as well."""


def main(args: list[str]) -> None:
    """Print a table, one row a sampler: microseconds a network call, and percent of the forward."""
    config = cli.parse(SamplersBenchConfig, args, prog="python -m vcagen bench samplers")
    cli.at_least(config, batch=1, num_steps=1, repeats=1)
    device = open_device(config.device)
    noise = torch.randn(config.batch, 4, 32, 32, device=device)
    labels = torch.zeros(config.batch, dtype=torch.int64, device=device)

    forward = _forward_seconds(noise, labels, config.repeats)
    print(f"DiT-S/2 forward, batch {config.batch}, {noise.device}: {1e3 * forward:.2f} ms\n")
    print(f"{'sampler':<30}{'calls':>6}{'us/call':>10}{'% of forward':>14}")
    rows = []
    for name, sample in _samplers(noise, config.num_steps).items():
        network = _twice if name.startswith("dd") else _same
        counted = with_cfg(network, labels, cfg_scale=1.0, null_label=None)
        sample(counted)
        [seconds] = fastest([partial(sample, counted)], config.repeats, device)
        calls = counted.calls // (config.repeats + 1)
        row = {"sampler": name, "calls": calls, "us_per_call": 1e6 * seconds / calls}
        row["percent_of_forward"] = 100 * seconds / calls / forward
        print(f"{name:<30}{calls:>6}{row['us_per_call']:>10.1f}{row['percent_of_forward']:>14.3f}")
        rows.append(row)
    if config.json is not None:
        setting = {"batch": config.batch, "device": str(noise.device), "num_steps": config.num_steps}
        write_json(config.json, {**setting, "forward_ms": 1e3 * forward, "samplers": rows})


def _samplers(noise: Tensor, num_steps: int) -> dict[str, partial[Tensor]]:
    """Every sampler as a function of predict alone."""
    diffusion, flow = GaussianDiffusion(), LinearInterpolant()
    settings: dict[str, Any] = {"noise": noise, "num_steps": num_steps}
    jobs = {
        "ddpm": partial(ddpm_sample, diffusion, **settings, randn_like=torch.randn_like),
        "ddim": partial(ddim_sample, diffusion, **settings),
        "ddim eta 1": partial(ddim_sample, diffusion, **settings, eta=1.0, randn_like=torch.randn_like),
        "ode dopri5": partial(ode_sample, flow, noise=noise, method="dopri5"),
    }
    for method in ("euler", "heun2", "rk4"):
        jobs[f"ode {method}"] = partial(ode_sample, flow, **settings, method=method)
    for form in DIFFUSION_FORMS:
        jobs[f"sde {form}"] = partial(sde_sample, flow, **settings, diffusion_form=form, randn_like=torch.randn_like)
    return jobs


def _same(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
    return x


def _twice(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x, x], dim=1)


@torch.no_grad()
def _forward_seconds(noise: Tensor, labels: Tensor, repeats: int) -> float:
    network = dit_s2().to(noise.device).eval()
    t = torch.full_like(labels, 500)
    network(noise, t, labels)
    return fastest([partial(network, noise, t, labels)], repeats, noise.device)[0]
