"""The training loop in one process: exact resume, EMA, accumulation, refusals."""

import json
import math
import os
import re
import signal
import subprocess
import sys

import pytest
import tiny
import torch
from accelerate.state import AcceleratorState
from helpers import image_folder
from safetensors.torch import load_file

from vcagen.data.latents import ImageDataset
from vcagen.networks.weights import read_metadata, save_weights
from vcagen.system.run_folder import list_checkpoints, lock_run
from vcagen.training import setup
from vcagen.training.checkpoint import prune_checkpoints, remove_leftovers
from vcagen.training.ema import EMA
from vcagen.training.trainer import local_part


@pytest.mark.parametrize("process", ["flow", "diffusion"])
def test_six_steps_are_three_and_three(tmp_path, process):
    tiny.train(tmp_path / "whole", process__name=process, log__log_every=2)
    tiny.train(tmp_path / "parts", process__name=process, log__log_every=2, train__steps=3)
    metrics_of_three = tiny.metrics(tmp_path / "parts")
    trainer = tiny.train(tmp_path / "parts", process__name=process, log__log_every=2)
    assert trainer.step == 6
    assert tiny.same_state(tiny.state(tmp_path / "whole", 6), tiny.state(tmp_path / "parts", 6))
    assert [line["step"] for line in metrics_of_three] == [2, 3]
    ours, theirs = tiny.metrics(tmp_path / "parts"), tiny.metrics(tmp_path / "whole")
    assert ours[-1]["loss"] == pytest.approx(theirs[-1]["loss"], rel=1e-6)


def asked_to_stop(trainer, step):
    """The trainer, which gets a SIGTERM in that step."""
    train_step = trainer.train_step

    def then_ask(moments, labels):
        train_step(moments, labels)
        if trainer.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.train_step = then_ask
    return trainer


def test_a_stop_does_not_wait_for_a_preview(tmp_path):
    config = tiny.config(tmp_path / "run", log__preview_every=2)
    asked_to_stop(setup.build_trainer(config), 2).fit()
    assert list(list_checkpoints(tmp_path / "run")) == [2]
    assert not (tmp_path / "run" / "previews").exists()


def test_a_stop_between_log_lines_loses_nothing(tmp_path):
    """The checkpoint keeps the sums of the line that is not yet written."""
    tiny.train(tmp_path / "whole", log__log_every=6)
    config = tiny.config(tmp_path / "parts", log__log_every=6)
    asked_to_stop(setup.build_trainer(config), 4).fit()
    assert list(list_checkpoints(tmp_path / "parts")) == [4]
    tiny.train(tmp_path / "parts", log__log_every=6)
    ours, theirs = tiny.metrics(tmp_path / "parts"), tiny.metrics(tmp_path / "whole")
    assert [line["step"] for line in ours] == [6]
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=1e-6)
    assert tiny.same_state(tiny.state(tmp_path / "whole", 6), tiny.state(tmp_path / "parts", 6))


def test_stops_in_the_middle_of_an_epoch(tmp_path, monkeypatch):
    """12 images in batches of 5: the batch of step 8 ends an epoch in its middle, that of step 6 does not."""
    image_folder(tmp_path / "images", {"a": 5, "b": 7}, size=8)
    seen = []
    read = ImageDataset.__getitems__
    monkeypatch.setattr(ImageDataset, "__getitems__", lambda self, items: seen.append(items) or read(self, items))
    options = {"data__path": str(tmp_path / "images"), "data__from_images": True, "data__images__image_size": 8,
               "vae__path": "identity", "train__batch_size": 5, "data__horizontal_flip": True,
               "data__num_workers": 0, "model__attention": "mhsa", "model__attention_options": {}}  # fmt: skip
    runs = {}
    for name, stops in (("whole", [18]), ("eight", [8, 18]), ("six", [6, 18])):
        seen.clear()
        for stop in stops:
            tiny.train(tmp_path / name, train__steps=stop, **options)
        runs[name] = (list(seen), tiny.metrics(tmp_path / name), tiny.state(tmp_path / name, 18))
    items, lines, state = runs["whole"]
    assert sorted(index for batch in items[:12] for index, _ in batch) == sorted([*range(12)] * 5)
    assert {mirror for batch in items for _, mirror in batch} == {True, False}
    for name in ("eight", "six"):
        assert runs[name][:2] == (items, lines)
        assert tiny.same_state(runs[name][2], state)


