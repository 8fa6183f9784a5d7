"""What the network is trained on: sets of images or their mirror images, as `vae.sample` takes them, and labels.

A batch is asked for as `dataset.__getitems__([(index, mirror), ...])` and comes as (moments (N, M, h, w), labels (N,)),
or with uint8 images (N, C, H, W); a DataLoader must be given `collate_fn=collate_whole`. M is `vae.moment_channels`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info
from tqdm import tqdm

from vcagen.config.options import DataConfig, VaeConfig
from vcagen.data.image_set import ImageSet
from vcagen.data.images import is_dataset, open_images, read_batches, refuse_bad, refuse_lost_classes
from vcagen.data.latent_scale import LatentScale
from vcagen.data.vae import DEFAULT_VAE, LatentVAE, Size, VaeRecord, with_given_scale
from vcagen.processes.process import non_finite_rows
from vcagen.system.files import few, read_json, reading, sha256

Item = tuple[int, bool]
"""Index of an image, and whether its mirror image is meant."""
STD_RANGE = (0.3, 3.0)

T = TypeVar("T")


def collate_whole(batch: T) -> T:
    """Collate function for sets whose batches come whole."""
    return batch


class Names(TypedDict):
    """names.json"""

    names: list[str]


class Hashes(TypedDict, total=False):
    """Of files, where a record has them: not in sets that others made, nor in the first ones of this format."""

    sha256: str
    """Of a shard."""
    labels_sha256: str
    """Of labels.npy."""


class ShardRecord(Hashes):
    """What is kept of a shard."""

    count: Annotated[int, msgspec.Meta(ge=0)]
    """Items."""


class ShardSet(Hashes):
    """What shards.json must hold; encode writes more, to find shards that were made otherwise."""

    vae: VaeRecord
    image_size: Size
    class_names: list[str]
    dtype: Literal["float16", "bfloat16"]
    shards: list[ShardRecord]


@dataclass(frozen=True)
class DataSpec:
    """What a network needs to know of its data; travels with its weights."""

    channels: Size
    """Latent channels C."""
    height: Size
    """Latent height."""
    width: Size
    """Latent width."""
    num_classes: Size
    class_names: tuple[str, ...]
    image_size: Size
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
        """From `to_dict`, also after JSON.

        Raises:
            ValueError, msgspec.ValidationError: not such values.
        """
        spec = msgspec.convert(values, cls)
        msgspec.convert(spec.vae, VaeRecord)
        if unknown := values.keys() - {field.name for field in fields(cls)}:
            raise ValueError(f"damaged: unknown {', '.join(sorted(unknown))}")
        if len(spec.class_names) not in (0, spec.num_classes):
            raise ValueError(f"damaged: {len(spec.class_names)} class_names of {spec.num_classes} classes")
        return spec

    def differences(self, other: DataSpec) -> list[str]:
        """One "field: mine, not theirs" a field that differs; the VAE counts by its weights, not by its name."""
        mine, theirs = ({**spec.to_dict(), **spec.vae} for spec in (self, other))
        for spec in (mine, theirs):
            del spec["vae"]
            if spec["sha256"]:
                del spec["path"]
        keys = {**mine, **theirs}
        return [f"{key}: {mine.get(key)}, not {theirs.get(key)}" for key in keys if mine.get(key) != theirs.get(key)]


class MomentsDataset(Dataset[tuple[Tensor, int]]):
    """Moments (M, h, w), or images that `vae.sample` encodes, and labels by (index, mirror)."""

    spec: DataSpec
    labels: Tensor
    """int64 (len,)."""
    in_memory: bool
    """Whether reading costs nothing, so that loader processes would not help."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, item: Item) -> tuple[Tensor, int]:
        moments, labels = self.__getitems__([item])
        return moments[0], int(labels[0])

    @abstractmethod
    def __getitems__(self, items: Sequence[Item]) -> tuple[Tensor, Tensor]:
        """Moments (N, M, h, w) and labels int64 (N,); a DataLoader calls it with whole batches."""


