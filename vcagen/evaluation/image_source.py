"""uint8 images of one shape, in a fixed order: sample folders, reference folders, ADM .npz files, built-in sets."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vcagen.data.image_set import ImageSet
from vcagen.data.images import (
    decoding,
    find_images,
    is_dataset,
    open_dataset_images,
    read_batches,
    read_listed,
    scan_images,
)
from vcagen.evaluation.extractor import Shape
from vcagen.system.files import few, reading

CROP = "crop all to one size: vcagen stats FOLDER --image_size SIDE"


@dataclass(frozen=True)
class ImageSource:
    """Images of one shape, at least two, where they come from, and what is to be said about them."""

    kind: str
    """folder, archive, npz or the name of a built-in set"""
    path: str
    images: ImageSet
    shape: Shape
    num_workers: int = 0
    """Processes that decode files."""
    files: Sequence[Path] = ()
    """Where the images lie."""
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.count < 2:
            raise ValueError(f"{self.path}: {self.count} image; scores need at least 2")

    @property
    def count(self) -> int:
        """Number of images."""
        return len(self.images)

    def read(self, batches: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Read the images of these batches of indices, uint8 (N, C, H, W).

        Raises:
            ValueError: a broken image.
        """
        workers = min(self.num_workers, os.cpu_count() or 1, len(batches) // 8)  # processes start slowly
        for images, bad in read_batches(self.images, batches, workers):
            for reason in bad.values():
                raise ValueError(reason)
            yield images


def spans(start: int, stop: int, size: int) -> list[range]:
    """Cut start .. stop-1 into consecutive ranges of `size`, the last one shorter."""
    return [range(i, min(i + size, stop)) for i in range(start, stop, size)]


def open_samples(path: str, *, num_workers: int = 4, expected: int | None = None) -> ImageSource:
    """Open images that somebody generated: a folder of 8-bit RGB (or all 8-bit grey) files of one size, or an ADM .npz.

    Reads every header before it returns. A folder is taken in the order of `scan_images`; of an output folder of
    sample.py, the images/ in it.

    Raises:
        ValueError: nothing there, a file of another mode or size, fewer than 2 images, or not `expected` images.
    """
    if (Path(path) / "manifest.json").is_file():
        path = str(Path(path) / "images")
    whole = is_dataset(path) or is_npz(path)
    source = open_images(path) if whole else _open_sample_folder(path, num_workers)
    if expected is not None and source.count != expected:
        extra = [] if whole else source.images.names[expected:]
        found = f"{expected} expected (too many: {few(extra, 5)})" if extra else f"{expected} expected"
        raise ValueError(f"{path}: {source.count} images, {found}; give --num_images {source.count} to score them")
    return source


def open_images(
    path: str, *, image_size: int | None = None, num_workers: int = 4, grayscale: bool = False
) -> ImageSource:
    """Open real images: a folder or an archive, read and cropped as in training, an .npz with arr_0, or a built-in set.

    Raises:
        ValueError: nothing there, fewer than 2 images, or the first is unreadable.
    """
    if is_dataset(path):
        images = open_dataset_images(path)
        return ImageSource(path, path, images, (images.channels, images.image_size, images.image_size))
    if is_npz(path):
        return open_npz(path)
    listing = find_images(path)
    read = partial(read_listed, listing, image_size, grayscale)
    channels, height, width = read(0).shape
    source = _source(path, listing.names, read, (channels, height, width), num_workers)
    return source if Path(path).is_dir() else replace(source, kind="archive")


def _open_sample_folder(path: str, num_workers: int) -> ImageSource:
    folder = scan_images(path, allow_empty_classes=True, flat=True)
    files = [folder.root / name for name in folder.paths]
    with ThreadPoolExecutor(max(1, num_workers)) as pool:
        headers = list(pool.map(_header, files))
    mode, width, height = headers[0]
    for file, header in zip(files, headers, strict=True):
        if header != headers[0] or header[0] not in ("RGB", "L"):
            found, first = (f"{m} {w} x {h}" for m, w, h in (header, headers[0]))
            raise ValueError(f"{file}: {found}; all must be 8-bit RGB, or 8-bit grey, as {files[0].name}: {first}")
    warnings = []
    if any(file.suffix.lower() in (".jpg", ".jpeg", ".webp") for file in files):
        warnings.append("samples were stored with loss (JPEG or WebP): scores differ from those of lossless files")
    if folder.left_out:
        warnings.append(f"{path}: left out: {few(folder.left_out, 20)}")
    if len(folder.class_names) > 1:
        warnings.append("samples are sorted by class: IS, over chunks of 5,000 in order, comes out too low")
    shape = (3 if mode == "RGB" else 1, height, width)
    source = _source(path, folder.paths, partial(_read_sample, files), shape, num_workers)
    return replace(source, files=files, warnings=warnings)


def _source(
    path: str, names: Sequence[str], read: Callable[[int], Tensor], shape: Shape, num_workers: int
) -> ImageSource:
    images = ImageSet(names, (), (), shape[0], shape[1], partial(_read_shaped, path, names, read, shape))
    return ImageSource("folder", path, images, shape, num_workers)


def _read_shaped(path: str, names: Sequence[str], read: Callable[[int], Tensor], shape: Shape, index: int) -> Tensor:
    pixels = read(index)
    if pixels.shape != shape:
        found, first = (f"{w} x {h}" for _, h, w in (pixels.shape, shape))
        raise ValueError(f"{path}/{names[index]}: {found} pixels, the first image has {first}; {CROP}")
    return pixels


def _read_sample(files: Sequence[Path], index: int) -> Tensor:
    with decoding(files[index]) as image:
        return _pixels(image.convert("RGB") if image.mode == "RGBA" else image)


def _pixels(image: Image.Image) -> Tensor:
    array = np.array(image, dtype=np.uint8)  # (H, W) or (H, W, C)
    return torch.from_numpy(array if array.ndim == 3 else array[:, :, None]).permute(2, 0, 1)


def _header(file: Path) -> tuple[str, int, int]:
    """Mode, width and height; a PNG of another depth than 8 bits has it in the mode, RGBA that is opaque is RGB."""
    with decoding(file) as image:
        mode = image.mode
        if image.format == "PNG" and mode in ("RGB", "RGBA", "L"):
            with file.open("rb") as raw:
                mode = mode if (bits := raw.read(25)[24]) == 8 else f"{bits}-bit {mode}"
        if mode == "RGBA" and image.getchannel("A").getextrema() == (255, 255):
            mode = "RGB"
        return mode, *image.size


def is_npz(path: str) -> bool:
    """Whether a file is an archive of NumPy arrays, by its content.

    Raises:
        ValueError: it is called so and is none.
    """
    if zipfile.is_zipfile(path):
        with reading(path), zipfile.ZipFile(path) as archive:
            return all(name.endswith(".npy") for name in archive.namelist())
    if Path(path).suffix == ".npz" and Path(path).is_file():
        raise ValueError(f"{path}: not an .npz file, or one that is cut short")
    return False


def open_npz(path: str) -> ImageSource:
    """Open the images `arr_0`, uint8 (N, H, W, C) with C 1 or 3, of an .npz file; they are streamed, never read whole.

    Raises:
        ValueError: no such file, no such array, pickled objects, or another shape or type.
    """
    with reading(path), zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if "arr_0.npy" not in names:
            raise ValueError(f"holds {', '.join(names) or 'nothing'}; images must be in arr_0")
        with archive.open("arr_0.npy") as member:
            shape, fortran, dtype = _npy_header(member)
            size = archive.getinfo("arr_0.npy").file_size - member.tell()
        if dtype != np.uint8 or len(shape) != 4 or shape[3] not in (1, 3) or min(shape) < 1 or fortran:
            order = ", Fortran order" if fortran else ""
            raise ValueError(f"arr_0 is {dtype} {shape}{order}; it must be uint8 (N, H, W, 3) or (N, H, W, 1)")
        if size != math.prod(shape):
            raise ValueError(f"arr_0 holds {size} bytes, its header says {shape}")
    warnings = []
    if "mu.npy" in names:
        warnings.append(f"{path} also holds statistics, which the ADM evaluator would use; the images are scored")
    if "arr_1.npy" in names and _labels_sorted(path):
        warnings.append("samples are sorted by label: IS, over chunks of 5,000 in order, comes out too low")
    count, height, width, channels = shape
    read = _NpzReader(path, (height, width, channels))
    images = ImageSet([""] * count, (), (), channels, height, read, in_memory=True)
    return ImageSource("npz", path, images, (channels, height, width), files=[Path(path)], warnings=warnings)


class _NpzReader:
    """Reads image by image through one open member, in order at full speed, otherwise by reading up to the image."""

    def __init__(self, path: str, shape: tuple[int, int, int]) -> None:
        self._path, self._shape = path, shape
        self._member: IO[bytes] | None = None
        self._start = 0

    def __call__(self, index: int) -> Tensor:
        size = math.prod(self._shape)
        with reading(self._path):
            if self._member is None:
                self._member = zipfile.ZipFile(self._path).open("arr_0.npy")  # noqa: SIM115
                _npy_header(self._member)
                self._start = self._member.tell()
            if self._member.tell() != (place := self._start + index * size):
                self._member.seek(place)
            data = bytearray(self._member.read(size))
            return torch.frombuffer(data, dtype=torch.uint8).view(self._shape).permute(2, 0, 1)


def _npy_header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    if np.lib.format.read_magic(member) == (1, 0):
        return np.lib.format.read_array_header_1_0(member)
    return np.lib.format.read_array_header_2_0(member)  # 3.0 differs in the names of fields, which images have not


def _labels_sorted(path: str) -> bool:
    with reading(path), np.load(path, allow_pickle=False) as file:
        labels = file["arr_1"]
    return labels.ndim == 1 and len(labels) > 1 and labels[0] != labels[-1] and bool((labels[1:] >= labels[:-1]).all())
