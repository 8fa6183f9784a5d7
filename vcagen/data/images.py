"""Images as the project sees them: colour modes, the ADM centre crop, one rounding rule, sources, built-in sets.

Encoding, training from images and reference statistics all read pixels here, so they see the same ones.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFile, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vcagen.config.options import ImageConfig
from vcagen.data.archives import list_tar, list_zip
from vcagen.data.fashion import fashion
from vcagen.data.image_set import ImageSet
from vcagen.data.listing import EXTENSIONS, Listing, other_extensions
from vcagen.data.parquet import list_parquet, parquet_files
from vcagen.system.files import few


def to_uint8(x: Tensor) -> Tensor:
    """Pixels in [-1, 1] to 0..255: floor((x + 1) * 127.5 + 0.5), clamped. x must be finite."""
    return ((x.float() + 1) * 127.5 + 0.5).floor().clamp(0, 255).to(torch.uint8)


def from_uint8(x: Tensor) -> Tensor:
    """Pixels 0..255 to float32 in [-1, 1]."""
    return x.float() / 127.5 - 1


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """Square centre crop of side `size`, as in ADM and DiT: box halving, bicubic to the short side, crop."""
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def read_image(path: str | Path, file: Path | IO[bytes] | None = None) -> Image.Image:
    """Read a file of any colour mode as 8-bit RGB; `file`, where it is given, is the open file and `path` its name.

    16 bits are scaled to 8 and rounded; alpha is dropped and EXIF orientation ignored, as behind the published numbers.

    Raises:
        ValueError: the file cannot be decoded to its last pixel, or its mode has no defined range.
    """
    with decoding(path, file) as image:
        layout = _layout(image)
        image.load()
        rgb = _to_rgb(image)
    if layout not in OTHER_BYTE:
        return rgb
    with decoding(path, file) as image:  # Pillow keeps the high bytes of 16-bit colours: now the low ones
        other = OTHER_BYTE[layout]
        tiles: list[Any] = [  # plain tuples are enough, and all there is in Pillow 10
            (*tile[:3], (other, *tile[3][1:]) if isinstance(tile[3], tuple) else other) for tile in image.tile
        ]
        image.tile = tiles
        low = np.asarray(image)[:, :, [1, 1, 1] if layout == "LA;16B" else [0, 1, 2]]
    return _from_16_bits(np.asarray(rgb).astype(np.int64) * 256 + low)


OTHER_BYTE = {
    "RGB;16B": "RGB;16L", "RGBA;16B": "RGBA;16L", "RGB;16L": "RGB;16B", "RGBA;16L": "RGBA;16B",
    "RGB;16N": f"RGB;16{'B' if sys.byteorder == 'little' else 'L'}", "LA;16B": "RGBA",
}  # fmt: skip
"""Pillow's name of a layout of 16-bit colours in a file, and of one whose high bytes are the low bytes of the first."""


def _layout(image: ImageFile.ImageFile) -> str:
    """Pillow's name of how pixels lie in the file of an image that is not loaded yet."""
    found = image.tile[0][3] if image.tile else ""
    return str(found[0]) if isinstance(found, tuple) and found else str(found)


def _from_16_bits(values: NDArray[np.int64]) -> Image.Image:
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


@contextmanager
def decoding(path: str | Path, file: Path | IO[bytes] | None = None) -> Iterator[ImageFile.ImageFile]:
    """Open an image; whatever Pillow's decoders raise on a broken one becomes one ValueError that names it."""
    try:
        with Image.open(path if file is None else file) as image:
            yield image
    except MemoryError:
        raise
    except Exception as error:  # SyntaxError, struct.error, ...
        reason = "not an image" if isinstance(error, UnidentifiedImageError) else error
        raise ValueError(f"{path}: unreadable image ({reason})") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode == "F":
        raise ValueError("floating-point pixels have no defined range")
    if image.mode.startswith("I"):  # 16-bit grey: convert() would clip it
        values = np.asarray(image, dtype=np.int64)
        wide = image.mode == "I" and image.format == "TIFF"  # 16 bits of other formats may come as "I" too
        if wide or values.min() < 0 or values.max() > 65535:
            raise ValueError("32-bit pixels have no defined range")
        image = _from_16_bits(values)
    return image.convert("RGB")


def to_pixels(image: Image.Image, size: int | None, *, grayscale: bool = False) -> Tensor:
    """uint8 (3, H, W) of an RGB image, or (1, H, W) of its luma (ITU-R 601), centre-cropped to `size` if that is given.

    A grey image has its own values as luma.
    """
    image = image.convert("L") if grayscale else image
    pixels = np.array(image if size is None else center_crop(image, size))
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1)