class LatentDataset(MomentsDataset):
    """Shards written by `vcagen encode`, memory-mapped: nothing is opened or parsed per item.

    Items are moments (M, h, w) in the storage type. Loader processes share the maps; spawned ones open the set again.

    Args:
        path: folder of moments_00000.npy, ... (n, 2, M, h, w), labels.npy (N,) and shards.json, which describes them.
        scaling_factor, shift_factor: take the place of those that the VAE had.

    Attribute: `latent_std`, of up to 256 items.

    Raises:
        ValueError: not a complete folder of shards, or latents that are not finite and of about unit size.
    """

    in_memory = False

    def __init__(
        self, path: str | Path, *, scaling_factor: float | None = None, shift_factor: float | None = None
    ) -> None:
        self.path = Path(path)
        self._given = {"scaling_factor": scaling_factor, "shift_factor": shift_factor}
        refuse_format_1(self.path)
        if not (self.path / "shards.json").exists():
            found = "no latents; make them by vcagen encode, or train from images by data.from_images=true"
            if shards := len(list(self.path.glob("moments_*.npy"))):
                found = f"{shards} latent shards, but not all; the same encode command completes them"
            raise ValueError(f"{path}: {found}")
        self._record = record = read_json(self.path / "shards.json", ShardSet)
        with reading(self.path / "shards.json"):
            vae = {**record["vae"], **with_given_scale(record["vae"], self._given)}
            self.spec = spec = DataSpec.of(vae, record["image_size"], record["class_names"])
        self.dtype: torch.dtype = getattr(torch, record["dtype"])
        counts = [shard["count"] for shard in record["shards"]]
        if len(list(self.path.glob("moments_*.npy"))) > len(counts):
            raise ValueError(f"{path}: more shards than the {len(counts)} of shards.json; encode again")
        self._starts = np.cumsum([0, *counts])
        self._files = [shard_file(self.path, index) for index in range(len(counts))]
        self._shards: list[Any] = []
        for file, count in zip(self._files, counts, strict=True):
            with reading(file):  # as bits: NumPy has no bfloat16
                moments = np.load(file, mmap_mode="r").view(np.ndarray).view(np.int16)
                parts = (1,) if spec.vae["path"] == "identity" else (2, 1)  # mean and log-variance, or a latent alone
                fit = [(count, 2, n * spec.channels, spec.height, spec.width) for n in parts]
                if moments.shape not in fit:
                    raise ValueError(f"holds {moments.shape}, shards.json says {fit[0]}; encode again")
                self._shards.append(moments)
        with reading(self.path / "labels.npy"):
            labels = np.load(self.path / "labels.npy")
            known = (labels >= 0) & (labels < spec.num_classes)
            if labels.shape != (sum(counts),) or labels.dtype != np.int64 or not known.all():
                raise ValueError(f"not {sum(counts)} labels of {spec.num_classes} classes; encode again")
            self.labels = torch.from_numpy(labels)
        self._check_values()

    def _check_values(self) -> None:
        """Look at up to 256 items and their mirror images."""
        sample = np.unique(np.linspace(0, len(self) - 1, 256).astype(np.int64)).tolist()
        for mirror in (True, False):
            moments, _ = self.__getitems__([(index, mirror) for index in sample])
            if rows := non_finite_rows(moments):
                index = sample[rows[0]]
                shard = int(np.searchsorted(self._starts, index, side="right")) - 1
                item = f"{self._files[shard]}: item {index - self._starts[shard]}"
                what = "the mirror image" if mirror else "the image"
                raise ValueError(f"{item}: NaN or infinity in the latent of {what}")
        if self.spec.vae["path"] == "identity":
            self.latent_std = float(moments.double().std(correction=0))
        else:
            self.latent_std = latent_std(moments, self.spec.vae)
            check_std(self.latent_std, self.path, self.spec.vae)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(LatentDataset, self.path, **self._given), ()

    def __getitems__(self, items: Sequence[Item]) -> tuple[Tensor, Tensor]:
        """Moments (N, M, h, w) in the storage type, and labels int64 (N,)."""
        indices = np.array([index for index, _ in items], dtype=np.int64)
        shards = np.searchsorted(self._starts, indices, side="right") - 1
        offsets = indices - self._starts[shards]
        bits = torch.int16 if self.dtype.itemsize == 2 else torch.int32
        out = torch.empty((len(items), *self._shards[0].shape[2:]), dtype=bits)
        if get_worker_info() is not None:
            out.share_memory_()  # saves a copy on the way to the main process
        rows = out.numpy()
        for row, (shard, offset, (_, mirror)) in enumerate(zip(shards.tolist(), offsets.tolist(), items, strict=True)):
            rows[row] = self._shards[shard][offset, int(mirror)]
        return out.view(self.dtype), self.labels[torch.from_numpy(indices)]

    def names(self) -> list[str]:
        """Source paths relative to the image folder, in order."""
        return read_json(self.path / "names.json", Names)["names"]

    def verify(self) -> None:
        """Read all shards, to see that they are those that were written.

        Raises:
            ValueError: damaged shards.
        """
        records = enumerate(self._record["shards"])
        files = {shard_file(self.path, i): record["sha256"] for i, record in records if "sha256" in record}
        if "labels_sha256" in self._record:
            files[self.path / "labels.npy"] = self._record["labels_sha256"]
        bar = tqdm(files.items(), desc="checking", unit="file", disable=None)
        bad = [file.name for file, expected in bar if sha256(file) != expected]
        if bad:
            raise ValueError(
                f"{self.path}: damaged: {few(bad)}: not as written (SHA-256); delete them and encode again"
            )


