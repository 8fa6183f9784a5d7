"""A column of fashion.yaml: the share of generated clothes that a classifier takes for their label."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from vcagen.evaluation.fashion import FashionFeatures
from vcagen.paper.recognised import Recognised


class FashionAccuracy(Recognised):
    """By the classifier behind the features of the scores.

    Raises:
        ValueError: as FashionFeatures.
    """

    title = "clothes recognised"

    @cached_property
    def _features(self) -> FashionFeatures:
        return FashionFeatures()

    def classify(self, images: NDArray[np.uint8]) -> NDArray[np.int64]:
        parts = torch.from_numpy(images)[:, None].split(500)
        logits = [self._features.logits(self._features(part).pool) for part in parts]
        return torch.cat(logits).argmax(1).cpu().numpy()
