"""From run folders to a table: published numbers beside ours, and which of ours may be compared with which.

A score is only as good as what is known about it. Every score keeps its manifest; a row whose manifest has gaps, or
differs from that of its neighbours, is marked with the reason and takes no part in differences.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vcagen.config.options import flat, may_change, plain
from vcagen.networks.cost import Cost
from vcagen.paper.run_results import DIGITS_ACCURACY, Run, Score
from vcagen.paper.table import Row, Table, markdown

COMPARED = (
    "sampler", "guidance", "images", "labels", "reference", "extractor", "decoder", "precision", "step",
    "ema_decay", "training",
)  # fmt: skip
"""Facts of a manifest that must agree between rows; the sampler within an process only."""


@dataclass(frozen=True)
class Line:
    """A row of a table with what our runs of it gave."""

    row: Row
    cost: Cost
    runs: list[Run]
    scores: list[Score]
    """The score of each run that has one."""
    marks: list[str]
    """Why it is not compared; empty where it is, or where it has no score."""

    @property
    def values(self) -> list[float]:
        """One score a run; none where the runs were not scored alike."""
        alike = len({_key(score) for score in self.scores}) == 1
        return [score.value for score in self.scores] if alike else []

    @property
    def mean(self) -> float | None:
        """Mean over the runs."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """Standard deviation over the runs (n - 1), from two runs on."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def accuracy(self) -> float | None:
        """Mean classifier accuracy, of digits."""
        found = [score.metrics[DIGITS_ACCURACY] for score in self.scores if DIGITS_ACCURACY in score.metrics]
        return statistics.fmean(found) if found else None

    @property
    def seconds_per_step(self) -> float | None:
        """Median over the runs."""
        found = [run.seconds_per_step for run in self.runs if run.seconds_per_step is not None]
        return statistics.median(found) if found else None


def _key(score: Score) -> tuple[str, ...]:
    return tuple(str(score.manifest[name]) for name in COMPARED)


def compare(table: Table, costs: Sequence[Cost], runs: Sequence[Sequence[Run]]) -> list[Line]:
    """Lines of the table, each with at most one score a run, and marks where they are not comparable.

    Where a run was scored several times, the score that is made like most others of its process is taken.
    """
    processes = [row.config().process.name for row in table.rows]
    votes: dict[str, Counter[tuple[str, ...]]] = {name: Counter() for name in processes}
    for process, group in zip(processes, runs, strict=True):
        for run in group:
            votes[process].update({_key(score) for score in run.scores if not score.gaps})
    lines = []
    for row, cost, group, process in zip(table.rows, costs, runs, processes, strict=True):
        wanted = [key for key, _ in votes[process].most_common()]
        chosen = {id(run): min(run.scores, key=lambda score: _rank(score, wanted)) for run in group if run.scores}
        marks = []
        for run in group if chosen else ():
            where = "" if run.seed is None else f"seed {run.seed}: "
            if id(run) not in chosen:
                marks.append(f"{where}no score")
            elif gaps := chosen[id(run)].gaps:
                marks.append(f"{where}no complete manifest: {', '.join(gaps)} unknown")
            marks += [f"{where}{text}" for text in differing_options(row, run.config)]
        lines.append(Line(row, cost, list(group), list(chosen.values()), marks))
    _mark_differences(lines, processes)
    return lines


def _rank(score: Score, wanted: Sequence[tuple[str, ...]]) -> tuple[float, int]:
    key = _key(score)
    return (wanted.index(key) if key in wanted else len(wanted)), -(score.manifest["images"] or 0)


