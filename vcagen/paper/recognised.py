"""A column of a table: the share of generated images that a classifier takes for their label."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vcagen.sampling.noise import LabelRule, SeededNoise

NUM_CLASSES = 10


class Recognised(ABC):
    """The share, for grey PNG images of ten classes whose labels follow the rule of their manifest."""

    title: ClassVar[str]
    form = ".1%"

    @abstractmethod
    def classify(self, images: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Images (N, H, W) -> classes (N,), 0 to 9."""

    def __call__(self, samples: Path, sampling: Mapping[str, Any]) -> float | None:
        """The share, 0 to 1; None where the images are gone or their labels are not known."""
        files = sorted((samples / "images").glob("*.png"))
        if not files or "labels" not in sampling:
            return None
        rule = sampling["labels"] if isinstance(sampling["labels"], str) else ",".join(map(str, sampling["labels"]))
        labels = LabelRule(rule, NUM_CLASSES)(range(len(files)), SeededNoise(sampling["seed"]))
        found = self.classify(np.stack([np.asarray(Image.open(file)) for file in files]))
        return float((found == labels.numpy()).mean())
