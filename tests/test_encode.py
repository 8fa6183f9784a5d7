"""The encoding job: shards that are complete, right and the same whatever happens on the way."""

import dataclasses
import errno
import json
import multiprocessing
import random
import subprocess
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import image_folder, python, tiny_vae, torchrun, user_error
from PIL import Image
from safetensors import safe_open

from vcagen.config.job_options import EncodeConfig
from vcagen.data.encode import encode
from vcagen.data.images import load_digits
from vcagen.data.latents import LatentDataset
from vcagen.data.vae import LatentVAE, _load_vae

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


def processes(count):
    """gather(rank) functions that join `count` threads as a launcher joins processes."""
    barrier = threading.Barrier(count, timeout=60)
    slots = [[] for _ in range(count)]

    def gather_of(rank):
        def gather(values):
            slots[rank] = values
            barrier.wait()
            joined = [value for slot in slots for value in slot]
            barrier.wait()
            return joined

        return gather

    return gather_of


def encode_in_threads(config, count):
    """Run the job as `count` processes would; return the errors of the ranks."""
    gather_of, errors = processes(count), [None] * count

    def one(rank):
        try:
            encode(config, rank=rank, world_size=count, gather=gather_of(rank))
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    lock = threading.Lock()

    def load(vae_path):
        with lock:  # diffusers cannot load in two threads at once
            return _load_vae(vae_path)

    with mock.patch("vcagen.data.vae._load_vae", load):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return errors


def test_shard_contents(config, vae_path, images, capsys):
    encode(config)
    assert list(contents(config.out)) == [f"shard_{i:05}.safetensors" for i in range(3)]
    assert "13 items" in capsys.readouterr().err
    with safe_open(f"{config.out}/shard_00001.safetensors", "pt") as shard:
        assert list(shard.metadata()) == ["vcagen"]
        text = shard.metadata()["vcagen"]
        metadata = json.loads(text)
        assert text == json.dumps(metadata, sort_keys=True)
        assert shard.get_tensor("moments").shape == (5, 2, 8, 4, 4)
        assert shard.get_tensor("moments").dtype == torch.float16
        assert shard.get_tensor("labels").tolist() == [1, 1, 1, 1, 2]
        names = shard.get_tensor("names").numpy().tobytes().decode().split("\0")
        assert names == [f"dog/{i:03}.png" for i in range(4)] + ["eel/000.png"]
    assert metadata["vae"]["path"] == vae_path
    assert len(metadata["vae"]["sha256"]) == 64
    assert (metadata["image_size"], metadata["crop"], metadata["count"]) == (32, "adm-center", 13)
    assert metadata["class_names"] == ["cat", "dog", "eel"]


def test_repeats_are_equal_byte_for_byte(config, tmp_path):
    encode(config)
    again = change(config, out=str(tmp_path / "again"), num_workers=1)
    encode(again)
    assert contents(again.out) == contents(config.out)


def test_same_command_does_only_what_is_missing(config, capsys):
    encode(config)
    before = contents(config.out)
    files = {name: Path(config.out, name).stat() for name in before}
    Path(config.out, "shard_00001.safetensors").unlink()
    Path(config.out, ".shard_00001.safetensors.77.tmp").write_text("half")
    capsys.readouterr()
    encode(config)
    error = capsys.readouterr().err
    assert "2 shards done" in error
    assert "checking files" not in error
    assert contents(config.out) == before
    for name in ("shard_00000.safetensors", "shard_00002.safetensors"):
        assert Path(config.out, name).stat().st_ino == files[name].st_ino


@pytest.mark.parametrize("count", [2, 5])
def test_many_processes_equal_one(config, tmp_path, count):
    encode(config)
    many = change(config, out=str(tmp_path / "many"))
    assert encode_in_threads(many, count) == [None] * count
    assert contents(many.out) == contents(config.out)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"image_size": 40}, "image_size 32, asked for 40"),
        ({"dtype": "bfloat16"}, "dtype float16, asked for bfloat16"),
        ({"shard_size": 4}, "shard_size 5, asked for 4; shards|shards 3, asked for 4"),
        ({"precision": "bfloat16"}, "precision float32, asked for bfloat16"),
        ({"tiling": True}, "tiling False, asked for True"),
        ({"vae": "identity"}, "vae.path .*, asked for identity"),
    ],
)
def test_other_settings_are_refused_field_by_field(config, fields, named):
    encode(config)
    before = contents(config.out)
    with pytest.raises(ValueError, match=f"shard_00000.*made with other settings: .*{named}"):
        encode(change(config, **fields))
    assert contents(config.out) == before


