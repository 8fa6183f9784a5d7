"""Records of ours on disk: a wrong field is one line with the file and the field; content belongs to its record."""

import json
import random
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
import yaml
from safetensors.torch import load_file, save_file

from vcagen.__main__ import do
from vcagen.config.job_options import EncodeConfig, EvaluateConfig
from vcagen.config.options import DataConfig, VaeConfig
from vcagen.data import encode
from vcagen.data.images import open_images
from vcagen.data.latents import LatentDataset, open_dataset, open_vae
from vcagen.evaluation.evaluate import Evaluation, result_path
from vcagen.evaluation.features import PixelFeatures
from vcagen.evaluation.reference import open_reference
from vcagen.jobs.inspect import describe
from vcagen.networks.kernel_times import read_times, times_file
from vcagen.networks.weights import export_weights, find_weights, read_metadata, save_weights
from vcagen.paper.digits import DigitAccuracy
from vcagen.paper.report import report_run, run_text, run_values
from vcagen.paper.run_results import read_run
from vcagen.sampling.image_store import ImageStore
from vcagen.sampling.load_run import load
from vcagen.system.processes import build_accelerator
from vcagen.training.setup import build_trainer

torch.set_num_threads(1)
SAMPLES = "samples/made"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of two steps with scored samples, latents of the digits, and statistics of them."""
    folder = tmp_path_factory.mktemp("records")
    run = folder / "run"
    tiny.train(run, train__steps=2, sampling__num_images=9, sampling__sampler="ode", sampling__method="euler",
               sampling__num_steps=2)  # fmt: skip
    do("encode", ["digits", f"--out={folder / 'latents'}", "--shard_size=1000"], prog="x")
    do("stats", ["digits", f"--out={folder / 'digits.npz'}", "--extractor=pixels"], prog="x")
    do("sample", [f"--run_dir={run}", f"--out={run / SAMPLES}", f"--reference={folder / 'digits.npz'}",
                  "--extractor=pixels"], prog="x")  # fmt: skip
    return folder


@pytest.fixture
def copy(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "made"))


def change_json(path, change):
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def change_metadata(path, change):
    metadata = read_metadata(path)
    change(metadata)
    save_weights(path, load_file(path), metadata)


def newest(run):
    return run / "checkpoints" / "step_0000002"


def flip_bit(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# --- one line with the file and the field ---


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [("latents/shards.json", lambda r: r.pop("shards"), "missing required field `shards`"),
     ("latents/shards.json", lambda r: r["vae"].pop("channels"), r"field `channels` - at `\$.vae`"),
     ("latents/shards.json", lambda r: r["shards"][1].update(count="797"), r"got `str` - at `\$\.shards\[1\]\.count"),
     ("latents/shards.json", lambda r: r["shards"][1].update(count=796), r"moments_00001.npy: holds \(797, .*\(796, "),
     ("latents/shards.json", lambda r: r.update(dtype="float64"), r"'float64' - at `\$.dtype`"),
     ("latents/shards.json", lambda r: r.update(class_names=["0"] * 9), "labels.npy: not 1797 labels of 9 classes"),
     ("latents/shards.json", lambda r: r["shards"].pop(), "more shards than the 1 of shards.json"),
     ("latents/names.json", lambda r: r.update(names={}), r"`array`, got `object` - at `\$.names`")],
)  # fmt: skip
def test_latents_name_the_field(copy, file, change, message):
    change_json(copy / file, change)
    with pytest.raises(ValueError, match=rf"latents.*{message}"):
        LatentDataset(copy / "latents").names()


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda m: m["data"].pop("channels"), "field `channels`"),
     (lambda m: m.update(data=[]), r"`array` - at `\$.data`"),
     (lambda m: m["data"].update(class_names="0123456789"), r"`str` - at `\$.class_names`"),
     (lambda m: m["data"]["class_names"].pop(), "9 class_names of 10 classes"),
     (lambda m: m.update(step=-1), r">= 0 - at `\$.step`"), (lambda m: m.update(ema_decay="0.9"), r"at `\$.ema_decay`"),
     (lambda m: m["config"]["train"].update(batch_size="x"), "train.batch_size: expected int >0, got 'x'"),
     (lambda m: m["data"]["vae"].pop("sha256"), "field `sha256`")],
)  # fmt: skip
def test_weights_name_the_field_wherever_they_are_read(copy, change, message):
    for name in ("model", "ema_0.9"):
        change_metadata(newest(copy / "run") / f"{name}.safetensors", change)
    with pytest.raises(ValueError, match=rf"safetensors: .*{message}"):
        load(copy / "run")
    with pytest.raises(ValueError, match=rf"safetensors: .*{message}"):
        tiny.train(copy / "run", train__steps=3)


@pytest.mark.parametrize(
    ("key", "value"),
    [("step", "2"), ("num_items", None), ("losses", {"sums": {}}), ("losses", {"sums": [], "images": 0}),
     ("scaler", {"scale": "x"}), ("num_processes", 1.5)],
)  # fmt: skip
def test_a_state_names_the_field(copy, key, value):
    change_json(newest(copy / "run") / "state.json", lambda record: record.update({key: value}))
    with pytest.raises(ValueError, match=rf"step_0000002/state\.json: damaged .*{key}"):
        tiny.train(copy / "run", train__steps=3)


@pytest.mark.parametrize("key", ["metrics", "reference", "weights", "n_samples", "warnings", "extractor"])
def test_a_result_names_the_field(copy, key):
    change_json(copy / "run" / SAMPLES / "results.json", lambda record: record.pop(key))
    with pytest.raises(ValueError, match=rf"results\.json: damaged .*missing required field `{key}`"):
        read_run(copy / "run")


def test_statistics_and_manifests_name_the_field(copy):
    manifest = copy / "run" / SAMPLES / "manifest.json"
    change_json(manifest, lambda record: record.update(num_images="9"))
    with pytest.raises(ValueError, match=r"manifest\.json: damaged .*`str` - at `\$\.num_images`"):
        do("evaluate", [str(manifest.parent), "--reference=digits", "--extractor=pixels"], prog="x")
    rewrite_statistics(copy, {"format": 2, "identity": PixelFeatures.identity, "kind": "x", "shape": [1, 8]})
    with pytest.raises(ValueError, match=r"digits\.npz: damaged .*length 3, got 2 - at `\$\.shape`"):
        open_reference(str(copy / "digits.npz"), PixelFeatures())


def rewrite_statistics(folder, meta):
    with np.load(folder / "digits.npz") as file:
        arrays = {**file, "meta": np.array(json.dumps(meta))}
    np.savez(folder / "digits.npz", **arrays)


# --- content belongs to its record ---


@pytest.mark.parametrize("offset", [-1, -100, -5000])
def test_a_bit_that_fell_over_in_weights_is_found(copy, offset, tmp_path):
    run = copy / "run"
    for file in newest(run).glob("*.safetensors"):
        flip_bit(file, offset)
    for read in (load, describe, partial(export_weights, out=tmp_path / "out.safetensors")):
        with pytest.raises(ValueError, match=r"ema_0\.9\.safetensors: damaged: the tensors are not .* written"):
            read(run)
    assert not (tmp_path / "out.safetensors").exists()
    with pytest.raises(ValueError, match=r"ema_0\.9\.safetensors: damaged: the tensors"):
        tiny.train(run, train__steps=3)


def test_a_bit_that_fell_over_in_latents_is_found(copy):
    folder = copy / "latents"
    assert describe(folder)["items"] == 1797
    for name in ("moments_00001.npy", "labels.npy"):
        flip_bit(folder / name, -8)
        LatentDataset(folder)  # a training does not read all of them first
        with pytest.raises(ValueError, match=rf"latents: damaged: {name}: not as written"):
            describe(folder)
        if name == "moments_00001.npy":
            with pytest.raises(ValueError, match=r"moments_00001\.npy: damaged, its SHA-256"):
                do("encode", ["digits", f"--out={folder}", "--shard_size=1000"], prog="x")
        flip_bit(folder / name, -8)
    assert describe(folder)["data"]["num_classes"] == 10


def test_weights_of_before_the_hash_are_read(copy):
    file = newest(copy / "run") / "ema_0.9.safetensors"
    save_file(load_file(file), file, metadata={"vcagen": json.dumps(read_metadata(file))})
    assert load(copy / "run").step == 2


def test_a_renamed_checkpoint_is_refused(copy):
    run = copy / "run"
    newest(run).rename(run / "checkpoints" / "step_0000005")
    with pytest.raises(ValueError, match=r"step_0000005: holds the checkpoint of step 2; was the folder renamed"):
        tiny.train(run, train__steps=6)
    for weights in ("ema", "raw", "ema_0.9"):
        with pytest.raises(ValueError, match=r"step_0000005/.*: is of step 2; was the folder renamed"):
            find_weights(run, weights=weights, step=5)


# --- whatever a record says ---

VALUES = [None, True, -1, 0, 3, 1.5, float("nan"), "", "x", "12", "a\nb", [], [1], ["x"], {}, {"a": 1}, {"0": []}]
GONE = object()


def variants(record, count=200):
    """Copies of a record with one value replaced, or one key removed."""
    places = list(paths(record))
    changes = [(place, value) for place in places for value in (*VALUES, GONE)]
    generator = random.Random(0)
    for place, value in generator.sample(changes, min(count, len(changes))):
        changed = json.loads(json.dumps(record))
        inner = changed
        for key in place[:-1]:
            inner = inner[key]
        if value is GONE:
            del inner[place[-1]]
        else:
            inner[place[-1]] = value
        yield f"{place} {'gone' if value is GONE else repr(value)}", changed


def paths(record, before=()):
    items = record.items() if isinstance(record, dict) else enumerate(record[:2]) if isinstance(record, list) else ()
    for key, value in items:
        yield (*before, key)
        yield from paths(value, (*before, key))


def survives(name, write, read, records):
    """Whether each record is either read or refused in one line that names the file."""
    wrong = []
    for what, record in records:
        write(record)
        try:
            read()
        except (ValueError, OSError) as error:
            if name not in str(error):  # lines are joined by `command_line.run`
                wrong.append(f"{what}: {error!r}")
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


def reported(folder):
    """What `vcagen report` writes of a run, without the plot."""
    run = read_run(folder)
    json.dumps(run_values(run, None))
    return run_text(run, None, "loss.png")


def fuzz_json(path, read, name=None, count=200):
    survives(
        name or path.name, lambda r: path.write_text(json.dumps(r)), read, variants(json.loads(path.read_text()), count)
    )


@pytest.mark.slow
def test_any_description_of_latents(copy):
    folder, config = copy / "latents", EncodeConfig(images="digits", out="x", shard_size=1000)
    images = open_images("digits", config)
    settings = encode._settings(config, images, open_vae(images, "digits", VaeConfig()))

    def read():
        dataset, vae = open_dataset(DataConfig(path=str(folder)), VaeConfig())
        moments, _ = dataset.__getitems__([(0, False), (len(dataset) - 1, True)])
        vae.sample(moments, torch.zeros(2, 1, 8, 8))
        dataset.spec.differences(dataset.spec)

    original = (folder / "shards.json").read_text()
    fuzz_json(folder / "shards.json", lambda: encode._find_done(folder, settings))
    (folder / "shards.json").write_text(original)
    record = {**settings, **json.loads(original)["shards"][0]}
    (folder / "moments_00000.json").write_text(json.dumps(record))
    fuzz_json(folder / "moments_00000.json", lambda: encode._find_done(folder, settings))
    (folder / "moments_00000.json").unlink()
    fuzz_json(folder / "shards.json", read, "latents")
    (folder / "shards.json").write_text(original)
    fuzz_json(folder / "names.json", LatentDataset(folder).names)


@pytest.mark.slow
def test_any_metadata_of_weights(copy):
    file = newest(copy / "run") / "ema_0.9.safetensors"
    tensors, metadata = load_file(file), read_metadata(file)

    def read():
        run = load(copy / "run")
        run.sample([0], num_steps=1)
        describe(copy / "run")

    survives("", partial(save_weights, file, tensors), read, variants(metadata, 120))


@pytest.mark.slow
def test_any_state(copy):
    trainer = build_trainer(tiny.config(copy / "run", train__steps=3))
    fuzz_json(newest(copy / "run") / "state.json", trainer.resume, "step_0000002")


@pytest.mark.slow
def test_any_configuration(copy):
    run = copy / "run"
    path = run / "config.yaml"

    def write(record):
        path.write_text(yaml.safe_dump(record))

    survives("config.yaml", write, lambda: reported(run), variants(yaml.safe_load(path.read_text()), 100))


@pytest.mark.slow
def test_any_result(copy):
    run = copy / "run"
    path = run / SAMPLES / "results.json"
    (run / "config.yaml").unlink()  # to parse it takes longest

    def read():
        result_path(str(path.parent), "pixels")
        reported(run)

    fuzz_json(path, read)


@pytest.mark.slow
def test_any_line_of_the_log(copy):
    run, path = copy / "run", copy / "run" / "metrics.jsonl"
    (run / "config.yaml").write_text("run_dir: r")
    first, second = map(json.loads, path.read_text().splitlines())

    def write(record):
        path.write_text(f"{json.dumps(first)}\n{json.dumps(record)}\n")

    survives("metrics.jsonl", write, lambda: reported(run), variants(second, 100))
    survives("metrics.jsonl", write, lambda: report_run(run, copy / "report"), variants(second, 5))  # with its plot


@pytest.mark.slow
def test_any_manifest(copy):
    folder, accelerator = copy / "run" / SAMPLES, build_accelerator()
    path = folder / "manifest.json"
    settings = json.loads(path.read_text())
    facts = settings.pop("facts")
    batch = settings.pop("batch")
    settings = {key: value for key, value in settings.items() if key not in ("format", "num_images")}
    store = ImageStore(folder, 9, batch, image_shape=(1, 8, 8), settings=settings, facts=facts)
    scored = EvaluateConfig(samples=str(folder), reference=str(copy / "digits.npz"), extractor="pixels")
    columns = [DigitAccuracy()]

    def read():
        Evaluation(scored, accelerator).score()
        read_run(copy / "run", columns=columns)

    original = path.read_text()
    fuzz_json(path, store.prepare, "made")
    path.write_text(original)
    (copy / "run" / "config.yaml").write_text("run_dir: r")  # to parse the whole takes longest
    fuzz_json(path, read, "made", 100)


@pytest.mark.slow
def test_any_statistics(copy):
    with np.load(copy / "digits.npz") as file:
        meta = json.loads(str(file["meta"]))

    def read():
        reference = open_reference(str(copy / "digits.npz"), PixelFeatures(), shape=(1, 8, 8))
        json.dumps(reference.record())

    survives("digits.npz", partial(rewrite_statistics, copy), read, variants(meta))


@pytest.mark.slow
def test_any_times_of_kernels(copy):
    path = times_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": 2, "times": {"GPU": {"d 64": {"maps_ms": 1.0, "fused_ms": 0.5}}}}))
    fuzz_json(path, lambda: [t["fused_ms"] < t["maps_ms"] for gpu in read_times().values() for t in gpu.values()])
    path.unlink()


@pytest.mark.slow
def test_any_features_in_progress(copy):
    """Not JSON, but a record too: parts of tensors that a killed `evaluate` left."""
    folder = copy / "run" / SAMPLES
    evaluation = Evaluation(
        EvaluateConfig(samples=str(folder), reference=str(copy / "digits.npz"), extractor="pixels"), build_accelerator()
    )
    source, out, _ = evaluation._opened
    (part,) = evaluation._parts(source, out.parent / f".{out.stem}.features")
    evaluation._extract(source, {part: range(9)})
    tensors = load_file(part)
    changes = {
        f"{name} {what}": {**tensors, name: change(tensors[name])}
        for name in tensors
        for what, change in {
            "shorter": lambda x: x[:-1], "longer": lambda x: torch.cat([x, x]), "flat": lambda x: x.flatten(),
            "narrower": lambda x: x[:, :-1], "int": lambda x: x.int(), "half": lambda x: x.half(),
            "nan": lambda x: x.float() * float("nan"), "empty": lambda x: x[:0], "deep": lambda x: x[None],
        }.items()
    }  # fmt: skip
    changes |= {f"{name} gone": {key: value for key, value in tensors.items() if key != name} for name in tensors}
    changes["other"] = {**tensors, "other": torch.zeros(9)}

    def write(change):
        part.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: value.contiguous() for key, value in change.items()}, part)

    survives("", write, evaluation.score, changes.items())
