"""Scores from features: Frechet distance, inception score, precision and recall, as the ADM evaluator defines them.

Source of the definitions: openai/guided-diffusion, evaluations/evaluator.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

IS_CHUNK = 5_000
"""Images over which the ADM evaluator takes one inception score."""
NEIGHBOURS = 3
"""k of the nearest-neighbour balls of precision and recall."""
_BLOCK = 4_096


class Frechet(NamedTuple):
    """||mean_a - mean_b||^2 + tr A + tr B - 2 tr sqrt(A B), and its parts; a are the samples, b is the reference."""

    distance: float
    mean_term: float
    trace_sample: float
    trace_ref: float
    trace_cross: float
    """tr sqrt(A B)"""
    min_eig: float
    """About the smallest eigenvalue met; those negative or within rounding of 0 are taken as 0."""


def frechet_distance(mean_a: Tensor, cov_a: Tensor, mean_b: Tensor, cov_b: Tensor) -> Frechet:
    """Frechet distance of two Gaussians with means (D,) and covariances (D, D), in float64.

    With A = R R^T and B = S S^T, tr sqrt(A B) is the sum of the singular values of R^T S. This stays exact for singular
    A and B, where a matrix square root of the product does not, and is several times faster.
    """
    root_a, min_a = _root(cov_a.double())
    root_b, min_b = _root(cov_b.double())
    mean_term = (mean_a.double() - mean_b.double()).square().sum().item()
    trace_a, trace_b = cov_a.double().trace().item(), cov_b.double().trace().item()
    cross = _nuclear_norm(root_a.T @ root_b, least=max(min_a, 0) * max(min_b, 0))
    distance = mean_term + trace_a + trace_b - 2 * cross
    return Frechet(distance, mean_term, trace_a, trace_b, cross, min(min_a, min_b))


def _root(cov: Tensor) -> tuple[Tensor, float]:
    """R with R R^T = cov, and about the smallest eigenvalue: by Cholesky, or where cov is singular by eigh."""
    cov = (cov + cov.T) / 2
    rounding = len(cov) * torch.finfo(torch.float64).eps * cov.diagonal().amax()  # what is below is noise
    factor, failed = torch.linalg.cholesky_ex(cov)
    if not failed and factor.diagonal().square().amin() > rounding:
        return factor, _smallest_eigenvalue(factor)
    values, vectors = torch.linalg.eigh(cov)
    return vectors * values.where(values > rounding, 0).sqrt(), values[0].item()


def _nuclear_norm(x: Tensor, least: float) -> float:
    """Sum of the singular values; `least` is about the least square of one.

    Squares of singular values cost less but half the digits: they serve only where all values are of like size.
    """
    gram = x.T @ x
    if least > 1e-6 * gram.diagonal().amax():
        return torch.linalg.eigvalsh(gram).sqrt().sum().item()
    return float(np.linalg.svd(x.numpy(), compute_uv=False).sum())  # faster than torch's


def _smallest_eigenvalue(factor: Tensor) -> float:
    """Smallest eigenvalue, from above, of the matrix with this Cholesky factor: inverse iteration."""
    x = torch.arange(1, len(factor) + 1, dtype=factor.dtype).sin()[:, None]  # a vector that is special to no matrix
    for _ in range(5):
        x = torch.cholesky_solve(x / x.norm(), factor)
    return 1 / x.norm().item()


class InceptionScore:
    """Inception score of logits that arrive in image order: mean over chunks of 5,000, a short last one included."""

    def __init__(self, chunk: int = IS_CHUNK) -> None:
        self._chunk = chunk
        self._scores: list[float] = []
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
        self._scores.append(torch.tensor(kl, dtype=torch.float64).exp().item())
        self._count, self._entropy, self._marginal = 0, 0.0, None

    def result(self) -> tuple[float, float]:
        """Mean and standard deviation over the chunks; call once, after the last image."""
        if self._count:
            self._close()
        scores = torch.tensor(self._scores, dtype=torch.float64)
        return scores.mean().item(), scores.std(correction=0).item()


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
