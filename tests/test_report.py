"""Reports from run folders made by hand: the right numbers, and marks on what is not comparable."""

import json
import os
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from helpers import ROOT
from matplotlib.axes import Axes
from PIL import Image

from vcagen.__main__ import do
from vcagen.config.options import to_plain
from vcagen.data.images import open_dataset_images
from vcagen.networks.cost import Cost
from vcagen.networks.weights import save_weights
from vcagen.paper.comparison import compare
from vcagen.paper.digits import DigitAccuracy
from vcagen.paper.plots import plot_samples, plot_steps
from vcagen.paper.report import report_table, table_text, table_values
from vcagen.paper.run_results import read_run
from vcagen.paper.table import load_table
from vcagen.sampling.noise import SeededNoise
from vcagen.system.run_folder import checkpoint_folder

SHA = {name: name * 16 for name in ("ref1", "ref2", "inc1", "vae1", "vae2")}
SCORES = {"dit": 70.5, "dit-vca": 65.25, "sit": 60.0, "sit-vca": 61.5}
ROWS = [
    {"name": "DiT", "run": "dit", "set": {"process.name": "diffusion"},
     "published": {"params": 33.1, "gflops": 0.4, "fid": 68.0}},
    {"name": "DiT + VCA", "run": "dit-vca", "baseline": "DiT",
     "set": {"process.name": "diffusion", "model.attention": "vca"},
     "published": {"params": 33.7, "gflops": 0.4, "fid": 63.0}, "note": "a note of the row"},
    {"name": "SiT", "run": "sit", "set": {"process.name": "flow"}, "published": {"fid": 57.0}},
    {"name": "SiT + VCA", "run": "sit-vca", "baseline": "SiT",
     "set": {"process.name": "flow", "model.attention": "vca"}, "published": {"fid": 53.0}},
]  # fmt: skip


def write_table(folder, rows=ROWS, **more):
    content = {"title": "A table", "set": {"model.size": "S/8"}, "rows": rows, **more}
    path = folder / "table.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def result(fid, process="diffusion", **changes):
    """results.json as sample.py writes it, with changes, `__` for dots."""
    sampler = {"sampler": "ddpm"} if process == "diffusion" else {"sampler": "sde", "diffusion_form": "sigma"}
    values = {
        "metrics": {"fid_50k": fid, "is_mean": 20.0},
        "n_samples": 50_000,
        "reference": {"kind": "npz", "path": "ref.npz", "stats_sha256": SHA["ref1"]},
        "weights": {"name": "inception-2015-12-05", "sha256": SHA["inc1"]},
        "extractor": {"name": "inception"},
        "sampling": {"format": 2, "num_images": 50_000, "batch": 64, "seed": 0, "step": 400_000, "ema_decay": 0.9999,
                     "weights_sha256": str(fid), "process": process, "vae": SHA["vae1"], **sampler, "num_steps": 250,
                     "cfg_scale": 1.0, "labels": "random", "precision": "no", "compile": False},
        "warnings": ["a warning"],
    }  # fmt: skip
    for key, value in changes.items():
        *parents, last = key.split("__")
        inner = values
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    return values


def write_run(folder, config, results, rates=(100.0, 128.0, 512.0)):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(to_plain(config)))
    lines = [{"step": 100 * (i + 1), "loss": 1 / (i + 1), "mse": 0.5 / (i + 1), "grad_norm": None,
              "images_per_second": rate} for i, rate in enumerate(rates)]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, values in results.items():
        samples = folder / "samples" / name
        samples.mkdir(parents=True)
        (samples / "results.json").write_text(json.dumps(values))


def make(folder, *, rows=ROWS, changes=None, **more):
    """A table with a run for each row; `changes` are those of some rows' results."""
    path = write_table(folder, rows, **more)
    for row in load_table(path).rows:
        config = row.config()
        values = result(SCORES[row.run], config.process.name, **(changes or {}).get(row.run, {}))
        write_run(folder / "runs" / row.run, config, {"a": values})
    return path


def report(folder, path):
    text = report_table(load_table(path), "table", folder / "runs", folder / "out")
    values = json.loads((folder / "out" / "table.json").read_text())
    return text, {row["name"]: row for row in values["rows"]}


def compared(folder, path, **options):
    table = load_table(path)
    runs = [
        [read_run(run, seed, **options) for seed, run in table.runs(row, folder / "runs").items()] for row in table.rows
    ]
    return compare(table, [Cost(1, 1)] * len(table.rows), runs)


