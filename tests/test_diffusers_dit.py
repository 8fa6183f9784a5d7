"""diffusers' DiT: its weights give the public code's network, bit for bit; what is not one is refused."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import close, reference, reference_network, tiny_vae, u
from safetensors.torch import load_file, save_file

import vcagen
from vcagen.__main__ import do, main
from vcagen.jobs.inspect import describe
from vcagen.networks.diffusers_dit import from_diffusers

diffusers = pytest.importorskip("diffusers")
BLOCK = {"adaLN_modulation.1": "norm1.linear", "attn.proj": "attn1.to_out.0", "mlp.fc1": "ff.net.0.proj",
         "mlp.fc2": "ff.net.2"}  # fmt: skip
SHARED = {"t_embedder.mlp.0": "timestep_embedder.linear_1", "t_embedder.mlp.2": "timestep_embedder.linear_2",
          "y_embedder": "class_embedder"}  # fmt: skip
OUTSIDE = {
    "x_embedder": "pos_embed",
    "final_layer.adaLN_modulation.1": "proj_out_1",
    "final_layer.linear": "proj_out_2",
}


def to_diffusers(state):
    """Weights of the public code under the names of diffusers."""
    depth = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
    theirs = {}
    for name, value in state.items():
        if match := re.fullmatch(r"(blocks\.\d+)\.attn\.qkv\.(\w+)", name):
            for letter, part in zip("qkv", value.chunk(3), strict=True):
                theirs[f"transformer_{match[1]}.attn1.to_{letter}.{match[2]}"] = part.clone()
        elif match := re.fullmatch(r"(blocks\.\d+)\.(.+)\.(\w+)", name):
            theirs[f"transformer_{match[1]}.{BLOCK[match[2]]}.{match[3]}"] = value
        elif found := next((name.replace(a, b) for a, b in SHARED.items() if name.startswith(a)), None):
            theirs |= {f"transformer_blocks.{i}.norm1.emb.{found}": value.clone() for i in range(depth)}
        elif name != "pos_embed":
            theirs[next(name.replace(a, b) for a, b in OUTSIDE.items() if name.startswith(a))] = value
    return theirs


def transformer(**options):
    """A random network of diffusers that computes as the public code does: its frequencies are repaired."""
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 8, "num_layers": 2,
             "sample_size": 8, "num_embeds_ada_norm": 3, "norm_eps": 1e-6}  # fmt: skip
    network = diffusers.DiTTransformer2DModel(**{**sizes, **options}).eval()
    for name, value in network.state_dict().items():
        value.copy_(0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name))))
        if ".norm1.emb." in name:
            value.copy_(network.state_dict()[re.sub(r"blocks\.\d+", "blocks.0", name)])
    for block in network.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    return network


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """A DiTPipeline of cats, dogs and eels, saved by diffusers, and its network."""
    folder = tmp_path_factory.mktemp("pipeline")
    tiny_vae(folder / "made")
    scheduler = diffusers.DDIMScheduler(1000, beta_start=1e-4, beta_end=0.02, beta_schedule="linear")
    network = transformer()
    vae = diffusers.AutoencoderKL.from_pretrained(folder / "made")
    diffusers.DiTPipeline(network, vae, scheduler).save_pretrained(folder / "saved")
    index = json.loads((folder / "saved" / "model_index.json").read_text())
    names = {"0": "cat, Felis catus", "1": "dog", "2": "eel"}  # diffusers reads them but does not write them
    (folder / "saved" / "model_index.json").write_text(json.dumps({**index, "id2label": names}))
    return folder / "saved", network


def edited(pipeline, folder, file, **changes):
    """A copy of the pipeline with other entries in one of its JSON files."""
    shutil.copytree(pipeline[0], folder)
    values = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps(values))
    return folder


def test_the_public_codes_answers_from_diffusers_files(tmp_path):
    """Stored outputs of facebookresearch/DiT, from its weights in diffusers' names."""
    ours, stored = reference_network(), reference("dit")
    again = vcagen.DiT(**stored["config"], out_channels=8).double().eval()
    again.load_state_dict({**from_diffusers(to_diffusers(ours.state_dict())), "pos_embed": ours.pos_embed})
    assert all(value.equal(ours.state_dict()[name]) for name, value in again.state_dict().items())
    case = stored["dit_forward"]
    output = again(u((2, 4, 8, 8), case["x_k"]), torch.tensor(case["t"]), torch.tensor(case["y"]))
    close(output, case["output"])


def test_a_pipeline_is_a_run(pipeline, tmp_path, capsys):
    folder, theirs = pipeline
    run = vcagen.load(folder)
    x, t, y = u((3, 4, 8, 8), 1).float(), torch.tensor([1, 500, 999]), torch.tensor([0, 2, 3])
    with torch.no_grad():
        assert run.network(x, t, y).equal(theirs(x, t, y).sample)
    assert (run.config.process.name, run.process.num_timesteps) == ("diffusion", 1000)
    assert (run.null_label, run.data.class_names) == (3, ("cat, Felis catus", "dog", "eel"))
    assert run.vae.path == str(folder / "vae")
    assert "time frequencies are i / 128" in run.notes[1]
    images = run.sample(["Felis catus", "dog", 2], num_steps=2, cfg_scale=2.0, batch=3, output="tensor")
    assert images.shape == (3, 3, 64, 64)
    args = ["--checkpoint", str(folder), "--out", str(tmp_path), "--num_images", "3", "--batch", "3"]
    do("sample", [*args, "--num_steps", "2", "--cfg_scale", "2", "--labels", "cat,dog,2"], prog="sample.py")
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == [f"{i:06d}.png" for i in range(3)]
    main(["inspect", str(folder)])
    shown = capsys.readouterr().out
    assert "diffusers DiT" in shown
    assert "diffusion, by prediction epsilon" in shown


