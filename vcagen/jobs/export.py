"""One weights file of a run, to give away."""

from __future__ import annotations

import sys

from vcagen.config.job_options import ExportConfig
from vcagen.networks.weights import export_weights


def run(config: ExportConfig) -> None:
    """Write the file and say which weights it holds.

    Raises:
        ValueError: no such weights, or the file exists.
    """
    source = export_weights(config.run_dir, config.out, weights=config.weights, step=config.step)
    print(f"{config.out}: {source}", file=sys.stderr)
