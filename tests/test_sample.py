"""sample.py as a user runs it: what it makes, what it refuses, and that it survives anything."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from argparse import Namespace
from dataclasses import asdict

import numpy as np
import pytest
import torch
from helpers import image_folder, python, tiny_vae, torchrun, user_error
from PIL import Image

import vcagen
from vcagen.__main__ import do, main
from vcagen.build import build_model
from vcagen.config.options import Config, ModelConfig, ProcessConfig, SamplingConfig, VaeConfig
from vcagen.data.latents import DataSpec
from vcagen.data.vae import LatentVAE
from vcagen.networks import weights as checkpoints
from vcagen.system.run_folder import checkpoint_folder

SETTINGS = ("--num_images", "10", "--batch", "4", "--num_steps", "5")


def tiny_run(folder, process="diffusion", *, width=16, dropout=0.1, sampling=None, nan=False, vae="identity"):
    """A run folder as train.py leaves it, of random weights on 8 x 8 latents of cats, dogs and eels."""
    vae = LatentVAE(str(vae))
    data = DataSpec.of(vae.description(), 8 * vae.downsample, ["cat", "dog", "eel"])
    config = Config(
        run_dir=str(folder),
        model=ModelConfig(size="S/2", hidden_size=width, depth=1, class_dropout_prob=dropout,
                          num_heads=2 if width < 384 else None),
        process=ProcessConfig(name=process),
        vae=VaeConfig(path=str(vae)),
        sampling=sampling or SamplingConfig(),
    )  # fmt: skip
    model = build_model(config.model, config.process, data)
    generator = torch.Generator().manual_seed(0)
    state = {name: 0.1 * torch.randn(value.shape, generator=generator) for name, value in model.state_dict().items()}
    if nan:
        state["final_layer.linear.bias"][0] = float("nan")
    metadata = {"format": 2, "config": asdict(config), "data": data.to_dict(), "step": 10, "ema_decay": 0.9999}
    where = checkpoint_folder(folder, 10)
    where.mkdir(parents=True)
    checkpoints.save_weights(where / "ema_0.9999.safetensors", state, metadata)
    raw = {name: 0.9 * value for name, value in state.items()}
    checkpoints.save_weights(where / "model.safetensors", raw, {**metadata, "ema_decay": None})
    return folder


def a_reference(path, count=40, side=8):
    images = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    np.savez(path, images)
    return "--reference", str(path), "--extractor", "pixels"


def sample(*args):
    """sample.py in this process."""
    do("sample", [str(arg) for arg in args], prog="sample.py")


def files(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "images").iterdir())}


def pixels(folder):
    return np.stack([np.asarray(Image.open(path)) for path in sorted((folder / "images").iterdir())]).astype(int)


# --- what it makes ---


@pytest.mark.parametrize("process", ["diffusion", "flow"])
def test_images_scores_and_records(tmp_path, process, capsys):
    run, reference = tiny_run(tmp_path / "run", process), a_reference(tmp_path / "reference.npz")
    sample("--run_dir", run, "--out", tmp_path / "out", "--npz", *SETTINGS, *reference)
    out = tmp_path / "out"
    assert list(files(out)) == [f"{i:06d}.png" for i in range(10)]
    with np.load(out / "samples.npz") as archive:
        assert (archive["arr_0"] == pixels(out)).all()
    assert Image.open(out / "preview.png").size == (102, 102)
    manifest = json.loads((out / "manifest.json").read_text())
    expected = {
        "num_images": 10,
        "batch": 4,
        "seed": 0,
        "step": 10,
        "cfg_scale": 1.0,
        "num_steps": 5,
        "labels": "random",
    }
    assert {key: manifest[key] for key in expected} == expected
    assert manifest["sampler"] == ("ddpm" if process == "diffusion" else "sde")
    assert manifest["weights_sha256"] == vcagen.load(run).weights_sha256
    result = json.loads((out / "results.json").read_text())
    assert json.loads(capsys.readouterr().out) == result["metrics"]
    assert result["metrics"]["fd_pixels_10"] > 0
    assert result["extractor"]["batch"] == 64
    assert (result["samples"]["dropped"], result["samples"]["labels"]) == (2, "random")
    assert {"mean_term", "trace_sample", "trace_ref"} == result["frechet"].keys()
    sampler = {"kind": manifest["sampler"], "method": None, "steps": 5, "cfg_scale": 1.0, "cfg_channels": None,
               "cfg_interval": None, "seed": 0, "world_size": 1, "batch": 4, "precision": "no"}  # fmt: skip
    assert {key: result["sampler"][key] for key in sampler} == sampler
    assert result["model"]["step"] == 10


def test_a_folder_is_cropped_as_the_training_images_were(tmp_path, capsys):
    run = tiny_run(tmp_path / "run")
    photos = image_folder(tmp_path / "photos", {"cat": 3, "dog": 3}, size=40)
    args = ("--run_dir", run, "--out", tmp_path / "out", *SETTINGS, "--reference", photos, "--extractor", "pixels")
    sample(*args)
    sampled = json.loads(capsys.readouterr().out)
    do("evaluate", [str(tmp_path / "out"), *map(str, args[-4:]), "--image_size", "8"], prog="x")
    assert json.loads(capsys.readouterr().out) == sampled
    assert sampled["fd_pixels_10"] > 0


def test_scores_can_come_later(tmp_path, capsys):
    run, reference = tiny_run(tmp_path / "run"), a_reference(tmp_path / "reference.npz")
    sample("--run_dir", run, "--out", tmp_path / "out", *SETTINGS)
    assert not (tmp_path / "out" / "results.json").exists()
    do("evaluate", [str(tmp_path / "out"), *reference], prog="x")
    evaluated = json.loads((tmp_path / "out" / "results.json").read_text())
    (tmp_path / "out" / "results.json").unlink()
    capsys.readouterr()
    sample("--run_dir", run, "--out", tmp_path / "out", *SETTINGS, *reference)
    later = capsys.readouterr()
    assert "(0 network calls" in later.err
    sampled = json.loads((tmp_path / "out" / "results.json").read_text())
    assert json.loads(later.out) == sampled["metrics"]
    for result in evaluated, sampled:
        del result["wall_s"]
    assert evaluated == sampled


def test_batch_and_decode_batch_do_not_matter(tmp_path):
    run = tiny_run(tmp_path / "run")
    for batch in 4, 1, 7:
        sample("--run_dir", run, "--out", tmp_path / str(batch), *SETTINGS, "--batch", batch, "--decode_batch", 3)
    for batch in 1, 7:
        assert abs(pixels(tmp_path / str(batch)) - pixels(tmp_path / "4")).max() <= 1


def test_options_change_the_images(tmp_path):
    run = tiny_run(tmp_path / "run")
    variants = {"base": (), "seed": ("--seed", 1), "cfg": ("--cfg_scale", 2), "label": ("--labels", "dog"),
                "raw": ("--weights", "raw"), "ddim": ("--sampler", "ddim"),
                "bf16": ("--precision", "bf16")}  # fmt: skip
    made = {}
    for name, options in variants.items():
        sample("--run_dir", run, "--out", tmp_path / name, *SETTINGS, *options)
        made[name] = pixels(tmp_path / name).tobytes()
    assert len(set(made.values())) == len(made)
    sample("--run_dir", run, "--out", tmp_path / "number", *SETTINGS, "--labels", "1")
    assert pixels(tmp_path / "number").tobytes() == made["label"]
    assert json.loads((tmp_path / "label" / "manifest.json").read_text())["labels"] == [1]


def test_the_runs_own_settings_and_folder_are_the_default(tmp_path):
    run = tiny_run(
        tmp_path / "run", "flow", sampling=SamplingConfig(num_images=3, num_steps=4, sampler="ode", method="euler")
    )
    sample("--run_dir", run, "--batch", 4)
    (out,) = (run / "samples").iterdir()
    assert out.name == "step_0000010_ode_4_cfg1.0_seed0_n3"
    assert len(files(out)) == 3


def test_the_vae_is_found_where_it_is_now_and_no_other_is_taken(tmp_path):
    tiny_vae(tmp_path / "vae")
    run = tiny_run(tmp_path / "run", vae=tmp_path / "vae")
    sample("--run_dir", run, "--out", tmp_path / "a", *SETTINGS, "--npz", "true")
    scale = LatentVAE(str(tmp_path / "vae")).downsample
    assert pixels(tmp_path / "a").shape == (10, 8 * scale, 8 * scale, 3)
    (tmp_path / "vae").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="this VAE cannot be loaded"):
        sample("--run_dir", run, "--out", tmp_path / "b", *SETTINGS)
    tiny_vae(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="another VAE"):
        sample("--run_dir", run, "--out", tmp_path / "b", *SETTINGS, "--vae", tmp_path / "other")
    assert not (tmp_path / "b").exists()
    sample("--run_dir", run, "--out", tmp_path / "b", *SETTINGS, "--vae", tmp_path / "moved", "--decode_batch", 4)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_public_files_sample_as_ours(tmp_path):
    """The same weights in the public containers, found by the name or by an option, give the same images."""
    for process, name in ("diffusion", "DiT-S-2.pt"), ("flow", "SiT-S-2.pt"):
        run = tiny_run(tmp_path / process, process, width=384)
        sample("--run_dir", run, "--out", tmp_path / f"{process}-ours", *SETTINGS)
        state = dict(vcagen.load(run).network.state_dict())
        if process == "flow":  # the public network predicts twice the channels and drops the second half
            for key in "final_layer.linear.weight", "final_layer.linear.bias":
                value = state[key].unflatten(0, (4, 1, 3))
                state[key] = torch.cat([value, torch.randn_like(value)], dim=1).flatten(0, 2)
        content = {
            "ema": {f"module.{key}": value for key, value in state.items()},
            "model": {},
            "args": Namespace(lr=1),
        }
        torch.save(content, tmp_path / name)
        torch.save(content, tmp_path / "weights.pt")
        sample("--checkpoint", tmp_path / name, "--vae", "identity", "--out", tmp_path / f"{process}-a", *SETTINGS)
        assert files(tmp_path / f"{process}-a") == files(tmp_path / f"{process}-ours")
        with pytest.raises(ValueError, match="does not tell whether it is DiT or SiT; give --process"):
            sample("--checkpoint", tmp_path / "weights.pt", "--vae", "identity", "--out", tmp_path / "no", *SETTINGS)
        sample("--checkpoint", tmp_path / "weights.pt", "--process", process, "--vae", "identity",
               "--out", tmp_path / f"{process}-b", *SETTINGS)  # fmt: skip
        assert files(tmp_path / f"{process}-b") == files(tmp_path / f"{process}-ours")


def test_an_exported_file_is_all_that_sampling_needs(tmp_path, capsys):
    run = tiny_run(tmp_path / "run")
    sample("--run_dir", run, "--out", tmp_path / "a", *SETTINGS)
    main(["export", str(run), "--out", str(tmp_path / "x.safetensors")])
    capsys.readouterr()
    main(["inspect", str(tmp_path / "x.safetensors"), "--json", "-"])
    told = json.loads(capsys.readouterr().out)
    main(["inspect", str(tmp_path / "x.safetensors"), "--json", str(tmp_path / "x.json")])
    assert json.loads((tmp_path / "x.json").read_text()) == told
    assert "cat, dog, eel" in capsys.readouterr().out
    assert told["data"]["class_names"] == ["cat", "dog", "eel"]
    assert told["step"] == 10
    shutil.rmtree(run)
    sample("--checkpoint", tmp_path / "x.safetensors", "--out", tmp_path / "b", *SETTINGS)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_dry_run_makes_nothing(tmp_path, capsys):
    sample("--run_dir", tiny_run(tmp_path / "run"), "--out", tmp_path / "out", "--dry_run", "true")
    plan = json.loads(capsys.readouterr().out)
    assert (plan["num_images"], plan["chunks"], plan["num_steps"]) == (50_000, 782, 250)
    assert not (tmp_path / "out").exists()


def test_cfg_scale_zero_says_that_it_is_unconditional(tmp_path, capsys):
    sample("--run_dir", tiny_run(tmp_path / "run"), "--out", tmp_path / "out", *SETTINGS, "--cfg_scale", 0)
    assert "unconditional" in capsys.readouterr().err


# --- what it refuses ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--labels", "3"), r"labels: '3' is not a class; valid are labels 0\.\.2 or class names cat, dog, eel"),
        (("--labels", "1000"), r"0\.\.2"),
        (("--labels", "cow"), "labels: 'cow'"),
        (("--num_steps", "2000"), "num_steps: 2000"),
        (("--sampler", "sde"), "sampler: sde"),
        (("--step", "7"), "no checkpoint 7; it has 10"),
        (("--weights", "ema_0.5"), r"no ema_0\.5; it has raw, ema_0\.9999"),
        (("--num_images", "0"), "num_images: expected int >0, got '0'"),
        (("--batch", "0"), "batch: expected int >0, got '0'"),
        (("--decode_batch", "-2"), "decode_batch: expected int >0 or null, got '-2'"),
        (("--labels", ""), "labels: '' is not a class"),
        (("--process", "flow"), "process: flow; the weights were trained for diffusion"),
        (("--reference", "nowhere.npz", "--extractor", "pixels"), r"reference: nowhere\.npz"),
        (("--reference", "digits", "--extractor", "pixels"), "reference: digits"),
        (("--inception_weights", "nowhere.pth", "--reference", "digits"), r"inception_weights: nowhere\.pth"),
        (("--inception_weights", "nowhere.pth", "--reference", "nowhere.npz"), r"reference: nowhere\.npz"),
        (("--inception_weights", "nowhere.pth", "--reference", __file__), r"reference: .*: no \.npz file, no folder"),
        (("--seed", "-1"), "seed: expected int 0.*, got '-1'"),
        (("--seed", str(2**63)), "seed: expected int 0.*, got '9223372036854775808'"),
        (("--cfg_scale", "1e300"), r"cfg_scale: 1e\+300"),
        (("--cfg_scale=-1e300",), r"cfg_scale: -1e\+300"),
        (("--checkpoint", "x.pt"), "run_dir: give one of"),
        (("--guided_channels", "0", "--cfg_scale", "2"), "guided_channels: expected int >0 or null, got '0'"),
        (("--guided_channels", "9", "--cfg_scale", "2"), "guided_channels: 9; the latents have 3"),
    ],
)
def test_mistakes_are_named_and_nothing_is_made(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        sample("--run_dir", tiny_run(tmp_path / "run"), "--out", tmp_path / "out", *SETTINGS, *options)
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_cannot_be_made_is_told_before_the_work(tmp_path, monkeypatch):
    run, reference = tiny_run(tmp_path / "run"), a_reference(tmp_path / "reference.npz")
    monkeypatch.setattr("vcagen.sampling.session.Evaluation", lambda *_, **__: pytest.fail("work has begun"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file/.*cannot be written \(Not a directory\)"):
        sample("--run_dir", run, "--out", tmp_path / "file", *SETTINGS, *reference)


def test_a_file_is_no_run(tmp_path):
    weights = tmp_path / "weights.safetensors"
    weights.touch()
    with pytest.raises(ValueError, match=r"run_dir: .*weights\.safetensors is a file; give it as --checkpoint"):
        sample("--run_dir", weights, *SETTINGS)


@pytest.mark.parametrize(
    ("where", "changes"),
    [
        (("config",), {"model": 3}),
        (("data",), {"class_names": None}),
        (("data",), {"height": None}),
        (("data",), {"width": -1}),
        (("data",), {"channels": 10**12}),
        (("data",), {"unknown": 1}),
        (("data",), {"vae": None}),
        (("data", "vae"), {"scaling_factor": None}),
        (("data", "vae"), {"scaling_factor": "x"}),
        (("data", "vae"), {"channels": 4}),
    ],
)
def test_damaged_metadata_names_the_file(tmp_path, where, changes):
    file = tiny_run(tmp_path / "run") / "checkpoints" / "step_0000010" / "model.safetensors"
    read = checkpoints.read_weights(file)
    part = read.metadata
    for name in where:
        part = part[name]
    part.update(changes)
    checkpoints.save_weights(file, read.state_dict, read.metadata)
    with pytest.raises(ValueError, match=r"model\.safetensors: "):
        sample("--checkpoint", file, *SETTINGS)


@pytest.mark.parametrize("part", ["channels", "height", "num_classes", "class_names", "vae", "path", "sha256"])
def test_missing_metadata_names_the_file(tmp_path, part):
    file = tiny_run(tmp_path / "run") / "checkpoints" / "step_0000010" / "model.safetensors"
    read = checkpoints.read_weights(file)
    data = read.metadata["data"]
    del (data if part in data else data["vae"])[part]
    checkpoints.save_weights(file, read.state_dict, read.metadata)
    with pytest.raises(ValueError, match=rf"model\.safetensors: damaged \(.*{part}"):
        sample("--checkpoint", file, *SETTINGS)


def test_a_public_file_that_is_none_is_named(tmp_path):
    torch.save({"weight": torch.zeros(3)}, tmp_path / "DiT.pt")
    with pytest.raises(ValueError, match=r"DiT\.pt: weights: .* no DiT or SiT has \('x_embedder\.proj\.weight'"):
        sample("--checkpoint", tmp_path / "DiT.pt", "--vae", "identity", *SETTINGS)


@pytest.mark.parametrize("channels", [2, 4, 5])
def test_latents_that_are_no_images_need_a_vae(tmp_path, channels):
    state = vcagen.load(tiny_run(tmp_path / "run", width=384)).network.state_dict()
    state["x_embedder.proj.weight"] = torch.zeros(384, channels, 2, 2)
    torch.save(state, tmp_path / "DiT.pt")
    with pytest.raises(ValueError, match=rf"vae: identity; .*DiT\.pt has {channels} latent channels"):
        sample("--checkpoint", tmp_path / "DiT.pt", "--vae", "identity", *SETTINGS)


def test_a_network_of_pixels_or_of_latents_stays_one(tmp_path):
    tiny_vae(tmp_path / "vae")
    with pytest.raises(ValueError, match=r"vae: .*vae; .* was trained on the pixels"):
        sample("--run_dir", tiny_run(tmp_path / "a"), "--vae", tmp_path / "vae", *SETTINGS)
    with pytest.raises(ValueError, match=r"vae: identity; "):
        sample("--run_dir", tiny_run(tmp_path / "b", vae=tmp_path / "vae"), "--vae", "identity", *SETTINGS)


def test_guidance_needs_a_null_label(tmp_path):
    run = tiny_run(tmp_path / "run", dropout=0.0)
    sample("--run_dir", run, "--out", tmp_path / "out", *SETTINGS)
    with pytest.raises(ValueError, match=r"cfg_scale: 2\.0; this network has no null label"):
        sample("--run_dir", run, "--out", tmp_path / "b", *SETTINGS, "--cfg_scale", "2")


def test_another_run_in_the_same_folder_is_refused_by_field(tmp_path):
    run, out = tiny_run(tmp_path / "run"), tmp_path / "out"
    sample("--run_dir", run, "--out", out, *SETTINGS)
    before = files(out)
    for field, options in {
        "cfg_scale": ("--cfg_scale", "1.5"), "seed": ("--seed", "1"), "num_steps": ("--num_steps", "6"),
        "weights_sha256|ema_decay": ("--weights", "raw"), "sampler": ("--sampler", "ddim"), "labels": ("--labels", "0"),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=rf"^({field}): .* was made with"):
            sample("--run_dir", run, "--out", out, *SETTINGS, *options)
    assert files(out) == before


def test_nan_is_one_line_and_no_black_image(tmp_path):
    run = tiny_run(tmp_path / "run", nan=True)
    line = user_error("sample.py", "--run_dir", run, "--out", tmp_path / "out", *SETTINGS)
    assert line.startswith("error: image 0: ")
    assert list((tmp_path / "out" / "images").iterdir()) == []


def test_missing_inception_weights_keep_the_images_and_say_what_to_do(tmp_path):
    run, (_, reference, *_) = tiny_run(tmp_path / "run"), a_reference(tmp_path / "reference.npz")
    line = user_error(
        "sample.py", "--run_dir", run, "--out", tmp_path / "out", *SETTINGS, "--reference", reference,
        env={"TORCH_HOME": str(tmp_path / "torch"), "HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"},
    )  # fmt: skip
    assert "--inception_weights PATH" in line
    assert f"vcagen evaluate {tmp_path / 'out'} " in line
    assert f"--reference {reference}" in line
    assert len(files(tmp_path / "out")) == 10


# --- several processes, and kill -9 ---


@pytest.mark.slow
@pytest.mark.parametrize(("num_images", "batch"), [(10, 4), (2, 4), (10, 7), (10, 1)])
def test_the_number_of_processes_does_not_matter(tmp_path, num_images, batch):
    run, reference = tiny_run(tmp_path / "run"), a_reference(tmp_path / "reference.npz")
    metrics = []
    for processes in 1, 2, 3:
        out = tmp_path / str(processes)
        args = ("sample.py", "--run_dir", run, "--out", out, *SETTINGS, *reference)
        args += ("--num_images", num_images, "--batch", batch, "--npz", "true")
        python(*args) if processes == 1 else torchrun(processes, *args)
        result = json.loads((out / "results.json").read_text())
        assert result["sampler"]["world_size"] == processes
        metrics.append(result["metrics"])
        assert len(files(out)) == num_images
        assert files(out) == files(tmp_path / "1")
        assert (out / "samples.npz").read_bytes() == (tmp_path / "1" / "samples.npz").read_bytes()
    assert metrics[0] == metrics[1] == metrics[2]


@pytest.mark.slow
def test_a_mistake_ends_all_processes(tmp_path):
    run = tiny_run(tmp_path / "run", nan=True)
    start = time.monotonic()
    _, stderr = torchrun(2, "sample.py", "--run_dir", run, "--out", tmp_path / "out", *SETTINGS, code=1)
    assert "error: image 0: " in stderr
    assert time.monotonic() - start < 60


def _sample_quietly(args):
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sample(*args)


@pytest.mark.slow
def test_twenty_kills(tmp_path):
    """60 images, kill -9 at a random moment, the same command again: equal to the undisturbed run, 20 of 20."""
    run, reference = tiny_run(tmp_path / "run"), a_reference(tmp_path / "reference.npz")
    args = ["--run_dir", run, *SETTINGS, *reference, "--num_images", 60, "--num_steps", 50, "--npz", "true", "--out"]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vcagen.sampling.session", "test_sample"])

    def start(out):
        process = context.Process(target=_sample_quietly, args=([*args, out],))
        process.start()
        return process

    for name in "warm", "undisturbed":
        began = time.monotonic()
        process = start(tmp_path / name)
        process.join()
        assert process.exitcode == 0
    length = time.monotonic() - began
    expected = files(tmp_path / "undisturbed"), (tmp_path / "undisturbed" / "samples.npz").read_bytes()
    metrics = json.loads((tmp_path / "undisturbed" / "results.json").read_text())["metrics"]
    moments, interrupted = random.Random(0), 0
    for trial in range(20):
        out = tmp_path / str(trial)
        process = start(out)
        process.join(moments.uniform(0.1, 1.0) * length)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        interrupted += not (out / "results.json").exists()
        again = start(out)
        again.join()
        assert again.exitcode == 0, trial
        assert (files(out), (out / "samples.npz").read_bytes()) == expected, trial
        assert json.loads((out / "results.json").read_text())["metrics"] == metrics, trial
    assert interrupted >= 10


# --- as a library ---


@pytest.mark.parametrize("process", ["diffusion", "flow"])
def test_the_library_makes_the_very_images(tmp_path, process):
    run = tiny_run(tmp_path / "run", process)
    sample("--run_dir", run, "--out", tmp_path / "out", *SETTINGS, "--cfg_scale", 4, "--labels", "1,dog,0", "--seed", 3)
    made, loaded = pixels(tmp_path / "out"), vcagen.load(run)
    options = {"seed": 3, "batch": 4, "num_steps": 5, "cfg_scale": 4.0}
    first = loaded.sample(labels=[1, "dog", 0], **options)
    assert [image.size for image in first] == [(8, 8)] * 3
    assert (np.stack([np.asarray(image) for image in first]) == made[:3]).all()
    some = loaded.sample(labels=[1, 0], indices=[6, 2], output="tensor", **options)
    assert (some.dtype, some.shape) == (torch.uint8, (2, 3, 8, 8))
    assert (some.permute(0, 2, 3, 1).numpy() == made[[6, 2]]).all()
    rule = loaded.sample("1,dog,0", indices=range(10), output="tensor", **options)
    assert (rule.permute(0, 2, 3, 1).numpy() == made).all()


def test_the_library_uses_the_runs_own_settings(tmp_path):
    own = SamplingConfig(num_steps=3, cfg_scale=2.0, labels="balanced")
    loaded = vcagen.load(tiny_run(tmp_path / "run", sampling=own))
    images = loaded.sample(output="tensor", batch=16)
    assert images.shape == (16, 3, 8, 8)
    expected = loaded.sample(labels=[i % 3 for i in range(16)], num_steps=3, cfg_scale=2.0, output="tensor", batch=16)
    assert torch.equal(images, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"labels": [3]}, "labels: '3' is not a class"), ({"labels": ["cow"]}, "labels: 'cow'"),
     ({"labels": [0, 1], "indices": [1]}, "labels: 2 for 1 images"), ({"labels": [0], "indices": [-1]}, "indices"),
     ({"labels": [0], "batch": 0}, "batch: 0"), ({"labels": [0], "eta": 0.5}, "eta: ddpm does not use it"),
     ({"labels": [0], "steps": 5}, "steps: unknown option"), ({"labels": [0], "output": "png"}, "output: png")],
)  # fmt: skip
def test_the_library_refuses_what_is_not_possible(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        vcagen.load(tiny_run(tmp_path / "run")).sample(**options)
