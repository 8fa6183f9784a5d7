"""Files that are either complete or absent, and their hashes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name `path` where writing fails: of a full disk the system does not tell which file, safetensors not even so."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def atomic_file(path: str | Path, *, sync: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside `path`; flushed to disk and renamed on success, removed on any error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        with _named(path):
            yield temporary
        if sync:
            _fsync(temporary)
        temporary.replace(path)
        if sync:
            _fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """As `atomic_file`, for a folder with its files; an existing folder at `path` is replaced."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with _named(path):
            yield temporary
        for file in temporary.rglob("*"):
            _fsync(file)
        _fsync(temporary)
        if path.exists():
            shutil.rmtree(path)
        temporary.replace(path)
        _fsync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_writable(path: str | Path) -> None:
    """Try whether a file can be written at `path`, before the work that it is to hold; nothing is left behind.

    Raises:
        ValueError: a folder is there, or its folder cannot be written to or made.
    """
    if Path(path).is_dir():
        raise ValueError(f"{path}: is a folder; name a file")
    nearest = next(folder for folder in Path(path).absolute().parents if folder.exists())
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from error


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, allow_nan=True) + "\n")


def read_record(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        value = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: damaged (a JSON {type(value).__name__}, not an object)")
    return value


def read_manifest(path: str | Path) -> dict[str, Any]:
    """A manifest.json of sample.py.

    Raises:
        ValueError: no JSON object, or num_images is no integer.
    """
    manifest = read_record(path)
    if type(count := manifest.get("num_images")) is not int:
        raise ValueError(f"{path}: damaged (num_images: {count!r} is no integer)")
    return manifest


def read_yaml(path: str | Path) -> Any:
    """What a YAML file holds.

    Raises:
        ValueError: not such a file.
    """
    try:
        return yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: damaged: not YAML: {error}") from error


def sha256(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
