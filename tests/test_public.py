"""Weights files of others: what one says about itself is believed where it agrees, and refused where it does not."""

from argparse import Namespace

import pytest
import tiny
import torch
from helpers import tiny_vae, user_error
from safetensors.torch import save_file

import vcagen
from vcagen.__main__ import do, main
from vcagen.networks.dit import DiT
from vcagen.networks.public import identify
from vcagen.networks.weights import read_weights

SMALL = {"input_size": 8, "patch_size": 2, "in_channels": 3, "out_channels": 6, "hidden_size": 16, "depth": 2,
         "num_heads": 4, "num_classes": 3}  # fmt: skip
HEADS = {"num_heads": 4}


def state(seed=0, **options):
    model = DiT(**{**SMALL, **options})
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: 0.1 * torch.randn(value.shape, generator=generator) for name, value in model.state_dict().items()}
    return {**drawn, "pos_embed": model.state_dict()["pos_embed"]}


def public(path, args=None, *, weights=None, **content):
    """A file as the public training scripts write it."""
    torch.save({"ema": weights or state(), **({"args": Namespace(**args)} if args else {}), **content}, path)
    return path


def load(path, **options):
    return vcagen.load(path, vae="identity", **options)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("SiT.pt", {"path_type": "GVP", "prediction": "noise"}, "path_type GVP, prediction noise, which is not samp"),
        ("x.pt", {"path_type": "VP"}, "path_type VP"),
        ("SiT.pt", {"path_type": "Linear", "prediction": "score"}, "prediction score"),
        ("x.pt", {"path_type": "Linear", "prediction": "noise"}, r"path_type Linear \(flow\), prediction noise \(diff"),
        ("DiT.pt", {"prediction": "velocity"}, r"prediction velocity \(flow\), the dit in its name \(diffusion\)"),
        ("DiT.pt", {"model": "LightningDiT-XL/1"}, "model LightningDiT-XL/1; a DiT or SiT is needed"),
        ("DiT.pt", {"predict_xstart": True}, "predict_xstart True"),
        ("DiT.pt", {"noise_schedule": "cosine"}, "noise_schedule cosine"),
        ("DiT.pt", {"qk_norm": True}, "qk_norm True"),
        ("DiT.pt", {"depth": 3}, "its arguments say depth 3, its shapes say 2"),
        ("DiT.pt", {"model": "DiT-S/2"}, "its arguments say hidden_size 384, its shapes say 16"),
        ("DiT.pt", {"learn_sigma": False}, "learn_sigma False, its shapes say 6 output channels for 3"),
        ("DiT.pt", {"num_classes": 10}, "num_classes 10, its label table has 4 rows"),
        ("DiT.pt", {"num_classes": "many"}, "num_classes"),
        ("DiT.pt", {"class_dropout_prob": 0.1, "num_classes": 4}, "num_classes 4, class_dropout_prob 0.1, its label"),
        ("DiT.pt", {"image_size": 256}, "image_size 256, its position table and the VAE say 8"),
        ("DiT.pt", {"input_size": 32}, "grid 16, its shapes say 4"),
        ("class_conditional.pt", {}, "does not tell whether it is DiT or SiT; give --process"),
        ("DiT-to-SiT.pt", {}, "does not agree with itself"),
        ("transit.pt", {}, "does not tell whether it is DiT or SiT"),
    ],
)
def test_what_does_not_agree_is_refused(tmp_path, name, args, message):
    with pytest.raises(ValueError, match=rf"{name}.*{message}") as error:
        load(public(tmp_path / name, {**HEADS, **args}))
    assert "\n" not in str(error.value)


def test_a_dit_without_a_learned_variance_is_no_flow(tmp_path):
    weights = state(out_channels=3)
    for args in ({}, {"learn_sigma": False}):
        path = public(tmp_path / "DiT.pt", {**HEADS, **args}, weights=weights)
        with pytest.raises(ValueError, match=r"3 output channels without a learned variance \(flow\), the dit in"):
            load(path)
        with pytest.raises(ValueError, match=r"process diffusion \(diffusion\)"):
            load(path, process="diffusion")
    assert load(path, process="flow").config.process.name == "flow"
    assert load(public(tmp_path / "x.pt", HEADS, weights=weights)).config.process.name == "flow"


