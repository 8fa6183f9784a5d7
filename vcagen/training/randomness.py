"""What step k uses: its images, mirror coins, dropped labels, times and noise, all functions of (seed, k) alone.

Everything is drawn for the whole global batch and then sliced, so that a run does not depend on the number of processes
or on where it was interrupted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from vcagen.processes.process import Process


def hashed_seed(*parts: object) -> int:
    """A 63-bit seed that changes with every part."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


class StepSampler:
    """Indices and mirror coins of every step.

    The batches of all steps follow one another through an endless row of epochs, each a permutation of the images drawn
    from (seed, epoch); a batch may reach into the next epoch, and a set may be smaller than a batch.

    Args:
        num_items: images of the set.
        batch_size: global batch, over all processes.
        horizontal_flip: toss a fair coin for the mirror image; off: never.

    Raises:
        ValueError: an empty set.
    """

    def __init__(self, num_items: int, batch_size: int, seed: int, *, horizontal_flip: bool = True) -> None:
        if num_items < 1:
            raise ValueError("data: no images to train on")
        self.num_items = num_items
        self.batch_size = batch_size
        self.seed = seed
        self.horizontal_flip = horizontal_flip
        self._permutations: dict[int, np.ndarray] = {}

    def __call__(self, step: int) -> list[tuple[int, bool]]:
        """(index, mirror) of every position of the global batch of a step, counted from 0."""
        positions = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        epochs, offsets = np.divmod(positions, self.num_items)
        indices = np.concatenate([self._permutation(e)[offsets[epochs == e]] for e in np.unique(epochs).tolist()])
        mirrors = np.zeros(self.batch_size, dtype=bool)
        if self.horizontal_flip:
            mirrors = np.random.default_rng(hashed_seed(self.seed, "mirror", step)).random(self.batch_size) < 0.5
        return list(zip(indices.tolist(), mirrors.tolist(), strict=True))

    def batches(self, start: int, stop: int, part: slice) -> Iterator[list[tuple[int, bool]]]:
        """One process's part of the batches of steps start .. stop - 1: a batch sampler for a DataLoader."""
        for step in range(start, stop):
            yield self(step)[part]

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            self._permutations = {e: p for e, p in self._permutations.items() if e == epoch - 1}
            self._permutations[epoch] = np.random.default_rng(
                hashed_seed(self.seed, "epoch", epoch)
            ).permutation(self.num_items)  # fmt: skip
        return self._permutations[epoch]


@dataclass(frozen=True)
class StepDraws:
    """Random numbers of a step, or of a slice of its batch."""

    dropped: Tensor
    """Which labels are replaced by the null label, bool (N,)."""
    t: Tensor
    """Times of the process (N,)."""
    noise: Tensor
    """Noise of the process (N, C, H, W)."""
    posterior: Tensor
    """Noise of the VAE's posterior (N, C, H, W)."""

    def part(self, rows: slice) -> StepDraws:
        """The same for some rows of the batch."""
        return StepDraws(self.dropped[rows], self.t[rows], self.noise[rows], self.posterior[rows])

    def to(self, device: torch.device) -> StepDraws:
        """The same on that device; a copy from pinned memory does not wait for it."""
        return StepDraws(*(getattr(self, draw.name).to(device, non_blocking=True) for draw in fields(self)))

    def pinned(self) -> StepDraws:
        """The same in pinned memory."""
        return StepDraws(*(getattr(self, draw.name).pin_memory() for draw in fields(self)))


def draw(
    seed: int, step: int, batch_size: int, shape: tuple[int, int, int], process: Process, dropout: float
) -> StepDraws:
    """The random numbers of the global batch of a step with latents of that (C, H, W).

    Drawn on the host: a GPU's own generator gives other numbers on another model of GPU.
    """
    generator = torch.Generator().manual_seed(hashed_seed(seed, "step", step))
    return StepDraws(
        dropped=torch.rand(batch_size, generator=generator) < dropout,
        t=process.sample_t(batch_size, generator),
        noise=torch.randn(batch_size, *shape, generator=generator),
        posterior=torch.randn(batch_size, *shape, generator=generator),
    )


class DrawsAhead:
    """The draws of consecutive steps on a device: for a GPU made in a thread while it works on the step before.

    Args:
        draw: the draws of a step, on the host.
    """

    def __init__(self, draw: Callable[[int], StepDraws], device: torch.device) -> None:
        self._draw, self._device = draw, device
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._ahead: dict[int, Future[StepDraws]] = {}

    def __call__(self, step: int) -> StepDraws:
        """The draws of a step."""
        if self._device.type != "cuda":  # on a CPU a thread would take the network's time
            return self._draw(step).to(self._device)
        draws = self._ahead[step].result() if step in self._ahead else self._pinned(step)
        self._ahead = {step + 1: self._pool.submit(self._pinned, step + 1)}
        return draws.to(self._device)

    def _pinned(self, step: int) -> StepDraws:
        return self._draw(step).pinned()


def drop_labels(y: Tensor, dropped: Tensor, null_label: int | None) -> Tensor:
    """Labels y (N,) with the null label where they are dropped; a network without one drops none."""
    return y if null_label is None else y.masked_fill(dropped, null_label)
