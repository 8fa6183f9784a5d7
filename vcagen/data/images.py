"""Images as the project sees them: folders, colour modes, the ADM centre crop, the built-in digits, one rounding rule.

Encoding, training from images and reference statistics all read pixels here, so they see the same ones.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from tqdm import tqdm

from vcagen.config.options import ImageConfig

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


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


def read_image(path: str | Path) -> Image.Image:
    """Read a file of any colour mode as 8-bit RGB.

    16-bit grey is scaled to 8 bits; alpha is dropped and EXIF orientation ignored, as behind the published numbers.

    Raises:
        ValueError: the file cannot be decoded to its last pixel, or its mode has no defined range.
    """
    try:
        with Image.open(path) as image:
            image.load()
            return _to_rgb(image)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise anything on broken files: SyntaxError, struct.error, ...
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
        image = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    return image.convert("RGB")


def read_pixels(path: str | Path, size: int) -> Tensor:
    """Read a file, crop it, and return uint8 (3, size, size). Raises ValueError as `read_image`."""
    pixels = np.array(center_crop(read_image(path), size))
    return torch.from_numpy(pixels).permute(2, 0, 1)


@dataclass(frozen=True)
class ImageFolder:
    """The images of a folder, in the one order that every listing gives."""

    root: Path
    paths: tuple[str, ...]
    """Posix paths relative to root, sorted by class, then by name."""
    labels: tuple[int, ...]
    class_names: tuple[str, ...]

    def without(self, paths: Iterable[str]) -> ImageFolder:
        """The folder without these relative paths; classes keep their labels."""
        drop = set(paths)
        keep = [i for i, path in enumerate(self.paths) if path not in drop]
        kept = tuple(self.paths[i] for i in keep), tuple(self.labels[i] for i in keep)
        return ImageFolder(self.root, *kept, self.class_names)


def scan_images(folder: str | Path, *, allow_empty_classes: bool = False) -> ImageFolder:
    """List the images of a folder whose sub-folders are the classes, sorted by name; without sub-folders: one class.

    Names that start with a dot, and sub-folders that start with an underscore, are passed over; extensions compare in
    lower case.

    Raises:
        ValueError: not a folder, no images, a class without images, or images below a class folder's own sub-folder.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"{folder}: not a folder of images")
    class_names, files = _list(root)
    if not class_names:
        if not files:
            raise ValueError(f"{folder}: no images; extensions read are {' '.join(EXTENSIONS)}")
        return ImageFolder(root, tuple(files), (0,) * len(files), ("image",))

    paths: list[str] = []
    labels: list[int] = []
    empty: list[str] = []
    for label, name in enumerate(class_names):
        nested, files = _list(root / name)
        if deep := [other for other in nested if _list(root / name / other)[1]]:
            raise ValueError(f"{root / name / deep[0]}: images two folders down; class folders lie directly in {root}")
        if not files:
            empty.append(name)
        paths += [f"{name}/{file}" for file in files]
        labels += [label] * len(files)
    if not paths:
        raise ValueError(f"{folder}: no images in its {len(class_names)} folders")
    if empty and not allow_empty_classes:
        raise ValueError(
            f"{folder}: {_some(empty)}: class folder without images; remove it, or keep its label with "
            "allow_empty_classes"
        )
    return ImageFolder(root, tuple(paths), tuple(labels), tuple(class_names))


def _list(folder: Path) -> tuple[list[str], list[str]]:
    """Sorted names of the visible sub-folders and of the image files."""
    folders, files = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                if not entry.name.startswith("_"):
                    folders.append(entry.name)
            elif entry.name.lower().endswith(EXTENSIONS):
                files.append(entry.name)
    return sorted(folders), sorted(files)


def _some(names: Sequence[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def find_bad_images(
    folder: str | Path, paths: Sequence[str], workers: int, *, progress: bool = False
) -> list[tuple[str, str]]:
    """Decode every file in `workers` threads; return (path, reason) of those that `read_image` refuses, in order."""

    def reason(path: str) -> str | None:
        try:
            read_image(Path(folder) / path)
        except ValueError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(max(1, workers)) as pool:
        bar = tqdm(total=len(paths), desc="checking files", unit="img", disable=not progress)
        found: list[tuple[str, str]] = []
        # in portions: the pool takes all its tasks at once, millions of them for a large set
        for start in range(0, len(paths), 4096):
            part = paths[start : start + 4096]
            for path, why in zip(part, pool.map(reason, part), strict=True):
                if why is not None:
                    found.append((path, why))
                bar.update()
        bar.close()
    return found


def without_bad(folder: ImageFolder, bad: Sequence[tuple[str, str]], config: ImageConfig) -> ImageFolder:
    """The folder without the files that `find_bad_images` found, if `config.on_bad_image` lets them be skipped.

    Raises:
        ValueError: they may not be skipped, after they were all listed on stderr; or a class has no images left.
    """
    if not bad:
        return folder
    names = _some([path for path, _ in bad])
    if config.on_bad_image == "error":
        if int(os.environ.get("RANK", "0")) == 0:
            print("\n".join(f"  {reason}" for _, reason in bad), file=sys.stderr, flush=True)
        raise ValueError(f"{folder.root}: {len(bad)} unreadable images: {names}; repair them, or on_bad_image=skip")
    kept = folder.without(path for path, _ in bad)
    lost = sorted({folder.class_names[label] for label in set(folder.labels) - set(kept.labels)})
    if not kept.paths or (lost and not config.allow_empty_classes):
        raise ValueError(f"{folder.root}: no readable image in {_some(lost)}; unreadable: {names}")
    return kept


def load_digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's handwritten digits: uint8 (1797, 1, 8, 8) and labels int64 (1797,).

    Raises:
        ValueError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ValueError('digits: scikit-learn is missing; pip install "vcagen[quickstart]"') from error
    digits = datasets.load_digits()
    values = torch.from_numpy(digits.images).float()[:, None]  # 0..16
    return to_uint8(values / 8 - 1), torch.from_numpy(digits.target).long()


@dataclass(frozen=True)
class Pixels:
    """Cropped images by index, read when asked for."""

    names: tuple[str, ...]
    """Relative paths, or digits/0000 and so on."""
    labels: tuple[int, ...]
    class_names: tuple[str, ...]
    channels: int
    image_size: int
    read: Callable[[int], Tensor]
    """Index to uint8 (channels, image_size, image_size); ValueError for a file that cannot be read."""

    def __len__(self) -> int:
        return len(self.names)


def folder_pixels(folder: ImageFolder, image_size: int) -> Pixels:
    """The images of a folder, centre-cropped."""
    return Pixels(
        folder.paths, folder.labels, folder.class_names, 3, image_size,
        lambda index: read_pixels(folder.root / folder.paths[index], image_size),
    )  # fmt: skip


def digits_pixels() -> Pixels:
    """The built-in digits. Raises ValueError as `load_digits`."""
    images, labels = load_digits()
    names = tuple(f"digits/{i:04d}" for i in range(len(images)))
    return Pixels(names, tuple(labels.tolist()), tuple("0123456789"), 1, images.shape[-1], lambda index: images[index])
