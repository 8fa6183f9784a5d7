"""ImageStore: sampled images in a folder, by index, so that the same command makes what is missing."""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from vcagen.system.files import FORMAT, atomic_file, few, read_json, write_json

Rows = npt.NDArray[np.uint8]

PREVIEW = 64
"""The preview grid shows the first so many images."""
PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n", b"\0\0\0\0IEND\xaeB`\x82"


class ImageStore:
    """Images by index in a folder: images/000000.png and so on; samples.npz (ADM's arr_0) beside them when asked for.

    Files are complete or absent, or found out by their missing end. `manifest.json` holds everything that decides the
    pixels; a folder of other settings is refused.

    Args:
        image_shape: (C, H, W) of the uint8 images.
        settings: JSON object, what decides the pixels besides num_images and batch.
        facts: JSON object, what the scores say of the images besides.
    """

    def __init__(
        self,
        folder: str | Path,
        num_images: int,
        batch: int,
        *,
        image_shape: tuple[int, int, int],
        settings: dict[str, Any],
        facts: dict[str, Any] | None = None,
        npz: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.num_images = num_images
        self.batch = batch
        self.image_shape = image_shape
        self.manifest = {"format": FORMAT, "num_images": num_images, "batch": batch, **settings}
        self.facts = facts or {}
        self.npz = self.folder / "samples.npz" if npz else None
        self._images = self.folder / "images"
        self._pool = ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1))
        self._writing: list[Future[None]] = []

    @property
    def num_chunks(self) -> int:
        """Number of work units."""
        return math.ceil(self.num_images / self.batch)

    def indices(self, chunk: int) -> range:
        """The indices of a chunk, always `batch` of them: those from num_images on are made but not kept."""
        return range(chunk * self.batch, (chunk + 1) * self.batch)

    def prepare(self) -> None:
        """Make the folder, or check that it is of the same settings, and clear what is half-written.

        Raises:
            ValueError: other settings, by field, or files that are not of this run.
        """
        path = self.folder / "manifest.json"
        if path.exists():
            before, now = read_json(path, dict), json.loads(json.dumps(self.manifest))
            before.pop("facts", None)
            for field in dict.fromkeys([*now, *before]):
                if before.get(field) != now.get(field):
                    change = f"{self.folder} was made with {before.get(field)!r}, now {now.get(field)!r}"
                    raise ValueError(f"{field}: {change}; repeat the settings or choose another --out")
        elif self.folder.exists() and any(file.suffix != ".tmp" for file in self.folder.iterdir()):
            raise ValueError(f"out: {self.folder} is not empty and has no manifest.json; choose another folder")
        else:  # before anything else is there, so that a run killed here is known again
            write_json(path, {**self.manifest, "facts": self.facts})
        self._images.mkdir(parents=True, exist_ok=True)
        foreign = []
        for file in self._images.iterdir():
            if file.name.startswith(".") and file.name.endswith(".tmp"):
                file.unlink()
            elif not (file.stem.isdecimal() and int(file.stem) < self.num_images and file == self.path(int(file.stem))):
                foreign.append(file.name)
        if foreign:
            raise ValueError(f"{self._images}: {len(foreign)} files that are not of this run: {few(sorted(foreign))}")

    def missing(self) -> list[int]:
        """The chunks with absent images."""
        return [chunk for chunk in range(self.num_chunks) if not all(map(self._holds, self.indices(chunk)))]

    def write(self, indices: Sequence[int], images: Tensor) -> None:
        """Write those of the images (N, C, H, W), uint8, that are absent, in threads beside whatever comes next.

        Raises:
            OSError: an earlier write failed.
        """
        assert images.dtype == torch.uint8, images.dtype
        assert images.shape == (len(indices), *self.image_shape), images.shape
        self.flush()
        rows = images.permute(0, 2, 3, 1).contiguous().cpu().numpy()  # (N, H, W, C)
        absent = [(i, row) for i, row in zip(indices, rows, strict=True) if not self._holds(i)]
        self._writing = [self._pool.submit(self._write, i, row) for i, row in absent]

    def flush(self) -> None:
        """Wait until everything given to `write` is on its way to the disk."""
        writing, self._writing = self._writing, []
        wait(writing)
        for future in writing:
            future.result()

    def finish(self) -> None:
        """Write samples.npz where it is asked for, and preview.png: a square of the first images."""
        self.flush()
        if self.npz is not None and not self.npz.exists():
            channels, height, width = self.image_shape
            with atomic_file(self.npz) as temporary:
                rows = (self.read(i).numpy().transpose(1, 2, 0) for i in range(self.num_images))
                write_npz(temporary, rows, (self.num_images, height, width, channels))
        first = torch.stack([self.read(i) for i in range(min(self.num_images, PREVIEW))])
        save_grid(self.folder / "preview.png", first)

    def read(self, index: int) -> Tensor:
        """An image that is there: uint8 (C, H, W)."""
        channels, height, width = self.image_shape
        rows = np.array(Image.open(self.path(index))).reshape(height, width, channels)
        return torch.from_numpy(rows).permute(2, 0, 1)

    def path(self, index: int) -> Path:
        """Where an image lies."""
        return self._images / f"{index:06d}.png"

    def _holds(self, index: int) -> bool:
        """Whether an image is there, or not to be kept: files are written whole, so a cut shows at the end."""
        if index >= self.num_images:
            return True
        try:
            with self.path(index).open("rb") as file:
                start = file.read(len(PNG_START))
                file.seek(-len(PNG_END), os.SEEK_END)
                return start == PNG_START and file.read() == PNG_END
        except OSError:  # absent, or shorter than its end
            return False

    def _write(self, index: int, row: Rows) -> None:
        with atomic_file(self.path(index), sync=False) as temporary:
            # Level 1: a third of the time of the default, 7 % larger.
            to_pil(row).save(temporary, format="PNG", compress_level=1)


def save_grid(path: Path, images: Tensor) -> None:
    """Write the largest square of the first uint8 images (N, C, H, W) as one PNG; small ones are enlarged."""
    side = math.isqrt(len(images))
    scale = max(1, 32 // images.shape[-1])
    framed = pad(images[: side**2].repeat_interleave(scale, -1).repeat_interleave(scale, -2), (1, 1, 1, 1))
    grid = rearrange(framed, "(r s) c h w -> (r h) (s w) c", s=side)
    with atomic_file(path) as temporary:
        to_pil(grid.numpy()).save(temporary, format="PNG")


def to_pil(pixels: Rows) -> Image.Image:
    """Pixels (H, W, C) as an RGB image, or grey where there is one channel."""
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def write_npz(path: Path, rows: Iterable[Rows], shape: tuple[int, int, int, int]) -> None:
    """Stream uint8 rows (H, W, C) as `arr_0` (N, H, W, C), with the npy header 1.0 that ADM's reader knows."""
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive,
        archive.open("arr_0.npy", "w", force_zip64=True) as file,
    ):
        np.lib.format.write_array_header_1_0(file, header)
        for row in rows:
            file.write(row.tobytes())
