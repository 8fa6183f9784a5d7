"""Streaming moments, and references of every kind: what is used, and what is refused."""

import json
import zipfile

import numpy as np
import pytest
import torch
from helpers import damaged_npz, image_folder, random_pictures
from PIL import Image

from vcagen.data.images import open_dataset_images, read_image
from vcagen.evaluation.extractor import Features
from vcagen.evaluation.features import InceptionFeatures, PixelFeatures, load_extractor
from vcagen.evaluation.image_source import open_npz, spans
from vcagen.evaluation.reference import (
    FeatureStatistics,
    Moments,
    image_digests,
    measure,
    open_reference,
    save_statistics,
)
from vcagen.evaluation.scores import frechet_distance


def digits():
    """uint8 (1797, 1, 8, 8)."""
    images = open_dataset_images("digits")
    return torch.stack([images[i] for i in range(len(images))])


def close(a, b, rel=1e-10):
    return (a - b).abs().max() <= rel * b.abs().max()


def parts(x, seed):
    """x in pieces of random sizes."""
    cuts = np.sort(np.random.default_rng(seed).integers(0, len(x), 9))
    return torch.tensor_split(x, torch.from_numpy(cuts))


@pytest.mark.parametrize("offset", [0, 1e4])
def test_streamed_moments_equal_numpy(offset):
    x = torch.randn(1000, 40, generator=torch.Generator().manual_seed(0)) * 3 + offset
    for seed in (1, 2):
        moments = Moments()
        for part in [x[:0], *parts(x, seed), x[:0]]:
            moments.update(part)
        assert moments.count == 1000
        mean, cov = moments.gaussian()
        assert mean.dtype == cov.dtype == torch.float64
        assert close(mean, torch.from_numpy(x.double().numpy().mean(0)))
        assert close(cov, torch.from_numpy(np.cov(x.double().numpy(), rowvar=False)))


def test_moments_of_one_image():
    moments = Moments()
    moments.update(torch.ones(1, 3))
    with pytest.raises(ValueError, match="at least 2"):
        moments.gaussian()


def test_kept_rows_are_spread_evenly_whatever_the_batches():
    features = torch.arange(100.0)[:, None].repeat(1, 2)
    for batch in (7, 100):
        statistics = FeatureStatistics(PixelFeatures(), 100, 25)
        for rows in features.split(batch):
            statistics.add(Features(rows, None), torch.zeros(len(rows), 32, dtype=torch.uint8))
        assert statistics.measured().rows[:, 0].tolist() == list(range(0, 100, 4))


def test_features_that_are_not_finite_name_the_image():
    statistics = FeatureStatistics(PixelFeatures(), 10, 0)
    statistics.add(Features(torch.zeros(4, 2), None), torch.zeros(4, 32, dtype=torch.uint8))
    bad = torch.zeros(4, 2)
    bad[2, 1] = torch.nan
    with pytest.raises(ValueError, match="image 6: its features are not finite"):
        statistics.add(Features(bad, None), torch.zeros(4, 32, dtype=torch.uint8))


# --- images in .npz files


def test_streamed_npz_is_read_as_numpy_reads_it(tmp_path):
    rows = np.random.default_rng(0).integers(0, 256, (23, 6, 5, 3), dtype=np.uint8)
    np.savez(tmp_path / "numpy.npz", arr_0=rows)
    np.savez_compressed(tmp_path / "packed.npz", arr_0=rows)
    for name in ("numpy", "packed"):
        source = open_npz(str(tmp_path / f"{name}.npz"))
        assert (source.count, source.shape) == (23, (3, 6, 5))
        images = torch.cat(list(source.read(spans(0, 23, 4))))
        assert np.array_equal(images.permute(0, 2, 3, 1), rows)
        (last,), (first,) = (list(source.read([[i]])) for i in (22, 0))  # in any order
        assert np.array_equal(last[0].permute(1, 2, 0), rows[22])
        assert np.array_equal(first[0].permute(1, 2, 0), rows[0])


