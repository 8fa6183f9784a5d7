"""Train and sample every row and seed of a table, several at a time; the same call again does what is missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vcagen.config.command_line import find_config
from vcagen.config.job_options import ExperimentConfig
from vcagen.config.options import flatten
from vcagen.paper.report import report_table
from vcagen.paper.table import Row, load_table
from vcagen.system.files import read_yaml, write_json

VCAGEN = [sys.executable, "-m", "vcagen"]


def run(config: ExperimentConfig) -> None:
    """Do what is missing of a table and print its report.

    Raises:
        ValueError: not a table, or a command failed; the others are stopped, and resume with the same call.
    """
    path = find_config(config.table)
    given = {"train.steps": config.steps, "sampling.num_images": config.num_images, "plugin": config.plugin}
    options = {**flatten(config.set), **{key: value for key, value in given.items() if value is not None}}
    table = load_table(path, seeds=config.seeds, options=options, rows=config.rows)
    runs = [(row, seed, folder) for row in table.rows for seed, folder in table.runs(row, config.runs).items()]
    run_commands({folder: commands(row, seed or 0, folder) for row, seed, folder in runs}, jobs=config.jobs)
    out = config.out or f"{config.runs}/report"
    print(report_table(table, Path(path).stem, config.runs, out))
    print(f"report: {out}", file=sys.stderr)


def commands(row: Row, seed: int, folder: Path) -> list[list[str]]:
    """The commands of a run: training, then sampling."""
    steps, num_images = (config := row.config()).train.steps, config.sampling.num_images
    sampling = {key.removeprefix("sampling."): value for key, value in row.set.items() if key.startswith("sampling.")}
    sampling |= {"plugin": config.plugin} if config.plugin else {}
    out = folder / "samples" / f"step_{steps:07d}_n{num_images}"
    return [
        ["train", f"--run_dir={folder}", f"--seed={seed}", *_arguments(row.set)],
        ["sample", f"--run_dir={folder}", f"--step={steps}", f"--seed={seed}", f"--out={out}", "--batch=250",
         "--npz=true", *_arguments(sampling)],
    ]  # fmt: skip


def _arguments(options: Mapping[str, Any]) -> list[str]:
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items()]


def run_commands(runs: Mapping[Path, Sequence[Sequence[str]]], *, jobs: int) -> None:
    """Do the commands of each run folder in their order, `jobs` runs at a time, with one thread each where several.

    The commands themselves find what is missing. A run that has its scores and did the very same commands before is
    left out: starting them only to find that takes some seconds each.

    Raises:
        ValueError: a command failed; its last words, and where its log is.
    """
    runs = {folder: commands for folder, commands in runs.items() if not _is_done(folder, commands)}
    stopped, active = threading.Event(), set[subprocess.Popen[bytes]]()
    environment = {**os.environ, **({"OMP_NUM_THREADS": "1"} if jobs > 1 else {})}
    bar = tqdm(total=2 * len(runs), desc="experiment", unit="command", dynamic_ncols=True, disable=not runs)

    def work(folder: Path, commands: Sequence[Sequence[str]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for command in commands:
            with (folder / "experiment.log").open("ab") as log:
                process = subprocess.Popen(
                    [*VCAGEN, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                    start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the commands once
                )  # fmt: skip
            active.add(process)
            if stopped.is_set():  # while the command was being started
                process.terminate()
            code = process.wait()
            active.discard(process)
            if stopped.is_set():
                return
            if code:
                raise ValueError(f"{folder}: {_last_words(folder / 'experiment.log')}")
            bar.set_postfix_str(f"{command[0]} {folder}", refresh=False)
            bar.update()
        write_json(folder / "experiment.json", commands)

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with bar, ThreadPoolExecutor(jobs) as pool:
        try:
            for future in as_completed([pool.submit(work, *run) for run in runs.items()]):
                future.result()
        finally:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active.copy():
                process.terminate()
            signal.signal(signal.SIGTERM, before)


def _is_done(folder: Path, commands: Sequence[Sequence[str]]) -> bool:
    out = next(Path(word.removeprefix("--out=")) for word in commands[-1] if word.startswith("--out="))
    done = folder / "experiment.json"
    return (out / "results.json").exists() and done.exists() and read_yaml(done) == commands


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    return f"{(errors or lines or ['no output'])[-1]} (log: {log})"
