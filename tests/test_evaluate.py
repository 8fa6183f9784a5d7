"""From images to results: names, records, refusals, streams, interruptions, processes, memory."""

import hashlib
import json
import re
import sys
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers import damaged_npz, frechet_of_few, python, random_pictures, torchrun, user_error
from PIL import Image

from vcagen.__main__ import main
from vcagen.config.job_options import EvaluateConfig
from vcagen.data.images import open_dataset_images, to_uint8
from vcagen.evaluation import evaluate
from vcagen.evaluation.evaluate import Evaluation, Evaluator, later_command, result_path
from vcagen.evaluation.extractor import MissingWeights
from vcagen.evaluation.features import EXTRACTORS, InceptionFeatures, PixelFeatures
from vcagen.evaluation.image_source import open_samples, spans
from vcagen.evaluation.reference import check_reference_path, open_reference
from vcagen.evaluation.scores import (
    METRICS,
    Gaussian,
    InceptionScore,
    count_name,
    frechet_distance,
    precision_recall,
)
from vcagen.system.files import FORMAT
from vcagen.system.processes import build_accelerator


def score(images, extractor, reference, batch=64, **options):
    """The result of a stream of images."""
    evaluator = Evaluator(extractor, reference, len(images), **options)
    for index in spans(0, len(images), batch):
        evaluator.update(images[index.start : index.stop], index)
    return evaluator.finalize()


def score_files(samples, reference="digits", **options):
    """The result of files, by the pixels unless another extractor is given."""
    config = EvaluateConfig(samples=str(samples), reference=str(reference), **{"extractor": "pixels", **options})
    return Evaluation(config, build_accelerator()).score()


def save_npz(path, images):
    np.savez(path, images.permute(0, 2, 3, 1).numpy())
    return str(path)


def every(path):
    """All images of a set of samples."""
    source = open_samples(str(path))
    return torch.cat(list(source.read(spans(0, source.count, 2))))


