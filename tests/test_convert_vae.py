"""convert-vae: VA-VAE's names and shapes in diffusers, against stored answers of LightningDiT's own code."""

import pytest
import torch
from helpers import close, reference, u
from safetensors.torch import save_file

from vcagen.__main__ import do
from vcagen.config.job_options import ConvertVaeConfig
from vcagen.data.vae import LatentVAE
from vcagen.jobs.convert_vae import run

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def stored():
    return reference("vavae")


@pytest.fixture
def weights(stored):
    """Those of the stored answers: 0.1 u, and 1 more for the weights of norms."""
    shapes = stored["shapes"]
    return {
        name: 0.1 * u(tuple(shapes[name]), k) + ("norm" in name and name.endswith("weight") and len(shapes[name]) == 1)
        for k, name in enumerate(sorted(shapes), start=1)
    }


def stats(path, channels=4):
    mean, std = torch.linspace(-1, 1, channels).view(1, -1, 1, 1), torch.linspace(1, 2, channels).view(1, -1, 1, 1)
    torch.save({"mean": mean, "std": std}, path)
    return str(path)


@pytest.mark.parametrize("kind", ["bare", "training", "pipeline", "safetensors"])
def test_it_equals_the_code_it_comes_from(tmp_path, weights, stored, kind, capsys):
    from diffusers import AutoencoderKL

    source = tmp_path / "vae.pt"
    if kind == "safetensors":
        save_file({name: value.contiguous() for name, value in weights.items()}, source)
    else:
        prefix = "first_stage_model." if kind == "pipeline" else ""
        saved = {prefix + name: value for name, value in weights.items()}
        saved |= {"loss.discriminator.bn.num_batches_tracked": torch.tensor(3), "model_ema.decay": torch.ones(1)}
        torch.save(saved if kind == "bare" else {"state_dict": saved, "epoch": 3}, source)
    do("convert-vae", [str(source), "--out", str(tmp_path / "vae"), "--stats", stats(tmp_path / "s.pt")], prog="x")
    assert "4 latent channels, downsampling by 4" in capsys.readouterr().err
    vae = AutoencoderKL.from_pretrained(tmp_path / "vae")
    assert vae.state_dict()["decoder.conv_in.weight"].equal(weights["decoder.conv_in.weight"].float())
    x, z = u((1, 3, 16, 16), 1000).float(), u((1, 4, 4, 4), 1001).float()
    with torch.no_grad():
        close(vae.decode(z).sample, stored["decoded"], 1e-5)
        close(vae.encode(x).latent_dist.parameters, stored["moments"], 1e-5)
    latents = LatentVAE(str(tmp_path / "vae")).sample(z, torch.zeros(z.shape))  # z counts as sampled already
    mean, std = (torch.linspace(*ends, 4).view(-1, 1, 1) for ends in ((-1, 1), (1, 2)))
    assert torch.allclose(latents, (z - mean) / std, atol=1e-6)  # LightningDiT's formula


def test_without_a_scale_it_says_so(tmp_path, weights, capsys):
    torch.save(weights, tmp_path / "vae.pt")
    run(ConvertVaeConfig(str(tmp_path / "vae.pt"), str(tmp_path / "vae")))
    assert "note: neither --stats nor --scaling_factor" in capsys.readouterr().err
    assert LatentVAE(str(tmp_path / "vae")).description()["latents_mean"] is None


def changed(weights, change):
    copy = dict(weights)
    change(copy)
    return copy


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("encoder.mid.block_1.conv1.weight"), "encoder.mid_block.resnets.0.conv1.weight do not fit"),
        (lambda w: w.update({"decoder.extra.weight": torch.ones(1)}), "decoder.extra.weight do not fit"),
        (lambda w: w.update({"quant_conv.weight": torch.ones(4, 8, 1, 1)}), "quant_conv.weight do not fit"),
        (lambda w: w.pop("decoder.conv_in.weight"), "decoder.conv_in.weight"),
        (lambda w: w.pop("encoder.conv_in.weight"), "there: none"),
        (lambda w: w.update({"other.encoder.conv_in.weight": torch.ones(1)}), "there: other., the file itself"),
        (dict.clear, "there: none"),
    ],
)
def test_another_file_is_refused(tmp_path, weights, change, words):
    torch.save(changed(weights, change), tmp_path / "vae.pt")
    with pytest.raises(ValueError, match=rf"vae\.pt: .*{words}"):
        run(ConvertVaeConfig(str(tmp_path / "vae.pt"), str(tmp_path / "vae")))
    assert not (tmp_path / "vae").exists()


def test_other_statistics_and_an_existing_folder_are_refused(tmp_path, weights):
    torch.save(weights, source := tmp_path / "vae.pt")
    out = str(tmp_path / "vae")
    with pytest.raises(ValueError, match=r"s\.pt: latents_mean: .*needs 4 numbers, one a channel"):
        run(ConvertVaeConfig(str(source), out, stats=stats(tmp_path / "s.pt", channels=8)))
    with pytest.raises(ValueError, match=r"vae\.pt: damaged \(KeyError"):
        run(ConvertVaeConfig(str(source), out, stats=str(source)))
    assert not (tmp_path / "vae").exists()
    (tmp_path / "vae").mkdir()
    with pytest.raises(ValueError, match="exists; choose another folder"):
        run(ConvertVaeConfig(str(source), out))
