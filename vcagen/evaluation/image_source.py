"""Streams of uint8 images in a fixed order: sample folders, reference folders, ADM .npz files, the built-in digits.

No source holds more than a few batches; an .npz is read through its zip member, never whole.
"""

from __future__ import annotations

import lzma
import math
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vcagen.data.images import center_crop, load_digits, read_image, scan_images
from vcagen.system.files import read_manifest, read_record

DAMAGED = (OSError, EOFError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, ValueError, RuntimeError, MemoryError)
"""What zipfile and numpy raise at an .npz that is none or is damaged."""
BROKEN = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""What Pillow raises at a broken or absurdly large image."""


@dataclass(frozen=True)
class ImageSource:
    """`count` images of one shape (C, H, W)."""

    kind: str
    """folder, npz or digits"""
    path: str
    count: int
    shape: tuple[int, int, int]
    batches: Callable[[int], Iterator[Tensor]]
    """Batch size -> uint8 tensors (N, C, H, W), in order; raises ValueError at a broken image."""
    warnings: list[str] = field(default_factory=list)


def open_samples(path: str, *, num_workers: int = 4, expected: int | None = None) -> ImageSource:
    """Images that somebody generated: a folder of 8-bit RGB (or all 8-bit grey) files of one size, or an ADM .npz.

    Every header is read before this returns. A folder is taken in the order of `scan_images`. Of an output folder of
    sample.py the images that it kept are taken: images/, else samples.npz.

    Raises:
        ValueError: nothing there, a file of another mode or size, less than 2 images, or not `expected` images.
    """
    path = _kept_images(path)
    if path == "digits" or Path(path).suffix == ".npz":
        source = open_images(path)
        extra: list[str] = []
    else:
        source, files = _open_sample_folder(path, num_workers)
        extra = [] if expected is None else files[expected:]
    if expected is not None and source.count != expected:
        names = f" (too many: {', '.join(extra[:5])}{', ...' if len(extra) > 5 else ''})" if extra else ""
        raise ValueError(
            f"{path}: {source.count} images, {expected} expected{names}; give --num_images {source.count} "
            "to score those that are there"
        )
    if source.count < 2:
        raise ValueError(f"{path}: {source.count} image; scores need at least 2")
    return source


def sample_manifest(path: str) -> dict[str, Any]:
    """What `sample.py` wrote about the samples at `path`, its output folder or the images in it; {} for others'."""
    file = _output_folder(path) / "manifest.json"
    return read_manifest(file) if file.is_file() else {}


def sample_facts(path: str) -> dict[str, Any]:
    """Entries of the result that only `sample.py` knows, as it left them in facts.json; {} for others' samples."""
    file = _output_folder(path) / "facts.json"
    made = read_record(file) if file.is_file() else {}
    return {name: made[name] for name in ("uint8_rule", "samples", "sampler", "model", "vae") if name in made}


def result_path(path: str, extractor: str) -> Path:
    """results.json beside the images, or beside the .npz, at `path`; above a folder called images.

    Where it holds scores of another extractor, results_EXTRACTOR.json instead.
    """
    file = _output_folder(path) / "results.json"
    before = read_record(file).get("extractor") if file.is_file() else None
    if isinstance(before, dict) and before.get("name") != extractor:
        return file.with_name(f"results_{extractor}.json")
    return file


def _kept_images(path: str) -> str:
    folder = Path(path)
    if not (folder / "manifest.json").is_file():
        return path
    for kept in (folder / "images", folder / "samples.npz"):
        if kept.exists():
            return str(kept)
    raise ValueError(f"{path}: sample.py kept no images here; make them with --png true or --npz true")


def _output_folder(path: str) -> Path:
    here = Path(path)
    if (here / "manifest.json").is_file():
        return here
    return here.parent if here.suffix == ".npz" or here.name == "images" or path == "digits" else here


def open_images(path: str, *, image_size: int | None = None, num_workers: int = 4) -> ImageSource:
    """Real images: a folder read and cropped as in training, an .npz with arr_0, or digits.

    Raises:
        ValueError: nothing there, unreadable images, or images of several sizes without `image_size`.
    """
    if path == "digits":
        images, _ = load_digits()
        shape = (images.shape[1], images.shape[2], images.shape[3])
        return ImageSource("digits", path, len(images), shape, lambda n: iter(torch.split(images, n)))
    if Path(path).suffix == ".npz":
        return open_npz(path)

    folder = scan_images(path)
    files = [folder.root / name for name in folder.paths]

    def decode(file: Path) -> Tensor:
        image = read_image(file)
        return _pixels(image if image_size is None else center_crop(image, image_size))

    first = decode(files[0])
    shape = (first.shape[0], first.shape[1], first.shape[2])

    def checked(file: Path) -> Tensor:
        pixels = decode(file)
        if pixels.shape != first.shape:
            raise ValueError(
                f"{file}: {pixels.shape[2]} x {pixels.shape[1]} pixels, the first image has {shape[2]} x {shape[1]}; "
                "crop all to one size: python -m vcagen stats FOLDER --image_size SIDE"
            )
        return pixels

    return ImageSource("folder", path, len(files), shape, lambda n: _decoded(files, checked, n, num_workers))


