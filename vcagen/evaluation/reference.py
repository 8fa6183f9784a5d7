"""Streaming statistics of features, in float64, and the references that samples are compared with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from vcagen.data.images import archive_kind, is_dataset
from vcagen.evaluation.extractor import Extractor, Features, Shape
from vcagen.evaluation.image_source import CROP, ImageSource, is_npz, open_images, open_npz, spans
from vcagen.evaluation.scores import Gaussian, InceptionScore, Measured
from vcagen.processes.process import non_finite_rows
from vcagen.system.files import FORMAT, atomic_file, parse_record, reading, sha256

REFERENCE_ROWS = 10_000
"""Images of a reference folder that precision and recall use, spread evenly over it: as many as ADM's batch has."""


class Moments:
    """Count, mean and scatter matrix of rows that arrive in parts, in float64.

    Parts are merged by the formula of Chan, Golub and LeVeque (1983), so a large mean costs no precision.
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean = torch.zeros(0, dtype=torch.float64)
        self._scatter = torch.zeros(0, 0, dtype=torch.float64)

    def update(self, rows: Tensor) -> None:
        """Take rows (N, D). They are summed where they lie, on the CPU where the device has no float64."""
        if not len(rows):
            return
        x = (rows.cpu() if rows.device.type == "mps" else rows).double()
        if self.count == 0:
            self._mean, self._scatter = x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1], x.shape[1])
        total = self.count + len(x)
        mean = x.mean(0)
        delta = mean - self._mean
        x = x - mean
        self._scatter.addmm_(x.T, x).addr_(delta, delta, alpha=self.count * len(x) / total)
        self._mean += delta * (len(x) / total)
        self.count = total

    def gaussian(self) -> Gaussian:
        """Mean and covariance with n - 1.

        Raises:
            ValueError: fewer than two rows.
        """
        if self.count < 2:
            raise ValueError(f"{self.count} image(s): scores need at least 2")
        return Gaussian(self._mean.cpu(), (self._scatter / (self.count - 1)).cpu())


class FeatureStatistics:
    """Moments of the features of `count` images taken in order, the pool rows of some of them, a hash of the pixels.

    Args:
        keep_rows: so many pool rows are kept, evenly spaced.
        class_scores: take the inception scores, too.
    """

    def __init__(self, extractor: Extractor, count: int, keep_rows: int, *, class_scores: bool = False) -> None:
        self.extractor = extractor
        self.count = count
        self.taken = 0
        self.digests: list[bytes] = []
        self._pool, self._spatial = Moments(), Moments()
        self._inception_score = InceptionScore() if class_scores else None
        self._kept = torch.arange(keep_rows) * count // max(1, keep_rows)
        self._rows: Tensor | None = None

    def add(self, features: Features, digests: Tensor) -> None:
        """Take the next images: their features, and the SHA-256 of their pixels, uint8 (N, 32).

        Raises:
            ValueError: a feature that is not finite, with the index of its image.
        """
        pool, spatial = features
        for rows, moments in ((pool, self._pool), (spatial, self._spatial)):
            if rows is None:
                continue
            if wrong := non_finite_rows(rows):
                raise ValueError(f"image {self.taken + wrong[0]}: its features are not finite")
            moments.update(rows)
        if self._inception_score is not None and (logits := self.extractor.logits(pool)) is not None:
            self._inception_score.add(logits)
        self.digests += [digest.numpy().tobytes() for digest in digests]
        if len(self._kept):
            if self._rows is None:
                self._rows = torch.empty(len(self._kept), pool.shape[1])
            start, stop = (int(torch.searchsorted(self._kept, i)) for i in (self.taken, self.taken + len(pool)))
            self._rows[start:stop] = pool[self._kept[start:stop] - self.taken].float().cpu()
        self.taken += len(pool)

    def measured(self) -> Measured:
        """What the scores need; call once, after the last image."""
        return Measured(
            extractor=self.extractor,
            count=self.count,
            pool=self._pool.gaussian(),
            spatial=self._spatial.gaussian() if self._spatial.count else None,
            rows=self._rows,
            class_scores=[] if self._inception_score is None else self._inception_score.result(),
        )

    @property
    def images_sha256(self) -> str:
        """SHA-256 of the SHA-256s of the images, in order."""
        return hashlib.sha256(b"".join(self.digests)).hexdigest()


def image_digests(images: Tensor) -> Tensor:
    """(N, C, H, W) uint8 -> (N, 32) uint8: SHA-256 of each image's bytes in the order (C, H, W)."""
    rows = images.cpu().contiguous().numpy()
    digests = b"".join(hashlib.sha256(row.tobytes()).digest() for row in rows)
    return torch.frombuffer(bytearray(digests), dtype=torch.uint8).view(-1, 32)


