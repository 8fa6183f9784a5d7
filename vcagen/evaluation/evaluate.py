"""From a stream of uint8 images to the result of an evaluation, one JSON object.

In a sampling run every process calls `Evaluator.update` with the chunks it makes, and each chunk's features become one
file in a shared folder. At the end one process reads these files in the order of the images. So scores depend neither
on the number of processes nor on interruptions, and a killed run loses at most the chunk it was in. Without a folder,
images arrive in order and nothing is written. Statistics are streamed either way: memory grows with the number of
images only by the pool rows of precision and recall.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from vcagen.evaluation.features import Extractor, Features, full_precision
from vcagen.evaluation.image_source import ImageSource
from vcagen.evaluation.reference import FeatureStatistics, Reference, image_digests, refuse_other_shape
from vcagen.evaluation.scores import IS_CHUNK, NEIGHBOURS, InceptionScore, frechet_distance, precision_recall
from vcagen.system.files import atomic_file


def count_name(count: int) -> str:
    """50000 -> 50k, 1797 -> 1797: the count in the name of a score."""
    return f"{count // 1000}k" if count and count % 1000 == 0 else str(count)


class Evaluator:
    """Scores the images 0 .. count-1 of a stream against a reference.

    Args:
        extractor: features of the images.
        reference: what they are compared with; None in a process that never calls `finalize`.
        count: number of images; those with an index from `count` on are dropped.
        folder: shared folder of the feature files, for images that arrive in any order, from several processes, and
            over several runs. None: images arrive in order, in this process.
        precision_recall: compute them, where the reference has features.
    """

    def __init__(
        self,
        extractor: Extractor,
        reference: Reference | None,
        count: int,
        *,
        folder: str | Path | None = None,
        precision_recall: bool = True,
    ) -> None:
        if count < 2:
            raise ValueError(f"num_images: {count}; scores need at least 2 images")
        self.extractor = extractor
        self.reference = reference
        self.count = count
        self.folder = None if folder is None else Path(folder)
        self._rows = precision_recall and reference is not None and reference.rows is not None
        self._shape: tuple[int, int, int] | None = None
        self._dropped = 0
        self._started = time.monotonic()
        self._reset()

    def _reset(self) -> None:
        self._statistics = FeatureStatistics(self.count, self.count if self._rows else 0)
        self._inception_score = InceptionScore()

    def check_shape(self, shape: tuple[int, int, int], path: str = "samples") -> None:
        """Refuse images of the shape (C, H, W) that the extractor or the reference is not for; call before sampling.

        Raises:
            ValueError: wrong number of channels, or another size or number of features than the reference's.
        """
        self.extractor.check_shape(shape, path)
        if self.reference is not None:
            refuse_other_shape(self.reference.path, self.reference.shape, shape)
        if self.reference is not None and self._shape != shape:
            found = self.extractor(torch.zeros(1, *shape, dtype=torch.uint8)).pool.shape[1]
            if found != (size := len(self.reference.pool.mean)):
                raise ValueError(f"reference: {self.reference.path}: {size} features, the samples have {found}")
        self._shape = shape

    def update(self, images: Tensor, index: Sequence[int] | Tensor) -> None:
        """Take uint8 images (N, C, H, W), on any device, and their ascending consecutive indices (N,)."""
        assert images.ndim == 4, images.shape
        self.check_shape((images.shape[1], images.shape[2], images.shape[3]))
        index = torch.as_tensor(index)
        keep = int((index < self.count).sum())
        self._dropped += len(index) - keep
        if keep:
            pool, spatial = self.extractor(images)  # padding included: batch shapes do not change
            features = Features(pool[:keep], None if spatial is None else spatial[:keep])
            self.add(features, index[:keep], image_digests(images[:keep]))

    def add(self, features: Features, index: Tensor, digests: Tensor) -> None:
        """As `update`, for features that are there already; digests (N, 32) uint8 as of `image_digests`."""
        index = index.cpu().long()
        assert len(index) == len(features.pool) == len(digests), (index.shape, features.pool.shape, digests.shape)
        assert bool((index.diff() == 1).all()), f"indices {index.tolist()} are not consecutive"
        if self.folder is None:
            self._take(features, index, digests)
            return
        tensors = {"pool": features.pool, "index": index, "digests": digests}
        if features.spatial is not None:
            tensors["spatial"] = features.spatial
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        with atomic_file(self._file(int(index[0]))) as temporary:
            save_file(tensors, temporary, {"identity": self.extractor.identity})

    def has(self, index: Sequence[int] | Tensor) -> bool:
        """Whether the features of a chunk with these indices are in the folder, made by this extractor."""
        assert self.folder is not None
        wanted = [i for i in torch.as_tensor(index).tolist() if i < self.count]
        try:
            with safe_open(self._file(wanted[0]), "pt") as file:
                same = (file.metadata() or {}).get("identity") == self.extractor.identity
                whole = len({file.get_slice(name).get_shape()[0] for name in ("index", "pool", "digests")}) == 1
                return same and whole and set(wanted) <= set(file.get_tensor("index").tolist())
        except (OSError, IndexError, TypeError, SafetensorError):
            return not wanted

    def _file(self, first: int) -> Path:
        assert self.folder is not None
        return self.folder / f"features_{first:09d}.safetensors"

    def _take(self, features: Features, index: Tensor, digests: Tensor) -> None:
        """Add the rows that continue the stream; those already taken, and those from `count` on, are left out."""
        following = self._statistics.taken
        keep = (index >= following) & (index < self.count)
        if not keep.any():
            return
        if index[keep][0] != following:
            raise ValueError(f"features of the images {following} to {int(index[keep][0]) - 1} are missing")
        keep = keep.to(features.pool.device)
        pool = features.pool[keep]
        self._statistics.add(
            Features(pool, None if features.spatial is None else features.spatial[keep]), digests[keep.cpu()]
        )
        logits = self.extractor.logits(pool)
        if logits is not None:
            self._inception_score.add(logits)

    def _read_folder(self) -> None:
        """Stream the feature files in the order of the images."""
        assert self.folder is not None
        self._reset()
        device = self.extractor.device
        files = sorted(self.folder.glob(f"features_{'[0-9]' * 9}.safetensors"))
        for path in tqdm(files, desc="statistics", unit="file", disable=not sys.stderr.isatty()):
            try:
                with safe_open(path, "pt") as file:
                    index = file.get_tensor("index")
                    if index[-1] < self._statistics.taken or index[0] >= self.count:
                        continue
                    if (file.metadata() or {}).get("identity") != self.extractor.identity:
                        raise ValueError(
                            f"{path}: features of another extractor or other weights; delete {self.folder}"
                        )
                    spatial = file.get_tensor("spatial").to(device) if "spatial" in file.keys() else None  # noqa: SIM118
                    features = Features(file.get_tensor("pool").to(device), spatial)
                    self._take(features, index, file.get_tensor("digests"))
            except (SafetensorError, IndexError, TypeError) as error:
                raise ValueError(f"{path}: damaged features ({error}); delete it and repeat the command") from error

    def finalize(self, **facts: Any) -> dict[str, Any]:
        """The result (PROTOCOL: metrics, everything they depend on, warnings), in one process, after all are done.

        `facts` are further entries of the result: sampler, model, vae, uint8_rule; `samples`, `extractor` and
        `warnings` are added to what is there.

        Raises:
            ValueError: an image without features, or a damaged file of features.
        """
        reference = self.reference
        assert reference is not None, "this process has no reference"
        if self.folder is not None:
            self._read_folder()
        statistics = self._statistics
        if statistics.taken != self.count:
            raise ValueError(f"features of {self.count - statistics.taken} of {self.count} images are missing")
        shape = self._shape or reference.shape
        frechet = frechet_distance(*statistics.pool.gaussian(), *reference.pool)
        name = count_name(self.count)
        pixels = self.extractor.name == "pixels"
        metrics = {f"{'fd_pixels' if pixels else 'fid'}_{name}": frechet.distance}
        if statistics.spatial.count and reference.spatial is not None:
            spatial = frechet_distance(*statistics.spatial.gaussian(), *reference.spatial)
            metrics[f"sfid_{name}"] = spatial.distance
        if not pixels:
            metrics["is_mean"], metrics["is_std"] = self._inception_score.result()
        metrics |= self._precision_recall()

        return {
            "protocol": "pixels-8x8" if pixels else f"adm-2021/{self.extractor.record()['name']}",
            "metrics": metrics,
            "n_samples": self.count,
            "n_ref_pr": len(reference.rows) if self._rows and reference.rows is not None else 0,
            "resolution": None if shape is None else shape[1],
            "reference": reference.record(),
            "weights": self.extractor.record(),
            "extractor": {**self._environment(), **facts.pop("extractor", {})},
            "samples": {
                "sha256_of_stream": statistics.images_sha256,
                "dropped": self._dropped,
                **facts.pop("samples", {}),
            },
            **facts,
            "frechet": frechet._asdict(),
            "warnings": self._warnings() + facts.get("warnings", []),
            "wall_s": time.monotonic() - self._started,
        }

    def _precision_recall(self) -> dict[str, float]:
        rows = self._statistics.rows
        if not self._rows or rows is None or self._too_few_neighbours():
            return {}
        assert self.reference is not None
        assert self.reference.rows is not None
        device = self.extractor.device
        rows, reference = rows.to(device), self.reference.rows.to(device)
        with full_precision(device):
            precision, recall = precision_recall(reference, rows)
            if self.extractor.name == "pixels":
                return {"precision_pixels": precision, "recall_pixels": recall}
            precision_half, recall_half = precision_recall(reference, rows, half=True)
        return {
            "precision_fp32": precision,
            "recall_fp32": recall,
            "precision_adm_fp16": precision_half,
            "recall_adm_fp16": recall_half,
        }

    def _too_few_neighbours(self) -> bool:
        assert self.reference is not None
        return self.reference.rows is not None and min(self.count, len(self.reference.rows)) <= NEIGHBOURS

    def _environment(self) -> dict[str, Any]:
        from importlib.metadata import version

        return {
            "name": self.extractor.name,
            "torch_fidelity": version("torch-fidelity"),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "device": str(self.extractor.device),
            "tf32": False,
            "dtype": "float32",
        }

    def _warnings(self) -> list[str]:
        """What makes these scores less than comparable."""
        reference, statistics = self.reference, self._statistics
        assert reference is not None
        found = []
        inception = self.extractor.name == "inception"
        if self.extractor.record()["name"] == "UNKNOWN":
            found.append("the Inception weights are UNKNOWN (their SHA-256 is not 6726825d...): not comparable")
        if inception and self.count != 50_000:
            found.append(f"{self.count} images: compare only with scores of as many; FID falls with their number")
        sizes = [("FID" if inception else "fd_pixels", len(reference.pool.mean))]
        sizes += [("sFID", len(reference.spatial.mean))] if reference.spatial is not None else []
        for score, size in sizes:
            counts = [self.count] if reference.count is None else [self.count, reference.count]
            if min(counts) <= size:
                found.append(f"{min(counts)} images for {size} features: the covariance is singular, {score} is biased")
        if inception and self.count % IS_CHUNK:
            found.append(f"{self.count} images: IS is a mean over chunks of {IS_CHUNK}, the last of which is short")
        if inception and reference.kind != "npz":
            found.append("non-ADM-reference: scores are not those of the ADM evaluator's reference batch")
        if self._too_few_neighbours():
            found.append(f"precision and recall need more than {NEIGHBOURS} images on both sides: left out")
        if (duplicates := self.count - len(set(statistics.digests))) > 0:
            found.append(f"{duplicates} of {self.count} images are exact copies of others")
        if statistics.images_sha256 == reference.images_sha256:
            found.append("the samples are the reference images")
        return found


def evaluate_images(
    source: ImageSource,
    extractor: Extractor,
    reference: Reference,
    *,
    batch: int = 64,
    precision_recall: bool = True,
    **facts: Any,
) -> dict[str, Any]:
    """Score all images of a source; the result of `Evaluator.finalize`."""
    evaluator = Evaluator(extractor, reference, source.count, precision_recall=precision_recall)
    evaluator.check_shape(source.shape, source.path)
    for images, index in _numbered(source, batch):
        evaluator.update(images, index)
    samples = {**facts.pop("samples", {}), "source": source.path, "kind": source.kind, "index_rule": "file order"}
    return evaluator.finalize(samples=samples, extractor={"batch": batch}, warnings=source.warnings, **facts)


def _numbered(source: ImageSource, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    start = 0
    with tqdm(total=source.count, desc="evaluate", unit="img") as bar:
        for images in source.batches(batch):
            yield images, torch.arange(start, start + len(images))
            start += len(images)
            bar.update(len(images))