def by_name(lines):
    return {row["name"]: row for row in table_values("T", lines)["rows"]}


def test_numbers_of_a_complete_table(tmp_path, capsys):
    path = make(tmp_path)
    do("report", [str(path), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")], prog="vcagen report")
    printed = capsys.readouterr().out
    text = (tmp_path / "out" / "table.md").read_text()
    assert printed.strip() == text.strip()
    rows = {row["name"]: row for row in json.loads((tmp_path / "out" / "table.json").read_text())["rows"]}
    assert [row["score"] for row in rows.values()] == list(SCORES.values())
    assert rows["DiT + VCA"]["difference"] == -5.25
    assert rows["SiT + VCA"]["difference"] == 1.5
    assert rows["DiT + VCA"]["published_difference"] == -5.0
    assert rows["DiT"]["difference"] is None
    assert rows["DiT"]["seconds_per_step"] == 256 / 128
    assert rows["DiT"]["params"] == pytest.approx(33.15e6, abs=1e4)
    assert rows["DiT"]["multiply_adds"] == pytest.approx(0.358e9, abs=1e6)
    assert all(row["marks"] == [] for row in rows.values())
    facts = rows["DiT"]["runs"][0]["facts"]
    assert facts["sampler"] == "ddpm"
    assert facts["num_steps"] == 250
    assert facts["reference"] == f"npz {SHA['ref1'][:12]}"
    assert facts["training mirrors"] is True
    assert facts["training learning_rate"] == 1e-4

    (line,) = [line for line in text.splitlines() if line.startswith("| DiT + VCA") and "65.25" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["DiT + VCA", "33.75", "33.7", "0.3886", "0.4", "63.0", "-5.0", "65.25", "-5.25", "2000.0", "1"]
    assert "fid_50k" in text
    assert "Not compared" not in text
    assert "- 4 x a warning" in text
    assert "a note of the row" in text

    with Image.open(tmp_path / "out" / "table.png") as picture:
        colours = np.array(picture.convert("RGB")).reshape(-1, 3)
    assert (colours == (31, 119, 180)).all(1).any(), "no point of ours in tab:blue"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sampling__num_steps": 50}, "num_steps 50, 250 in DiT"),
        ({"sampling__sampler": "ddim", "sampling__eta": 0.0}, "sampler ddim, ddpm in DiT; eta 0.0, None in DiT"),
        ({"sampling__cfg_scale": 1.5}, "cfg_scale 1.5, 1.0 in DiT"),
        ({"sampling__cfg_interval": [0, 0.5]}, "cfg_interval [0, 0.5], None in DiT"),
        ({"n_samples": 10_000, "metrics": {"fid_10k": 66.0}}, "images 10000, 50000 in DiT"),
        ({"reference__stats_sha256": SHA["ref2"]}, "reference npz ref2ref2ref2, npz ref1ref1ref1 in DiT"),
        ({"weights__sha256": "0" * 64}, "extractor inception 000000000000, inception inc1inc1inc1 in DiT"),
        ({"sampling__vae": SHA["vae2"]}, "vae vae2vae2vae2, vae1vae1vae1 in DiT"),
        ({"sampling__step": 100_000}, "step 100000, 400000 in DiT"),
        ({"sampling__labels": "balanced"}, "labels balanced, random in DiT"),
        ({"sampling__ema_decay": None}, "ema_decay None, 0.9999 in DiT"),
        ({"sampling__precision": "bf16"}, "precision bf16, no in DiT"),
        ({"sampling": {}}, "how its images were made is not known"),
        ({"sampling": None}, "how its images were made is not known"),
    ],
)
def test_a_row_made_otherwise_is_marked_and_takes_no_part_in_differences(tmp_path, changes, reason):
    path = make(tmp_path, changes={"dit-vca": changes})
    lines = compared(tmp_path, path)
    text, rows = table_text("T", lines, "t.png"), by_name(lines)
    assert "; ".join(rows["DiT + VCA"]["marks"]) == reason
    assert rows["DiT + VCA"]["difference"] is None
    assert rows["SiT + VCA"]["difference"] == 1.5
    assert [name for name, row in rows.items() if row["marks"]] == ["DiT + VCA"]
    assert f"- DiT + VCA: {rows['DiT + VCA']['marks'][0]}" in text
    assert " * |" in text


def test_a_baseline_made_otherwise_gives_no_difference(tmp_path):
    rows = by_name(compared(tmp_path, make(tmp_path, changes={"sit": {"sampling__cfg_scale": 4.0}})))
    assert rows["SiT + VCA"]["marks"] == ["cfg_scale 1.0, 4.0 in SiT"]
    assert rows["SiT + VCA"]["difference"] is None
    assert rows["DiT + VCA"]["difference"] == -5.25


def test_a_baseline_of_unknown_images_is_no_neighbour(tmp_path):
    rows = by_name(compared(tmp_path, make(tmp_path, changes={"sit": {"sampling": {}}})))
    assert rows["SiT"]["marks"] == ["how its images were made is not known"]
    assert rows["SiT + VCA"]["marks"] == []
    assert rows["SiT + VCA"]["difference"] is None


def test_rows_without_runs_show_what_is_published(tmp_path):
    text, rows = report(tmp_path, write_table(tmp_path))
    assert all(row["score"] is None and row["marks"] == [] and row["runs"] == [] for row in rows.values())
    assert rows["DiT + VCA"]["published_difference"] == -5.0
    assert "published numbers only" in text
    assert "fid_50k" not in text
    assert (tmp_path / "out" / "table.png").stat().st_size > 1000


def test_the_newest_evaluation_or_the_score_of_that_name_stands_for_a_run(tmp_path):
    path = make(tmp_path)
    others = {"b": result(30.0, sampling__cfg_scale=4.0), "0": result(90.0, metrics={"fid_10k": 90.0})}
    for age, (name, values) in enumerate(others.items()):
        (tmp_path / "runs" / "dit" / "samples" / name).mkdir()
        file = tmp_path / "runs" / "dit" / "samples" / name / "results.json"
        file.write_text(json.dumps(values))
        os.utime(file, (1e9 + age, 1e9 + age))  # older than that of `make`
    assert by_name(compared(tmp_path, path))["DiT"]["score"] == 70.5
    assert by_name(compared(tmp_path, path, score="fid_10k"))["DiT"]["score"] == 90.0
    rows = by_name(compared(tmp_path, path, score="is_mean"))
    assert rows["SiT"]["score_name"] == "is_mean"
    os.utime(tmp_path / "runs" / "dit" / "samples" / "b" / "results.json")
    rows = by_name(compared(tmp_path, path))
    assert rows["DiT"]["score"] == 30.0
    assert rows["DiT + VCA"]["marks"] == ["cfg_scale 1.0, 4.0 in DiT"]


def test_a_run_of_another_network_is_marked(tmp_path):
    path = make(tmp_path)
    config = tmp_path / "runs" / "dit-vca" / "config.yaml"
    values = yaml.safe_load(config.read_text())
    values["model"]["attention"] = "mhsa"
    values["model"]["depth"] = 3
    values["data"]["num_workers"] = 17
    config.write_text(yaml.safe_dump(values))
    rows = by_name(compared(tmp_path, path))
    assert rows["DiT + VCA"]["marks"] == [
        "model.attention mhsa in the run, vca in the table",
        "model.depth 3 in the run, None in the table",
    ]
    config.unlink()
    assert by_name(compared(tmp_path, path))["DiT + VCA"]["marks"][0].startswith("training mirrors None, True")


def test_seeds_give_mean_and_spread_and_a_missing_one_is_told(tmp_path):
    path = write_table(tmp_path, ROWS[:2], seeds=[0, 1, 2])
    for row in load_table(path).rows:
        for seed, fid in enumerate([60.0, 62.0, 67.0] if row.run == "dit" else [50.0, 50.0, 53.0]):
            write_run(
                tmp_path / "runs" / row.run / f"seed_{seed}", row.config(), {"a": result(fid, sampling__seed=seed)}
            )
    text, rows = report(tmp_path, path)
    assert rows["DiT"]["score"] == 63.0
    assert rows["DiT"]["spread"] == pytest.approx(13**0.5)
    assert rows["DiT + VCA"]["difference"] == -12.0
    assert rows["DiT + VCA"]["difference_95"] == pytest.approx(4.302653 * 2 / 3**0.5)  # of -10, -12 and -14
    assert rows["DiT"]["difference_95"] is None
    assert "| +- 4.97 |" in text
    assert "seed 0, 1, 2" in text
    (tmp_path / "runs" / "dit-vca" / "seed_1" / "samples" / "a" / "results.json").unlink()
    _, rows = report(tmp_path, path)
    assert rows["DiT + VCA"]["marks"] == ["seed 1: no score"]
    assert rows["DiT + VCA"]["difference"] is None
    assert rows["DiT + VCA"]["difference_95"] is None


def test_scores_over_the_steps_and_samples_of_the_same_noise_are_drawn(tmp_path):
    path = write_table(tmp_path, ROWS[:2], seeds=[0, 1])
    for row in load_table(path).rows:
        for seed in (0, 1):
            results = {f"{step}": result(60.0 - step / 100, sampling__step=step) for step in (100, 200)}
            folder = tmp_path / "runs" / row.run / f"seed_{seed}"
            write_run(folder, row.config(), results)
            for i in range(3):
                for step in results:
                    (folder / "samples" / step / "images").mkdir(exist_ok=True)
                    colour = (255, 0, 0) if row.run == "dit" else (0, 0, 255)
                    Image.new("RGB", (4, 4), colour).save(folder / "samples" / step / "images" / f"{i:06d}.png")
    lines = compared(tmp_path, path)
    with mock.patch.object(Axes, "errorbar", autospec=True) as drawn:
        plot_steps(tmp_path / "steps.png", "T", lines)
    assert [call.args[1:3] for call in drawn.call_args_list] == [((100, 200), [59.0, 58.0])] * 2
    plot_samples(tmp_path / "samples.png", "T", lines, count=3)
    with Image.open(tmp_path / "samples.png") as picture:
        pixels = np.array(picture.convert("RGB"))
    red, blue = ((pixels == colour).all(2).nonzero()[0] for colour in ((255, 0, 0), (0, 0, 255)))
    assert len(red) == pytest.approx(len(blue), rel=0.05)
    assert red.max() < blue.min(), "the rows are one below the other"
    plot_samples(tmp_path / "none.png", "T", lines, count=4)


def test_report_of_a_run(tmp_path, capsys):
    make(tmp_path)
    run = tmp_path / "runs" / "dit"
    do("report", [str(run)], prog="vcagen report")
    text = capsys.readouterr().out
    assert "step 300, loss 0.333333, mse 0.166667, images_per_second 512" in text
    assert "fid_50k" in text
    assert "sampler ddpm, num_steps 250, cfg_scale 1.0" in text
    values = json.loads((run / "report.json").read_text())
    assert values["last"]["step"] == 300
    assert values["scores"][0]["metrics"]["fid_50k"] == 70.5
    assert (run / "report.md").read_text().strip() == text.strip()
    assert (run / "loss.png").exists()
    (run / "loss.png").unlink()
    do("report", [str(run), "--out", str(tmp_path / "elsewhere")], prog="vcagen report")
    assert "](loss.png)" in (tmp_path / "elsewhere" / "report.md").read_text()
    assert (tmp_path / "elsewhere" / "loss.png").exists()
    assert not (run / "loss.png").exists()
    with pytest.raises(ValueError, match="no run folder"):
        do("report", [str(tmp_path)], prog="vcagen report")


def test_a_damaged_run_is_named(tmp_path):
    make(tmp_path)
    run = tmp_path / "runs" / "dit"
    config = run / "config.yaml"
    good = yaml.safe_load(config.read_text())
    for text in (
        "5",
        "a: [",
        yaml.safe_dump({**good, "train": 3}),
        yaml.safe_dump({**good, "objective": {"name": "flow"}}),
    ):
        config.write_text(text)
        with pytest.raises(ValueError, match=r"dit/config\.yaml: "):
            read_run(run)
    save_weights(checkpoint_folder(run, 1) / "model.safetensors", {"x": torch.ones(1)}, {"format": 1})
    with pytest.raises(ValueError, match="format 1, which commit a5c3076 of vcagen reads"):
        read_run(run)


@pytest.mark.parametrize(
    "content",
    [
        *("{", "{}", '{"metrics": {}}', '{"metrics": {"is_mean": 1.0}}'),
        *(
            json.dumps({**result(1), part: "x"})
            for part in ("reference", "extractor", "sampling", "weights", "metrics")
        ),
        json.dumps({**result(1), "metrics": {"a": None}}),
    ],
)
def test_a_damaged_result_is_named(tmp_path, content):
    file = tmp_path / "samples" / "a" / "results.json"
    file.parent.mkdir(parents=True)
    file.write_text(content)
    with pytest.raises(ValueError, match=r"a/results\.json: "):
        read_run(tmp_path)


@pytest.mark.parametrize("rule", ["balanced", "random", [3, 7]])
def test_accuracy_of_a_folder_of_samples(tmp_path, rule):
    """Real digits in the order of the rule are recognised; those of the next rule are not."""
    digits = open_dataset_images("digits")
    wanted = {"balanced": torch.arange(40) % 10, "random": SeededNoise(5).labels(range(40), 10)}.get(
        str(rule), torch.tensor([3, 7] * 20)
    )
    (tmp_path / "images").mkdir()
    for i, label in enumerate(wanted.tolist()):
        image = digits[[j for j, other in enumerate(digits.labels) if other == label][1]]
        Image.fromarray(image[0].numpy()).save(tmp_path / "images" / f"{i:06d}.png")
    accuracy = DigitAccuracy()
    assert accuracy(tmp_path, {"labels": rule, "seed": 5}) == 1.0
    assert accuracy(tmp_path, {"labels": "0,1", "seed": 5}) < 0.5
    assert accuracy(tmp_path, {}) is None
    assert accuracy(tmp_path / "nothing", {"labels": rule, "seed": 5}) is None


class Half:
    """A column of a test."""

    title, form = "half", ".1f"

    def __call__(self, samples, sampling):
        return sampling["num_steps"] / 2 + len(samples.name)


def test_a_column_of_the_table_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests")
    text, rows = report(tmp_path, make(tmp_path, columns=["test_report:Half"]))
    assert rows["SiT"]["half"] == 126.0
    assert "126.0" in text
    _, rows = report(tmp_path / "empty", write_table(tmp_path, columns=["test_report:Half"]))
    assert "half" not in rows["SiT"]
    for name in ("test_report:Quarter", "no.such:Half", "test_report", "json:loads"):
        with pytest.raises(ValueError, match=f"columns: {name}: "):
            report(tmp_path, write_table(tmp_path, columns=[name]))


def test_table_files(tmp_path):
    path = write_table(tmp_path, seeds=[5, 6], latents={"channels": 1, "size": 8})
    table = load_table(path, seeds=1, options={"train.steps": 10, "model.size": "S/4"})
    assert table.seeds == [5]
    assert table.latents.channels == 1
    assert table.latents.num_classes == 1000
    assert table.rows[1].config().train.steps == 10
    assert table.rows[1].config().model.size == "S/4"
    assert load_table(path).rows[1].config().model.size == "S/8"
    assert table.runs(table.rows[0], "r")[5].as_posix() == "r/dit/seed_5"
    assert load_table(write_table(tmp_path)).runs(table.rows[0], "r")[None].as_posix() == "r/dit"
    path.write_text(yaml.safe_dump({"rows": ROWS, "set": {"sampling.labels": "3"}}))
    assert load_table(path).rows[0].config().sampling.labels == "3"
    for content, message in [
        ({"rows": []}, "not a table"),
        ({"rows": ["x"]}, "rows: .*x"),
        ({"rows": [{"name": "a"}]}, "rows: .*run"),
        ({"rows": ROWS, "colums": []}, "colums: unknown option; did you mean columns"),
        ({"rows": ROWS, "set": {"model.sise": "S/2"}}, "model.sise: unknown option"),
        ({"rows": ROWS[1:]}, "baseline: DiT is no row"),
        ({"rows": ROWS, "latents": {"sise": 3}}, "latents.sise"),
        ({"rows": [{"name": "a", "run": "r"}, {"name": "b", "run": "./r/"}]}, "run: r is that of several rows"),
    ]:
        path.write_text(yaml.safe_dump(content))
        with pytest.raises(ValueError, match=message):
            load_table(path)
    path.write_text(yaml.safe_dump({"rows": ROWS, "seeds": [0]}))
    with pytest.raises(ValueError, match="seeds: 2"):
        load_table(path, seeds=2)


def test_the_miniature_is_the_experiment_of_the_paper():
    table = load_table(ROOT / "configs" / "miniature.yaml")
    assert len(table.rows) == 8
    assert len({row.run for row in table.rows}) == 8
    configs = [row.config() for row in table.rows]
    assert [(c.process.name, c.model.attention, c.model.attention_options.contrast_grid) for c in configs] == [
        (process, attention, (side, side))
        for process in ("diffusion", "flow")
        for attention, side in [("mhsa", 8), ("vca", 2), ("vca", 4), ("vca", 8)]
    ]
    assert table.columns == ["vcagen.paper.digits:DigitAccuracy"]
    for config in configs:
        assert config.train == configs[0].train
        assert config.data == configs[0].data
        assert config.sampling.num_steps == 50
        assert config.sampling.cfg_scale == 1.0
        assert config.sampling.num_images == 2000
