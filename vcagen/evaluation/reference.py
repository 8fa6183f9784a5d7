"""Streaming statistics of features, in float64, and the references that samples are compared with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from vcagen.evaluation.features import Extractor, Features
from vcagen.evaluation.image_source import DAMAGED, ImageSource, open_images, open_npz
from vcagen.system.files import atomic_file, sha256

REFERENCE_ROWS = 10_000
"""Images of a reference folder that precision and recall use, spread evenly over it: as many as ADM's batch has."""


class Gaussian(NamedTuple):
    """Mean (D,) and unbiased covariance (D, D), float64."""

    mean: Tensor
    cov: Tensor


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
        part = Moments()
        if len(rows):
            x = (rows.cpu() if rows.device.type == "mps" else rows).double()
            part.count, part._mean = len(x), x.mean(0)
            x = x - part._mean
            part._scatter = x.T @ x
        self.merge(part)

    def merge(self, other: Moments) -> None:
        """Take all that `other` has taken."""
        if other.count == 0:
            return
        if self.count == 0:
            self.count, self._mean, self._scatter = other.count, other._mean.clone(), other._scatter.clone()
            return
        total = self.count + other.count
        delta = other._mean - self._mean
        self._scatter += other._scatter
        self._scatter.addr_(delta, delta, alpha=self.count * other.count / total)
        self._mean += delta * (other.count / total)
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
    """Moments of the features of `count` images taken in order, the pool rows of some of them, a hash of the pixels."""

    def __init__(self, count: int, keep_rows: int) -> None:
        self.count = count
        self.taken = 0
        self.pool, self.spatial = Moments(), Moments()
        self.digests: list[bytes] = []
        self._kept = torch.arange(keep_rows) * count // max(1, keep_rows)  # evenly spaced indices
        self._rows: Tensor | None = None

    def add(self, features: Features, digests: Tensor) -> None:
        """Take the next images: their features, and the SHA-256 of their pixels, uint8 (N, 32).

        Raises:
            ValueError: a feature that is not finite, with the index of its image.
        """
        n = len(features.pool)
        finite = features.pool.isfinite().all(1)
        if features.spatial is not None:
            finite &= features.spatial.isfinite().all(1)
        if not finite.all():
            raise ValueError(
                f"image {self.taken + int(finite.logical_not().nonzero()[0])}: its features are not finite"
            )
        self.pool.update(features.pool)
        if features.spatial is not None:
            self.spatial.update(features.spatial)
        self.digests += [bytes(digest.tolist()) for digest in digests]
        if len(self._kept):
            if self._rows is None:
                self._rows = torch.empty(len(self._kept), features.pool.shape[1])
            start, stop = (int(torch.searchsorted(self._kept, i)) for i in (self.taken, self.taken + n))
            self._rows[start:stop] = features.pool[self._kept[start:stop] - self.taken].float().cpu()
        self.taken += n

    @property
    def rows(self) -> Tensor | None:
        """(K, D) float32 pool features of the kept images, or None when none are kept."""
        return self._rows

    @property
    def images_sha256(self) -> str:
        """SHA-256 of the SHA-256s of the images, in order."""
        return hashlib.sha256(b"".join(self.digests)).hexdigest()


def image_digests(images: Tensor) -> Tensor:
    """(N, C, H, W) uint8 -> (N, 32) uint8: SHA-256 of each image's bytes in the order (C, H, W)."""
    rows = images.cpu().contiguous().numpy()
    digests = b"".join(hashlib.sha256(row.tobytes()).digest() for row in rows)
    return torch.frombuffer(bytearray(digests), dtype=torch.uint8).view(-1, 32)


@dataclass(frozen=True)
class Reference:
    """Statistics of real images."""

    kind: str
    """npz (ADM's stored statistics, or ours made of them), folder, digits, images (npz of them) or statistics (ours)"""
    path: str
    pool: Gaussian
    spatial: Gaussian | None = None
    rows: Tensor | None = None
    """(K, D) float32 pool features for precision and recall."""
    shape: tuple[int, int, int] | None = None
    """(C, H, W) of the images, where known."""
    count: int | None = None
    """Images behind the statistics, where known."""
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
            "n": self.count,
            "n_pr": 0 if self.rows is None else len(self.rows),
        }


