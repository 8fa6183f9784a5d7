"""Training in real processes: several of them, killed, stopped, and resumed with other counts."""

import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time

import pytest
import tiny
import torch
from helpers import ENV, ROOT, image_folder, python, readme_block, torchrun, user_error

from vcagen.system.run_folder import list_checkpoints

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread():
    """As the commands have: the last bits depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def state_of(run, step):
    return json.loads((run / "checkpoints" / f"step_{step:07d}" / "state.json").read_text())


def launch(num_processes, arguments, **options):
    """Start a training and return its process (a session of its own, so that all of it can be killed)."""
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    return subprocess.Popen(
        [sys.executable, *(start if num_processes > 1 else []), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV, cwd=ROOT, start_new_session=True, **options,
    )  # fmt: skip


def losses(run):
    return [line["loss"] for line in tiny.metrics(run)]


@pytest.mark.parametrize("num_processes", [2, 4])
def test_processes_resume_bit_for_bit_and_agree_with_one(tmp_path, num_processes):
    """12 images in batches of 8, stopped in the middle of an epoch."""
    images = image_folder(tmp_path / "images", {"a": 5, "b": 7}, size=8)
    options = {"data__path": str(images), "data__from_images": True, "data__images__image_size": 8,
               "vae__path": "identity", "data__horizontal_flip": True, "data__num_workers": 1,
               "train__deterministic": True}  # fmt: skip

    def train(run, steps):
        torchrun(num_processes, *tiny.arguments(tmp_path / run, train__steps=steps, **options))

    train("whole", 18)
    train("parts", 8)
    train("parts", 18)
    assert state_of(tmp_path / "whole", 18)["num_processes"] == num_processes
    assert tiny.same_state(tiny.state(tmp_path / "whole", 18), tiny.state(tmp_path / "parts", 18))
    tiny.train(tmp_path / "one", train__steps=18, **{**options, "train__deterministic": False})
    assert losses(tmp_path / "whole") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_sharded_training_resumes_bit_for_bit_and_is_that_of_ddp(tmp_path):
    options = {"train__precision": "bf16", "train__micro_batch_size": 2, "train__max_grad_norm": 0.5,
               "model__gradient_checkpointing": True}  # fmt: skip
    for name, steps in (("whole", 6), ("parts", 3), ("parts", 6)):
        torchrun(2, "tests/fsdp_on_cpu.py", *tiny.arguments(tmp_path / name, train__steps=steps, **options)[1:])
    torchrun(2, *tiny.arguments(tmp_path / "ddp", **options))
    whole, parts, ddp = (tiny.state(tmp_path / name, 6) for name in ("whole", "parts", "ddp"))
    assert tiny.same_state(whole, parts)
    assert whole.keys() == ddp.keys()
    for ours, theirs in zip(*(tiny.metrics(tmp_path / name)[:3] for name in ("whole", "ddp")), strict=True):
        for name in ("loss", "grad_norm"):  # in float32 instead of bfloat16 they would differ by 1e-4
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5)


def test_another_process_count_goes_on_with_the_same_data(tmp_path):
    torchrun(2, *tiny.arguments(tmp_path / "run", train__steps=2))
    _, stderr = python(*tiny.arguments(tmp_path / "run", train__steps=4))
    assert "1 processes now, 2 before" in stderr
    _, stderr = torchrun(4, *tiny.arguments(tmp_path / "run", train__steps=6))
    assert "4 processes now, 1 before" in stderr
    tiny.train(tmp_path / "one")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    done = launch(3, tiny.arguments(tmp_path / "run", train__steps=9))
    _, stderr = done.communicate(timeout=120)
    assert done.returncode != 0
    assert "going on from" not in stderr  # refused before anything is loaded
    assert "error: train.batch_size" in stderr
    assert "8 images cannot be shared by 3 processes; valid process counts: 1, 2, 4, 8" in stderr
    assert "Traceback" not in stderr.split("error:")[0]


def test_the_launcher_changes_nothing(tmp_path):
    torchrun(1, *tiny.arguments(tmp_path / "launched"))
    python(*tiny.arguments(tmp_path / "plain"))
    assert tiny.same_state(tiny.state(tmp_path / "launched", 6), tiny.state(tmp_path / "plain", 6))


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_zero(tmp_path, num_processes, number):
    run = tmp_path / "run"
    process = launch(num_processes, tiny.arguments(run, train__steps=100_000))
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(tiny.metrics(run)) > 3, process)
    workers = children(process.pid) if num_processes > 1 else [process.pid]
    assert len(workers) == num_processes
    for pid in workers[:1]:  # one rank hears of it, all stop
        os.kill(pid, number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert "saved; the same command goes on" in stderr
    (step,) = [int(path.name[5:]) for path in (run / "checkpoints").iterdir()]
    assert state_of(run, step)["num_processes"] == num_processes
    assert f"stopped after step {step}" in stderr


def test_a_signal_to_the_whole_group_leaves_the_loader_workers_alive(tmp_path):
    """torchrun and SLURM signal every process of a job, the loader's workers too."""
    python("-m", "vcagen", "encode", "digits", "--out", tmp_path / "latents")
    run = tmp_path / "run"
    options = {"data__path": str(tmp_path / "latents"), "data__num_workers": 2}
    process = launch(1, tiny.arguments(run, train__steps=100_000, **options))
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(tiny.metrics(run)) > 3, process)
    os.killpg(process.pid, signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert "saved; the same command goes on" in stderr


def test_twenty_kills_change_nothing(tmp_path):
    steps = 1500
    options = {"train__steps": steps, "checkpoint__save_every": 5, "checkpoint__keep_last": 3,
               "log__log_every": 10}  # fmt: skip
    tiny.train(tmp_path / "whole", **options)
    generator = random.Random(0)
    for _ in range(20):
        process = launch(1, tiny.arguments(tmp_path / "run", **options))
        wait_for_progress(process)
        time.sleep(generator.uniform(0.0, 0.3))
        assert process.poll() is None, "the run ended before it was killed"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    tiny.train(tmp_path / "run", **options)
    assert tiny.same_state(tiny.state(tmp_path / "whole", steps), tiny.state(tmp_path / "run", steps))
    assert tiny.metrics(tmp_path / "run") == tiny.metrics(tmp_path / "whole")
    assert not list((tmp_path / "run").rglob(".*.tmp"))


def test_a_lost_machine_and_the_same_commands_again(tmp_path):
    """Two machines of one process each. One goes without a word, the other ends; both start again and finish."""
    options = {"train__steps": 400, "checkpoint__save_every": 20, "train__deterministic": True, "log__log_every": 15}

    def machines(run):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # The srun line of docs/imagenet.md, but for srun.
        line = shlex.split(readme_block("machines", "docs/imagenet.md")[-1])[-1].replace("$SLURM_JOB_ID", run.name)
        line = re.sub(r"\$\(.*\):\d+", f"127.0.0.1:{port}", line).replace("--nproc_per_node 8", "--nproc_per_node 1")
        launcher, *rendezvous = shlex.split(line.partition("train.py")[0])
        assert launcher == "torchrun"
        command = ["-m", "torch.distributed.run", *rendezvous, *tiny.arguments(run, **options)]
        return [launch(1, command) for _ in range(2)]

    def finish(run):
        for machine in machines(run):
            _, stderr = machine.communicate(timeout=120)
            assert machine.returncode == 0, stderr
        assert state_of(run, 400)["num_processes"] == 2

    run, whole = tmp_path / "run", tmp_path / "whole"
    first, second = machines(run)
    assert wait_for(lambda: len(list((run / "checkpoints").glob("step_*"))) >= 2, first)
    second_all = [second.pid, *children(second.pid)]
    assert len(second_all) == 2
    for pid in second_all:
        os.kill(pid, signal.SIGKILL)
    first.communicate(timeout=60)
    assert first.returncode != 0
    second.communicate()
    assert max(list_checkpoints(run)) < 400
    finish(run)
    finish(whole)
    assert tiny.same_state(tiny.state(run, 400), tiny.state(whole, 400))
    assert tiny.metrics(run) == tiny.metrics(whole)


def test_a_rank_that_raises_ends_the_others(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, sys\n"
        "from vcagen.training import trainer\n"
        "step = trainer.Trainer.train_step\n"
        "def fail(self, *batch):\n"
        "    if os.environ['RANK'] == '1' and self.step == 3: raise RuntimeError('broken')\n"
        "    step(self, *batch)\n"
        "trainer.Trainer.train_step = fail\n"
        "sys.path.insert(0, 'tests')\n"
        "import tiny\n"
        f"tiny.train(__import__('pathlib').Path({str(tmp_path / 'run')!r}), train__steps=1000)\n"
    )
    process = launch(2, [str(script)])
    wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists(), process)
    began = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert time.monotonic() - began < 30