def test_other_images_and_other_weights_are_refused(config, tmp_path):
    image_folder(tmp_path / "images", {"a": 3, "b": 3})
    tiny_vae(tmp_path / "vae")
    config = change(config, images=str(tmp_path / "images"), vae=str(tmp_path / "vae"))
    encode(config)
    (tmp_path / "images" / "a" / "000.png").rename(tmp_path / "images" / "a" / "new.png")
    with pytest.raises(ValueError, match="other settings: items"):
        encode(config)
    (tmp_path / "images" / "a" / "new.png").rename(tmp_path / "images" / "a" / "000.png")
    encode(config)
    tiny_vae(tmp_path / "vae", seed=1)
    with pytest.raises(ValueError, match=r"other settings: vae\.sha256|other settings: vae\.scaling_factor"):
        encode(config)


def broken(root):
    image_folder(root, {"a": 4, "b": 3})
    Image.effect_noise((64, 64), 90).save(root / "b" / "cut.jpg")
    data = (root / "b" / "cut.jpg").read_bytes()
    (root / "b" / "cut.jpg").write_bytes(data[: len(data) // 2])
    (root / "b" / "empty.png").write_bytes(b"")
    return str(root)


@pytest.mark.parametrize("count", [1, 2])
def test_broken_files(config, tmp_path, count):
    config = change(config, images=broken(tmp_path / "broken"))
    for error in encode_in_threads(config, count):
        assert isinstance(error, ValueError)
        assert "2 unreadable images: b/cut.jpg, b/empty.png" in str(error)
    assert not Path(config.out).exists()

    config = change(config, on_bad_image="skip")
    for _ in range(2):  # the second time from the list that the first one left
        assert encode_in_threads(config, count) == [None] * count
        dataset = LatentDataset(config.out)
        assert dataset.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
        skipped = json.loads(Path(config.out, "skipped.json").read_text())
        assert [entry["path"] for entry in skipped] == ["b/cut.jpg", "b/empty.png"]
        Path(config.out, "shard_00001.safetensors").unlink()


def test_a_place_that_cannot_be_written_is_told_before_the_images_are_read(config, tmp_path, monkeypatch):
    monkeypatch.setattr("vcagen.data.encode.find_bad_images", None)
    (tmp_path / "file").touch()
    (error,) = encode_in_threads(change(config, out=str(tmp_path / "file" / "latents")), 1)
    assert "cannot be written" in str(error)


def test_a_damaged_list_of_skipped_files_is_named(config, tmp_path):
    config = change(config, images=broken(tmp_path / "broken"), on_bad_image="skip")
    assert encode_in_threads(config, 1) == [None]
    for text in ("", "[1]", '[{"p": 1}]'):
        Path(config.out, "skipped.json").write_text(text)
        (error,) = encode_in_threads(config, 1)
        assert "skipped.json: damaged" in str(error)


@pytest.mark.parametrize("inside", ["", "latents", "a/b"])
def test_shards_do_not_go_into_the_images(config, inside):
    (error,) = encode_in_threads(change(config, out=f"{config.images}/{inside}"), 1)
    assert "is inside the images" in str(error)


def test_junk_and_empty_classes(config, tmp_path):
    root = image_folder(tmp_path / "junk", {"dog": 1, "cat": 1, "eel": 0, "fox": 2, ".ipynb_checkpoints": 1})
    (root / "README.txt").write_text("junk")
    config = change(config, images=str(root))
    with pytest.raises(ValueError, match=": eel: class folder without images"):
        encode(config)
    encode(change(config, allow_empty_classes=True))
    dataset = LatentDataset(config.out)
    assert dataset.spec.class_names == ("cat", "dog", "eel", "fox")
    assert dataset.spec.num_classes == 4
    assert dataset.labels.tolist() == [0, 1, 3, 3]


def test_wrong_scale_writes_nothing(config, tmp_path):
    for factor in (0.05, 20.0):
        vae_path = tiny_vae(tmp_path / str(factor), scaling_factor=factor)
        with pytest.raises(ValueError, match=r"latents have std .* after scaling"):
            encode(change(config, vae=vae_path, shard_size=100))
    assert not Path(config.out).exists()


def test_latents_that_overflow_name_their_image(config, tmp_path):
    from diffusers import AutoencoderKL

    model = AutoencoderKL.from_pretrained(config.vae)
    torch.nn.init.constant_(model.quant_conv.bias, 1e5)  # beyond float16
    model.save_pretrained(tmp_path / "vae")
    with pytest.raises(ValueError, match=r"cat/000\.png: its latent is not finite in float16"):
        encode(change(config, vae=str(tmp_path / "vae")))


def test_image_size_must_fit_the_vae(config):
    with pytest.raises(ValueError, match=r"image_size: 36; the VAE .* takes multiples of 8"):
        encode(change(config, image_size=36))
    for field, value in {"batch": 0, "shard_size": 0, "image_size": 0, "num_workers": -1}.items():
        with pytest.raises(ValueError, match=f"^{field}: {value}; needs at least"):
            encode(change(config, **{field: value}))


def test_identity_and_digits_are_exact(config, tmp_path):
    digits = EncodeConfig(images="digits", out=str(tmp_path / "digits"), dtype="bfloat16", shard_size=1000)
    encode(digits)
    dataset = LatentDataset(digits.out)
    images, labels = load_digits()
    vae = LatentVAE.from_description(dataset.spec.vae)
    for mirror in (False, True):
        moments, got = dataset.__getitems__([(i, mirror) for i in range(1797)])
        assert torch.equal(got, labels)
        pixels = vae.decode(vae.sample(moments, torch.zeros(())))
        assert torch.equal(pixels, images.flip(-1) if mirror else images)
    encode(change(config, vae="identity"))
    assert LatentDataset(config.out)[0, True][0].shape == (3, 32, 32)


def test_dry_run_writes_nothing(config, capsys):
    encode(change(config, dry_run=True))
    text = capsys.readouterr().out
    assert "13 images of 3 classes" in text
    assert "3 shards, 6,656 bytes" in text
    assert "hours" in text
    assert not Path(config.out).exists()


def test_full_disk(config, monkeypatch):
    encode(config)
    before = contents(config.out)
    Path(config.out, "shard_00002.safetensors").unlink()
    del before["shard_00002.safetensors"]
    write_bytes = Path.write_bytes

    def full(path, data):
        write_bytes(path, data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device.*shard_00002"):
        encode(config)
    monkeypatch.undo()
    assert contents(config.out) == before


def command(config):
    return (
        "-m", "vcagen", "encode", config.images, "--out", config.out, "--vae", config.vae,
        "--image_size", 32, "--batch", config.batch, "--shard_size", config.shard_size,
    )  # fmt: skip


def test_command_line_reports_broken_files(config, tmp_path):
    line = user_error(*command(change(config, images=broken(tmp_path / "broken"))))
    assert "2 unreadable images: b/cut.jpg, b/empty.png" in line
    assert not Path(config.out).exists()


@pytest.mark.slow
def test_torchrun_equals_one_process(config, tmp_path):
    python(*command(config))
    two = change(config, out=str(tmp_path / "two"))
    _, error = torchrun(2, *command(two))
    assert "encoding" in error
    assert contents(two.out) == contents(config.out)
    Path(two.out, "shard_00000.safetensors").unlink()
    torchrun(2, *command(two))
    assert contents(two.out) == contents(config.out)


@pytest.mark.slow
def test_torchrun_with_broken_files(config, tmp_path):
    _, error = torchrun(2, *command(change(config, images=broken(tmp_path / "broken"))), code=1)
    assert "2 unreadable images: b/cut.jpg, b/empty.png" in error
    assert not Path(config.out).exists()


@pytest.mark.slow
def test_kill_at_ten_points(config, tmp_path):
    root = image_folder(tmp_path / "many", {"a": 60, "b": 60}, size=40)
    config = change(config, images=str(root), shard_size=8)
    start = time.monotonic()
    encode(config)
    seconds = time.monotonic() - start
    expected = contents(config.out)
    fork = multiprocessing.get_context("fork")
    interrupted = 0
    for trial in range(10):
        again = change(config, out=str(tmp_path / f"trial_{trial}"))
        child = fork.Process(target=encode, args=(again,))
        child.start()
        time.sleep(random.Random(trial).uniform(0.05, 0.95) * seconds)
        child.kill()
        child.join()
        done = len(list((tmp_path / f"trial_{trial}").glob("shard_*")))
        interrupted += 0 < done < len(expected)
        encode(again)
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
        assert 0 < len(left) < 10
        assert all(name.startswith("shard_") for name in left)
        for name in left:
            with safe_open(f"{config.out}/{name}", "pt") as shard:
                assert shard.get_tensor("moments").isfinite().all()
        elsewhere = change(config, out=str(tmp_path / "elsewhere"))
        encode(elsewhere)
        whole = contents(elsewhere.out)
        assert all(whole[name] == data for name, data in left.items())
    finally:
        subprocess.run(["umount", disk], check=True)
