"""Fashion-MNIST: its files, the classifier behind its features, and its table."""

import gzip
import json
import struct

import numpy as np
import pytest
import torch
from helpers import ROOT

from vcagen.__main__ import do
from vcagen.data import fashion as data
from vcagen.data.fashion import fashion
from vcagen.data.images import open_dataset_images
from vcagen.evaluation.fashion import accuracy, train_classifier
from vcagen.evaluation.features import load_extractor
from vcagen.evaluation.reference import open_reference
from vcagen.evaluation.scores import Gaussian, Measured, frechet
from vcagen.paper.table import load_table


def idx(array):
    """A byte array as an IDX file has it."""
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()


def write_split(folder, split="train", count=40, *, seed=0):
    """Write the two files of a split, the images gzipped: a bright square whose place is the class, and noise."""
    generator = np.random.default_rng(seed)
    images = generator.integers(0, 60, (count, 28, 28), dtype=np.uint8)
    labels = (np.arange(count) % 10).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 5)
        image[4 + 12 * row : 14 + 12 * row, 1 + 5 * column : 6 + 5 * column] = 250
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
    (folder / f"{split}-labels-idx1-ubyte").write_bytes(idx(labels))
    return images, labels


def test_the_files_of_a_folder_are_padded_to_the_papers_token_grids(tmp_path):
    images, labels = write_split(tmp_path)
    tests, _ = write_split(tmp_path, "t10k", 10, seed=1)
    found = open_dataset_images(f"fashion:{tmp_path}")
    assert (len(found), found.channels, found.image_size) == (40, 1, 32)
    assert found.labels == labels.tolist()
    assert found.class_names[9] == "ankle boot"
    for i in (0, 39):
        assert found[i].dtype == torch.uint8
        assert np.array_equal(found[i].numpy(), np.pad(images[i], 2)[None])
    assert np.array_equal(fashion(str(tmp_path), "t10k")[9].numpy(), np.pad(tests[9], 2)[None])


def test_the_cache_comes_before_debians_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(data, "DEBIAN", tmp_path / "debian")
    write_split(tmp_path / "debian", count=20)
    assert len(open_dataset_images("fashion")) == 20
    write_split(tmp_path / "hub" / "FashionMNIST" / "raw", count=30)
    assert len(open_dataset_images("fashion")) == 30


def test_missing_files_say_how_to_get_them(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"no train-images-idx3-ubyte or .*; apt-get install dataset-fashion-mnist"):
        open_dataset_images(f"fashion:{tmp_path}")

    def offline(root):
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz:\nTried this\nand that")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(data, "DEBIAN", tmp_path)
    monkeypatch.setattr(data, "_download", offline)
    with pytest.raises(ValueError, match=r"^.*no download \(Error downloading .*gz\); apt-get install [^\n]*$"):
        open_dataset_images("fashion")


@pytest.mark.parametrize(
    ("file", "content", "error"),
    [
        ("images-idx3-ubyte.gz", lambda good: good[:-30], r"damaged \(EOFError"),
        ("images-idx3-ubyte.gz", lambda good: gzip.compress(gzip.decompress(good)[:-1]), "truncated or too long"),
        ("images-idx3-ubyte.gz", lambda good: gzip.decompress(good), r"damaged \(BadGzipFile"),
        ("images-idx3-ubyte.gz", lambda good: gzip.compress(idx(np.zeros((40, 32, 32), np.uint8))), r"\(40, 32, 32\)"),
        ("images-idx3-ubyte.gz", lambda good: gzip.compress(b"\0\0\x0d\3" + bytes(12)), "not an IDX file of bytes"),
        ("images-idx3-ubyte.gz", lambda good: gzip.compress(b"\0\0\x08\3\0\0"), "truncated"),
        ("images-idx3-ubyte.gz", lambda good: gzip.compress(idx(np.zeros((0, 28, 28), np.uint8))), "no labels"),
        ("labels-idx1-ubyte", lambda good: idx(np.zeros(39, np.uint8)), "no labels 0 to 9 of the 40 images"),
        ("labels-idx1-ubyte", lambda good: good[:-1] + b"\x0a", "no labels 0 to 9"),
        ("labels-idx1-ubyte", lambda good: b"", "not an IDX file"),
    ],
)  # fmt: skip
def test_truncated_and_foreign_files_are_named(tmp_path, file, content, error):
    write_split(tmp_path)
    path = tmp_path / f"train-{file}"
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(ValueError, match=error) as caught:
        open_dataset_images(f"fashion:{tmp_path}")
    assert str(tmp_path / "train-") in str(caught.value)