def test_mistakes_are_one_line_and_exit_two(tmp_path):
    assert "train.stepss: unknown option; did you mean train.steps?" in user_error(
        *tiny.arguments(tmp_path / "run"), "--train.stepss=3"
    )
    assert not (tmp_path / "run").exists()
    python(*tiny.arguments(tmp_path / "run", train__steps=1))
    assert "seed: 0 there, 7 here" in user_error(*tiny.arguments(tmp_path / "run"), "--seed=7")


def test_compiled_training(tmp_path):
    python(*tiny.arguments(tmp_path / "compiled"), "--train.compile=true")
    tiny.train(tmp_path / "plain")
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)
    assert tiny.state(tmp_path / "compiled", 6).keys() == tiny.state(tmp_path / "plain", 6).keys()


def children(pid):
    """Process ids of the workers of a launcher."""
    found = subprocess.run(["pgrep", "-P", str(pid), "-f", "train.py"], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]


def wait_for_progress(process):
    """Read the progress bar until steps are made; False where the process ended first."""
    text = ""
    while part := process.stderr.read(100):
        text += part
        if "step/s" in text or "s/step" in text:
            return True
    return False


def wait_for(ready, process, timeout=120.0):
    """Poll until `ready()`; False where the process ended first."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if ready():
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.02)
    raise TimeoutError
