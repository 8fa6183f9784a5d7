"""Published numbers beside ours, and which of ours may be compared.

A score is only as good as what is known about it: a row whose score was made otherwise than that of its neighbour is
marked with the reason, and takes no part in differences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from scipy.special import stdtrit

from vcagen.config.options import Config, flatten, may_change, to_plain
from vcagen.networks.cost import Cost
from vcagen.paper.run_results import RunResults, Score
from vcagen.paper.table import Row, Table


@dataclass(frozen=True)
class ComparedRow:
    """A row of a table with what our runs of it gave."""

    row: Row
    cost: Cost
    runs: list[RunResults]
    marks: list[str] = field(default_factory=list)
    """Why it is not compared; empty where it is, or where it has no score."""

    @property
    def scores(self) -> list[Score]:
        """The score of each run that has one."""
        return [run.score for run in self.runs if run.score is not None]

    @property
    def values(self) -> list[float]:
        """The scores; none where the runs have different ones."""
        return [score.value for score in self.scores] if len({score.name for score in self.scores}) == 1 else []

    @property
    def mean(self) -> float | None:
        """Mean over the runs."""
        return _mean(self.values)

    @property
    def spread(self) -> float | None:
        """Standard deviation over the runs (n - 1), from two runs on."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def columns(self) -> list[float | None]:
        """Means of the table's own columns."""
        return [_mean([value for value in found if value is not None])
                for found in zip(*(run.columns for run in self.runs if run.columns), strict=True)]  # fmt: skip

    @property
    def seconds_per_step(self) -> float | None:
        """Median over the runs."""
        found = [run.seconds_per_step for run in self.runs if run.seconds_per_step is not None]
        return statistics.median(found) if found else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def compare(table: Table, costs: Sequence[Cost], runs: Sequence[Sequence[RunResults]]) -> list[ComparedRow]:
    """The rows of the table with their runs, and marks where they are not comparable."""
    rows = [ComparedRow(row, cost, list(group)) for row, cost, group in zip(table.rows, costs, runs, strict=True)]
    for row in rows:
        row.marks.extend(_marks(row, _neighbour(row, rows)))
    return rows


def _neighbour(row: ComparedRow, rows: Sequence[ComparedRow]) -> ComparedRow | None:
    """The baseline, or the first row of the same process, if it has a score of images of ours."""
    process = row.row.config().process.name
    baseline = [other for other in rows if other.row.name == row.row.baseline]
    peers = [*baseline, *(other for other in rows if other.row.config().process.name == process)]
    return next((other for other in peers if other.scores and other.scores[0].sampling), None)


def _marks(row: ComparedRow, neighbour: ComparedRow | None) -> list[str]:
    """Every reason once, with the seeds of the runs that it is about where these are not all."""
    reasons: dict[str, list[int | None]] = {}
    for run in row.runs if row.scores else ():
        if run.score is None:
            found = ["no score"]
        elif not run.score.sampling:
            found = ["how its images were made is not known"]
        else:
            found = _differing_facts(run.score, neighbour) if neighbour else []
        for reason in found + (differing_options(row.row, run.config) if run.config else []):
            reasons.setdefault(reason, []).append(run.seed)
    return [
        reason if len(seeds) == len(row.runs) else f"seed {', '.join(map(str, seeds))}: {reason}"
        for reason, seeds in reasons.items()
    ]


def _differing_facts(score: Score, neighbour: ComparedRow) -> list[str]:
    mine, theirs = score.facts, neighbour.scores[0].facts
    return [
        f"{name} {mine.get(name)}, {theirs.get(name)} in {neighbour.row.name}"
        for name in {**mine, **theirs}
        if name != "seed" and mine.get(name) != theirs.get(name)
    ]


def differing_options(row: Row, config: Config) -> list[str]:
    """Where a run was trained otherwise than its row says: network and process, and whatever else the row sets."""
    recipe, found = flatten(to_plain(row.config())), flatten(to_plain(config))
    wanted = ("model.", "process.", *row.set)
    return [
        f"{key} {found.get(key)} in the run, {recipe[key]} in the table"
        for key in recipe
        if key.startswith(wanted) and not may_change(key) and found.get(key) != recipe[key]
    ]


def difference(row: ComparedRow, rows: Sequence[ComparedRow]) -> tuple[float | None, float | None]:
    """Score minus that of the baseline: published, and ours where both are comparable."""
    base = next((other for other in rows if other.row.name == row.row.baseline), None)
    if base is None:
        return None, None
    published = _minus(row.row.published.get("fid"), base.row.published.get("fid"))
    return published, None if row.marks or base.marks else _minus(row.mean, base.mean)


def interval(row: ComparedRow, rows: Sequence[ComparedRow]) -> float | None:
    """Half the width of the 95 % interval of our difference, by Student's t over the pairs of runs of one seed.

    Such a pair shares the noise and the batches of its training and the noise of its images. None below two pairs.
    """
    base = next((other for other in rows if other.row.name == row.row.baseline), None)
    if base is None or difference(row, rows)[1] is None:
        return None
    by_seed = {run.seed: run.score.value for run in base.runs if run.score}
    pairs = [run.score.value - by_seed[run.seed] for run in row.runs if run.score and run.seed in by_seed]
    if len(pairs) < 2:
        return None
    return float(stdtrit(len(pairs) - 1, 0.975)) * statistics.stdev(pairs) / math.sqrt(len(pairs))


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