def bad_npz(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


def test_npz_that_holds_no_images(tmp_path):
    images = np.zeros((4, 8, 8, 3), np.uint8)
    path = tmp_path / "x.npz"
    for arrays, found in (
        ({"images": images}, r"holds images\.npy; images must be in arr_0"),
        ({"arr_0": images.astype(np.float32)}, r"arr_0 is float32 \(4, 8, 8, 3\)"),
        ({"arr_0": images.transpose(0, 3, 1, 2)}, r"arr_0 is uint8 \(4, 3, 8, 8\)"),
        ({"arr_0": images[:0]}, r"arr_0 is uint8 \(0, 8, 8, 3\)"),
        ({"arr_0": np.array([{}, {}], dtype=object)}, "arr_0 is object"),
    ):
        with pytest.raises(ValueError, match=rf"x\.npz: .*{found}"):
            open_npz(bad_npz(path, **arrays))
    for shape in ((10**12, 8, 8, 3), (3, 8, 8, 3), (-4, -8, 8, 3)):
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        with zipfile.ZipFile(path, "w") as archive, archive.open("arr_0.npy", "w") as member:
            np.lib.format.write_array_header_1_0(member, header)
            member.write(images)
        with pytest.raises(ValueError, match=r"x\.npz: (arr_0 holds 768 bytes, its header says|arr_0 is uint8 \(-4)"):
            open_npz(str(path))
    path.write_bytes(b"PK nothing")
    with pytest.raises(ValueError, match=r"x\.npz: damaged \(BadZipFile"):
        open_npz(str(path))
    with pytest.raises(ValueError, match=r"absent\.npz: No such file"):
        open_npz(str(tmp_path / "absent.npz"))


# --- references


def test_digits_reference_is_the_moments_of_the_pixels():
    reference = open_reference("digits", PixelFeatures(), batch=100)
    x = digits().flatten(1).double() / 127.5 - 1
    assert close(reference.pool.mean, x.mean(0), 1e-6)
    assert close(reference.pool.cov, torch.cov(x.T), 1e-6)
    assert (reference.kind, reference.count, reference.shape) == ("digits", 1797, (1, 8, 8))
    assert reference.rows.shape == (1797, 64)


def test_folder_reference_is_cropped_as_training_images(tmp_path):
    image_folder(tmp_path / "data", {"a": 3, "b": 2}, size=20)  # 20 x 24 pixels
    reference = open_reference(str(tmp_path / "data"), PixelFeatures(), image_size=16)
    assert (reference.kind, reference.count, reference.shape) == ("folder", 5, (3, 16, 16))
    whole = open_reference(str(tmp_path / "data"), PixelFeatures())
    assert whole.shape == (3, 24, 20)
    assert not close(whole.pool.mean, reference.pool.mean, 1e-3)

    Image.new("I;16", (20, 24), 257 * 100).save(tmp_path / "data" / "a" / "deep.png")
    assert np.asarray(read_image(tmp_path / "data" / "a" / "deep.png")).max() == 100
    assert open_reference(str(tmp_path / "data"), PixelFeatures()).count == 6
    Image.new("RGB", (30, 24)).save(tmp_path / "data" / "b" / "wide.png")
    with pytest.raises(ValueError, match=r"wide\.png: 30 x 24 pixels, the first image has 20 x 24"):
        open_reference(str(tmp_path / "data"), PixelFeatures())


def test_so_many_rows_of_a_folder_are_kept(tmp_path, monkeypatch):
    image_folder(tmp_path / "data", {"a": 6})
    every = open_reference(str(tmp_path / "data"), PixelFeatures()).rows
    monkeypatch.setattr("vcagen.evaluation.reference.REFERENCE_ROWS", 3)
    assert torch.equal(open_reference(str(tmp_path / "data"), PixelFeatures()).rows, every[::2])


def test_our_statistics_come_back_equal(tmp_path):
    extractor = PixelFeatures()
    reference = open_reference("digits", extractor)
    save_statistics(tmp_path / "ref.npz", reference)
    again = open_reference(str(tmp_path / "ref.npz"), extractor)
    assert (reference.kind, again.kind) == ("digits", "statistics")
    for name in ("mean", "cov"):
        assert torch.equal(getattr(again.pool, name), getattr(reference.pool, name))
    assert torch.equal(again.rows, reference.rows)
    assert again.record()["stats_sha256"] == reference.record()["stats_sha256"]
    assert (again.count, again.shape, again.images_sha256) == (1797, (1, 8, 8), reference.images_sha256)
    assert open_reference(str(tmp_path / "ref.npz"), extractor, rows=False).rows is None
    with pytest.raises(ValueError, match=r"ref\.npz: its images have 1 channel\(s\) of 8 x 8 pixels, the samples 3"):
        open_reference(str(tmp_path / "ref.npz"), extractor, shape=(3, 8, 8))


def test_statistics_of_other_weights_are_refused(tmp_path, inception_weights):
    pictures = random_pictures(3, 32).permute(0, 2, 3, 1).numpy()
    np.savez(tmp_path / "images.npz", pictures)
    extractor = InceptionFeatures(inception_weights)
    reference = open_reference(str(tmp_path / "images.npz"), extractor)
    assert reference.spatial.mean.shape == (2023,)
    save_statistics(tmp_path / "ref.npz", reference)
    assert open_reference(str(tmp_path / "ref.npz"), extractor).count == 3

    weights = torch.load(inception_weights, weights_only=True)
    weights["fc.bias"] += 1
    torch.save(weights, tmp_path / "other.pth")
    for other in (InceptionFeatures(tmp_path / "other.pth"), PixelFeatures()):
        with pytest.raises(ValueError, match=r"ref\.npz: made by .*inception-v3-compat"):
            open_reference(str(tmp_path / "ref.npz"), other)


# --- the ADM reference batch: stored statistics


def adm_statistics(path, dtype=np.float64, **changes):
    """An .npz as ADM's, of the digits' pixels, with these arrays changed (None: left out)."""
    mean, cov = open_reference("digits", PixelFeatures(), rows=False).pool
    arrays = {"mu": mean.numpy().astype(dtype), "sigma": cov.numpy().astype(dtype)} | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return str(path)


def test_stored_statistics_are_used_as_they_are(tmp_path):
    extractor = PixelFeatures()
    samples = open_reference("digits", extractor, rows=False).pool
    path = adm_statistics(tmp_path / "adm.npz")
    stored = open_reference(path, extractor)
    assert (stored.kind, stored.rows, stored.shape) == ("npz", None, None)
    assert abs(frechet_distance(samples, stored.pool)) < 0.01

    mu = samples.mean.numpy().copy()
    mu[0] += 3
    shifted = open_reference(adm_statistics(path, mu=mu), extractor)
    assert frechet_distance(samples, shifted.pool) == pytest.approx(9, abs=0.001)

    single = open_reference(adm_statistics(path, np.float32), extractor)
    assert abs(frechet_distance(samples, single.pool)) < 0.01


def test_our_statistics_of_a_stored_reference_are_still_that_reference(tmp_path):
    extractor = PixelFeatures()
    stored = open_reference(adm_statistics(tmp_path / "adm.npz"), extractor)
    save_statistics(tmp_path / "ours.npz", stored)
    again = open_reference(str(tmp_path / "ours.npz"), extractor)
    assert (again.kind, again.count) == ("npz", 0)
    assert torch.equal(again.pool.cov, stored.pool.cov)


def test_images_beside_stored_statistics_serve_precision_and_recall_only(tmp_path):
    images = random_pictures(9, 8, channels=1).permute(0, 2, 3, 1).numpy()
    path = adm_statistics(tmp_path / "adm.npz", arr_0=images)
    reference = open_reference(path, PixelFeatures())
    assert torch.equal(reference.pool.mean, open_reference("digits", PixelFeatures()).pool.mean)
    assert reference.rows.shape == (9, 64)
    assert (reference.shape, reference.count) == ((1, 8, 8), 0)
    assert open_reference(path, PixelFeatures(), rows=False).rows is None


@pytest.mark.parametrize("extractor", ["pixels", "inception"])
def test_features_beside_stored_statistics_are_measured_once(tmp_path, monkeypatch, extractor, inception_weights):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    extractor = load_extractor(extractor, weights=inception_weights)
    channels, size = (1, 64) if extractor.name == "pixels" else (3, 2048)
    images = random_pictures(4, 8, channels=channels).permute(0, 2, 3, 1).numpy()
    statistics = {"mu": np.zeros(size), "sigma": np.eye(size)}
    path = str(tmp_path / "adm.npz")
    np.savez(path, arr_0=images, **statistics)
    measured = []

    def counted(*args):
        measured.append(1)
        return measure(*args)

    monkeypatch.setattr("vcagen.evaluation.reference.measure", counted)
    first, second = (open_reference(path, extractor).rows for _ in range(2))
    assert torch.equal(first, second)
    assert len(measured) == 1
    np.savez(path, arr_0=255 - images, **statistics)
    open_reference(path, extractor)
    assert len(measured) == 2
    (cut, _) = sorted((tmp_path / "torch").rglob("rows_*"))
    for file in (tmp_path / "torch").rglob("rows_*"):
        file.write_bytes(cut.read_bytes()[:50])
    open_reference(path, extractor)
    assert len(measured) == 3

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "file"))  # a cache that cannot be written
    assert len(open_reference(path, extractor).rows) == 4


