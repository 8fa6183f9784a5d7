"""Noise, labels, chunks and the store: every image once, from (seed, index) alone, whatever happens in between."""

import io
import resource
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from vcagen.config.options import SamplingConfig
from vcagen.data import vae as vae
from vcagen.data.images import to_uint8
from vcagen.processes import watch
from vcagen.sampling.image_store import SampleStore
from vcagen.sampling.noise import (
    LabelRule,
    SeededNoise,
    generate_images,
    missing_chunks,
    resolve_sampling,
    share,
)  # fmt: skip

SHAPE = (3, 8, 8)


def a_store(folder, num_images=10, batch=4, **options):
    return SampleStore(folder, num_images, batch, image_shape=SHAPE, settings={"seed": 0, "cfg_scale": 1.0}, **options)


def toy_sampler(noise, y, *, randn_like, progress=None):
    """Two noisy steps that treat images alone, and two "network calls"."""
    x = noise
    for _ in range(2):
        x = 0.5 * x + 0.3 * randn_like(x) + 0.01 * y[:, None, None, None]
    return x, 2


def generate(store, chunks=None, sample=toy_sampler, decode=to_uint8, **options):
    store.prepare()
    calls = generate_images(
        sample, decode, store, chunks=missing_chunks(store, options.get("scores")) if chunks is None else chunks,
        noise=SeededNoise(0), labels=LabelRule("random", 3), latent_shape=SHAPE, **options,
    )  # fmt: skip
    return calls


def files(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "images").iterdir())}


# --- noise and labels ---


def test_noise_depends_on_seed_and_index_alone():
    noise = SeededNoise(7)
    whole = noise.noise(range(10), SHAPE)
    assert whole.dtype == torch.float32
    for indices in [range(3, 7), [9, 2, 5]]:
        assert torch.equal(noise.noise(indices, SHAPE), whole[list(indices)])
        step, same = noise.randn_like(range(10)), noise.randn_like(indices)
        for _ in range(3):
            assert torch.equal(same(whole[list(indices)]), step(whole)[list(indices)])
    assert torch.equal(noise.labels([8, 1], 5), noise.labels(range(10), 5)[[8, 1]])


def test_noise_drawn_ahead_is_the_same(monkeypatch):
    noise, x = SeededNoise(7), torch.zeros(3, *SHAPE)
    plain = noise.randn_like([4, 1, 2])
    expected = [plain(x) for _ in range(4)]
    monkeypatch.setattr("vcagen.sampling.noise._draws_ahead", lambda device: True)
    ahead, other = noise.randn_like([4, 1, 2]), noise.randn_like([0, 1, 2])
    for value in expected:
        other(x)
        assert torch.equal(ahead(x), value)


def test_noise_never_repeats():
    """torch's generators keep 32 bits of a seed; seed + index would give image 1 of seed 0 to image 0 of seed 1."""
    pairs = [(0, 0), (0, 1), (1, 0), (2**32, 0), (0, 2**32), (2**63, 1), (12345678901, 0)]
    draws = [SeededNoise(seed).noise([index], SHAPE).flatten() for seed, index in pairs]
    draws += [SeededNoise(0).randn_like([0])(torch.zeros(1, *SHAPE)).flatten()]
    assert len({tuple(draw.tolist()) for draw in draws}) == len(draws)
    correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(len(draws))
    assert correlation.abs().max() < 0.35  # 192 values: 0.07 is one standard deviation


def test_noise_is_standard_normal_and_labels_uniform():
    noise = SeededNoise(3)
    values = noise.noise(range(1000), SHAPE).double()
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


# --- settings ---


