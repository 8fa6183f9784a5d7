"""From a table file or a run folder to the files of a report."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vcagen.build import build_cost
from vcagen.config import command_line as cli
from vcagen.config.options import Config
from vcagen.data.latents import DataSpec
from vcagen.evaluation.image_source import open_samples
from vcagen.networks import weights as checkpoints
from vcagen.paper import plots
from vcagen.paper.comparison import compare, run_text, run_values, table_text, table_values
from vcagen.paper.digits import DigitClassifier
from vcagen.paper.run_results import DIGITS_ACCURACY, read_run
from vcagen.paper.table import Latents, Table
from vcagen.sampling.noise import LabelRule, SeededNoise
from vcagen.system.files import atomic_file, write_json
from vcagen.system.run_folder import latest_checkpoint


def data_spec(latents: Latents) -> DataSpec:
    """What networks see, as far as their cost depends on it."""
    return DataSpec(latents.channels, latents.size, latents.size, latents.num_classes, (), 8 * latents.size, {})


class DigitAccuracy:
    """Classifier accuracy of sample folders whose reference is the digits; trains the classifier when first needed."""

    def __init__(self) -> None:
        self._classifier: DigitClassifier | None = None

    def __call__(self, folder: Path, result: Mapping[str, Any]) -> dict[str, float]:
        """The metric, or none: other data, images that are gone, or labels that are not known."""
        made = result.get("sampling") or {}
        stored = next((path for path in (folder / "samples.npz", folder / "images") if path.exists()), None)
        if (result.get("reference") or {}).get("kind") != "digits" or "labels" not in made or stored is None:
            return {}
        self._classifier = self._classifier or DigitClassifier()
        images = torch.cat(list(open_samples(str(stored)).batches(1000)))
        rule = made["labels"] if isinstance(made["labels"], str) else ",".join(map(str, made["labels"]))
        labels = LabelRule(rule, 10)(range(len(images)), SeededNoise(made["seed"]))
        return {DIGITS_ACCURACY: self._classifier.accuracy(images, labels)}


def report_table(table: Table, name: str, runs: str | Path, out: str | Path) -> str:
    """Write NAME.md, .csv, .json and .png of a table and the runs below `runs` into `out`; returns the Markdown."""
    measure, data = DigitAccuracy(), data_spec(table.latents)
    costs = [build_cost(config.model, config.process, data) for config in (row.config() for row in table.rows)]
    groups = [
        [read_run(folder, seed, measure=measure) for seed, folder in table.runs(row, runs).items()]
        for row in table.rows
    ]
    lines = compare(table, costs, groups)
    out = Path(out)
    picture = out / f"{name}.png"
    (plots.plot_spread if table.seeds else plots.plot_pairs)(picture, table.title, lines)
    values = table_values(table.title, lines)
    text = table_text(table.title, lines, picture.name)
    write_json(out / f"{name}.json", values)
    _write_csv(out / f"{name}.csv", values["rows"])
    with atomic_file(out / f"{name}.md") as temporary:
        temporary.write_text(text)
    return text


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Flat columns: published numbers by name, marks joined, the number of runs."""
    flat = []
    for row in rows:
        published = {f"published_{key}": row["published"].get(key) for key in ("params", "gflops", "fid")}
        plain = {key: value for key, value in row.items() if key != "published"}
        flat.append({**plain, **published, "marks": "; ".join(row["marks"]), "runs": len(row["runs"])})
    with atomic_file(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(flat[0]))
        writer.writeheader()
        writer.writerows(flat)


def report_run(folder: str | Path, out: str | Path | None = None) -> str:
    """Write report.md, report.json and loss.png of a run into `out`, by default the run folder itself.

    Raises:
        ValueError: not a run folder.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").exists():
        raise ValueError(f"{folder}: no run folder (config.yaml is missing)")
    run = read_run(folder, measure=DigitAccuracy())
    newest = latest_checkpoint(folder)
    metadata = checkpoints.read_metadata(newest / "model.safetensors") if newest else None
    cost = None
    if metadata is not None:
        config = cli.from_mapping(Config, metadata["config"])
        cost = build_cost(config.model, config.process, DataSpec.from_dict(metadata["data"]))
    out = folder if out is None else Path(out)
    picture = plots.plot_losses(folder, out)
    text = run_text(run, cost, picture.name)
    write_json(out / "report.json", run_values(run, cost))
    with atomic_file(out / "report.md") as temporary:
        temporary.write_text(text)
    return text