def _open_sample_folder(path: str, num_workers: int) -> tuple[ImageSource, list[str]]:
    if not Path(path).is_dir():
        raise ValueError(f"{path}: no such folder or .npz file of samples")
    folder = scan_images(path, allow_empty_classes=True)
    files = [folder.root / name for name in folder.paths]
    with ThreadPoolExecutor(max(1, num_workers)) as pool:
        headers = list(pool.map(_header, files))
    mode, size = headers[0]
    for file, header in zip(files, headers, strict=True):
        if header[0] not in ("RGB", "L"):
            raise ValueError(f"{file}: {header[0]} image; samples must be 8-bit RGB, or all 8-bit grey")
        if header != (mode, size):
            found, first = (f"{m} {s[0]} x {s[1]}" for m, s in (header, headers[0]))
            raise ValueError(f"{file}: {found}, but {files[0].name} is {first}; samples must be alike")

    def decode(file: Path) -> Tensor:
        try:
            with Image.open(file) as image:
                return _pixels(image)
        except BROKEN as error:
            raise ValueError(f"{file}: broken image ({error})") from error

    warnings = []
    if any(file.suffix.lower() in (".jpg", ".jpeg", ".webp") for file in files):
        warnings.append("samples were stored with loss (JPEG or WebP): scores differ from those of lossless files")
    if len(folder.class_names) > 1:
        warnings.append("samples are sorted by class: IS, over chunks of 5,000 in order, comes out too low")
    shape = (len(mode) if mode == "RGB" else 1, size[1], size[0])
    source = ImageSource(
        "folder", path, len(files), shape, lambda n: _decoded(files, decode, n, num_workers), warnings
    )  # fmt: skip
    return source, list(folder.paths)


def _header(file: Path) -> tuple[str, tuple[int, int]]:
    """Mode and (width, height); a PNG of another depth than 8 bits has it in the mode."""
    try:
        with Image.open(file) as image:
            mode = image.mode
            if image.format == "PNG":
                with file.open("rb") as raw:
                    bits = raw.read(25)[24]
                mode = mode if bits == 8 or mode not in ("RGB", "L") else f"{bits}-bit {mode}"
            return mode, image.size
    except BROKEN as error:
        raise ValueError(f"{file}: broken image ({error})") from error


def _pixels(image: Image.Image) -> Tensor:
    array = np.array(image, dtype=np.uint8)  # (H, W) or (H, W, C)
    return torch.from_numpy(array if array.ndim == 3 else array[:, :, None]).permute(2, 0, 1)


def _decoded(files: Sequence[Path], decode: Callable[[Path], Tensor], batch: int, workers: int) -> Iterator[Tensor]:
    """Batches of decoded files in order; the threads work at most two batches ahead."""
    workers = max(1, workers)
    pool = ThreadPoolExecutor(workers)
    try:
        ahead = deque(pool.submit(decode, file) for file in files[: 2 * batch])
        following = 2 * batch
        for start in range(0, len(files), batch):
            images = []
            for _ in files[start : start + batch]:
                images.append(ahead.popleft().result())
                if following < len(files):
                    ahead.append(pool.submit(decode, files[following]))
                    following += 1
            yield torch.stack(images).contiguous()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def open_npz(path: str) -> ImageSource:
    """The images `arr_0`, uint8 (N, H, W, C) with C 1 or 3, of an .npz file.

    Raises:
        ValueError: no such file, no such array, pickled objects, or another shape or type.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if "arr_0.npy" not in names:
                raise ValueError(f"{path}: holds {', '.join(names) or 'nothing'}; images must be in arr_0")
            with archive.open("arr_0.npy") as member:
                shape, fortran, dtype = _npy_header(member)
                size = archive.getinfo("arr_0.npy").file_size - member.tell()
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: no readable .npz file ({error})") from error
    except DAMAGED as error:
        raise ValueError(str(error) if path in str(error) else f"{path}: arr_0 is unreadable ({error})") from error
    if dtype != np.uint8 or len(shape) != 4 or shape[3] not in (1, 3) or fortran:
        order = ", Fortran order" if fortran else ""
        raise ValueError(f"{path}: arr_0 is {dtype} {shape}{order}; it must be uint8 (N, H, W, 3) or (N, H, W, 1)")
    if min(shape) < 1:
        raise ValueError(f"{path}: arr_0 has no images")
    if size != math.prod(shape):
        raise ValueError(f"{path}: arr_0 holds {size} bytes, its header says {shape}")
    count, height, width, channels = shape
    warnings = []
    if "mu.npy" in names:
        warnings.append(f"{path} also holds statistics, which the ADM evaluator would use; the images are scored")
    if "arr_1.npy" in names and _labels_sorted(path):
        warnings.append("samples are sorted by label: IS, over chunks of 5,000 in order, comes out too low")

    def batches(batch: int) -> Iterator[Tensor]:
        size = height * width * channels
        with zipfile.ZipFile(path) as archive, archive.open("arr_0.npy") as member:
            _npy_header(member)
            for start in range(0, count, batch):
                n = min(batch, count - start)
                try:
                    data = member.read(n * size)
                except DAMAGED as error:
                    raise ValueError(f"{path}: damaged ({error})") from error
                if len(data) != n * size:
                    raise ValueError(f"{path}: arr_0 ends within image {start + len(data) // size} of {count}")
                rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(n, height, width, channels)
                yield rows.permute(0, 3, 1, 2).contiguous()

    return ImageSource("npz", path, count, (channels, height, width), batches, warnings)


def _npy_header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(member)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(member)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(member)
    raise ValueError(f"npy version {version}; 1.0 or 2.0 are read")


def _labels_sorted(path: str) -> bool:
    try:
        with np.load(path, allow_pickle=False) as file:
            labels = file["arr_1"]
    except DAMAGED:
        return False
    return labels.ndim == 1 and len(labels) > 1 and labels[0] != labels[-1] and bool((labels[1:] >= labels[:-1]).all())