def write_pngs(folder, images):
    """uint8 (N, C, H, W) to folder/000000.png, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(images.permute(0, 2, 3, 1).numpy()):
        Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image).save(folder / f"{i:06d}.png")
    return str(folder)


@pytest.fixture(scope="module")
def digits():
    return open_reference("digits", PixelFeatures())


def all_digits():
    images = open_dataset_images("digits")
    return torch.stack([images[i] for i in range(len(images))])


def noisy_digits(n):
    """The first digits, each a little changed."""
    images = all_digits()
    noise = torch.randint(0, 40, images.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return (images[:n] // 2 + noise[:n]).contiguous()


def test_scores_are_named_by_the_count(digits):
    assert [count_name(n) for n in (50_000, 10_000, 1000, 1797, 49_984, 2)] == [
        "50k",
        "10k",
        "1k",
        "1797",
        "49984",
        "2",
    ]
    result = score(noisy_digits(1000), PixelFeatures(), digits)
    assert set(result["metrics"]) == {"fd_pixels_1k", "precision_pixels", "recall_pixels"}
    assert not any("fid" in key for key in result["metrics"])


def test_uint8_rule():
    assert to_uint8(torch.tensor([-1.0, 0, 1, -3, 3])).tolist() == [0, 128, 255, 0, 255]
    grid = torch.linspace(-1, 1, 100_001)
    half_up = torch.floor((grid.double() + 1) * 127.5 + 0.5).to(torch.uint8)
    ties = ((grid.double() + 1) * 127.5 % 1 - 0.5).abs() < 1e-4  # float32 arithmetic decides these
    assert torch.equal(to_uint8(grid)[~ties], half_up[~ties])


def test_digits_against_themselves(digits):
    images = all_digits()
    result = score(images, PixelFeatures(), digits, batch=100)
    assert 0 <= result["metrics"]["fd_pixels_1797"] < 1e-9
    assert (result["metrics"]["precision_pixels"], result["metrics"]["recall_pixels"]) == (1, 1)
    assert "the samples are the reference images" in result["warnings"]


def test_fd_pixels_is_the_frechet_distance_of_pixels(digits):
    images = noisy_digits(300)
    x = images.flatten(1).double() / 127.5 - 1
    exact = frechet_distance(Gaussian(x.mean(0), torch.cov(x.T)), digits.pool)
    for batch in (1, 7, 300):
        result = score(images, PixelFeatures(), digits, batch=batch)
        assert result["metrics"]["fd_pixels_300"] == pytest.approx(exact, rel=1e-5)
    assert exact > 1


@pytest.mark.slow
def test_result_of_inception(inception_weights, tmp_path):
    """Every score against the same from the features at hand; the layout of sFID matters; everything is recorded."""
    extractor = InceptionFeatures(inception_weights)
    samples = random_pictures(10, 32)
    real = (samples.float() * 0.9 + random_pictures(10, 32, seed=1) * 0.1).to(torch.uint8)
    reference = open_reference(save_npz(tmp_path / "real.npz", real), extractor, batch=10)
    result = score_files(
        save_npz(tmp_path / "samples.npz", samples), tmp_path / "real.npz", extractor="inception",
        inception_weights=inception_weights, batch=10,
    )  # fmt: skip
    assert score(samples, extractor, reference, batch=10)["metrics"] == pytest.approx(result["metrics"], rel=1e-9)
    metrics = result["metrics"]
    assert list(metrics) == ["fid_10", "sfid_10", "is_mean", "is_std", "precision_fp32", "recall_fp32",
                             "precision_adm_fp16", "recall_adm_fp16"]  # fmt: skip
    features, real_features = extractor(samples), extractor(real)
    assert metrics["fid_10"] == pytest.approx(frechet_of_few(features.pool, real_features.pool), rel=1e-6)
    assert metrics["sfid_10"] == pytest.approx(frechet_of_few(features.spatial, real_features.spatial), rel=1e-6)
    channels_first = features.spatial.view(-1, 17 * 17, 7).transpose(1, 2).flatten(1)
    assert frechet_of_few(channels_first, real_features.spatial) > 1.2 * metrics["sfid_10"]
    inception_score = InceptionScore()
    inception_score.add(extractor.logits(features.pool))
    assert metrics["is_mean"] == pytest.approx(inception_score.result()[0], rel=1e-9)
    assert (metrics["precision_fp32"], metrics["recall_fp32"]) == precision_recall(real_features.pool, features.pool)

    assert result["protocol"] == "adm-2021/UNKNOWN"
    assert result["weights"]["sha256"] == extractor.sha256
    assert (result["n_samples"], result["n_ref_pr"], result["resolution"]) == (10, 10, 32)
    assert (result["extractor"]["tf32"], result["extractor"]["batch"]) == (False, 10)
    assert result["frechet"].keys() == {"mean_term", "trace_sample", "trace_ref"}
    assert result["samples"]["source"] == str(tmp_path / "samples.npz")
    assert "non-ADM-reference" in " ".join(result["warnings"])
    warnings = " ".join(result["warnings"])
    for warning in (
        "weights are UNKNOWN",
        "10 images for 2048 features",
        "10 images for 2023 features",
        "chunks of 5000",
    ):
        assert warning in warnings
    json.dumps(result, allow_nan=False)


def test_few_and_identical_images(digits):
    two = score(noisy_digits(2), PixelFeatures(), digits)
    assert np.isfinite(two["metrics"]["fd_pixels_2"])
    assert list(two["metrics"]) == ["fd_pixels_2"]
    assert any("singular" in warning for warning in two["warnings"])
    assert any("more than 3 images" in warning for warning in two["warnings"])

    same = score(noisy_digits(1).repeat(6, 1, 1, 1), PixelFeatures(), digits)
    assert np.isfinite(list(same["metrics"].values())).all()
    assert "5 of 6 images are exact copies of others" in same["warnings"]
    for count in (0, 1):
        with pytest.raises(ValueError, match=f"num_images: {count}; scores need at least 2"):
            Evaluator(PixelFeatures(), digits, count)


def test_references_that_do_not_fit_are_refused_before_any_work(digits):
    evaluator = Evaluator(PixelFeatures(), digits, 50_000)
    evaluator.check_shape((1, 8, 8))
    with pytest.raises(
        ValueError, match=r"reference: digits: its images have 1 channel\(s\) of 8 x 8 pixels, the samples 3"
    ):
        evaluator.check_shape((3, 8, 8))
    foreign = Evaluator(PixelFeatures(), replace(digits, path="adm.npz", shape=None), 50_000)
    with pytest.raises(ValueError, match=r"reference: adm\.npz: 64 features; samples have 192 by the extractor pixels"):
        foreign.check_shape((3, 8, 8))


# --- parts, interruptions, processes


def same_scores(a, b, rel=1e-12):
    assert a["metrics"] == pytest.approx(b["metrics"], rel=rel)
    assert a["samples"]["sha256_of_stream"] == b["samples"]["sha256_of_stream"]


def test_padding_does_not_change_scores(digits):
    images = noisy_digits(30)
    evaluator = Evaluator(PixelFeatures(), digits, 26)
    for index in spans(0, 30, 6):
        evaluator.update(images[index.start : index.stop], index)
    result = evaluator.finalize()
    assert result["samples"]["dropped"] == 4
    same_scores(result, score(images[:26], PixelFeatures(), digits))
    digests = b"".join(hashlib.sha256(image.numpy().tobytes()).digest() for image in images[:26])
    assert result["samples"]["sha256_of_stream"] == hashlib.sha256(digests).hexdigest()


def test_missing_images_are_an_error(digits):
    evaluator = Evaluator(PixelFeatures(), digits, 50)
    evaluator.update(noisy_digits(48), range(48))
    with pytest.raises(ValueError, match="features of 2 of 50 images are missing"):
        evaluator.finalize()
    with pytest.raises(ValueError, match="features of the images 48 to 48 are missing"):
        evaluator.update(noisy_digits(1), [49])


def test_a_killed_evaluation_continues_with_the_features_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "PART", 2)
    folder = write_pngs(tmp_path / "images", noisy_digits(30))
    expected = score_files(folder, batch=4)
    assert not list(tmp_path.glob(".*"))
    digits = open_reference("digits", PixelFeatures())
    calls, extract = [], PixelFeatures.__call__

    def fails_in_the_sixth(self, images):
        calls.append(len(images))
        if calls == [4] * 6:
            raise KeyboardInterrupt
        return extract(self, images)

    monkeypatch.setattr(PixelFeatures, "__call__", fails_in_the_sixth)
    monkeypatch.setattr(PixelFeatures, "sizes", lambda self, shape: (64, None))
    monkeypatch.setattr(evaluate, "open_reference", lambda *_, **__: digits)
    with pytest.raises(KeyboardInterrupt):
        score_files(folder, batch=4)
    calls.clear()
    same_scores(score_files(folder, batch=4), expected)
    assert calls == [4, 4, 4, 2]  # two parts of two batches were there
    assert not list(tmp_path.glob(".*"))


def test_features_of_changed_images_or_other_weights_are_not_used(tmp_path, monkeypatch):
    folder = write_pngs(tmp_path / "images", noisy_digits(12))
    places = set()

    def place(self, source, parts):
        places.add(next(iter(parts)))
        raise KeyboardInterrupt

    monkeypatch.setattr(Evaluation, "_extract", place)
    for change in (None, {"batch": 3}, "identity", "image"):
        if change == "identity":
            monkeypatch.setattr(PixelFeatures, "identity", "other")
        if change == "image":
            write_pngs(tmp_path / "images", noisy_digits(1))
        with pytest.raises(KeyboardInterrupt):
            score_files(folder, **(change if isinstance(change, dict) else {}))
    assert len(places) == 4


@pytest.mark.slow
def test_two_processes_give_the_scores_of_one(tmp_path, inception_weights):
    """Uneven parts, a short last one, and an inception score whose chunks lie across them."""
    folder = write_pngs(tmp_path / "images", noisy_digits(301))
    pictures = write_pngs(tmp_path / "rgb", random_pictures(19, 32))
    real = save_npz(tmp_path / "real.npz", random_pictures(12, 32, seed=1))
    for options in (
        [folder, "--extractor", "pixels", "--reference", "digits", "--batch", "4"],
        [pictures, "--reference", real, "--inception_weights", inception_weights, "--batch", "1"],
    ):
        results = []
        for launch in (python, lambda *args: torchrun(2, *args)):
            out = tmp_path / f"{len(results)}.json"
            launch("-m", "vcagen", "evaluate", *options, "--out", out)
            results.append(json.loads(out.read_text()))
        same_scores(*results, rel=1e-10)
    assert list(results[0]["metrics"])[:4] == ["fid_19", "sfid_19", "is_mean", "is_std"]


# --- additions in one place


def test_a_new_extractor_and_a_new_metric_are_a_line_each(tmp_path, monkeypatch):
    class Means(PixelFeatures):
        name, score_name, identity = "means", "fd_means", "means"
        precision_recall: ClassVar = {"means": False}

        def __call__(self, images):
            return PixelFeatures.__call__(self, images)._replace(pool=images.float().mean(3).flatten(1))

    monkeypatch.setitem(EXTRACTORS, "means", Means)
    monkeypatch.setitem(METRICS, "shift", lambda samples, reference: {"shift": samples.count - reference.count})
    result = score_files(write_pngs(tmp_path / "images", noisy_digits(20)), extractor="means")
    assert list(result["metrics"]) == ["fd_means_20", "precision_means", "recall_means", "shift"]
    assert result["metrics"]["shift"] == 20 - 1797


def test_missing_weights_and_how_to_score_later(tmp_path, monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    config = EvaluateConfig(samples="out/my images", reference="digits", precision_recall=False)
    with pytest.raises(MissingWeights):
        Evaluation(config, build_accelerator(), shape=(3, 8, 8))
    expected = "vcagen evaluate 'out/my images' --precision_recall False --reference digits --inception_weights PATH"
    assert later_command(config) == expected


# --- folders and files that anybody made


def test_folder_and_npz_of_the_same_images_score_the_same(digits, tmp_path):
    images = noisy_digits(40)
    folder = write_pngs(tmp_path / "images", images)
    results = [score_files(path, batch=16) for path in (folder, save_npz(tmp_path / "samples.npz", images))]
    same_scores(*results)
    same_scores(results[0], score(images, PixelFeatures(), digits))


def test_dirty_sample_folders(tmp_path):
    def refused(found, image, name="000001.png", **options):
        folder = tmp_path / hashlib.md5(found.encode()).hexdigest()
        write_pngs(folder, random_pictures(3, 16))
        image.save(folder / name, **options)
        with pytest.raises(ValueError, match=found):
            open_samples(str(folder))

    refused(r"000001\.png: RGBA 16 x 16", Image.new("RGBA", (16, 16)))
    refused(r"000001\.png: P 16 x 16", Image.new("P", (16, 16)))
    refused(r"000001\.png: I;16 16 x 16", Image.new("I;16", (16, 16)))
    refused(r"000001\.png: L 16 x 16; all must be 8-bit RGB.*000000\.png: RGB 16 x 16", Image.new("L", (16, 16)))
    refused(r"000001\.png: RGB 16 x 17; all must", Image.new("RGB", (16, 17)))

    deep = tmp_path / "deep"
    write_pngs(deep, random_pictures(3, 16))
    png = bytearray((deep / "000002.png").read_bytes())
    png[24] = 16  # 16 bits a channel: Pillow would read it as 8-bit RGB
    import zlib

    png[29:33] = zlib.crc32(png[12:29]).to_bytes(4, "big")
    (deep / "000002.png").write_bytes(png)
    with pytest.raises(ValueError, match=r"000002\.png: 16-bit RGB 16 x 16"):
        open_samples(str(deep))

    (deep / "000002.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"000002\.png: unreadable image"):
        open_samples(str(deep))

    cut = tmp_path / "cut"
    write_pngs(cut, random_pictures(3, 16))
    data = (cut / "000001.png").read_bytes()
    (cut / "000001.png").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"000001\.png: unreadable image"):
        every(cut)


def test_stored_with_loss_or_sorted_is_a_warning(tmp_path):
    folder = tmp_path / "jpeg"
    folder.mkdir()
    for i in range(2):
        Image.new("RGB", (8, 8)).save(folder / f"{i}.jpg")
    assert "JPEG" in open_samples(str(folder)).warnings[0]
    rows = np.zeros((4, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "sorted.npz", rows, np.array([0, 0, 1, 1]))
    assert "sorted by label" in open_samples(str(tmp_path / "sorted.npz")).warnings[0]
    np.savez(tmp_path / "mixed.npz", rows, np.array([0, 1, 0, 1]), mu=np.zeros(3))
    (warning,) = open_samples(str(tmp_path / "mixed.npz")).warnings
    assert "also holds statistics" in warning


def test_number_of_samples(tmp_path):
    folder = write_pngs(tmp_path / "x", random_pictures(5, 8))
    assert open_samples(folder, expected=5).count == 5
    with pytest.raises(ValueError, match=r"5 images, 3 expected \(too many: 000003\.png, 000004\.png\)"):
        open_samples(folder, expected=3)
    with pytest.raises(ValueError, match="5 images, 6 expected; give --num_images 5"):
        open_samples(folder, expected=6)
    one = write_pngs(tmp_path / "one", random_pictures(1, 8))
    with pytest.raises(ValueError, match="1 image; scores need at least 2"):
        open_samples(one)


def test_where_the_result_goes():
    assert str(result_path("a/samples.npz", "pixels")) == str(result_path("a/images", "pixels")) == "a/results.json"
    assert str(result_path("a/mine", "pixels")) == "a/mine/results.json"


@pytest.mark.parametrize("name", ["images", "out.npz"])
def test_a_folder_of_samples_may_have_any_name(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "manifest.json").write_text("{}")
    assert result_path(str(tmp_path / name), "pixels") == tmp_path / name / "results.json"


def test_scores_of_another_extractor_are_kept(tmp_path):
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"format": FORMAT, "extractor": {"name": "pixels"}}))
    assert result_path(str(tmp_path), "pixels") == results
    assert result_path(str(tmp_path), "inception").name == "results_inception.json"
    results.write_text("[]")
    with pytest.raises(ValueError, match=r"results\.json: damaged"):
        result_path(str(tmp_path), "pixels")


def test_the_output_folder_of_sample_py(tmp_path):
    """Its images/ are taken, and what its manifest tells is repeated."""
    facts = {"uint8_rule": "round", "samples": {"labels": "uniform"}, "sampler": {"name": "ode"}, "model": {}}
    manifest = {"format": FORMAT, "num_images": 4, "seed": 3, "facts": facts}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    write_pngs(tmp_path / "images", noisy_digits(4))
    write_pngs(tmp_path / "preview", noisy_digits(2))
    save_npz(tmp_path / "samples.npz", noisy_digits(3))
    for path in (tmp_path, tmp_path / "images"):
        result = score_files(path)
        assert (result["samples"]["kind"], result["n_samples"]) == ("folder", 4)
        assert result["samples"]["labels"] == "uniform"
        assert result["sampler"] == {"name": "ode"}
        assert (result["sampling"]["seed"], "facts" in result["sampling"]) == (3, False)
        assert json.loads((tmp_path / "results.json").read_text()) == result


@pytest.mark.parametrize("text", ["[]", "{", "{}", "\\xff"])
def test_damaged_manifests(tmp_path, text):
    folder = write_pngs(tmp_path / "images", noisy_digits(4))
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest\.json: damaged"):
        main(["evaluate", folder, "--extractor", "pixels", "--reference", "digits"])


def test_damaged_and_absurd_samples(tmp_path, monkeypatch):
    path = damaged_npz(tmp_path / "x.npz", arr_0=np.random.default_rng(0).integers(0, 9, (40, 8, 8, 3), dtype=np.uint8))
    with pytest.raises(ValueError, match=r"x\.npz: damaged"):
        every(path)
    folder = write_pngs(tmp_path / "large", random_pictures(2, 16))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=r"000000\.png: unreadable image \(Image size"):
        open_samples(folder)


# --- the command line


def test_stats_and_evaluate_jobs(tmp_path, capsys):
    main(["stats", "digits", "--extractor", "pixels", "--out", str(tmp_path / "ref.npz")])
    assert json.loads(capsys.readouterr().out)["n"] == 1797
    folder = write_pngs(tmp_path / "out" / "images", noisy_digits(40))
    options = ["--extractor", "pixels", "--reference", str(tmp_path / "ref.npz")]
    main(["evaluate", folder, *options])
    printed = json.loads(capsys.readouterr().out)
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert result["metrics"] == printed
    assert result["reference"]["path"] == str(tmp_path / "ref.npz")
    main(["evaluate", folder, *options, "--precision_recall", "false", "--out", str(tmp_path / "other.json")])
    assert set(json.loads((tmp_path / "other.json").read_text())["metrics"]) == {"fd_pixels_40"}

    (tmp_path / "out" / "manifest.json").write_text(json.dumps({"format": FORMAT, "num_images": 50, "seed": 3}))
    with pytest.raises(ValueError, match="40 images, 50 expected; give --num_images 40"):
        main(["evaluate", folder, *options])
    main(["evaluate", folder, *options, "--num_images", "40"])
    assert json.loads((tmp_path / "out" / "results.json").read_text())["sampling"]["seed"] == 3


def test_mistakes_in_the_command_line(tmp_path):
    rgb = write_pngs(tmp_path / "rgb", random_pictures(4, 8))
    with pytest.raises(ValueError, match="reference"):
        main(["evaluate", rgb, "--extractor", "pixels"])
    with pytest.raises(ValueError, match="batch"):
        main(["evaluate", rgb, "--extractor", "pixels", "--reference", "digits", "--batch", "0"])
    with pytest.raises(ValueError, match=r"out: ref\.pt; must end in \.npz"):
        main(["stats", "digits", "--extractor", "pixels", "--out", "ref.pt"])
    with pytest.raises(ValueError, match=r"its images have 1 channel\(s\) of 8 x 8 pixels, the samples 3"):
        main(["evaluate", rgb, "--extractor", "pixels", "--reference", "digits"])
    with pytest.raises(ValueError, match="not a folder of images"):
        main(["evaluate", str(tmp_path / "absent"), "--extractor", "pixels", "--reference", "digits"])
    assert not (tmp_path / "rgb" / "results.json").exists()


@pytest.mark.parametrize("job", ["stats", "evaluate"])
@pytest.mark.parametrize(("out", "message"), [("x.npz", "is a folder"), ("file/y.npz", r"cannot be written \(Not a")])
def test_a_result_that_cannot_be_written_is_told_before_the_work(tmp_path, monkeypatch, job, out, message):
    (tmp_path / "x.npz").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr(PixelFeatures, "__call__", lambda self, images: pytest.fail("features were computed"))
    args = [job, "digits", "--extractor", "pixels", *(["--reference", "digits"] if job == "evaluate" else [])]
    with pytest.raises(ValueError, match=rf"{out}: {message}"):
        main([*args, "--out", str(tmp_path / out)])


@pytest.mark.slow
def test_one_line_and_exit_code_2(tmp_path):
    rgb = write_pngs(tmp_path / "rgb", random_pictures(4, 8))
    offline = {"TORCH_HOME": str(tmp_path / "empty"), "https_proxy": "http://127.0.0.1:9"}
    line = user_error("-m", "vcagen", "evaluate", rgb, "--reference", rgb, env=offline)
    assert "inception_weights" in line
    assert "--inception_weights PATH" in line
    assert not (tmp_path / "rgb" / "results.json").exists()


# --- memory

MEMORY = """
import resource, sys
import torch
from vcagen.__main__ import main

