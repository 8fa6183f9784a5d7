"""The experiment: what is missing is done, several runs at a time; stopped or failed, the same call goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from textwrap import indent

import pytest
import yaml
from helpers import ENV, ROOT

from vcagen.__main__ import do
from vcagen.config import command_line
from vcagen.config.options import Config, SampleConfig, to_plain
from vcagen.paper import sweep
from vcagen.paper.sweep import commands, run_commands
from vcagen.paper.table import load_table

FAKE = """
import os, sys, time
from pathlib import Path
job, given = sys.argv[1], dict(a[2:].split("=", 1) for a in sys.argv[2:])
run = Path(given["run_dir"])
log = Path(__file__).parent / "log"
with log.open("a") as file:
    file.write(f"{job} {run.parent.name} {given['seed']} {os.environ.get('OMP_NUM_THREADS')} start\\n")
BODIES[job]
with log.open("a") as file:
    file.write(f"{job} {run.parent.name} {given['seed']} {os.environ.get('OMP_NUM_THREADS')} end\\n")
"""

SCORED = """
(Path(given["out"])).mkdir(parents=True, exist_ok=True)
(Path(given["out"]) / "results.json").write_text("{}")
"""


def do_table(table, runs, jobs=1):
    """The commands of a table with the stand-in."""
    folders = [(row, seed, folder) for row in table.rows for seed, folder in table.runs(row, runs).items()]
    run_commands({folder: commands(row, seed, folder) for row, seed, folder in folders}, jobs=jobs)


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """A stand-in for vcagen that only logs when jobs start and end; returns a function to make it."""
    monkeypatch.setattr(sweep, "VCAGEN", [sys.executable, str(tmp_path / "fake.py")])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def write(train="time.sleep(0.2)", sample=SCORED):
        bodies = "".join(f"if job == {name!r}:\n{indent(body, '    ')}\n" for name, body in
                         (("train", train), ("sample", sample)))  # fmt: skip
        (tmp_path / "fake.py").write_text(FAKE.replace("BODIES[job]", bodies))
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
    do_table(table, tmp_path / "runs", jobs=2)
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
    log = scripts("pass")
    do_table(table, tmp_path / "runs")
    assert {line.split()[3] for line in log.read_text().splitlines()} == {"None"}


def test_runs_with_scores_of_the_same_commands_are_left_out(tmp_path, scripts, table):
    log, runs = scripts("pass"), tmp_path / "runs"
    do_table(table, runs)
    log.unlink()
    do_table(table, runs)
    assert not log.exists()
    (result,) = (runs / "a" / "seed_1").glob("samples/*/results.json")
    result.unlink()
    do_table(table, runs)
    assert {tuple(line.split()[1:3]) for line in log.read_text().splitlines()} == {("a", "1")}
    log.unlink()
    do_table(load_table(tmp_path / "table.yaml", options={"train.steps": 10, "sampling.num_images": 30}), runs)
    assert len(log.read_text().splitlines()) == 16


def test_a_failure_is_told_and_stops_the_others(tmp_path, scripts, table):
    log = scripts(
        "if (run.parent.name, given['seed']) == ('a', '1'): sys.exit('some line\\nerror: loss: not finite')\n"
        "time.sleep(60)"
    )
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"a/seed_1: error: loss: not finite \(log: .*a/seed_1/experiment\.log\)"):
        do_table(table, tmp_path / "runs", jobs=2)
    assert time.monotonic() - started < 20
    assert "sample" not in log.read_text()
    assert "b" not in {line.split()[1] for line in log.read_text().splitlines()}


@pytest.mark.slow
def test_sigterm_stops_the_commands(tmp_path, scripts, table):
    scripts("(Path(__file__).parent / 'pid').write_text(str(os.getpid()))\ntime.sleep(60)")
    code = (
        "import sys; from vcagen.config import command_line\n"
        "from vcagen.__main__ import do; from vcagen.paper import sweep\n"
        "sweep.VCAGEN = [sys.executable, sys.argv[1] + '/fake.py']\n"
        "args = [sys.argv[1] + '/table.yaml', '--runs', sys.argv[1] + '/runs']\n"
        "command_line.run(lambda: do('experiment', args, prog='vcagen experiment'))"
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


def test_commands_say_everything(tmp_path):
    row, folder = (
        load_table(ROOT / "configs" / "miniature.yaml", options={"plugin": "json"}).rows[5],
        tmp_path / "seed_2",
    )
    train, sample = commands(row, 2, folder)
    assert train[0] == "train"
    assert {"--seed=2", f"--run_dir={folder}", "--train.steps=800", "--data.horizontal_flip=false"} < set(train)
    assert {'--model.attention_options.contrast_grid=["2", "2"]', "--sampling.labels=balanced"} < set(train)
    out = folder / "samples" / "step_0000800_n2000"
    assert sample[0] == "sample"
    assert {"--seed=2", "--step=800", f"--out={out}", "--labels=balanced", "--method=euler"} < set(sample)
    assert "--plugin=json" in train
    assert "--plugin=json" in sample
    config = command_line.parse(Config, train[1:], prog="train")
    assert to_plain(config) == {**to_plain(row.config()), "run_dir": str(folder), "seed": 2}
    assert command_line.parse(SampleConfig, sample[1:], prog="sample").num_images == 2000


@pytest.mark.slow
def test_two_rows_of_the_miniature_with_one_seed_and_ten_steps(tmp_path, capsys):
    runs, table = tmp_path / "runs", yaml.safe_load((ROOT / "configs" / "miniature.yaml").read_text())
    table["rows"] = [row for row in table["rows"] if row["run"] in ("sit-mhsa", "sit-vca-4")]
    (tmp_path / "miniature.yaml").write_text(yaml.safe_dump(table))
    command = [tmp_path / "miniature.yaml", "--runs", runs, "--jobs", "2", "--seeds", "1",
               "--steps", "10", "--num_images", "20"]  # fmt: skip
    do("experiment", [str(argument) for argument in command], prog="vcagen experiment")
    text = capsys.readouterr().out
    rows = {row["name"]: row for row in json.loads((runs / "report" / "miniature.json").read_text())["rows"]}
    assert len(rows) == 2
    for row in rows.values():
        assert row["marks"] == []
        assert row["score_name"] == "fd_pixels_20"
        assert row["score"] > 0
        assert 0 <= row["digits recognised"] <= 1
        assert row["seconds_per_step"] > 0
        assert row["runs"][0]["facts"]["step"] == 10
        assert (row["difference"] is None) == (row["baseline"] is None)
    assert "digits recognised" in text
    assert (runs / "report" / "miniature.png").exists()
    assert (runs / "sit-vca-4" / "seed_0" / "loss.png").exists()

    result = runs / "sit-vca-4" / "seed_0" / "samples" / "step_0000010_n20" / "results.json"
    others = {path: path.stat().st_mtime_ns for path in runs.glob("*/seed_0/samples/*/results.json") if path != result}
    before = json.loads(result.read_text())["metrics"]
    result.unlink()
    do("experiment", [str(argument) for argument in command], prog="vcagen experiment")
    again = capsys.readouterr().out
    assert again.replace(" ", "") == text.replace(" ", "")
    assert json.loads(result.read_text())["metrics"] == before
    assert others == {path: path.stat().st_mtime_ns for path in others}
