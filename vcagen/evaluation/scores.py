"""Scores from features: Frechet distance, inception score, precision and recall, as the ADM evaluator defines them.

Source of the definitions: openai/guided-diffusion, evaluations/evaluator.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vcagen.evaluation.extractor import Extractor
from vcagen.system.precision import full_precision

IS_CHUNK = 5_000
"""Images over which the ADM evaluator takes one inception score."""
NEIGHBOURS = 3
"""k of the nearest-neighbour balls of precision and recall."""
_BLOCK = 4_096


class Gaussian(NamedTuple):
    """Mean (D,) and unbiased covariance (D, D), float64."""

    mean: Tensor
    cov: Tensor


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All that the scores need of a set of images."""

    extractor: Extractor
    count: int
    """Images behind the statistics; 0 where a reference does not tell."""
    pool: Gaussian
    """Of the pool features."""
    spatial: Gaussian | None = None
    """Of the spatial features."""
    rows: Tensor | None = None
    """(K, D) float32 pool features for precision and recall."""
    class_scores: Sequence[float] = ()
    """Inception scores of every 5,000 images, of samples whose extractor has logits."""


def count_name(count: int) -> str:
    """The number of images in the name of a score: 50k for 50000, 1797 for 1797."""
    return f"{count // 1000}k" if count and count % 1000 == 0 else str(count)


def frechet(samples: Measured, reference: Measured) -> dict[str, float]:
    """Frechet distance of the pool features: fid_50k, fd_pixels_1797."""
    distance = frechet_distance(samples.pool, reference.pool)
    return {f"{samples.extractor.score_name}_{count_name(samples.count)}": distance}


def spatial_frechet(samples: Measured, reference: Measured) -> dict[str, float]:
    """Frechet distance of the spatial features, where both sides have them: sfid_50k."""
    if samples.spatial is None or reference.spatial is None:
        return {}
    distance = frechet_distance(samples.spatial, reference.spatial)
    return {f"s{samples.extractor.score_name}_{count_name(samples.count)}": distance}


def inception_score(samples: Measured, reference: Measured) -> dict[str, float]:
    """Mean and standard deviation of the inception scores of the chunks."""
    if not samples.class_scores:
        return {}
    scores = torch.tensor(samples.class_scores, dtype=torch.float64)
    return {"is_mean": scores.mean().item(), "is_std": scores.std(correction=0).item()}


def precision_and_recall(samples: Measured, reference: Measured) -> dict[str, float]:
    """Precision and recall, where both sides have more than 3 rows."""
    if samples.rows is None or reference.rows is None or min(len(samples.rows), len(reference.rows)) <= NEIGHBOURS:
        return {}
    device = samples.extractor.device
    metrics: dict[str, float] = {}
    with full_precision(device):
        for name, half in samples.extractor.precision_recall.items():
            found = precision_recall(reference.rows.to(device), samples.rows.to(device), half=half)
            metrics |= {f"precision_{name}": found[0], f"recall_{name}": found[1]}
    return metrics


METRICS: dict[str, Callable[[Measured, Measured], dict[str, float]]] = {
    "frechet": frechet,
    "spatial_frechet": spatial_frechet,
    "inception_score": inception_score,
    "precision_recall": precision_and_recall,
}
"""Name -> metric of the samples and the reference, as entries of the result; {} where it needs what they lack."""


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
    """||mean_a - mean_b||^2 + tr A + tr B - 2 tr sqrt(A B), in float64; at least 0.

    With A = R R^T and B = S S^T, tr sqrt(A B) is the sum of the singular values of R^T S. This stays exact for singular
    A and B, where a matrix square root of the product does not.
    """
    (mean_a, cov_a), (mean_b, cov_b) = ((mean.double(), cov.double()) for mean, cov in (a, b))
    cross = torch.linalg.svdvals(_root(cov_a).T @ _root(cov_b)).sum()
    distance = (mean_a - mean_b).square().sum() + cov_a.trace() + cov_b.trace() - 2 * cross
    return max(float(distance), 0.0)  # rounding can leave -1e-13 of equal sets


