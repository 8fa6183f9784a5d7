"""Options and fixtures of all tests."""

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="device of the tests that can run on any")


@pytest.fixture
def device(request):
    return torch.device(request.config.getoption("--device"))
