"""Backward passes and whole trainings on a GPU that is not there; test_pretended_gpu.py runs this with the shim."""

import json

import pretended_gpu
import pytest
import tiny
import torch
from accelerate.state import AcceleratorState, PartialState
from test_pretended_gpu import PRECISIONS, PROCESSES, VARIANTS, gpu, network, on_cuda  # noqa: F401

from vcagen.__main__ import main
from vcagen.bench.vae import write_latents
from vcagen.training import metrics_log, setup, trainer

FITS = {
    "bf16": {"train__precision": "bf16", "log__preview_every": 4, "sampling__num_steps": 2},
    "fp16, clipped": {"train__precision": "fp16", "train__max_grad_norm": 1.0, "process__name": "diffusion"},
    "float32, micro-batches": {"train__micro_batch_size": 3, "train__ema_warmup": True},
    "checkpointing": {"model__gradient_checkpointing": True, "train__precision": "bf16"},
    "plain attention": {"model__attention": "mhsa", "model__attention_options": {}, "process__name": "diffusion"},
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", PROCESSES)
def test_gradients(gpu, name, variant, precision):  # noqa: F811
    attention, options = VARIANTS[variant]
    net = network(name, attention, options).to("cuda").train()
    x, y, t = torch.zeros(2, 4, 8, 8, device="cuda"), torch.tensor([1, 10], device="cuda"), torch.tensor([1, 0])

    def model(*args):
        with torch.autocast("cuda", PRECISIONS[precision], enabled=precision != "no"):
            return net(*args)

    losses = PROCESSES[name]().losses(model, x, y, t=t.to("cuda"), noise=x)
    losses["loss"].sum().backward()
    gradients = [parameter.grad for parameter in net.parameters() if parameter.requires_grad]
    assert on_cuda(*gradients)
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    assert gpu.waits == []


@pytest.fixture
def only_finite(monkeypatch):
    """Whether something is wrong is asked of the device, whose answers are made up: it is asked, and nothing is."""
    asked = trainer.any_process

    def never(accelerator, condition):
        asked(accelerator, condition)
        return False

    monkeypatch.setattr(trainer, "any_process", never)


@pytest.mark.parametrize("options", FITS.values(), ids=FITS)
def test_fit(gpu, only_finite, tmp_path, options):  # noqa: F811
    """Log line, checkpoints, preview; then a resume that goes on."""
    run = tmp_path / "run"
    for steps in (4, 6):
        AcceleratorState._reset_state(reset_partial_state=True)
        done = tiny.train(run, **{"train__steps": steps, "log__log_every": 2, "checkpoint__save_every": 2, **options})
        assert (done.device.type, PartialState().device.type, done.step) == ("cuda", "cuda", steps)
        assert on_cuda(*done.network.parameters(), *done.emas[0].averages)
        moments = done.optimizer.optimizer.state.values()
        assert on_cuda(*(value for state in moments for value in state.values()))
    assert [line["step"] for line in metrics_log.read_log(run)] == [2, 4, 6]
    assert len(list((run / "checkpoints").iterdir())) > 0
    assert (run / "previews" / "step_0000004.png").exists() == ("log__preview_every" in options)


@pytest.mark.parametrize("options", FITS.values(), ids=FITS)
def test_the_host_does_not_wait_between_log_lines(gpu, only_finite, tmp_path, options):  # noqa: F811
    waits = []
    for steps in (2, 4):
        AcceleratorState._reset_state(reset_partial_state=True)
        before = len(gpu.waits)
        options = {**options, "log__log_every": 100, "log__preview_every": 0}
        tiny.train(tmp_path / str(steps), train__steps=steps, **options)
        waits.append(gpu.waits[before:])
    assert waits[0] == waits[1]


def test_shards(gpu, only_finite, tmp_path):  # noqa: F811
    write_latents(tmp_path / "latents", 32)
    AcceleratorState._reset_state(reset_partial_state=True)
    built = setup.build_trainer(
        tiny.config(tmp_path / "run", data__path=str(tmp_path / "latents"), data__num_workers=0, model__size="S/8")
    )
    built.fit()
    assert built.step == 6


BENCHES = {
    "attention": ["--device=cuda", "--tokens=[16]", "--widths=[144]", "--head_width=72", "--contrast_side=2",
                  "--batch_tokens=32", "--modes=[eager]", "--precisions=[float32,bfloat16]", "--seconds=0.01"],
    "train": ["--sizes=[S/8]", "--precisions=[bf16]", "--batch=2", "--seconds=0.01", "--peak_tflops=989"],
    "sample": ["--size=S/8", "--image_size=64", "--batch=2", "--num_steps=2", "--repeats=1", "--precision=bf16"],
    "vae": ["--device=cuda", "--image_size=16", "--items=8", "--read_batch=4", "--num_workers=0", "--repeats=1",
            "--seconds=0.1"],
}  # fmt: skip


@pytest.mark.parametrize("name", BENCHES)
def test_benches(gpu, tmp_path, name):  # noqa: F811
    """Their times mean nothing here; that they run does."""
    main(["bench", name, *BENCHES[name], "--json", str(tmp_path / "numbers.json")])
    assert json.loads((tmp_path / "numbers.json").read_text())["device"].startswith("cuda")


def test_a_planted_cpu_tensor_is_found(gpu):  # noqa: F811
    weights = torch.ones(3, device="cuda", requires_grad=True)
    planted = torch.ones(3)

    class Planted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * planted

    with pytest.raises(RuntimeError, match="device"):
        Planted.apply(weights).sum().backward()
    assert pretended_gpu.PRELOADED
