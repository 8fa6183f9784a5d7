"""What a step uses is a function of (seed, step) and the position in the global batch."""

import torch

from vcagen.processes.diffusion import GaussianDiffusion
from vcagen.processes.flow import LinearInterpolant
from vcagen.training.randomness import DrawsAhead, StepDraws, StepSampler, draw, hashed_seed


def test_epochs_are_permutations():
    sampler = StepSampler(12, 4, seed=3)
    epochs = [[i for step in range(3 * e, 3 * e + 3) for i, _ in sampler(step)] for e in range(4)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_batches_reach_over_epochs_and_sets_may_be_smaller_than_a_batch():
    sampler = StepSampler(13, 32, seed=0)
    row = [i for step in range(13) for i, _ in sampler(step)]
    for epoch in range(32):
        assert sorted(row[13 * epoch : 13 * epoch + 13]) == list(range(13))


def test_steps_in_any_order_and_parts_in_any_number_are_the_same():
    whole = [StepSampler(12, 8, seed=1)(step) for step in range(20)]
    sampler = StepSampler(12, 8, seed=1)
    assert [sampler(step) for step in reversed(range(20))] == whole[::-1]
    for count in (1, 2, 4, 8):
        size = 8 // count
        parts = [list(StepSampler(12, 8, seed=1).batches(5, 20, slice(r * size, r * size + size)))
                 for r in range(count)]  # fmt: skip
        assert [[item for part in parts for item in part[k]] for k in range(15)] == whole[5:]
    assert StepSampler(12, 8, seed=2)(0) != whole[0]


def test_mirror_coins_are_fair_or_off():
    sampler = StepSampler(1000, 1000, seed=0)
    coins = [mirror for step in range(20) for _, mirror in sampler(step)]
    assert 0.48 < sum(coins) / len(coins) < 0.52
    assert sampler(0)[:20] != sampler(1)[:20]
    plain = StepSampler(1000, 1000, seed=0, horizontal_flip=False)
    assert [i for i, _ in plain(3)] == [i for i, _ in sampler(3)]
    assert not any(mirror for _, mirror in plain(3))


def test_draws_repeat_and_change_with_step_and_seed():
    def draws(seed, step):
        return draw(seed, step, 64, (2, 4, 4), LinearInterpolant(), 0.1)

    first = draws(0, 5)
    for name in ("dropped", "t", "noise", "posterior"):
        assert getattr(first, name).equal(getattr(draws(0, 5), name))
        if name != "dropped":
            assert not getattr(first, name).equal(getattr(draws(0, 6), name))
            assert not getattr(first, name).equal(getattr(draws(1, 5), name))
    assert not first.noise.equal(first.posterior)
    part = first.part(slice(16, 32))
    assert part.noise.equal(first.noise[16:32])
    assert part.t.equal(first.t[16:32])


def test_draws_made_ahead_are_the_same_in_any_order_of_steps(monkeypatch):
    """As on a GPU, but for the memory."""
    monkeypatch.setattr(StepDraws, "pinned", lambda draws: draws)
    monkeypatch.setattr(StepDraws, "to", lambda draws, device: draws)
    made = []

    def of_step(step):
        made.append(step)
        return draw(0, step, 8, (1, 2, 2), LinearInterpolant(), 0.1)

    ahead = DrawsAhead(of_step, torch.device("cuda"))
    for step in (3, 4, 5, 9, 10):
        assert ahead(step).noise.equal(draw(0, step, 8, (1, 2, 2), LinearInterpolant(), 0.1).noise)
    ahead._pool.shutdown()
    assert sorted(made) == [3, 4, 5, 6, 9, 10, 11]
    alone = DrawsAhead(of_step, torch.device("cpu"))
    assert alone(3).noise.equal(ahead._draw(3).noise)
    assert made[-2:] == [3, 3]


def test_distributions():
    flow = draw(0, 0, 20_000, (1, 1, 1), LinearInterpolant(), 0.1)
    assert abs(flow.dropped.float().mean() - 0.1) < 0.01
    assert flow.t.min() >= 0
    assert flow.t.max() < 1
    assert abs(flow.t.mean() - 0.5) < 0.01
    assert abs(flow.noise.std() - 1) < 0.02
    times = draw(0, 0, 20_000, (1, 1, 1), GaussianDiffusion(), 0.0).t
    assert times.dtype == torch.int64
    assert (times.min(), times.max()) == (0, 999)
    assert not draw(0, 0, 1000, (1, 1, 1), GaussianDiffusion(), 0.0).dropped.any()


def test_seeds_depend_on_every_part():
    seeds = {hashed_seed(a, b, c) for a in range(3) for b in ("x", "y") for c in range(50)}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**63 for seed in seeds)
