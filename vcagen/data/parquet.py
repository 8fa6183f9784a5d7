"""Images in parquet files, as data sets of the Hugging Face Hub are stored."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from vcagen.data.listing import Listing
from vcagen.system.files import few, reading


def parquet_files(path: str) -> list[str]:
    """The parquet files of a folder, a pattern such as data/train-*.parquet, or one file; [] where there are none.

    Raises:
        ValueError: a folder with several splits, or with some files of a split only.
    """
    if not Path(path).is_dir():
        pattern = Path(path)
        return sorted(map(str, pattern.parent.glob(pattern.name))) if pattern.suffix == ".parquet" else []
    files = sorted(Path(path).glob("*.parquet"))
    parts = [re.fullmatch(r"(.+)-\d{5}-of-(\d{5})", file.stem) for file in files]
    splits = sorted({part[1] if part else "" for part in parts})
    if len(splits) > 1:
        raise ValueError(f"{path}: several sets ({', '.join(filter(None, splits))}); give one: '{path}/NAME-*.parquet'")
    if parts and parts[0] and len(files) != (expected := int(parts[0][2])):
        raise ValueError(f"{path}: {len(files)} of {expected} parquet files; '{path}/*.parquet' takes those there are")
    return [str(file) for file in files]


def list_parquet(path: str) -> Listing:
    """The images of `parquet_files`, in the order of files and rows; class names are those of the schema.

    The image column holds bytes, or {bytes, path} as the Hub's; image and label column are told by the schema, or are
    called image and label.

    Raises:
        ValueError: pyarrow is missing, damaged files, or no such columns or labels.
    """
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ValueError('parquet: pyarrow is missing; pip install "vcagen[data]"') from error
    files = parquet_files(path)
    names: list[str] = []
    labels: list[int] = []
    groups: list[tuple[str, int]] = []
    starts: list[int] = []
    with reading(files[0]):
        image, label, class_names = _columns(pq.read_schema(files[0]))
    for file in files:
        with reading(file):
            opened = pq.ParquetFile(file)
            if missing := [column for column in (image, label) if column not in opened.schema_arrow.names]:
                there = few(opened.schema_arrow.names, 20)
                raise ValueError(f"no column {missing[0]}; it has {there}")
            found = opened.read(columns=[label], use_threads=False)[label].to_pylist()
            for group in range(opened.num_row_groups):
                groups.append((file, group))
                starts.append(len(names))
                rows = opened.metadata.row_group(group).num_rows
                first = len(names) - len(labels)
                names += [f"{Path(file).name}/{row}" for row in range(first, first + rows)]
            if wrong := [row for row, value in enumerate(found)
                         if type(value) is not int or not 0 <= value < (len(class_names) or 2**31)]:  # fmt: skip
                raise ValueError(f"row {wrong[0]}: label {found[wrong[0]]!r}; needs 0, 1, ..., one for each class")
            labels += found
    class_names = class_names or [str(value) for value in range(max(labels, default=-1) + 1)]
    return Listing(path, names, labels, class_names, _RowReader(groups, starts, image))


def _columns(schema: Any) -> tuple[str, str, list[str]]:
    """Names of the image and the label column, and of the classes where the schema tells them.

    Raises:
        ValueError: no such columns, or several.
    """
    stored = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = stored.get("info", {}).get("features", {})
    chosen: list[str] = []
    for name, kind in (("image", "Image"), ("label", "ClassLabel")):
        told = [column for column, feature in features.items()
                if isinstance(feature, dict) and feature.get("_type") == kind]  # fmt: skip
        found = [name] if name in told else told or [column for column in schema.names if column == name]
        if len(found) != 1:
            which = f"columns {', '.join(found)}" if found else f"no column {name} among {few(schema.names, 20)}"
            raise ValueError(f"{which}; one {name} column is needed")
        chosen += found
    return chosen[0], chosen[1], list(features.get(chosen[1], {}).get("names") or [])


class _RowReader:
    """Reads the image of a row, and keeps its row group: the neighbours are asked for next."""

    def __init__(self, groups: Sequence[tuple[str, int]], starts: Sequence[int], column: str) -> None:
        self._arguments = groups, starts, column
        self._group: tuple[int, Any] = (-1, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _RowReader, self._arguments  # without the row group

    def __call__(self, index: int) -> BytesIO:
        groups, starts, column = self._arguments
        group = bisect_right(starts, index) - 1
        file, number = groups[group]
        row = index - starts[group]
        with reading(file):
            if self._group[0] != group:
                import pyarrow.parquet as pq

                # Opened anew, without threads: loader processes are forked.
                table = pq.ParquetFile(file).read_row_group(number, columns=[column], use_threads=False)
                self._group = group, table[column]
            value = self._group[1][row].as_py()
            data = value["bytes"] if isinstance(value, dict) else value
            if not isinstance(data, bytes):
                raise ValueError(f"no bytes of an image in row {row} of row group {number}")
        return BytesIO(data)
