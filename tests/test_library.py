"""vcagen as a library: the names, what their import costs, and the README's ten lines."""

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from helpers import python, readme_block

import vcagen

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
