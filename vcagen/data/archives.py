"""Images that lie uncompressed in one file, a tar or a zip, and are read where they lie."""

from __future__ import annotations

import json
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from vcagen.data.listing import EXTENSIONS, Listing, other_extensions
from vcagen.system.files import few, reading

ZIP_HEADER = 30
"""Bytes of a zip's local header before the name; the last four are the lengths of the name and of what follows it."""


def list_tar(path: str) -> Listing:
    """The images of a tar of tars, one a class, such as ILSVRC2012_img_train.tar, or of a tar of class folders.

    Names, order and labels are those of the unpacked folder: CLASS/FILE, sorted. Each header is read once.

    Raises:
        ValueError: not an uncompressed tar, cut short, or images that lie in no class or two folders down.
    """
    found: list[tuple[str, str, int, int]] = []  # class, name, first byte, bytes
    left_out: list[str] = []
    with reading(path), tarfile.open(path, "r:") as outer:
        for member in tqdm(_members(outer, path), desc=f"listing {Path(path).name}", unit="member", disable=None):
            place = PurePosixPath(member.name)
            if place.suffix == ".tar" and member.isfile() and not _hidden(member.name):
                with tarfile.open(fileobj=outer.extractfile(member), mode="r:") as inner:
                    for image in _members(inner, f"{path}/{member.name}"):
                        start = member.offset_data + image.offset_data
                        if image.isfile() and _is_image(image.name):
                            found.append((place.stem, PurePosixPath(image.name).name, start, image.size))
                        elif image.isfile() and _may_be(image.name):
                            left_out.append(f"{member.name}/{image.name}")
            elif member.isfile() and _is_image(member.name):
                found.append((str(place.parent), place.name, member.offset_data, member.size))
            elif member.isfile() and _may_be(member.name):
                left_out.append(member.name)
    found.sort()
    folders = sorted({folder for folder, *_ in found})
    if len({PurePosixPath(folder).parent for folder in folders if folder != "."}) > 1 or "." in folders[:-1]:
        raise ValueError(f"{path}: images in {few(folders)}; class folders or tars must lie side by side")
    class_names = [PurePosixPath(folder).name or "image" for folder in folders]
    labels = {folder: label for label, folder in enumerate(folders)}
    names = [name if folder == "." else f"{PurePosixPath(folder).name}/{name}" for folder, name, *_ in found]
    spans = np.array([span for _, _, *span in found], dtype=np.int64).reshape(-1, 2)
    reader = _TarReader(path, spans)
    return Listing(path, names, [labels[folder] for folder, *_ in found], class_names, reader, sorted(left_out))


def _members(archive: tarfile.TarFile, name: str) -> Iterator[tarfile.TarInfo]:
    """The members of a tar, up to its end, which must be there: tarfile takes any bad header for the end."""
    file: IO[bytes] = archive.fileobj  # type: ignore[assignment]  # its stub knows less than it can
    size = file.seek(0, 2)
    for member in archive:
        if member.offset_data + member.size > size:
            raise ValueError(f"{name}: cut short: {member.name} ends beyond the file")
        yield member
    file.seek(archive.offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise ValueError(f"{name}: cut short or damaged: no end of archive at byte {archive.offset:,}")


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in PurePosixPath(name).parts)


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not _hidden(name)


def _may_be(name: str) -> bool:
    """Whether a file that is not read may be an image or hold some."""
    suffix = PurePosixPath(name).suffix.lower()
    return suffix in (".tar", ".zip", *EXTENSIONS) or (suffix in other_extensions() and not _hidden(name))


@dataclass(frozen=True)
class _TarReader:
    path: str
    spans: NDArray[np.int64]
    """First byte and bytes of each image (N, 2)."""

    def __call__(self, index: int) -> BytesIO:
        start, size = self.spans[index].tolist()
        with Path(self.path).open("rb") as file:
            file.seek(start)
            return BytesIO(file.read(size))


def list_zip(path: str) -> Listing:
    """The images of a zip with labels in its dataset.json, as EDM2's dataset_tool writes, sorted by label and name.

    Classes have no names there: they are called by their numbers.

    Raises:
        ValueError: not a whole zip, no labels, images without one, labels without an image, or latents.
    """
    with reading(path), zipfile.ZipFile(path) as archive:
        files = {member.filename: member for member in archive.infolist() if not member.is_dir()}
        members = {name: member for name, member in files.items() if _is_image(name)}
        if "dataset.json" not in files:
            raise ValueError("no dataset.json in it, which holds the labels")
        labels = _zip_labels(json.loads(archive.read("dataset.json")), list(members))
    order = sorted(members, key=lambda name: (labels[name], name))
    rows = [(m.header_offset, m.compress_size, m.compress_type, m.CRC) for m in map(members.__getitem__, order)]
    class_names = [str(label) for label in range(max(labels.values(), default=-1) + 1)]
    reader = _ZipReader(path, np.array(rows, dtype=np.int64).reshape(-1, 4))
    left_out = sorted(name for name in files if name not in members and _may_be(name))
    return Listing(path, order, [labels[name] for name in order], class_names, reader, left_out)


def _zip_labels(record: Any, names: list[str]) -> dict[str, int]:
    """Name -> label from dataset.json: {"labels": [[name, label], ...]}, or null for images without classes."""
    stored = record["labels"]
    if stored is None:
        return dict.fromkeys(names, 0)
    labels = dict(stored)
    if latents := [name for name in labels if name.endswith(".npy")]:
        raise ValueError(f"holds latents ({latents[0]}), images are needed")
    if wrong := [name for name in names if type(labels.get(name)) is not int or labels[name] < 0]:
        raise ValueError(f"no label 0, 1, ... for {few(wrong)} in dataset.json")
    if lost := sorted(labels.keys() - set(names)):
        raise ValueError(f"labels in dataset.json, but no image: {few(lost)}")
    return labels


@dataclass(frozen=True)
class _ZipReader:
    path: str
    members: NDArray[np.int64]
    """Offset of the header, stored bytes, method and CRC of each image (N, 4)."""

    def __call__(self, index: int) -> BytesIO:
        # Not through ZipFile: forked loader processes would share its place in the file.
        offset, size, method, crc = self.members[index].tolist()
        with Path(self.path).open("rb") as file:
            file.seek(offset)
            file.seek(sum(struct.unpack("<HH", file.read(ZIP_HEADER)[-4:])), 1)
            data = file.read(size)
        if method == zipfile.ZIP_DEFLATED:
            data = zlib.decompress(data, wbits=-15)
        elif method != zipfile.ZIP_STORED:
            raise ValueError(f"{self.path}: compressed by method {method}; stored or deflated is needed")
        if zlib.crc32(data) != crc:
            raise ValueError(f"{self.path}: damaged at byte {offset:,}")
        return BytesIO(data)
