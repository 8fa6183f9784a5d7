"""A classifier of the built-in digits: do generated ones look like their label?"""

from __future__ import annotations

from torch import Tensor

from vcagen.data.images import load_digits


class DigitClassifier:
    """A support vector machine (scikit-learn's SVC, gamma "scale") trained on all real digits.

    Raises:
        ValueError: scikit-learn is not installed.
    """

    def __init__(self) -> None:
        images, labels = load_digits()
        from sklearn.svm import SVC

        self._svc = SVC(gamma="scale").fit(_rows(images), labels.numpy())

    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        """Share of images, uint8 (N, 1, 8, 8), that are taken for their label, int64 (N,): 0 to 1."""
        assert images.shape[1:] == (1, 8, 8), images.shape
        assert len(images) == len(labels), (images.shape, labels.shape)
        return float((self._svc.predict(_rows(images)) == labels.numpy()).mean())


def _rows(images: Tensor) -> object:
    return images.flatten(1).numpy() / 255
