"""How good images are after how many network calls, for every sampler of a run, with and without guidance."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor
from tqdm import tqdm

from vcagen.bench._timing import open_device
from vcagen.config.job_options import CallsBenchConfig
from vcagen.evaluation.evaluate import Evaluator
from vcagen.evaluation.features import load_extractor
from vcagen.evaluation.reference import open_reference
from vcagen.paper.table import markdown
from vcagen.processes.samplers import fixed_step_samplers
from vcagen.sampling.load_run import LoadedRun, load
from vcagen.system.files import FORMAT, read_json, write_json
from vcagen.training.plots import drawing


class Point(TypedDict):
    """A score."""

    sampler: str
    num_steps: int
    cfg_scale: float
    calls: float
    score: str
    value: float


class CallsFile(TypedDict):
    """calls.json"""

    points: list[Point]


def run(config: CallsBenchConfig) -> None:
    """Print a table and write calls.json and calls.png; points that calls.json has are not made again."""
    loaded = load(config.run_dir, device=open_device(config.device, config.threads))
    source = Path(config.run_dir)
    out = Path(config.out or (source if source.is_dir() else source.parent))
    facts = {"format": FORMAT, "weights_sha256": loaded.weights_sha256, "images": config.num_images,
             "extractor": config.extractor, "reference": config.reference, "labels": "balanced"}  # fmt: skip
    points: list[dict[str, Any]] = []
    if (file := out / "calls.json").exists():
        before: dict[str, Any] = dict(read_json(file, CallsFile))
        points = before.pop("points")
        if before != facts:
            raise ValueError(f"{file}: of other weights, images or scores; give another out")
    have = {(point["sampler"], point["num_steps"], point["cfg_scale"]) for point in points}
    wanted = [setting for setting in _settings(loaded, config) if setting not in have]
    samplers = fixed_step_samplers(loaded.config.process.name)
    extractor = load_extractor(config.extractor, device=loaded.vae.device)
    reference = open_reference(config.reference, extractor, rows=False, shape=loaded.image_shape)
    with tqdm(wanted, desc="calls", unit="point", dynamic_ncols=True, disable=not wanted) as bar:
        for sampler, num_steps, cfg_scale in bar:
            bar.set_postfix_str(f"{sampler} {num_steps} {cfg_scale}")
            options: dict[str, Any] = {**samplers[sampler][0], "num_steps": num_steps, "cfg_scale": cfg_scale}
            counted, calls = _counted(loaded)
            evaluator = Evaluator(extractor, reference, config.num_images, precision_recall=False)
            for start in range(0, config.num_images, config.batch):
                batch = range(start, min(start + config.batch, config.num_images))
                images = counted.sample("balanced", indices=batch, batch=config.batch, output="tensor", **options)
                assert isinstance(images, Tensor)
                evaluator.update(images, batch)
            name, score = next(iter(evaluator.finalize()["metrics"].items()))
            chunks = -(-config.num_images // config.batch)
            points.append({"sampler": sampler, "num_steps": num_steps, "cfg_scale": cfg_scale,
                           "calls": len(calls) / chunks, "score": name, "value": score})  # fmt: skip
            write_json(file, {**facts, "points": points})
    points.sort(key=lambda point: (point["cfg_scale"], point["sampler"], point["calls"]))
    print(_table(points))
    _plot(out / "calls.png", points)


def _settings(run: LoadedRun, config: CallsBenchConfig) -> Iterator[tuple[str, int, float]]:
    """Sampler, steps and guidance of each point, cheap ones first."""
    for calls in sorted(config.calls):
        for scale in config.cfg_scales:
            for sampler, (_, calls_of_step) in fixed_step_samplers(run.config.process.name).items():
                if steps := calls // calls_of_step:
                    yield sampler, steps, scale


def _counted(run: LoadedRun) -> tuple[LoadedRun, list[None]]:
    """The run with a list that grows with every call of its network."""
    calls: list[None] = []

    def network(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        calls.append(None)
        return run.network(x, t, y)

    return dataclasses.replace(run, network=network), calls


def _table(points: list[dict[str, Any]]) -> str:
    """A row a sampler and guidance, a column a number of calls."""
    calls = sorted({round(point["calls"]) for point in points})
    rows: dict[tuple[float, str], dict[int, float]] = {}
    for point in points:
        rows.setdefault((point["cfg_scale"], point["sampler"]), {})[round(point["calls"])] = point["value"]
    cells = [[f"{sampler}, cfg {scale:g}", *(f"{row[n]:#.4g}" if n in row else "" for n in calls)]
             for (scale, sampler), row in rows.items()]  # fmt: skip
    return markdown([f"{points[0]['score']} after calls", *map(str, calls)], cells)


def _plot(path: Path, points: list[dict[str, Any]]) -> None:
    """Score over calls; guided samplers dashed."""
    lines: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for point in points:
        lines.setdefault((point["sampler"], point["cfg_scale"]), []).append((point["calls"], point["value"]))
    colours = {sampler: f"C{i}" for i, sampler in enumerate(dict.fromkeys(sampler for sampler, _ in lines))}
    with drawing(path, 8, 5) as axes:
        for (sampler, scale), line in lines.items():
            axes.plot(*zip(*line, strict=True), "o-" if scale == 1 else "o--", color=colours[sampler], markersize=4,
                      label=f"{sampler}, cfg {scale:g}")  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="network calls", ylabel=points[0]["score"])
        axes.xaxis.set_major_formatter("{x:g}")
        axes.legend(fontsize=8)
