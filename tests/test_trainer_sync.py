"""Between log lines the host reads nothing from the device: each read would wait for it."""

import pytest
import tiny
import torch
from accelerate.state import AcceleratorState
from torch.utils._python_dispatch import TorchDispatchMode

from vcagen.training import setup


@pytest.fixture(autouse=True)
def _fresh_precision():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}


class Reads(TorchDispatchMode):
    """Counts values that the host reads from tensors, and the shapes that depend on such values."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in READS
        return function(*args, **(kwargs or {}))


def reads_of_fit(run, **options):
    trainer = setup.build_trainer(tiny.config(run, **options))
    with Reads() as reads:
        trainer.fit()
    return reads.count


VARIANTS = {
    "flow": {"process__name": "flow"},
    "diffusion": {"process__name": "diffusion"},
    "parts, clipped, warm-up": {"train__micro_batch_size": 3, "train__max_grad_norm": 1.0, "train__ema_warmup": True},
    "bf16": {"train__precision": "bf16"},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_steps_between_log_lines_read_nothing(tmp_path, options):
    few = reads_of_fit(tmp_path / "few", train__steps=3, log__log_every=100, **options)
    many = reads_of_fit(tmp_path / "many", train__steps=9, log__log_every=100, **options)
    assert few == many


def test_a_log_line_reads(tmp_path):
    """The counter sees reads: one line a step has more than one line in all."""
    rare = reads_of_fit(tmp_path / "rare", train__steps=5, log__log_every=100)
    often = reads_of_fit(tmp_path / "often", train__steps=5, log__log_every=1)
    assert often >= rare + 4
