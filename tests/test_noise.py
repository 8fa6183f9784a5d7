"""Noise and labels of an image, from (seed, index) alone."""

import pytest
import torch

from vcagen.sampling.noise import LabelRule, SeededNoise

SHAPE = (3, 8, 8)


def test_noise_depends_on_seed_and_index_alone():
    noise = SeededNoise(7)
    whole = noise.initial(range(10), SHAPE)
    assert whole.dtype == torch.float32
    for indices in [range(3, 7), [9, 2, 5]]:
        assert torch.equal(noise.initial(indices, SHAPE), whole[list(indices)])
        step, same = noise.of_steps(range(10)), noise.of_steps(indices)
        for _ in range(3):
            assert torch.equal(same(whole[list(indices)]), step(whole)[list(indices)])
    assert torch.equal(noise.labels([8, 1], 5), noise.labels(range(10), 5)[[8, 1]])


def test_noise_drawn_ahead_is_the_same(monkeypatch):
    noise, x = SeededNoise(7), torch.zeros(3, *SHAPE)
    plain = noise.of_steps([4, 1, 2])
    expected = [plain(x) for _ in range(4)]
    monkeypatch.setattr("vcagen.sampling.noise._draws_ahead", lambda device: True)
    ahead, other = noise.of_steps([4, 1, 2]), noise.of_steps([0, 1, 2])
    for value in expected:
        other(x)
        assert torch.equal(ahead(x), value)


def test_noise_never_repeats():
    """torch's generators keep 32 bits of a seed; seed + index would give image 1 of seed 0 to image 0 of seed 1."""
    pairs = [(0, 0), (0, 1), (1, 0), (2**32, 0), (0, 2**32), (2**63, 1), (12345678901, 0)]
    draws = [SeededNoise(seed).initial([index], SHAPE).flatten() for seed, index in pairs]
    draws += [SeededNoise(0).of_steps([0])(torch.zeros(1, *SHAPE)).flatten()]
    assert len({tuple(draw.tolist()) for draw in draws}) == len(draws)
    correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(len(draws))
    assert correlation.abs().max() < 0.35  # 192 values: 0.07 is one standard deviation


def test_noise_is_standard_normal_and_labels_uniform():
    noise = SeededNoise(3)
    values = noise.initial(range(1000), SHAPE).double()
    assert abs(values.mean()) < 4 / 192_000**0.5
    assert abs(values.var() - 1) < 4 * (2 / 192_000) ** 0.5
    counts = noise.labels(range(9000), 9).bincount(minlength=9)
    assert ((counts - 1000).abs() < 4 * 30).all()
    assert len(counts) == 9


def test_label_rules():
    noise, names = SeededNoise(0), ("cat", "dog", "eel, the fish")
    assert LabelRule("random", 1000)(range(20), noise).equal(noise.labels(range(20), 1000))
    balanced = torch.cat([LabelRule("balanced", 1000)(range(i, i + 64), noise) for i in range(0, 50_000, 64)])[:50_000]
    assert (balanced.bincount(minlength=1000) == 50).all()
    assert LabelRule("dog, 0", 3, names)(range(5), noise).tolist() == [1, 0, 1, 0, 1]
    assert LabelRule("eel, the fish", 3, names)(range(2), noise).tolist() == [2, 2]
    assert LabelRule("random", 1)(range(4), noise).tolist() == [0] * 4
    numbers = ("1", "10", "2")
    assert LabelRule("0,01,2, 10", 3, numbers)(range(4), noise).tolist() == [0, 1, 2, 1]
    with pytest.raises(ValueError, match=r"labels: '1' is a label and also the name of class 0; give 01 .*, or 00 for"):
        LabelRule("1", 3, numbers)
    for bad in "3", "1000", "-1", "cow", "cat,,dog", "1.5", "":
        with pytest.raises(
            ValueError, match=r"labels: .* is not a class; valid are labels 0\.\.2 or class names cat, dog"
        ):
            LabelRule(bad, 3, names)
    with pytest.raises(ValueError, match=r"valid are labels 0\.\.2$"):
        LabelRule("3", 3)


@pytest.mark.parametrize("word", ["random", "balanced"])
def test_a_rule_that_is_also_a_class_must_be_told_apart(word):
    noise, names = SeededNoise(0), ("cat", word)
    with pytest.raises(
        ValueError, match=rf"^labels: '{word}' is a rule and also .* class 1; give rule:{word} .*, or 01 "
    ):
        LabelRule(word, 2, names)
    ruled = LabelRule(word, 2)(range(20), noise)
    for rule in (LabelRule(f"rule:{word}", 2, names), LabelRule(word, 2, names, chosen=False)):
        assert rule(range(20), noise).equal(ruled)
        assert rule.rule == word
    for meant in ("01", ["cat", word]):
        assert LabelRule(meant, 2, names)(range(2), noise).tolist()[-1] == 1


@pytest.mark.parametrize(
    ("folder", "typed"),
    [("cat ", "cat"), ("cat ", "cat "), (" cat", "cat"), ("cafe\u0301", "caf\u00e9"), ("caf\u00e9", "cafe\u0301"),
     ("cat\u00a0", "cat")],
)  # fmt: skip
def test_a_class_is_found_as_its_name_is_typed(folder, typed):
    for names, typed_in in (((folder, "dog"), typed), (("dog", folder), f"{typed}, dog")):
        found = LabelRule(typed_in, 2, names)(range(1), SeededNoise(0)).tolist()
        assert found == [names.index(folder)]


def test_names_that_differ_by_a_space_stay_two():
    rule = LabelRule("cat ,cat", 2, ("cat", "cat "))
    assert rule(range(2), SeededNoise(0)).tolist() == [1, 0]
