"""Frechet distance, inception score, precision and recall against closed forms and torch-fidelity."""

import math

import numpy as np
import pytest
import torch
from helpers import frechet_of_few
from torch_fidelity.metric_fid import fid_statistics_to_metric
from torch_fidelity.metric_isc import isc_features_to_metric
from torch_fidelity.metric_prc import prc_features_to_metric

from vcagen.evaluation.scores import Gaussian, InceptionScore, frechet_distance, precision_recall


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def covariance(d, *, rank=None, seed=0):
    factor = randn(d, rank or 2 * d, seed=seed)
    return factor @ factor.T / factor.shape[1]


def distance(mean_a, cov_a, mean_b, cov_b):
    return frechet_distance(Gaussian(mean_a, cov_a), Gaussian(mean_b, cov_b))


@pytest.mark.parametrize("d", [1, 2, 17, 256])
def test_frechet_of_identical_is_zero(d):
    mean, cov = randn(d), covariance(d)
    assert abs(distance(mean, cov, mean, cov)) < 1e-9 * (1 + cov.trace())


def test_frechet_closed_forms():
    d = 64
    mean, shift, cov = randn(d), randn(d, seed=1), covariance(d)
    assert distance(mean, cov, mean + shift, cov) == pytest.approx(shift.square().sum().item(), rel=1e-10)
    assert distance(mean, cov, mean, 4 * cov) == pytest.approx(cov.trace().item(), rel=1e-10)
    a, b = randn(d).abs(), randn(d, seed=2).abs()
    exact = (a.sqrt() - b.sqrt()).square().sum().item()
    assert distance(mean, a.diag(), mean, b.diag()) == pytest.approx(exact, rel=1e-10)


@pytest.mark.parametrize("rank", [None, 128])
def test_frechet_of_non_commuting_covariances(rank):
    """B = T A T with T = I + E positive definite: the optimal map is T, also where A is singular."""
    d = 256
    cov, mean, shift = covariance(d, rank=rank), randn(d), randn(d, seed=1)
    E = 0.3 * covariance(d, seed=2)
    T = torch.eye(d, dtype=torch.float64) + E
    exact = (shift.square().sum() + (E @ cov @ E).trace()).item()
    assert abs(distance(mean, cov, mean + shift, T @ cov @ T) - exact) < 1e-8


@pytest.mark.slow
def test_frechet_at_full_size_and_bad_condition():
    d = 2048
    basis, _ = torch.linalg.qr(randn(d, d))
    cov = basis * torch.logspace(0, -7, d, dtype=torch.float64) @ basis.T
    E = 0.3 * covariance(d, seed=2)
    T = torch.eye(d, dtype=torch.float64) + E
    mean = torch.zeros(d, dtype=torch.float64)
    assert abs(distance(mean, cov, mean, T @ cov @ T) - (E @ cov @ E).trace().item()) < 1e-8


def test_frechet_of_orthogonal_supports_and_zero():
    d = 32
    basis, _ = torch.linalg.qr(randn(d, d))
    P = basis[:, :10] @ basis[:, :10].T
    mean, identity, cov = torch.zeros(d), torch.eye(d), covariance(d)
    assert abs(distance(mean, P, mean, identity - P) - d) < 1e-10
    assert abs(distance(mean, torch.zeros(d, d), mean, cov) - cov.trace().item()) < 1e-10


def test_frechet_invariances():
    d = 48
    a, b = (randn(d), covariance(d)), (randn(d, seed=1), covariance(d, seed=1))
    value = distance(*a, *b)
    basis, _ = torch.linalg.qr(randn(d, d, seed=3))
    order = torch.randperm(d, generator=torch.Generator().manual_seed(0))
    assert distance(*b, *a) == pytest.approx(value, rel=1e-10)
    rotated = [(basis @ mean, basis @ cov @ basis.T) for mean, cov in (a, b)]
    assert distance(*rotated[0], *rotated[1]) == pytest.approx(value, rel=1e-10)
    permuted = [(mean[order], cov[order][:, order]) for mean, cov in (a, b)]
    assert distance(*permuted[0], *permuted[1]) == pytest.approx(value, rel=1e-10)


def test_frechet_equals_torch_fidelity():
    d = 256
    a, b = (randn(d), covariance(d)), (randn(d, seed=1), covariance(d, seed=1))
    oracle = fid_statistics_to_metric(
        *({"mu": mean.numpy(), "sigma": cov.numpy()} for mean, cov in (a, b)), verbose=False
    )["frechet_inception_distance"]
    assert abs(distance(*a, *b) - oracle) < 1e-8


def few_images(d, n):
    """The distance of two sets of n <= d rows, by covariances and without them."""
    x, y = randn(n, d), randn(n, d, seed=1) * 1.3 + 0.2
    return distance(x.mean(0), torch.cov(x.T), y.mean(0), torch.cov(y.T)), frechet_of_few(x, y)