def test_damaged_and_older_meta_records_are_told(tmp_path):
    extractor, path = PixelFeatures(), tmp_path / "ref.npz"
    save_statistics(path, open_reference("digits", extractor))
    with np.load(path) as file:
        arrays = dict(file)
    good = json.loads(str(arrays["meta"]))
    for meta, found in (("{", "damaged"), ("[]", "damaged"), (json.dumps({**good, "format": 1}), "commit a5c3076")):
        np.savez(path, **{**arrays, "meta": np.array(meta)})
        with pytest.raises(ValueError, match=rf"ref\.npz: .*{found}"):
            open_reference(str(path), extractor)


def test_a_damaged_compressed_file(tmp_path):
    arrays = {"sigma": np.random.default_rng(0).random((64, 64)), "mu": np.zeros(64)}
    path = damaged_npz(tmp_path / "x.npz", **arrays)
    with pytest.raises(ValueError, match=r"x\.npz: damaged"):
        open_reference(path, PixelFeatures())


def test_bad_stored_statistics(tmp_path):
    path = tmp_path / "adm.npz"
    nan = np.full(64, np.nan)
    for changes, found in (
        ({"sigma": None}, "sigma is missing, found mu"),
        ({"mu": None}, "mu is missing, found sigma"),
        ({"mu": np.zeros(63)}, r"mu and sigma have shapes \(63,\) and \(64, 64\)"),
        ({"mu": np.zeros(0), "sigma": np.zeros((0, 0))}, r"mu and sigma have shapes \(0,\) and \(0, 0\)"),
        ({"mu": nan}, "mu and sigma hold .*NaN or infinity"),
        ({"mu": np.zeros(64, np.int64)}, "mu and sigma hold int64"),
        ({"mu": np.array([{}] * 64, dtype=object)}, "Object arrays cannot be loaded"),
        ({"mu_s": np.zeros(3)}, "sigma_s is missing"),
        ({"sigma": np.diag([1.0] * 63 + [-0.01])}, "mu and sigma: no covariance, with the eigenvalue -0.01 below 0"),
    ):
        with pytest.raises(ValueError, match=rf"adm\.npz: {found}"):
            open_reference(adm_statistics(path, **changes), PixelFeatures())