@dataclass(frozen=True)
class ImageFolder:
    """The images of a folder, in the one order that every listing gives."""

    root: Path
    paths: tuple[str, ...]
    """Posix paths relative to root, sorted by class, then by name."""
    labels: tuple[int, ...]
    class_names: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """What may hold images and is not listed; folders end in a slash."""

    def open(self, index: int) -> Path:
        """Where the image of that index lies."""
        return self.root / self.paths[index]


def scan_images(folder: str | Path, *, allow_empty_classes: bool = False, flat: bool = False) -> ImageFolder:
    """List the images of a folder whose sub-folders are the classes, sorted by name; without sub-folders: one class.

    Names that start with a dot, sub-folders that start with an underscore, and kinds of images that are not of
    EXTENSIONS are left out and named; extensions compare in lower case. Sub-folders without images are no classes where
    images lie beside them.

    Args:
        flat: take the images that lie beside sub-folders with images, and leave those out.

    Raises:
        ValueError: not a folder, no images, a class without images, images beside class folders that are not `flat`, or
            images below a class folder's own sub-folder.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"{folder}: not a folder of images")
    class_names, beside, left_out = _list(root)
    if beside:
        full = [name for name in class_names if _holds_images(root / name)]
        if full and not flat:
            raise ValueError(f"{folder}: {len(beside)} images lie beside the class folders ({few(full)})")
        class_names, left_out = [], [*(f"{name}/" for name in full), *left_out]
    paths = beside
    labels, empty = [0] * len(paths), list[str]()
    for label, name in enumerate(class_names):
        nested, files, others = _list(root / name)
        if deep := [other for other in nested if _holds_images(root / name / other)]:
            raise ValueError(f"{root / name / deep[0]}: images two folders down; class folders lie directly in {root}")
        if not files:
            empty.append(name)
        paths += [f"{name}/{file}" for file in files]
        labels += [label] * len(files)
        left_out += [f"{name}/{other}" for other in others]
    if not paths:
        raise ValueError(f"{folder}: no images; extensions read are {' '.join(EXTENSIONS)}{_left_out(left_out)}")
    if empty and not allow_empty_classes:
        names = few(empty, 20)
        raise ValueError(f"{folder}: {names}: class folder without images; remove it, or give allow_empty_classes")
    return ImageFolder(root, tuple(paths), tuple(labels), tuple(class_names) or ("image",), tuple(left_out))


def _left_out(names: Sequence[str]) -> str:
    return f"; left out: {few(names, 20)}" if names else ""


def _list(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Sorted names of the visible sub-folders, of the image files, and of what else may be or hold images."""
    folders, files, others = list[str](), list[str](), list[str]()
    with os.scandir(folder) as entries:
        for entry in entries:
            hidden = entry.name.startswith(".")
            if entry.is_dir():
                if not (hidden or entry.name.startswith("_")):
                    folders.append(entry.name)
                elif _holds_images(Path(entry.path)):
                    others.append(f"{entry.name}/")
            elif entry.name.lower().endswith(EXTENSIONS):
                (others if hidden else files).append(entry.name)
            elif not hidden and Path(entry.name).suffix.lower() in other_extensions():
                others.append(entry.name)
    return sorted(folders), sorted(files), sorted(others)


def _holds_images(folder: Path) -> bool:
    """Whether there are images below a folder."""
    return any(name.lower().endswith(EXTENSIONS) for _, _, names in os.walk(folder) for name in names)


def find_images(path: str, *, allow_empty_classes: bool = False) -> Listing:
    """List the images of a folder, a tar, a zip or parquet files, read where they lie.

    Raises:
        ValueError: as `scan_images`, `list_tar`, `list_zip` and `list_parquet`, or another kind of file.
    """
    if list_archive := archive_kind(path):
        listing = list_archive(path).check(allow_empty_classes=allow_empty_classes)
    elif Path(path).is_dir():
        folder = scan_images(path, allow_empty_classes=allow_empty_classes)
        listing = Listing(path, folder.paths, folder.labels, folder.class_names, folder.open, folder.left_out)
    else:
        found = "no images" if Path(path).exists() else "no such folder or file"
        raise ValueError(f"{path}: {found}; a folder, an uncompressed tar, a zip or parquet files are read")
    if listing.left_out and int(os.environ.get("RANK", "0")) == 0:
        print(f"note: {path}{_left_out(listing.left_out)}", file=sys.stderr)
    return listing