def test_frechet_of_fewer_images_than_features():
    found, exact = few_images(256, 64)
    assert found == pytest.approx(exact, rel=1e-8)


@pytest.mark.slow
def test_frechet_of_fewer_images_than_features_at_full_size():
    found, exact = few_images(2048, 512)
    assert found == pytest.approx(exact, rel=1e-8)


@pytest.mark.parametrize("rank", [None, 20])
def test_frechet_is_never_negative(rank):
    for seed in range(8):
        mean, cov = randn(64, seed=seed), covariance(64, rank=rank, seed=seed)
        assert 0 <= distance(mean, cov, mean, cov) < 1e-11 * cov.trace()


def inception_score(logits, chunk=5000, batches=(64,)):
    score, start, i = InceptionScore(chunk), 0, 0
    while start < len(logits):
        size = batches[i % len(batches)]
        score.add(logits[start : start + size])
        start, i = start + size, i + 1
    parts = score.result()
    return np.mean(parts), np.std(parts)


def test_inception_score_closed_forms():
    assert inception_score(torch.zeros(100, 7)) == (pytest.approx(1, rel=1e-9), 0)
    one_hot = torch.eye(10).repeat(30, 1) * 1e4  # probabilities are exactly 0 or 1
    assert inception_score(one_hot) == (pytest.approx(10, rel=1e-9), 0)


def test_inception_score_is_the_mean_over_chunks_with_a_short_tail():
    logits = randn(1130, 20) * 2
    parts = [inception_score(part)[0] for part in logits.split(500)]
    assert len(parts) == 3
    mean, std = inception_score(logits, chunk=500, batches=(64, 7, 501))
    assert mean == pytest.approx(np.mean(parts), rel=1e-9)
    assert std == pytest.approx(np.std(parts), rel=1e-9)
    assert abs(parts[2] - mean) > 1e-4  # the tail matters


def test_inception_score_equals_torch_fidelity():
    logits = (randn(2000, 50) * 2).float()
    oracle = isc_features_to_metric(logits, splits=4, shuffle=False)
    mean, _ = inception_score(logits, chunk=500)
    assert mean == pytest.approx(oracle["inception_score_mean"], rel=1e-6)


def test_precision_recall_of_identical_and_far_sets():
    x = randn(50, 6).float()
    for half in (False, True):
        assert precision_recall(x, x, half=half) == (1, 1)
        assert precision_recall(x, x + 100, half=half) == (0, 0)


def test_precision_recall_by_hand():
    """Radii of 0, 1, 2, 3, 20 are 3, 2, 2, 3, 19: these balls cover [-3, 39]. Of 39, 40, 41, 42: 3, 2, 2, 3."""
    reference = torch.tensor([[0.0], [1], [2], [3], [20]])
    samples = torch.tensor([[39.0], [40], [41], [42]])
    for half in (False, True):
        assert precision_recall(reference, samples, half=half) == (1 / 4, 0)
        assert precision_recall(samples, reference, half=half) == (0, 1 / 4)


def test_precision_recall_equals_torch_fidelity(monkeypatch):
    reference, samples = randn(300, 16).float(), (randn(500, 16, seed=1) * 0.8 + 0.3).float()
    oracle = prc_features_to_metric(samples, reference, prc_neighborhood=3, prc_batch_size=100, verbose=False)
    expected = oracle["precision"], oracle["recall"]
    assert 0.1 < expected[0] < 0.99
    assert 0.1 < expected[1] < 0.99
    found = precision_recall(reference, samples)
    assert tuple(np.float32(found)) == tuple(np.float32(expected))
    assert precision_recall(samples, reference) == found[::-1]
    monkeypatch.setattr("vcagen.evaluation.scores._BLOCK", 37)
    assert precision_recall(reference, samples) == found


def test_float16_precision_recall():
    """Exact on small integers; slightly different, as ADM's, on features; float32 where float16 overflows."""
    integers = [torch.randint(0, 4, (n, 8), generator=torch.Generator().manual_seed(n)).float() for n in (100, 150)]
    assert precision_recall(*integers, half=True) == precision_recall(*integers)

    reference, samples = (randn(n, 512, seed=n).abs().float() * 0.4 for n in (400, 600))
    exact, half = precision_recall(reference, samples), precision_recall(reference, samples, half=True)
    assert exact != half
    assert np.abs(np.subtract(exact, half)).max() < 0.03

    large = [randn(n, 8, seed=n).float() * 1000 for n in (60, 80)]
    assert precision_recall(*large, half=True) == precision_recall(*large)


def test_scores_are_finite_on_huge_logits():
    mean, _ = inception_score(torch.tensor([[0.0, 500.0], [500.0, 0.0]]))
    assert math.isclose(mean, 2, rel_tol=1e-9)