def test_a_given_process_counts_more_than_names_and_less_than_facts(tmp_path):
    assert load(public(tmp_path / "DiT.pt", HEADS), process="flow").config.process.name == "flow"
    with pytest.raises(ValueError, match=r"path_type Linear \(flow\), process diffusion"):
        load(public(tmp_path / "x.pt", {**HEADS, "path_type": "Linear"}), process="diffusion")


def test_a_table_without_a_null_label_has_none(tmp_path):
    for args in ({"num_classes": 4}, {"class_dropout_prob": 0}):
        run = load(public(tmp_path / "DiT.pt", {**HEADS, **args}))
        assert (run.data.num_classes, run.null_label) == (4, None)
        assert len(run.sample([3], num_steps=2, batch=1)) == 1
        with pytest.raises(ValueError, match="no null label"):
            run.sample([3], cfg_scale=2.0)
    assert load(public(tmp_path / "DiT.pt", {**HEADS, "num_classes": 3})).null_label == 3


@pytest.mark.parametrize("name", ["model_ema", "ema_state_dict", "EMA", "state_dict_ema", "ema_model", "averaged"])
def test_the_average_is_taken_by_any_of_its_names(tmp_path, name):
    raw, average = state(1), state(2)
    for value in (average, {"module": average, "decay": 0.9999}):
        torch.save({"model": raw, name: value, "ema_decay": 0.99, "opt": {"state": {0: raw}}}, tmp_path / "DiT.pt")
        for which, (wanted, called) in {
            "ema": (average, name), "raw": (raw, "model"), "model": (raw, "model"), name: (average, name),
        }.items():  # fmt: skip
            read = read_weights(tmp_path / "DiT.pt", which=which)
            assert read.name == called
            assert read.state_dict["t_embedder.mlp.0.weight"].equal(wanted["t_embedder.mlp.0.weight"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": 1, "ema": [1]}, "holds model, ema; ema is not a dict of tensors; --weights raw takes the others"),
        ({"model": 1, "ema": {"shadow_params": [1]}}, "ema is not a dict of tensors"),
        ({"model": 1, "ema_0.9": 1, "ema_0.99": 1}, r"holds model, ema_0\.9, ema_0\.99; name one of them by --weights"),
        ({"generator": 1, "discriminator": 1}, "holds generator, discriminator; name one of them"),
    ],
)
def test_sets_that_do_not_tell_which_is_meant_are_named(tmp_path, content, message):
    def fill(value):
        if isinstance(value, dict):
            return {key: fill(inner) for key, inner in value.items()}
        return list(state().values()) if isinstance(value, list) else state()

    torch.save(fill(content), tmp_path / "DiT.pt")
    with pytest.raises(ValueError, match=message):
        read_weights(tmp_path / "DiT.pt")


def test_arguments_are_found_wherever_scripts_keep_them(tmp_path):
    told = {"num_heads": 4, "path_type": "GVP"}
    for content in ({"config": told}, {"hyper_parameters": Namespace(**told)}, {"args": {"transport": told}},
                    {"hparams": {"model": {"num_heads": 4}, "params": Namespace(path_type="GVP")}}):  # fmt: skip
        torch.save({"state_dict": state(), **content}, tmp_path / "x.pt")
        with pytest.raises(ValueError, match="path_type GVP"):
            load(tmp_path / "x.pt")
    save_file(state(), tmp_path / "x.safetensors", metadata={"format": "pt", "num_heads": "4", "path_type": "GVP"})
    with pytest.raises(ValueError, match="path_type GVP"):
        load(tmp_path / "x.safetensors")


