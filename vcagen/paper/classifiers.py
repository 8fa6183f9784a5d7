"""Table 1: networks of timm, their cost, and the top-1 that timm's scripts have measured, beside the paper's."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch

import vcagen.recognition  # noqa: F401  # registers its networks with timm
from vcagen.config.command_line import from_mapping
from vcagen.networks.cost import Cost, measure
from vcagen.paper.table import markdown
from vcagen.system.files import prefixing, read_yaml, reading, write_json, write_text


@dataclass(frozen=True)
class Classifier:
    """One network of a table."""

    name: str
    model: str
    """Its name in timm, and that of its folder below --runs."""
    published: dict[str, float] = field(default_factory=dict)
    """params in millions, gflops in 1e9 multiply-adds, top1 in percent."""
    baseline: str | None = None
    """Name of the row it is compared with."""
    note: str | None = None


@dataclass(frozen=True)
class ClassifierTable:
    """The keys of a table file of classifiers."""

    classifiers: list[Classifier]
    title: str = ""
    note: str = ""


@dataclass(frozen=True)
class TopOne:
    """A measured top-1."""

    percent: float
    source: str
    """The file, and the epoch where it is a training's."""


def is_classifier_table(path: str | Path) -> bool:
    """Whether a table file lists classifiers."""
    content = read_yaml(path)
    return isinstance(content, dict) and "classifiers" in content


def report_classifiers(path: str | Path, runs: str | Path, out: str | Path) -> str:
    """Write NAME.md and .json of a table of classifiers into `out`; returns the Markdown.

    Raises:
        ValueError: not such a table, a network that timm does not know, or a damaged file of results.
    """
    table = from_mapping(ClassifierTable, {"title": Path(path).stem, **read_yaml(path)}, f"{path}: ")
    names = [row.name for row in table.classifiers]
    for row in table.classifiers:
        if row.baseline is not None and row.baseline not in names:
            raise ValueError(f"{path}: baseline: {row.baseline} is no row")
    costs, found = [], []
    for row in table.classifiers:
        with prefixing(f"{path}: row {row.name}: "):
            costs.append(classifier_cost(row.model))
        found.append(read_top1(Path(runs), row.model))
    rows = [_values(i, table.classifiers, costs, found) for i in range(len(names))]
    text = _text(table, rows)
    write_json(Path(out) / f"{Path(path).stem}.json", {"title": table.title, "rows": rows})
    write_text(Path(out) / f"{Path(path).stem}.md", text)
    return text


def classifier_cost(model: str) -> Cost:
    """Cost of a network of timm for one image of the size it is made for, with 1,000 classes.

    Raises:
        ValueError: timm does not know it.
    """
    if not timm.is_model(model):
        raise ValueError(f"model: timm has no {model}")
    with torch.device("meta"):
        network = timm.create_model(model).eval()
        return measure(network, (torch.zeros(1, *network.pretrained_cfg["input_size"]),))


def read_top1(runs: Path, model: str) -> TopOne | None:
    """The top-1 of a network from a file of timm's scripts; None where there is none.

    In the order of preference: results.csv or results.json of `validate.py --results-file`, in RUNS/MODEL or, of
    several networks, in RUNS itself; summary.csv of train.py in RUNS/MODEL, whose last epoch counts.

    Raises:
        ValueError: a damaged file, or one in the network's folder that holds others alone.
    """
    for folder in (runs / model, runs):
        for file in (folder / "results.csv", folder / "results.json"):
            if file.exists():
                with reading(file):
                    mine = [result for result in _read_results(file) if result["model"].split(".")[0] == model]
                    if mine:
                        side = mine[-1]["img_size"]
                        return TopOne(float(mine[-1]["top1"]), f"{file.relative_to(runs)}, images of {side}")
                if folder != runs:
                    raise ValueError(f"{file}: no result of {model}")
    summary = runs / model / "summary.csv"
    if not summary.exists():
        return None
    with reading(summary), summary.open(newline="") as lines:
        last = list(csv.DictReader(lines))[-1]
        return TopOne(float(last["eval_top1"]), f"{summary.relative_to(runs)}, epoch {last['epoch']}")


def _read_results(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".json":
        results = json.loads(file.read_text())
        return results if isinstance(results, list) else [results]
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def _values(
    index: int, table: Sequence[Classifier], costs: Sequence[Cost], found: Sequence[TopOne | None]
) -> dict[str, Any]:
    """All numbers of a row, for JSON."""
    row, top1 = table[index], found[index]
    base = next((i for i, other in enumerate(table) if other.name == row.baseline), None)
    ours = published = None
    if base is not None:
        if top1 is not None and (other := found[base]) is not None:
            ours = top1.percent - other.percent
        if "top1" in row.published and "top1" in table[base].published:
            published = row.published["top1"] - table[base].published["top1"]
    return {
        **asdict(row), **asdict(costs[index]), "published_difference": published, "difference": ours,
        "top1": None if top1 is None else top1.percent, "source": None if top1 is None else top1.source,
    }  # fmt: skip


def _text(table: ClassifierTable, rows: Sequence[dict[str, Any]]) -> str:
    """The table in Markdown, without the columns in which no row has anything."""
    header = ["network", "params (M)", "published", "GFLOPs", "published", "top-1 published", "difference published",
              "top-1", "difference", "timm's name"]  # fmt: skip
    cells = [
        [
            row["name"],
            f"{row['params'] / 1e6:.3f}",
            _number(row["published"].get("params"), ".1f"),
            f"{row['multiply_adds'] / 1e9:.3f}",
            _number(row["published"].get("gflops"), ".1f"),
            _number(row["published"].get("top1"), ".1f"),
            _number(row["published_difference"], "+.1f"),
            _number(row["top1"], ".2f"),
            _number(row["difference"], "+.2f"),
            f"`{row['model']}`",
        ]
        for row in rows
    ]
    keep = [i for i in range(len(header)) if any(row[i] for row in cells)]
    parts = [f"# {table.title}", markdown([header[i] for i in keep], [[row[i] for i in keep] for row in cells])]
    parts.append("GFLOPs are 1e9 multiply-adds of products and convolutions, as in the paper; top-1 is in percent.")
    parts += [table.note] if table.note else []
    if sources := [f"- {row['name']}: {row['source']}" for row in rows if row["source"]]:
        parts += ["## Where top-1 is from", "\n".join(sources)]
    else:
        parts.append("No run has a result yet: published top-1 only.")
    if notes := [f"- {row['name']}: {row['note']}" for row in rows if row["note"]]:
        parts += ["## Notes", "\n".join(notes)]
    return "\n\n".join(parts) + "\n"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"