def test_a_command_passes_the_line_on(tmp_path):
    write_split(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(b"no labels")
    with pytest.raises(ValueError, match=f"^{tmp_path}/train-labels-idx1-ubyte: not an IDX file of bytes$"):
        do("stats", [f"fashion:{tmp_path}", "--extractor", "pixels"], prog="vcagen stats")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A torch cache with 600 training and 200 test images and the classifier trained on them, once."""
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("cache")
        patch.setattr(torch.hub, "get_dir", lambda: str(root))
        write_split(root / "FashionMNIST" / "raw", count=600)
        write_split(root / "FashionMNIST" / "raw", "t10k", 200, seed=1)
        yield root


@pytest.fixture(scope="module")
def extractor(cache):
    return load_extractor("fashion")


def test_the_classifier_is_trained_the_same_each_time_and_leaves_torchs_random_numbers_alone(cache):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = (train_classifier(fashion(), epochs=1).state_dict() for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_classifier_is_kept_with_its_hash(cache, extractor, capsys):
    (file,) = (cache / "vcagen").glob("fashion-*.safetensors")
    assert extractor.record()["sha256"].startswith(file.stem.removeprefix("fashion-"))
    written = file.stat().st_mtime_ns
    again = load_extractor("fashion")
    assert file.stat().st_mtime_ns == written
    assert again.identity == extractor.identity
    assert load_extractor("fashion", weights=file).identity == extractor.identity
    assert accuracy(extractor.network, fashion(split="t10k")) == extractor.accuracy > 0.9
    good = file.read_bytes()
    file.write_bytes(good[:-1] + b"\0")
    with pytest.raises(ValueError, match=r"fashion-\w{8}\.safetensors: damaged; remove it"):
        load_extractor("fashion")
    file.write_bytes(good)


def test_features_logits_and_refusals(extractor):
    images = torch.stack([fashion()[i] for i in range(20)])
    pool, spatial = extractor(images)
    assert (pool.shape, pool.dtype, spatial) == ((20, 64), torch.float32, None)
    assert (extractor.logits(pool).argmax(1) == torch.arange(20) % 10).double().mean() > 0.8
    assert torch.equal(extractor.logits(pool), extractor.network(images.float() / 127.5 - 1).double())
    assert extractor.warnings(5000, adm_reference=False) == []
    extractor.accuracy, kept = 0.5, extractor.accuracy
    assert extractor.warnings(5000, adm_reference=False) == [
        "the classifier knows 50.0% of the test images, 91% are expected"
    ]
    extractor.accuracy = kept
    with pytest.raises(ValueError, match=r"digits: images \(1, 8, 8\); the fashion extractor takes \(1, 32, 32\)"):
        extractor.check_shape((1, 8, 8), "digits")


def test_the_distance_of_a_set_to_itself_is_0_and_to_a_shifted_one_as_in_closed_form(extractor):
    reference = open_reference("fashion", extractor)
    assert frechet(reference, reference) == {"fd_fashion_600": pytest.approx(0, abs=1e-6)}
    mean, cov = reference.pool
    shift = torch.linspace(-1, 1, len(mean), dtype=torch.float64)
    moved = Measured(extractor=extractor, count=5000, pool=Gaussian(mean + shift, 4 * cov))
    expected = shift.square().sum() + cov.trace()  # of N(m, C) and N(m + s, 4 C)
    assert frechet(moved, reference) == {"fd_fashion_5k": pytest.approx(float(expected))}


def test_the_table_has_the_papers_token_grids_and_can_be_taken_in_parts():
    path = ROOT / "configs" / "fashion.yaml"
    table = load_table(path)
    configs = [row.config() for row in table.rows]
    assert [(config.process.name, config.model.size, config.model.attention) for config in configs] == [
        (process, f"S/{patch}", attention)
        for process in ("diffusion", "flow") for patch in (8, 4, 2) for attention in ("mhsa", "vca")
    ]  # fmt: skip
    assert all((config.train, config.data) == (configs[0].train, configs[0].data) for config in configs)
    part = load_table(path, rows="sit-4-*", options={"model.depth": 12})
    assert [row.name for row in part.rows] == ["SiT/4", "SiT/4 + VCA"]
    assert {row.config().model.depth for row in part.rows} == {12}
    with pytest.raises(ValueError, match=r"rows: sit-3-\*; .*fashion.yaml has dit-8-mhsa, dit-8-vca"):
        load_table(path, rows="sit-3-*")


@pytest.mark.slow
def test_a_trial_of_the_experiment(cache, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub").symlink_to(cache)
    command = ["fashion", "--runs", str(tmp_path / "runs"), "--jobs", "2", "--seeds", "1", "--steps", "10",
               "--num_images", "80", "--rows", "sit-4-*",
               "--set", '{"model": {"hidden_size": 16, "depth": 1}, "train.batch_size": 8}']  # fmt: skip
    do("experiment", command, prog="vcagen experiment")
    assert "clothes recognised" in capsys.readouterr().out
    base, vca = json.loads((tmp_path / "runs" / "report" / "fashion.json").read_text())["rows"]
    for row in (base, vca):
        assert (row["marks"], row["score_name"]) == ([], "fd_fashion_80")
        assert 0 <= row["clothes recognised"] <= 1
        assert row["runs"][0]["metrics"].keys() >= {"fd_fashion_80", "is_mean", "precision_fashion", "recall_fashion"}
    assert vca["difference"] == pytest.approx(vca["score"] - base["score"])