def test_the_number_of_heads_is_what_the_arguments_say(tmp_path):
    with pytest.raises(ValueError, match="width 16, of no named size; the number of heads is not known"):
        load(public(tmp_path / "DiT.pt"))
    x, t, y = torch.randn(2, 3, 8, 8), torch.tensor([3, 5]), torch.tensor([0, 3])
    outputs = []
    for heads in (2, 4):
        network = DiT(**{**SMALL, "num_heads": heads}).eval()
        network.load_state_dict(state())
        loaded = load(public(tmp_path / "DiT.pt", {"num_heads": heads}))
        outputs.append(loaded.network(x, t, y))
        assert outputs[-1].equal(network(x, t, y))
    assert not outputs[0].allclose(outputs[1])
    wide = {"hidden_size": 384, "depth": 1, "num_heads": 6}
    named = public(tmp_path / "DiT.pt", {"model": "DiT-S/2", "num_heads": 12}, weights=state(**wide, mlp_ratio=0.1))
    with pytest.raises(ValueError, match=r"depth 12, its shapes say 1"):
        load(named)


def test_the_schedule_and_the_vae_are_those_of_the_arguments(tmp_path):
    path = public(tmp_path / "x.pt", {**HEADS, "diffusion_steps": 50, "noise_schedule": "linear", "vae": "mse"})
    run = load(path)
    assert (run.config.process.name, run.process.num_timesteps) == ("diffusion", 50)
    assert identify(path, read_weights(path)).vae == "stabilityai/sd-vae-ft-mse"
    assert identify(path, read_weights(public(path, HEADS)), "flow").vae is None


def test_a_missing_position_table_is_rebuilt(tmp_path):
    weights = state(in_channels=4, out_channels=8)
    whole = public(tmp_path / "DiT.pt", HEADS, weights=weights)
    vae = tiny_vae(tmp_path / "vae")
    expected = vcagen.load(whole, vae=vae)
    del weights["pos_embed"]
    for name, args in (("DiT-a.pt", {"input_size": 8}), ("DiT-b.pt", {"image_size": 64}), ("DiT-64x64.pt", {})):
        run = vcagen.load(public(tmp_path / name, {**HEADS, **args}, weights=weights), vae=vae)
        assert run.network.pos_embed.equal(expected.network.pos_embed)
        assert run.data == expected.data
    assert "rebuilt for images of 64 x 64" in run.notes[1]
    assert vcagen.load(public(tmp_path / "DiT-c.pt", HEADS, weights=weights), vae=vae).data.image_size == 256


def test_every_command_says_which_weights_and_process_it_took(tmp_path, capsys):
    torch.save({"model": state(1), "model_ema": state(2), "args": {"num_heads": 4, "path_type": "Linear"}},
               path := tmp_path / "public.pt")  # fmt: skip
    args = ["--checkpoint", str(path), "--vae", "identity", "--out", str(tmp_path / "out"), "--num_images", "2"]
    do("sample", [*args, "--batch", "2", "--num_steps", "2"], prog="sample.py")
    assert f"{path}: model_ema, flow by path_type Linear\n" in capsys.readouterr().err
    main(["inspect", str(path)])
    shown = capsys.readouterr().out
    assert "model_ema" in shown
    assert "flow, by path_type Linear" in shown
    torch.save(state(), tmp_path / "bare.pt")
    main(["inspect", str(tmp_path / "bare.pt")])
    assert "not known (process: " in capsys.readouterr().out


def test_a_young_average_is_told(tmp_path):
    tiny.train(tmp_path / "young", train__ema_decays=[0.99, 0.1])
    (_, young) = vcagen.load(tmp_path / "young").notes
    assert "decay 0.99 is young at step 6: 94 % of it is still the initial weights; --weights raw" in young
    for weights in ("raw", "ema_0.1"):
        assert len(vcagen.load(tmp_path / "young", weights=weights).notes) == 1
    tiny.train(tmp_path / "warm", train__ema_decays=[0.99], train__ema_warmup=True)
    assert len(vcagen.load(tmp_path / "warm").notes) == 1


@pytest.mark.slow
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    path = public(tmp_path / "SiT.pt", {**HEADS, "path_type": "GVP", "prediction": "noise"})
    line = user_error("sample.py", "--checkpoint", path, "--vae", "identity", "--out", tmp_path / "out")
    assert "path_type GVP, prediction noise" in line
    assert not (tmp_path / "out").exists()