torch.set_num_threads(1)
for path, rows in zip(sys.argv[2::2], sys.argv[3::2]):
    main(["evaluate", path, "--reference", sys.argv[1], "--extractor", "pixels", "--out", f"{path}.json",
          "--precision_recall", "true" if rows == "rows" else "false"])
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read in KiB")
def test_memory_is_flat_but_for_the_rows(tmp_path):
    """Peak memory (it only grows within a process) of 200, 2,000 and 20,000 images of 0.8, 8 and 82 MB."""
    paths = []
    for count in (200, 2_000, 20_000):
        rows = np.random.default_rng(0).integers(0, 256, (count, 37, 37, 3), dtype=np.uint8)
        np.savez(tmp_path / f"{count}.npz", rows)
        paths.append(tmp_path / f"{count}.npz")
    (tmp_path / "run.py").write_text(MEMORY)
    arguments = [part for path in paths for part in (path, "none")]
    out, _ = python(tmp_path / "run.py", paths[0], *arguments, paths[2], "rows")
    small, middle, large, with_rows = (int(kib) / 1024 for kib in re.findall(r"peak (\d+)", out))
    assert middle - small < 8
    assert large - middle < 12  # 20,000 digests of 65 bytes among it
    assert with_rows - large < 15 + 2 * 4_096**2 * 4 / 2**20  # rows: 15 MB; two blocks of distances


