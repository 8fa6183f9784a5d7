"""metrics.jsonl: means of the loss parts between log lines, summed on the device until a line is written."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from vcagen.system.files import atomic_file


class Meter:
    """Sums of the loss parts over the images of all processes, and the lines made of them."""

    def __init__(self, accelerator: Accelerator, path: Path) -> None:
        self.accelerator = accelerator
        self.path = path
        self.sums: dict[str, Tensor] = {}
        self.images = 0
        """Images of the global batches that are in the sums."""
        self.restart()

    def add(self, sums: dict[str, Tensor], images: int) -> None:
        """Add a step: sums over the local images, on the device, and the number of images of the global batch."""
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.images += images

    def restart(self) -> None:
        """Begin timing anew, without the time of a checkpoint or a preview."""
        self._since, self._since_images = time.perf_counter(), self.images

    def write(self, step: int, **values: float | None) -> dict[str, Any]:
        """Append the line of a step and begin the next. Waits for the device."""
        totals = self.state()["sums"]
        seconds = time.perf_counter() - self._since
        line = {
            "step": step,
            **{name: total / self.images for name, total in totals.items()},
            **values,
            "images_per_second": (self.images - self._since_images) / seconds,
            "memory_bytes": self._memory(),
            "seconds": seconds,
        }
        if self.accelerator.is_main_process:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        self.accelerator.log({name: v for name, v in line.items() if name != "step" and v is not None}, step=step)
        self.sums, self.images = {}, 0
        self.restart()
        return line

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the sums over all processes. Waits for the device."""
        if not self.sums:
            return {"sums": {}, "images": 0}
        names = sorted(self.sums)
        totals = self.accelerator.reduce(torch.stack([self.sums[name] for name in names]), reduction="sum").tolist()
        return {"sums": dict(zip(names, totals, strict=True)), "images": self.images}

    def resume(self, state: dict[str, Any], lines: list[dict[str, Any]]) -> None:
        """Go on from a checkpoint: its sums, and the lines up to its step; later ones will be written again."""
        share = 1.0 if self.accelerator.is_main_process else 0.0
        device = self.accelerator.device
        self.sums = {name: torch.tensor(share * total, device=device) for name, total in state["sums"].items()}
        self.images = state["images"]
        self.restart()
        if self.accelerator.is_main_process and self.path.exists():
            with atomic_file(self.path) as temporary:
                temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def _memory(self) -> int:
        """Peak bytes on the GPU, or of the process."""
        device = self.accelerator.device
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_log(run: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; a last line that was cut short is left out.

    Raises:
        ValueError: a line that is no JSON object of numbers with a step.
    """
    path = run / "metrics.jsonl"
    try:
        text = path.read_text() if path.exists() else ""
        log = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    except ValueError as error:
        raise ValueError(f"{path}: damaged: {error}") from error
    for number, line in enumerate(log, start=1):
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            raise ValueError(f"{path}: damaged: line {number} is not an object with a step")
        if wrong := [name for name, value in line.items() if not isinstance(value, int | float | None)]:
            raise ValueError(f"{path}: damaged: line {number}: {wrong[0]}: {line[wrong[0]]!r} is no number")
    return log
