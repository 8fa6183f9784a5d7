"""What a run folder tells: its configuration, its log, its scores with all that they depend on."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict

import msgspec

from vcagen.config.command_line import from_mapping
from vcagen.config.options import Config
from vcagen.networks.weights import read_metadata
from vcagen.system.files import read_yaml, reading
from vcagen.system.run_folder import latest_checkpoint
from vcagen.training.metrics_log import read_log

NOT_COMPARED = ("format", "num_images", "batch", "process", "weights_sha256")
"""What a manifest of images says of them that differs between the rows of a table, or tells nothing of the score."""


class Reference(TypedDict):
    """Of a result."""

    kind: str
    stats_sha256: str


class Weights(TypedDict, total=False):
    """Of the extractor of a result."""

    sha256: str


class Extractor(TypedDict):
    """Of a result."""

    name: str


@dataclass(frozen=True)
class Result:
    """What a report looks at in a results.json."""

    metrics: dict[str, float]
    n_samples: int
    reference: Reference
    weights: Weights
    extractor: Extractor
    warnings: list[str]
    sampling: dict[str, Any] | None = None


class Column(Protocol):
    """A column that a table file adds to its report: made without arguments, called for every scored run."""

    title: str
    form: str
    """Format of its numbers."""

    def __call__(self, samples: Path, sampling: Mapping[str, Any]) -> float | None:
        """The number of a folder of samples and its manifest; None where there is none."""


@dataclass(frozen=True)
class Score:
    """One evaluation: results.json, or results_EXTRACTOR.json, of a folder of samples."""

    folder: Path
    name: str
    """fid_50k, fd_pixels_2k and so on."""
    value: float
    metrics: dict[str, float]
    facts: dict[str, Any]
    """What the score depends on, beside the network."""
    sampling: dict[str, Any]
    """The manifest of the images; empty where sample.py did not make them."""
    warnings: list[str]


@dataclass(frozen=True)
class RunResults:
    """What a run folder holds."""

    folder: Path
    seed: int | None
    config: Config | None
    """config.yaml; None where there is none."""
    log: list[dict[str, Any]]
    """Lines of metrics.jsonl."""
    scores: list[Score]
    """The newest evaluation first."""
    columns: list[float | None]
    """Further numbers of the newest."""

    @property
    def score(self) -> Score | None:
        """The score that stands for the run."""
        return self.scores[0] if self.scores else None

    @property
    def seconds_per_step(self) -> float | None:
        """Median over the lines of the log."""
        rates = [line["images_per_second"] for line in self.log if line.get("images_per_second")]
        return self.config.train.batch_size / statistics.median(rates) if rates and self.config else None


def read_run(
    folder: Path, seed: int | None = None, *, score: str | None = None, columns: Sequence[Column] = ()
) -> RunResults:
    """Read a run folder; what is absent is empty.

    Args:
        score: only evaluations with this metric. Default: all; the score is their first metric.

    Raises:
        ValueError: a damaged file, by its path.
    """
    if (newest := latest_checkpoint(folder)) is not None:
        read_metadata(newest / "model.safetensors")  # refuses a run of format 1
    config, path = None, folder / "config.yaml"
    if path.exists():
        with reading(path):
            config = from_mapping(Config, read_yaml(path))
    files = sorted(folder.glob("samples/*/results*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    scores = [found for file in files if (found := _read_score(file, score, config)) is not None]
    with reading(scores[0].folder if scores else folder):
        values = [column(scores[0].folder, scores[0].sampling) for column in columns] if scores else []
    return RunResults(folder, seed, config, read_log(folder), scores, values)


def _read_score(file: Path, name: str | None, config: Config | None) -> Score | None:
    with reading(file):
        result = msgspec.convert(json.loads(file.read_bytes()), Result)
        metrics = result.metrics
        name = name or next(iter(metrics))
        if name not in metrics:
            return None
        sampling, reference = result.sampling or {}, result.reference
        facts = {
            **({key: value for key, value in sampling.items() if key not in NOT_COMPARED} or {"sampling": "unknown"}),
            **({"vae": sampling["vae"][:12]} if "vae" in sampling else {}),
            "images": result.n_samples,
            "reference": f"{reference['kind']} {reference['stats_sha256'][:12]}",
            "extractor": f"{result.extractor['name']} {result.weights.get('sha256', '')[:12]}".strip(),
        }
        if config is not None:
            recipe = {"mirrors": config.data.horizontal_flip, "batch_size": config.train.batch_size,
                      "learning_rate": config.train.learning_rate, "precision": config.train.precision}  # fmt: skip
            facts |= {f"training {key}": value for key, value in recipe.items()}
        return Score(file.parent, name, metrics[name], metrics, facts, sampling, result.warnings)