def test_settings_come_from_the_command_then_the_run_then_the_recipe():
    nothing = SamplingConfig()
    dit = resolve_sampling(nothing, nothing, "diffusion")
    assert dit == SamplingConfig(sampler="ddpm", num_steps=250, cfg_scale=1.0, num_images=50_000, labels="random",
                                 extractor="inception")  # fmt: skip
    sit = resolve_sampling(nothing, nothing, "flow")
    assert (sit.sampler, sit.num_steps, sit.diffusion_form, sit.last_step, sit.last_step_size) == (
        "sde", 250, "sigma", "Mean", 0.04,
    )  # fmt: skip
    run = SamplingConfig(num_steps=50, cfg_scale=2.0, labels="balanced")
    both = resolve_sampling(SamplingConfig(cfg_scale=1.5, sampler="ddim"), run, "diffusion")
    assert (both.sampler, both.num_steps, both.eta, both.cfg_scale, both.labels) == ("ddim", 50, 0.0, 1.5, "balanced")
    ode = resolve_sampling(SamplingConfig(sampler="ode"), run, "flow")
    assert (ode.method, ode.num_steps, ode.atol, ode.rtol) == ("dopri5", None, 1e-6, 1e-3)
    euler = resolve_sampling(SamplingConfig(sampler="ode", method="euler"), nothing, "flow")
    assert (euler.method, euler.num_steps, euler.atol, euler.rtol) == ("euler", 250, None, None)


@pytest.mark.parametrize(
    ("options", "process", "message"),
    [
        ({"sampler": "sde"}, "diffusion", "sampler: sde is not for a diffusion model; choose ddpm or ddim"),
        ({"sampler": "ddpm"}, "flow", "sampler: ddpm is not for a flow model; choose sde or ode"),
        ({"eta": 0.5}, "diffusion", "eta: ddpm does not use it"),
        ({"sampler": "ode", "num_steps": 10}, "flow", "num_steps: ode dopri5 does not use it"),
        ({"sampler": "ode", "method": "euler", "atol": 1e-5}, "flow", "atol: ode euler does not use it"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options, process, message):
    with pytest.raises(ValueError, match=message):
        resolve_sampling(SamplingConfig(**options), SamplingConfig(), process)


# --- chunks ---


@pytest.mark.parametrize(("num_images", "batch", "processes"), [(50_000, 64, 3), (10, 4, 3), (2, 7, 3), (10, 7, 1)])
def test_every_index_once(tmp_path, num_images, batch, processes):
    store = a_store(tmp_path, num_images, batch)
    store.prepare()
    shares = [share(store.missing(), rank, processes) for rank in range(processes)]
    done = [i for chunks in shares for chunk in chunks for i in store.indices(chunk)]
    assert sorted(done) == list(range(num_images))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("batch", "processes"), [(1, 1), (4, 1), (4, 3), (7, 2), (64, 3)])
def test_images_do_not_depend_on_batch_or_processes(tmp_path, batch, processes):
    generate(a_store(tmp_path / "a", batch=10))
    store = a_store(tmp_path / "b", batch=batch)
    store.prepare()
    chunks = store.missing()
    shapes = set()

    def watching(noise, y, **options):
        shapes.add((noise.shape, y.shape))
        return toy_sampler(noise, y, **options)

    for rank in reversed(range(processes)):
        generate(store, chunks, watching, rank=rank, world_size=processes)
    assert shapes == {((batch, *SHAPE), (batch,))}
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert list(files(tmp_path / "b")) == [f"{i:06d}.png" for i in range(10)]


# --- the store ---


def test_resume_makes_only_what_is_missing(tmp_path):
    generate(a_store(tmp_path / "a"))
    store = a_store(tmp_path / "b")
    generate(store, [0, 1])
    (tmp_path / "b" / "images" / "000002.png").unlink()
    cut = tmp_path / "b" / "images" / "000005.png"
    cut.write_bytes(cut.read_bytes()[:50])
    (tmp_path / "b" / "images" / ".000009.png.123.tmp").write_bytes(b"half")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "b" / "images").iterdir() if path != cut}
    again = a_store(tmp_path / "b")
    again.prepare()
    assert again.missing() == [0, 1, 2]
    assert generate(again) == 6
    assert files(tmp_path / "a") == files(tmp_path / "b")
    changed = [path.name for path, time in kept.items() if path.exists() and path.stat().st_mtime_ns != time]
    assert changed == []
    assert a_store(tmp_path / "b").missing() == []


def test_a_run_killed_at_any_point_of_its_preparation_is_known_again(tmp_path):
    (tmp_path / ".manifest.json.7.tmp").write_text("{")
    a_store(tmp_path, npz=True).prepare()
    generate(a_store(tmp_path, npz=True), [0, 1])
    (tmp_path / ".samples.rows").unlink()
    store = a_store(tmp_path, npz=True)
    store.prepare()
    assert store.missing() == [0, 1, 2]  # marks without rows would be black images
    generate(store)
    store.finish()
    with np.load(tmp_path / "samples.npz") as archive:
        assert (torch.from_numpy(archive["arr_0"]).permute(0, 3, 1, 2) == store.read(range(10))).all()