def _mark_differences(lines: Sequence[Line], processes: Sequence[str]) -> None:
    """Mark the lines that differ from most in a fact; the first of equally many counts as most."""
    pairs = [(line, process) for line, process in zip(lines, processes, strict=True)]
    for name in COMPARED:
        for process in dict.fromkeys(processes):
            peers = [line for line, other in pairs if name != "sampler" or other == process]
            counts = Counter(
                str(s.manifest[name]) for line in peers for s in line.scores if s.manifest[name] is not None
            )
            for line in [line for line, other in pairs if other == process]:
                found = dict.fromkeys(str(s.manifest[name]) for s in line.scores if s.manifest[name] is not None)
                usual = counts.most_common(1)[0][0] if counts else None
                line.marks.extend(f"{name} {value}, most others {usual}" for value in found if value != usual)


def differing_options(row: Row, config: Mapping[str, Any]) -> list[str]:
    """Where a run was trained otherwise than its row says: all of the network and the process, and the row's options.

    Nothing where the run's configuration is not known.
    """
    recipe, found = flat(plain(row.config())), flat(config)
    keys = [key for key in recipe if key.startswith(("model.", "process.")) or key in row.options]
    return [
        f"{key} {found.get(key)} in the run, {recipe[key]} in the table"
        for key in keys
        if found and not may_change(key) and found.get(key) != recipe[key]
    ]


def difference(line: Line, lines: Sequence[Line]) -> tuple[float | None, float | None]:
    """Score minus that of the baseline: published, and ours where both are comparable."""
    base = next((other for other in lines if other.row.name == line.row.baseline), None)
    if base is None:
        return None, None
    published = (line.row.published.get("fid"), base.row.published.get("fid"))
    ours = (line.mean, base.mean) if not line.marks and not base.marks else (None, None)
    return _minus(*published), _minus(*ours)


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def table_values(title: str, lines: Sequence[Line]) -> dict[str, Any]:
    """All numbers of the report, for JSON."""
    rows = []
    for line in lines:
        published, ours = difference(line, lines)
        rows.append(
            {
                "name": line.row.name,
                "baseline": line.row.baseline,
                "params": line.cost.params,
                "multiply_adds": line.cost.multiply_adds,
                "published": line.row.published,
                "published_difference": published,
                "score_name": line.scores[0].name if line.values else None,
                "score": line.mean,
                "spread": line.spread,
                "difference": ours,
                "accuracy": line.accuracy,
                "seconds_per_step": line.seconds_per_step,
                "marks": line.marks,
                "note": line.row.note,
                "runs": [
                    {"folder": str(s.folder), "metrics": s.metrics, "manifest": s.manifest, "warnings": s.warnings}
                    for s in line.scores
                ],
            }
        )
    return {"title": title, "rows": rows}


