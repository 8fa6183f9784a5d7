"""Where the parts of a run folder lie."""

from __future__ import annotations

import re
from pathlib import Path


def list_checkpoints(run: str | Path) -> dict[int, Path]:
    """The complete checkpoints of a run folder by step, in order of steps."""
    folders = (Path(run) / "checkpoints").glob("step_*")
    found = {int(match.group(1)): path for path in folders if (match := re.fullmatch(r"step_(\d+)", path.name))}
    return dict(sorted(found.items()))


def checkpoint_folder(run: str | Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return Path(run) / "checkpoints" / f"step_{step:07d}"


def latest_checkpoint(run: str | Path) -> Path | None:
    """The checkpoint with the highest step, or None."""
    return next(reversed(list_checkpoints(run).values()), None)
