"""The tables of the paper as YAML: rows of a name, options of train.py, and published numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vcagen.config import Config, from_dict


@dataclass(frozen=True)
class Row:
    """One network of a table."""

    name: str
    run: str
    """Its run folder, below the folder of the table's runs."""
    options: dict[str, Any]
    """What it changes in the recipe: dotted options of train.py."""
    published: dict[str, float]
    """params in millions, gflops in 1e9 multiply-adds, fid."""
    baseline: str | None = None
    """Name of the row it is compared with."""
    note: str | None = None

    def config(self) -> Config:
        """The recipe with the row's options."""
        return from_dict(Config, {"run": self.run, **nested(self.options)})


@dataclass(frozen=True)
class Table:
    """A title and rows."""

    title: str
    rows: list[Row]


def load_table(path: str | Path) -> Table:
    """Read a table file.

    Raises:
        ValueError: not such a file, by the row and the key that is wrong.
    """
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not YAML: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise ValueError(f"{path}: not a table; it needs title and rows")
    rows = []
    for number, values in enumerate(content["rows"], start=1):
        row = from_dict(Row, {("options" if key == "set" else key): v for key, v in values.items()}, f"row {number}: ")
        row.config()
        rows.append(row)
    names = [row.name for row in rows]
    for row in rows:
        if row.baseline is not None and row.baseline not in names:
            raise ValueError(f"{path}: baseline: {row.baseline} is no row")
    return Table(str(content.get("title", Path(path).stem)), rows)


def nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} as {"a": {"b": 1}}."""
    result: dict[str, Any] = {}
    for key, value in dotted.items():
        inner = result
        *parents, last = key.split(".")
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return result


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, padded so that it reads well as plain text too; the first column to the left."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        padded = [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = f"|{'-' * (widths[0] + 2)}|" + "".join(f"{'-' * (width + 1)}:|" for width in widths[1:])
    return "\n".join([line(header), rule, *map(line, rows)])
