"""Sampling many images exactly once each: noise by image, chunks of indices, files by index, and the loop over them.

Image i depends on (seed, i) alone. Work units are chunks of `batch` consecutive indices; the last one is padded with
the indices that would follow, computed but never kept, so that the network always sees one batch shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from vcagen.config.options import GENERAL_SAMPLING, SAMPLER_OPTIONS, SamplingConfig
from vcagen.data import vae as vae
from vcagen.processes import samplers, watch
from vcagen.sampling.image_store import SampleStore

LABEL, START, STEPS = range(3)
"""Independent streams of one image: its label, its initial noise, the noise of its steps."""


class SeededNoise:
    """Labels and noise of images, each from (seed, index) alone.

    Drawn on the CPU by numpy's Philox generator, whose 128-bit key is the pair itself: two images never share a
    stream. (torch's CPU generator keeps 32 bits of its seed, so 50,000 hashed seeds would collide now and then.)
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._pool = ThreadPoolExecutor(max_workers=1)

    def _generator(self, index: int, stream: int) -> np.random.Generator:
        key = np.array([self.seed % 2**64, index], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, stream]))

    def labels(self, indices: Iterable[int], num_classes: int) -> Tensor:
        """Uniform labels 0 .. num_classes - 1 of these images: int64 (N,)."""
        return torch.tensor([int(self._generator(i, LABEL).integers(num_classes)) for i in indices])

    def noise(self, indices: Sequence[int], shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Initial noise of these images: float32 (N, *shape)."""
        device = torch.device(device)
        drawn = _draw([self._generator(i, START) for i in indices], shape, pinned=device.type == "cuda")
        return drawn.to(device, non_blocking=True)

    def randn_like(self, indices: Sequence[int]) -> Callable[[Tensor], Tensor]:
        """The noise of one chunk's steps: a call gives each image's next float32 noise, on its argument's device."""
        generators = [self._generator(i, STEPS) for i in indices]
        ahead: Future[Tensor] | None = None

        def randn_like(x: Tensor) -> Tensor:
            nonlocal ahead
            draw = partial(_draw, generators, x.shape[1:], pinned=x.device.type == "cuda")
            noise = draw() if ahead is None else ahead.result()
            assert noise.shape == x.shape, x.shape
            if _draws_ahead(x.device):
                ahead = self._pool.submit(draw)
            return noise.to(x.device, non_blocking=True)

        return randn_like


def _draws_ahead(device: torch.device) -> bool:
    """Whether the next step's noise is drawn beside the network; on a CPU it would take the network's time."""
    return device.type == "cuda"


def _draw(generators: Sequence[np.random.Generator], shape: Sequence[int], *, pinned: bool) -> Tensor:
    # Pinned, so that the copy does not wait for the device.
    noise = torch.empty(len(generators), *shape, pin_memory=pinned)
    for generator, row in zip(generators, noise.numpy(), strict=True):
        generator.standard_normal(out=row, dtype=np.float32)
    return noise


class LabelRule:
    """Which label image i has: `random` (uniform, as DiT), `balanced` (i mod K), or given ones in turn.

    Args:
        rule: random, balanced, or labels or class names separated by commas.
        num_classes: K; labels are 0 .. K - 1.
        class_names: names that may stand for labels.

    Raises:
        ValueError: a label or name that does not exist, or a number that is a label and the name of another one.
    """

    def __init__(self, rule: str, num_classes: int, class_names: Sequence[str] | None = None) -> None:
        self.rule = rule
        self.num_classes = num_classes
        self.given: list[int] = []
        if rule not in ("random", "balanced"):
            names = {name: label for label, name in enumerate(class_names or ())}
            self.given = [self._label(part.strip(), names) for part in ([rule] if rule in names else rule.split(","))]

    def _label(self, text: str, names: dict[str, int]) -> int:
        if text.isdecimal() and int(text) < self.num_classes:
            if names.get(text, int(text)) != int(text):
                raise ValueError(
                    f"labels: {text!r} is a label and also the name of class {names[text]}; give 0{text} for label "
                    f"{int(text)}, or 0{names[text]} for the class of that name"
                )
            return int(text)
        if text in names:
            return names[text]
        valid = f"labels 0..{self.num_classes - 1}"
        if names:
            listed = list(names)
            valid += f" or class names {', '.join(listed[:5])}" + (f", ... ({len(listed)})" if len(listed) > 5 else "")
        raise ValueError(f"labels: {text!r} is not a class; valid are {valid}")

    def __call__(self, indices: Sequence[int], noise: SeededNoise) -> Tensor:
        """Labels of these images: int64 (N,)."""
        if self.given:
            return torch.tensor([self.given[i % len(self.given)] for i in indices])
        if self.rule == "balanced":
            return torch.tensor([i % self.num_classes for i in indices])
        return noise.labels(indices, self.num_classes)


RECIPE = {
    "num_steps": 250, "method": "dopri5", "atol": 1e-6, "rtol": 1e-3, "eta": 0.0, "diffusion_form": "sigma",
    "last_step": "Mean", "last_step_size": 0.04, "cfg_scale": 1.0, "num_images": 50_000, "labels": "random",
    "extractor": "inception",
}  # fmt: skip


def resolve_sampling(command: SamplingConfig, run: SamplingConfig, process: str) -> SamplingConfig:
    """Every option in use filled in: from the command line, else the run's `sampling` section, else the recipe.

    Options that the chosen sampler does not have are None.

    Raises:
        ValueError: a sampler of the other process, or an option given on the command line that would do nothing.
    """

    def pick(name: str) -> Any:
        given = getattr(command, name)
        given = getattr(run, name) if given is None else given
        return RECIPE.get(name) if given is None else given

    choices = samplers.samplers_of(process)
    sampler = pick("sampler") or choices[0]
    if sampler not in choices:
        raise ValueError(f"sampler: {sampler} is not for a {process} model; choose {' or '.join(choices)}")
    used = samplers.sampler_options(sampler)
    if sampler == "ode":
        adaptive = pick("method") in samplers.ADAPTIVE_METHODS
        used = ["method", "atol", "rtol"] if adaptive else ["method", "num_steps"]
    for name in set(SAMPLER_OPTIONS) - set(used):
        if getattr(command, name) is not None:
            which = f"{sampler} {pick('method')}" if sampler == "ode" else sampler
            raise ValueError(f"{name}: {which} does not use it; it uses {', '.join(used)}")
    values = {name: pick(name) for name in (*GENERAL_SAMPLING, *used)}
    if values["cfg_interval"] is not None:
        values["cfg_interval"] = tuple(values["cfg_interval"])
    return SamplingConfig(sampler=sampler, **values)


class Scores(Protocol):
    """What collects the images for the metrics: `vcagen.evaluation.evaluate.Evaluator` with a folder."""

    def has(self, index: Sequence[int]) -> bool: ...

    def update(self, images: Tensor, index: Sequence[int]) -> None: ...


def missing_chunks(store: SampleStore, scores: Scores | None = None) -> list[int]:
    """The chunks whose images or features are absent."""
    chunks = range(store.num_chunks)
    return [c for c in chunks if not store.holds(c) or not (scores is None or scores.has(store.indices(c)))]


def share(chunks: Sequence[int], rank: int, world_size: int) -> list[int]:
    """The chunks of one process: dealt in turn, none where there are fewer chunks than processes."""
    return list(chunks[rank::world_size])


def generate_images(
    sample: Callable[..., tuple[Tensor, int]],
    decode: Callable[[Tensor], Tensor],
    store: SampleStore,
    *,
    chunks: Sequence[int],
    noise: SeededNoise,
    labels: LabelRule,
    latent_shape: Sequence[int],
    device: torch.device | str = "cpu",
    scores: Scores | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> int:
    """Make the images of this process's share of `chunks`, write them, score them; returns the network calls made.

    A chunk that the store has in any form is read back instead, so that images which are there can be scored, or kept
    in another form.

    Args:
        decode: latents (N, C, h, w) to uint8 images (N, C, H, W).
        chunks: what is missing, the same list in all processes; nothing is communicated between them.
        scores: collects the images; those of a chunk that it has are left out.

    Raises:
        ValueError: NaN or infinity in an image, by index; nothing is written of its chunk.
        OSError: the disk.
    """
    calls = 0
    total = sum(len(store.indices(chunk)) for chunk in chunks)
    with tqdm(total=total, unit="img", desc="sampling", disable=rank != 0 or not chunks) as bar:

        def progress(step: int) -> None:
            bar.set_postfix_str(f"step {step}", refresh=step % 10 == 0)

        try:
            for chunk in share(chunks, rank, world_size):
                indices = store.indices(chunk)
                if store.readable(chunk):
                    images = store.read(indices).to(device)
                else:
                    padded = range(indices[0], indices[0] + store.batch)
                    start = noise.noise(padded, latent_shape, device)
                    y = labels(padded, noise).to(device)
                    try:
                        latents, count = sample(start, y, randn_like=noise.randn_like(padded), progress=progress)
                        images = decode(latents[: len(indices)])
                    except (watch.NonFiniteError, vae.NonFiniteError) as error:
                        row = error.batch_index if isinstance(error, watch.NonFiniteError) else error.rows[0]
                        raise ValueError(f"image {padded[row]}: {error}; nothing is written of its chunk") from error
                    calls += count
                if not store.holds(chunk):
                    store.write(indices, images)
                if scores is not None and not scores.has(indices):
                    scores.update(images, indices)
                bar.update(min(len(indices) * world_size, total - bar.n))  # the other processes are about as far
                bar.set_postfix_str(f"network calls {calls}")
        finally:
            store.flush()
    return calls
