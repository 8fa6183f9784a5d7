"""Things timed in turns: what slows the machine for a while slows all of them, and leaves the median ratio alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

MIN_TURNS = 3


def in_turns(
    works: Mapping[str, Callable[[], object]], *, seconds: float, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each work in each turn, after a turn that compiles and one that warms up.

    Turns go on for about `seconds` in all, at least three; each turn does every work once, in the same order.
    """
    for _ in range(2):
        for work in works.values():
            work()
    times: dict[str, list[float]] = {name: [] for name in works}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < MIN_TURNS:
        for name, work in works.items():
            times[name].append(seconds_of(work, device))
    return times


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over the turns of above / below."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def fastest(works: Sequence[Callable[[], object]], repeats: int, device: torch.device) -> list[float]:
    """Seconds of the fastest run of each work, over that many turns."""
    turns = [[seconds_of(work, device) for work in works] for _ in range(repeats)]
    return [min(times) for times in zip(*turns, strict=True)]


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, the device's included."""
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    """Until the device has done all that was asked."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def open_device(name: str, threads: int | None = None) -> torch.device:
    """The device of that name, with that many threads for the CPU.

    Raises:
        ValueError: no such device here.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"device: {name} cannot be used here ({reason})") from error
