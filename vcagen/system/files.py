"""Files that are either complete or absent, and their hashes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml
from safetensors import SafetensorError

T = TypeVar("T")


def _fsync(path: Path) -> None:
    if sys.platform == "win32":  # opens no folders, and syncs no file that is open for reading
        return
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


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


FORMAT = 2
"""Format of every file that later commands read again."""


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn whatever fails while a file is read into one ValueError that names it.

    Our files are complete or absent and carry a format number, so that there is nothing more to check one by one.
    """
    try:
        yield
    except Exception as error:
        what = " ".join(str(error).split())
        if isinstance(error, OSError) and error.strerror:
            what = f"{path}: {error.strerror}"
        elif type(error) is not ValueError:
            what = f"{path}: damaged ({type(error).__name__}: {what})"
        raise ValueError(what if str(path) in what else f"{path}: {what}") from error


@contextmanager
def prefixing(text: str) -> Iterator[None]:
    """Put `text` in front of the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{text}{error}") from error


def parse_record(text: str | bytes, kind: type[T]) -> T:
    """A record of ours in JSON, of the type `kind`: a dataclass, or a TypedDict, which tells what must be there.

    Raises:
        ValueError: of another format, or not such a record, by the field that is wrong.
    """
    record = json.loads(text)
    found = record.get("format") if isinstance(record, dict) else None
    if found == 1:
        raise ValueError(f"format 1, which commit a5c3076 of vcagen reads; this version reads format {FORMAT}")
    if found != FORMAT:
        none = "; commit a5c3076 of vcagen wrote files without one" if found is None else ""
        raise ValueError(f"damaged, or not written by vcagen (format {found!r}{none})")
    checked = msgspec.convert(record, kind)
    return record if isinstance(checked, dict) else checked


def read_json(path: str | Path, kind: type[T]) -> T:
    """`parse_record` of a file.

    Raises:
        ValueError: no such file, or not such a record.
    """
    with reading(path):
        return parse_record(Path(path).read_bytes(), kind)


class _AsWritten(yaml.SafeLoader):
    """YAML whose words stay as they are written, so that `no` may be a name: what they mean, their option's type says.

    Only null means something. A key stands once in its mapping, and not beside one of its parts (a.b beside a).
    """

    yaml_implicit_resolvers = {  # noqa: RUF012, as in the base class
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = sorted((f"{key.value}.", key.start_mark.line + 1) for key, _ in node.value)
        for (one, line), (other, second) in pairwise(keys):
            if other.startswith(one):
                raise ValueError(f"line {second}: {other[:-1]}: {one[:-1]} is in line {line}; give each option once")
        return node


def parse_yaml(content: str | bytes) -> Any:
    """What YAML says, its words as strings: options get their types when they are parsed.

    Raises:
        ValueError: an option that is given twice.
        yaml.YAMLError: not YAML.
    """
    return yaml.load(content, Loader=_AsWritten)


def read_yaml(path: str | Path) -> Any:
    """`parse_yaml` of a file.

    Raises:
        ValueError: no such file, not YAML, or an option that is given twice.
    """
    with reading(path):
        return parse_yaml(Path(path).read_bytes())


def few(names: Sequence[object], limit: int = 3) -> str:
    """The first names for a one-line message, and how many more there are."""
    more = len(names) - limit
    return ", ".join(map(str, names[:limit])) + (f" and {more} more" if more > 0 else "")


def sha256(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