def test_a_finished_run_stays_as_it_is_and_can_be_extended(tmp_path, capsys):
    tiny.train(tmp_path, train__steps=2)
    tiny.train(tmp_path, train__steps=2)
    assert "has all its 2 steps" in capsys.readouterr().err
    assert tiny.train(tmp_path, train__steps=3).step == 3


def test_ema_is_the_formula(tmp_path):
    trainer = setup.build_trainer(
        tiny.config(tmp_path, train__ema_decays=[0.9, 0.5], train__ema_warmup=True, train__steps=5)
    )
    weights = [[p.detach().clone() for p in trainer.network.parameters()]]
    step = trainer.train_step

    def record(moments, labels):
        step(moments, labels)
        weights.append([p.detach().clone() for p in trainer.network.parameters()])

    trainer.train_step = record
    trainer.fit()
    for ema, limit in zip(trainer.emas, (0.9, 0.5), strict=True):
        for index, average in enumerate(ema.averages):
            expected = weights[0][index].double()
            for k in range(5):
                decay = min(limit, (1 + k) / (10 + k))
                expected = decay * expected + (1 - decay) * weights[k + 1][index].double()
            torch.testing.assert_close(average.double(), expected, rtol=1e-5, atol=1e-6)
    files = {file.name for file in (tmp_path / "checkpoints/step_0000005").iterdir()}
    assert {"ema_0.9.safetensors", "ema_0.5.safetensors"} < files


def test_ema_without_warmup_starts_as_the_initial_weights():
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    ema = EMA([parameter], 0.75)
    with torch.no_grad():
        parameter.add_(4)
    ema.update([parameter], 0)
    assert ema.averages[0].tolist() == [2.0, 3.0]
    with ema.applied([parameter]):
        assert parameter.tolist() == [2.0, 3.0]
    assert parameter.tolist() == [5.0, 6.0]
    assert ema.averages[0].tolist() == [2.0, 3.0]


def test_first_loss_of_a_new_network_is_the_power_of_the_noise(tmp_path):
    tiny.train(tmp_path, process__name="diffusion", train__batch_size=512, train__steps=1)
    assert tiny.metrics(tmp_path)[0]["mse"] == pytest.approx(1.0, abs=0.02)


def test_loss_falls_on_one_fixed_batch(tmp_path, monkeypatch):
    from vcagen.training import trainer as module

    draw = module.draw
    monkeypatch.setattr(module, "draw", lambda seed, step, *rest: draw(seed, 0, *rest))
    monkeypatch.setattr(module.StepSampler, "__call__", lambda self, step: [(i, False) for i in range(8)])
    tiny.train(tmp_path, train__steps=60)
    losses = [line["loss"] for line in tiny.metrics(tmp_path)]
    assert losses[-1] < 0.5 * losses[0]


