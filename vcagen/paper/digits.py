"""A column of the miniature: the share of generated digits that a classifier takes for their label."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vcagen.data.images import open_dataset_images
from vcagen.sampling.noise import LabelRule, SeededNoise


class DigitAccuracy:
    """Accuracy of a support vector machine (scikit-learn's SVC, gamma "scale"), trained on all real digits when first
    needed, on 8 x 8 PNG images whose labels follow the rule of their manifest.

    Raises:
        ValueError: scikit-learn is not installed.
    """

    title = "digits recognised"
    form = ".1%"

    @cached_property
    def _classifier(self) -> Any:
        real = open_dataset_images("digits")
        from sklearn.svm import SVC

        rows = np.stack([real[i].numpy().ravel() for i in range(len(real))]) / 255
        return SVC(gamma="scale").fit(rows, list(real.labels))

    def __call__(self, samples: Path, sampling: Mapping[str, Any]) -> float | None:
        """The share, 0 to 1; None where the images are gone or their labels are not known."""
        files = sorted((samples / "images").glob("*.png"))
        if not files or "labels" not in sampling:
            return None
        rows = np.stack([np.asarray(Image.open(file)).ravel() for file in files]) / 255
        rule = sampling["labels"] if isinstance(sampling["labels"], str) else ",".join(map(str, sampling["labels"]))
        labels = LabelRule(rule, 10)(range(len(files)), SeededNoise(sampling["seed"]))
        return float((self._classifier.predict(rows) == labels.numpy()).mean())
