"""What tests share: the reference formula, stored answers, and command lines run as a user would."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def u(shape, k):
    """The deterministic numbers of tests/reference: float64 in [-1, 1], row-major."""
    i = np.arange(int(np.prod(shape)), dtype=np.float64)
    x = np.sin(i * 12.9898 + k * 78.233) * 43758.5453
    return torch.from_numpy(2 * (x - np.floor(x) - 0.5)).reshape(shape)


def reference(name):
    """The stored answers in tests/reference/NAME.json."""
    return json.loads((ROOT / "tests" / "reference" / f"{name}.json").read_text())


def python(*args, code=0, timeout=300, env=None, cwd=ROOT):
    """Run `python ARGS` in its own process, assert the exit code, and return (stdout, stderr)."""
    done = subprocess.run(
        [sys.executable, *map(str, args)],
        capture_output=True, text=True, timeout=timeout, env={**ENV, **(env or {})}, cwd=cwd,
    )  # fmt: skip
    assert done.returncode == code, f"exit code {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


def torchrun(num_processes, *args, code=0, **kwargs):
    """Run `python ARGS` under torchrun with that many processes on this machine."""
    return python(
        "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}", *args, code=code, **kwargs
    )


def user_error(*args, **kwargs):
    """Run a command that must fail as a user's mistake does; return its one line."""
    _, stderr = python(*args, code=2, **kwargs)
    assert "Traceback" not in stderr, stderr
    lines = [line for line in stderr.splitlines() if line.startswith("error")]
    assert len(lines) == 1, stderr
    return lines[0]