@dataclass(frozen=True, kw_only=True)
class Reference(Measured):
    """Statistics of real images."""

    kind: str
    """npz (ADM's stored statistics, or ours made of them), folder, images (npz of them), statistics (ours), or the
    name of a built-in set"""
    path: str
    shape: Shape | None = None
    """(C, H, W) of the images, where known."""
    images_sha256: str | None = None
    file_sha256: str | None = None

    def record(self) -> dict[str, Any]:
        """What the result file says about the reference."""
        digest = hashlib.sha256()
        for array in self.pool:
            digest.update(array.numpy().astype("<f8").tobytes())
        return {
            "kind": self.kind,
            "path": self.path,
            "file_sha256": self.file_sha256,
            "stats_sha256": digest.hexdigest(),
            "images_sha256": self.images_sha256,
            "n": self.count or None,
            "n_pr": 0 if self.rows is None else len(self.rows),
        }

    def check_fit(self, shape: Shape | None) -> None:
        """Raise ValueError where samples of this shape cannot be compared with the reference."""
        refuse_other_shape(self.path, self.shape, shape)
        for gaussian, size in zip((self.pool, self.spatial), self.extractor.sizes(shape) or (), strict=False):
            if gaussian is not None and size is not None and len(gaussian.mean) != size:
                ours = f"samples have {size} by the extractor {self.extractor.name}"
                raise ValueError(f"reference: {self.path}: {len(gaussian.mean)} features; {ours}")

    def check_features(self, features: Features) -> None:
        """Raise ValueError for features of other numbers than the reference's."""
        for gaussian, rows in ((self.pool, features.pool), (self.spatial, features.spatial)):
            if gaussian is not None and rows is not None and rows.shape[1:] != gaussian.mean.shape:
                raise ValueError(f"{tuple(rows.shape[1:])} features an image, the reference has {len(gaussian.mean)}")


def check_reference_path(path: str) -> None:
    """Raise ValueError where `path` cannot be a reference, before anything else takes time."""
    if not (is_dataset(path) or Path(path).is_dir() or is_npz(path) or archive_kind(path)):
        raise ValueError(f"reference: {path}: no .npz file, no folder or archive of images, nor a built-in set")


def open_reference(
    path: str,
    extractor: Extractor,
    *,
    batch: int = 64,
    image_size: int | None = None,
    num_workers: int = 4,
    rows: bool = True,
    shape: Shape | None = None,
    grayscale: bool = False,
) -> Reference:
    """Open ADM's .npz, an image folder or archive, an .npz of images, statistics of `vcagen stats`, or a built-in set.

    Statistics stored in a file are used as they are; those of images are computed here. `image_size` crops the images
    of a folder or an archive as in training; `grayscale` reads them as one channel, as samples of one channel are
    compared. `rows` also provides the features that precision and recall need.
    Images of another shape (C, H, W) than `shape`, the samples', are refused before any work. Features of the images
    beside stored statistics are cached in torch's cache folder.

    Raises:
        ValueError: nothing there, pickled or damaged arrays, missing, non-finite or wrongly sized statistics, or
            statistics made by another extractor or of images of another shape.
    """
    check_reference_path(path)
    if not is_dataset(path) and is_npz(path) and (arrays := _load_statistics(path)):
        return _stored(path, arrays, extractor, batch, rows, shape)
    grayscale = grayscale or (shape is not None and shape[0] == 1)
    source = open_images(path, image_size=image_size, num_workers=num_workers, grayscale=grayscale)
    refuse_other_shape(path, source.shape, shape)
    keep = 0 if not rows else source.count if source.kind == "npz" else min(source.count, REFERENCE_ROWS)
    statistics = measure(source, extractor, batch, keep)
    return Reference(
        kind="images" if source.kind == "npz" else source.kind,
        path=path,
        shape=source.shape,
        images_sha256=statistics.images_sha256,
        file_sha256=sha256(path) if source.kind == "npz" else None,
        **vars(statistics.measured()),
    )


def refuse_other_shape(path: str, found: Sequence[int] | None, samples: Sequence[int] | None) -> None:
    """Raise ValueError where the reference at `path` has images of another (C, H, W) than the samples."""
    if found is not None and samples is not None and tuple(found) != tuple(samples):
        theirs, ours = (f"{c} channel(s) of {h} x {w} pixels" for c, h, w in (found, samples))
        raise ValueError(f"reference: {path}: its images have {theirs}, the samples {ours}; {CROP}")


def measure(source: ImageSource, extractor: Extractor, batch: int, keep_rows: int) -> FeatureStatistics:
    """Statistics of all images of a source."""
    extractor.check_shape(source.shape, source.path)
    statistics = FeatureStatistics(extractor, source.count, keep_rows)
    with tqdm(total=source.count, desc="reference", unit="img", disable=None) as bar:
        for images in source.read(spans(0, source.count, batch)):
            statistics.add(extractor(images), image_digests(images))
            bar.update(len(images))
    return statistics


@dataclass(frozen=True)
class Facts:
    """What statistics of ours say about themselves: the record `meta` in their file."""

    identity: str
    """Of the extractor."""
    kind: str
    """Of the reference."""
    shape: Shape | None
    """(C, H, W) of the images."""
    count: Annotated[int, Meta(ge=0)]
    images_sha256: str | None


