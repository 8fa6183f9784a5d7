"""Tables of networks as YAML, the paper's and ours: rows of a name, options of train.py, and published numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from jsonargparse.typing import PositiveInt

from vcagen.config.command_line import from_mapping
from vcagen.config.options import Config, Seed, flatten
from vcagen.system.files import prefixing, read_yaml


@dataclass(frozen=True)
class Row:
    """One network of a table."""

    name: str
    run: str
    """Its run folder, below the folder of the table's runs."""
    set: dict[str, Any] = field(default_factory=dict)
    """What it changes in the recipe: dotted options of train.py. `load_table` adds those that all rows share."""
    published: dict[str, float] = field(default_factory=dict)
    """params in millions, gflops in 1e9 multiply-adds, fid."""
    baseline: str | None = None
    """Name of the row it is compared with."""
    note: str | None = None

    def config(self) -> Config:
        """The recipe with the row's options."""
        return from_mapping(Config, {"run_dir": self.run, **self.set})


@dataclass(frozen=True)
class Latents:
    """What the networks of a table see, for their cost. Default: ImageNet at 256 x 256."""

    channels: PositiveInt = 4
    size: PositiveInt = 32
    """Height and width."""
    num_classes: PositiveInt = 1000


@dataclass(frozen=True)
class Table:
    """The keys of a table file."""

    rows: list[Row]
    title: str = ""
    set: dict[str, Any] = field(default_factory=dict)
    """Options of all rows."""
    seeds: list[Seed] = field(default_factory=list)
    """Every row is trained once with each; without seeds once."""
    latents: Latents = field(default_factory=Latents)
    columns: list[str] = field(default_factory=list)
    """Further columns of the report, module:name each; see `run_results.Column`."""

    def runs(self, row: Row, root: str | Path) -> dict[int | None, Path]:
        """Run folders of a row by seed: ROOT/RUN, or ROOT/RUN/seed_0 and so on."""
        folder = Path(root) / row.run
        return {seed: folder / f"seed_{seed}" for seed in self.seeds} if self.seeds else {None: folder}


def load_table(
    path: str | Path, *, seeds: int | None = None, options: Mapping[str, Any] | None = None, rows: str | None = None
) -> Table:
    """Read a table file.

    Args:
        seeds: take only so many of the seeds.
        options: override those of all rows.
        rows: take only those whose run folder this shell pattern matches.

    Raises:
        ValueError: not such a file, by the row and the key that is wrong.
    """
    content = read_yaml(path)
    if isinstance(content, dict) and "classifiers" in content:
        raise ValueError(f"{path}: a table of classifiers, which timm's own script trains (docs/recognition.md)")
    if not isinstance(content, dict) or not content.get("rows"):
        raise ValueError(f"{path}: not a table; it needs rows")
    table = from_mapping(Table, {"title": Path(path).stem, **content}, f"{path}: ")
    sets = [flatten(part.get("set") or {}) for part in (content, *content["rows"])]  # so that parts of options add up
    found = [replace(row, set={**sets[0], **own, **(options or {})})
             for row, own in zip(table.rows, sets[1:], strict=True)]  # fmt: skip
    names, folders = [row.name for row in found], [Path(row.run) for row in found]
    for row in found:
        with prefixing(f"{path}: row {row.name}: "):
            row.config()
        if folders.count(Path(row.run)) > 1:
            raise ValueError(f"{path}: run: {row.run} is that of several rows; each needs its own")
        if row.baseline is not None and row.baseline not in names:
            raise ValueError(f"{path}: baseline: {row.baseline} is no row")
    if seeds is not None and seeds > len(table.seeds):
        raise ValueError(f"seeds: {seeds}; {path} has {len(table.seeds)}")
    if not (wanted := [row for row in found if fnmatchcase(row.run, rows or "*")]):
        raise ValueError(f"rows: {rows}; {path} has {', '.join(row.run for row in found)}")
    return replace(table, rows=wanted, seeds=table.seeds[:seeds])


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded so that it reads well as plain text too; the first column to the left."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = f"|{'-' * (widths[0] + 2)}|" + "".join(f"{'-' * (width + 1)}:|" for width in widths[1:])
    return "\n".join([line(header), rule, *map(line, rows)])
