"""Trackers, each with the real package: curves, previews as images, scores of samples, one run over a resume."""

import contextlib
import json
import sqlite3

import pytest
import tiny
import torch
from accelerate.tracking import GeneralTracker
from accelerate.utils import LoggerType

from vcagen.config.options import SampleConfig
from vcagen.sampling import session
from vcagen.system import trackers
from vcagen.training import setup

torch.set_num_threads(1)


def train(run, name, steps):
    """Train to that step with a preview a step, as the command does."""
    trainer = tiny.train(run, log__trackers=[name], log__preview_every=1, train__steps=steps)
    trainer.accelerator.end_training()


def score(run):
    given = {"num_images": 4, "reference": "digits", "extractor": "pixels", "num_steps": 2}
    session.run(SampleConfig(run_dir=str(run), **given, given=frozenset(given)))


@pytest.mark.slow
def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "digits"
    train(run, "tensorboard", 2)
    train(run, "tensorboard", 3)
    score(run)
    events = EventAccumulator(str(run / "vcagen"), size_guidance={"images": 0}).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
    previews = events.Images("preview")
    assert [event.step for event in previews] == [1, 2, 3]
    assert previews[0].encoded_image_string.startswith(b"\x89PNG")
    (name,) = [tag for tag in events.Tags()["scalars"] if tag.endswith("fd_pixels_4")]
    assert name == "sde_2_cfg1.0_seed0_n4/fd_pixels_4"
    (value,) = events.Scalars(name)
    results = json.loads(next(run.glob("samples/*/results.json")).read_text())
    assert value.step == 3
    assert value.value == pytest.approx(results["metrics"]["fd_pixels_4"])


class Recorder(GeneralTracker):
    """Keeps what a tracker is told; the scores fail, as without a network."""

    name, requires_logging_directory, tracker = "recorder", False, None

    def __init__(self):
        super().__init__()
        self.told = []

    def start(self):
        pass

    def store_init_configuration(self, values):
        self.told.append(values["model.depth"])

    def log(self, values, step=None):
        if step is None:
            raise RuntimeError("no network\nmore")
        self.told.append((step, "loss" in values))

    def log_images(self, values, step):
        self.told.append((step, values["preview"][0].shape))


def test_what_a_tracker_is_told_and_scores_that_it_does_not_take(tmp_path, monkeypatch, capsys):
    recorder = Recorder()
    monkeypatch.setattr(setup, "get_available_trackers", lambda: [LoggerType.WANDB])
    monkeypatch.setattr(trackers, "filter_trackers", lambda names, folder: [recorder])
    train(tmp_path, "wandb", 1)
    assert recorder.told == [1, (1, True), (1, (68, 68, 3))]
    score(tmp_path)
    assert "note: no scores in wandb (no network)" in capsys.readouterr().err
    assert list(tmp_path.glob("samples/*/results.json"))


@pytest.mark.slow
def test_wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "digits"
    train(run, "wandb", 2)
    train(run, "wandb", 3)
    score(run)
    wandb.teardown()  # its own process writes the files, and is done only then
    identity = json.loads((run / "trackers.json").read_text())["id"]
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert {file.name for file in files} == {f"run-{identity}.wandb"}
    assert len(files) == 3
    assert not (tmp_path / "wandb").exists()
    first, resumed, sampled = (file.read_bytes() for file in files)  # records with their texts as they are
    assert all(b"digits" in data for data in (first, resumed, sampled))
    assert b"preview" in first
    assert b"sde_2_cfg1.0_seed0_n4/fd_pixels_4" in sampled
    assert b"fd_pixels_4" not in resumed
    assert len(list(run.glob("wandb/offline-run-*/files/media/images/preview_*.png"))) == 3


@pytest.mark.slow
def test_trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # before the import, which reads it
    pytest.importorskip("trackio")
    run = tmp_path / "digits"
    train(run, "trackio", 2)
    train(run, "trackio", 3)
    score(run)
    identity = json.loads((run / "trackers.json").read_text())["id"]
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / "vcagen.db")) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    lines = [(name, step, json.loads(metrics)) for name, step, metrics in rows]
    assert {name for name, _, _ in lines} == {f"digits-{identity}"}
    assert [step for _, step, line in lines if "loss" in line] == [1, 2, 3]
    assert any("sde_2_cfg1.0_seed0_n4/fd_pixels_4" in line and line["sampled_step"] == 3 for _, _, line in lines)
    assert [step for _, step, line in lines if "preview" in line] == [1, 2, 3]
    assert len(list((tmp_path / "trackio" / "media").rglob("*.png"))) == 3
