import platform

import pytest
from accelerate.state import AcceleratorState, GradientState
from helpers import python

from vcagen.build import build_accelerator

CODE = """
import resource, torch
from vcagen.build import build_accelerator

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

build_accelerator()
before = resident()
blocks = [torch.ones(16 << 20, dtype=torch.uint8) for _ in range(10)]
del blocks
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_freed_memory_stays_with_the_process():
    assert int(python("-c", CODE)[0]) > 150 << 20


def test_gradients_do_not_depend_on_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    try:
        assert build_accelerator().gradient_accumulation_steps == 1
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
