"""LightningDiT's latent files: samples, not moments."""

import pickle
import shutil

import pytest
import tiny
import torch
from helpers import tiny_vae
from safetensors.torch import load_file, save_file

from vcagen.config.options import DataConfig, ImageConfig, VaeConfig
from vcagen.data.latents import open_dataset
from vcagen.sampling.load_run import load

torch.set_num_threads(1)
HALVES = ("latents", "latents_flip")


@pytest.fixture(scope="module")
def vae_path(tmp_path_factory):
    return tiny_vae(tmp_path_factory.mktemp("vae"))


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    """Two files of 6 and 4 latents whose channels have means and stds of their own, as extract_features writes them."""
    folder = tmp_path_factory.mktemp("latents")
    generator = torch.Generator().manual_seed(0)
    scale, shift = (
        torch.tensor([1.0, 20.0, 3.0, 0.1]).view(-1, 1, 1),
        torch.tensor([0.0, 50.0, -3.0, 1.0]).view(-1, 1, 1),
    )
    every = []
    for file, count in enumerate((6, 4)):
        halves = [torch.randn(count, 4, 4, 4, generator=generator) * scale + shift for _ in range(2)]
        labels = torch.arange(count) % 3
        every.append(halves[0])
        save_file(
            {"latents": halves[0], "latents_flip": halves[1], "labels": labels},
            folder / f"latents_rank00_shard{file:03d}.safetensors",
            metadata={"total_size": str(count), "dtype": "torch.float32", "device": "cpu"},
        )
    whole = torch.cat(every)
    statistics = {"mean": whole.mean((0, 2, 3), keepdim=True), "std": whole.std((0, 2, 3), keepdim=True)}
    torch.save(statistics, folder / "latents_stats.pt")
    return folder


def opened(folder, vae_path, **options):
    return open_dataset(DataConfig(path=str(folder)), VaeConfig(path=vae_path, **options))


def test_items_are_scaled_as_lightningdit_does(latents, vae_path, capsys):
    dataset, vae = opened(latents, vae_path)
    assert "note:" in capsys.readouterr().err
    stats = torch.load(latents / "latents_stats.pt")
    assert (len(dataset), dataset.labels.tolist()) == (10, [0, 1, 2, 0, 1, 2, 0, 1, 2, 0])
    assert (dataset.spec.class_names, dataset.spec.image_size) == (("0", "1", "2"), 32)
    files = [load_file(path) for path in sorted(latents.glob("*.safetensors"))]
    for index, mirror in [(0, False), (5, True), (6, False), (9, True)]:
        file, row = (files[0], index) if index < 6 else (files[1], index - 6)
        stored = file["latents_flip" if mirror else "latents"][row][None]
        items, _ = dataset.__getitems__([(index, mirror)])
        assert torch.equal(items, stored)
        scaled = vae.sample(items, torch.randn(1, 4, 4, 4))
        assert torch.allclose(scaled, (stored - stats["mean"]) / stats["std"], atol=1e-6)
    copy = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(copy[7, True][0], dataset[7, True][0])
    assert dataset.names()[6] == "latents_rank00_shard001.safetensors/0"
    assert opened(latents, vae_path, scaling_factor=2.0)[1].scale.factor == 2.0


def test_they_train_resume_and_sample(latents, vae_path, tmp_path):
    options = {"data__path": str(latents), "vae__path": vae_path, "data__num_workers": 0, "log__preview_every": 2}
    tiny.train(tmp_path / "whole", **options, train__steps=2)
    tiny.train(tmp_path / "parts", **options, train__steps=1)
    tiny.train(tmp_path / "parts", **options, train__steps=2)
    assert tiny.same_state(tiny.state(tmp_path / "whole", 2), tiny.state(tmp_path / "parts", 2))
    assert (tmp_path / "whole" / "previews" / "step_0000002.png").exists()
    assert load(tmp_path / "whole").vae.description()["latents_std"][1] == pytest.approx(20, rel=0.2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(latents, vae_path, tmp_path, dtype):
    folder = shutil.copytree(latents, tmp_path / "half")
    for path in folder.glob("*.safetensors"):
        save_file({k: v.to(dtype) if v.is_floating_point() else v for k, v in load_file(path).items()}, path)
    halved, dataset = opened(folder, vae_path)[0], opened(latents, vae_path)[0]
    assert torch.equal(halved[8, True][0], dataset[8, True][0].to(dtype))


def changed(latents, folder, change, file="latents_rank00_shard001.safetensors"):
    shutil.copytree(latents, folder)
    tensors = load_file(folder / file)
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / file)
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("labels"), r"shard001\.safetensors: no labels; LightningDiT's latents hold"),
        (lambda t: t.pop("latents_flip"), r"shard001\.safetensors: no latents_flip"),
        (lambda t: t.update(latents_flip=t["latents_flip"][:2]), r"latents_flip \(2, 4, 4, 4\) are not as latents"),
        (lambda t: t.update(labels=t["labels"][:2]), r"labels torch\.int64 \(2,\); needs 0, 1, \.\.\."),
        (lambda t: t.update(labels=t["labels"] - 1), "labels .*; needs 0, 1"),
        (lambda t: t.update(latents=t["latents"].long()), r"latents are torch\.int64"),
        (lambda t: t.update({k: t[k][:, :3] for k in HALVES}), r"different latents: \[\(3, 4, 4\)"),
        (lambda t: t.update({k: t[k].half() for k in HALVES}), r"'torch\.float16', 'torch\.float32'"),
        (lambda t: t["latents_flip"][2].fill_(torch.nan), r"shard001\.safetensors: item 2: NaN .* of the mirror image"),
    ],
)  # fmt: skip
def test_other_files_are_refused(latents, vae_path, tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        opened(changed(latents, tmp_path / "other", change), vae_path)


def test_foreign_latents_are_refused(latents, vae_path, tmp_path):
    with pytest.raises(ValueError, match=r"vae\.path: .* does not name the VAE of its latents"):
        opened(latents, None)
    with pytest.raises(ValueError, match=r"latents_stats\.pt: latents_mean: .*needs 16 numbers"):
        opened(latents, tiny_vae(tmp_path / "sixteen", latent_channels=16))
    bare = shutil.copytree(latents, tmp_path / "bare")
    (bare / "latents_stats.pt").unlink()
    with pytest.raises(ValueError, match=r"latents of 4 x 4 x 4; the VAE .* makes 16 channels of square images"):
        opened(bare, tiny_vae(tmp_path / "again", latent_channels=16))
    with pytest.raises(ValueError, match=r"latents have std .*--vae\.scaling_factor"):
        opened(bare, tiny_vae(tmp_path / "unscaled", scaling_factor=5.0))
    with pytest.raises(ValueError, match=r"image_size: 64; .* was made with 32"):
        open_dataset(DataConfig(path=str(latents), images=ImageConfig(image_size=64)), VaeConfig(path=vae_path))
    file = max(bare.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"shard001\.safetensors: damaged"):
        opened(bare, vae_path)
