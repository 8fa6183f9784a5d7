"""Weights files: every wrapping loads bit-equal, nothing runs code, every mismatch is one line with its cause."""

import argparse
import os
import pickle

import pytest
import torch
from helpers import u
from safetensors.torch import save_file

from vcagen.__main__ import do
from vcagen.jobs.inspect import describe, table
from vcagen.networks import weights as checkpoints
from vcagen.networks.dit import DiT
from vcagen.system.run_folder import checkpoint_folder, latest_checkpoint, list_checkpoints

SMALL = {
    "input_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 16, "depth": 2, "num_heads": 2, "num_classes": 3,
}  # fmt: skip
DATA = {"class_names": ["cat", "dog", "eel"]}
CONFIG = {"seed": 0, "model": {"size": "S/2"}, "process": {"name": "flow"}, "vae": {"path": "identity"},
          "train": {"ema_decays": [0.999, 0.9]}}  # fmt: skip


def network(**options):
    """A small network whose weights, zeros of the initialisation included, are all random."""
    model = DiT(**{"out_channels": 4, **SMALL, **options})
    generator = torch.Generator().manual_seed(0)
    for value in model.parameters():
        value.data = 0.1 * torch.randn(value.shape, generator=generator)
    return model.eval()


def metadata(step=5, decay=0.999):
    return {"format": 2, "config": CONFIG, "data": DATA, "step": step, "ema_decay": decay}


def a_run(folder, steps=(5, 10)):
    """A run folder as the trainer leaves it, raw weights scaled to tell them from the averages."""
    state = network().state_dict()
    for step in steps:
        where = checkpoint_folder(folder, step)
        where.mkdir(parents=True)
        checkpoints.save_weights(
            where / "model.safetensors", {k: 3 * v for k, v in state.items()}, metadata(step, None)
        )
        checkpoints.save_weights(where / "ema_0.999.safetensors", state, metadata(step, 0.999))
        checkpoints.save_weights(
            where / "ema_0.9.safetensors", {k: 2 * v for k, v in state.items()}, metadata(step, 0.9)
        )
    return state


def same(state, other):
    return state.keys() == other.keys() and all(torch.equal(state[key], other[key]) for key in state)


def test_our_file_keeps_weights_and_metadata_and_is_deterministic(tmp_path):
    state = network().state_dict()
    for name in "a", "b":
        checkpoints.save_weights(tmp_path / name, state, metadata())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    read = checkpoints.read_weights(tmp_path / "a")
    assert same(read.state_dict, state)
    assert read.metadata == metadata()
    assert read.name == "ema_0.999"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a", "b"]


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_every_wrapping_loads_bit_equal(tmp_path, prefix):
    state = network().state_dict()
    wrapped = {prefix + key: value for key, value in state.items()}
    other = {key: value + 1 for key, value in wrapped.items()}
    args = argparse.Namespace(model="DiT-S/2", lr=1e-4, path_type="Linear")
    contents = {
        "bare": (wrapped, "weights"),
        "container": ({"model": other, "ema": wrapped, "opt": {"state": {}}, "args": args}, "ema"),
        "lightning": ({"state_dict": wrapped, "epoch": 3}, "state_dict"),
    }
    for name, (content, chosen) in contents.items():
        torch.save(content, tmp_path / f"{name}.pt")
        read = checkpoints.read_weights(tmp_path / f"{name}.pt")
        assert same(read.state_dict, state), name
        assert read.name == chosen
    assert checkpoints.read_weights(tmp_path / "container.pt").args["path_type"] == "Linear"
    raw = checkpoints.read_weights(tmp_path / "container.pt", which="raw")
    assert raw.name == "model"
    assert same(raw.state_dict, {key: value + 1 for key, value in state.items()})
    save_file(wrapped, tmp_path / "bare.safetensors")
    read = checkpoints.read_weights(tmp_path / "bare.safetensors")
    assert same(read.state_dict, state)
    assert read.metadata is None


def test_old_format_of_torch_save_is_read(tmp_path):
    state = network().state_dict()
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert same(checkpoints.read_weights(tmp_path / "old.pt").state_dict, state)


def test_a_prefix_inside_a_name_is_left_alone(tmp_path):
    state = {"blocks.module.weight": u((2,), 1), "module.bias": u((2,), 2)}
    torch.save(state, tmp_path / "a.pt")
    assert same(checkpoints.read_weights(tmp_path / "a.pt").state_dict, state)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_a_pickle_that_would_run_code_is_refused_and_nothing_ran(tmp_path, save):
    save({"model": network().state_dict(), "args": Evil(tmp_path / "ran")}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match=r"evil\.pt: not a weights file") as error:
        checkpoints.read_weights(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"\x80\x02}q\x00.", b"PK\x03\x04zip", b"\x10" + 7 * b"\0" + b"{broken json!!!}"]
)
def test_damaged_files_are_a_value_error(tmp_path, content):
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.pt: "):
        checkpoints.read_weights(tmp_path / "x.pt")


