"""Tables of networks as YAML, the paper's and ours: rows of a name, options of train.py, and published numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vcagen.config import command_line as cli
from vcagen.config.options import Config
from vcagen.system.files import read_yaml


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
        return cli.from_mapping(Config, {"run_dir": self.run, **nested(self.options)})


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
    content = read_yaml(path)
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list) or not content["rows"]:
        raise ValueError(f"{path}: not a table; it needs title and rows")
    common = _dotted(content.get("set"), f"{path}: set")
    rows = []
    for number, values in enumerate(content["rows"], start=1):
        where = f"{path}: row {number}"
        values = _dotted(values, where)
        values["options"] = {**common, **_dotted(values.pop("set", None), f"{where}: set"), **(options or {})}
        row = cli.from_mapping(Row, values, f"{where}: ")
        try:
            row.config()
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        rows.append(row)
    names, folders = [row.name for row in rows], [Path(row.run) for row in rows]
    for row in rows:
        if folders.count(Path(row.run)) > 1:
            raise ValueError(f"{path}: run: {row.run} is that of several rows; each needs its own")
        if row.baseline is not None and row.baseline not in names:
            raise ValueError(f"{path}: baseline: {row.baseline} is no row")
    listed = content.get("seeds") or []
    if not isinstance(listed, list) or not all(isinstance(seed, int) for seed in listed):
        raise ValueError(f"{path}: seeds: {listed!r}; needs a list of integers")
    available = tuple(listed)
    if seeds is not None and not 1 <= seeds <= len(available):
        raise ValueError(f"seeds: {seeds}; {path} has {len(available)}")
    latents = cli.from_mapping(Latents, _dotted(content.get("latents"), f"{path}: latents"), f"{path}: latents.")
    return Table(str(content.get("title", Path(path).stem)), rows, available[:seeds], latents)


def _dotted(values: Any, where: str) -> dict[str, Any]:
    """A mapping with text keys; nothing is an empty one."""
    if not isinstance(values or {}, dict) or not all(isinstance(key, str) for key in values or {}):
        raise ValueError(f"{where}: {values!r}; needs a mapping of options")
    return dict(values or {})


def nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} as {"a": {"b": 1}}."""
    result: dict[str, Any] = {}
    for key, value in dotted.items():
        inner = result
        *parents, last = key.split(".")
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise ValueError(f"{key}: {parent} is set as a whole too")
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
