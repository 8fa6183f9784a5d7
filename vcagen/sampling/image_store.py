"""SampleStore: sampled images in a folder, by index, so that a killed run goes on where it stopped."""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from vcagen.system.files import atomic_file, read_manifest, write_json

Rows = npt.NDArray[np.uint8]

PREVIEW = 64
"""The preview grid shows the first so many images."""
PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n", b"\0\0\0\0IEND\xaeB`\x82"


class SampleStore:
    """Images by index in a folder, as images/000000.png and so on, as samples.npz (ADM's arr_0), as both or neither.

    A killed run is gone on with: files are complete or absent, or found out by their missing end. `manifest.json` holds
    everything that decides the pixels; a folder of other settings is refused. Without PNG the first images are kept in
    preview/ for the grid. A form asked for later is copied from the other.

    Args:
        image_shape: (C, H, W) of the uint8 images.
        settings: JSON object, what decides the pixels besides num_images and batch.
    """

    def __init__(
        self,
        folder: str | Path,
        num_images: int,
        batch: int,
        *,
        image_shape: tuple[int, int, int],
        settings: dict[str, Any],
        png: bool = True,
        npz: bool = False,
    ) -> None:
        for name, count in (("num_images", num_images), ("batch", batch)):
            if count < 1:
                raise ValueError(f"{name}: {count} is not positive")
        self.folder = Path(folder)
        self.num_images = num_images
        self.batch = batch
        self.image_shape = image_shape
        self.manifest = {"format": 1, "num_images": num_images, "batch": batch, **settings}
        self.png = png
        self._npz = self.folder / "samples.npz"
        self.npz = self._npz if npz else None
        self._images = self.folder / ("images" if png else "preview")
        self._num_png = num_images if png else min(PREVIEW, num_images)
        self._rows, self._done = self.folder / ".samples.rows", self.folder / ".samples.done"
        self._pool = ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1))
        self._writing: list[Future[None]] = []

    @property
    def num_chunks(self) -> int:
        """Number of work units."""
        return math.ceil(self.num_images / self.batch)

    @property
    def keeps_images(self) -> bool:
        """Whether every image is kept, in one form or another."""
        return self.png or self.npz is not None

    def indices(self, chunk: int) -> range:
        """The indices of a chunk that are to be kept: `batch` of them, fewer in the last."""
        return range(chunk * self.batch, min((chunk + 1) * self.batch, self.num_images))

    def prepare(self) -> None:
        """Make the folder or check that it is of the same settings, and clear what is half-written or damaged.

        Raises:
            ValueError: other settings, by field, or files that are not of this run.
        """
        path = self.folder / "manifest.json"
        if path.exists():
            before, now = read_manifest(path), json.loads(json.dumps(self.manifest))
            for field in dict.fromkeys([*now, *before]):
                if before.get(field) != now.get(field):
                    raise ValueError(
                        f"{field}: {self.folder} was made with {before.get(field)!r}, now {now.get(field)!r}; "
                        "repeat the settings or choose another --out"
                    )
        elif self.folder.exists() and any(file.suffix != ".tmp" for file in self.folder.iterdir()):
            raise ValueError(f"out: {self.folder} is not empty and has no manifest.json; choose another folder")
        else:  # before anything else is there, so that a run killed here is known again
            write_json(path, self.manifest)
        self._images.mkdir(parents=True, exist_ok=True)
        foreign = []
        for file in self._images.iterdir():
            if file.name.startswith(".") and file.name.endswith(".tmp"):
                file.unlink()
            elif not (file.stem.isdecimal() and int(file.stem) < self._num_png and file == self._path(int(file.stem))):
                foreign.append(file.name)
        if foreign:
            listed = ", ".join(sorted(foreign)[:3]) + (", ..." if len(foreign) > 3 else "")
            raise ValueError(f"{self._images}: {len(foreign)} files that are not of this run: {listed}")
        if self._npz.exists() and not self._npz_is_whole():
            self._npz.unlink()  # what is still to be had in another form is copied again, the rest made again
        sizes = {self._rows: self.num_images * math.prod(self.image_shape), self._done: self.num_images}
        if any(not file.exists() or file.stat().st_size != size for file, size in sizes.items()):
            self._remove_rows()
            for file, size in sizes.items() if self._collects_rows else ():
                with file.open("wb") as new:
                    new.truncate(size)

    def holds(self, chunk: int) -> bool:
        """Whether the images of a chunk that are to be kept are there, complete."""
        indices = self.indices(chunk)
        if self._collects_rows and not self._has_rows(indices):
            return False
        return all(_is_complete(self._path(i)) for i in indices if i < self._num_png)

    def readable(self, chunk: int) -> bool:
        """Whether all images of a chunk are there in one form, be it another than is to be kept."""
        indices = self.indices(chunk)
        return self._has_rows(indices) or all(self._stored_png(i) for i in indices)

    def missing(self) -> list[int]:
        """The chunks with absent images."""
        return [chunk for chunk in range(self.num_chunks) if not self.holds(chunk)]

    def write(self, indices: Sequence[int], images: Tensor) -> None:
        """Write those of the images (N, C, H, W), uint8, that are absent, in threads beside whatever comes next.

        Raises:
            OSError: an earlier write failed.
        """
        assert images.dtype == torch.uint8, images.dtype
        assert images.shape == (len(indices), *self.image_shape), images.shape
        self.flush()
        rows = images.permute(0, 2, 3, 1).contiguous().cpu().numpy()  # (N, H, W, C)
        tasks = [(i, row) for i, row in zip(indices, rows, strict=True) if i < self._num_png]
        self._writing = [self._pool.submit(self._write_png, i, row) for i, row in tasks]
        if self._collects_rows:
            self._writing.append(self._pool.submit(self._write_rows, list(indices), rows))

    def flush(self) -> None:
        """Wait until everything given to `write` is on its way to the disk."""
        writing, self._writing = self._writing, []
        for future in writing:
            future.result()

    def read(self, indices: Sequence[int]) -> Tensor:
        """Images that are there, in one form: uint8 (N, C, H, W)."""
        paths = [path for i in indices if (path := self._stored_png(i))]
        if len(paths) == len(indices):
            rows = np.stack([np.asarray(Image.open(path)) for path in paths])
        else:
            rows = self._stored_rows()[indices]
        channels, height, width = self.image_shape
        return torch.from_numpy(rows.reshape(len(indices), height, width, channels)).permute(0, 3, 1, 2)

    def finish(self) -> None:
        """Put samples.npz together, and preview.png: a square of the first images."""
        self.flush()
        if self._collects_rows:
            with atomic_file(self._npz) as temporary:
                write_npz(temporary, self._stored_rows())
        self._remove_rows()
        save_grid(self.folder / "preview.png", self.read(range(min(self.num_images, PREVIEW))))

    @property
    def _collects_rows(self) -> bool:
        """Whether samples.npz is asked for and still to be put together."""
        return self.npz is not None and not self.npz.exists()

    def _has_rows(self, indices: range) -> bool:
        """Whether samples.npz, or the rows that become it, hold these images."""
        if self._npz.exists() or not self._done.exists():
            return self._npz.exists()
        with self._done.open("rb") as file:
            file.seek(indices[0])
            return b"\0" not in file.read(len(indices))

    def _remove_rows(self) -> None:
        for file in (self._done, self._rows):  # no marks without their rows
            file.unlink(missing_ok=True)

    def _path(self, index: int) -> Path:
        return self._images / f"{index:06d}.png"

    def _stored_png(self, index: int) -> Path | None:
        """The complete PNG of an image, in whichever folder."""
        paths = (self.folder / kind / self._path(index).name for kind in ("images", "preview"))
        return next(filter(_is_complete, paths), None)

    def _write_png(self, index: int, row: Rows) -> None:
        path = self._path(index)
        if not _is_complete(path):
            with atomic_file(path, sync=False) as temporary:
                # Level 1: a third of the time of the default, 7 % larger.
                to_pil(row).save(temporary, format="PNG", compress_level=1)

    def _write_rows(self, indices: list[int], rows: Rows) -> None:
        with self._rows.open("r+b") as file:
            file.seek(indices[0] * rows[0].nbytes)
            file.write(rows.data)
            file.flush()
            os.fsync(file.fileno())
        with self._done.open("r+b") as file:
            file.seek(indices[0])
            file.write(b"\1" * len(indices))

    def _stored_rows(self) -> Rows:
        channels, height, width = self.image_shape
        shape = (self.num_images, height, width, channels)
        if self._npz.exists():
            return _map_npz(self._npz, shape)
        return np.memmap(self._rows, np.uint8, "r", shape=shape)

    def _npz_is_whole(self) -> bool:
        """Whether samples.npz has the rows and a directory at its end; a cut one has not."""
        try:
            self._stored_rows()
        except (OSError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile):
            return False
        return True


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


def _is_complete(png: Path) -> bool:
    """Whether a PNG begins and ends as one: files are written whole, so a cut or a crash shows at the end."""
    try:
        with png.open("rb") as file:
            start = file.read(len(PNG_START))
            file.seek(-len(PNG_END), os.SEEK_END)
            return start == PNG_START and file.read() == PNG_END
    except OSError:  # absent, or shorter than its end
        return False


def write_npz(path: Path, rows: Rows, block: int = 256) -> None:
    """Write uint8 rows (N, H, W, C) as `arr_0`, streamed, with the npy header 1.0 that ADM's streaming reader knows."""
    header = {"descr": "|u1", "fortran_order": False, "shape": rows.shape}
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive,
        archive.open("arr_0.npy", "w", force_zip64=True) as file,
    ):
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(rows), block):
            file.write(rows[start : start + block].tobytes())


def _map_npz(path: Path, shape: tuple[int, ...]) -> Rows:
    """The rows of a file of `write_npz` where they lie; any exception of zipfile and numpy where it is damaged."""
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo("arr_0.npy")
    with path.open("rb") as file:
        file.seek(member.header_offset + 26)
        lengths = file.read(4)
        file.seek(int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little"), os.SEEK_CUR)
        np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0(file)
        if member.compress_type != zipfile.ZIP_STORED or header != (shape, False, np.dtype(np.uint8)):
            raise ValueError(f"{path}: holds {header}, expected uint8 {shape}")
        return np.memmap(file, np.uint8, "r", offset=file.tell(), shape=shape)