def test_parts_of_a_pipeline_are_read_alone(pipeline, tmp_path):
    whole = vcagen.load(pipeline[0]).network.state_dict()
    options = {"vae": str(pipeline[0] / "vae")}
    file = pipeline[0] / "transformer" / "diffusion_pytorch_model.safetensors"
    for source in (pipeline[0] / "transformer", file):
        alone = vcagen.load(source, **options)
        assert all(value.equal(whole[name]) for name, value in alone.network.state_dict().items())
    assert describe(file)["process"].startswith("diffusion")
    assert vcagen.load(file, **options).weights_sha256 == vcagen.load(pipeline[0]).weights_sha256
    other = tmp_path / "bin"
    shutil.copytree(pipeline[0] / "transformer", other)
    torch.save(load_file(other / file.name), other / "diffusion_pytorch_model.bin")
    (other / file.name).unlink()
    assert vcagen.load(other, **options).network.state_dict()["pos_embed"].equal(whole["pos_embed"])
    pipeline[1].save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    shards = vcagen.load(tmp_path / "shards", **options)
    assert all(value.equal(whole[name]) for name, value in shards.network.state_dict().items())
    pipeline[1].save_pretrained(tmp_path / "half", variant="fp16")
    assert vcagen.load(tmp_path / "half", **options).data.num_classes == 3


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (
            "model_index.json",
            {"_class_name": "StableDiffusionPipeline"},
            "a StableDiffusionPipeline of diffusers",
        ),
        ("transformer/config.json", {"_class_name": "UNet2DModel"}, "transformer: a UNet2DModel; diffusers' DiTTransf"),
        ("transformer/config.json", {"activation_fn": "gelu"}, "activation_fn gelu, which is not sampled"),
        ("transformer/config.json", {"norm_type": "ada_norm"}, "norm_type ada_norm"),
        ("transformer/config.json", {"num_attention_heads": 4}, "say hidden_size 32, its shapes say 16"),
        ("transformer/config.json", {"num_layers": 28}, "say depth 28, its shapes say 2"),
        ("transformer/config.json", {"num_embeds_ada_norm": 1000}, "num_classes 1000, its label table has 4 rows"),
        ("scheduler/scheduler_config.json", {"beta_schedule": "scaled_linear"}, "noise_schedule scaled_linear"),
        ("scheduler/scheduler_config.json", {"beta_end": 0.012}, "beta_end 0.012"),
        ("scheduler/scheduler_config.json", {"prediction_type": "v_prediction"}, "prediction v_prediction"),
    ],
)
def test_other_pipelines_and_networks_are_refused(pipeline, tmp_path, file, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        vcagen.load(edited(pipeline, tmp_path / "p", file, **changes))
    assert "\n" not in str(error.value)


def test_a_flow_scheduler_is_refused(pipeline, tmp_path):
    folder = edited(pipeline, tmp_path / "p", "model_index.json")
    (folder / "scheduler" / "scheduler_config.json").write_text('{"_class_name": "FlowMatchEulerDiscreteScheduler"}')
    with pytest.raises(ValueError, match="a FlowMatchEulerDiscreteScheduler; a scheduler of linear betas is needed"):
        vcagen.load(folder)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "transformer_blocks.1.norm1.emb.class_embedder.embedding_table.weight",
            torch.zeros(4, 16),
            "differs from tra",
        ),
        (
            "transformer_blocks.1.norm1.emb.timestep_embedder.linear_2.bias",
            torch.ones(16),
            "differs from transformer_b",
        ),
        (
            "transformer_blocks.1.norm1.emb.timestep_embedder.linear_2.bias",
            None,
            "missing: t_embedder.mlp.2.bias of bl",
        ),
        ("transformer_blocks.1.attn1.to_v.weight", None, "missing: v of blocks.1.attn.qkv.weight"),
        ("transformer_blocks.1.attn1.to_out.0.bias", None, r"blocks\.1\.attn\.proj\.bias missing"),
        ("transformer_blocks.0.attn2.to_q.weight", torch.zeros(2), "attn2.to_q.weight: no part of diffusers' DiT"),
    ],
)
def test_unequal_copies_and_missing_parts_are_refused(pipeline, tmp_path, name, value, message):
    folder = edited(pipeline, tmp_path / "p", "model_index.json")
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    state = load_file(file)
    state.pop(name, None)
    save_file({**state, **({} if value is None else {name: value})}, file)
    with pytest.raises(ValueError, match=message):
        vcagen.load(folder)


@pytest.mark.parametrize(
    "part", ["transformer/config.json", "transformer/diffusion_pytorch_model.safetensors",
             "scheduler/scheduler_config.json"],
)  # fmt: skip
def test_a_part_that_is_not_there_is_named(pipeline, tmp_path, part):
    folder = edited(pipeline, tmp_path / "p", "model_index.json")
    (folder / part).unlink()
    with pytest.raises(ValueError, match=Path(part).name.split(".")[0]):
        vcagen.load(folder)


def test_the_mapping_is_close_to_nothing_but_itself():
    """Sanity of the yardstick: with diffusers' own frequencies the outputs differ."""
    network = transformer()
    x, t, y = u((2, 4, 8, 8), 1).float(), torch.tensor([300, 999]), torch.tensor([0, 3])
    with torch.no_grad():
        right = network(x, t, y).sample
        for block in network.transformer_blocks:
            block.norm1.emb.time_proj.downscale_freq_shift = 1
        with pytest.raises(AssertionError):
            close(network(x, t, y).sample, right, 1e-3)
