"""What a run folder tells: its configuration, its log, its scores with all that they depend on."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vcagen.config.options import SAMPLER_OPTIONS
from vcagen.system.files import read_yaml
from vcagen.training.metrics_log import read_log

DIGITS_ACCURACY = "digits_accuracy"
"""Metric: share of generated digits that a classifier trained on the real ones takes for their label."""


@dataclass(frozen=True)
class Score:
    """One evaluation: results.json, or results_EXTRACTOR.json, of a folder of samples."""

    folder: Path
    name: str
    """fid_50k, fd_pixels_2k and so on."""
    value: float
    metrics: dict[str, float]
    manifest: dict[str, Any]
    """What the score depends on, by fact; None where it is not known."""
    warnings: list[str]

    @property
    def gaps(self) -> list[str]:
        """Facts that are not known."""
        return [name for name, value in self.manifest.items() if value is None]


@dataclass(frozen=True)
class Run:
    """What a run folder holds."""

    folder: Path
    seed: int | None
    config: dict[str, Any]
    """config.yaml; empty where there is none."""
    log: list[dict[str, Any]]
    """Lines of metrics.jsonl."""
    scores: list[Score]

    @property
    def seconds_per_step(self) -> float | None:
        """Median over the lines of the log."""
        rates = [line["images_per_second"] for line in self.log if line.get("images_per_second")]
        return self.config["train"]["batch_size"] / statistics.median(rates) if rates and self.config else None


def read_run(
    folder: Path,
    seed: int | None = None,
    *,
    measure: Callable[[Path, Mapping[str, Any]], dict[str, float]] | None = None,
) -> Run:
    """Read a run folder; what is absent is empty.

    Args:
        measure: further metrics of a folder of samples, given its result.

    Raises:
        ValueError: a damaged file, or the configuration of something else.
    """
    path = folder / "config.yaml"
    config = read_config(path) if path.exists() else {}
    log = read_log(folder)
    scores = []
    for file in sorted(folder.glob("samples/*/results*.json")):
        try:
            result = json.loads(file.read_text())
            names = [name for name in result["metrics"] if re.match(r"(fid|fd_pixels)_", name)]
            metrics = {**result["metrics"], **(measure(file.parent, result) if measure else {})}
            value = result["metrics"][names[0]]
            manifest = _manifest(names[0], result, config)
            warnings = result.get("warnings") or []
            wrong = [name for name, found in metrics.items() if not isinstance(found, int | float)]
            wrong += [] if isinstance(warnings, list) else ["warnings"]
            if wrong or not isinstance(manifest["images"], int | None):
                raise TypeError(", ".join(wrong or ["n_samples"]))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}: not a result of an evaluation ({type(error).__name__}: {error})") from error
        scores.append(Score(file.parent, names[0], value, metrics, manifest, warnings))
    return Run(folder, seed, config, log, scores)


NEEDED: dict[str, dict[str, Any]] = {
    "model": {"size": str, "attention": str},
    "process": {"name": str},
    "data": {"horizontal_flip": bool},
    "train": {"batch_size": int, "learning_rate": int | float, "precision": str},
}
"""What a report reads of config.yaml."""


def read_config(path: Path) -> dict[str, Any]:
    """config.yaml of a run.

    Raises:
        ValueError: a damaged file, or the configuration of something else.
    """
    config = read_yaml(path)
    for part, kinds in NEEDED.items():
        section = config.get(part) if isinstance(config, dict) else None
        section = section if isinstance(section, dict) else {}
        if wrong := [f"{part}.{key}" for key, kind in kinds.items() if not isinstance(section.get(key), kind)]:
            raise ValueError(f"{path}: not the configuration of a run: {', '.join(wrong)} missing or of another kind")
    return dict(config)


def _manifest(name: str, result: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """All that a score depends on, from its result, from what sample.py wrote beside the images, and from the run."""
    made = result.get("sampling") or {}
    reference, weights = result.get("reference") or {}, result.get("weights") or {}
    options = [f"{option} {made[option]}" for option in SAMPLER_OPTIONS if option in made]
    guidance = [f"{option} {made[option]}" for option in ("cfg_interval", "guided_channels") if option in made]
    extractor = (result.get("extractor") or {}).get("name")
    train = config.get("train")
    return {
        "score": name,
        "images": result.get("n_samples"),
        "sampler": ", ".join([made["sampler"], *options]) if "sampler" in made else None,
        "guidance": ", ".join([str(made["cfg_scale"]), *guidance]) if "cfg_scale" in made else None,
        "labels": made.get("labels"),
        "seed": made.get("seed"),
        "step": made.get("step"),
        "ema_decay": "raw" if made.get("step") is not None and made.get("ema_decay") is None else made.get("ema_decay"),
        "decoder": _short(made.get("vae")),
        "precision": made.get("precision"),
        "reference": _named(reference.get("kind"), reference.get("stats_sha256")),
        "extractor": extractor if extractor == "pixels" else _named(weights.get("name"), weights.get("sha256")),
        "training": train
        and f"batch {train['batch_size']}, learning rate {train['learning_rate']:g}, "
        + ("mirrors" if config["data"]["horizontal_flip"] else "no mirrors")
        + ("" if train["precision"] == "no" else f", {train['precision']}"),
    }


def _short(text: Any) -> Any:
    return text[:12] if isinstance(text, str) else text


def _named(name: str | None, digest: str | None) -> str | None:
    return f"{name} {digest[:12]}" if name and digest else None
