"""Tables of networks as YAML, the paper's and ours: rows of a name, options of train.py, and published numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    """What it changes in the recipe: dotted options of train.py, those that all rows share among them."""
    published: dict[str, float] = field(default_factory=dict)
    """params in millions, gflops in 1e9 multiply-adds, fid."""
    baseline: str | None = None
    """Name of the row it is compared with."""
    note: str | None = None

    def config(self) -> Config:
        """The recipe with the row's options."""
        return from_dict(Config, {"run": self.run, **nested(self.options)})


@dataclass(frozen=True)
class Latents:
    """What the networks of a table see, for their cost. Default: ImageNet at 256 x 256."""

    channels: int = 4
    size: int = 32
    """Height and width."""
    num_classes: int = 1000


@dataclass(frozen=True)
class Table:
    """A title and rows."""

    title: str
    rows: list[Row]
    seeds: tuple[int, ...] = ()
    """Every row is trained once with each; without seeds once."""
    latents: Latents = Latents()

    def runs(self, row: Row, root: str | Path) -> dict[int | None, Path]:
        """Run folders of a row by seed: ROOT/RUN, or ROOT/RUN/seed_0 and so on."""
        folder = Path(root) / row.run
        return {seed: folder / f"seed_{seed}" for seed in self.seeds} if self.seeds else {None: folder}


def load_table(path: str | Path, *, seeds: int | None = None, options: Mapping[str, Any] | None = None) -> Table:
    """Read a table file: title, rows, and where wanted `set` (options of all rows), `seeds` and `latents`.

    Args:
        seeds: take only so many of the seeds.
        options: override those of all rows.

    Raises:
        ValueError: not such a file, by the row and the key that is wrong.
    """
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not YAML: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list) or not content["rows"]:
        raise ValueError(f"{path}: not a table; it needs title and rows")
    common = content.get("set") or {}
    rows = []
    for number, values in enumerate(content["rows"], start=1):
        if not isinstance(values, dict):
            raise ValueError(f"{path}: row {number}: {values!r}; a row has name, run and set")
        values = {"set": {}, **values}
        values["options"] = {**common, **values.pop("set"), **(options or {})}
        row = from_dict(Row, values, f"row {number}: ")
        row.config()
        rows.append(row)
    names = [row.name for row in rows]
    for row in rows:
        if row.baseline is not None and row.baseline not in names:
            raise ValueError(f"{path}: baseline: {row.baseline} is no row")
    available = tuple(content.get("seeds") or ())
    if seeds is not None and not 1 <= seeds <= len(available):
        raise ValueError(f"seeds: {seeds}; {path} has {len(available)}")
    latents = from_dict(Latents, content.get("latents") or {}, f"{path}: latents.")
    return Table(str(content.get("title", Path(path).stem)), rows, available[:seeds], latents)


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


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded so that it reads well as plain text too; the first column to the left."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = f"|{'-' * (widths[0] + 2)}|" + "".join(f"{'-' * (width + 1)}:|" for width in widths[1:])
    return "\n".join([line(header), rule, *map(line, rows)])
