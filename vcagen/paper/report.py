"""The files of a report: a table with our runs beside the published numbers, or one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vcagen.build import build_model, with_kernel
from vcagen.config.command_line import make_named
from vcagen.config.options import Config
from vcagen.data.latents import DataSpec
from vcagen.networks.cost import Cost, measure
from vcagen.networks.weights import own_metadata
from vcagen.paper import plots
from vcagen.paper.comparison import ComparedRow, compare, difference, interval
from vcagen.paper.run_results import Column, RunResults, Score, read_run
from vcagen.paper.table import Table, markdown
from vcagen.system.files import reading, write_json, write_text
from vcagen.system.run_folder import latest_checkpoint
from vcagen.training.plots import plot_losses


def report_table(table: Table, name: str, runs: str | Path, out: str | Path, *, score: str | None = None) -> str:
    """Write NAME.md, .json and .png of a table and the runs below `runs` into `out`; returns the Markdown.

    Of a table with seeds also NAME_steps.png, scores over the steps, and NAME_samples.png, images of the same noise.

    Raises:
        ValueError: a network that cannot be built, a column that does not exist, or a damaged file of a run.
    """
    latents = table.latents
    data = DataSpec(latents.channels, latents.size, latents.size, latents.num_classes, (), 8 * latents.size, {})
    columns: list[Column] = [make_named("columns", name) for name in table.columns]
    costs = [cost_of(row.config(), data) for row in table.rows]
    groups = [
        [read_run(folder, seed, score=score, columns=columns) for seed, folder in table.runs(row, runs).items()]
        for row in table.rows
    ]
    rows, out = compare(table, costs, groups), Path(out)
    (plots.plot_spread if table.seeds else plots.plot_pairs)(out / f"{name}.png", table.title, rows)
    if table.seeds:
        plots.plot_steps(out / f"{name}_steps.png", table.title, rows)
        plots.plot_samples(out / f"{name}_samples.png", table.title, rows)
    text = table_text(table.title, rows, f"{name}.png", columns)
    write_json(out / f"{name}.json", table_values(table.title, rows, columns))
    write_text(out / f"{name}.md", text)
    return text


def report_run(folder: str | Path, out: str | Path, *, score: str | None = None) -> str:
    """Write report.md, report.json and loss.png of a run into `out`.

    Raises:
        ValueError: not a run folder, or a damaged file in it.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").exists():
        raise ValueError(f"{folder}: no run folder (config.yaml is missing)")
    run, newest, cost = read_run(folder, score=score), latest_checkpoint(folder), None
    if newest is not None and run.config is not None:
        with reading(path := newest / "model.safetensors"):
            cost = cost_of(run.config, DataSpec.from_dict(own_metadata(path)["data"]))
    out = Path(out)
    picture = plot_losses(folder, out)
    text = run_text(run, cost, picture.name)
    write_json(out / "report.json", run_values(run, cost))
    write_text(out / "report.md", text)
    return text


def cost_of(config: Config, data: DataSpec) -> Cost:
    """Cost of the network of a configuration."""
    with torch.device("meta"):
        return measure(build_model(with_kernel(config.model, "maps"), config.process, data))


def _score_values(scores: Sequence[Score]) -> list[dict[str, Any]]:
    return [
        {"folder": str(s.folder), "score": s.name, "metrics": s.metrics, "facts": s.facts, "warnings": s.warnings}
        for s in scores
    ]


def table_values(title: str, rows: Sequence[ComparedRow], columns: Sequence[Column] = ()) -> dict[str, Any]:
    """All numbers of a table, for JSON."""
    values = []
    for row in rows:
        published, ours = difference(row, rows)
        values.append(
            {
                "name": row.row.name,
                "baseline": row.row.baseline,
                "params": row.cost.params,
                "multiply_adds": row.cost.multiply_adds,
                "published": row.row.published,
                "published_difference": published,
                "score_name": row.scores[0].name if row.values else None,
                "score": row.mean,
                "spread": row.spread,
                "difference": ours,
                "difference_95": interval(row, rows),
                **{column.title: value for column, value in zip(columns, row.columns, strict=False)},
                "seconds_per_step": row.seconds_per_step,
                "marks": row.marks,
                "note": row.row.note,
                "runs": _score_values(row.scores),
            }
        )
    return {"title": title, "rows": values}


