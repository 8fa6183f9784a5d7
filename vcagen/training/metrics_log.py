"""metrics.jsonl: a line every so many steps, with the means of the loss and its parts since the line before."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import torch
from accelerate import Accelerator
from torch import Tensor

from vcagen.system.files import reading, write_text
from vcagen.system.run_folder import latest_checkpoint


class Losses(TypedDict):
    """The losses since the last line, as a checkpoint keeps them."""

    sums: dict[str, float]
    """Of the parts over the images of all processes."""
    images: int


class MetricsLog:
    """The losses since the last line. They stay on the device until a line or a checkpoint needs them."""

    def __init__(self, accelerator: Accelerator, run_dir: Path) -> None:
        self.accelerator = accelerator
        self.run_dir = run_dir
        self.sums: dict[str, float] = {}
        """Sums of the parts over the images of all processes since the last line, as far as they have been read."""
        self.images = 0
        """Images of all processes since the last line."""
        self._unread: list[tuple[int, Tensor]] = []
        """Steps, and sums of the parts (parts,) over local images, on the device."""
        self._parts: list[str] = []
        self.restart_clock()

    def add(self, step: int, losses: dict[str, Tensor]) -> None:
        """Add the parts of the loss, each (n,), of some local images in that step. Does not wait for the device."""
        self._parts = list(losses)
        self._unread.append((step, torch.stack([part.detach().sum() for part in losses.values()])))
        self.images += len(losses["loss"]) * self.accelerator.num_processes

    def state(self) -> Losses:
        """What a checkpoint keeps: the sums since the last line. Waits for the device.

        Raises:
            ValueError: a loss that is not finite, in any process; names the step.
        """
        if self._unread:
            steps, sums = zip(*self._unread, strict=True)
            rows = self.accelerator.reduce(torch.stack(sums), reduction="sum").tolist()
            for step, row in zip(steps, rows, strict=True):
                if not all(map(math.isfinite, row)):
                    newest = latest_checkpoint(self.run_dir)
                    saved = "no checkpoint yet" if newest is None else f"the last checkpoint is {newest.name}"
                    raise ValueError(f"loss: not finite at step {step}; {saved}")
                for part, total in zip(self._parts, row, strict=True):
                    self.sums[part] = self.sums.get(part, 0.0) + total
            self._unread.clear()
        return {"sums": self.sums, "images": self.images}

    def write(self, step: int, **values: float | None) -> dict[str, Any]:
        """Append the line of a step, return it, and begin the next. Waits for the device.

        Raises:
            ValueError: as `state`.
        """
        totals = self.state()["sums"]
        seconds = time.perf_counter() - self._since
        line = {
            "step": step,
            **{part: total / self.images for part, total in totals.items()},
            **values,
            "images_per_second": (self.images - self._images_before) / seconds,
            "memory_bytes": peak_memory(self.accelerator.device),
            "seconds": seconds,
        }
        if self.accelerator.is_main_process:
            with (self.run_dir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        self.accelerator.log({name: v for name, v in line.items() if name != "step" and v is not None}, step=step)
        self.sums, self.images = {}, 0
        self.restart_clock()
        return line

    def restart_clock(self) -> None:
        """Leave the time until now, of a checkpoint or a preview, out of the speed."""
        self._since, self._images_before = time.perf_counter(), self.images

    def resume(self, state: Losses, step: int) -> None:
        """Go on from the sums of a checkpoint. Lines after its step go, since those steps are done again.

        Raises:
            ValueError: a damaged log.
        """
        self.sums, self.images = dict(state["sums"]), state["images"]
        log, path = read_log(self.run_dir, until=step), self.run_dir / "metrics.jsonl"
        if self.accelerator.is_main_process and path.exists():
            write_text(path, "".join(json.dumps(line) + "\n" for line in log))


def peak_memory(device: torch.device) -> int | None:
    """Peak bytes on the GPU, or of the process; None on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def read_log(run_dir: Path, *, until: float = math.inf) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl up to a step. A last line that was cut short is left out.

    Raises:
        ValueError: a damaged log.
    """
    path = run_dir / "metrics.jsonl"
    with reading(path):
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        msgspec.convert(lines, list[dict[str, float | None]])
        return [line for line in lines if line["step"] <= until]