def check_reference_path(path: str) -> None:
    """Raise ValueError where `path` cannot be a reference, before anything else takes time."""
    if path != "digits" and not Path(path).exists():
        raise ValueError(f"reference: {path}: no such file or folder (or the word digits)")
    if path != "digits" and not (Path(path).suffix == ".npz" or Path(path).is_dir()):
        raise ValueError(f"reference: {path}: neither an .npz file nor a folder of images")


def open_reference(
    path: str,
    extractor: Extractor,
    *,
    batch: int = 64,
    image_size: int | None = None,
    num_workers: int = 4,
    rows: bool = True,
    shape: tuple[int, int, int] | None = None,
    progress: bool = True,
) -> Reference:
    """Open a reference: ADM's .npz, an image folder, an .npz of images, statistics of `vcagen stats`, or digits.

    Statistics stored in a file are used as they are; those of images are computed here. `image_size` crops the images
    of a folder as in training. `rows` also provides the features that precision and recall need.
    Images of another shape (C, H, W) than `shape`, the samples', are refused before any work. Features of the images
    beside stored statistics are cached in torch's cache folder.

    Raises:
        ValueError: nothing there, pickled or damaged arrays, missing, non-finite or wrongly sized statistics, or
            statistics made by another extractor or of images of another shape.
    """
    check_reference_path(path)
    if Path(path).suffix == ".npz":
        arrays = _load_statistics(path)
        if arrays:
            return _stored(path, arrays, extractor, batch, rows, shape, progress)
    source = open_images(path, image_size=image_size, num_workers=num_workers)
    if source.count < 2:
        raise ValueError(f"reference: {path}: {source.count} image; statistics need at least 2")
    refuse_other_shape(path, source.shape, shape)
    keep = 0 if not rows else source.count if source.kind == "npz" else min(source.count, REFERENCE_ROWS)
    statistics = measure(source, extractor, batch, keep, progress)
    return Reference(
        kind="images" if source.kind == "npz" else source.kind,
        path=path,
        pool=statistics.pool.gaussian(),
        spatial=statistics.spatial.gaussian() if statistics.spatial.count else None,
        rows=statistics.rows,
        shape=source.shape,
        count=source.count,
        images_sha256=statistics.images_sha256,
        file_sha256=sha256(path) if source.kind == "npz" else None,
    )


def refuse_other_shape(path: str, found: Sequence[int] | None, samples: Sequence[int] | None) -> None:
    """Raise ValueError when the reference at `path` has images of another (C, H, W) than the samples."""
    if found is not None and samples is not None and tuple(found) != tuple(samples):
        theirs, ours = (f"{c} channel(s) of {h} x {w} pixels" for c, h, w in (found, samples))
        raise ValueError(
            f"reference: {path}: its images have {theirs}, the samples {ours}; a folder is cropped by "
            "python -m vcagen stats FOLDER --image_size SIDE"
        )


def measure(
    source: ImageSource, extractor: Extractor, batch: int, keep_rows: int, progress: bool = True
) -> FeatureStatistics:
    """Statistics of all images of a source."""
    extractor.check_shape(source.shape, source.path)
    statistics = FeatureStatistics(source.count, keep_rows)
    with tqdm(total=source.count, desc="reference", unit="img", disable=not progress) as bar:
        for images in source.batches(batch):
            statistics.add(extractor(images), image_digests(images))
            bar.update(len(images))
    return statistics


def _load_statistics(path: str) -> dict[str, Any]:
    """The arrays of an .npz beside its images; {} where there is neither mu nor sigma."""
    try:
        with np.load(path, allow_pickle=False) as file:
            names = set(file.files)
            if not names & {"mu", "sigma"}:
                return {}
            if missing := {"mu", "sigma"} - names:
                raise ValueError(f"{missing.pop()} is missing, found {', '.join(sorted(names))}")
            if len(names & {"mu_s", "sigma_s"}) == 1:
                raise ValueError(f"one of mu_s and sigma_s is missing, found {', '.join(sorted(names))}")
            arrays = {name: file[name] for name in names & {"mu", "sigma", "mu_s", "sigma_s", "rows", "meta"}}
            if wrong := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
                raise ValueError(f"{', '.join(wrong)} is no array")
            return {"images": "arr_0" in names, **arrays}
    except DAMAGED as error:
        raise ValueError(f"reference: {path}: {error}") from error


