"""Whole recognition networks of timm, plain and with Visual-Contrast Attention: images a second."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict

import timm
import torch
from torch import Tensor, nn

import vcagen.recognition  # noqa: F401  # registers its networks with timm
from vcagen.bench._timing import in_turns, open_device, ratio
from vcagen.config.job_options import RecognitionBenchConfig
from vcagen.paper.table import markdown
from vcagen.system.files import write_json


def run(config: RecognitionBenchConfig) -> None:
    """Print a table, one row a network, mode and pass: images a second, plain and with VCA, and their ratio.

    Raises:
        ValueError: a network that timm does not know, or a device that cannot be used.
    """
    for name in config.models:
        for model in (name, f"vca_{name}"):
            if not timm.is_model(model):
                raise ValueError(f"models: timm has no {model}")
    device = open_device(config.device, config.threads)
    rows = [row for name in config.models for mode in config.modes for row in _measure(name, mode, config, device)]
    header = ["network", "mode", "pass", "plain images/s", "VCA images/s", "VCA / plain"]
    cells = [
        [
            *(str(row[key]) for key in ("model", "mode", "pass")),
            *(f"{row[key]:.1f}" for key in ("plain_images_per_second", "vca_images_per_second")),
            f"{row['ratio']:.2f}",
        ]
        for row in rows
    ]
    print(markdown(header, cells))
    print(f"\nBatch {config.batch}, {config.precision}. VCA / plain: median ratio of speeds over turns.")
    if config.json is not None:
        write_json(config.json, {**asdict(config), "threads": torch.get_num_threads(), "rows": rows})


def _measure(name: str, mode: str, config: RecognitionBenchConfig, device: torch.device) -> list[dict[str, object]]:
    torch.compiler.reset()
    dtype = getattr(torch, config.precision)
    networks: dict[str, nn.Module] = {
        kind: timm.create_model(model).to(device, dtype) for kind, model in (("plain", name), ("vca", f"vca_{name}"))
    }
    size = networks["plain"].pretrained_cfg["input_size"]  # type: ignore[index]  # timm's own attribute
    images = torch.randn(config.batch, *size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    if mode == "compiled":
        networks = {kind: torch.compile(network) for kind, network in networks.items()}  # type: ignore[misc]
    rows: list[dict[str, object]] = []
    for title, work in (("forward", _forward), ("forward + backward", _forward_backward)):
        works = {kind: work(network, images) for kind, network in networks.items()}
        times = in_turns(works, seconds=config.seconds, device=device)
        speeds = {f"{kind}_images_per_second": config.batch / statistics.median(times[kind]) for kind in times}
        faster = ratio(times["plain"], times["vca"])
        rows.append({"model": name, "mode": mode, "pass": title, **speeds, "ratio": faster})
    return rows


def _forward(network: nn.Module, images: Tensor) -> Callable[[], object]:
    @torch.inference_mode()
    def work() -> None:
        network.eval()(images)

    return work


def _forward_backward(network: nn.Module, images: Tensor) -> Callable[[], object]:
    def work() -> None:
        network.train()(images).float().sum().backward()

    return work