def _load_statistics(path: str) -> dict[str, Any]:
    """The arrays of an .npz beside its images; {} where there is neither mu nor sigma."""
    with reading(path), np.load(path, allow_pickle=False) as file:
        names = set(file.files)
        if not names & {"mu", "sigma"}:
            return {}
        for pair in ({"mu", "sigma"}, {"mu_s", "sigma_s"}):
            if len(pair & names) == 1:
                raise ValueError(f"{(pair - names).pop()} is missing, found {', '.join(sorted(names))}")
        arrays = {name: np.asarray(file[name]) for name in names & {"mu", "sigma", "mu_s", "sigma_s", "rows", "meta"}}
        return {"images": "arr_0" in names, **arrays}


def _gaussian(path: str, mu: Any, sigma: Any, names: str) -> Gaussian:
    for array in (mu, sigma):
        if array.dtype.kind != "f" or not np.isfinite(array).all():
            raise ValueError(f"reference: {path}: {names} hold {array.dtype}, NaN or infinity; needs finite floats")
    if mu.ndim != 1 or not len(mu) or sigma.shape != (len(mu), len(mu)):
        raise ValueError(f"reference: {path}: {names} have shapes {mu.shape} and {sigma.shape}; (D,) and (D, D) fit")
    mean, cov = torch.from_numpy(mu.astype(np.float64)), torch.from_numpy(sigma.astype(np.float64))
    symmetric = (cov + cov.T) / 2
    rounding = len(cov) * torch.finfo(torch.float32).eps * cov.diagonal().abs().amax()  # sigma may have been float32
    if torch.linalg.cholesky_ex(symmetric + rounding * torch.eye(len(cov), dtype=cov.dtype)).info:
        least = torch.linalg.eigvalsh(symmetric)[0]
        if least < -rounding:
            raise ValueError(f"reference: {path}: {names}: no covariance, with the eigenvalue {least:.3g} below 0")
    return Gaussian(mean, cov)


def _stored(
    path: str, arrays: dict[str, Any], extractor: Extractor, batch: int, rows: bool, expected: Shape | None
) -> Reference:
    """Statistics in a file: ours, which tell what they are of, or ADM's, beside which there may be images."""
    with reading(path):
        meta = Facts(extractor.identity, "npz", None, 0, None)  # of ADM's
        if "meta" in arrays:
            meta = parse_record(str(arrays["meta"]), Facts)
        if meta.identity != extractor.identity:
            raise ValueError(f"made by {meta.identity}, the samples are seen by {extractor.identity}")
    source = open_npz(path) if arrays["images"] else None
    shape = meta.shape if source is None else source.shape
    reference = Reference(
        extractor=extractor,
        kind="npz" if meta.kind == "npz" else "statistics",
        path=path,
        pool=_gaussian(path, arrays["mu"], arrays["sigma"], "mu and sigma"),
        spatial=_gaussian(path, arrays["mu_s"], arrays["sigma_s"], "mu_s and sigma_s") if "mu_s" in arrays else None,
        rows=torch.from_numpy(arrays["rows"]) if rows and "rows" in arrays else None,
        shape=shape,
        count=meta.count,
        images_sha256=meta.images_sha256,
        file_sha256=sha256(path),
    )
    reference.check_fit(expected)
    if source is not None and rows:
        return replace(reference, rows=_cached_rows(source, reference.file_sha256, extractor, batch))
    return reference


def _cached_rows(source: ImageSource, file_sha256: str | None, extractor: Extractor, batch: int) -> Tensor | None:
    """(N, D) pool features of all images of a file, measured once a machine: kept below torch's cache folder."""
    key = hashlib.sha256(f"{file_sha256} {extractor.identity}".encode()).hexdigest()
    cache = Path(torch.hub.get_dir()) / "vcagen" / f"rows_{key[:32]}.safetensors"
    try:
        return load_file(cache)["rows"]
    except (OSError, SafetensorError):
        rows = measure(source, extractor, batch, source.count).measured().rows
    assert rows is not None
    with suppress(OSError), atomic_file(cache) as temporary:  # only time is lost
        save_file({"rows": rows}, temporary)
    return rows


def save_statistics(path: str | Path, reference: Reference) -> None:
    """Write a reference as an .npz with ADM's keys, its pool rows, and what it is, for `open_reference`."""
    meta = {
        "format": FORMAT,
        "identity": reference.extractor.identity,
        "kind": reference.kind,
        "source": reference.path,
        "shape": reference.shape,
        "count": reference.count,
        "images_sha256": reference.images_sha256,
    }
    arrays = {
        "meta": np.array(json.dumps(meta)),
        "mu": reference.pool.mean.numpy(),
        "sigma": reference.pool.cov.numpy(),
    }
    if reference.spatial is not None:
        arrays |= {"mu_s": reference.spatial.mean.numpy(), "sigma_s": reference.spatial.cov.numpy()}
    if reference.rows is not None:
        arrays["rows"] = reference.rows.numpy()
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
