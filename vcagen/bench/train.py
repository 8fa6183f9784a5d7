"""What a training step costs: beside the bare network, with each attention, and beside another project's network."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from vcagen.bench._timing import in_turns, open_device, ratio
from vcagen.bench.vae import write_latents
from vcagen.build import build_model, build_process
from vcagen.config.command_line import make_named
from vcagen.config.job_options import TrainBenchConfig
from vcagen.config.options import Config, DataConfig, ModelConfig, ProcessConfig, TrainConfig
from vcagen.data.latents import LatentDataset
from vcagen.data.vae import LatentVAE
from vcagen.paper.table import markdown
from vcagen.system.files import write_json
from vcagen.system.processes import build_accelerator
from vcagen.training.trainer import Trainer

ITEMS = 1024
CLASSES = 1000
PEER = "peer"


@dataclass(frozen=True)
class Variant:
    """One network in training."""

    size: str
    attention: str
    precision: str
    mode: str

    @property
    def name(self) -> str:
        """As a row is named."""
        return f"{self.size} {self.attention}, {self.precision}, {self.mode}"


def run(config: TrainBenchConfig) -> None:
    """Print a table, one row a network."""
    device = open_device("cuda" if torch.cuda.is_available() else "cpu", config.threads)
    variants = [
        Variant(size, attention, precision, mode)
        for size in config.sizes
        for precision in config.precisions
        for mode in config.modes
        for attention in config.attentions
    ]
    works: dict[str, Callable[[], object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_latents(Path(folder), ITEMS)
        dataset = LatentDataset(folder)
        for variant in variants:
            trainer = _trainer(variant, config, dataset, Path(folder))
            works[variant.name] = _step(trainer)
            works[_bare_name(variant)] = _bare_step(trainer.model, trainer.optimizer, config.batch, device)
        if config.peer is not None:
            works[PEER] = _peer_step(config.peer, config.batch, device)
        times = in_turns(works, seconds=config.seconds, device=device)
    rows = [_row(variant, times, config.batch) for variant in variants]
    if config.peer is not None:
        rows.append({"name": f"{config.peer} alone, float32, eager", **_speed(times[PEER], config.batch)})
    print(_table(rows))
    print("\nover bare: beside forward, backward and optimizer of the network alone. Ratios: medians over the turns.")
    if config.json is not None:
        settings = {**asdict(config), "device": str(device), "threads": torch.get_num_threads()}
        write_json(config.json, {**settings, "turns": len(next(iter(times.values()))), "rows": rows})


def _trainer(variant: Variant, config: TrainBenchConfig, dataset: LatentDataset, folder: Path) -> Trainer:
    """The trainer of train.py; its accelerator leaves room for the next one."""
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    precision: Literal["no", "bf16"] = "bf16" if variant.precision == "bf16" else "no"
    train = TrainConfig(
        steps=1_000_000, batch_size=config.batch, precision=precision, compile=variant.mode == "compiled"
    )  # fmt: skip
    model = ModelConfig(size=variant.size, attention=variant.attention)
    options = Config(
        str(folder), model=model, process=ProcessConfig(config.process), data=DataConfig(num_workers=0), train=train
    )  # fmt: skip
    accelerator = build_accelerator(mixed_precision=precision)
    return Trainer(
        options,
        accelerator=accelerator,
        network=build_model(model, options.process, replace(dataset.spec, num_classes=CLASSES)),
        process=build_process(options.process),
        vae=LatentVAE.from_description(dataset.spec.vae, device=accelerator.device),
        dataset=dataset,
    )


def _step(trainer: Trainer) -> Callable[[], None]:
    """A whole step of the training loop between two log lines, reading included."""
    batches = trainer.batches()
    return lambda: trainer.train_step(*next(batches))


def _bare_step(model: nn.Module, optimizer: Any, batch: int, device: torch.device) -> Callable[[], None]:
    """Forward, backward and optimizer on the same random batch."""
    x = torch.randn(batch, 4, 32, 32, device=device)
    t = torch.full((batch,), 500, device=device)
    y = torch.arange(batch, device=device) % CLASSES

    def step() -> None:
        model(x, t, y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _peer_step(path: str, batch: int, device: torch.device) -> Callable[[], None]:
    """The same of another project's network, with the optimizer of the public training code.

    Raises:
        ValueError: no such module or callable, or one that makes no network.
    """
    network = make_named("peer", path)
    if not isinstance(network, nn.Module):
        raise ValueError(f"peer: {path} makes {type(network).__name__}, not a torch module")
    network.to(device).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, weight_decay=0.0)
    return _bare_step(network, optimizer, batch, device)


def _bare_name(variant: Variant) -> str:
    return f"{variant.name}, bare"


def _speed(times: list[float], batch: int) -> dict[str, float]:
    seconds = statistics.median(times)
    return {"images_per_second": batch / seconds, "step_ms": 1e3 * seconds}


def _row(variant: Variant, times: dict[str, list[float]], batch: int) -> dict[str, Any]:
    """Speed of a network's step, what it costs beside the bare network, and its ratios to MHSA and to the peer."""
    own, bare = times[variant.name], times[_bare_name(variant)]
    plain = times.get(replace(variant, attention="mhsa").name)
    return {
        "name": variant.name,
        **asdict(variant),
        **_speed(own, batch),
        "over_bare_percent": 100 * (ratio(own, bare) - 1),
        "time_over_mhsa": None if plain is None or variant.attention == "mhsa" else ratio(own, plain),
        "bare_faster_than_peer": ratio(times[PEER], bare) if PEER in times else None,
        "faster_than_peer": ratio(times[PEER], own) if PEER in times else None,
    }


def _table(rows: list[dict[str, Any]]) -> str:
    header = ["network", "images/s", "step ms", "over bare %", "time / mhsa", "x peer", "bare x peer"]
    keys = {
        "images_per_second": ".2f", "step_ms": ".1f", "over_bare_percent": "+.2f", "time_over_mhsa": ".3f",
        "faster_than_peer": ".2f", "bare_faster_than_peer": ".2f",
    }  # fmt: skip
    cells = [
        [row["name"], *("" if row.get(key) is None else format(row[key], form) for key, form in keys.items())]
        for row in rows
    ]
    return markdown(header, cells)
