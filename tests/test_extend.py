"""The snippets of docs/extend.md, each as a module of a user's in a folder of theirs, and the commands below them."""

import json
import shlex
import sys

import pytest
import torch
from helpers import readme_block

import vcagen
from vcagen import __main__

PAGE = "docs/extend.md"
SMALL = {
    "train": [
        "--model.hidden_size=16", "--model.depth=1", "--model.num_heads=2", "--train.steps=2", "--train.batch_size=8",
        "--log.preview_every=0", "--sampling.num_images=16",
    ],
    "sample": ["--num_images=16", "--num_steps=2", "--batch=16"],
    "evaluate": [],
}  # fmt: skip
REGISTRIES = ("ATTENTION", "SAMPLERS", "PROCESSES", "DATASETS", "EXTRACTORS", "METRICS")


def command(line, *extra):
    """Run a command of the page in this process; later options win."""
    words = shlex.split(line)
    assert words[0] == "vcagen"
    __main__.do(words[1], [*words[2:], *SMALL[words[1]], *extra], prog="vcagen")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty working folder with a trained run; what is added to the registries goes again."""
    before = {name: dict(getattr(vcagen, name)) for name in REGISTRIES}
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name, entries in before.items():
        registry = getattr(vcagen, name)
        registry.clear()
        registry.update(entries)
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


@pytest.fixture
def run(home):
    command("vcagen train --config quickstart --run_dir runs/quickstart")
    return home / "runs" / "quickstart"


def add(home, name):
    """Write the snippet as the module that its command names; returns the command."""
    (line,) = readme_block(f"{name} command", PAGE)
    words = shlex.split(line)
    module = words[words.index("--plugin") + 1]
    (home / f"{module}.py").write_text("\n".join(readme_block(name, PAGE)) + "\n")
    return line


def results(folder):
    (file,) = folder.glob("samples/*/results*.json")
    return json.loads(file.read_text())["metrics"]


def test_the_model_of_your_own_runs(capsys):
    exec("\n".join(readme_block("own model", PAGE)), {})
    assert capsys.readouterr().out == "torch.Size([2, 197, 384])\n"


def test_attention(home):
    command(add(home, "attention"), "--data.path=digits")
    run = vcagen.load("runs/mean")
    assert type(run.network.blocks[0].attn).__name__ == "MeanAttention"
    assert run.sample(labels=[1], num_steps=2, output="tensor", batch=1).shape == (1, 1, 8, 8)


def test_sampler(run, home):
    line = add(home, "sampler")
    command(line)
    (folder,) = (run / "samples").iterdir()
    assert folder.name.startswith("step_0000002_heun_2_")
    assert len(list((folder / "images").iterdir())) == 16
    exact = vcagen.SAMPLERS["heun"].function(
        vcagen.LinearInterpolant(), lambda x, t: 2 * t * torch.ones_like(x), torch.zeros(1, 1, 2, 2),
        num_steps=3, randn_like=None,
    )  # fmt: skip
    assert exact.allclose(torch.ones(1, 1, 2, 2))  # a second-order method is exact for a velocity linear in t


def test_process(home):
    command(add(home, "process"))
    command("vcagen sample --run_dir runs/image --plugin my_process")
    assert set(results(home / "runs" / "image")) >= {"fd_pixels_16"}
    process = vcagen.PROCESSES["image"]()
    x, noise = torch.rand(2, 1, 4, 4), torch.randn(2, 1, 4, 4)
    losses = process.losses(lambda x_t, t, y: x, x, torch.zeros(2), t=torch.tensor([0.3, 0.9]), noise=noise)
    assert losses["loss"].tolist() == [0, 0]
    sampled = vcagen.SAMPLERS["image-euler"].function(process, lambda x_t, t: x, noise, num_steps=4, randn_like=None)
    assert sampled.allclose(x, atol=1e-6)


def test_data_set(home):
    import numpy as np

    generator = np.random.default_rng(0)
    (home / "my" / "folder").mkdir(parents=True)
    np.save(home / "my/folder/images.npy", generator.integers(0, 256, (24, 3, 8, 8), dtype=np.uint8))
    np.save(home / "my/folder/labels.npy", np.arange(24) % 3)
    command(add(home, "data set"), "--sampling.reference=arrays:my/folder")
    command("vcagen sample --run_dir runs/arrays")
    assert "fd_pixels_16" in results(home / "runs" / "arrays")
    run = vcagen.load("runs/arrays")
    assert (run.data.num_classes, run.data.channels, run.vae.is_identity) == (3, 3, True)
    __main__.do("encode", ["arrays:my/folder", "--out=latents", "--num_workers=0"], prog="vcagen encode")
    assert (home / "latents" / "shards.json").is_file()


def test_extractor(run, home):
    command(add(home, "extractor"))
    assert set(results(run)) == {"fd_histogram_16"}


def test_metric(run, home):
    command("vcagen sample --run_dir runs/quickstart")
    (folder,) = (run / "samples").iterdir()
    before = results(run)
    command(add(home, "metric").replace("FOLDER", folder.name))
    assert results(run).pop("mean_shift_16") > 0
    assert before.items() <= results(run).items()
