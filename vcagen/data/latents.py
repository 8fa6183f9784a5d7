"""What the network is trained on: sets whose items are the moments of an image or of its mirror image, and a label.

A batch is asked for as `dataset.__getitems__([(index, mirror), ...])` and comes as (moments (N, M, h, w), labels (N,)),
ready for `vae.sample`; a DataLoader must be given `collate_fn=keep`. M is `vae.moment_channels`.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from vcagen.config.options import DataConfig, VaeConfig
from vcagen.data.images import Pixels, digits_pixels, find_bad_images, folder_pixels, scan_images, without_bad
from vcagen.data.vae import DEFAULT_VAE, LatentVAE, NonFiniteError

__all__ = [
    "DataSpec",
    "ImageDataset",
    "LatentDataset",
    "LatentVAE",
    "MomentsDataset",
    "NonFiniteError",
    "keep",
    "open_dataset",
]

Item = tuple[int, bool]
"""Index of an image, and whether its mirror image is meant."""
METADATA_KEY = "vcagen"
STD_RANGE = (0.3, 3.0)
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}

T = TypeVar("T")


def keep(batch: T) -> T:
    """Collate function for sets whose batches come whole."""
    return batch


@dataclass(frozen=True)
class DataSpec:
    """What a network needs to know of its data; travels with its weights."""

    channels: int
    """Latent channels C."""
    height: int
    """Latent height."""
    width: int
    """Latent width."""
    num_classes: int
    class_names: tuple[str, ...]
    image_size: int
    """Side of the images in pixels."""
    vae: dict[str, Any]
    """`LatentVAE.description()`."""

    @classmethod
    def of(cls, vae: dict[str, Any], image_size: int, class_names: Sequence[str]) -> DataSpec:
        """The spec of images of that side under that vae description."""
        side = image_size // vae["downsample"]
        return cls(vae["channels"], side, side, len(class_names), tuple(class_names), image_size, vae)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able values."""
        return {**asdict(self), "class_names": list(self.class_names)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DataSpec:
        """From `to_dict`, also after JSON."""
        return cls(**{**values, "class_names": tuple(values["class_names"])})

    def differences(self, other: DataSpec) -> list[str]:
        """One "field: mine, not theirs" a field that differs; the VAE counts by its weights, not by its name."""
        mine, theirs = ({**spec.to_dict(), **spec.vae} for spec in (self, other))
        for spec in (mine, theirs):
            del spec["vae"]
            if spec["sha256"]:
                del spec["path"]
        return [f"{key}: {mine[key]}, not {theirs.get(key)}" for key in mine if mine[key] != theirs.get(key)]


def latent_std(moments: Tensor, vae: dict[str, Any]) -> float:
    """Standard deviation of the scaled latents that these moments (N, 2C, h, w) give, over all elements."""
    mean, log_variance = moments.double().chunk(2, dim=1)
    variance = mean.var(correction=0) + log_variance.clamp(-30, 20).exp().mean()
    return float(vae["scaling_factor"]) * math.sqrt(variance.item())


def check_std(std: float, where: str | Path, vae: str) -> None:
    """Raise ValueError for latents that are not of about unit size: unscaled, scaled twice, or of another VAE."""
    low, high = STD_RANGE
    if not low <= std <= high:
        raise ValueError(
            f"{where}: latents have std {std:.3g} after scaling, expected {low} to {high}; unscaled, scaled twice, or "
            f"not of the VAE {vae}"
        )


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Metadata, tensors and start of the data of a shard; ValueError if it is cut short or not one of ours.

    The safetensors format: 8 bytes length of the header, JSON, data. Read by hand so that arrays can be mapped.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                raise ValueError("header cut short")
            tensors = json.loads(file.read(length))
        metadata = json.loads(tensors.pop("__metadata__", {}).get(METADATA_KEY, "null"))
        start = 8 + length
        size = start + max(tensor["data_offsets"][1] for tensor in tensors.values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: damaged, not a shard of latents") from error
    if not isinstance(metadata, dict) or "moments" not in tensors:
        raise ValueError(f"{path}: not a shard of latents made by `vcagen encode`")
    if metadata.get("format") != 1:
        raise ValueError(f"{path}: latents of format {metadata.get('format')!r}; this version reads format 1")
    if path.stat().st_size != size:
        raise ValueError(f"{path}: {path.stat().st_size} bytes, expected {size}; delete it and encode again")
    return metadata, tensors, start


class MomentsDataset(Dataset[tuple[Tensor, int]]):
    """Moments (M, h, w) and labels by (index, mirror), or by index alone."""

    spec: DataSpec
    labels: Tensor
    """int64 (len,)."""
    dtype: torch.dtype
    """Of the moments."""
    needs_main_process: bool
    """Whether loader workers cannot read it."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, item: int | Item) -> tuple[Tensor, int]:
        index, mirror = (item, False) if isinstance(item, int) else item
        if not 0 <= index < len(self):
            raise IndexError(f"{index}: outside 0..{len(self) - 1}")
        moments, labels = self.__getitems__([(index, mirror)])
        return moments[0], int(labels[0])

    @abstractmethod
    def __getitems__(self, items: Sequence[Item]) -> tuple[Tensor, Tensor]:
        """Moments (N, M, h, w) and labels int64 (N,); a DataLoader calls it with whole batches."""


class LatentDataset(MomentsDataset):
    """Shards written by `vcagen encode`, memory-mapped: nothing is opened or parsed per item.

    Items are moments (M, h, w) in the storage type. Safe in DataLoader workers: forked ones share the maps, spawned
    ones map again.

    Attribute: `latent_std`, of up to 256 items.

    Raises:
        ValueError: not a folder of shards, an incomplete or mixed set, or latents that are not of about unit size.
    """

    needs_main_process = False

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"{path}: not a folder of latents; make one by python -m vcagen encode")
        files = sorted(self.path.glob("shard_*.safetensors"))
        if not files:
            raise ValueError(
                f"{path}: no latent shards; make them by python -m vcagen encode, or train from images by "
                "data.from_images=true"
            )
        headers = [read_header(file) for file in files]
        common, *_ = (metadata for metadata, _, _ in headers)
        if len(files) != common["shards"]:
            raise ValueError(f"{path}: {len(files)} of {common['shards']} shards; the same encode command completes it")
        for index, (file, (metadata, _, _)) in enumerate(zip(files, headers, strict=True)):
            fields = [key for key in common if key != "shard" and metadata.get(key) != common[key]]
            if fields or metadata["shard"] != index:
                raise ValueError(
                    f"{file}: of another set than {files[0].name}: {', '.join(fields or ['shard'])} differ"
                )

        self.spec = DataSpec.of(common["vae"], common["image_size"], common["class_names"])
        self.metadata = common
        self._shard_size = int(common["shard_size"])
        self._files = files
        self._layout = [(tensors, start) for _, tensors, start in headers]
        self.dtype = _DTYPES[headers[0][1]["moments"]["dtype"]]
        self._map()
        self.labels = torch.from_numpy(np.concatenate([self._array(i, "labels") for i in range(len(files))]))
        if len(self.labels) != common["count"]:
            raise ValueError(f"{path}: {len(self.labels)} items, expected {common['count']}")
        if not 0 <= int(self.labels.min()) <= int(self.labels.max()) < self.spec.num_classes:
            raise ValueError(f"{path}: labels outside 0..{self.spec.num_classes - 1}")
        self._check_values()

    def _check_values(self) -> None:
        sample = np.unique(np.linspace(0, len(self) - 1, 256).astype(np.int64))
        moments, _ = self.__getitems__([(int(i), False) for i in sample])
        if not bool(moments.isfinite().all()):
            raise ValueError(f"{self.path}: latents with NaN or infinity")
        if self.spec.vae["path"] == "identity":
            self.latent_std = float(moments.double().std(correction=0))
        else:
            self.latent_std = latent_std(moments, self.spec.vae)
            check_std(self.latent_std, self.path, self.spec.vae["path"])

    def _map(self) -> None:
        self._maps: list[mmap.mmap] = []
        for file in self._files:
            with file.open("rb") as opened:
                self._maps.append(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        self._moments = [self._array(i, "moments") for i in range(len(self._files))]

    def _array(self, shard: int, name: str) -> np.ndarray[Any, Any]:
        tensors, start = self._layout[shard]
        dtype = {"I64": np.int64, "U8": np.uint8}.get(tensors[name]["dtype"], np.int16)  # NumPy has no bfloat16
        shape = tensors[name]["shape"]
        offset = start + tensors[name]["data_offsets"][0]
        return np.frombuffer(self._maps[shard], dtype, math.prod(shape), offset).reshape(shape)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_maps", "_moments")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()

    def __getitems__(self, items: Sequence[Item]) -> tuple[Tensor, Tensor]:
        """Moments (N, M, h, w) in the storage type, and labels int64 (N,)."""
        out = torch.empty((len(items), *self._moments[0].shape[2:]), dtype=torch.int16)
        if get_worker_info() is not None:
            out.share_memory_()  # saves a copy on the way to the main process
        rows = out.numpy()
        for row, (index, mirror) in enumerate(items):
            shard, offset = divmod(index, self._shard_size)
            rows[row] = self._moments[shard][offset, int(mirror)]
        return out.view(self.dtype), self.labels[[index for index, _ in items]]

    def names(self) -> list[str]:
        """Source paths relative to the image folder, in order."""
        parts = [self._array(i, "names").tobytes().decode(errors="surrogateescape") for i in range(len(self._files))]
        return [name for part in parts for name in part.split("\0")]


class ImageDataset(MomentsDataset):
    """Images encoded when they are asked for: the digits, or a small folder. As `LatentDataset`, in the main process.

    Items are float32 moments on the vae's device.
    """

    needs_main_process = True

    def __init__(self, pixels: Pixels, vae: LatentVAE, num_workers: int = 1) -> None:
        check_image_size(pixels.image_size, vae)
        self.spec = DataSpec.of(vae.description(), pixels.image_size, pixels.class_names)
        self.labels = torch.tensor(pixels.labels, dtype=torch.int64)
        self.dtype = torch.float32
        self._pixels = pixels
        self._vae = vae
        self._pool = ThreadPoolExecutor(max(1, num_workers))

    def __getitems__(self, items: Sequence[Item]) -> tuple[Tensor, Tensor]:
        """Moments (N, M, h, w) float32, and labels int64 (N,)."""
        images = torch.stack(list(self._pool.map(self._read, items)))
        return self._vae.encode_uint8(images), self.labels[[index for index, _ in items]]

    def _read(self, item: Item) -> Tensor:
        index, mirror = item
        image = self._pixels.read(index)
        return image.flip(-1) if mirror else image


def check_image_size(image_size: int, vae: LatentVAE) -> None:
    """Raise ValueError for an image side that the vae cannot divide."""
    if image_size < 1 or image_size % vae.downsample:
        raise ValueError(f"image_size: {image_size}; the VAE {vae.path} takes multiples of {vae.downsample}")


def vae_options(config: VaeConfig, device: str | torch.device) -> dict[str, Any]:
    """The keyword arguments of LatentVAE that say how, not what."""
    return {
        "precision": config.precision,
        "tiling": config.tiling,
        "slicing": config.slicing,
        "device": device,
    }


def open_vae(path: str, config: VaeConfig, device: str | torch.device = "cpu") -> LatentVAE:
    """The vae for images at `path`: an image folder, or digits."""
    if path == "digits":
        if config.path not in (None, "identity"):
            raise ValueError(f"vae.path: {config.path}; the digits are trained in pixel space, by identity")
        return LatentVAE("identity", channels=1, **vae_options(config, device))
    return LatentVAE(config.path or DEFAULT_VAE, **vae_options(config, device))


def open_dataset(
    config: DataConfig, vae: VaeConfig, *, device: str | torch.device = "cpu"
) -> tuple[MomentsDataset, LatentVAE]:
    """The training set that `config` names, and its vae; with shards the VAE is not touched before a decode.

    Raises:
        ValueError: no such data, or data of another VAE or image size than asked for.
    """
    size = config.images.image_size
    if size is not None and size < 1:
        raise ValueError(f"data.images.image_size: {size}; expected 1 or more")
    if config.path == "digits":
        pixels = digits_pixels()
        if size not in (None, pixels.image_size):
            raise ValueError(f"data.images.image_size: {size}; the digits have {pixels.image_size}")
    elif config.from_images:
        folder = scan_images(config.path, allow_empty_classes=config.images.allow_empty_classes)
        workers = config.num_workers or os.cpu_count() or 1
        bad = find_bad_images(folder.root, folder.paths, workers)
        pixels = folder_pixels(without_bad(folder, bad, config.images), size or 256)
    else:
        shards = LatentDataset(config.path)
        if size not in (None, shards.spec.image_size):
            raise ValueError(f"data.images.image_size: {size}; {config.path} was made with {shards.spec.image_size}")
        made_with = shards.spec.vae["path"]
        rebuilt = LatentVAE.from_description(shards.spec.vae, path=vae.path, **vae_options(vae, device))
        if vae.path not in (None, made_with):
            if "identity" in (vae.path, made_with):
                raise ValueError(f"vae.path: {vae.path}; {config.path} was made with {made_with}")
            rebuilt.verify()
        return shards, rebuilt
    opened = open_vae(config.path, vae, device)
    return ImageDataset(pixels, opened, config.num_workers), opened
