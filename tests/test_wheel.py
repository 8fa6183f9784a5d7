"""The built wheel, away from the clone: its console script trains, samples and runs an experiment."""

import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml
from helpers import ENV, ROOT, python, readme_block

import vcagen


def test_every_folder_of_the_package_is_in_the_wheel():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {".".join(file.parent.relative_to(ROOT).parts) for file in ROOT.glob("vcagen/**/__init__.py")}
    assert set(packages) == folders | {"vcagen.configs"}


@pytest.fixture(scope="module")
def vcagen_command(tmp_path_factory):
    """Build and install the wheel; returns a function that runs its console script in an empty folder."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # the build leaves files beside the sources
    for name in ("vcagen", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    offline = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    python("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source, env=offline)
    (wheel,) = folder.glob("vcagen-*.whl")
    assert wheel.name.startswith(f"vcagen-{vcagen.__version__}-")
    site = folder / "site"
    python("-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel, env=offline)
    shutil.rmtree(source)
    home = folder / "home"
    home.mkdir()

    def run(*words):
        done = subprocess.run(
            [site / "bin" / "vcagen", *words],
            capture_output=True, text=True, timeout=1200, env={**ENV, "PYTHONPATH": str(site)}, cwd=home,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    where = subprocess.run(
        [sys.executable, "-c", "import vcagen; print(vcagen.__file__)"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(site)}, cwd=home,
    )  # fmt: skip
    assert where.stdout.strip() == str(site / "vcagen" / "__init__.py")
    run.home = home
    return run


@pytest.mark.slow
def test_the_quick_start_from_a_wheel(vcagen_command):
    run, home = vcagen_command, vcagen_command.home
    assert run("--version").strip() == vcagen.__version__
    run("train", "--config", "quickstart", "--train.steps", "3")
    assert yaml.safe_load((home / "runs/quickstart/config.yaml").read_text())["model"]["attention"] == "vca"
    assert (home / "runs/quickstart/checkpoints/step_0000003").is_dir()
    run("sample", "--run_dir", "runs/quickstart", "--num_images", "16", "--num_steps", "3")
    (folder,) = (home / "runs/quickstart/samples").iterdir()
    assert "fd_pixels_16" in json.loads((folder / "results.json").read_text())["metrics"]
    assert len(list((folder / "images").iterdir())) == 16


@pytest.mark.slow
def test_the_miniature_from_a_wheel(vcagen_command):
    run, home = vcagen_command, vcagen_command.home
    (command,) = readme_block("miniature", "docs/evidence.md")
    name, *words = shlex.split(command)
    assert name == "vcagen"
    run(*words, "--seeds=1", "--steps=3", "--num_images=20")
    report = home / "runs" / "miniature" / "report"
    rows = json.loads((report / "miniature.json").read_text())["rows"]
    assert len(rows) == 8
    assert all(row["score"] > 0 and not row["marks"] for row in rows)
    assert (report / "miniature.png").is_file()
    assert "62.3" in run("report", "table2", "--runs", "nothing")
