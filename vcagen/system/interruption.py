"""Stopping between two steps when the machine is taken away: SIGTERM and Ctrl-C."""

from __future__ import annotations

import signal
from types import FrameType

from accelerate import Accelerator

EVERY = 4
"""Calls between two looks at the other processes: each look waits for the device."""


class Interruption:
    """Turns SIGTERM and SIGINT into an answer on which all processes agree. A second Ctrl-C interrupts at once.

    A process whose peer has died waits in a collective call and never answers: the launcher kills it.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._requested = False
        self._calls = 0

    def __enter__(self) -> Interruption:
        self._previous = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._requested = True

    def agreed(self) -> bool:
        """Whether to stop: the same for all processes, which all call it once a step."""
        if self._accelerator.num_processes == 1:
            return self._requested
        self._calls += 1
        if self._calls % EVERY:
            return False
        if self._requested:
            self._accelerator.set_trigger()
        return bool(self._accelerator.check_trigger())