def test_accumulation_gives_the_same_run(tmp_path):
    tiny.train(tmp_path / "whole")
    tiny.train(tmp_path / "micro", train__micro_batch_size=3)
    for ours, theirs in zip(tiny.metrics(tmp_path / "micro"), tiny.metrics(tmp_path / "whole"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def test_gradient_checkpointing_and_log_interval_change_nothing(tmp_path):
    tiny.train(tmp_path / "a")
    tiny.train(tmp_path / "b", model__gradient_checkpointing=True, log__log_every=4)
    assert tiny.same_state(tiny.state(tmp_path / "a", 6), tiny.state(tmp_path / "b", 6))
    assert [line["step"] for line in tiny.metrics(tmp_path / "b")] == [4, 6]


def test_clipping_limits_the_step_and_reports_the_norm_before(tmp_path):
    tiny.train(tmp_path / "free")
    trainer = setup.build_trainer(tiny.config(tmp_path / "clipped", train__max_grad_norm=1e-3))
    norms = []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (
        norms.append(torch.stack([p.grad.norm() for p in trainer.network.parameters() if p.grad is not None]).norm()),
        step(),
    )
    trainer.fit()
    assert all(norm <= 1.01e-3 for norm in norms)
    assert tiny.metrics(tmp_path / "clipped")[0]["grad_norm"] == tiny.metrics(tmp_path / "free")[0]["grad_norm"]


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(tmp_path, monkeypatch):
    read = ImageDataset.__getitems__
    calls = []

    def poisoned(self, items):
        calls.append(items)
        moments, labels = read(self, items)
        return (moments * math.nan if len(calls) == 4 else moments), labels

    monkeypatch.setattr(ImageDataset, "__getitems__", poisoned)
    with pytest.raises(ValueError, match="loss: not finite at step 4; the last checkpoint is step_0000003"):
        tiny.train(tmp_path, checkpoint__save_every=3, log__log_every=100)
    assert list(list_checkpoints(tmp_path)) == [3]
    assert all(value.isfinite().all() for value in tiny.state(tmp_path, 3).values())
    monkeypatch.undo()
    assert tiny.train(tmp_path, checkpoint__save_every=3).step == 6


def test_another_configuration_is_refused_by_field(tmp_path):
    tiny.train(tmp_path, train__steps=1)
    with pytest.raises(ValueError, match=r"seed: 0 there, 1 here") as error:
        tiny.train(tmp_path, seed=1, train__learning_rate=0.5, log__log_every=3)
    assert "train.learning_rate: 0.01 there, 0.5 here" in str(error.value)
    assert "log_every" not in str(error.value).split("may change")[0]
    with pytest.raises(ValueError, match=r"attention_options"):
        tiny.train(tmp_path, model__attention_options={"contrast_grid": [4, 4]})
    assert tiny.train(tmp_path, checkpoint__keep_last=1, train__steps=2).step == 2


def test_a_run_of_an_earlier_version_is_refused(tmp_path):
    tiny.train(tmp_path, train__steps=1)
    file = tmp_path / "checkpoints" / "step_0000001" / "model.safetensors"
    save_weights(file, load_file(file), {**read_metadata(file), "format": 1})
    with pytest.raises(ValueError, match=r"model\.safetensors: format 1, which commit a5c3076 of vcagen reads"):
        tiny.train(tmp_path, train__steps=2)


def test_other_data_is_refused(tmp_path):
    options = {"data__from_images": True, "data__images__image_size": 8, "vae__path": "identity"}
    for folder, counts in (("one", {"a": 2, "b": 2}), ("moved", {"a": 2, "b": 2}), ("more", {"a": 2, "b": 3}),
                           ("other", {"a": 2, "c": 2})):  # fmt: skip
        image_folder(tmp_path / folder, counts, size=8)
    tiny.train(tmp_path / "run", train__steps=1, data__path=str(tmp_path / "one"), **options)
    with pytest.raises(ValueError, match=r"data: not that of .*class_names"):
        tiny.train(tmp_path / "run", data__path=str(tmp_path / "other"), **options)
    with pytest.raises(ValueError, match=r"data: 5 images, .* was trained on 4"):
        tiny.train(tmp_path / "run", data__path=str(tmp_path / "more"), **options)
    assert tiny.train(tmp_path / "run", data__path=str(tmp_path / "moved"), **options).step == 6


def test_a_refused_command_does_not_block_its_correction(tmp_path):
    with pytest.raises(ValueError, match=r"train.ema_decays: .* got '1\.5'"):
        tiny.train(tmp_path / "run", train__ema_decays=[1.5])
    assert not (tmp_path / "run").exists()
    tiny.train(tmp_path / "run")


def test_a_half_written_checkpoint_is_passed_over(tmp_path, capsys):
    tiny.train(tmp_path, checkpoint__save_every=2, train__steps=4)
    half = tmp_path / "checkpoints" / ".step_0000006.99.tmp"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"cut")
    assert tiny.train(tmp_path).step == 6
    assert "going on from step_0000004" in capsys.readouterr().err
    assert not half.exists()


def test_init_is_read_at_the_start_only(tmp_path):
    tiny.train(tmp_path / "first")
    weights = tmp_path / "first" / "checkpoints/step_0000006/ema_0.9.safetensors"
    options = {"init": str(weights)}
    tiny.train(tmp_path / "second", train__steps=2, **options)
    weights.unlink()
    assert tiny.train(tmp_path / "second", train__steps=3, **options).step == 3


def test_weights_carry_what_sampling_needs(tmp_path):
    tiny.train(tmp_path)
    for name, decay in (("ema_0.9", 0.9), ("model", None)):
        metadata = read_metadata(tmp_path / f"checkpoints/step_0000006/{name}.safetensors")
        assert metadata["format"] == 2
        assert metadata["step"] == 6
        assert metadata["ema_decay"] == decay
        assert metadata["config"]["model"]["attention"] == "vca"
        assert metadata["data"]["num_classes"] == 10
        assert len(metadata["data"]["class_names"]) == 10
    assert (tmp_path / "config.yaml").exists()


def test_old_checkpoints_go_and_leftovers_too(tmp_path):
    tiny.train(tmp_path, checkpoint__save_every=1, checkpoint__keep_last=2, checkpoint__keep_every=2)
    assert list(list_checkpoints(tmp_path)) == [2, 4, 5, 6]
    left = tmp_path / "checkpoints" / ".step_0000007.123.tmp"
    left.mkdir()
    (tmp_path / ".config.yaml.5.tmp").write_text("half")
    others = [tmp_path / ".mine.tmp", tmp_path / ".config.yaml.mine.tmp", tmp_path / "checkpoints" / ".mine.tmp"]
    for path in others:
        path.write_text("of the user")
    remove_leftovers(tmp_path)
    assert all(path.exists() for path in others)
    assert not left.exists()
    assert not (tmp_path / ".config.yaml.5.tmp").exists()
    prune_checkpoints(tmp_path, keep_last=1, keep_every=0)
    assert list(list_checkpoints(tmp_path)) == [6]


def test_metrics_after_the_checkpoint_are_written_again(tmp_path):
    tiny.train(tmp_path, train__steps=2)
    path = tmp_path / "metrics.jsonl"
    before = path.read_text()
    path.write_text(before + '{"step": 3}\n{"ste')
    tiny.train(tmp_path, train__steps=4)
    assert path.read_text().startswith(before)
    assert [line["step"] for line in tiny.metrics(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("line", ["{}", "[]", '{"step": "1"}', "", "{", "\xff"])
def test_a_damaged_log_is_named(tmp_path, line):
    tiny.train(tmp_path, train__steps=1)
    (tmp_path / "metrics.jsonl").write_bytes(line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl: damaged"):
        tiny.train(tmp_path, train__steps=2)


DAMAGED_STATES = ["{}", "[]", '{"st', '{"format": 2, "step": 1, "num_items": 1797, "num_processes": 1, "scaler": null}']


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("state.json", text) for text in DAMAGED_STATES),
        *((f"{name}.safetensors", kind) for name in ("model", "ema_0.9", "optimizer") for kind in ("cut", "other")),
        ("optimizer.safetensors", "empty"),
        ("optimizer.safetensors", "shape"),
        ("ema_0.9.safetensors", "shape"),
    ],
)
def test_a_damaged_checkpoint_is_named(tmp_path, name, content):
    tiny.train(tmp_path, train__steps=1)
    file = tmp_path / "checkpoints" / "step_0000001" / name
    if content == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif name == "state.json":
        file.write_text(content)
    else:
        tensors, metadata = load_file(file), read_metadata(file.with_name("model.safetensors"))
        tensors = {
            "other": {f"x.{key}": value for key, value in tensors.items()},
            "shape": {key: value.reshape(1, *value.shape) for key, value in tensors.items()},
        }.get(content, {})
        save_weights(file, tensors, metadata)
    with pytest.raises(ValueError, match=rf"step_0000001/{re.escape(name)}: (damaged|not a complete)"):
        tiny.train(tmp_path, train__steps=2)


HOLD = "import filelock, sys; lock = filelock.FileLock(sys.argv[1]); lock.acquire(blocking=False); print(1, flush=True)"


def test_a_run_folder_is_for_one_training_and_a_killed_one_is_no_obstacle(tmp_path):
    half = tmp_path / "checkpoints" / ".step_0000001.99.tmp"
    half.mkdir(parents=True)
    hold = [sys.executable, "-c", f"{HOLD}; input()", str(tmp_path / ".lock")]
    with subprocess.Popen(hold, stdin=-1, stdout=-1) as other:
        other.stdout.readline()
        with pytest.raises(ValueError, match=rf"^run_dir: {tmp_path} is in use by another training$"):
            tiny.train(tmp_path)
        assert half.exists()
        assert not (tmp_path / "config.yaml").exists()
        other.kill()
    tiny.train(tmp_path, train__steps=1)
    assert not half.exists()


def test_a_training_holds_its_folder_until_it_ends(tmp_path):
    def is_free():
        take = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
        return subprocess.run(take, capture_output=True).returncode == 0

    trainer = setup.build_trainer(tiny.config(tmp_path, train__steps=1))
    free, train_step = [], trainer.train_step
    trainer.train_step = lambda *batch: (free.append(is_free()), train_step(*batch))
    trainer.fit()
    assert free == [False]
    assert is_free()


def test_a_killed_training_does_not_leave_its_lock_to_its_loader_workers(tmp_path):
    script = f"{HOLD}; import os, time; os.write(1, b'%d\\n' % os.fork()); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path / ".lock")], stdout=-1, text=True) as other:
        _, *forked = (int(other.stdout.readline()) for _ in range(3))
        worker = max(forked)  # the worker itself has told 0, so it is at work
        other.kill()
        other.wait()
        lock = lock_run(tmp_path)
        os.kill(worker, 0)  # it lives
        os.kill(worker, signal.SIGKILL)
    assert lock is not None


@pytest.fixture
def fresh_accelerate():
    """accelerate takes one precision a process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def test_bf16_trains_and_keeps_float32_weights(tmp_path, fresh_accelerate):
    trainer = tiny.train(tmp_path, train__precision="bf16")
    assert all(p.dtype == torch.float32 for p in trainer.network.parameters())
    AcceleratorState._reset_state(True)
    tiny.train(tmp_path / "float32")
    ours, theirs = tiny.metrics(tmp_path)[-1]["loss"], tiny.metrics(tmp_path / "float32")[-1]["loss"]
    assert ours != theirs
    assert ours == pytest.approx(theirs, rel=0.05)


def test_previews_are_grids_of_fixed_seeds(tmp_path):
    options = {"log__preview_every": 2, "sampling__sampler": "ode",
               "sampling__method": "euler", "sampling__num_steps": 2}  # fmt: skip
    tiny.train(tmp_path / "with", **options)
    from PIL import Image

    previews = sorted(path.name for path in (tmp_path / "with" / "previews").iterdir())
    assert previews == ["step_0000002.png", "step_0000004.png", "step_0000006.png"]
    assert Image.open(tmp_path / "with" / "previews" / previews[0]).size == (68, 68)
    tiny.train(tmp_path / "without")
    assert tiny.same_state(tiny.state(tmp_path / "with", 6), tiny.state(tmp_path / "without", 6))


def test_fine_tuning_takes_weights_and_rows_of_the_label_table(tmp_path, capsys):
    tiny.train(tmp_path / "first")
    before = tiny.state(tmp_path / "first", 6)
    same = setup.build_trainer(tiny.config(tmp_path / "same", init=str(tmp_path / "first")))
    for name, value in same.network.state_dict().items():
        assert value.equal(before["ema_0.9.safetensors", name])
    without_null = tiny.config(tmp_path / "other", init=str(tmp_path / "first"), model__class_dropout_prob=0.0)
    other = setup.build_trainer(without_null)
    assert "label rows kept: 0, 1, 2 and 7 more; new: 0" in capsys.readouterr().err
    table = other.network.state_dict()["y_embedder.embedding_table.weight"]
    assert table.equal(before["ema_0.9.safetensors", "y_embedder.embedding_table.weight"][:10])
    with pytest.raises(ValueError, match=r"weights: blocks\.1\..* missing"):
        setup.build_trainer(tiny.config(tmp_path / "deep", init=str(tmp_path / "first"), model__depth=2))
    flat = tmp_path / "flat.pt"
    torch.save({**same.network.state_dict(), "y_embedder.embedding_table.weight": torch.zeros(3)}, flat)
    with pytest.raises(ValueError, match=rf"^init: {flat}: .*embedding_table"):
        setup.build_trainer(tiny.config(tmp_path / "flat", init=str(flat)))


def test_one_class_without_dropout_trains(tmp_path):
    from PIL import Image

    (tmp_path / "images").mkdir()
    for index in range(3):
        Image.new("RGB", (8, 8), (80 * index, 0, 0)).save(tmp_path / "images" / f"{index}.png")
    trainer = tiny.train(
        tmp_path / "run", data__path=str(tmp_path / "images"), data__from_images=True, data__images__image_size=8,
        vae__path="identity", model__class_dropout_prob=0.0,
    )  # fmt: skip
    assert trainer.network.null_label is None
    assert trainer.network.num_classes == 1


def test_the_dry_run_plans_and_writes_nothing(tmp_path):
    text = setup.build_trainer(tiny.config(tmp_path / "run", train__micro_batch_size=2)).plan()
    assert "1797 images of 10 classes" in text
    assert "8 = 1 processes x 8, in parts of 2" in text
    assert "19.7 bytes a parameter" in text  # 20, but for the position table
    assert not (tmp_path / "run").exists()


def test_batches_are_shared_equally():
    assert local_part(8, 1, 4) == slice(2, 4)
    with pytest.raises(ValueError, match="8 images cannot be shared by 3 processes; valid process counts: 1, 2, 4, 8"):
        local_part(8, 0, 3)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("train__steps", 0, "train.steps: expected int >0, got '0'"),
        ("log__log_every", 0, "log.log_every: expected int >0, got '0'"),
        ("log__preview_every", -1, "log.preview_every: expected int ≥0, got '-1'"),
        ("train__ema_decays", [], "train.ema_decays: []"),
        ("train__ema_decays", [0.9, 0.9], "train.ema_decays: [0.9, 0.9]"),
        ("train__ema_decays", [1.5], "train.ema_decays: expected a list of float in [0, 1), got '1.5'"),
        ("train__max_grad_norm", -1, "train.max_grad_norm: expected float >0 or null, got '-1'"),
        ("train__learning_rate", float("nan"), "train.learning_rate: expected float ≥0, got 'nan'"),
        ("train__micro_batch_size", -1, "train.micro_batch_size: expected int >0 or null, got '-1'"),
        ("checkpoint__keep_every", -5, "checkpoint.keep_every: expected int ≥0, got '-5'"),
        ("data__num_workers", -1, "data.num_workers: expected int ≥0, got '-1'"),
        ("seed", -1, "seed: expected int 0..2^63 - 1, got '-1'"),
        ("log__trackers", ["clearml"], "log.trackers: clearml is not installed"),
        ("model__hidden_size", 0, "model.hidden_size: expected int >0 or null, got '0'"),
        ("model__mlp_ratio", -1, "model.mlp_ratio: expected float >0, got '-1'"),
        ("model__mlp_ratio", float("inf"), "model.mlp_ratio: inf"),
        ("model__mlp_ratio", 1e300, "model.mlp_ratio: 1e+300"),
        ("model__mlp_ratio", float("nan"), "model.mlp_ratio: expected float >0, got 'nan'"),
        ("model__mlp_ratio", 1e-9, "model.mlp_ratio: 1e-09"),
        ("model__attention_options", {"num_heads": 4}, "model.attention_options.num_heads: unknown option"),
        ("model__attention_options", {1: 2}, "Key must be a string, got: 1"),
        ("model__size", "S/3", "8 x 8 is not divisible by 3"),
        ("model__attention", "mha", "model.attention: 'mha'"),
        ("data__path", "nowhere", "nowhere: no latents; make them by vcagen encode"),
        ("init", "nowhere.pt", "nowhere.pt"),
        ("sampling__num_steps", 0, "sampling.num_steps: expected int >0, got '0'"),
        ("sampling__cfg_scale", float("nan"), "sampling.cfg_scale: nan"),
        ("sampling__sampler", "ddim", "sampling.sampler: ddim is not for a flow model"),
        ("sampling__extractor", "inseption", "sampling.extractor: inseption; choose from inception, pixels"),
    ],
)
def test_bad_values_are_named(tmp_path, option, value, message):
    with pytest.raises((ValueError, OSError), match=re.escape(message)):
        tiny.train(tmp_path / "run", **{option: value})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("run", ["", " "])
def test_a_run_needs_a_folder(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^run_dir: '"):
        tiny.train(run)
    assert list(tmp_path.iterdir()) == []


def test_state_json_is_complete(tmp_path):
    tiny.train(tmp_path)
    state = json.loads((tmp_path / "checkpoints/step_0000006/state.json").read_text())
    assert state["step"] == 6
    assert state["num_items"] == 1797
    assert state["num_processes"] == 1
