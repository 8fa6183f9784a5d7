"""The commands of the README and of docs/ run as they are written, or with smaller sizes where they would take days."""

import ast
import json
import re
import shlex
import shutil

import numpy as np
import pytest
import tiny
import torch
from helpers import ROOT, image_folder, python, readme_block, tiny_vae
from PIL import Image

from vcagen import __main__
from vcagen.config import command_line
from vcagen.networks.dit import DiT

PAGES = ["README.md", *(f"docs/{file.name}" for file in sorted((ROOT / "docs").glob("*.md")))]


@pytest.fixture
def clone(tmp_path):
    """A folder with the scripts and configurations of the project, to run commands in."""
    for name in ("train.py", "sample.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    return tmp_path


def words_of(command):
    """A command's arguments for Python: `vcagen JOB` is `python -m vcagen JOB`."""
    words = shlex.split(command)
    assert words[0] in ("python", "vcagen"), command
    return words[1:] if words[0] == "python" else ["-m", *words]


def run(command, folder, *extra, **paths):
    """Run one command in `folder`, with other paths and more options."""
    for name, path in paths.items():
        command = command.replace(name, str(path))
    return python(*words_of(command), *extra, cwd=folder, timeout=900)


def commands(page):
    """(job, arguments) of every command line of ours in a page, without its launcher."""
    for block in re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.S):
        for line in re.split(r"\n|&&", block.strip()):
            words = shlex.split(line)
            words = shlex.split(words[-1]) if words[0] == "srun" else words
            found = [i for i, word in enumerate(words) if word in ("vcagen", "train.py", "sample.py")]
            if found and words[0] != "pip":
                start = found[0]
                rest = words[start + 1 :] if words[start] == "vcagen" else [words[start][:-3], *words[start + 1 :]]
                name = next(name for name in (" ".join(rest[:2]), rest[0]) if name in __main__.JOBS)
                yield name, rest[len(name.split()) :]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_names_options_and_files_that_exist(page, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(command_line, "_import", lambda module: None)  # test_extend.py has the modules
    for job, arguments in commands(page):
        command_line.parse(__main__.JOBS[job][0], arguments, prog=job)
        for word in arguments:
            assert not word.startswith("configs/") or (ROOT / word).is_file(), word


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert target.startswith("https://") or ((ROOT / page).parent / target).is_file(), target


def test_every_job_is_in_the_documents():
    assert {job for page in PAGES for job, _ in commands(page)} == __main__.JOBS.keys()


def test_the_list_of_jobs_is_the_one_printed(capsys):
    __main__.main([])
    listed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert [line.strip() for line in readme_block("jobs")] == [line.strip() for line in listed]


def test_the_promises_are_those_of_the_folders():
    table = re.search(r"<!-- layout -->\n((?:\|.*\n)+)", (ROOT / "README.md").read_text()).group(1).splitlines()[2:]
    promises = dict(re.fullmatch(r"\| `(\w+)/` \| (.*) \|", row).groups() for row in table)
    folders = {file.parent.name: ast.get_docstring(ast.parse(file.read_text())).splitlines()[0]
               for file in ROOT.glob("vcagen/*/__init__.py")}  # fmt: skip
    assert folders.pop("jobs")
    assert promises == folders


def test_the_published_numbers_are_those_of_the_table(tmp_path, capsys):
    from vcagen.paper.table import load_table

    published = {row.name: row.published for row in load_table(ROOT / "configs" / "table2.yaml").rows}
    text = (ROOT / "README.md").read_text()
    cells = re.findall(r"([DS]iT-\w/\d(?: \+ VCA)?) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", text)
    assert len(cells) == 8
    for name, params, gflops, fid in cells:
        assert float(fid) == published[name]["fid"]
        assert round(float(gflops), 1) == published[name]["gflops"]
        assert abs(float(params) - published[name]["params"]) < 0.25


def test_the_test_command_is_the_one_of_ci():
    (command,) = readme_block("tests")
    install, test = command.split(" && ")
    ci = (ROOT / ".ci" / "run").read_text()
    assert install.replace("pip install", "pip install -q") in ci
    assert test in ci


def test_presets_exist():
    for preset in ("one_gpu", "eight_gpus", "several_machines", "fsdp"):
        assert (ROOT / "configs" / "accelerate" / f"{preset}.yaml").is_file()


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
def test_own_images_and_public_weights(clone):
    encode, train, sample, public, inspect, export = readme_block("own images", "docs/imagenet.md")
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
    assert "label rows kept: no class; new: 2" in stderr
    run(sample, clone, "--num_images=4", "--num_steps=3")
    (folder,) = (clone / "runs" / "mine" / "samples").iterdir()
    assert len(list((folder / "images").iterdir())) == 4
    model = DiT(
        input_size=8, patch_size=2, in_channels=4, out_channels=8, hidden_size=384, depth=1, num_heads=6,
        num_classes=1000,
    )  # fmt: skip
    torch.save(dict(model.state_dict()), clone / "DiT-XL-2-256x256.pt")
    _, stderr = run(public, clone, "--num_images=2", "--num_steps=2", "--vae", vae)
    assert "DiT-XL-2-256x256.pt: weights, diffusion by the dit in its name" in stderr
    out, _ = run(inspect, clone)
    assert "384" in out
    run(export, clone)
    run("python sample.py --checkpoint mine.safetensors", clone, "--num_images=2", "--num_steps=3")
    assert len(tiny.metrics(clone / "runs" / "mine")) == 1
