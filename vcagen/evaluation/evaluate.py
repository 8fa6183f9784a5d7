"""Scores of images: `Evaluator` takes them as a stream, `Evaluation` a folder or an .npz, shared by all processes."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypedDict

import numpy as np
import torch
from accelerate import Accelerator
from msgspec import Meta
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from vcagen.config.job_options import EvaluateConfig
from vcagen.data.images import is_dataset
from vcagen.evaluation.extractor import Extractor, Features, Shape
from vcagen.evaluation.features import load_extractor
from vcagen.evaluation.image_source import ImageSource, open_images, open_samples, spans
from vcagen.evaluation.reference import (
    FeatureStatistics,
    Reference,
    check_reference_path,
    image_digests,
    measure,
    open_reference,
)
from vcagen.evaluation.scores import IS_CHUNK, METRICS, NEIGHBOURS, Measured, frechet_distance
from vcagen.system.files import FORMAT, atomic_file, check_writable, read_json, reading, write_json
from vcagen.system.processes import build_accelerator


class Facts(TypedDict, total=False):
    """What sample.py knows of its images besides; it goes into the result."""

    samples: dict[str, Any]


class MaybeFacts(TypedDict, total=False):
    """What the manifests of some versions have."""

    facts: Facts


class Manifest(MaybeFacts):
    """What `evaluate` looks at in a manifest.json."""

    num_images: Annotated[int, Meta(ge=1)]


class ExtractorRecord(TypedDict):
    """Of a result."""

    name: str


class Result(TypedDict):
    """What `evaluate` looks at in a results.json."""

    extractor: ExtractorRecord


PART = 16
"""Batches whose features are one file, which a kill costs at most."""


class Evaluator:
    """Scores the images 0 .. count-1 of a stream against a reference.

    Memory grows with the number of images only by the pool rows of precision and recall.

    Args:
        count: number of images; those with an index from `count` on are dropped.
        precision_recall: compute them, where the reference has features.
    """

    def __init__(
        self, extractor: Extractor, reference: Reference, count: int, *, precision_recall: bool = True
    ) -> None:
        if count < 2:
            raise ValueError(f"num_images: {count}; scores need at least 2 images")
        self.extractor = extractor
        self.reference = reference
        self.count = count
        rows = count if precision_recall and reference.rows is not None else 0
        self.statistics = FeatureStatistics(extractor, count, rows, class_scores=True)
        self._shape: Shape | None = None
        self._dropped = 0
        self._started = time.monotonic()

    def check_shape(self, shape: Shape, path: str = "samples") -> None:
        """Raise ValueError where the extractor or the reference is not for images of this shape (C, H, W)."""
        if shape != self._shape:
            self.extractor.check_shape(shape, path)
            self.reference.check_fit(shape)
            self._shape = shape

    def update(self, images: Tensor, index: Sequence[int] | Tensor) -> None:
        """Take uint8 images (N, C, H, W), on any device, and their consecutive indices (N,), which continue the stream.

        Raises:
            ValueError: images between are missing, or are of another shape than the reference's.
        """
        channels, height, width = images.shape[1:]
        self.check_shape((channels, height, width))
        index = torch.as_tensor(index)
        assert bool((index.diff() == 1).all()), f"indices {index.tolist()} are not consecutive"
        if (first := int(index[0])) != self.statistics.taken:
            raise ValueError(f"features of the images {self.statistics.taken} to {first - 1} are missing")
        keep = int((index < self.count).sum())
        self._dropped += len(index) - keep
        if keep:
            pool, spatial = self.extractor(images)  # padding included: batch shapes do not change
            features = Features(pool[:keep], None if spatial is None else spatial[:keep])
            self.statistics.add(features, image_digests(images[:keep]))

    def finalize(self) -> dict[str, Any]:
        """The result (PROTOCOL: metrics, everything they depend on, warnings), after the last image.

        Raises:
            ValueError: images are missing.
        """
        extractor, reference, statistics = self.extractor, self.reference, self.statistics
        if statistics.taken != self.count:
            raise ValueError(f"features of {self.count - statistics.taken} of {self.count} images are missing")
        samples = statistics.measured()
        metrics: dict[str, float] = {}
        for metric in METRICS.values():
            metrics |= metric(samples, reference)
        shape = self._shape or reference.shape
        return {
            "format": FORMAT,
            "protocol": extractor.protocol,
            "metrics": metrics,
            "n_samples": self.count,
            "n_ref_pr": 0 if samples.rows is None or reference.rows is None else len(reference.rows),
            "resolution": None if shape is None else shape[1],
            "reference": reference.record(),
            "weights": extractor.record(),
            "extractor": {
                "name": extractor.name,
                "torch_fidelity": version("torch-fidelity"),
                "torch": torch.__version__,
                "numpy": np.__version__,
                "device": str(extractor.device),
                "tf32": False,
                "dtype": "float32",
            },
            "samples": {"sha256_of_stream": statistics.images_sha256, "dropped": self._dropped},
            "frechet": {
                "mean_term": (samples.pool.mean - reference.pool.mean).square().sum().item(),
                "trace_sample": samples.pool.cov.trace().item(),
                "trace_ref": reference.pool.cov.trace().item(),
            },
            "warnings": self._warnings(samples),
            "wall_s": time.monotonic() - self._started,
        }

    def _warnings(self, samples: Measured) -> list[str]:
        """What makes these scores less than comparable."""
        reference, statistics, name = self.reference, self.statistics, self.extractor.score_name
        found = self.extractor.warnings(self.count, adm_reference=reference.kind == "npz")
        least = min(self.count, reference.count or self.count)
        for score, gaussian in ((name, samples.pool), (f"s{name}", samples.spatial)):
            if gaussian is not None and least <= (size := len(gaussian.mean)):
                found.append(f"{least} images for {size} features: the covariance is singular, {score} is biased")
        if samples.class_scores and self.count % IS_CHUNK:
            found.append(f"{self.count} images: IS is a mean over chunks of {IS_CHUNK}, the last of which is short")
        if reference.rows is not None and min(self.count, len(reference.rows)) <= NEIGHBOURS:
            found.append(f"precision and recall need more than {NEIGHBOURS} images on both sides: left out")
        if (duplicates := self.count - len(set(statistics.digests))) > 0:
            found.append(f"{duplicates} of {self.count} images are exact copies of others")
        if statistics.images_sha256 == reference.images_sha256:
            found.append("the samples are the reference images")
        return found


class Evaluation:
    """Scores the images of a folder or an .npz; all processes share the work.

    Opens the extractor and the reference when it is made, so that what is wrong with them is known before any image is.
    The first process measures the reference while the others wait. Each process then takes a contiguous share of
    the images; the features of every 16 batches are one file beside the result until that is written, so that the same
    command continues a killed one. The first process adds them up in the order of the images: the scores do not depend
    on the number of processes.

    Args:
        shape: (C, H, W) of the samples, where they are yet to be made; otherwise they are checked at once.

    Raises:
        ValueError: samples, reference and extractor do not fit together, or one of them cannot be used.
        MissingWeights: the extractor's weights are not there; `later_command` says how to score later.
    """

    def __init__(self, config: EvaluateConfig, accelerator: Accelerator, *, shape: Shape | None = None) -> None:
        self.config, self.accelerator = config, accelerator
        check_reference_path(config.reference)
        self._opened: tuple[ImageSource, Path, dict[str, Any]] | None = None
        if shape is None:
            source, out, _ = self._opened = self._open_samples()
            check_writable(out)
            shape = source.shape
        self.extractor = load_extractor(config.extractor, weights=config.inception_weights, device=accelerator.device)
        self.extractor.check_shape(shape, config.samples)
        self.reference: Reference | None = None
        if accelerator.is_main_process:
            self.reference = open_reference(
                config.reference, self.extractor, batch=config.batch, image_size=config.image_size,
                num_workers=config.num_workers, rows=config.precision_recall, shape=shape,
            )  # fmt: skip
        accelerator.wait_for_everyone()

    def _open_samples(self) -> tuple[ImageSource, Path, dict[str, Any]]:
        """The samples, the file of the result, and the manifest of sample.py; {} for others' samples."""
        config = self.config
        file = _output_folder(config.samples) / "manifest.json"
        manifest: dict[str, Any] = dict(read_json(file, Manifest)) if file.is_file() else {}
        expected = config.num_images or manifest.get("num_images")
        source = open_samples(config.samples, num_workers=config.num_workers, expected=expected)
        return source, Path(config.out or result_path(config.samples, config.extractor)), manifest

    def score(self) -> dict[str, Any] | None:
        """Score the samples; the first process writes the result, prints its metrics and warnings, and returns it."""
        source, out, manifest = self._opened or self._open_samples()
        evaluator = None
        if self.reference is not None:
            rows = self.config.precision_recall
            evaluator = Evaluator(self.extractor, self.reference, source.count, precision_recall=rows)
            evaluator.check_shape(source.shape, source.path)
        kept = out.parent / f".{out.stem}.features"
        parts = self._parts(source, kept)
        self._extract(source, parts)
        self.accelerator.wait_for_everyone()
        if evaluator is None:
            return None
        for file in tqdm(parts, desc="statistics", disable=None):
            with reading(file):
                tensors = load_file(file)
                digests = tensors.pop("digests")
                found = {name: tensor.to(self.extractor.device) for name, tensor in tensors.items()}
                features = Features(**found)
                evaluator.reference.check_features(features)
                evaluator.statistics.add(features, digests)
        facts = manifest.pop("facts", {})
        made = facts.pop("samples", {})
        result = {**evaluator.finalize(), "sampling": manifest, **facts}
        result["samples"] |= {"source": source.path, "kind": source.kind, "index_rule": "file order", **made}
        result["extractor"]["batch"] = self.config.batch
        result["warnings"] += source.warnings
        write_json(out, result)
        shutil.rmtree(kept, ignore_errors=True)
        print(json.dumps(result["metrics"], indent=2))
        for warning in result["warnings"]:
            print(f"warning: {warning}", file=sys.stderr)
        print(f"result: {out}", file=sys.stderr)
        return result

    def _parts(self, source: ImageSource, folder: Path) -> dict[Path, range]:
        """The files of the features, and whose they are; those of other images have another place."""
        files = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in source.files]
        key = f"{self.extractor.identity} {self.config.batch} {source.path} {source.count} {files}"
        folder /= hashlib.sha256(key.encode()).hexdigest()[:16]
        parts = spans(0, source.count, PART * self.config.batch)
        return {folder / f"{part.start:09d}.safetensors": part for part in parts}

    def _extract(self, source: ImageSource, parts: dict[Path, range]) -> None:
        """Write the files that are missing in this process's share."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        share = islice(parts.items(), len(parts) * rank // processes, len(parts) * (rank + 1) // processes)
        missing = {
            file: spans(part.start, part.stop, self.config.batch) for file, part in share if not file.exists()
        }  # fmt: skip
        stream = source.read([batch for batches in missing.values() for batch in batches])
        with tqdm(total=source.count, desc="features", unit="img", disable=True if rank else None) as bar:
            for file, batches in missing.items():
                tensors: dict[str, list[Tensor]] = defaultdict(list)
                for images in islice(stream, len(batches)):
                    pool, spatial = self.extractor(images)
                    tensors["pool"].append(pool.cpu())
                    tensors["digests"].append(image_digests(images))
                    if spatial is not None:
                        tensors["spatial"].append(spatial.cpu())
                    bar.update(len(images) * processes)  # the others are about as far
                with atomic_file(file) as temporary:
                    save_file({name: torch.cat(batches) for name, batches in tensors.items()}, temporary)


def fid(
    samples: str | Path,
    reference: str | Path,
    *,
    extractor: str = "inception",
    inception_weights: str | Path | None = None,
    image_size: int | None = None,
    batch: int = 64,
    num_workers: int = 4,
    device: torch.device | str | None = None,
) -> float:
    """Frechet distance of the features of two sets of images; what `vcagen evaluate` calls fid, of all samples.

    Args:
        samples: folder, .npz or built-in set of images.
        reference: as of `vcagen evaluate`: also statistics.
        extractor: name in EXTRACTORS; pixels needs no weights, but is no FID.
        image_size: crop the images of both folders to this side, as in training. Default: they have one size.
        device: of the extractor. Default: a GPU where there is one.

    Raises:
        ValueError: nothing there, images of other sizes, or no weights.
    """
    check_reference_path(str(reference))
    if image_size is None:
        source = open_samples(str(samples), num_workers=num_workers)
    else:
        source = open_images(str(samples), image_size=image_size, num_workers=num_workers)
    seen_by = load_extractor(extractor, weights=inception_weights, device=device)
    theirs = open_reference(
        str(reference), seen_by, batch=batch, image_size=image_size, num_workers=num_workers, rows=False,
        shape=source.shape,
    )  # fmt: skip
    return frechet_distance(measure(source, seen_by, batch, 0).measured().pool, theirs.pool)


def run(config: EvaluateConfig) -> None:
    """The job `evaluate`."""
    accelerator = build_accelerator(patient=True)
    Evaluation(config, accelerator).score()
    accelerator.end_training()


def later_command(config: EvaluateConfig) -> str:
    """The command line that scores the same samples once the weights of the extractor are there."""
    plain = EvaluateConfig(samples=config.samples, reference="", inception_weights=config.inception_weights)
    given = vars(config).items() - vars(plain).items()
    options = [f"--{name} {shlex.quote(str(value))}" for name, value in sorted(given)]
    return " ".join(["vcagen evaluate", shlex.quote(config.samples), *options, "--inception_weights PATH"])


def result_path(path: str, extractor: str) -> Path:
    """results.json beside the images, or beside the .npz, at `path`; above a folder called images.

    Where it holds scores of another extractor, results_EXTRACTOR.json instead.
    """
    file = _output_folder(path) / "results.json"
    if file.is_file() and read_json(file, Result)["extractor"]["name"] != extractor:
        return file.with_name(f"results_{extractor}.json")
    return file


def _output_folder(path: str) -> Path:
    """Where manifest.json and results.json of the samples at `path` lie."""
    here = Path(path)
    if (here / "manifest.json").is_file():
        return here
    file = here.suffix == ".npz" or here.is_file()
    return here.parent if file or here.name == "images" or is_dataset(path) else here
