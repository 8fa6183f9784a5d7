"""What an extractor of features is; a new one is a file of its own and a line of features.EXTRACTORS."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

Shape = tuple[int, int, int]
"""Channels, height, width of an image."""


class MissingWeights(ValueError):
    """The weights of an extractor are not on this machine and cannot be downloaded."""


class Features(NamedTuple):
    """Features of N images."""

    pool: Tensor
    """(N, D) float32: Frechet distance, inception score, precision and recall."""
    spatial: Tensor | None = None
    """(N, S) float32 of sFID, where the extractor has them."""


class Extractor(ABC):
    """Features of images, and what is special to the scores that are made of them.

    A new kind is one subclass and its line in EXTRACTORS.
    """

    name: str
    score_name: str
    """Name of the Frechet distance, without the number of images."""
    identity: str
    """Text that is equal for two extractors exactly when their features can be compared."""
    device: torch.device
    precision_recall: ClassVar[Mapping[str, bool]]
    """Endings of the names of precision and recall; True computes them from float16 distances, as ADM does."""

    @property
    def protocol(self) -> str:
        """Name of the rules by which the scores are computed."""
        return self.name

    @abstractmethod
    def __call__(self, images: Tensor) -> Features:
        """Features of uint8 images (N, C, H, W) on any device."""

    def check_shape(self, shape: Shape, path: str) -> None:  # noqa: B027, any shape will do
        """Raise ValueError where images of this shape, which come from `path`, are not for this extractor."""

    def sizes(self, shape: Shape | None) -> tuple[int, int | None] | None:
        """Numbers of pool features D and spatial features S of images of this shape; None where that is not known."""
        if shape is None:
            return None
        pool, spatial = self(torch.zeros(1, *shape, dtype=torch.uint8))
        return pool.shape[1], None if spatial is None else spatial.shape[1]

    def logits(self, pool: Tensor) -> Tensor | None:
        """(N, D) -> (N, classes) float64 logits of the inception score, or None."""
        return None

    def record(self) -> dict[str, Any]:
        """What the result file says about the weights."""
        return {"name": "none"}

    def warnings(self, count: int, *, adm_reference: bool) -> list[str]:
        """What makes scores of `count` images by this extractor less than comparable."""
        return []


def pick_device(device: torch.device | str | None) -> torch.device:
    """The device, or a GPU where there is one."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
