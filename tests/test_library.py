"""vcagen as a library: the names, what their import costs, and the README's ten lines."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from helpers import image_folder, python, readme_block

import vcagen
from vcagen.__main__ import main
from vcagen.data.latents import ImageDataset

NAMES = [
    "ATTENTION",
    "VisualContrastAttention",
    "DiT",
    "GaussianDiffusion",
    "LinearInterpolant",
    "with_cfg",
    "ddpm_sample",
    "ddim_sample",
    "dpmpp_sample",
    "ode_sample",
    "sde_sample",
    "SAMPLERS",
    "PROCESSES",
    "DATASETS",
    "EXTRACTORS",
    "load",
    "fid",
    "Config",
    "build_trainer",
]
HEAVY = "import sys; heavy = {'torch', 'diffusers', 'accelerate', 'timm', 'matplotlib'} & sys.modules.keys()"


def test_start_up_is_light():
    python("-c", f"import vcagen; dir(vcagen); vcagen.__version__; {HEAVY}; assert not heavy, heavy")
    python("-c", f"from vcagen import __main__ as m; m.main(['--help']); {HEAVY}; assert not heavy, heavy")


def test_every_public_name_is_there():
    for name in dir(vcagen):
        assert getattr(vcagen, name) is not None
    assert set(NAMES) <= set(dir(vcagen))
    assert vcagen.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="no attribute 'VisualContrast'"):
        vcagen.VisualContrast  # noqa: B018
    from vcagen import DiT, load  # noqa: F401


def test_the_ten_lines_of_the_readme(tmp_path, monkeypatch):
    lines = readme_block("library")
    assert len(lines) <= 11
    tiny.train(tmp_path / "runs" / "quickstart")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    found = {}
    exec("\n".join(lines), found)
    assert [image.size for image in found["images"]] == [(8, 8)] * 10
    assert len(found["figure"].axes) == 10
    again = found["run"].sample(labels=range(10), cfg_scale=4.0, seed=0, output="tensor")
    assert again.dtype == torch.uint8
    assert [image.tobytes() for image in found["images"]] == [image.numpy().tobytes() for image in again]


def test_labels_of_a_notebook_and_tf32_of_the_training(tmp_path):
    tiny.train(tmp_path)
    run, seen = vcagen.load(tmp_path), []
    wanted = run.sample([1, 2], batch=2, output="tensor")

    def network(x, t, y):
        seen.append((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))
        return run.network(x, t, y)

    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    for labels in (np.array([1, 2]), torch.tensor([1, 2])):
        watched = replace(run, network=network, tf32=not run.tf32)
        assert watched.sample(labels, batch=2, output="tensor").equal(wanted)
    assert set(seen) == {(True, True)}
    assert before == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)


def test_latents_are_what_the_images_are_decoded_from(tmp_path):
    tiny.train(tmp_path)
    run = vcagen.load(tmp_path)
    options = {"indices": [5, 1], "batch": 4, "seed": 3, "num_steps": 2, "cfg_scale": 1.5}
    latents = run.latents(["3", 7], **options)
    assert (latents.shape, latents.dtype) == ((2, 1, 8, 8), torch.float32)
    assert run.vae.decode(latents).equal(run.sample(["3", 7], output="tensor", **options))
    with pytest.raises(ValueError, match="labels: 'cow'"):
        run.latents(["cow"])


def test_fid_of_two_folders_is_the_score_of_evaluate(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        image_folder(tmp_path / name, {"x": 6}, size=12, seed=seed)
    a, b = tmp_path / "a", tmp_path / "b"
    score = vcagen.fid(a, b, extractor="pixels")
    main(["evaluate", str(a), "--reference", str(b), "--extractor", "pixels", "--out", str(tmp_path / "r.json")])
    assert score == json.loads((tmp_path / "r.json").read_text())["metrics"]["fd_pixels_6"] > 0
    assert vcagen.fid(a, a, extractor="pixels") == pytest.approx(0, abs=1e-9)
    image_folder(tmp_path / "c", {"x": 6}, size=20, seed=2)
    assert vcagen.fid(a, tmp_path / "c", extractor="pixels", image_size=8) > 0
    for one, other in ((a, tmp_path / "c"), (a, tmp_path / "no"), (tmp_path / "no", b)):
        with pytest.raises(ValueError, match=r"reference: |no: "):
            vcagen.fid(one, other, extractor="pixels")


def test_a_process_of_other_outputs_is_refused(tmp_path):
    with pytest.raises(ValueError, match="process: GaussianDiffusion has 2 outputs a channel, flow 1"):
        vcagen.build_trainer(tiny.config(tmp_path), process=vcagen.GaussianDiffusion())


def test_an_own_set_and_process_are_trained_and_resumed(tmp_path):
    seen = []

    class Watched(vcagen.LinearInterpolant):
        def losses(self, model, x_start, y, *, t, noise):
            seen.append(y)
            return super().losses(model, x_start, y, t=t, noise=noise)

    pictures = torch.arange(4 * 3 * 64, dtype=torch.uint8).reshape(4, 3, 8, 8)
    mine = vcagen.ImageSet(list("abcd"), [0, 0, 1, 1], ["x", "y"], 3, 8, pictures.__getitem__, in_memory=True)
    for steps in (2, 3):
        config = tiny.config(tmp_path, vae__path="identity", train__steps=steps, train__batch_size=2)
        trainer = vcagen.build_trainer(config, dataset=mine, process=Watched())
        trainer.fit()
    assert trainer.step == 3
    assert {int(label) for batch in seen for label in batch} <= {0, 1, 2}
    assert len(seen) >= 3
    run = vcagen.load(tmp_path)
    assert run.data.class_names == ("x", "y")
    other = vcagen.build_trainer(
        tiny.config(tmp_path / "b", train__steps=1, train__batch_size=2), dataset=ImageDataset(mine, run.vae)
    )
    assert other.vae.is_identity
    with pytest.raises(ValueError, match="no: this VAE cannot be loaded"):
        vcagen.build_trainer(tiny.config(tmp_path / "c", vae__path=str(tmp_path / "no")), dataset=mine)


@pytest.mark.parametrize("name", ["load", "score", "trainer"])
def test_the_snippets_of_the_page(tmp_path, monkeypatch, name):
    if name == "load":
        tiny.train(tmp_path / "runs" / "quickstart", sampling__sampler="ode", sampling__method="euler")
    if name == "score":
        for folder in ("samples", "images"):
            image_folder(tmp_path / "my" / folder, {"x": 4}, size=40)
    monkeypatch.chdir(tmp_path)
    found = {}
    exec("\n".join(readme_block(name, "docs/library.md")), found)
    if name == "load":
        assert [image.size for image in found["images"]] == [(8, 8)] * 2
    if name == "trainer":
        assert found["image"].size == (16, 16)
