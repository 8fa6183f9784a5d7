"""The ImageNet path of the README, whole: its commands with other paths and small sizes, on real photographs."""

import json
import os
import shlex
import signal
import time

import numpy as np
import pytest
import tiny
from helpers import ROOT, python, random_inception, readme_block, tiny_vae, torchrun
from PIL import Image
from test_processes import launch, wait_for

SMALL = [
    "--model.hidden_size=48", "--model.depth=2", "--model.num_heads=3", "--train.batch_size=8", "--train.steps=12",
    "--log.log_every=2", "--log.preview_every=0", "--checkpoint.save_every=2", "--data.num_workers=1",
]  # fmt: skip


def photographs(root, count=8, size=300):
    """Crops of real photographs that scikit-image and scikit-learn bring along, in three classes."""
    from skimage import data
    from sklearn.datasets import load_sample_images

    china, flower = load_sample_images().images
    classes = {"people": [data.astronaut()], "nature": [flower, data.chelsea()], "things": [china, data.coffee()]}
    generator = np.random.default_rng(0)
    for name, pictures in classes.items():
        (root / name).mkdir(parents=True)
        for index in range(count):
            picture = pictures[index % len(pictures)]
            y, x = (generator.integers(0, side - size + 1) for side in picture.shape[:2])
            Image.fromarray(picture[y : y + size, x : x + size]).save(root / name / f"{index}.JPEG", quality=95)
    return root


@pytest.mark.slow
def test_the_imagenet_path(tmp_path):
    vae, inception = tiny_vae(tmp_path / "vae"), random_inception(tmp_path / "inception.pth")
    images = photographs(tmp_path / "imagenet" / "train")
    reference = tmp_path / "reference.npz"
    python(
        "-m", "vcagen", "stats", images, "--image_size=256", "--out", reference, "--inception_weights", inception,
        "--batch=8",
    )  # fmt: skip
    paths = {
        "imagenet/train": images,
        "latents/imagenet256": tmp_path / "latents",
        "runs/table2": tmp_path / "runs",
        "VIRTUAL_imagenet256_labeled.npz": reference,
        "50000": "24",
    }
    extra = {
        "encode": ["--vae", vae, "--batch=4", "--shard_size=10"],
        "train.py": [f"--data.path={tmp_path / 'latents'}", *SMALL],
        "sample.py": ["--batch=8", "--num_steps=4", "--inception_weights", inception, "--npz=true"],
        "report": [],
    }
    commands = readme_block("imagenet")
    assert [next(job for job in extra if job in command) for command in commands] == [
        "encode", "train.py", "train.py", "sample.py", "sample.py", "report",
    ]  # fmt: skip
    for command in commands:
        for name, path in paths.items():
            command = command.replace(name, str(path))
        job = next(job for job in extra if job in command)
        words = shlex.split(command) + extra[job]
        if words[:2] == ["accelerate", "launch"]:
            words = words[2:]
            if job == "train.py":
                killed_once(words)
            torchrun(2, *words)
        else:
            assert words[0] == "vcagen"
            out, _ = python("-m", *words)
    for name, sampler in (("dit-s-2-vca", "ddpm"), ("sit-s-2-vca", "sde")):
        state = json.loads((tmp_path / "runs" / name / "checkpoints/step_0000012/state.json").read_text())
        assert state["num_processes"] == 2
        assert [line["step"] for line in tiny.metrics(tmp_path / "runs" / name)] == [2, 4, 6, 8, 10, 12]
        (folder,) = (tmp_path / "runs" / name / "samples").iterdir()
        assert len(list((folder / "images").glob("*.png"))) == 24
        assert Image.open(folder / "images" / "000000.png").size == (256, 256)
        assert np.load(folder / "samples.npz")["arr_0"].shape == (24, 256, 256, 3)
        result = json.loads((folder / "results.json").read_text())
        assert result["sampler"]["kind"] == sampler
        scores = result["metrics"]
        assert {"fid_24", "sfid_24", "is_mean"} <= scores.keys()
        assert any(key.startswith("precision") for key in scores)
        assert any(key.startswith("recall") for key in scores)
        again = tmp_path / f"{name}.json"
        python(
            "-m", "vcagen", "evaluate", folder / "images", "--reference", reference, "--inception_weights", inception,
            "--out", again, "--batch=8",
        )  # fmt: skip
        evaluated = json.loads(again.read_text())["metrics"]
        assert evaluated == pytest.approx(scores, rel=1e-4)
        rows = json.loads((tmp_path / "runs/report/table2.json").read_text())["rows"]
        (row,) = [row for row in rows if row["runs"] and row["runs"][0]["folder"] == str(folder)]
        assert row["score"] == scores["fid_24"]
    assert "62.3" in out  # the published number beside it


def killed_once(words):
    """Start the training on two processes and kill all of it when it has a checkpoint."""
    run = next(ROOT.joinpath(words[i + 1]) for i, word in enumerate(words) if word == "--run_dir")
    process = launch(2, words)
    wait_for(lambda: (run / "checkpoints").exists() and any((run / "checkpoints").glob("step_*")), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(0.5)
