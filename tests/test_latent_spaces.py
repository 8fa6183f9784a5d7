"""Latent spaces of many VAEs: their scale as diffusers applies it, their folders as people have them."""

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from helpers import image_folder, tiny_vae
from safetensors.torch import load_file, save_file

from vcagen.config.job_options import EncodeConfig
from vcagen.config.options import DataConfig, VaeConfig
from vcagen.data.encode import run
from vcagen.data.images import to_uint8
from vcagen.data.latents import LatentDataset, open_dataset
from vcagen.data.vae import LatentVAE
from vcagen.networks.dit import DIT_SIZES, parse_size
from vcagen.sampling.load_run import load

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), {"cat": 4, "dog": 4})


@pytest.fixture(scope="module")
def vae_path(tmp_path_factory):
    return tiny_vae(tmp_path_factory.mktemp("vae"))


def with_config(vae_path, folder, **values):
    """A copy of a VAE with other values in its config.json."""
    shutil.copytree(vae_path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return str(folder)


def measured(vae_path):
    """latents_mean and latents_std of a VAE on noise images, as a config.json has them."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(vae_path)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        z = vae.encode(torch.rand(8, 3, 32, 32, generator=generator) * 2 - 1).latent_dist.sample(generator)
    return {"latents_mean": z.mean((0, 2, 3)).tolist(), "latents_std": z.std((0, 2, 3)).tolist(), "scaling_factor": 1.0}


def diffusers_round_trip(path, x, noise):
    """Latents and decoded images as the pipelines of diffusers make them (SDXL's lines where there is a mean)."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(path)
    c = vae.config
    with torch.no_grad():
        posterior = vae.encode(x).latent_dist
        z = posterior.mean + posterior.std * noise
        if c.latents_mean is not None and c.latents_std is not None:
            mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (c.latents_mean, c.latents_std))
            latents = (z - mean) * c.scaling_factor / std
            back = latents * std / c.scaling_factor + mean
        else:
            latents = (z - (c.shift_factor or 0)) * c.scaling_factor
            back = latents / c.scaling_factor + (c.shift_factor or 0)
        return latents, to_uint8(vae.decode(back).sample)


@pytest.mark.parametrize("channels", [4, 16, 32])
@pytest.mark.parametrize("kind", ["mean and std", "shift"])
def test_encode_and_decode_are_those_of_diffusers(tmp_path, channels, kind):
    shift = 0.1 if kind == "shift" else None
    path = tiny_vae(tmp_path / "plain", shift_factor=shift, latent_channels=channels)
    if kind == "mean and std":
        path = with_config(path, tmp_path / "vae", **{**measured(path), "scaling_factor": 0.8})
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, 3, 32, 32, generator=generator) * 2 - 1
    noise = torch.randn(2, channels, 4, 4, generator=generator)
    latents, decoded = diffusers_round_trip(path, x, noise)
    vae = LatentVAE(path)
    assert vae.channels == channels
    assert torch.equal(vae.sample(vae.moments(x), noise), latents)
    assert torch.equal(vae.decode(latents), decoded)
    rebuilt = LatentVAE.from_description(json.loads(json.dumps(vae.description())))
    assert torch.equal(rebuilt.decode(latents), decoded)
    assert rebuilt.description() == vae.description()


