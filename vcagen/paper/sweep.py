"""Train and sample every row and seed of a table that is missing, several at a time; the same call goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vcagen.paper.comparison import differing_options
from vcagen.paper.run_results import read_config
from vcagen.paper.table import Row, Table
from vcagen.system.files import read_record
from vcagen.system.run_folder import latest_checkpoint
from vcagen.training.metrics_log import read_log

SCRIPTS = Path(__file__).parent.parent.parent
SCORED = (("reference", "reference", "path"), ("extractor", "extractor", "name"))
"""Options of the scores, and where results.json has them."""


@dataclass
class Task:
    """The commands of one run that are still to be done, in order."""

    folder: Path
    commands: list[list[str]]


def run_experiment(table: Table, runs: str | Path, *, jobs: int = 1) -> None:
    """Do what is missing of a table. Each run is trained by train.py and sampled by sample.py with its seed.

    Args:
        jobs: runs at a time, each with one thread where there are several; tiny networks gain nothing from more.

    Raises:
        ValueError: a command failed; the others are stopped, and go on when called again.
    """
    if jobs < 1:
        raise ValueError(f"jobs: {jobs}; needs at least 1")
    if not (SCRIPTS / "train.py").exists():
        raise ValueError(f"experiment: {SCRIPTS} has no train.py and sample.py; run it from a clone of the project")
    tasks = []
    for row in table.rows:
        for seed, folder in table.runs(row, runs).items():
            if commands := missing_commands(row, 0 if seed is None else seed, folder):
                tasks.append(Task(folder, commands))
    total = sum(len(task.commands) for task in tasks)
    with tqdm(total=total, desc="experiment", unit="command", dynamic_ncols=True, disable=not total) as bar:
        _run_all(tasks, jobs, bar)


def missing_commands(row: Row, seed: int, folder: Path) -> list[list[str]]:
    """What is to be done for a run: training, sampling, both or nothing."""
    config = row.config()
    sampling = {key.split(".", 1)[1]: value for key, value in row.options.items() if key.startswith("sampling.")}
    out = folder / "samples" / f"step_{config.train.steps:07d}_n{config.sampling.num_images}"
    train = [str(SCRIPTS / "train.py"), f"--run_dir={folder}", f"--seed={seed}", *_arguments(row.options)]
    sample = [
        str(SCRIPTS / "sample.py"), f"--run_dir={folder}", f"--step={config.train.steps}", f"--seed={seed}",
        f"--out={out}", "--batch=250", "--png=false", "--npz=true", *_arguments(sampling),
    ]  # fmt: skip
    commands = []
    if not _is_trained(row, folder, config.train.steps):
        commands.append(train)
    if commands or not _is_sampled(out, sampling):
        commands.append(sample)
    return commands


def _arguments(options: dict[str, Any]) -> list[str]:
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items()]


def _is_trained(row: Row, folder: Path, steps: int) -> bool:
    newest, path = latest_checkpoint(folder), folder / "config.yaml"
    if newest is None or int(newest.name.rsplit("_", 1)[1]) != steps or not path.exists():
        return False
    return not differing_options(row, read_config(path))


def _is_sampled(out: Path, sampling: dict[str, Any]) -> bool:
    """Whether images and scores are there, made as asked for; what decides the scores alone is in results.json."""
    if not (out / "results.json").exists():
        return False
    result = read_record(out / "results.json")
    for _, part, _ in SCORED:
        if not isinstance(result.get(part), dict | None):
            raise ValueError(f"{out / 'results.json'}: damaged: {part}: {result[part]!r}")
    scored = {key: (result.get(part) or {}).get(name) for key, part, name in SCORED}
    made = {**read_record(out / "manifest.json"), **scored, "num_images": result.get("n_samples")}
    return all(made[key] == value for key, value in sampling.items() if key in made)


def _run_all(tasks: Sequence[Task], jobs: int, bar: tqdm[Any]) -> None:
    """Work off the tasks, `jobs` at a time; asked to stop by Ctrl-C or SIGTERM, the commands are stopped as well."""
    waiting = deque(tasks)
    active: dict[subprocess.Popen[bytes], Task] = {}
    looked = 0.0
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                task = waiting.popleft()
                active[_start(task, jobs)] = task
            if time.monotonic() - looked > 2:  # a long log takes a while to read
                bar.set_postfix_str(", ".join(map(_progress, active.values())))
                looked = time.monotonic()
            time.sleep(0.1)
            for process in [process for process in active if process.poll() is not None]:
                task = active.pop(process)
                if process.returncode:
                    raise ValueError(f"{task.folder}: {_last_words(task)}")
                bar.update()
                if task.commands:
                    waiting.appendleft(task)
    finally:
        for process in active:
            process.terminate()
        for process in active:
            process.wait()
        signal.signal(signal.SIGTERM, before)


def _start(task: Task, jobs: int) -> subprocess.Popen[bytes]:
    task.folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **({"OMP_NUM_THREADS": "1"} if jobs > 1 else {})}
    with _log(task).open("ab") as log:
        command = [sys.executable, *task.commands.pop(0)]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the commands once
        )  # fmt: skip


def _progress(task: Task) -> str:
    name = "/".join(task.folder.parts[-2:])
    if not task.commands:
        return f"{name} sampling"
    log = read_log(task.folder)
    return f"{name} step {log[-1]['step'] if log else 0}"


def _log(task: Task) -> Path:
    return task.folder / "experiment.log"


def _last_words(task: Task) -> str:
    lines = _log(task).read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    return f"{(errors or lines or ['no output'])[-1]} (log: {_log(task)})"
