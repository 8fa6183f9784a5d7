"""Options and fixtures of all tests."""

import helpers
import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="device of the tests that can run on any")


@pytest.fixture
def device(request):
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def inception_weights(tmp_path_factory):
    """File of random Inception weights (96 MB, made once)."""
    return helpers.random_inception(tmp_path_factory.mktemp("inception") / "random.pth")
