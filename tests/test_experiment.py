"""The experiment: what is missing is done, several runs at a time; stopped or failed, the same call goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
import yaml
from helpers import ENV, ROOT

from vcagen.__main__ import main
from vcagen.paper import sweep as experiment
from vcagen.paper.sweep import missing_commands, run_experiment
from vcagen.paper.table import load_table

FAKE = """
import os, sys, time
from pathlib import Path
given = dict(a[2:].split("=", 1) for a in sys.argv[1:])
run = Path(given["run_dir"])
log = Path(__file__).parent / "log"
with log.open("a") as file:
    file.write(f"{Path(__file__).stem} {run.parent.name} {given['seed']} {os.environ.get('OMP_NUM_THREADS')} start\\n")
BODY
with log.open("a") as file:
    file.write(f"{Path(__file__).stem} {run.parent.name} {given['seed']} {os.environ.get('OMP_NUM_THREADS')} end\\n")
"""


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """Stand-ins for train.py and sample.py that only log when they start and end; returns a function to make them."""
    monkeypatch.setattr(experiment, "SCRIPTS", tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def write(train="time.sleep(0.2)", sample="time.sleep(0.2)"):
        for name, body in (("train", train), ("sample", sample)):
            (tmp_path / f"{name}.py").write_text(FAKE.replace("BODY", body))
        return tmp_path / "log"

    return write


@pytest.fixture
def table(tmp_path):
    rows = [{"name": name, "run": name, "set": {"process.name": "flow"}} for name in ("a", "b")]
    path = tmp_path / "table.yaml"
    path.write_text(yaml.safe_dump({"title": "T", "seeds": [0, 1], "rows": rows}))
    return load_table(path, options={"train.steps": 10, "sampling.num_images": 20})


def test_every_run_is_trained_and_then_sampled_two_at_a_time(tmp_path, scripts, table):
    log = scripts()
    run_experiment(table, tmp_path / "runs", jobs=2)
    lines = [tuple(line.split()) for line in log.read_text().splitlines()]
    assert {line[3] for line in lines} == {"1"}, "threads"
    for run in ("a", "b"):
        for seed in "01":
            assert [(name, when) for name, r, s, _, when in lines if (r, s) == (run, seed)] == [
                ("train", "start"), ("train", "end"), ("sample", "start"), ("sample", "end"),
            ]  # fmt: skip
    running, most = 0, 0
    for line in lines:
        running += 1 if line[4] == "start" else -1
        most = max(most, running)
    assert most == 2


def test_one_job_keeps_all_threads(tmp_path, scripts, table):
    log = scripts("pass", "pass")
    run_experiment(table, tmp_path / "runs")
    assert {line.split()[3] for line in log.read_text().splitlines()} == {"None"}
    with pytest.raises(ValueError, match="jobs: 0"):
        run_experiment(table, tmp_path / "runs", jobs=0)


def test_a_failure_is_told_and_stops_the_others(tmp_path, scripts, table):
    log = scripts(
        "if (run.parent.name, given['seed']) == ('a', '1'): sys.exit('some line\\nerror: loss: not finite')\n"
        "time.sleep(60)"
    )
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"a/seed_1: error: loss: not finite \(log: .*a/seed_1/experiment\.log\)"):
        run_experiment(table, tmp_path / "runs", jobs=2)
    assert time.monotonic() - started < 20
    assert "sample" not in log.read_text()


@pytest.mark.slow
def test_sigterm_stops_the_commands(tmp_path, scripts, table):
    scripts("(Path(__file__).parent / 'pid').write_text(str(os.getpid()))\ntime.sleep(60)")
    code = (
        "import sys; from pathlib import Path; from vcagen.config import command_line as cli\n"
        "from vcagen.paper import sweep as experiment\n"
        "from vcagen.paper.table import load_table\n"
        "experiment.SCRIPTS = Path(sys.argv[1])\n"
        "table = load_table(sys.argv[1] + '/table.yaml')\n"
        "cli.run(lambda: experiment.run_experiment(table, sys.argv[1] + '/runs'))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=ENV, stderr=subprocess.PIPE, cwd=ROOT)
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_commands_say_everything_and_done_ones_are_left_out(tmp_path):
    row = load_table(ROOT / "configs" / "miniature.yaml").rows[5]
    folder = tmp_path / "seed_2"
    train, sample = missing_commands(row, 2, folder)
    assert {"--seed=2", f"--run_dir={folder}", "--train.steps=800", "--data.horizontal_flip=false"} < set(train)
    assert {'--model.attention_options={"contrast_grid": [2, 2]}', "--sampling.labels=balanced"} < set(train)
    out = folder / "samples" / "step_0000800_n2000"
    assert {"--seed=2", "--step=800", f"--out={out}", "--labels=balanced", "--method=euler"} < set(sample)

    (folder / "checkpoints" / "step_0000800").mkdir(parents=True)
    (folder / "checkpoints" / "step_0000800" / "state.json").write_text("{}")
    config = {**asdict(row.config()), "seed": 2}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert missing_commands(row, 2, folder) == [sample]
    out.mkdir(parents=True)
    (out / "manifest.json").write_text(json.dumps({"labels": "balanced", "num_images": 2000, "cfg_scale": 1.0}))
    scores = {"n_samples": 2000, "reference": {"path": "digits"}, "extractor": {"name": "pixels"}}
    for change in ({"n_samples": 50}, {"reference": {"path": "other.npz"}}, {"extractor": {"name": "inception"}}):
        (out / "results.json").write_text(json.dumps({**scores, **change}))
        assert missing_commands(row, 2, folder) == [sample]
    (out / "results.json").write_text(json.dumps(scores))
    assert missing_commands(row, 2, folder) == []
    (out / "manifest.json").write_text(json.dumps({"labels": "balanced", "num_images": 2000, "cfg_scale": 1.5}))
    assert missing_commands(row, 2, folder) == [sample]  # which refuses, naming the field
    config["train"]["learning_rate"] = 5.0
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert missing_commands(row, 2, folder) == [train, sample]


@pytest.fixture
def done(tmp_path):
    """A row of the miniature, and its run folder with everything done."""
    row = load_table(ROOT / "configs" / "miniature.yaml").rows[5]
    out = tmp_path / "samples" / "step_0000800_n2000"
    out.mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_0000800").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(row.config())))
    (out / "manifest.json").write_text(json.dumps({"labels": "balanced", "num_images": 2000, "cfg_scale": 1.0}))
    scores = {"n_samples": 2000, "reference": {"path": "digits"}, "extractor": {"name": "pixels"}}
    (out / "results.json").write_text(json.dumps(scores))
    assert missing_commands(row, 0, tmp_path) == []
    return row, tmp_path, out / "results.json"


@pytest.mark.parametrize("content", [b"a: [", b"\xff", b"[]", b"model: 3"])
def test_a_damaged_configuration_is_named(done, content):
    row, folder, _ = done
    (folder / "config.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.yaml: (damaged|not the configuration of a run)"):
        missing_commands(row, 0, folder)


@pytest.mark.parametrize("part", ["reference", "extractor"])
def test_a_result_edited_by_hand(done, part):
    row, folder, file = done
    scores = json.loads(file.read_text())
    file.write_text(json.dumps({**scores, part: None}))
    (command,) = missing_commands(row, 0, folder)
    assert command[0].endswith("sample.py")
    file.write_text(json.dumps({**scores, part: "x"}))
    with pytest.raises(ValueError, match=rf"results\.json: damaged: {part}: 'x'"):
        missing_commands(row, 0, folder)


@pytest.mark.slow
def test_two_rows_of_the_miniature_with_one_seed_and_ten_steps(tmp_path, capsys):
    runs, table = tmp_path / "runs", yaml.safe_load((ROOT / "configs" / "miniature.yaml").read_text())
    table["rows"] = [row for row in table["rows"] if row["run"] in ("sit-mhsa", "sit-vca-4")]
    (tmp_path / "miniature.yaml").write_text(yaml.safe_dump(table))
    command = ["experiment", tmp_path / "miniature.yaml", "--runs", runs, "--jobs", "2", "--seeds", "1",
               "--steps", "10", "--num_images", "20"]  # fmt: skip
    main([str(argument) for argument in command])
    text = capsys.readouterr().out
    rows = {row["name"]: row for row in json.loads((runs / "report" / "miniature.json").read_text())["rows"]}
    assert len(rows) == 2
    for row in rows.values():
        assert row["marks"] == []
        assert row["score_name"] == "fd_pixels_20"
        assert row["score"] > 0
        assert 0 <= row["accuracy"] <= 1
        assert row["seconds_per_step"] > 0
        assert row["runs"][0]["manifest"]["step"] == 10
        assert (row["difference"] is None) == (row["baseline"] is None)
    assert "digits recognised" in text
    assert (runs / "report" / "miniature.png").exists()
    assert (runs / "sit-vca-4" / "seed_0" / "loss.png").exists()

    result = runs / "sit-vca-4" / "seed_0" / "samples" / "step_0000010_n20" / "results.json"
    others = {path: path.stat().st_mtime_ns for path in runs.glob("*/seed_0/samples/*/results.json") if path != result}
    before = json.loads(result.read_text())["metrics"]
    result.unlink()
    main([str(argument) for argument in command])
    again = capsys.readouterr().out
    assert again.replace(" ", "") == text.replace(" ", "")
    assert json.loads(result.read_text())["metrics"] == before
    assert others == {path: path.stat().st_mtime_ns for path in others}
