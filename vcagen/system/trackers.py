"""Trackers: one run of each for a run folder, over every resume, with previews and the scores of the samples."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from accelerate import Accelerator
from accelerate.tracking import filter_trackers
from PIL import Image

from vcagen.system.files import FORMAT, read_json, write_json

PROJECT = "vcagen"


class TrackersFile(TypedDict):
    """trackers.json"""

    id: str


def start_trackers(
    accelerator: Accelerator, names: Sequence[str], run_dir: Path, config: Mapping[str, Any] | None = None
) -> None:
    """Start the trackers of a run folder, or go on with their runs. All processes call it.

    wandb and trackio know the run by the id in trackers.json; it is called as the folder. Files of tensorboard and of
    wandb lie in the folder.

    Args:
        names: trackers of accelerate that are installed.
        config: shown by the trackers; values are numbers and text.
    """
    if not names:
        return
    kwargs: dict[str, Any] = {}
    if accelerator.is_main_process:
        if not (file := run_dir / "trackers.json").exists():
            write_json(file, {"format": FORMAT, "id": secrets.token_hex(4)})
        name, run_id = run_dir.resolve().name, read_json(file, TrackersFile)["id"]
        kwargs["wandb"] = {"name": name, "id": run_id, "resume": "allow", "dir": str(run_dir)}
        kwargs["trackio"] = {"name": f"{name}-{run_id}", "resume": "allow"}  # the name is the id there
    accelerator.project_configuration.set_directories(str(run_dir))
    accelerator.log_with = filter_trackers(list(names), accelerator.logging_dir)
    accelerator.init_trackers(PROJECT, config=None if config is None else dict(config), init_kwargs=kwargs)


def log_image(accelerator: Accelerator, name: str, file: Path, step: int) -> None:
    """Show an image file in all trackers that can. The main process calls it."""
    with Image.open(file) as image:
        pixels = np.asarray(image.convert("RGB"))  # (H, W, 3)
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            tracker.log_images({name: pixels[None]}, step=step, dataformats="NHWC")
            tracker.tracker.flush()
        elif tracker.name == "trackio":
            import trackio

            tracker.log({name: trackio.Image(pixels)}, step=step)
        elif hasattr(tracker, "log_images"):
            tracker.log_images({name: [pixels]}, step=step)


def log_scores(accelerator: Accelerator, scores: Mapping[str, float], step: int | None) -> None:
    """Show the scores of samples of a training step in all trackers. The main process calls it.

    The step is a value of its own but in tensorboard: the others take no step before their last one.
    """
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            tracker.log(dict(scores), step=step)
        else:
            tracker.log({**scores, "sampled_step": step})