def test_shards_with_a_mean_and_std_a_channel_train_and_sample(tmp_path, images, vae_path):
    path = with_config(vae_path, tmp_path / "vae", **measured(vae_path))
    run(EncodeConfig(images=str(images), out=str(tmp_path / "latents"), vae=path, image_size=32, num_workers=0))
    dataset = LatentDataset(tmp_path / "latents")
    moments, _ = dataset.__getitems__([(i % 8, False) for i in range(400)])
    vae = LatentVAE.from_description(dataset.spec.vae)
    noise = torch.randn(400, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    assert vae.sample(moments, noise).std().item() == pytest.approx(dataset.latent_std, rel=0.02)
    tiny.train(tmp_path / "run", data__path=str(tmp_path / "latents"), train__steps=1)
    trained = load(tmp_path / "run")
    assert trained.vae.description() == dataset.spec.vae
    assert trained.sample([0, 1], num_steps=2, sampler="ode", method="euler")[0].size == (32, 32)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"latents_mean": [0.0] * 4}, "latents_mean is there without the other"),
        ({"latents_std": [1.0] * 4}, "latents_std is there without the other"),
        ({"latents_mean": [0.0] * 3, "latents_std": [1.0] * 4}, "latents_mean: .*needs 4 numbers"),
        ({"latents_mean": [0.0] * 4, "latents_std": [1.0, 1.0, 1.0, 0.0]}, "latents_std: 0.0; needs positive"),
        ({"latents_mean": [0.0] * 4, "latents_std": [1.0, 1.0, 1.0, "1"]}, "latents_std: .*needs 4 numbers"),
        ({"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4, "shift_factor": 0.5}, "latents_mean shifts already"),
        ({"scaling_factor": 0.0}, "scaling_factor: 0.0; needs a positive number"),
        ({"scaling_factor": float("nan")}, "scaling_factor: nan; needs a positive number"),
        ({"shift_factor": "x"}, "shift_factor: x; needs a number"),
        ({"out_channels": 6}, "images of 3 channels to images of 6"),
        ({"_class_name": "AsymmetricAutoencoderKL"}, "an AsymmetricAutoencoderKL; an AutoencoderKL is needed"),
    ],
)  # fmt: skip
def test_a_config_that_says_no_clear_scale_is_refused(tmp_path, vae_path, values, words):
    with pytest.raises(ValueError, match=f"this VAE cannot be loaded .*{words}"):
        LatentVAE(with_config(vae_path, tmp_path / "vae", **values))


def test_a_given_factor_goes_with_the_channels_and_a_given_shift_does_not(tmp_path, vae_path):
    path = with_config(vae_path, tmp_path / "vae", **measured(vae_path))
    z = torch.randn(1, 8, 2, 2, generator=torch.Generator().manual_seed(0))
    plain, double = (LatentVAE(path, scaling_factor=factor).sample(z, torch.zeros(1)) for factor in (None, 2.0))
    assert torch.equal(double, 2 * plain)
    with pytest.raises(ValueError, match=r"shift_factor: 0\.5; latents_mean shifts already"):
        LatentVAE(path, shift_factor=0.5)


def test_the_factor_that_is_named_is_right(tmp_path, images, vae_path):
    config = {"images": str(images), "vae": vae_path, "image_size": 32, "num_workers": 0}
    with pytest.raises(ValueError, match=r"latents have std .*--scaling_factor") as error:
        run(EncodeConfig(**config, out=str(tmp_path / "wrong"), scaling_factor=100.0))
    assert not (tmp_path / "wrong").exists()
    factor = float(str(error.value).split("--scaling_factor ")[1].split()[0])
    run(EncodeConfig(**config, out=str(tmp_path / "right"), scaling_factor=factor))
    assert LatentDataset(tmp_path / "right").latent_std == pytest.approx(1, abs=0.02)


# folders as people have them


