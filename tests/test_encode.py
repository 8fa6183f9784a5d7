"""The encoding job: shards that are complete, right and the same whatever happens on the way."""

import dataclasses
import errno
import json
import multiprocessing
import random
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import image_folder, tiny_vae, torchrun, user_error
from PIL import Image

from vcagen.__main__ import do
from vcagen.config.job_options import EncodeConfig
from vcagen.data.encode import run
from vcagen.data.images import DATASETS, open_dataset_images
from vcagen.data.latents import LatentDataset
from vcagen.data.vae import LatentVAE
from vcagen.system.files import sha256

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def vae_path(tmp_path_factory):
    return tiny_vae(tmp_path_factory.mktemp("vae"))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), {"cat": 5, "dog": 4, "eel": 4})


@pytest.fixture
def config(tmp_path, images, vae_path):
    """13 images in shards of 5, 5 and 3, encoded in threes."""
    return EncodeConfig(
        images=str(images), out=str(tmp_path / "latents"), vae=vae_path, image_size=32, batch=3, shard_size=5,
        num_workers=2,
    )  # fmt: skip


def change(config, **fields):
    """The configuration with other values."""
    return dataclasses.replace(config, **fields)


def contents(folder):
    """File name to bytes of everything in a folder."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def test_contents(config, vae_path, capsys):
    run(config)
    shards = [f"moments_{i:05}.npy" for i in range(3)]
    assert list(contents(config.out)) == ["labels.npy", *shards, "names.json", "shards.json"]
    assert "13 items" in capsys.readouterr().err
    moments = np.load(f"{config.out}/moments_00001.npy")
    assert moments.shape == (5, 2, 8, 4, 4)
    assert moments.dtype == np.float16
    assert np.load(f"{config.out}/labels.npy").tolist() == [0] * 5 + [1] * 4 + [2] * 4
    names = LatentDataset(config.out).names()
    assert names[5:10] == [f"dog/{i:03}.png" for i in range(4)] + ["eel/000.png"]
    record = json.loads(Path(config.out, "shards.json").read_text())
    assert record["format"] == 2
    assert record["vae"]["path"] == vae_path
    assert len(record["vae"]["sha256"]) == 64
    assert (record["image_size"], record["crop"], record["count"]) == (32, "adm-center", 13)
    assert record["class_names"] == ["cat", "dog", "eel"]
    assert [shard["count"] for shard in record["shards"]] == [5, 5, 3]
    assert [shard["sha256"] for shard in record["shards"]] == [sha256(f"{config.out}/{name}") for name in shards]


def test_repeats_are_equal_byte_for_byte(config, tmp_path):
    run(config)
    again = change(config, out=str(tmp_path / "again"), num_workers=0)
    run(again)
    assert contents(again.out) == contents(config.out)


def test_same_command_does_only_what_is_missing(config, capsys):
    run(config)
    before = contents(config.out)
    files = {name: Path(config.out, name).stat() for name in before}
    Path(config.out, "moments_00001.npy").unlink()
    Path(config.out, ".moments_00001.npy.77.tmp").write_text("half")
    capsys.readouterr()
    run(config)
    assert "2 shards done" in capsys.readouterr().err
    assert contents(config.out) == before
    for name in ("moments_00000.npy", "moments_00002.npy"):
        assert Path(config.out, name).stat().st_ino == files[name].st_ino


def test_a_damaged_shard_is_named(config):
    run(config)
    file = Path(config.out, "moments_00001.npy")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"moments_00001\.npy: damaged, its SHA-256.*delete it"):
        run(config)
    file.unlink()
    run(config)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"image_size": 40}, "image_size 32, asked for 40"),
        ({"dtype": "bfloat16"}, "dtype float16, asked for bfloat16"),
        ({"shard_size": 4}, "shard_size 5, asked for 4"),
        ({"precision": "bfloat16"}, "precision float32, asked for bfloat16"),
        ({"tiling": True}, "tiling False, asked for True"),
        ({"vae": "identity"}, "vae.path .*, asked for identity"),
        ({"scaling_factor": 0.5}, "vae.scaling_factor .*, asked for 0.5"),
    ],
)
def test_other_settings_are_refused_field_by_field(config, fields, named):
    run(config)
    before = contents(config.out)
    with pytest.raises(ValueError, match=f"shards.json: made with other settings: .*{named}"):
        run(change(config, **fields))
    assert contents(config.out) == before


def test_other_images_and_other_weights_are_refused(config, tmp_path):
    image_folder(tmp_path / "images", {"a": 3, "b": 3})
    tiny_vae(tmp_path / "vae")
    config = change(config, images=str(tmp_path / "images"), vae=str(tmp_path / "vae"))
    run(config)
    (tmp_path / "images" / "a" / "000.png").rename(tmp_path / "images" / "a" / "new.png")
    with pytest.raises(ValueError, match="other settings: items"):
        run(config)
    (tmp_path / "images" / "a" / "new.png").rename(tmp_path / "images" / "a" / "000.png")
    run(config)
    tiny_vae(tmp_path / "vae", seed=1)
    with pytest.raises(ValueError, match=r"other settings: vae\.sha256|other settings: vae\.scaling_factor"):
        run(config)


def broken(root):
    image_folder(root, {"a": 4, "b": 3})
    Image.effect_noise((64, 64), 90).save(root / "b" / "cut.jpg")
    data = (root / "b" / "cut.jpg").read_bytes()
    (root / "b" / "cut.jpg").write_bytes(data[: len(data) // 2])
    (root / "b" / "empty.png").write_bytes(b"")
    return str(root)


def test_broken_files_write_nothing_of_their_shard(config, tmp_path):
    config = change(config, images=broken(tmp_path / "broken"), shard_size=100)
    with pytest.raises(ValueError, match=r"2 unreadable images: b/cut\.jpg, b/empty\.png"):
        run(config)
    assert not Path(config.out).exists()
    with pytest.raises(ValueError, match=r"2 unreadable images"):
        run(change(config, shard_size=3))
    assert {name.split(".")[0] for name in contents(config.out)} == {"moments_00000", "moments_00001"}
    run(change(config, shard_size=3, on_bad_image="skip"))  # goes on where that ended
    elsewhere = change(config, shard_size=3, on_bad_image="skip", out=str(tmp_path / "elsewhere"))
    run(elsewhere)
    assert contents(config.out) == contents(elsewhere.out)


@pytest.mark.parametrize("shard_size", [1, 5, 100])
def test_broken_files_are_skipped_and_listed(config, tmp_path, shard_size, capsys):
    config = change(config, images=broken(tmp_path / "broken"), on_bad_image="skip", shard_size=shard_size)
    run(config)
    before = contents(config.out)
    dataset = LatentDataset(config.out)
    assert dataset.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    skipped = json.loads(Path(config.out, "skipped.json").read_text())
    assert [entry["path"] for entry in skipped] == ["b/cut.jpg", "b/empty.png"]
    assert "not an image" in skipped[1]["reason"]
    assert "skipped 2 unreadable images" in capsys.readouterr().err
    plain = change(config, images=str(tmp_path / "good"), out=str(tmp_path / "plain"))
    image_folder(tmp_path / "good", {"a": 4, "b": 3})
    run(plain)
    assert torch.equal(LatentDataset(plain.out).labels, dataset.labels)
    for index in range(7):
        assert torch.allclose(LatentDataset(plain.out)[index, True][0], dataset[index, True][0], atol=1e-3)
    shards = sorted(Path(config.out).glob("moments_*.npy"))
    shards[-1].unlink()
    run(config)
    assert contents(config.out) == before


def test_a_class_whose_files_are_all_broken(config, tmp_path):
    root = image_folder(tmp_path / "broken", {"a": 3, "b": 1})
    (root / "b" / "000.png").write_bytes(b"")
    config = change(config, images=str(root), on_bad_image="skip")
    with pytest.raises(ValueError, match="no readable image in b"):
        run(config)
    with pytest.raises(ValueError, match="the same encode command completes them"):
        LatentDataset(config.out)
    run(change(config, allow_empty_classes=True))
    assert LatentDataset(config.out).spec.class_names == ("a", "b")


def test_a_place_that_cannot_be_written_is_told_before_the_images_are_read(config, tmp_path, monkeypatch):
    monkeypatch.setattr("vcagen.data.encode.open_images", None)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written"):
        run(change(config, out=str(tmp_path / "file" / "latents")))


def test_a_damaged_record_is_named(config):
    run(config)
    for text in ("", "[1]", "{}"):
        Path(config.out, "shards.json").write_text(text)
        with pytest.raises(ValueError, match=r"shards\.json: damaged"):
            run(config)


def test_latents_of_an_earlier_version_are_refused(config):
    Path(config.out).mkdir()
    Path(config.out, "shard_00000.safetensors").touch()
    with pytest.raises(ValueError, match="format 1, which commit a5c3076 of vcagen reads"):
        run(config)


@pytest.mark.parametrize("inside", ["", "latents", "a/b"])
def test_shards_do_not_go_into_the_images(config, inside):
    with pytest.raises(ValueError, match="is inside the images"):
        run(change(config, out=f"{config.images}/{inside}"))


def test_junk_and_empty_classes(config, tmp_path):
    root = image_folder(tmp_path / "junk", {"dog": 1, "cat": 1, "eel": 0, "fox": 2, ".ipynb_checkpoints": 1})
    (root / "README.txt").write_text("junk")
    config = change(config, images=str(root))
    with pytest.raises(ValueError, match=": eel: class folder without images"):
        run(config)
    run(change(config, allow_empty_classes=True))
    dataset = LatentDataset(config.out)
    assert dataset.spec.class_names == ("cat", "dog", "eel", "fox")
    assert dataset.spec.num_classes == 4
    assert dataset.labels.tolist() == [0, 1, 3, 3]


def test_wrong_scale_writes_nothing(config, tmp_path):
    for factor in (0.05, 20.0):
        vae_path = tiny_vae(tmp_path / str(factor), scaling_factor=factor)
        with pytest.raises(ValueError, match=r"latents have std .* after scaling"):
            run(change(config, vae=vae_path, shard_size=100))
    assert not Path(config.out).exists()


def test_latents_that_overflow_name_their_image(config, tmp_path):
    from diffusers import AutoencoderKL

    model = AutoencoderKL.from_pretrained(config.vae)
    torch.nn.init.constant_(model.quant_conv.bias, 1e5)  # beyond float16
    model.save_pretrained(tmp_path / "vae")
    with pytest.raises(ValueError, match=r"cat/000\.png: its latent is not finite in float16"):
        run(change(config, vae=str(tmp_path / "vae"), scaling_factor=4.5e-5))


def test_image_size_must_fit_the_vae(config):
    with pytest.raises(ValueError, match=r"image_size: 36; the VAE .* takes multiples of 8"):
        run(change(config, image_size=36))


def test_identity_and_digits_are_exact(config, tmp_path):
    config_of_digits = EncodeConfig(images="digits", out=str(tmp_path / "digits"), dtype="bfloat16", shard_size=1000)
    run(config_of_digits)
    dataset = LatentDataset(config_of_digits.out)
    digits = open_dataset_images("digits")
    images, labels = torch.stack([digits[i] for i in range(1797)]), torch.tensor(digits.labels)
    vae = LatentVAE.from_description(dataset.spec.vae)
    for mirror in (False, True):
        moments, got = dataset.__getitems__([(i, mirror) for i in range(1797)])
        assert torch.equal(got, labels)
        pixels = vae.decode(vae.sample(moments, torch.zeros(())))
        assert torch.equal(pixels, images.flip(-1) if mirror else images)
    run(change(config, vae="identity"))
    assert LatentDataset(config.out)[0, True][0].shape == (3, 32, 32)


def test_a_set_of_ones_own_is_one_file(config, tmp_path, monkeypatch):
    (tmp_path / "grey_set.py").write_text(
        "import torch\nimport vcagen\n"
        "def grey(folder):\n"
        "    return vcagen.ImageSet(['0', folder], [0, 1], 'ab', 3, 4, lambda i: torch.full((3, 4, 4), i).byte())\n"
        "vcagen.DATASETS['grey'] = grey\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(DATASETS, "grey", None)  # forgotten after the test
    do("encode", ["grey:some/folder", "--plugin", "grey_set", "--out", config.out], prog="x")
    dataset = LatentDataset(config.out)
    assert dataset.labels.tolist() == [0, 1]
    assert dataset.names() == ["0", "some/folder"]


def test_dry_run_writes_nothing(config, capsys):
    run(change(config, dry_run=True))
    text = capsys.readouterr().out
    assert "13 images of 3 classes" in text
    assert "3 shards, 6,656 bytes" in text
    assert "hours" in text
    assert not Path(config.out).exists()


def test_full_disk(config, monkeypatch):
    run(config)
    before = contents(config.out)
    Path(config.out, "moments_00002.npy").unlink()
    del before["moments_00002.npy"]

    def full(file, header):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("numpy.lib.format.write_array_header_1_0", full)
    with pytest.raises(OSError, match=r"No space left on device.*moments_00002"):
        run(config)
    assert contents(config.out) == before


def command(config):
    return (
        "-m", "vcagen", "encode", config.images, "--out", config.out, "--vae", config.vae,
        "--image_size", 32, "--batch", config.batch, "--shard_size", config.shard_size,
    )  # fmt: skip


def test_command_line_reports_broken_files(config, tmp_path):
    line = user_error(*command(change(config, images=broken(tmp_path / "broken"), shard_size=100)))
    assert "2 unreadable images: b/cut.jpg, b/empty.png" in line
    assert not Path(config.out).exists()


@pytest.mark.parametrize(("count", "start"), [(2, 1), pytest.param(5, 0, marks=pytest.mark.slow)])
def test_many_processes_equal_one(config, tmp_path, count, start):
    """They go on with a folder that has the first shards, or start with none."""
    config = change(config, images=broken(tmp_path / "broken"), shard_size=2, on_bad_image="skip")
    run(config)
    many = change(config, out=str(tmp_path / "many"))
    if start:
        shutil.copytree(config.out, many.out)
        for file in sorted(Path(many.out).glob("moments_*.npy"))[start:]:
            file.unlink()
    _, error = torchrun(count, *command(many), "--on_bad_image", "skip")
    assert "encoding" in error
    assert contents(many.out) == contents(config.out)


@pytest.mark.slow
def test_many_processes_with_broken_files(config, tmp_path):
    _, error = torchrun(2, *command(change(config, images=broken(tmp_path / "broken"), shard_size=100)), code=1)
    assert "2 unreadable images: b/cut.jpg, b/empty.png" in error
    assert not Path(config.out).exists()


@pytest.mark.slow
def test_kill_at_ten_points(config, tmp_path):
    root = image_folder(tmp_path / "many", {"a": 60, "b": 60}, size=40)
    config = change(config, images=str(root), shard_size=8)
    start = time.monotonic()
    run(config)
    seconds = time.monotonic() - start
    expected = contents(config.out)
    fork = multiprocessing.get_context("fork")
    interrupted = 0
    for trial in range(10):
        again = change(config, out=str(tmp_path / f"trial_{trial}"))
        child = fork.Process(target=run, args=(again,))
        child.start()
        time.sleep(random.Random(trial).uniform(0.05, 0.95) * seconds)
        child.kill()
        child.join()
        done = len(list((tmp_path / f"trial_{trial}").glob("moments_*.npy")))
        interrupted += 0 < done < 15
        run(again)
        assert contents(again.out) == expected, trial
    assert interrupted >= 3, "the kills did not hit the encoding"


@pytest.mark.slow
def test_full_tmpfs(config, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("may not mount a tmpfs")
    try:
        root = image_folder(tmp_path / "many", {"a": 100, "b": 100}, size=40)
        config = change(config, images=str(root), out=str(disk / "latents"), shard_size=20)
        line = user_error(*command(config))
        assert "No space left on device" in line
        left = contents(config.out)
        assert 0 < len(left) < 20
        shards = [name for name in left if name.endswith(".npy")]
        assert all(np.isfinite(np.load(f"{config.out}/{name}")).all() for name in shards)
        elsewhere = change(config, out=str(tmp_path / "elsewhere"))
        run(elsewhere)
        whole = contents(elsewhere.out)
        assert shards
        assert all(whole[name] == left[name] for name in shards)
    finally:
        subprocess.run(["umount", disk], check=True)
