"""Options and fixtures of all tests."""

import os

import helpers
import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:  # several workers share the cores
    torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="device of the tests that can run on any")


@pytest.fixture
def device(request):
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(autouse=True, scope="session")
def torch_cache(tmp_path_factory):
    """An empty cache folder of torch: nothing is read from the user's, nothing left there."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("torch"))
        patch.setenv("TORCH_HOME", folder)
        patch.setitem(helpers.ENV, "TORCH_HOME", folder)
        yield folder


@pytest.fixture(scope="session")
def inception_weights(tmp_path_factory):
    """File of random Inception weights (96 MB, made once)."""
    return helpers.random_inception(tmp_path_factory.mktemp("inception") / "random.pth")
