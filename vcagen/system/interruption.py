"""Stopping between two steps when the machine is taken away: SIGTERM and Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist


class GracefulStop:
    """Turns SIGTERM and SIGINT into a flag that all processes agree on at a step.

    `agreed()` is called once a step by every process. It starts to share the host-side flag over a gloo group and
    returns what was shared a step earlier: nobody waits for the device, and all processes stop after the same step. A
    second Ctrl-C interrupts at once. With several processes a signal that is not followed by a step within `patience`
    seconds ends the process: a peer has died and the step will never come (or a checkpoint or preview took longer).
    """

    def __init__(self, patience: float = 25.0) -> None:
        self.patience = patience
        self.requested = False
        self._group: Any = None
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self._timer: threading.Timer | None = None

    def __enter__(self) -> GracefulStop:
        self._previous = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._timer is not None:
            self._timer.cancel()
        if self._pending is not None and error is None:
            self._pending[1].wait()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        if self._group is not None and self._timer is None:
            self._timer = threading.Timer(self.patience, os._exit, (128 + number,))
            self._timer.daemon = True
            self._timer.start()

    def agreed(self) -> bool:
        """Whether any process had been asked to stop by its previous call (alone: by now)."""
        if self._group is None:
            return self.requested
        stop = False
        if self._pending is not None:
            flag, work = self._pending
            work.wait()
            stop = bool(flag.item())  # a CPU tensor
        flag = torch.tensor([int(self.requested)])
        self._pending = (flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True))
        if stop and self._timer is not None:
            self._timer.cancel()
        return stop
