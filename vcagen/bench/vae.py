"""What stands between images and a training step: encoding and decoding by the VAE, reading of shards."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from vcagen.bench._timing import fastest, open_device
from vcagen.config.job_options import VaeBenchConfig
from vcagen.data.latents import LatentDataset, collate_whole, shard_file
from vcagen.data.vae import LatentVAE
from vcagen.system.files import FORMAT, write_json

SHARD_SIZE = 4096


def run(config: VaeBenchConfig) -> None:
    """Print one line a measurement."""
    device = open_device(config.device)
    with tempfile.TemporaryDirectory() as folder:
        sd_vae().save_pretrained(f"{folder}/vae")
        vae = LatentVAE(f"{folder}/vae", device=device)
        side = config.image_size
        images = torch.zeros(config.batch, 3, side, side, dtype=torch.uint8)
        latents = torch.zeros(config.batch, 4, side // 8, side // 8, device=device)
        vae.verify()
        works = (lambda: vae.encode_uint8(images), lambda: vae.decode(latents))
        encoding, decoding = fastest(works, config.repeats, device)
        result = {"encoded_per_second": config.batch / encoding, "decoded_per_second": config.batch / decoding}
        result |= _reading(config, Path(folder) / "latents")
    for name, value in result.items():
        print(f"{name:<36}{value:>14,.2f}")
    if config.json is not None:
        write_json(config.json, {**asdict(config), **result})


def sd_vae() -> Any:
    """An AutoencoderKL of random weights, of the size of Stable Diffusion's."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    ).eval()  # fmt: skip


def write_latents(folder: Path, items: int) -> None:
    """A set of shards of random moments (2, 8, 32, 32) with mirror images, all of one class."""
    folder.mkdir(parents=True, exist_ok=True)
    moments = np.random.default_rng(0).standard_normal((min(items, SHARD_SIZE), 2, 8, 32, 32), dtype=np.float32)
    counts = [min(SHARD_SIZE, items - start) for start in range(0, items, SHARD_SIZE)]
    for index, count in enumerate(counts):
        np.save(shard_file(folder, index), moments[:count].astype(np.float16))
    np.save(folder / "labels.npy", np.zeros(items, np.int64))
    vae = {"path": "synthetic", "sha256": "", "scaling_factor": 1.0, "shift_factor": 0.0, "channels": 4}
    description = {"vae": {**vae, "downsample": 8}, "image_size": 256, "class_names": ["image"], "dtype": "float16"}
    shards = [{"count": count} for count in counts]
    write_json(folder / "shards.json", {"format": FORMAT, **description, "count": items, "shards": shards})


def _reading(config: VaeBenchConfig, folder: Path) -> dict[str, float]:
    """Shuffled latents a second, in this process and through a loader."""
    write_latents(folder, config.items)
    dataset = LatentDataset(folder)
    generator = np.random.default_rng(0)
    size = config.read_batch
    order = generator.integers(config.items, size=max(size, config.items // size * size)).tolist()
    items = list(zip(order, (generator.random(len(order)) < 0.5).tolist(), strict=True))
    batches = [items[i : i + size] for i in range(0, len(items), size)]
    turns = itertools.cycle(batches)
    for batch in batches:  # warm the page cache
        dataset.__getitems__(batch)
    rates = {"latents_per_second": _rate(lambda: dataset.__getitems__(next(turns)), size, config.seconds)}
    if config.num_workers:
        loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=turns, num_workers=config.num_workers, collate_fn=collate_whole
        )  # fmt: skip
        stream = iter(loader)
        next(stream)
        rates["latents_per_second_loader"] = _rate(lambda: next(stream), size, config.seconds)
    return rates


def _rate(read: Callable[[], object], size: int, seconds: float) -> float:
    """Items a second."""
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        read()
        count += size
    return count / passed