@pytest.mark.parametrize("cut", [0.3, 0.9])
def test_cut_files_are_a_value_error(tmp_path, cut):
    checkpoints.save_weights(tmp_path / "x.safetensors", network().state_dict(), metadata())
    torch.save(network().state_dict(), tmp_path / "x.pt")
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[: int(cut * path.stat().st_size)])
        with pytest.raises(ValueError, match=path.name):
            checkpoints.read_weights(path)


def test_what_is_not_weights_is_said(tmp_path):
    for content, said in (([1], "list"), ({"a": 1}, "a beside"), ({}, "dict"), ({"model": {}}, "model beside")):
        torch.save(content, tmp_path / "x.pt")
        with pytest.raises(ValueError, match=said):
            checkpoints.read_weights(tmp_path / "x.pt")
    torch.save({"ema": network().state_dict()}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="averaged weights only"):
        checkpoints.read_weights(tmp_path / "x.pt", which="raw")
    with pytest.raises(ValueError, match="folder"):
        checkpoints.read_weights(tmp_path)
    with pytest.raises(OSError, match=r"no\.pt"):
        checkpoints.read_weights(tmp_path / "no.pt")


@pytest.mark.parametrize(
    "odd",
    [torch.zeros(2, 2).to_sparse(), torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.int8),
     torch.zeros(2, dtype=torch.bool), torch.zeros(2, device="meta")],
    ids=["sparse", "complex", "integer", "bool", "meta"],
)  # fmt: skip
def test_other_tensors_than_weights_are_refused(tmp_path, odd):
    torch.save({**network().state_dict(), "pos_embed": odd}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"x\.pt: holds pos_embed beside or instead of dense floating-point tensors"):
        checkpoints.read_weights(tmp_path / "x.pt")


def test_weights_without_dimensions_have_another_shape():
    state = {**network().state_dict(), "final_layer.linear.bias": torch.zeros(())}
    with pytest.raises(ValueError, match=r"final_layer\.linear\.bias: \(\) in the file"):
        checkpoints.load_into(network(), state)


def test_loading_is_strict_and_names_what_differs():
    state = network().state_dict()
    target = network()
    missing = {key: value for key, value in state.items() if key != "blocks.1.attn.qkv.weight"}
    with pytest.raises(ValueError, match=r"blocks\.1\.attn\.qkv\.weight missing"):
        checkpoints.load_into(target, missing)
    with pytest.raises(ValueError, match=r"head\.weight not in the network"):
        checkpoints.load_into(target, {**state, "head.weight": u((2,), 1)})
    cases = {
        r"y_embedder.*\(4, 16\) in the file, \(6, 16\) in the network.*classes": {"num_classes": 5},
        r"pos_embed.*image size": {"input_size": 16},
        r"final_layer.*\(32, 16\) in the file, \(16, 16\).*patch size|final_layer.*\(16, 16\).*output channels": {
            "out_channels": 8
        },
        r"blocks\.2.*missing.*depth": {"depth": 3},
        r"x_embedder.*\(16, 4, 2, 2\) in the file, \(16, 4, 1, 1\).*patch size": {
            "patch_size": 1, "input_size": 4, "out_channels": 8,
        },
        r"missing.*another attention": {"attention": "vca", "attention_options": {"contrast_grid": (2, 2)}},
    }  # fmt: skip
    for message, options in cases.items():
        with pytest.raises(ValueError, match=message):
            checkpoints.load_into(network(**options), state)


def test_a_public_sit_file_loads_its_first_half_exactly():
    wide, narrow = network(out_channels=8), network()
    checkpoints.load_into(narrow, wide.state_dict())
    x, t, y = u((2, 4, 8, 8), 1).float(), torch.tensor([0.2, 0.9]), torch.tensor([0, 3])
    with torch.no_grad():
        assert torch.allclose(narrow(x, t, y), wide(x, t, y)[:, :4], atol=1e-6)
    with pytest.raises(ValueError, match=r"final_layer\.linear\.weight: \(16, 16\) in the file, \(32, 16\)"):
        checkpoints.load_into(wide, narrow.state_dict())


def test_metadata_that_is_not_ours_to_read_is_named(tmp_path):
    path = tmp_path / "x.safetensors"
    cases = {
        "[1]": "damaged",
        "{": "Expecting",
        '{"format": 3}': "damaged, or not written by vcagen .format 3",
        "{}": "commit a5c3076 of vcagen wrote files without one",
        '{"format": 1}': "format 1, which commit a5c3076 of vcagen reads",
        '{"format": 2}': "state of the optimizer",
    }
    for text, message in cases.items():
        save_file(network().state_dict(), path, metadata={"vcagen": text})
        for read in (checkpoints.read_metadata, checkpoints.read_weights, describe):
            with pytest.raises(ValueError, match=rf"x\.safetensors: .*{message}"):
                read(path)


