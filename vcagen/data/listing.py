"""Encoded images that lie somewhere, in one order: what a folder and an archive have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

from PIL import Image

from vcagen.system.files import few

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


@cache
def other_extensions() -> frozenset[str]:
    """Extensions of images that are not read, and none at all."""
    return frozenset({"", ".heic", ".jxl", *Image.registered_extensions()} - set(EXTENSIONS))


@dataclass(frozen=True)
class Listing:
    """Image files of a folder or an archive, which stays as it is."""

    path: str
    names: Sequence[str]
    """Names below `path`."""
    labels: Sequence[int]
    class_names: Sequence[str]
    open: Callable[[int], Path | IO[bytes]]
    """Index to what Pillow opens; loader processes call it too. Raises ValueError where there is nothing to open."""
    left_out: Sequence[str] = ()
    """What else there may be or hold images, and is not read."""

    def place(self, index: int) -> str:
        """Where an image lies, for messages."""
        return f"{self.path}/{self.names[index]}"

    def check(self, *, allow_empty_classes: bool) -> Listing:
        """The listing itself.

        Raises:
            ValueError: no images, or a class without any.
        """
        if not self.names:
            raise ValueError(f"{self.path}: no images; extensions read are {' '.join(EXTENSIONS)}")
        counted = set(self.labels)
        empty = [name for label, name in enumerate(self.class_names) if label not in counted]
        if empty and not allow_empty_classes:
            raise ValueError(f"{self.path}: {few(empty, 20)}: class without images; or give allow_empty_classes")
        return self