def _gaussian(path: str, mu: Any, sigma: Any, names: str) -> Gaussian:
    for array in (mu, sigma):
        if array.dtype.kind != "f":
            raise ValueError(f"reference: {path}: {names} hold {array.dtype}; float32 or float64 are read")
        if not np.isfinite(array).all():
            raise ValueError(f"reference: {path}: {names} hold NaN or infinity")
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
    path: str,
    arrays: dict[str, Any],
    extractor: Extractor,
    batch: int,
    rows: bool,
    expected: tuple[int, int, int] | None,
    progress: bool,
) -> Reference:
    pool = _gaussian(path, arrays["mu"], arrays["sigma"], "mu and sigma")
    spatial = _gaussian(path, arrays["mu_s"], arrays["sigma_s"], "mu_s and sigma_s") if "mu_s" in arrays else None
    if extractor.name == "inception":
        for gaussian, size in ((pool, 2048), (spatial, 2023)):
            if gaussian is not None and len(gaussian.mean) != size:
                raise ValueError(f"reference: {path}: {len(gaussian.mean)} features; Inception has {size}")
    else:
        spatial = None
    file_sha256 = sha256(path)
    if "meta" in arrays:
        try:
            meta = json.loads(str(arrays["meta"]))
            identity, kind = meta["identity"], meta["source"]["kind"]
            count, images_sha256 = meta["count"], meta["images_sha256"]
            shape = None if meta["shape"] is None else tuple(int(side) for side in meta["shape"])
            if shape is not None and len(shape) != 3:
                raise ValueError(f"shape {shape}")
            if not (count is None or type(count) is int):
                raise ValueError(f"count {count!r}")
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"reference: {path}: its meta record is damaged ({reason})") from error
        kept = arrays.get("rows")
        if kept is not None and (kept.ndim != 2 or kept.shape[1] != len(pool.mean) or kept.dtype.kind != "f"):
            raise ValueError(
                f"reference: {path}: rows are {kept.dtype} {kept.shape}; (K, {len(pool.mean)}) float32 fit"
            )
        if identity != extractor.identity:
            raise ValueError(f"reference: {path}: made by {identity}, but the samples are seen by {extractor.identity}")
        refuse_other_shape(path, shape, expected)
        return Reference(
            kind="npz" if kind == "npz" else "statistics",
            path=path,
            pool=pool,
            spatial=spatial,
            rows=torch.from_numpy(kept).float() if rows and kept is not None else None,
            shape=shape,
            count=count,
            images_sha256=images_sha256,
            file_sha256=file_sha256,
        )
    kept, shape = None, None
    if arrays["images"]:
        source = open_npz(path)
        shape = source.shape
        refuse_other_shape(path, shape, expected)
        if rows:
            kept = _cached_rows(source, file_sha256, extractor, batch, progress)
    return Reference("npz", path, pool, spatial, kept, shape, file_sha256=file_sha256)


def _cached_rows(
    source: ImageSource, file_sha256: str, extractor: Extractor, batch: int, progress: bool
) -> Tensor | None:
    """(N, D) pool features of all images of a file, measured once a machine: kept below torch's cache folder."""
    key = hashlib.sha256(f"{file_sha256} {extractor.identity}".encode()).hexdigest()
    cache = Path(torch.hub.get_dir()) / "vcagen" / f"rows_{key[:32]}.safetensors"
    try:
        rows = load_file(cache)["rows"]
        if len(rows) == source.count:
            return rows
    except (OSError, SafetensorError, KeyError):
        pass
    measured = measure(source, extractor, batch, source.count, progress).rows
    if measured is not None:
        try:
            with atomic_file(cache) as temporary:
                save_file({"rows": measured}, temporary)
        except (OSError, SafetensorError):
            pass  # only time is lost
    return measured


def save_statistics(path: str | Path, reference: Reference, extractor: Extractor) -> None:
    """Write a reference as an .npz with ADM's keys, its pool rows, and what it is, for `open_reference`."""
    meta = {
        "identity": extractor.identity,
        "shape": reference.shape,
        "count": reference.count,
        "images_sha256": reference.images_sha256,
        "source": {"kind": reference.kind, "path": reference.path},
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
