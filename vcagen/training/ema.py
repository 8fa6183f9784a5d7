"""Exponential moving averages of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class EMA:
    """average <- decay * average + (1 - decay) * weights after every step; starts as the initial weights.

    With warm-up the decay of step k, from 0, is min(decay, (1 + k) / (10 + k)).
    """

    def __init__(self, parameters: Iterable[Tensor], decay: float, *, warmup: bool = False) -> None:
        self.decay = decay
        self.warmup = warmup
        self.averages = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def update(self, parameters: Iterable[Tensor], step: int) -> None:
        """Move towards the weights after step k = `step`, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay
        torch._foreach_lerp_(self.averages, [parameter.detach() for parameter in parameters], 1 - decay)

    @contextmanager
    def applied(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Inside, the network has the averages as its weights."""
        parameters = list(parameters)
        self._swap(parameters)
        try:
            yield
        finally:
            self._swap(parameters)

    @torch.no_grad()
    def _swap(self, parameters: list[Tensor]) -> None:
        for parameter, average in zip(parameters, self.averages, strict=True):  # in place: FSDP keeps views of them
            weights = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(weights)
