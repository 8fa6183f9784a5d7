"""Fashion-MNIST: 60,000 training and 10,000 test images of ten kinds of clothes (arXiv 1708.07747, MIT licence)."""

from __future__ import annotations

import gzip
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch.nn import functional as F

from vcagen.data.image_set import ImageSet
from vcagen.system.files import reading

CLASSES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
SIDE = 28
PADDED = 32
"""Side of the padded images: 256, 64 and 16 tokens at the patch sizes 2, 4 and 8, as the paper's latents."""
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Where the Debian package dataset-fashion-mnist puts the files."""


def fashion(folder: str = "", split: Literal["train", "t10k"] = "train") -> ImageSet:
    """The training or the test (t10k) images, one channel, padded with black to 32 x 32.

    Args:
        folder: of the four IDX files, with or without .gz. Default: torch's cache folder, or where the Debian package
            dataset-fashion-mnist puts them; in neither, torchvision downloads them to the cache.

    Raises:
        ValueError: files that are missing, truncated or not of this set.
    """
    images_file, labels_file = (_find(folder, f"{split}-{name}-ubyte") for name in ("images-idx3", "labels-idx1"))
    images, labels = _read_idx(images_file), _read_idx(labels_file)
    if images.shape[1:] != (SIDE, SIDE):
        raise ValueError(f"{images_file}: an array {images.shape}; needs (N, {SIDE}, {SIDE})")
    if labels.shape != images.shape[:1] or labels.max(initial=0) >= len(CLASSES):
        raise ValueError(f"{labels_file}: no labels 0 to {len(CLASSES) - 1} of the {len(images)} images beside it")
    pixels = F.pad(torch.from_numpy(images)[:, None], [(PADDED - SIDE) // 2] * 4)
    names = [f"fashion/{split}/{i:05d}" for i in range(len(pixels))]
    return ImageSet(names, labels.tolist(), CLASSES, 1, PADDED, pixels.__getitem__, in_memory=True)


def _find(folder: str, name: str) -> Path:
    """The file `name` or `name`.gz."""
    cache = Path(torch.hub.get_dir()) / "FashionMNIST" / "raw"  # as torchvision lays it out
    places = [Path(folder)] if folder else [cache, DEBIAN]
    files = [place / file for place in places for file in (name, f"{name}.gz")]
    if (found := next((file for file in files if file.is_file()), None)) is not None:
        return found
    how = "apt-get install dataset-fashion-mnist, or give the folder of its four IDX files as fashion:FOLDER"
    if folder:
        raise ValueError(f"fashion: {folder}: no {name} or {name}.gz; {how}")
    try:
        _download(cache.parent.parent)
    except (OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].rstrip(":")
        raise ValueError(f"fashion: no {name} in {cache} or {DEBIAN}, and no download ({reason}); {how}") from error
    return cache / name


def _download(root: Path) -> None:
    from torchvision.datasets import FashionMNIST

    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / "FashionMNIST.lock"), redirect_stdout(sys.stderr):
        FashionMNIST(str(root), download=True)


def _read_idx(path: Path) -> NDArray[np.uint8]:
    """The array of bytes in an IDX file: 0, 0, 8 for bytes, the number of dimensions, their sizes as big-endian int32.

    Source of the format: yann.lecun.com/exdb/mnist.
    """
    with reading(path):
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        if data[:3] != bytes([0, 0, 8]):
            raise ValueError("not an IDX file of bytes")
        start = 4 + 4 * data[3]
        shape: Any = np.frombuffer(data[4:start], dtype=">i4").tolist()
        if len(shape) != data[3] or len(data) - start != np.prod(shape, dtype=np.int64):
            raise ValueError(f"truncated or too long: {len(data)} bytes for an array {tuple(shape)}")
        return np.frombuffer(bytearray(data[start:]), dtype=np.uint8).reshape(shape)
