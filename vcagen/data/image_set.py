"""A set of images of one size with their labels, wherever they come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.utils.data import Dataset


@dataclass(frozen=True)
class ImageSet(Dataset[Tensor]):
    """Images of one size with their labels: `images[i]` is uint8 (channels, image_size, image_size).

    Raises ValueError for a file that cannot be read.
    """

    names: Sequence[str]
    """One name an image, such as its path below the image folder."""
    labels: Sequence[int]
    class_names: Sequence[str]
    channels: int
    image_size: int
    read: Callable[[int], Tensor]
    """Index to pixels; loader processes call it too."""
    crop: str = "none"
    """How an image was brought to its size: adm-center or none."""
    in_memory: bool = False
    """Whether reading costs nothing, so that loader processes would not help."""

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Tensor:
        return self.read(index)
