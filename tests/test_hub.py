"""The Hub, without a network: what has been downloaded is taken, and the rest is refused at once."""

import shutil
import socket
import time

import diffusers
import huggingface_hub
import pytest
import tiny
import torch
from helpers import tiny_vae
from safetensors.torch import load_file

import vcagen
from vcagen.__main__ import do
from vcagen.data.vae import LatentVAE
from vcagen.system import hub


@pytest.fixture
def fake_hub(tmp_path, monkeypatch):
    """A folder whose folders user/name are the repositories of the Hub; the files asked for are kept in `.asked`."""
    root = tmp_path / "hub"

    def snapshot_download(name, *, allow_patterns):
        if not (root / name).is_dir():
            raise OSError(f"401 Client Error. (Request ID: 1)\n\nRepository Not Found for url: https://hub/{name}.")
        for file in (root / name).rglob("*"):
            if file.is_file() and any(file.match(pattern) for pattern in allow_patterns):
                there = tmp_path / "cache" / file.relative_to(root)
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, there)
        return str(tmp_path / "cache" / name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return root


def test_a_vae_of_the_hub_is_the_folder_of_its_files(fake_hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tiny_vae(fake_hub / "user" / "vae")
    vae = LatentVAE("user/vae")
    assert [file.name for file in (tmp_path / "cache" / "user" / "vae").iterdir()] == ["config.json"]
    assert vae.description() == {**LatentVAE(folder).description(), "path": "user/vae"}
    with pytest.raises(
        ValueError, match=r"^user/no: this VAE cannot be loaded \(user/no: .*Repository Not Found for url"
    ):
        LatentVAE("user/no")


def test_what_is_not_on_the_hub_is_not_looked_for_there(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "download", lambda *_: pytest.fail("asked the Hub"))
    monkeypatch.setattr("vcagen.data.vae.download", lambda *_: pytest.fail("asked the Hub"))
    for path in ("./no/where", str(tmp_path / "no"), "a/b/c", "../x"):
        with pytest.raises(ValueError, match=r"this VAE cannot be loaded \(no such folder\)"):
            LatentVAE(path)


def test_no_network_is_one_line_without_retries(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits {seconds} s for the Hub"))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="user/vae: not on this machine; the Hub says: ") as error:
        hub.download("user/vae", "*.json")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="user/vae: this VAE cannot be loaded"):
        LatentVAE("user/vae")


def test_weights_of_the_hub(fake_hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.train(tmp_path / "run")
    repository = fake_hub / "user" / "digits"
    repository.mkdir(parents=True)
    do(
        "export",
        [str(tmp_path / "run"), "--out", str(repository / "model.safetensors")],
        prog="vcagen export",
    )
    ours, here = vcagen.load("user/digits"), vcagen.load(tmp_path / "run")
    assert all(value.equal(here.network.state_dict()[name]) for name, value in ours.network.state_dict().items())
    assert ours.step == 6
    with pytest.raises(ValueError, match="step: user/digits is no run folder"):
        vcagen.load("user/digits", step=6)
    with pytest.raises(ValueError, match=r"user/nothing: not on this machine; the Hub says: .*Not Found"):
        vcagen.load("user/nothing")
    (repository / "more.safetensors").touch()
    with pytest.raises(ValueError, match=r"user/digits: model\.safetensors, more\.safetensors; a run folder of"):
        vcagen.load("user/digits")


def test_a_dit_of_diffusers_on_the_hub_has_bin_files(fake_hub, tmp_path, monkeypatch):
    """As facebook/DiT-XL-2-256: the VAE has safetensors, the network only a .bin file."""
    monkeypatch.chdir(tmp_path)
    repository = fake_hub / "user" / "DiT"
    scheduler = diffusers.DDIMScheduler(1000, beta_start=1e-4, beta_end=0.02, beta_schedule="linear")
    network = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, out_channels=8, num_layers=1, sample_size=8, num_embeds_ada_norm=3
    )
    vae = diffusers.AutoencoderKL.from_pretrained(tiny_vae(tmp_path / "vae"))
    diffusers.DiTPipeline(network, vae, scheduler).save_pretrained(repository)
    expected = vcagen.load(repository)
    file = repository / "transformer" / "diffusion_pytorch_model.safetensors"
    torch.save(load_file(file), file.with_suffix(".bin"))
    file.unlink()
    run = vcagen.load("user/DiT")
    assert all(value.equal(expected.network.state_dict()[name]) for name, value in run.network.state_dict().items())
    assert run.vae.path == str(tmp_path / "cache/user/DiT/vae")
    assert run.vae.description()["sha256"] == expected.vae.description()["sha256"]
    do(
        "sample",
        ["--checkpoint", "user/DiT", "--num_images", "2", "--num_steps", "2", "--batch", "2"],
        prog="sample.py",
    )
    (out,) = (tmp_path / "samples").iterdir()
    assert out.name == "DiT_ddpm_2_cfg1.0_seed0_n2"