def table_cells(lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table, without the columns in which no row has anything."""
    names = sorted({line.scores[0].name for line in lines if line.values})
    score = names[0] if len(names) == 1 else "score"
    header = ["network", "params (M)", "published", "GFLOPs", "published", "FID-50K published", "difference published",
              score, "+-", "difference", "digits recognised", "ms a step", "runs"]  # fmt: skip
    rows = []
    for line in lines:
        published, ours = difference(line, lines)
        mark, name = (" *" if line.marks else ""), ("" if len(names) < 2 or not line.values else line.scores[0].name)
        rows.append(
            [
                line.row.name,
                f"{line.cost.params / 1e6:.2f}",
                _number(line.row.published.get("params"), ".1f"),
                f"{line.cost.multiply_adds / 1e9:#.4g}",
                _number(line.row.published.get("gflops"), ".1f"),
                _number(line.row.published.get("fid"), ".1f"),
                _number(published, "+.1f"),
                f"{_number(line.mean, '#.4g')} {name}".strip() + (mark if line.scores else ""),
                _number(line.spread, ".3f"),
                _number(ours, "+#.3g"),
                _number(line.accuracy, ".1%"),
                _number(None if line.seconds_per_step is None else 1e3 * line.seconds_per_step, ".1f"),
                str(len(line.scores) or ""),
            ]
        )
    keep = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return [header[i] for i in keep], [[row[i] for i in keep] for row in rows]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}".rstrip(".")


def table_text(title: str, lines: Sequence[Line], picture: str) -> str:
    """The report in Markdown."""
    parts = [f"# {title}", markdown(*table_cells(lines)), "GFLOPs are 1e9 multiply-adds, as in the paper."]
    if any(line.row.baseline for line in lines):
        parts.append("A difference is the score of a row minus that of its baseline; below 0 the row is better.")
    if any(line.spread is not None for line in lines):
        parts.append("+- is the standard deviation over the runs of a row, which differ in their seed.")
    parts.append(f"![Scores]({picture})")
    if any(line.marks for line in lines):
        marked = [f"- {line.row.name}: {'; '.join(line.marks)}" for line in lines if line.marks]
        parts += ["## Not compared (*)", "\n".join(marked)]
    scored = [line for line in lines if line.scores]
    if scored:
        parts += ["## How the scores were made", markdown(*_manifest_cells(scored))]
    else:
        parts.append("No run has a score yet: published numbers only.")
    warnings = Counter(warning for line in lines for score in line.scores for warning in score.warnings)
    if warnings:
        parts += ["## Warnings of the evaluations", "\n".join(f"- {n} x {text}" for text, n in warnings.items())]
    if notes := [f"- {line.row.name}: {line.row.note}" for line in lines if line.row.note]:
        parts += ["## Notes", "\n".join(notes)]
    return "\n\n".join(parts) + "\n"


def _manifest_cells(lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """A row for each way in which the scores of a line were made; the seeds together."""
    names = list(lines[0].scores[0].manifest)
    rows = []
    for line in lines:
        groups: dict[tuple[str, ...], list[Score]] = {}
        for score in line.scores:
            groups.setdefault(_key(score), []).append(score)
        for scores in groups.values():
            facts = {**scores[0].manifest, "seed": ", ".join(str(score.manifest["seed"]) for score in scores)}
            rows.append([line.row.name, *("unknown" if facts[n] in (None, "None") else str(facts[n]) for n in names)])
    return ["network", *names], rows


def run_values(run: Run, cost: Cost | None) -> dict[str, Any]:
    """Summary of one run, for JSON."""
    return {
        "run": str(run.folder),
        "params": cost and cost.params,
        "multiply_adds": cost and cost.multiply_adds,
        "seconds_per_step": run.seconds_per_step,
        "last": run.log[-1] if run.log else None,
        "scores": [
            {"folder": str(s.folder), "metrics": s.metrics, "manifest": s.manifest, "warnings": s.warnings}
            for s in run.scores
        ],
    }


def run_text(run: Run, cost: Cost | None, picture: str) -> str:
    """Summary of one run, in Markdown."""
    lines = []
    if run.config:
        model, process = run.config["model"], run.config["process"]["name"]
        size = "" if cost is None else f", {cost.params / 1e6:.2f} M parameters, {cost.multiply_adds / 1e9:#.4g} GFLOPs"
        lines.append(f"- network: {process} {model['size']} {model['attention']}{size}")
    if run.log:
        last = {name: value for name, value in run.log[-1].items() if value is not None}
        lines.append("- last line of the log: " + ", ".join(f"{name} {value:.6g}" for name, value in last.items()))
    if run.seconds_per_step is not None:
        lines.append(f"- time: {1e3 * run.seconds_per_step:.1f} ms a step")
    lines += ["", f"![Losses]({picture})"] if run.log else ["- no log yet"]
    for score in run.scores:
        metrics = [[name, f"{value:.6g}"] for name, value in score.metrics.items()]
        facts = [f"{name} {'unknown' if value is None else value}" for name, value in score.manifest.items()]
        lines += ["", f"## {score.folder.name}", "", markdown(["metric", "value"], metrics), "", "; ".join(facts)]
        lines += ["", *(f"- warning: {warning}" for warning in score.warnings)] if score.warnings else []
    if not run.scores:
        lines += ["", "No scores yet."]
    return f"# {run.folder}\n\n" + "\n".join(lines) + "\n"
