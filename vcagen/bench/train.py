"""What a training step costs: beside the bare network, with each attention, and beside another project's network."""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from vcagen.bench._timing import in_turns, open_device, ratio
from vcagen.bench.vae import write_latents
from vcagen.build import build_model, build_process, resolve_kernel
from vcagen.config.command_line import make_named
from vcagen.config.job_options import TrainBenchConfig
from vcagen.config.options import Config, DataConfig, ModelConfig, ProcessConfig, TrainConfig
from vcagen.data.latents import DataSpec, LatentDataset
from vcagen.data.vae import LatentVAE
from vcagen.networks.cost import measure
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
    groups = [
        [Variant(size, attention, precision, mode) for attention in config.attentions]
        for size in config.sizes
        for precision in config.precisions
        for mode in config.modes
    ]
    rows: list[dict[str, Any]] = []
    peer: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        write_latents(Path(folder), ITEMS)
        dataset = LatentDataset(folder)
        data = replace(dataset.spec, num_classes=CLASSES)
        for group in groups:
            times = _measure(group, config, dataset, data, device, config.seconds / len(groups))
            rows += [_row(variant, times, config, data) for variant in group]
            peer += times.get(PEER, [])
            turns = min(map(len, times.values()), default=0)
            _make_room(device)
    if config.peer is not None:
        rows.append({"name": f"{config.peer} alone, float32, eager", **_speed(peer, config.batch)})
    print(_table(rows))
    print("\nover bare: beside forward, backward and optimizer of the network alone. Ratios: medians over the turns.")
    if config.json is not None:
        settings = {**asdict(config), "device": str(device), "threads": torch.get_num_threads()}
        write_json(config.json, {**settings, "turns": turns, "rows": rows})


def _measure(
    group: Sequence[Variant],
    config: TrainBenchConfig,
    dataset: LatentDataset,
    data: DataSpec,
    device: torch.device,
    seconds: float,
) -> dict[str, list[float]]:
    """Seconds of the steps of networks that are compared, in turns: whole, bare, and the peer's.

    Ratios are taken within a group only, so that one group at a time is on the device.
    """
    works: dict[str, Callable[[], object]] = {}
    for variant in group:
        trainer = _trainer(variant, config, dataset, data)
        works[variant.name] = _step(trainer)
        works[_bare_name(variant)] = _bare_step(trainer.model, trainer.optimizer, config.batch, device)
    if config.peer is not None:
        works[PEER] = _peer_step(config.peer, config.batch, device)
    return in_turns(works, seconds=seconds, device=device)


def _make_room(device: torch.device) -> None:
    """Free what the last group had on the device."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _trainer(variant: Variant, config: TrainBenchConfig, dataset: LatentDataset, data: DataSpec) -> Trainer:
    """The trainer of train.py; its accelerator leaves room for the next one."""
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    precision: Literal["no", "bf16"] = "bf16" if variant.precision == "bf16" else "no"
    train = TrainConfig(
        steps=1_000_000, batch_size=config.batch, precision=precision, compile=variant.mode == "compiled"
    )  # fmt: skip
    accelerator = build_accelerator(mixed_precision=precision)
    options = _network(variant, config)
    model = resolve_kernel(options.model, data, precision, accelerator.device)
    options = replace(options, model=model, data=DataConfig(num_workers=0), train=train)
    return Trainer(
        options,
        accelerator=accelerator,
        network=build_model(options.model, options.process, data),
        process=build_process(options.process),
        vae=LatentVAE.from_description(dataset.spec.vae, device=accelerator.device),
        dataset=dataset,
    )


def _network(variant: Variant, config: TrainBenchConfig) -> Config:
    model = ModelConfig(size=variant.size, attention=variant.attention)
    return Config("", model=model, process=ProcessConfig(config.process))


def _flops(variant: Variant, config: TrainBenchConfig, data: DataSpec) -> int:
    """Of the products of a step: a multiply and an add, forward and twice that backward."""
    options = _network(variant, config)
    with torch.device("meta"):
        network = build_model(options.model, options.process, data)
    return 3 * 2 * measure(network).multiply_adds * config.batch


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


def _row(variant: Variant, times: dict[str, list[float]], config: TrainBenchConfig, data: DataSpec) -> dict[str, Any]:
    """Speed of a network's step, what it costs beside the bare network, and its ratios to MHSA and to the peer."""
    own, bare = times[variant.name], times[_bare_name(variant)]
    plain = times.get(replace(variant, attention="mhsa").name)
    rate = _flops(variant, config, data) / statistics.median(own) / 1e12
    return {
        "name": variant.name,
        **asdict(variant),
        **_speed(own, config.batch),
        "over_bare_percent": 100 * (ratio(own, bare) - 1),
        "time_over_mhsa": None if plain is None or variant.attention == "mhsa" else ratio(own, plain),
        "bare_faster_than_peer": ratio(times[PEER], bare) if PEER in times else None,
        "faster_than_peer": ratio(times[PEER], own) if PEER in times else None,
        "tflops": rate,
        "model_flop_use_percent": None if config.peak_tflops is None else 100 * rate / config.peak_tflops,
    }


def _table(rows: list[dict[str, Any]]) -> str:
    columns = {
        "images_per_second": ("images/s", ".2f"), "step_ms": ("step ms", ".1f"),
        "over_bare_percent": ("over bare %", "+.2f"), "time_over_mhsa": ("time / mhsa", ".3f"),
        "faster_than_peer": ("x peer", ".2f"), "bare_faster_than_peer": ("bare x peer", ".2f"),
        "tflops": ("TFLOP/s", ".3g"), "model_flop_use_percent": ("of peak %", ".1f"),
    }  # fmt: skip
    cells = [
        [row["name"], *("" if row.get(key) is None else format(row[key], form) for key, (_, form) in columns.items())]
        for row in rows
    ]
    return markdown(["network", *(name for name, _ in columns.values())], cells)
