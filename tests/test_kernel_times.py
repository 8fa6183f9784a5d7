"""Which kernel of VCA is used: what the options say, what was measured, what a run was started with."""

from dataclasses import replace

import pytest
import tiny
import torch
import yaml

from vcagen.build import resolve_kernel
from vcagen.config.options import ModelConfig, VcaOptions
from vcagen.data.latents import DataSpec
from vcagen.networks import kernel_times
from vcagen.networks.weights import read_metadata

DATA = DataSpec(4, 32, 32, 10, (), 256, {})
S2 = ModelConfig("S/2", "vca")
SHAPE = "d 64, T 256, n 64, bfloat16"
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def a_gpu(monkeypatch, tmp_path):
    """A GPU of some name, and no times of this machine."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))


def kernel(model, precision, device):
    return resolve_kernel(model, DATA, precision, device).attention_options.kernel


def test_auto_is_maps_on_the_cpu_and_where_nothing_was_measured(a_gpu):
    assert kernel(S2, "bf16", CPU) == "maps"
    assert kernel(S2, "bf16", GPU) == "maps"
    assert kernel(replace(S2, attention="mhsa"), "bf16", GPU) == "maps"


@pytest.mark.parametrize(("fused_ms", "chosen"), [(1.0, "fused"), (3.0, "maps")])
def test_auto_is_what_was_measured_to_be_faster(a_gpu, fused_ms, chosen):
    kernel_times.keep_times("Some GPU", {SHAPE: {"maps_ms": 2.0, "fused_ms": fused_ms}})
    kernel_times.keep_times("Some GPU", {"another": {"maps_ms": 1.0, "fused_ms": 1.0}})
    assert kernel_times.read_times()["Some GPU"].keys() == {SHAPE, "another"}
    assert kernel(S2, "bf16", GPU) == chosen
    assert kernel(S2, "no", GPU) == "maps"  # measured in another type
    assert kernel(replace(S2, attention_options=VcaOptions(stage1="vanilla")), "bf16", GPU) == "maps"
    assert kernel(replace(S2, attention_options=VcaOptions(kernel="maps")), "bf16", GPU) == "maps"


def test_fused_needs_a_gpu():
    asked = replace(S2, attention_options=VcaOptions(kernel="fused"))
    with pytest.raises(ValueError, match=r"kernel: fused runs on CUDA devices, not on cpu; take maps"):
        kernel(asked, "bf16", CPU)


def test_fused_is_tried_once_before_it_is_taken(a_gpu, monkeypatch):
    asked, tried = replace(S2, attention_options=VcaOptions(kernel="fused")), []
    monkeypatch.setattr("vcagen.build.try_fused", lambda *arguments: tried.append(arguments))
    assert kernel(asked, "bf16", GPU) == "fused"
    ((attention, dtype, device),) = tried
    assert (attention.num_tokens, dtype, device) == (256, torch.bfloat16, GPU)
    with pytest.raises(ValueError, match=r"^kernel: fused does not run here \(.*not on cpu.*\); take maps"):
        kernel_times.try_fused(attention, torch.float32, CPU)


def test_a_run_says_and_keeps_its_kernel(tmp_path, monkeypatch):
    tiny.train(tmp_path, train__steps=1)
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert written["model"]["attention_options"]["kernel"] == "maps"
    monkeypatch.setattr("vcagen.build.fused_wins", lambda *_: pytest.fail("the run has its kernel"))
    tiny.train(tmp_path, train__steps=2)
    metadata = read_metadata(tmp_path / "checkpoints" / "step_0000002" / "model.safetensors")
    assert metadata["config"]["model"]["attention_options"]["kernel"] == "maps"
