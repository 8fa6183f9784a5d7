"""The encoding job: images to safetensors shards of moments, once, on any number of processes, resumable.

The unit of work is a shard: a fixed range of images, read and encoded in fixed batches, written whole by one process.
So neither the number of processes nor an interruption changes a byte of it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from vcagen.config.command_line import at_least
from vcagen.config.job_options import EncodeConfig
from vcagen.config.options import flat
from vcagen.data.images import Pixels, digits_pixels, find_bad_images, folder_pixels, scan_images, without_bad
from vcagen.data.latents import (
    METADATA_KEY,
    LatentDataset,
    check_image_size,
    check_std,
    latent_std,
    open_vae,
    read_header,
)
from vcagen.data.vae import LatentVAE
from vcagen.system.files import atomic_file, check_writable, write_json

Gather = Callable[[list[Any]], list[Any]]
"""Waits for all processes and joins their lists in the order of the processes."""


def encode(
    config: EncodeConfig,
    *,
    rank: int = 0,
    world_size: int = 1,
    gather: Gather = list,
    device: str | torch.device = "cpu",
) -> None:
    """Write the shards that `config.out` lacks; process `rank` of `world_size` does every world_size-th of them.

    Raises:
        ValueError: images or VAE that cannot be read, or a folder with shards of other settings.
        OSError: the disk is full; complete shards stay.
    """
    at_least(config, batch=1, shard_size=1, image_size=1, num_workers=0)
    out = Path(config.out)
    if Path(config.images).resolve() in (out.resolve(), *out.resolve().parents):
        raise ValueError(f"out: {config.out} is inside the images; the shards would count as a class of theirs")
    if not config.dry_run:
        check_writable(_shard(out, 0))
    done = {file: read_header(file)[0] for file in sorted(out.glob("shard_*.safetensors"))}
    pixels, bad = _open_images(config, checked=bool(done) or config.dry_run, rank=rank, size=world_size, gather=gather)
    vae = open_vae(config.images, config.vae_config(), device)
    check_image_size(pixels.image_size, vae)
    settings = _settings(config, pixels, vae)
    for file, metadata in done.items():
        _refuse_other_settings(file, metadata, settings)

    ranges = [range(i, min(i + config.shard_size, len(pixels))) for i in range(0, len(pixels), config.shard_size)]
    missing = [index for index in range(len(ranges)) if _shard(out, index) not in done]
    if rank == 0:
        _print_plan(config, pixels, vae, shards=len(ranges), missing=len(missing))
    if config.dry_run:
        if rank == 0:
            _print_estimate(config, pixels, vae, sum(len(ranges[i]) for i in missing), world_size)
        return
    if rank == 0 and not done:
        _write_skipped(out, bad)
    if rank == 0:
        for stale in out.glob(".shard_*.tmp"):
            stale.unlink()
    gather([])  # nobody writes before everybody has seen what is there

    mine = missing[rank::world_size]
    total = sum(len(ranges[i]) for i in mine)
    with (
        ThreadPoolExecutor(config.num_workers or 1) as pool,
        tqdm(total=total, desc="encoding", unit="img", disable=rank > 0 or not total) as bar,
    ):
        for index in mine:
            moments = _encode_range(config, pixels, vae, ranges[index], pool, bar)
            write_shard(_shard(out, index), moments, ranges[index], pixels, {**settings, "shard": index})

    gather([])
    if rank == 0:
        _check_result(out, pixels)


def _open_images(
    config: EncodeConfig, *, checked: bool, rank: int, size: int, gather: Gather
) -> tuple[Pixels, list[tuple[str, str]]]:
    """The images to encode and the bad files left out; unless `checked`, the processes share a test of all files."""
    if config.images == "digits":
        pixels = digits_pixels()
        if config.image_size not in (None, pixels.image_size):
            raise ValueError(f"image_size: {config.image_size}; the digits have {pixels.image_size}")
        return pixels, []
    folder = scan_images(config.images, allow_empty_classes=config.allow_empty_classes)
    skipped = Path(config.out) / "skipped.json"
    bad: list[tuple[str, str]] = []
    if not checked:
        found = find_bad_images(folder.root, folder.paths[rank::size], config.num_workers, progress=rank == 0)
        bad = sorted(gather(found))
    elif config.on_bad_image == "skip" and skipped.is_file():
        try:
            bad = [(str(entry["path"]), str(entry["reason"])) for entry in json.loads(skipped.read_text())]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{skipped}: damaged ({type(error).__name__}: {error})") from error
    size = 256 if config.image_size is None else config.image_size
    return folder_pixels(without_bad(folder, bad, config), size), bad


def _settings(config: EncodeConfig, pixels: Pixels, vae: LatentVAE) -> dict[str, Any]:
    """The metadata that all shards of a set share."""
    items = json.dumps([pixels.names, pixels.labels]).encode()
    return {
        "format": 1,
        "vae": vae.description(),
        "precision": config.precision,
        "tiling": config.tiling,
        "image_size": pixels.image_size,
        "crop": "none" if config.images == "digits" else "adm-center",
        "class_names": list(pixels.class_names),
        "count": len(pixels),
        "items": hashlib.sha256(items).hexdigest(),
        "dtype": config.dtype,
        "shard_size": config.shard_size,
        "shards": -(-len(pixels) // config.shard_size),
    }


def _refuse_other_settings(file: Path, found: dict[str, Any], asked: dict[str, Any]) -> None:
    """Name every setting in which an existing shard differs from the ones to write."""
    old, new = flat(found), flat(asked)
    fields = [f"{key} {_short(old.get(key))}, asked for {_short(new[key])}" for key in new if old.get(key) != new[key]]
    if fields:
        raise ValueError(f"{file}: made with other settings: {'; '.join(fields)}. Use another folder or remove it")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _shard(out: Path, index: int) -> Path:
    return out / f"shard_{index:05d}.safetensors"


def _encode_range(
    config: EncodeConfig, pixels: Pixels, vae: LatentVAE, rows: range, pool: ThreadPoolExecutor, bar: tqdm[Any]
) -> Tensor:
    """Moments of a range of images and of their mirror images: (n, 2, M, h, w) in the storage type."""
    side = pixels.image_size // vae.downsample
    moments = torch.empty(len(rows), 2, vae.moment_channels, side, side, dtype=getattr(torch, config.dtype))
    batches = [rows[i : i + config.batch] for i in range(0, len(rows), config.batch)]
    for batch, images in zip(batches, _read_ahead(pixels, batches, pool), strict=True):
        part = moments[batch.start - rows.start : batch.stop - rows.start]
        part[:, 0] = vae.encode_uint8(images)
        part[:, 1] = vae.encode_uint8(images.flip(-1))
        finite = part.isfinite().flatten(1).all(1)
        if not bool(finite.all()):
            first = batch[int((~finite).nonzero()[0])]
            raise ValueError(f"{pixels.names[first]}: its latent is not finite in {config.dtype}; try the other dtype")
        bar.update(len(batch))
    if not vae.is_identity and len(rows) >= min(256, len(pixels)):  # fewer images may have any std
        check_std(latent_std(moments[:, 0], vae.description()), config.images, vae.path)
    return moments


def _read_ahead(pixels: Pixels, batches: Sequence[range], pool: ThreadPoolExecutor) -> Iterator[Tensor]:
    """Batches of images, uint8 (n, C, H, W); two more are being decoded while one is used."""
    waiting: deque[list[Future[Tensor]]] = deque()
    for batch in batches:
        waiting.append([pool.submit(pixels.read, index) for index in batch])
        if len(waiting) > 2:
            yield torch.stack([image.result() for image in waiting.popleft()])
    while waiting:
        yield torch.stack([image.result() for image in waiting.popleft()])


def write_shard(path: Path, moments: Tensor, rows: range, pixels: Pixels, metadata: dict[str, Any]) -> None:
    """Write the moments (n, 2, M, h, w) of some rows with their labels and names, whole or not at all."""
    names = "\0".join(pixels.names[row] for row in rows).encode(errors="surrogateescape")
    tensors = {
        "moments": moments,
        "labels": torch.tensor([pixels.labels[row] for row in rows], dtype=torch.int64),
        "names": torch.frombuffer(bytearray(names), dtype=torch.uint8),
    }
    data = save(tensors, metadata={METADATA_KEY: json.dumps(metadata, sort_keys=True)})
    try:
        with atomic_file(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write_skipped(out: Path, bad: Sequence[tuple[str, str]]) -> None:
    """List the files left out, in the folder and on stderr."""
    file = out / "skipped.json"
    file.unlink(missing_ok=True)
    if bad:
        write_json(file, [{"path": path, "reason": reason} for path, reason in bad])
        print(f"skipped {len(bad)} unreadable images, listed in {file}:", file=sys.stderr)
        print("\n".join(f"  {reason}" for _, reason in bad[:20]), file=sys.stderr)


def _print_plan(config: EncodeConfig, pixels: Pixels, vae: LatentVAE, *, shards: int, missing: int) -> None:
    side = pixels.image_size // vae.downsample
    size = 2 * vae.moment_channels * side * side * 2 * len(pixels)
    place = next(path for path in (Path(config.out), *Path(config.out).absolute().parents) if path.exists())
    print(
        f"{config.images}: {len(pixels)} images of {len(pixels.class_names)} classes at {pixels.image_size} pixels -> "
        f"moments 2 x {vae.moment_channels} x {side} x {side} in {config.dtype}, {shards} shards, {size:,} bytes "
        f"({shutil.disk_usage(place).free:,} free), {shards - missing} shards done",
        file=sys.stdout if config.dry_run else sys.stderr,
    )


def _print_estimate(config: EncodeConfig, pixels: Pixels, vae: LatentVAE, images: int, processes: int) -> None:
    """Time one batch, and say how long `images` take."""
    rows = range(min(config.batch, len(pixels)))
    with ThreadPoolExecutor(config.num_workers or 1) as pool:
        start = time.perf_counter()
        batch = torch.stack(list(pool.map(pixels.read, rows)))
        read = time.perf_counter() - start
    vae.encode_uint8(batch[:1]).cpu()  # warm up
    start = time.perf_counter()
    vae.encode_uint8(batch).cpu()
    encoding = 2 * (time.perf_counter() - start)  # with the mirror images
    seconds = max(read, encoding) / len(rows) * images / processes
    print(
        f"one batch of {len(rows)}: {read:.2f} s to read, {encoding:.2f} s to encode; about {seconds / 3600:.2f} hours "
        f"({seconds:.0f} s) for {images} images on {processes} processes. Files are not yet checked"
    )


def _check_result(out: Path, pixels: Pixels) -> None:
    """Open what was written as training will, and compare its labels and names with the source."""
    dataset = LatentDataset(out)
    if dataset.labels.tolist() != list(pixels.labels) or dataset.names() != list(pixels.names):
        raise ValueError(f"{out}: labels or names are not those of the images; remove it and encode again")
    print(
        f"{out}: {len(dataset)} items, labels and names as in the source, latent std {dataset.latent_std:.3f}",
        file=sys.stderr,
    )