def test_weights_under_the_name_of_a_variant(tmp_path, vae_path, capfd):
    weights = Path(vae_path, "diffusion_pytorch_model.safetensors")
    half = Path(shutil.copytree(vae_path, tmp_path / "half"))
    (half / weights.name).unlink()
    values = {name: value.half() for name, value in load_file(weights).items()}
    save_file(values, half / "diffusion_pytorch_model.fp16.safetensors", metadata={"format": "pt"})
    x = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    rounded, exact = LatentVAE(str(half)).moments(x), LatentVAE(vae_path).moments(x)
    assert 0 < (rounded - exact).abs().max() < 0.01
    save_file(values, half / "diffusion_pytorch_model.bf16.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"several variants \(bf16, fp16\)"):
        LatentVAE(str(half)).verify()
    assert capfd.readouterr() == ("", "")  # nothing of diffusers' own


@pytest.mark.parametrize(("change", "words"), [("less", "its weights lack quant_conv.bias"),
                                               ("more", "its weights also have extra.bias")])  # fmt: skip
def test_weights_that_are_not_those_of_the_config(tmp_path, vae_path, change, words):
    folder = Path(shutil.copytree(vae_path, tmp_path / "vae"))
    values = load_file(folder / "diffusion_pytorch_model.safetensors")
    if change == "less":
        del values["quant_conv.bias"]
    else:
        values["extra.bias"] = torch.zeros(1)
    save_file(values, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"this VAE cannot be loaded .*{words}, unlike its config.json"):
        LatentVAE(str(folder)).verify()


def test_attention_under_its_old_names(tmp_path, vae_path):
    """As in the files of Stable Diffusion, which are older than the names of today."""
    folder = Path(shutil.copytree(vae_path, tmp_path / "vae"))
    file = folder / "diffusion_pytorch_model.safetensors"
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def rename(name):
        for new, word in old.items():
            name = name.replace(f"attentions.0.{new}.", f"attentions.0.{word}.")
        return name

    values = {rename(name): value for name, value in load_file(file).items()}
    assert any("proj_attn" in name for name in values)
    save_file(values, file, metadata={"format": "pt"})
    assert LatentVAE(str(folder)).description()["sha256"] == LatentVAE(vae_path).description()["sha256"]


def test_a_whole_pipeline_a_home_and_a_file(tmp_path, vae_path, monkeypatch):
    pipeline = tmp_path / "pipeline"
    shutil.copytree(vae_path, pipeline / "vae")
    (pipeline / "model_index.json").write_text("{}")
    assert LatentVAE(str(pipeline)).path == str(pipeline / "vae")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert LatentVAE("~/pipeline/vae/").path == str(pipeline / "vae")
    file = pipeline / "vae" / "diffusion_pytorch_model.safetensors"
    with pytest.raises(ValueError, match=r"a file, not a folder\); vcagen convert-vae .* makes a folder of it"):
        LatentVAE(str(file))


def test_a_relative_path_is_found_from_elsewhere(tmp_path, images, vae_path, monkeypatch):
    project = tmp_path / "project"
    shutil.copytree(vae_path, project / "vae")
    monkeypatch.chdir(project)
    run(EncodeConfig(images=str(images), out="data/latents", vae="vae", image_size=32, num_workers=0))
    tiny.train(Path("runs/a"), data__path="data/latents", train__steps=1)
    moved = project.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    assert load("moved/runs/a").vae.path == str(moved / "vae")
    assert open_dataset(DataConfig(path="moved/data/latents"), VaeConfig())[1].path == str(moved / "vae")
    assert len(load("moved/runs/a").sample([0], num_steps=1, sampler="ode", method="euler")) == 1
    shutil.rmtree(moved / "vae")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"^vae: this VAE cannot be loaded .*a relative path counts from the working"):
        load("moved/runs/a").vae.verify()


def test_encoding_goes_on_where_the_vae_has_moved(tmp_path, images, vae_path, capsys):
    config = {"images": str(images), "out": str(tmp_path / "latents"), "image_size": 32, "num_workers": 0}
    run(EncodeConfig(**config, vae=vae_path))
    moved = shutil.copytree(vae_path, tmp_path / "moved")
    run(EncodeConfig(**config, vae=str(moved)))
    assert "1 shards done" in capsys.readouterr().err


# names of sizes


@pytest.mark.parametrize("name", DIT_SIZES)
@pytest.mark.parametrize("patch", [1, 2, 4, 8])
def test_sizes_by_name(name, patch):
    assert parse_size(f"{name}/{patch}") == {**DIT_SIZES[name], "patch_size": patch}