def archive_kind(path: str) -> Callable[[str], Listing] | None:
    """What lists the images of an archive of that kind; None where there is none, but a folder of images perhaps."""
    if parquet_files(path):
        return list_parquet
    if not Path(path).is_file():
        return None
    with Path(path).open("rb") as file:
        start = file.read(263)
    if start[:2] == b"PK":
        return list_zip
    return list_tar if start[257:262] == b"ustar" or path.endswith(".tar") else None


def digits(argument: str = "") -> ImageSet:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, one channel.

    Raises:
        ValueError: scikit-learn is not installed, or something follows the name.
    """
    if argument:
        raise ValueError(f"digits:{argument}; the digits are one set, nothing follows their name")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError('digits: scikit-learn is missing; pip install "vcagen[quickstart]"') from error
    data = load_digits()
    pixels = to_uint8(torch.from_numpy(data.images)[:, None].float() / 8 - 1)  # stored as 0..16
    names = [f"digits/{i:04d}" for i in range(len(pixels))]
    return ImageSet(names, data.target.tolist(), list("0123456789"), 1, 8, pixels.__getitem__, in_memory=True)


DATASETS: dict[str, Callable[[str], ImageSet]] = {"digits": digits, "fashion": fashion}
"""Sets that a word stands for, `NAME` or `NAME:FOLDER`: name -> constructor, which gets the folder or "".

They are trained in pixel space.
"""


def is_dataset(path: str) -> bool:
    """Whether `path` names a set of DATASETS."""
    return path.partition(":")[0] in DATASETS


def open_dataset_images(path: str) -> ImageSet:
    """The set of DATASETS that `path` names."""
    name, _, argument = path.partition(":")
    return DATASETS[name](argument)


def open_images(path: str, config: ImageConfig) -> ImageSet:
    """The images that `find_images` lists, centre-cropped, or a set of DATASETS.

    Raises:
        ValueError: as `find_images`, or another image size or other channels than a set of DATASETS has.
    """
    if is_dataset(path):
        images = open_dataset_images(path)
        if config.image_size not in (None, images.image_size):
            raise ValueError(f"image_size: {config.image_size}; {path} has {images.image_size}")
        if config.grayscale and images.channels != 1:
            raise ValueError(f"grayscale: {path} has {images.channels} channels")
        return images
    found = find_images(path, allow_empty_classes=config.allow_empty_classes)
    size = config.image_size or 256
    read = partial(read_listed, found, size, config.grayscale)
    channels = 1 if config.grayscale else 3
    return ImageSet(found.names, found.labels, found.class_names, channels, size, read, crop="adm-center")


def read_listed(listing: Listing, size: int | None, grayscale: bool, index: int) -> Tensor:
    """Pixels of the image of that index, as `to_pixels`. Raises ValueError for one that cannot be read."""
    return to_pixels(read_image(listing.place(index), listing.open(index)), size, grayscale=grayscale)


Batch = tuple[Tensor, dict[int, str]]
"""The images of a batch that can be read, uint8 (n, C, H, W), and index -> reason of the others."""


def read_batches(images: ImageSet, batches: Iterable[Sequence[int]], num_workers: int) -> Iterator[Batch]:
    """The images of each batch of indices; `num_workers` processes read ahead."""
    loader: DataLoader[Batch] = DataLoader(
        _Batches(images),
        sampler=batches,
        batch_size=None,  # an item is a batch already
        num_workers=0 if images.in_memory else num_workers,
    )
    return iter(loader)


@dataclass(frozen=True)
class _Batches(Dataset[Batch]):
    images: ImageSet

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        good, bad = [], {}
        for index in indices:
            try:
                good.append(self.images[index])
            except ValueError as error:
                bad[index] = str(error)
        side = self.images.image_size
        return torch.stack(good) if good else torch.empty(0, self.images.channels, side, side, dtype=torch.uint8), bad


def refuse_bad(images: ImageSet, bad: Mapping[int, str], where: str | Path) -> None:
    """Raise ValueError if there are bad images, by index with reasons, after all are listed on stderr."""
    if bad:
        print("\n".join(f"  {reason}" for reason in bad.values()), file=sys.stderr, flush=True)
        names = few([images.names[index] for index in bad], 20)
        raise ValueError(f"{where}: {len(bad)} unreadable images: {names}; repair them, or on_bad_image=skip")


def refuse_lost_classes(images: ImageSet, kept: Iterable[int], where: str | Path) -> None:
    """Raise ValueError if a class has images, but none among those that are `kept`."""
    if lost := sorted(set(images.labels) - {images.labels[index] for index in kept}):
        raise ValueError(f"{where}: no readable image in {few([images.class_names[label] for label in lost], 20)}")