@pytest.mark.parametrize("arrays", [["arr_0"], ["mu", "sigma"]])
@pytest.mark.parametrize(("field", "value"), [("flag_bits", 1), ("compress_type", 97)])
def test_encrypted_and_unknown_zip_members(tmp_path, arrays, field, value):
    path = tmp_path / "x.npz"
    np.savez(path, **{name: np.zeros((2, 8, 8, 3), np.uint8) for name in arrays})
    with zipfile.ZipFile(path) as archive:
        directory = archive.start_dir
    data = bytearray(path.read_bytes())
    offsets = {"flag_bits": (6, directory + 8), "compress_type": (8, directory + 10)}[field]
    for offset in offsets:
        data[offset] = value
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"x\.npz: "):
        open_reference(str(path), PixelFeatures())


def test_an_entry_that_is_no_array(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("mu.npy", "text")
        archive.writestr("sigma.npy", "text")
    with pytest.raises(ValueError, match=r"x\.npz: mu and sigma hold "):
        open_reference(str(tmp_path / "x.npz"), PixelFeatures())


def test_statistics_of_another_size_are_not_inceptions(tmp_path, inception_weights):
    with pytest.raises(ValueError, match=r"adm\.npz: 64 features; samples have 2048 by the extractor inception"):
        open_reference(adm_statistics(tmp_path / "adm.npz"), InceptionFeatures(inception_weights))


def test_no_reference(tmp_path):
    image_folder(tmp_path / "one", {"a": 1})
    with pytest.raises(ValueError, match=r"one: 1 image; scores need at least 2"):
        open_reference(str(tmp_path / "one"), PixelFeatures())
    with pytest.raises(ValueError, match=r"reference: .*absent: no \.npz file, no folder"):
        open_reference(str(tmp_path / "absent"), PixelFeatures())
    (tmp_path / "text.txt").write_text("x")
    with pytest.raises(ValueError, match=r"text\.txt: no \.npz file, no folder"):
        open_reference(str(tmp_path / "text.txt"), PixelFeatures())
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match=r"cut\.npz"):
        open_reference(str(tmp_path / "cut.npz"), PixelFeatures())


def test_digests_depend_on_every_pixel_and_the_order():
    images = random_pictures(4, 8)
    digests = image_digests(images)
    assert digests.shape == (4, 32)
    assert torch.equal(image_digests(images[2:]), digests[2:])
    images[0, 1, 2, 3] += 1
    assert image_digests(images).ne(digests).any(1).tolist() == [True, False, False, False]
