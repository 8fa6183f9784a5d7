"""What training data costs: reading latents, decoding images, and the encoding that the shards save."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

from vcagen.bench._networks import dit_s2, sd_vae
from vcagen.bench._timing import fastest, seconds_of
from vcagen.config import command_line as cli
from vcagen.data.encode import write_shard
from vcagen.data.images import Pixels, center_crop, read_pixels
from vcagen.data.latents import Item, LatentDataset, keep
from vcagen.processes.diffusion import GaussianDiffusion
from vcagen.system.files import write_json

SHARD_SIZE = 4096
CPU = torch.device("cpu")


@dataclass(frozen=True)
class DataBenchConfig:
    """Time the reading of synthetic latents (8, 32, 32) in float16, the decoding of JPEGs, and a VAE encoding."""

    items: int = 20_000
    """Latents of the synthetic set, 32 KiB each with their mirror images."""
    batch: int = 256
    """Latents a batch."""
    num_workers: int = 2
    """Loader processes of the second reading."""
    seconds: float = 5.0
    """Time of each measurement of reading."""
    jpegs: int = 64
    """Photograph-sized files that are decoded and cropped to 256 pixels."""
    encodings: int = 1
    """Images the VAE of Stable Diffusion (random weights) encodes, beside a DiT-S/2 step on as many; 0: leave out."""
    folder: str | None = None
    """Folder of the temporary files. Default: the system's."""
    json: str | None = None
    """File to write the numbers to as well."""


def main(args: list[str]) -> None:
    """Print one line a measurement."""
    config = cli.parse(DataBenchConfig, args, prog="python -m vcagen bench data")
    cli.at_least(config, items=1, batch=1, jpegs=1, num_workers=0, encodings=0)
    result: dict[str, Any] = {"items": config.items, "batch": config.batch, "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory(dir=config.folder) as folder:
        result |= _reading(config, Path(folder))
        result |= _decoding(config, Path(folder))
    if config.encodings:
        result |= _encoding(config.encodings)
    for name, value in result.items():
        print(f"{name:<36}{value:>14,.2f}" if isinstance(value, float) else f"{name:<36}{value:>14,}")
    if config.json is not None:
        write_json(config.json, result)


def _reading(config: DataBenchConfig, folder: Path) -> dict[str, Any]:
    files = _write_latents(folder, config.items)
    anonymous = _anonymous_bytes()
    dataset = LatentDataset(folder)
    generator = np.random.default_rng(0)
    order = np.concatenate([generator.permutation(config.items) for _ in range(1 + config.batch // config.items)])
    flips = generator.random(len(order)) < 0.5
    items = list(zip(order.tolist(), flips.tolist(), strict=True))
    batches = [items[i : i + config.batch] for i in range(0, len(items) - config.batch + 1, config.batch)]

    def from_files(batch: Sequence[Item]) -> torch.Tensor:
        return torch.from_numpy(np.stack([np.load(files[index]) for index, _ in batch]))

    for batch in batches:  # warm the page cache
        dataset.__getitems__(batch)
        from_files(batch)
    rates = {
        "latents_per_second": _rate(dataset.__getitems__, batches, config.seconds),
        "latents_per_second_npy": _rate(from_files, batches, config.seconds),
    }
    rates["latents_over_npy"] = rates["latents_per_second"] / rates["latents_per_second_npy"]
    grown = _anonymous_bytes() - anonymous
    if config.num_workers:
        loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=itertools.cycle(batches), num_workers=config.num_workers, collate_fn=keep
        )
        stream = iter(loader)
        next(stream)
        rates["latents_per_second_loader"] = _rate(lambda _: next(stream), batches, config.seconds)
    return {**rates, "anonymous_MiB_grown": grown / 2**20, "set_MiB": config.items / 32}


def write_latents(folder: Path, items: int) -> torch.Tensor:
    """A set of shards of random moments, all of one class; returns the moments (n, 2, 8, 32, 32) that come in turn."""
    names = tuple(f"{i:07}.png" for i in range(items))
    pixels = Pixels(names, (0,) * items, ("image",), 3, 256, partial(read_pixels, size=256))
    vae = {"path": "synthetic", "sha256": "", "scaling_factor": 1.0, "shift_factor": 0.0, "channels": 4}
    shards = -(-items // SHARD_SIZE)
    metadata: dict[str, Any] = {
        "format": 1, "vae": {**vae, "downsample": 8}, "image_size": 256, "class_names": ["image"], "count": items,
        "shard_size": SHARD_SIZE, "shards": shards,
    }  # fmt: skip
    moments = torch.randn(min(items, SHARD_SIZE), 2, 8, 32, 32, dtype=torch.float16)
    for index in range(shards):
        rows = range(index * SHARD_SIZE, min(items, (index + 1) * SHARD_SIZE))
        path = folder / f"shard_{index:05}.safetensors"
        write_shard(path, moments[: len(rows)], rows, pixels, {**metadata, "shard": index})
    return moments


def _write_latents(folder: Path, items: int) -> list[Path]:
    """A set of shards, and the same as one .npy an item without mirror images; paths of the .npy files."""
    moments = write_latents(folder, items)
    files = [folder / f"{i:07}.npy" for i in range(items)]
    for i, file in enumerate(files):
        np.save(file, moments[i % SHARD_SIZE, 0].numpy())
    return files


def _anonymous_bytes() -> int:
    """Resident anonymous memory of this process; mapped files do not count. 0 where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def _rate(read: Callable[[Any], object], batches: Sequence[Sequence[Item]], seconds: float) -> float:
    """Items a second."""
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        for batch in batches:
            read(batch)
            count += len(batch)
            if (passed := time.perf_counter() - start) >= seconds:
                return count / passed
    return count / passed


def _decoding(config: DataBenchConfig, folder: Path) -> dict[str, Any]:
    """Images a second of one core, by `read_pixels` and by Pillow's decoder and resize alone."""
    generator = np.random.default_rng(0)
    paths = [folder / f"{i}.jpg" for i in range(config.jpegs)]
    for path in paths:
        noise = Image.fromarray(generator.integers(0, 256, (47, 63, 3), dtype=np.uint8))
        noise.resize((500, 375), Image.Resampling.BICUBIC).save(path, quality=90)

    def ours() -> None:
        for path in paths:
            read_pixels(path, 256)

    def pillow() -> None:
        for path in paths:
            with Image.open(path) as image:
                center_crop(image.convert("RGB"), 256)

    own, yardstick = fastest([ours, pillow], 5, CPU)
    return {"images_per_second_per_core": len(paths) / own, "percent_of_pillow": 100 * yardstick / own}


def _encoding(images: int) -> dict[str, Any]:
    """Seconds of the Stable Diffusion encoder and of a DiT-S/2 training step, for as many images of 256 pixels."""
    vae, model, diffusion = sd_vae(), dit_s2(), GaussianDiffusion()
    x, z, y = torch.rand(images, 3, 256, 256), torch.randn(images, 4, 32, 32), torch.zeros(images, dtype=torch.int64)

    def encode() -> None:
        with torch.no_grad():
            vae.encode(x)

    def step() -> None:
        torch.autograd.backward(diffusion.losses(model, z, y)["loss"].mean())

    times = {}
    for name, work in (("vae_encode_seconds", encode), ("dit_s2_step_seconds", step)):
        work()
        times[name] = seconds_of(work, CPU)
    return {**times, "encode_over_step": times["vae_encode_seconds"] / times["dit_s2_step_seconds"]}