def test_averages_of_no_known_decay_are_named(tmp_path):
    state = a_run(tmp_path)
    for content in ({**metadata(10), "config": {}}, None):
        file = tmp_path / "checkpoints" / "step_0000010" / "ema_0.9.safetensors"
        file.with_name("ema_0.999.safetensors").unlink(missing_ok=True)
        checkpoints.save_weights(file, state, content) if content else save_file(state, file)
        with pytest.raises(ValueError, match=r"step_0000010/ema_0\.9\.safetensors: "):
            checkpoints.find_weights(tmp_path)
        assert checkpoints.find_weights(tmp_path, weights="ema_0.9") == file


@pytest.mark.parametrize(
    "change",
    [{"x_embedder.proj.weight": (16, 4)}, {"blocks.x.weight": (2,)}, {"blocks.": (2,)}, {"pos_embed": (4,)},
     {"x_embedder.proj.weight": (16, 4, 0, 0)}, {"final_layer.linear.weight": ()}],
)  # fmt: skip
def test_odd_shapes_are_no_dit(tmp_path, change):
    state = {**network().state_dict(), **{name: torch.zeros(shape) for name, shape in change.items()}}
    torch.save(state, tmp_path / "odd.pt")
    with pytest.raises(ValueError, match=r"odd\.pt: weights: names or shapes that no DiT or SiT has"):
        describe(tmp_path / "odd.pt")


def test_architecture_from_shapes():
    assert checkpoints.architecture(network(out_channels=8).state_dict()) == {
        "hidden_size": 16, "depth": 2, "patch_size": 2, "in_channels": 4, "out_channels": 8, "num_labels": 4,
        "mlp_ratio": 4.0, "grid": 4,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"no DiT or SiT has \('x_embedder\.proj\.weight'"):
        checkpoints.architecture({"conv.weight": u((2,), 1)})


def test_the_checkpoints_of_a_run(tmp_path):
    assert list_checkpoints(tmp_path) == {}
    assert latest_checkpoint(tmp_path) is None
    with pytest.raises(ValueError, match="no checkpoints"):
        checkpoints.find_weights(tmp_path)
    a_run(tmp_path)
    (tmp_path / "checkpoints" / ".step_0000020.77.tmp").mkdir()
    assert list(list_checkpoints(tmp_path)) == [5, 10]
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_0000010"
    found = {name: checkpoints.find_weights(tmp_path, weights=name).name for name in ("ema", "ema_0.9", "raw")}
    assert found == {"ema": "ema_0.999.safetensors", "ema_0.9": "ema_0.9.safetensors", "raw": "model.safetensors"}
    assert checkpoints.find_weights(tmp_path, step=5).parent.name == "step_0000005"
    with pytest.raises(ValueError, match=r"no checkpoint 7; it has 5, 10"):
        checkpoints.find_weights(tmp_path, step=7)
    with pytest.raises(ValueError, match=r"no ema_0\.5; it has raw, ema_0\.9, ema_0\.999"):
        checkpoints.find_weights(tmp_path, weights="ema_0.5")


def test_inspect_and_export(tmp_path):
    state = a_run(tmp_path / "run")
    told = describe(tmp_path / "run")
    assert told["kind"] == "run"
    assert told["checkpoints"] == [5, 10]
    assert told["step"] == 10
    assert told["weights"] == ["raw", "ema_0.9", "ema_0.999"]
    assert told["parameters"] == sum(value.numel() for value in state.values())
    assert told["data"]["class_names"] == ["cat", "dog", "eel"]
    assert "cat, dog, eel" in table(told)
    out = tmp_path / "out.safetensors"
    do("export", [str(tmp_path / "run"), f"--out={out}", "--weights=raw", "--step=5"], prog="vcagen export")
    read = checkpoints.read_weights(tmp_path / "out.safetensors")
    assert same(read.state_dict, {key: 3 * value for key, value in state.items()})
    assert read.metadata["step"] == 5
    with pytest.raises(ValueError, match="exists"):
        checkpoints.export_weights(tmp_path / "run", tmp_path / "out.safetensors")
    torch.save({"ema": state, "args": argparse.Namespace(lr=1e-4, f=[1])}, tmp_path / "public.pt")
    told = describe(tmp_path / "public.pt")
    assert told["kind"] == "public training file"
    assert told["architecture"]["hidden_size"] == 16
    assert told["args"] == {"lr": 1e-4, "f": "[1]"}
    torch.save({"ema": state, "args": {1: 2}}, tmp_path / "public.pt")
    assert describe(tmp_path / "public.pt")["args"] == {"1": 2}
    assert table(describe(tmp_path / "public.pt"))