class ImageDataset(MomentsDataset):
    """Images that `vae.sample` encodes in the training loop: a built-in set, or a small folder.

    Items are uint8 (C, H, W). `indices` are the images to use; default: all.
    """

    def __init__(self, images: ImageSet, vae: LatentVAE, indices: Sequence[int] | None = None) -> None:
        self.spec = DataSpec.of(vae.description(), images.image_size, images.class_names)
        self.in_memory = images.in_memory
        self._images = images
        self._indices = range(len(images)) if indices is None else indices
        self.labels = torch.tensor([images.labels[index] for index in self._indices], dtype=torch.int64)

    def __getitems__(self, items: Sequence[Item]) -> tuple[Tensor, Tensor]:
        """Images uint8 (N, C, H, W), and labels int64 (N,)."""
        images = [self._images[self._indices[index]] for index, _ in items]
        flipped = [image.flip(-1) if mirror else image for image, (_, mirror) in zip(images, items, strict=True)]
        return torch.stack(flipped), self.labels[[index for index, _ in items]]


def shard_file(folder: Path, index: int) -> Path:
    """Where the moments of a shard lie."""
    return folder / f"moments_{index:05d}.npy"


def refuse_format_1(folder: Path) -> None:
    """Raise ValueError for shards as earlier versions wrote them."""
    if next(folder.glob("shard_*.safetensors"), None):
        raise ValueError(f"{folder}: latents of format 1, which commit a5c3076 of vcagen reads; encode them again")


def latent_std(moments: Tensor, vae: dict[str, Any]) -> float:
    """Standard deviation of the scaled latents that these moments (N, 2C, h, w) give, over all elements.

    Moments of C channels are latents that somebody sampled already.
    """
    scale = LatentScale(vae)
    if moments.shape[1] == vae["channels"]:
        return float(scale.scale(moments.double()).std(correction=0))
    return scale.std_of(moments)


def check_std(std: float, where: str | Path, vae: dict[str, Any]) -> None:
    """Raise ValueError for latents that are not of about unit size: unscaled, scaled twice, or of another VAE."""
    low, high = STD_RANGE
    if not low <= std <= high:
        cause = f"unscaled, scaled twice, or not of the VAE {vae['path']}"
        factor = f"--scaling_factor {vae['scaling_factor'] / std:.4g}" if std else "no factor"
        raise ValueError(
            f"{where}: latents have std {std:.3g} after scaling, expected {low} to {high}; {cause}. If they are right, "
            f"{factor} gives std 1 (to encode; to train.py --vae.scaling_factor)"
        )


