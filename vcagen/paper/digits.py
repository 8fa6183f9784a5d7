"""A column of the miniature: the share of generated digits that a classifier takes for their label."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vcagen.data.images import open_dataset_images
from vcagen.paper.recognised import Recognised


class DigitAccuracy(Recognised):
    """By a support vector machine (scikit-learn's SVC, gamma "scale"), trained on all real digits when first needed.

    Raises:
        ValueError: scikit-learn is not installed.
    """

    title = "digits recognised"

    @cached_property
    def _classifier(self) -> Any:
        real = open_dataset_images("digits")
        from sklearn.svm import SVC

        rows = np.stack([real[i].numpy().ravel() for i in range(len(real))]) / 255
        return SVC(gamma="scale").fit(rows, list(real.labels))

    def classify(self, images: NDArray[np.uint8]) -> NDArray[np.int64]:
        return np.asarray(self._classifier.predict(images.reshape(len(images), -1) / 255))