@pytest.mark.parametrize("content", [b"", b"\x89PNG", b"garbage of some length beyond the end marker"])
def test_damaged_pngs_are_missing(tmp_path, content):
    store = a_store(tmp_path)
    generate(store)
    (tmp_path / "images" / "000006.png").write_bytes(content)
    assert store.missing() == [1]


def test_other_settings_are_refused_by_field(tmp_path):
    generate(a_store(tmp_path))
    for field, options in {
        "num_images": {"num_images": 11}, "batch": {"batch": 5},
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=rf"^{field}: .* was made with"):
            a_store(tmp_path, **options).prepare()
    other = SampleStore(tmp_path, 10, 4, image_shape=SHAPE, settings={"seed": 0, "cfg_scale": 1.5})
    with pytest.raises(ValueError, match=r"^cfg_scale: .* was made with 1\.0, now 1\.5"):
        other.prepare()
    less = SampleStore(tmp_path, 10, 4, image_shape=SHAPE, settings={"seed": 0})
    with pytest.raises(ValueError, match=r"^cfg_scale: .* was made with 1\.0, now None"):
        less.prepare()


def test_foreign_files_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"not empty and has no manifest\.json"):
        a_store(tmp_path).prepare()
    generate(a_store(tmp_path / "a"))
    for name in "000010.png", "1.png", "cat.jpg":
        (tmp_path / "a" / "images" / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=r"3 files that are not of this run: 000010\.png, 1\.png, cat\.jpg"):
        a_store(tmp_path / "a").prepare()
    for num_images, batch in (0, 4), (4, 0):
        with pytest.raises(ValueError, match="is not positive"):
            a_store(tmp_path / "b", num_images, batch)


@pytest.mark.parametrize("png", [True, False])
def test_npz_is_what_adm_reads(tmp_path, png):
    generate(a_store(tmp_path / "a"))
    store = a_store(tmp_path / "b", npz=True, png=png)
    generate(store, [0, 2])
    assert a_store(tmp_path / "b", npz=True, png=png).missing() == [1]
    generate(store)
    store.finish()
    with np.load(tmp_path / "b" / "samples.npz", allow_pickle=False) as archive:
        assert archive.files == ["arr_0"]
        rows = archive["arr_0"]
    expected = [np.asarray(Image.open(io.BytesIO(data))) for data in files(tmp_path / "a").values()]
    assert rows.dtype == np.uint8
    assert (rows == np.stack(expected)).all()
    with zipfile.ZipFile(tmp_path / "b" / "samples.npz") as archive, archive.open("arr_0.npy") as member:
        assert archive.testzip() is None
        assert np.lib.format.read_magic(member) == (1, 0)
        assert np.lib.format.read_array_header_1_0(member) == ((10, 8, 8, 3), False, np.uint8)
    done = a_store(tmp_path / "b", npz=True, png=png)
    done.prepare()
    assert done.missing() == []
    assert (done.read(range(10)).permute(0, 2, 3, 1).numpy() == rows).all()
    assert not [path for path in (tmp_path / "b").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(("first", "then"), [({}, {"npz": True}), ({}, {"png": False, "npz": True}),
                                             ({"png": False, "npz": True}, {})])  # fmt: skip
def test_another_form_is_copied(tmp_path, monkeypatch, first, then, finished):
    monkeypatch.setattr("vcagen.sampling.image_store.PREVIEW", 2)
    generate(a_store(tmp_path / "a"))
    expected = a_store(tmp_path / "a").read(range(10))
    store = a_store(tmp_path / "b", **first)
    generate(store, None if finished else [0, 2])
    if finished:
        store.finish()
    added = a_store(tmp_path / "b", **then)
    assert generate(added) == (0 if finished else 2)
    added.finish()
    assert a_store(tmp_path / "b", **then).missing() == []
    if then.get("npz"):
        with np.load(tmp_path / "b" / "samples.npz") as archive:
            assert torch.equal(torch.from_numpy(archive["arr_0"]).permute(0, 3, 1, 2), expected)
    else:
        assert files(tmp_path / "b") == files(tmp_path / "a")
    assert not [path for path in (tmp_path / "b").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("then", [{"png": False, "npz": True}, {}])
@pytest.mark.parametrize("damage", ["cut", "empty", "other", "garbage"])
def test_a_damaged_npz_is_made_again(tmp_path, monkeypatch, then, damage):
    monkeypatch.setattr("vcagen.sampling.image_store.PREVIEW", 2)
    store = a_store(tmp_path / "a", png=False, npz=True)
    generate(store)
    store.finish()
    file = tmp_path / "a" / "samples.npz"
    whole = file.read_bytes()
    if damage == "other":
        np.savez(file, np.zeros((9, 8, 8, 3), np.uint8))
    else:
        file.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "garbage": b"PK\5\6" + bytes(50)}[damage])
    again = a_store(tmp_path / "a", **then)
    generate(again)
    again.finish()
    generate(a_store(tmp_path / "b"))
    if then:
        assert file.read_bytes() == whole
    else:
        assert files(tmp_path / "a") == files(tmp_path / "b")
    assert a_store(tmp_path / "a", **then).missing() == []