def vae_options(config: VaeConfig, device: str | torch.device) -> dict[str, Any]:
    """The keyword arguments of LatentVAE that say how, not what."""
    return {**{key: value for key, value in asdict(config).items() if key != "path"}, "device": device}


def open_vae(images: ImageSet, path: str, config: VaeConfig, device: str | torch.device = "cpu") -> LatentVAE:
    """The vae for images that come from `path`; those of a built-in set are trained in pixel space.

    Raises:
        ValueError: as LatentVAE, or one that does not fit the images.
    """
    if is_dataset(path) and config.path not in (None, "identity"):
        raise ValueError(f"vae.path: {config.path}; {path} is trained in pixel space, by identity")
    default = "identity" if is_dataset(path) else DEFAULT_VAE
    vae = LatentVAE(config.path or default, channels=images.channels, **vae_options(config, device))
    if images.channels != vae.image_channels:
        grey = " (grayscale makes it 1 or 3)" if not is_dataset(path) else ""
        raise ValueError(f"vae: {vae.path} takes images of {vae.image_channels} channels, not {images.channels}{grey}")
    if images.image_size % vae.downsample:
        raise ValueError(f"image_size: {images.image_size}; the VAE {vae.path} takes multiples of {vae.downsample}")
    return vae


def open_dataset(
    config: DataConfig, vae: VaeConfig, *, device: str | torch.device = "cpu"
) -> tuple[MomentsDataset, LatentVAE]:
    """The training set that `config` names, and its vae; with shards the VAE is not touched before a decode.

    Raises:
        ValueError: no such data, or data of another VAE or image size than asked for.
    """
    if is_dataset(config.path) or config.from_images:
        return _open_images(config, vae, device)
    from vcagen.data.sampled_latents import open_sampled, sampled_files  # a kind of LatentDataset

    if sampled_files(config.path):
        return open_sampled(config, vae, device)
    shards = LatentDataset(config.path, scaling_factor=vae.scaling_factor, shift_factor=vae.shift_factor)
    if (side := config.images.image_size) not in (None, shards.spec.image_size):
        raise ValueError(f"data.images.image_size: {side}; {config.path} was made with {shards.spec.image_size}")
    made_with = shards.spec.vae["path"]
    rebuilt = LatentVAE.from_description(shards.spec.vae, path=vae.path, near=config.path, **vae_options(vae, device))
    if vae.path not in (None, made_with):
        if "identity" in (vae.path, made_with):
            raise ValueError(f"vae.path: {vae.path}; {config.path} was made with {made_with}")
        rebuilt.verify()
    return shards, rebuilt


def open_given(
    dataset: ImageSet | MomentsDataset, vae: VaeConfig, *, device: str | torch.device = "cpu"
) -> tuple[MomentsDataset, LatentVAE]:
    """A training set made elsewhere, images as `open_dataset` would use them, and its vae.

    Raises:
        ValueError: a VAE that does not fit.
    """
    if isinstance(dataset, ImageSet):
        opened = open_vae(dataset, "", vae, device)
        return ImageDataset(dataset, opened), opened
    return dataset, LatentVAE.from_description(dataset.spec.vae, path=vae.path, **vae_options(vae, device))


def _open_images(config: DataConfig, vae: VaeConfig, device: str | torch.device) -> tuple[ImageDataset, LatentVAE]:
    """A set of images, each of which is read once to find the bad ones."""
    images = open_images(config.path, config.images)
    opened = open_vae(images, config.path, vae, device)
    bad: dict[int, str] = {}
    if not images.in_memory:
        batches = [range(i, min(i + 32, len(images))) for i in range(0, len(images), 32)]
        for _, found in read_batches(images, batches, config.num_workers):
            bad |= found
    if config.images.on_bad_image == "error":
        refuse_bad(images, bad, config.path)
    kept = [index for index in range(len(images)) if index not in bad]
    if not config.images.allow_empty_classes or not kept:
        refuse_lost_classes(images, kept, config.path)
    return ImageDataset(images, opened, kept), opened