def table_cells(rows: Sequence[ComparedRow], columns: Sequence[Column]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a table, without the columns in which no row has anything."""
    names = sorted({row.scores[0].name for row in rows if row.values})
    header = ["network", "params (M)", "published", "GFLOPs", "published", "FID-50K published", "difference published",
              names[0] if len(names) == 1 else "score", "+-", "difference", "95 %",
              *(column.title for column in columns), "ms a step", "runs"]  # fmt: skip
    cells = []
    for row in rows:
        published, ours = difference(row, rows)
        mark, name = (" *" if row.marks else ""), ("" if len(names) < 2 or not row.values else row.scores[0].name)
        own = row.columns or [None] * len(columns)
        cells.append(
            [
                row.row.name,
                f"{row.cost.params / 1e6:.2f}",
                _number(row.row.published.get("params"), ".1f"),
                f"{row.cost.multiply_adds / 1e9:#.4g}",
                _number(row.row.published.get("gflops"), ".1f"),
                _number(row.row.published.get("fid"), ".1f"),
                _number(published, "+.1f"),
                f"{_number(row.mean, '#.4g')} {name}".strip() + (mark if row.scores else ""),
                _number(row.spread, ".3f"),
                _number(ours, "+#.3g"),
                "" if (half := interval(row, rows)) is None else f"+- {half:#.3g}",
                *(_number(value, column.form) for column, value in zip(columns, own, strict=True)),
                _number(None if row.seconds_per_step is None else 1e3 * row.seconds_per_step, ".1f"),
                str(len(row.scores) or ""),
            ]
        )
    keep = [i for i in range(len(header)) if any(row[i] for row in cells)]
    return [header[i] for i in keep], [[row[i] for i in keep] for row in cells]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}".rstrip(".")


def table_text(title: str, rows: Sequence[ComparedRow], picture: str, columns: Sequence[Column] = ()) -> str:
    """A table in Markdown."""
    parts = [f"# {title}", markdown(*table_cells(rows, columns)), "GFLOPs are 1e9 multiply-adds, as in the paper."]
    if any(row.row.baseline for row in rows):
        parts.append("A difference is the score of a row minus that of its baseline; below 0 the row is better.")
    if any(row.spread is not None for row in rows):
        parts.append("+- is the standard deviation over the runs of a row, which differ in their seed.")
    if any(interval(row, rows) is not None for row in rows):
        parts.append("95 % is the interval of the difference, by Student's t over the pairs of runs of one seed, which "
                     "share batches and noise.")  # fmt: skip
    parts.append(f"![Scores]({picture})")
    if marked := [f"- {row.row.name}: {'; '.join(row.marks)}" for row in rows if row.marks]:
        parts += ["## Not compared (*)", "\n".join(marked)]
    made: dict[str, list[tuple[str, int | None]]] = {}
    for row in rows:
        for score in row.scores:
            made.setdefault(_facts({**score.facts, "seed": None}), []).append((row.row.name, score.facts.get("seed")))
    if made:
        lines = [f"- {_listed(names)}: {facts}, seed {_listed(seeds)}"
                 for facts, found in made.items() for names, seeds in [zip(*found, strict=True)]]  # fmt: skip
        parts += ["## How the scores were made", "\n".join(lines)]
    else:
        parts.append("No run has a score yet: published numbers only.")
    if warnings := Counter(warning for row in rows for score in row.scores for warning in score.warnings):
        parts += ["## Warnings of the evaluations", "\n".join(f"- {n} x {text}" for text, n in warnings.items())]
    if notes := [f"- {row.row.name}: {row.row.note}" for row in rows if row.row.note]:
        parts += ["## Notes", "\n".join(notes)]
    return "\n\n".join(parts) + "\n"


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, dict.fromkeys(values)))


def _facts(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)


def run_values(run: RunResults, cost: Cost | None) -> dict[str, Any]:
    """All numbers of one run, for JSON."""
    return {
        "run": str(run.folder),
        "params": cost and cost.params,
        "multiply_adds": cost and cost.multiply_adds,
        "seconds_per_step": run.seconds_per_step,
        "last": run.log[-1] if run.log else None,
        "scores": _score_values(run.scores),
    }


def run_text(run: RunResults, cost: Cost | None, picture: str) -> str:
    """One run in Markdown."""
    lines = []
    if run.config:
        model, process = run.config.model, run.config.process.name
        lines.append(f"- network: {process} {model.size} {model.attention}" + (f", {cost}" if cost else ""))
    if run.log:
        last = {name: value for name, value in run.log[-1].items() if value is not None}
        lines.append("- last line of the log: " + ", ".join(f"{name} {value:.6g}" for name, value in last.items()))
    if run.seconds_per_step is not None:
        lines.append(f"- time: {1e3 * run.seconds_per_step:.1f} ms a step")
    lines += ["", f"![Losses]({picture})"] if run.log else ["- no log yet"]
    for score in run.scores:
        metrics = [[name, f"{value:.6g}"] for name, value in score.metrics.items()]
        lines += ["", f"## {score.folder.name}", "", markdown(["metric", "value"], metrics), "", _facts(score.facts)]
        lines += ["", *(f"- warning: {warning}" for warning in score.warnings)] if score.warnings else []
    if not run.scores:
        lines += ["", "No scores yet."]
    return f"# {run.folder}\n\n" + "\n".join(lines) + "\n"