def _root(cov: Tensor) -> Tensor:
    """R (D, rank) with R R^T = cov; eigenvalues within rounding of 0 are left out."""
    values, vectors = torch.linalg.eigh((cov + cov.T) / 2)
    kept = values > len(cov) * torch.finfo(cov.dtype).eps * values[-1]
    root: Tensor = vectors[:, kept] * values[kept].sqrt()
    return root


class InceptionScore:
    """Inception scores of every 5,000 images whose logits arrive in order, a short last chunk included."""

    def __init__(self, chunk: int = IS_CHUNK) -> None:
        self._chunk = chunk
        self.scores: list[float] = []
        self._count = 0
        self._entropy = 0.0  # sum of sum_c p log p
        self._marginal: Tensor | None = None  # sum of p

    def add(self, logits: Tensor) -> None:
        """Take the logits (N, classes) of the next N images."""
        while len(logits):
            part = logits[: self._chunk - self._count]
            logits = logits[len(part) :]
            log_p = part.double().log_softmax(1)
            p = log_p.exp()
            self._entropy += (p * log_p).sum().item()
            self._marginal = p.sum(0) if self._marginal is None else self._marginal + p.sum(0)
            self._count += len(part)
            if self._count == self._chunk:
                self._close()

    def _close(self) -> None:
        assert self._marginal is not None
        marginal = self._marginal / self._count
        kl = self._entropy / self._count - torch.xlogy(marginal, marginal).sum().item()
        self.scores.append(torch.tensor(kl, dtype=torch.float64).exp().item())
        self._count, self._entropy, self._marginal = 0, 0.0, None

    def result(self) -> list[float]:
        """The score of every chunk; call once, after the last image."""
        if self._count:
            self._close()
        return self.scores


def _squared_distances(a: Tensor, b: Tensor, half: bool) -> Tensor:
    """(N, D), (M, D) -> (N, M) float32 squared distances; `half` rounds every step to float16 as ADM does."""
    if half:
        a16, b16 = a.half(), b.half()
        norm_a, norm_b = (x.square().float().sum(1).half() for x in (a16, b16))
        product = (a16.float() @ b16.float().T).half()
        distances = (norm_a[:, None] - 2 * product + norm_b).clamp_min(0).float()
        if distances.isfinite().all():
            return distances
    return (a.square().sum(1)[:, None] - 2 * (a @ b.T) + b.square().sum(1)).clamp_min(0)


def _blocks(x: Tensor) -> list[Tensor]:
    return [x[i : i + _BLOCK] for i in range(0, len(x), _BLOCK)]


def _radii(x: Tensor, half: bool) -> Tensor:
    """Squared distance of each row of (N, D) to its k-th nearest other row: (N,)."""
    radii = []
    for rows in _blocks(x):
        nearest = torch.empty(len(rows), 0, device=x.device)
        for columns in _blocks(x):
            joined = torch.cat([nearest, _squared_distances(rows, columns, half)], 1)
            nearest = joined.topk(min(NEIGHBOURS + 1, joined.shape[1]), 1, largest=False).values
        radii.append(nearest.amax(1))
    return torch.cat(radii)


def precision_recall(reference: Tensor, samples: Tensor, *, half: bool = False) -> tuple[float, float]:
    """Improved precision and recall with k = 3 (Kynkaanniemi et al. 2019) of pool features (N, D) and (M, D), float32.

    Precision is the share of samples inside a ball of the reference, recall the share of the reference inside a ball
    of the samples. `half` repeats ADM's float16 distances, which come out 0.001 to 0.003 higher on real features.
    """
    assert min(len(reference), len(samples)) > NEIGHBOURS, "more than 3 rows on both sides"
    reference_radii, sample_radii = _radii(reference, half), _radii(samples, half)
    precise = torch.zeros(len(samples), dtype=torch.bool, device=samples.device)
    recalled = torch.zeros(len(reference), dtype=torch.bool, device=samples.device)
    for i in range(0, len(reference), _BLOCK):
        for j in range(0, len(samples), _BLOCK):
            rows, columns = slice(i, i + _BLOCK), slice(j, j + _BLOCK)
            distances = _squared_distances(reference[rows], samples[columns], half)
            precise[columns] |= (distances <= reference_radii[rows, None]).any(0)
            recalled[rows] |= (distances <= sample_radii[columns]).any(1)
    return precise.double().mean().item(), recalled.double().mean().item()
