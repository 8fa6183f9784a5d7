"""Latents that LightningDiT's extract_features wrote: samples of the posterior, with those of the mirror images."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from vcagen.config.options import DataConfig, VaeConfig
from vcagen.data.latent_scale import read_statistics
from vcagen.data.latents import DataSpec, LatentDataset, vae_options
from vcagen.data.vae import LatentVAE
from vcagen.system.files import prefixing, reading

NAMES = ("latents", "latents_flip", "labels")


class SampledLatents(LatentDataset):
    """Files of `latents` and `latents_flip` (n, C, h, w) and `labels` (n,), memory-mapped, in the order of their names.

    Items are latents (C, h, w), which `LatentVAE.sample` scales. Classes are called by their numbers.

    Args:
        path: folder of *.safetensors files.
        vae: description of the VAE, with the scale of these latents.

    Raises:
        ValueError: other files, channels that differ, or latents that are not finite and of about unit size.
    """

    def __init__(self, path: str | Path, vae: dict[str, Any]) -> None:
        self.path, self._vae = Path(path), vae
        self._files = sampled_files(path)
        self._shards, labels = [], []
        shapes, dtypes = set(), set()
        for file in self._files:
            with reading(file):
                tensors = load_file(file)  # mapped, not read
                if missing := [name for name in NAMES if name not in tensors]:
                    raise ValueError(f"no {missing[0]}; LightningDiT's latents hold {', '.join(NAMES)}")
                latents, flipped, classes = (tensors[name] for name in NAMES)
                _check(latents, flipped, classes)
            self._shards.append(_Halves(latents, flipped))
            labels.append(classes.long())
            shapes.add(tuple(latents.shape[1:]))
            dtypes.add(latents.dtype)
        if len(shapes) > 1 or len(dtypes) > 1:
            raise ValueError(f"{path}: files of different latents: {sorted(shapes)}, {sorted(map(str, dtypes))}")
        self.labels, (self.dtype,) = torch.cat(labels), dtypes
        ((channels, height, width),) = shapes
        if (channels, height) != (vae["channels"], width):
            found, expected = f"{channels} x {height} x {width}", f"{vae['channels']} channels of square images"
            raise ValueError(f"{path}: latents of {found}; the VAE {vae['path']} makes {expected}")
        self._starts = np.cumsum([0, *map(len, labels)])
        names = [str(label) for label in range(int(self.labels.max()) + 1)]
        self.spec = DataSpec.of(vae, height * vae["downsample"], names)
        self._check_values()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(SampledLatents, self.path, self._vae), ()

    def names(self) -> list[str]:
        """File and place in it, in order; the images' own names are not known."""
        return [f"{file.name}/{i}" for file, shard in zip(self._files, self._shards, strict=True)
                for i in range(shard.shape[0])]  # fmt: skip


class _Halves:
    """Latents and those of the mirror images, as the bits of one array (n, 2, C, h, w) would be."""

    def __init__(self, latents: Tensor, flipped: Tensor) -> None:
        bits = torch.int16 if latents.dtype.itemsize == 2 else torch.int32
        self._halves = [half.view(bits).numpy() for half in (latents, flipped)]
        self.shape = (len(latents), 2, *latents.shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, place: tuple[int, int]) -> NDArray[Any]:
        offset, mirror = place
        return self._halves[mirror][offset]


def _check(latents: Tensor, flipped: Tensor, labels: Tensor) -> None:
    """Raise ValueError for tensors that are not latents, their mirror images and labels."""
    float_types = (torch.float16, torch.bfloat16, torch.float32)
    if latents.ndim != 4 or latents.dtype not in float_types:
        raise ValueError(f"latents are {latents.dtype} {tuple(latents.shape)}; needs floats (n, C, h, w)")
    if flipped.shape != latents.shape or flipped.dtype != latents.dtype:
        raise ValueError(f"latents_flip {tuple(flipped.shape)} are not as latents {tuple(latents.shape)}")
    if labels.shape != latents.shape[:1] or labels.is_floating_point() or not len(labels) or labels.min() < 0:
        raise ValueError(f"labels {labels.dtype} {tuple(labels.shape)}; needs 0, 1, ..., one for each latent")


def sampled_files(path: str | Path) -> list[Path]:
    """The safetensors files of a folder that has no shards of ours; [] where there are none."""
    if (Path(path) / "shards.json").exists():
        return []
    files = sorted(Path(path).glob("*.safetensors"))
    return [file for file in files if not file.name.startswith("shard_")]  # those were ours, in format 1


def open_sampled(
    config: DataConfig, options: VaeConfig, device: str | torch.device
) -> tuple[SampledLatents, LatentVAE]:
    """The training set of a folder of such latents, and its VAE, which the folder does not name.

    LightningDiT scales by the mean and std of latents_stats.pt in the folder alone, (z - mean) / std; without that file
    the VAE's own scale is taken.

    Raises:
        ValueError: no VAE is named, or latents that are not of it or of another image size than asked for.
    """
    if options.path is None:
        raise ValueError(f"vae.path: {config.path} does not name the VAE of its latents; give the folder of it")
    with_scale = vae_options(options, device)
    vae = LatentVAE(options.path, **with_scale)
    if (statistics := Path(config.path) / "latents_stats.pt").exists():
        scale = {"scaling_factor": 1.0, "shift_factor": 0.0, **read_statistics(statistics)}
        with prefixing(f"{statistics}: "):
            vae = LatentVAE.from_description({**vae.description(), **scale}, **with_scale)
    dataset = SampledLatents(config.path, vae.description())
    if (side := config.images.image_size) not in (None, dataset.spec.image_size):
        raise ValueError(f"data.images.image_size: {side}; {config.path} was made with {dataset.spec.image_size}")
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"note: {config.path} holds latents that were sampled once; training sees no others", file=sys.stderr)
    return dataset, vae
