"""Class names of ImageNet: the words of WordNet for the labels of public files."""

import pytest

from vcagen.data.imagenet import imagenet_words, public_class_names, words_of
from vcagen.sampling.noise import LabelRule, SeededNoise


def test_known_labels_of_imagenet():
    names = list(imagenet_words())
    assert len(names) == 1000
    for label, words in {0: ("tench", "Tinca tinca"), 207: ("golden retriever",), 999: ("toilet tissue",)}.items():
        assert words_of(names[label])[: len(words)] == words
    assert words_of("n00000000") == words_of("tench") == ()


def test_a_label_may_be_given_by_any_word_of_its_class():
    names = public_class_names((), 1000)
    assert names == tuple(imagenet_words())
    rule = LabelRule("golden retriever,Tinca tinca,n01443537,999", 1000, names)
    assert rule(range(4), SeededNoise(0)).tolist() == [207, 0, 1, 999]
    assert LabelRule(["golden retriever"], 1000, names).given == [207]
    with pytest.raises(ValueError, match="'crane' is a word for the classes 134, 517; give one of these"):
        LabelRule("crane", 1000, names)
    with pytest.raises(ValueError, match=r"'unicorn' is not a class; valid are labels 0\.\.999 or class names tench"):
        LabelRule("unicorn", 1000, names)


def test_names_that_came_with_the_weights():
    assert public_class_names(("a", "b"), 2) == ("a", "b")
    assert public_class_names((), 2) == ()
    described = tuple(", ".join(words) for words in imagenet_words().values())
    assert public_class_names(described, 1000) == tuple(imagenet_words())
    own = tuple(f"class {label}" for label in range(1000))
    assert public_class_names(own, 1000) == own
    rule = LabelRule("Felis catus,cat, Felis catus,dog", 2, ("cat, Felis catus", "dog"))
    assert rule.given == [0, 0, 0, 1]
    assert LabelRule("cat, Felis catus", 2, ("cat, Felis catus", "dog")).given == [0]
