"""The README's commands run as they are written, or with smaller sizes and other paths where they would take days."""

import json
import shlex
import shutil

import numpy as np
import pytest
import tiny
import torch
from helpers import ROOT, image_folder, python, readme_block, tiny_vae
from PIL import Image

from vcagen import __main__
from vcagen.config import command_line as cli
from vcagen.config.options import Config
from vcagen.networks.dit import DiT


@pytest.fixture
def clone(tmp_path):
    """A folder with the scripts and configurations of the project, to run commands in."""
    for name in ("train.py", "sample.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    return tmp_path


def run(command, folder, *extra, **paths):
    """Run one command of the README in `folder`, with other paths and more options."""
    for name, path in paths.items():
        command = command.replace(name, str(path))
    words = shlex.split(command)
    assert words[0] == "python"
    return python(*words[1:], *extra, cwd=folder, timeout=900)


def test_the_list_of_jobs_is_the_one_printed(capsys):
    __main__.main([])
    listed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert [line.strip() for line in readme_block("jobs")] == [line.strip() for line in listed]


def test_the_model_of_your_own_runs(capsys):
    exec("\n".join(readme_block("own model")), {})
    assert capsys.readouterr().out == "torch.Size([2, 197, 384])\n"


def test_the_test_command_is_the_one_of_ci():
    (command,) = readme_block("tests")
    install, test = command.split(" && ")
    ci = (ROOT / ".ci" / "run").read_text()
    assert install.replace("pip install", "pip install -q") in ci
    assert test in ci


def test_launch_lines_name_files_and_options_that_exist(monkeypatch):
    monkeypatch.chdir(ROOT)
    for line in readme_block("machines"):
        words = shlex.split(line)
        if words[0] == "srun":
            words = shlex.split(words[-1])
        for word in words:
            if word.startswith("configs/"):
                assert (ROOT / word).is_file(), word
        arguments = words[words.index("train.py") + 1 :]
        assert cli.parse(Config, arguments, prog="train.py").process.name == "flow"
    for preset in ("one_gpu", "eight_gpus", "several_machines", "fsdp"):
        assert (ROOT / "configs" / "accelerate" / f"{preset}.yaml").is_file()


def test_start_up_is_light():
    loaded = "import sys; heavy = {'torch', 'diffusers', 'accelerate', 'timm', 'matplotlib'}"
    python("-c", f"import vcagen; {loaded}; assert not heavy & sys.modules.keys()")
    python(
        "-c", f"from vcagen import __main__ as m; m.main(['--help']); {loaded}; assert not heavy & sys.modules.keys()"
    )


@pytest.mark.slow
def test_quick_start(clone):
    (line,) = readme_block("quickstart")
    install, train, sample = line.split(" && ")
    assert install == 'pip install -e ".[quickstart]"'
    run(train, clone)
    run(sample, clone)
    folder = clone / "runs" / "quickstart"
    assert Image.open(folder / "loss.png").width > 300
    (samples,) = (folder / "samples").iterdir()
    assert json.loads((samples / "results.json").read_text())["metrics"]["fd_pixels_1k"] < 2
    assert (samples / "preview.png").is_file()
    from sklearn.datasets import load_digits
    from sklearn.svm import SVC

    digits = load_digits()
    images = [np.asarray(Image.open(samples / "images" / f"{i:06d}.png")) for i in range(1000)]
    features = np.stack(images).reshape(1000, 64) / 255 * 16
    recognised = SVC(gamma="scale").fit(digits.data, digits.target).predict(features)
    assert (recognised == np.arange(1000) % 10).mean() >= 0.93  # labels are balanced: i mod 10


@pytest.mark.slow
def test_miniature(clone):
    (command,) = readme_block("miniature")
    run(command, clone, "--seeds=1", "--steps=10", "--num_images=20")
    report = clone / "runs" / "miniature" / "report"
    rows = json.loads((report / "miniature.json").read_text())["rows"]
    assert len(rows) == 8
    assert all(row["score"] > 0 and not row["marks"] for row in rows)
    assert (report / "miniature.png").is_file()


@pytest.mark.slow
def test_own_images_and_public_weights(clone):
    encode, train, sample, public, inspect = readme_block("own images")
    vae = tiny_vae(clone / "vae")
    image_folder(clone / "my" / "images", {"cat": 5, "dog": 5}, size=64)
    run(encode, clone, "--vae", vae, "--image_size=64")
    small = [
        "--model.hidden_size=48", "--model.depth=1", "--model.num_heads=3", "--train.batch_size=4", "--train.steps=2",
        "--log.preview_every=0", "--data.num_workers=0",
    ]  # fmt: skip
    images = image_folder(clone / "other", {"a": 3, "b": 3, "c": 3}, size=64)
    python(
        clone / "train.py", "--config", clone / "configs" / "sit.yaml", "--run_dir", clone / "first",
        "--data.path", images, "--data.from_images=true", "--data.images.image_size=64", "--vae.path", vae,
        "--model.attention=vca", *small,
    )  # fmt: skip
    _, stderr = run(train, clone, *small, **{"runs/table2/sit-s-2-vca": "first"})
    assert "has 4 labels, this network 3: the label table is new" in stderr
    run(sample, clone, "--num_images=4", "--num_steps=3")
    (folder,) = (clone / "runs" / "mine" / "samples").iterdir()
    assert len(list((folder / "images").iterdir())) == 4
    model = DiT(
        input_size=8, patch_size=2, in_channels=4, out_channels=8, hidden_size=384, depth=1, num_heads=6,
        num_classes=1000,
    )  # fmt: skip
    torch.save(dict(model.state_dict()), clone / "DiT-XL-2-256x256.pt")
    run(public, clone, "--num_images=2", "--num_steps=2", "--vae", vae)
    out, _ = run(inspect, clone)
    assert "384" in out
    assert len(tiny.metrics(clone / "runs" / "mine")) == 1
