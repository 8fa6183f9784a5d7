"""What image i draws: its label, its initial noise, the noise of its steps, all from (seed, i) alone."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vcagen.data.imagenet import words_of
from vcagen.system.files import few

LABEL, START, STEPS = range(3)
"""Independent streams of one image."""


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

    def initial(self, indices: Iterable[int], shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Initial noise of these images: float32 (N, *shape)."""
        device = torch.device(device)
        drawn = _draw([self._generator(i, START) for i in indices], shape, pinned=device.type == "cuda")
        return drawn.to(device, non_blocking=True)

    def of_steps(self, indices: Iterable[int]) -> Callable[[Tensor], Tensor]:
        """A randn_like for these images: each call gives their next float32 noise, on its argument's device."""
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


RULES = ("random", "balanced")


class LabelRule:
    """Which label image i has: `random` (uniform, as DiT), `balanced` (i mod K), or given ones in turn.

    Args:
        rule: random, balanced (or rule:random, rule:balanced), labels or class names separated by commas, or a list of
            them. Spaces around a name and the Unicode form of its letters do not count.
        num_classes: K; labels are 0 .. K - 1.
        class_names: names that may stand for labels; of ImageNet's WordNet names and of lists such as
            `tench, Tinca tinca` also each word that only one class has.
        chosen: whether somebody gave the rule, so that a class of its name may be meant.

    Raises:
        ValueError: a label or name that does not exist, or a word that is a rule or label and the name of another one.
    """

    def __init__(
        self,
        rule: str | Sequence[int | str],
        num_classes: int,
        class_names: Sequence[str] | None = None,
        *,
        chosen: bool = True,
    ) -> None:
        self.rule = rule
        self.num_classes = num_classes
        self.given: list[int] = []
        self._labels_of_words: dict[str, list[int]] = {}
        for label, name in enumerate(class_names or ()):
            for word in words_of(name):
                self._labels_of_words.setdefault(word, []).append(label)
        names = {_normal(name): label for label, name in enumerate(class_names or ())}
        names |= {name: label for label, name in enumerate(class_names or ())}
        if isinstance(rule, str):
            self.rule = rule.removeprefix("rule:")
            if self.rule in RULES:
                if chosen and rule in names:
                    ways = f"give rule:{rule} for that rule, or 0{names[rule]} for that class"
                    raise ValueError(f"labels: {rule!r} is a rule and also the name of class {names[rule]}; {ways}")
                return
            whole = _normal(rule) in names or _normal(rule) in self._labels_of_words
            rule = [rule] if whole else rule.split(",")
        self.given = [self._label(str(part), names) for part in rule]

    def _label(self, text: str, names: dict[str, int]) -> int:
        text = text if text in names else _normal(text)
        if text.isdecimal() and int(text) < self.num_classes:
            if names.get(text, int(text)) != int(text):
                ways = f"give 0{text} for that label, or 0{names[text]} for that class"
                raise ValueError(f"labels: {text!r} is a label and also the name of class {names[text]}; {ways}")
            return int(text)
        if text in names:
            return names[text]
        labels = self._labels_of_words.get(text, [])
        if len(labels) == 1:
            return labels[0]
        if labels:
            raise ValueError(f"labels: {text!r} is a word for the classes {few(labels)}; give one of these")
        valid = f"labels 0..{self.num_classes - 1}"
        if names:
            valid += f" or class names {few([(words_of(name) or (name,))[0] for name in names], 5)}"
        raise ValueError(f"labels: {text!r} is not a class; valid are {valid}")

    def __call__(self, indices: Iterable[int], noise: SeededNoise) -> Tensor:
        """Labels of these images: int64 (N,)."""
        if self.given:
            return torch.tensor([self.given[i % len(self.given)] for i in indices])
        if self.rule == "balanced":
            return torch.tensor([i % self.num_classes for i in indices])
        return noise.labels(indices, self.num_classes)


def _normal(name: str) -> str:
    """A name as it is typed: folders may have spaces at their ends, and the letters of macOS their accents apart."""
    return unicodedata.normalize("NFC", name).strip()
