"""Tiny trainings on the digits, in this process or as commands."""

import json

from safetensors.torch import load_file

from vcagen.config import command_line
from vcagen.config.options import Config
from vcagen.training import setup

OPTIONS = {
    "process.name": "flow",
    "model.hidden_size": 16,
    "model.depth": 1,
    "model.num_heads": 2,
    "model.attention": "vca",
    "model.attention_options": {"contrast_grid": [2, 2]},
    "data.path": "digits",
    "train.batch_size": 8,
    "train.steps": 6,
    "train.learning_rate": 1e-2,
    "train.ema_decays": [0.9],
    "log.log_every": 1,
    "log.preview_every": 0,
    "checkpoint.save_every": 100,
}


def config(run, **options) -> Config:
    """Dotted options with `__` for the dots."""
    values = {"run_dir": str(run)}
    for name, value in {**OPTIONS, **{name.replace("__", "."): value for name, value in options.items()}}.items():
        *sections, last = name.split(".")
        part = values
        for section in sections:
            part = part.setdefault(section, {})
        part[last] = value
    return command_line.from_mapping(Config, values)


def arguments(run, **options):
    """The same as command-line arguments of train.py."""
    given = {**OPTIONS, **{name.replace("__", "."): value for name, value in options.items()}}
    return ["train.py", "--run_dir", str(run), *(f"--{k}={json.dumps(v) if not isinstance(v, str) else v}"
                                              for k, v in given.items())]  # fmt: skip


def train(run, **options):
    """Train in this process; returns the trainer."""
    trainer = setup.build_trainer(config(run, **options))
    trainer.fit()
    return trainer


def state(run, step):
    """Every tensor of a checkpoint, by file and name."""
    folder = run / "checkpoints" / f"step_{step:07d}"
    return {(file.name, name): value for file in sorted(folder.glob("*.safetensors"))
            for name, value in load_file(file).items()}  # fmt: skip


def same_state(first, second):
    """Whether two states are equal bit for bit."""
    return first.keys() == second.keys() and all(first[key].equal(second[key]) for key in first)


def metrics(run):
    """The lines of metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("images_per_second", "seconds", "memory_bytes")}
            for line in lines]  # fmt: skip