def test_images_beside_an_old_folder_are_the_samples(tmp_path):
    write_pngs(tmp_path / "mine", random_pictures(10, 8))
    write_pngs(tmp_path / "mine" / "old", random_pictures(3, 8, seed=1))
    result = score_files(tmp_path / "mine", reference=write_pngs(tmp_path / "real", random_pictures(9, 8, seed=2)))
    assert "fd_pixels_10" in result["metrics"]
    assert [line for line in result["warnings"] if "left out" in line] == [f"{tmp_path / 'mine'}: left out: old/"]
    with pytest.raises(ValueError, match=r"10 images lie beside the class folders \(old\)"):
        open_reference(str(tmp_path / "mine"), PixelFeatures())


def test_opaque_alpha_is_no_alpha(tmp_path):
    images = random_pictures(3, 8)
    for name, alpha in (("opaque", 255), ("clear", 254)):
        (tmp_path / name).mkdir()
        for i, image in enumerate(images):
            picture = Image.fromarray(image.permute(1, 2, 0).numpy())
            picture.putalpha(alpha if i else 255)
            picture.save(tmp_path / name / f"{i}.png")
    assert every(tmp_path / "opaque").equal(images)
    with pytest.raises(ValueError, match=r"clear/1\.png: RGBA 8 x 8; all must be 8-bit RGB"):
        open_samples(str(tmp_path / "clear"))


@pytest.mark.parametrize("name", ["arrays.bin", "arrays", "arrays.zip", "arrays.png"])
def test_content_says_what_is_an_npz(tmp_path, name):
    save_npz(tmp_path / "x.npz", images := random_pictures(3, 8))
    path = (tmp_path / "x.npz").rename(tmp_path / name)
    assert every(path).equal(images)
    assert open_reference(str(path), PixelFeatures(), rows=False).kind == "images"
    assert result_path(str(path), "pixels") == tmp_path / "results.json"


def test_arrays_that_are_called_npz_and_are_none_are_named(tmp_path):
    with (tmp_path / "one.npz").open("wb") as file:
        np.save(file, np.zeros((3, 8, 8, 3), np.uint8))
    (tmp_path / "text.npz").write_text("PK")
    (tmp_path / "empty.npz").touch()
    for name in ("one", "text", "empty"):
        for read in (open_samples, lambda path: open_reference(path, PixelFeatures()), check_reference_path):
            with pytest.raises(ValueError, match=rf"{name}\.npz: not an \.npz file"):
                read(str(tmp_path / f"{name}.npz"))
