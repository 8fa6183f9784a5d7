"""The benchmarks run: a table on stdout and the same numbers as JSON. What they measure is not asserted."""

import gc
import json
import re
import subprocess
import sys
import weakref

import pytest
import tiny
import torch
from accelerate.state import AcceleratorState
from helpers import ENV, ROOT
from PIL import Image

import vcagen
from vcagen.__main__ import JOBS, main
from vcagen.bench import _timing, train
from vcagen.build import build_model
from vcagen.config import command_line
from vcagen.config.options import ModelConfig, ProcessConfig
from vcagen.data.latents import DataSpec
from vcagen.evaluation.evaluate import Evaluator
from vcagen.evaluation.features import load_extractor
from vcagen.evaluation.reference import open_reference
from vcagen.networks.cost import measure


@pytest.fixture(autouse=True)
def _as_before():
    """Threads and accelerate's state, which are global."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    AcceleratorState._reset_state(reset_partial_state=True)


def run(capsys, folder, *args):
    """Run a benchmark; returns the cells of its table and the content of its JSON file."""
    file = folder / "numbers.json"
    main(["bench", *args, "--json", str(file)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(len(row) == len(cells[0]) for row in cells)
    return cells[:1] + cells[2:], json.loads(file.read_text())


def test_attention(capsys, tmp_path):
    header, *cells = run(
        capsys, tmp_path, "attention", "--tokens=[16,64]", "--widths=[64]", "--modes=[eager]", "--contrast_side=2",
        "--batch_tokens=32", "--seconds=0.01", "--precisions=[float32,bfloat16]", "--threads=1",
        f"--plot={tmp_path / 'speed.png'}",
    )[0]  # fmt: skip
    assert len(cells) == 2 * 2 * 2 * 2  # parts, token counts, precisions, passes
    assert Image.open(tmp_path / "speed.png").width > 300
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert len(numbers["rows"]) == len(cells)
    first = dict(zip(header, cells[0], strict=True))
    assert (first["N"], first["batch"], first["multiply-adds"]) == ("16", "2", f"{2 * 16 / (6 * 4):.2f}")
    assert all(row["ratio"] > 0 and row["plain_ms"] > 0 for row in numbers["rows"])
    layer = next(row for row in numbers["rows"] if row["part"] == "layer" and row["tokens"] == 64)
    assert layer["multiply_add_ratio"] == pytest.approx((4 * 64 + 2 * 64) / (4 * 64 + 6 * 4))


def test_attention_of_recognition(capsys, tmp_path):
    header, *cells = run(
        capsys, tmp_path, "attention", "--recognition=true", "--parts=[layer]", "--modes=[eager]", "--seconds=0.01",
    )[0]  # fmt: skip
    rows = [dict(zip(header, row, strict=True)) for row in cells]
    assert [(row["D"], row["N"], row["n"]) for row in rows] == [("192", "196", "49")] * 2 + [("96", "3136", "9")] * 2
    assert rows[0]["multiply-adds"] == f"{(4 * 192 + 2 * 196) / (4 * 192 + 9 + 6 * 49):.2f}"


def test_networks_of_timm(capsys, tmp_path):
    (header, *cells), numbers = run(
        capsys, tmp_path, "recognition", "--models=[deit_tiny_patch16_224]", "--batch=1", "--modes=[eager]",
        "--seconds=0.01",
    )  # fmt: skip
    assert [row[header.index("pass")] for row in cells] == ["forward", "forward + backward"]
    assert len(numbers["rows"]) == 2
    row = numbers["rows"][0]
    assert row["ratio"] > 0
    assert row["plain_images_per_second"] > 0
    with pytest.raises(ValueError, match="models: timm has no vca_pvt_v2_b0"):
        main(["bench", "recognition", "--models=[pvt_v2_b0]"])


def test_attention_with_heads_of_xl(capsys, tmp_path):
    cells, numbers = run(
        capsys, tmp_path, "attention", "--tokens=[256]", "--widths=[144]", "--head_width=72", "--modes=[eager]",
        "--seconds=0.01", "--parts=[attend]",
    )  # fmt: skip
    assert len(cells) == 3
    assert (numbers["head_width"], numbers["batch_tokens"], numbers["rows"][0]["batch"]) == (72, 2048, 8)


@pytest.mark.slow
def test_attention_compiled(capsys, tmp_path):
    cells, _ = run(
        capsys, tmp_path, "attention", "--tokens=[16]", "--widths=[64]", "--modes=[compiled]", "--contrast_side=2",
        "--batch_tokens=32", "--seconds=0.01", "--parts=[layer]",
    )  # fmt: skip
    assert len(cells) == 3


@pytest.mark.slow
def test_train(capsys, tmp_path, monkeypatch):
    (tmp_path / "other_project.py").write_text(
        "import torch\n"
        "class Network(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.convolution = torch.nn.Conv2d(4, 8, 1)\n"
        "    def forward(self, x, t, y):\n"
        "        return self.convolution(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (header, *cells), numbers = run(
        capsys, tmp_path, "train", "--sizes=[S/8]", "--precisions=[float32,bf16]", "--batch=1", "--seconds=0.01",
        "--peer=other_project:Network", "--peak_tflops=0.1",
    )  # fmt: skip
    assert [row[0] for row in cells] == [
        "S/8 mhsa, float32, eager", "S/8 vca, float32, eager",
        "S/8 mhsa, bf16, eager", "S/8 vca, bf16, eager",
        "other_project:Network alone, float32, eager",
    ]  # fmt: skip
    assert numbers["turns"] == _timing.MIN_TURNS
    assert all(row["images_per_second"] > 0 for row in numbers["rows"])
    assert [row.get("time_over_mhsa") is not None for row in numbers["rows"]] == [False, True, False, True, False]
    assert all(row["faster_than_peer"] > 0 for row in numbers["rows"][:-1])
    assert len(header) == 9
    assert all(
        row["model_flop_use_percent"] == pytest.approx(100 * row["tflops"] / 0.1) for row in numbers["rows"][:-1]
    )


def test_train_keeps_one_group_on_the_device(capsys, tmp_path, monkeypatch):
    """What is compared takes turns; the networks of before are gone by then, and the use of the peak is arithmetic."""
    alive, networks, made = [], weakref.WeakSet(), train._trainer

    def trainer(*args):
        built = made(*args)
        networks.add(built.network)
        return built

    def in_turns(works, *, seconds, device):
        gc.collect()
        alive.append((len(networks), seconds))
        return {name: [2.0, 2.0] for name in works}

    monkeypatch.setattr(train, "_trainer", trainer)
    monkeypatch.setattr(train, "in_turns", in_turns)
    monkeypatch.setattr(train, "ITEMS", 4)
    (header, *cells), numbers = run(
        capsys, tmp_path, "train", "--sizes=[S/8]", "--precisions=[float32,bf16]", "--batch=3", "--seconds=10",
        "--peak_tflops=0.001",
    )  # fmt: skip
    assert alive == [(2, 5.0), (2, 5.0)]
    with torch.device("meta"):
        cost = measure(build_model(ModelConfig("S/8"), ProcessConfig(), DataSpec(4, 32, 32, 1000, (), 256, {})))
    assert numbers["rows"][0]["tflops"] == pytest.approx(6 * 3 * cost.multiply_adds / 2.0 / 1e12)
    assert (header[-1], len(cells)) == ("of peak %", 4)
    assert float(cells[0][-1]) == pytest.approx(1e5 * numbers["rows"][0]["tflops"], abs=0.06)


@pytest.mark.slow
def test_sample_and_vae(capsys, tmp_path):
    small = ["--size=S/8", "--image_size=64", "--batch=2", "--num_steps=2", "--repeats=1", "--precision=bf16"]
    main(["bench", "sample", *small, "--json", str(tmp_path / "sample.json")])
    numbers = json.loads((tmp_path / "sample.json").read_text())
    assert (numbers["num_images"], numbers["precision"], numbers["compile"]) == (4, "bf16", False)
    assert numbers["images_per_second"] == pytest.approx(4 / numbers["session_s"])
    options = ["--items=64", "--read_batch=16", "--seconds=0.1", "--repeats=1", "--num_workers=1"]
    main(["bench", "vae", *options, "--json", str(tmp_path / "vae.json")])
    numbers = json.loads((tmp_path / "vae.json").read_text())
    for name in "encoded_per_second", "decoded_per_second", "latents_per_second", "latents_per_second_loader":
        assert numbers[name] > 0
    assert "latents_per_second" in capsys.readouterr().out


def test_turns_are_taken_in_order():
    order = []
    works = {name: (lambda name=name: order.append(name)) for name in "ab"}
    times = _timing.in_turns(works, seconds=0.0, device=torch.device("cpu"))
    assert order == ["a", "b"] * (2 + _timing.MIN_TURNS)
    assert [len(seconds) for seconds in times.values()] == [_timing.MIN_TURNS] * 2
    assert _timing.ratio([4.0, 9.0, 100.0], [2.0, 3.0, 1.0]) == 3.0


def test_the_fastest_turn_counts(monkeypatch):
    clock = iter([0.0, 3.0, 10.0, 15.0, 20.0, 22.0, 30.0, 37.0])
    monkeypatch.setattr(_timing.time, "perf_counter", lambda: next(clock))
    order = []
    seconds = _timing.fastest([lambda: order.append("a"), lambda: order.append("b")], 2, torch.device("cpu"))
    assert (seconds, order) == ([2.0, 5.0], ["a", "b"] * 2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["attention", "--tokens=[15]"], "tokens: 15 is not a square"),
        (["attention", "--widths=[100]"], "widths: 100 is not a multiple of 64"),
        (["attention", "--widths=[384]", "--head_width=72"], "widths: 384 is not a multiple of 72"),
        (["attention", "--device=nowhere"], "device: nowhere"),
        (["attention", "--threads=0"], "threads: expected int >0"),
        (["vae", "--device=cuda:99"], "device: cuda:99"),
        (["train", "--batch=0"], "batch: expected int >0"),
        (["train", "--attentions=[]", "--peer=no_such_module:Network"], "peer: no_such_module:Network"),
        (["train", "--attentions=[]", "--peer=json:loads"], "peer: json:loads"),
        (["_timing"], "bench _timing: unknown job; choose from .*bench attention"),
    ],
)
def test_mistakes_are_named(args, message):
    with pytest.raises(ValueError, match=message):
        main(["bench", *args])


@pytest.mark.slow
def test_gpu_check_runs_dry_and_goes_on(tmp_path):
    def check():
        script = ["bash", "docs/gpu_check.sh", str(tmp_path)]
        done = subprocess.run(script, cwd=ROOT, env={**ENV, "DRY": "1", "PYTHON": sys.executable},
                              capture_output=True, text=True, timeout=560)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "all done" in check()
    names = {
        "kernels_s",
        "kernels_xl",
        "attention_s",
        "attention_xl",
        "train_s",
        "train_s_compiled",
        "train_xl",
        "sample",
        "vae",
    }
    assert names <= {path.stem for path in tmp_path.glob("*.json")}
    (tmp_path / "attention_s.txt").unlink()
    again = [line for line in check().splitlines() if line.startswith("== ") and "at most" in line]
    assert [line.split()[1] for line in again] == ["attention_s"]


def test_gpu_check_takes_eight_minutes():
    text = (ROOT / "docs" / "gpu_check.sh").read_text()
    caps = re.findall(r"^(?:  )?(?:part|vcagen|bench|tests) \w+ (\d+) ", text, re.M)
    assert len(caps) == 15
    assert sum(map(int, caps)) <= 480 + 10  # and ten seconds to name the machine


def test_gpu_check_gives_options_that_exist(tmp_path):
    """Without DRY, its commands printed in place of run."""
    done = subprocess.run(["bash", "docs/gpu_check.sh", str(tmp_path)], cwd=ROOT, env={**ENV, "PYTHON": "echo"},
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert "== not done: machine" in done.stdout or "== all done" in done.stdout, done.stdout + done.stderr
    commands = [path.read_text().split() for path in tmp_path.glob("*.txt") if path.stem != "machine"]
    jobs = [command[2:] for command in commands if command[:2] == ["-m", "vcagen"]]
    assert len(jobs) >= 10
    for words in jobs:
        name, args = (" ".join(words[:2]), words[2:]) if words[0] == "bench" else (words[0], words[1:])
        command_line.parse(JOBS[name][0], args, prog=name)


def test_calls(capsys, tmp_path):
    tiny.train(tmp_path / "run")
    command = ["bench", "calls", str(tmp_path / "run"), "--reference", "digits", "--extractor", "pixels",
               "--num_images", "20", "--batch", "20", "--cfg_scales=[1,2]"]  # fmt: skip
    main([*command, "--calls=[1]"])
    assert "rk4" not in capsys.readouterr().out, "one call is no step of four"
    main([*command, "--calls=[1,4]"])
    printed = capsys.readouterr().out
    points = json.loads((tmp_path / "run" / "calls.json").read_text())["points"]
    found = {(p["sampler"], p["num_steps"], p["cfg_scale"]): (p["calls"], p["value"]) for p in points}
    assert len(found) == len(points) == 2 * (2 + 5)
    assert {calls for calls, _ in found.values()} == {1, 4}
    assert found["ode rk4", 1, 1.0][0] == found["ode heun2", 2, 2.0][0] == found["sde", 4, 1.0][0] == 4
    run = vcagen.load(tmp_path / "run")
    images = run.sample("balanced", indices=range(20), batch=20, output="tensor", sampler="ode", method="euler",
                        num_steps=4, cfg_scale=2.0)  # fmt: skip
    extractor = load_extractor("pixels")
    evaluator = Evaluator(extractor, open_reference("digits", extractor), 20)
    evaluator.update(images, range(20))
    assert found["ode euler", 4, 2.0][1] == pytest.approx(evaluator.finalize()["metrics"]["fd_pixels_20"])
    assert re.search(r"\| ode euler, cfg 2 +\|", printed)
    assert Image.open(tmp_path / "run" / "calls.png").width > 300
    with pytest.raises(ValueError, match=r"calls\.json: of other weights, images or scores"):
        main([*command, "--num_images", "30"])
