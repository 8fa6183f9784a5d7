"""The 1,000 classes of ImageNet: their WordNet names, which are those of its folders, and the words for them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

NUM_CLASSES = 1000


@cache
def imagenet_words() -> dict[str, tuple[str, ...]]:
    """WordNet name -> words, in the order of the labels: n02099601 -> ("golden retriever",). From timm's lists."""
    from timm.data import ImageNetInfo

    info = ImageNetInfo()
    return {name: _split(info.label_name_to_description(name, detailed=False)) for name in info.label_names()}


def words_of(class_name: str) -> tuple[str, ...]:
    """The words that may stand for a class: those of a WordNet name, or the parts of `tench, Tinca tinca`."""
    if re.fullmatch(r"n\d{8}", class_name):
        return imagenet_words().get(class_name, ())
    return _split(class_name) if "," in class_name else ()


def _split(words: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in words.split(","))


def public_class_names(given: Sequence[str], num_classes: int) -> tuple[str, ...]:
    """Class names of weights of others, which came with `given` or with none.

    As many classes as ImageNet has are taken for those, unless other names came with them.
    """
    if num_classes != NUM_CLASSES:
        return tuple(given)
    words = imagenet_words()
    if all(_split(name)[0] in there for name, there in zip(given, words.values(), strict=False)):
        return tuple(words)
    return tuple(given)
