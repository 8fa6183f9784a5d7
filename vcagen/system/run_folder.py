"""Where the parts of a run folder lie, and its lock."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout


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


def lock_run(run: str | Path) -> AbstractContextManager[Any] | None:
    """Take a run folder for one training: what releases it on exit, or None where another process has it.

    The lock ends with its process, also with one that is killed while its loader workers live on. On a file system
    without locks it keeps nobody out.
    """
    Path(run).mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(Path(run) / ".lock", fallback_to_soft=False).acquire(blocking=False)
    except Timeout:
        return None
    except OSError:
        return nullcontext()
