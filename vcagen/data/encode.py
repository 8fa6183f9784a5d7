"""The encoding job: images to shards of moments, once, on any number of processes, resumable.

The unit of work is a shard: a fixed range of images, read and encoded in fixed batches, written whole by one process.
So neither the number of processes nor an interruption changes a byte of it. A shard counts as done when its record lies
beside it; shards.json, written last, takes the records in and says that the folder is complete.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from vcagen.config.job_options import EncodeConfig
from vcagen.config.options import flatten
from vcagen.data.image_set import ImageSet
from vcagen.data.images import open_images, read_batches, refuse_bad, refuse_lost_classes
from vcagen.data.latents import LatentDataset, check_std, latent_std, open_vae, refuse_format_1, shard_file
from vcagen.data.vae import LatentVAE, VaeRecord
from vcagen.processes.process import non_finite_rows
from vcagen.system.files import FORMAT, atomic_file, check_writable, read_json, sha256, write_json
from vcagen.system.processes import build_accelerator


class Encoded(TypedDict):
    """A shard of ours."""

    sha256: str
    count: int
    """Items."""
    skipped: dict[str, str]
    """Path -> reason of the images left out."""


class EncodedSet(TypedDict):
    """What is read of shards.json."""

    vae: VaeRecord
    shards: list[Encoded]


class EncodedAlone(Encoded):
    """What is read of the record beside a shard."""

    vae: VaeRecord


def run(config: EncodeConfig) -> None:
    """Write the shards that `config.out` lacks, with all processes.

    Raises:
        ValueError: images or VAE that cannot be read, or a folder with shards of other settings or damaged ones.
        OSError: the disk is full; complete shards stay.
    """
    out = Path(config.out)
    if Path(config.images).resolve() in (out.resolve(), *out.resolve().parents):
        raise ValueError(f"out: {config.out} is inside the images; the shards would count as a class of theirs")
    if not config.dry_run:
        check_writable(out / "shards.json")
    accelerator = build_accelerator(patient=True)
    images = open_images(config.images, config)
    vae = open_vae(images, config.images, config.vae_config(), accelerator.device)
    settings = _settings(config, images, vae)
    shards = [range(i, min(i + config.shard_size, len(images))) for i in range(0, len(images), config.shard_size)]
    done = _find_done(out, settings)
    missing = [index for index in range(len(shards)) if index not in done]

    if accelerator.is_main_process:
        _print_plan(config, images, vae, shards=len(shards), missing=len(missing))
        if config.dry_run:
            _print_estimate(config, images, vae, sum(len(shards[i]) for i in missing), accelerator.num_processes)
    if config.dry_run:
        return
    mine = slice(accelerator.process_index, None, accelerator.num_processes)  # every process does as many shards
    for index in sorted(done)[mine]:
        if sha256(file := shard_file(out, index)) != done[index]["sha256"]:
            raise ValueError(f"{file}: damaged, its SHA-256 is not that of its record; delete it and encode again")
    accelerator.wait_for_everyone()  # nobody writes before everybody has seen what is there

    if missing and not vae.is_identity:
        _check_scale(config, images, vae)
    rows = {index: shards[index] for index in missing[mine]}
    for index, moments, skipped in _encode_shards(config, images, vae, rows, bar=accelerator.is_main_process):
        stored = (moments.view(torch.int16) if moments.dtype == torch.bfloat16 else moments).numpy()
        record = {"sha256": _save(shard_file(out, index), stored), "count": len(moments), "skipped": skipped}
        write_json(shard_file(out, index).with_suffix(".json"), {**settings, **record})
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        _finish(config, images, settings)
    accelerator.end_training()


def _check_scale(config: EncodeConfig, images: ImageSet, vae: LatentVAE) -> None:
    """Raise ValueError where the latents of a few images, taken from all over the set, are not of about unit size."""
    spread = np.unique(np.linspace(0, len(images) - 1, 32).astype(np.int64)).tolist()
    batches = [spread[i : i + config.batch] for i in range(0, len(spread), config.batch)]
    moments = [vae.encode_uint8(pixels).cpu() for pixels, _ in read_batches(images, batches, 0) if len(pixels)]
    if moments and not non_finite_rows(torch.cat(moments)):  # else their shard names the image
        check_std(latent_std(torch.cat(moments), vae.description()), config.images, vae.description())


def _settings(config: EncodeConfig, images: ImageSet, vae: LatentVAE) -> dict[str, Any]:
    """What all shards of a set share."""
    return {
        "format": FORMAT,
        "vae": vae.description(),
        "precision": config.precision,
        "tiling": config.tiling,
        "image_size": images.image_size,
        "crop": images.crop,
        "class_names": list(images.class_names),
        "items": hashlib.sha256(json.dumps([[*images.names], [*images.labels]]).encode()).hexdigest(),
        "dtype": config.dtype,
        "shard_size": config.shard_size,
    }


def _find_done(out: Path, settings: Mapping[str, Any]) -> dict[int, Encoded]:
    """Records of the shards that are there, by index.

    Raises:
        ValueError: shards of other settings; every setting that differs is named.
    """
    refuse_format_1(out)
    found: dict[int, Encoded] = {}
    for file in filter(Path.exists, (out / "shards.json", *sorted(out.glob(f"moments_{'[0-9]' * 5}.json")))):
        whole = file.name == "shards.json"
        kind: type[Any] = EncodedSet if whole else EncodedAlone
        record = read_json(file, kind)
        old, new = flatten(record), flatten(settings)
        if old["vae.sha256"] == new["vae.sha256"] is not None:
            old["vae.path"] = new["vae.path"]  # the VAE may have moved
        if fields := [f"{key} {old.get(key)!s:.60}, asked for {new[key]!s:.60}" for key in new
                      if old.get(key) != new[key]]:  # fmt: skip
            raise ValueError(f"{file}: made with other settings: {'; '.join(fields)}. Use another folder or remove it")
        if whole:
            found |= enumerate(record["shards"])
        else:
            index = int(file.stem.removeprefix("moments_"))
            found[index] = Encoded(sha256=record["sha256"], count=record["count"], skipped=record["skipped"])
    return {index: record for index, record in found.items() if shard_file(out, index).exists()}


def _encode_shards(
    config: EncodeConfig, images: ImageSet, vae: LatentVAE, shards: Mapping[int, range], *, bar: bool
) -> Iterator[tuple[int, Tensor, dict[str, str]]]:
    """For each shard its index, the moments (n, 2, M, h, w) of its images and mirror images, and the images skipped."""
    batches = {i: [rows[j : j + config.batch] for j in range(0, len(rows), config.batch)] for i, rows in shards.items()}
    stream = read_batches(images, [batch for parts in batches.values() for batch in parts], config.num_workers)
    side = images.image_size // vae.downsample
    total = sum(map(len, shards.values()))
    with tqdm(total=total, desc="encoding", unit="img", disable=not (bar and total)) as progress:
        for index, rows in shards.items():
            moments = torch.empty(len(rows), 2, vae.moment_channels, side, side, dtype=getattr(torch, config.dtype))
            count, bad = 0, dict[int, str]()
            for batch in batches[index]:
                pixels, found = next(stream)  # uint8 (n, C, H, W), read ahead by the loader
                bad |= found
                if len(pixels) and not (bad and config.on_bad_image == "error"):  # else only their list is wanted
                    part = moments[count : count + len(pixels)]
                    part[:, 0] = vae.encode_uint8(pixels)
                    part[:, 1] = vae.encode_uint8(pixels.flip(-1))
                    if lost := non_finite_rows(part):
                        name = [images.names[i] for i in batch if i not in found][lost[0]]
                        raise ValueError(f"{name}: its latent is not finite in {config.dtype}; try the other dtype")
                    count += len(pixels)
                progress.update(len(batch))
            if config.on_bad_image == "error":
                refuse_bad(images, bad, config.images)
            yield index, moments[:count], {images.names[i]: reason for i, reason in bad.items()}


def _save(path: Path, array: NDArray[Any]) -> str:
    """Write a .npy file, whole or not at all; returns its SHA-256."""
    with atomic_file(path) as temporary:
        with temporary.open("wb") as file:  # np.save would not tell why a disk takes no more
            np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
            file.write(array.data)
        return sha256(temporary)


def _finish(config: EncodeConfig, images: ImageSet, settings: Mapping[str, Any]) -> None:
    """Write what belongs to all shards, shards.json last, and open the folder as training will."""
    out = Path(config.out)
    shards = [record for _, record in sorted(_find_done(out, settings).items())]
    skipped = {path: reason for record in shards for path, reason in record["skipped"].items()}
    kept = [index for index, name in enumerate(images.names) if name not in skipped]
    if not config.allow_empty_classes or not kept:
        refuse_lost_classes(images, kept, config.images)
    (out / "skipped.json").unlink(missing_ok=True)
    if skipped:
        write_json(out / "skipped.json", [{"path": path, "reason": reason} for path, reason in skipped.items()])
        print(f"skipped {len(skipped)} unreadable images, listed in {out / 'skipped.json'}", file=sys.stderr)
    labels = _save(out / "labels.npy", np.array([images.labels[index] for index in kept], dtype=np.int64))
    write_json(out / "names.json", {"format": FORMAT, "names": [images.names[index] for index in kept]})
    write_json(out / "shards.json", {**settings, "count": len(kept), "labels_sha256": labels, "shards": shards})
    for file in (*out.glob("moments_*.json"), *out.glob(".moments_*.tmp")):  # also what a killed process left
        file.unlink()
    dataset = LatentDataset(out)
    print(f"{out}: {len(dataset)} items, latent std {dataset.latent_std:.3f}", file=sys.stderr)


def _print_plan(config: EncodeConfig, images: ImageSet, vae: LatentVAE, *, shards: int, missing: int) -> None:
    side = images.image_size // vae.downsample
    size = 2 * vae.moment_channels * side * side * 2 * len(images)
    place = next(path for path in (Path(config.out), *Path(config.out).absolute().parents) if path.exists())
    print(
        f"{config.images}: {len(images)} images of {len(images.class_names)} classes at {images.image_size} pixels -> "
        f"moments 2 x {vae.moment_channels} x {side} x {side} in {config.dtype}, {shards} shards, {size:,} bytes "
        f"({shutil.disk_usage(place).free:,} free), {shards - missing} shards done",
        file=sys.stdout if config.dry_run else sys.stderr,
    )


def _print_estimate(config: EncodeConfig, images: ImageSet, vae: LatentVAE, count: int, processes: int) -> None:
    """Time one batch, and say how long `count` images take."""
    start = time.perf_counter()
    pixels, _ = next(read_batches(images, [range(min(config.batch, len(images)))], 0))
    reading = (time.perf_counter() - start) / max(1, config.num_workers)
    vae.encode_uint8(pixels[:1]).cpu()  # warm up
    start = time.perf_counter()
    vae.encode_uint8(pixels).cpu()
    encoding = 2 * (time.perf_counter() - start)  # with the mirror images
    seconds = max(reading, encoding) / max(1, len(pixels)) * count / processes
    print(
        f"one batch of {len(pixels)}: {reading:.2f} s to read, {encoding:.2f} s to encode; about "
        f"{seconds / 3600:.2f} hours ({seconds:.0f} s) for {count} images on {processes} processes"
    )
