import platform

import pytest
from helpers import python

CODE = """
import resource, torch
from vcagen.build import build_accelerator

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(64 << 20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(min(faults() for _ in range(4)))
build_accelerator()
print(min(faults() for _ in range(4)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_freed_memory_is_not_taken_from_the_system_again():
    before, after = map(int, python("-c", CODE)[0].split())
    assert 4 * after < before
