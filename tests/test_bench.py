"""The benchmarks run: a table on stdout and the same numbers as JSON. What they measure is not asserted."""

import json

import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image

from vcagen.__main__ import main
from vcagen.bench import _timing


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
        "--peer=other_project:Network",
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
    assert len(header) == 7


@pytest.mark.slow
def test_sample_and_vae(capsys, tmp_path):
    small = ["--size=S/8", "--image_size=64", "--num_images=2", "--batch=2", "--num_steps=2", "--repeats=1"]
    main(["bench", "sample", *small, "--json", str(tmp_path / "sample.json")])
    assert json.loads((tmp_path / "sample.json").read_text())["session_s"] > 0
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