def test_preview_and_grey_images(tmp_path):
    store = SampleStore(tmp_path, 10, 4, image_shape=(1, 8, 8), settings={})
    generate(store, decode=lambda x: to_uint8(x[:, :1]))
    store.finish()
    assert Image.open(tmp_path / "images" / "000000.png").mode == "L"
    preview = np.asarray(Image.open(tmp_path / "preview.png"))
    assert preview.shape == (102, 102)  # 3 x 3 images of 8 x 8, enlarged 4 times, in frames
    assert (preview[35:67:4, 69:101:4] == store.read([5])[0, 0].numpy()).all()


class Collected:
    """Scores in memory."""

    def __init__(self):
        self.images = {}

    def has(self, index):
        return all(i in self.images for i in index)

    def update(self, images, index):
        self.images.update(zip(index, images, strict=True))


@pytest.mark.parametrize("options", [{}, {"png": False, "npz": True}, {"png": False}])
def test_images_are_scored_as_they_are_made_and_afterwards(tmp_path, monkeypatch, options):
    monkeypatch.setattr("vcagen.sampling.image_store.PREVIEW", 4)
    generate(a_store(tmp_path / "a"))
    expected = a_store(tmp_path / "a").read(range(10))
    store, scores = a_store(tmp_path / "b", **options), Collected()
    assert generate(store, scores=scores) == 6
    assert torch.equal(torch.stack([scores.images[i] for i in range(10)]), expected)
    assert generate(store, scores=scores) == 0
    later = Collected()
    assert generate(store, scores=later) == (0 if store.keeps_images else 4)  # the first chunk is in the preview
    store.finish()
    assert torch.equal(torch.stack([later.images[i] for i in range(10)]), expected)
    assert (tmp_path / "b" / "preview.png").exists()


# --- failures ---


@pytest.mark.parametrize("where", ["latent", "sampler"])
def test_nan_names_the_image_and_nothing_of_its_chunk_is_written(tmp_path, where):
    def sample(noise, y, **options):
        latents, calls = toy_sampler(noise, y, **options)
        if torch.equal(noise[2], SeededNoise(0).noise([6], SHAPE)[0]):
            if where == "sampler":
                raise watch.NonFiniteError(1, 2)
            latents[2, 0, 3, 3] = float("nan")
        return latents, calls

    store = a_store(tmp_path)
    with pytest.raises(ValueError, match=r"^image 6: .*not finite"):
        generate(store, sample=sample, decode=vae.LatentVAE("identity").decode)
    assert list(files(tmp_path)) == ["000000.png", "000001.png", "000002.png", "000003.png"]


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path):
    store = a_store(tmp_path, npz=True)
    generate(store, [0])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            generate(store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(files(tmp_path)) == ["000000.png", "000001.png", "000002.png", "000003.png"]
    generate(a_store(tmp_path, npz=True))
    generate(a_store(tmp_path / "b"))
    assert files(tmp_path) == files(tmp_path / "b")
