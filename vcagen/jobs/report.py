"""Published numbers beside ours, of a table or of one run."""

from __future__ import annotations

import sys
from pathlib import Path

from vcagen.config.command_line import find_config
from vcagen.config.job_options import ReportConfig
from vcagen.paper.classifiers import is_classifier_table, report_classifiers
from vcagen.paper.report import report_run, report_table
from vcagen.paper.table import load_table


def run(config: ReportConfig) -> None:
    """Write the files of a report and print it.

    Raises:
        ValueError: neither a run folder nor a table, or a damaged file of a run.
    """
    if Path(config.source).is_dir():
        out = config.out or config.source
        text = report_run(config.source, out, score=config.score)
    else:
        path, out = find_config(config.source), config.out or f"{config.runs}/report"
        if is_classifier_table(path):
            text = report_classifiers(path, config.runs, out)
        else:
            text = report_table(load_table(path), Path(path).stem, config.runs, out, score=config.score)
    print(text)
    print(f"report: {out}", file=sys.stderr)
