"""Features of uint8 images: ADM's Inception network through torch-fidelity, and the weight-free pixels."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from filelock import FileLock
from torch import Tensor
from torch.nn import functional as F

from vcagen.system.files import sha256

WEIGHTS_PREFIX = "6726825d"
"""First digits of the SHA-256 of the converted Inception 2015-12-05 weights that everybody uses."""


class Features(NamedTuple):
    """Features of N images."""

    pool: Tensor
    """(N, D) float32: Frechet distance, inception score, precision and recall."""
    spatial: Tensor | None
    """(N, S) float32 of sFID, where the extractor has them."""


class Extractor(Protocol):
    """What the scores need of a feature extractor. Calling it with uint8 images (N, C, H, W) gives their features."""

    name: str
    device: torch.device

    @property
    def identity(self) -> str:
        """Text that is equal for two extractors exactly when their features can be compared."""

    def check_shape(self, shape: tuple[int, int, int], path: str) -> None:
        """Raise ValueError when images of the shape (C, H, W), which come from `path`, are not for this extractor."""

    def __call__(self, images: Tensor) -> Features: ...

    def logits(self, pool: Tensor) -> Tensor | None:
        """(N, D) -> (N, classes) float64 logits of the inception score, or None."""

    def record(self) -> dict[str, Any]:
        """What the result file says about the weights."""


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No autocast, no TF32, deterministic convolutions, no gradients: scores differ visibly otherwise."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with (
            torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False),
            torch.autocast(device.type, enabled=False),
            torch.no_grad(),
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


class InceptionFeatures:
    """Pool (2048) and spatial (2023) features of the network and resize of the ADM evaluator.

    The spatial features are the first 7 channels of the ReLU output of Mixed_6d's 1x1 branch, flattened in the order
    (h, w, c), as `mixed_6/conv:0` of guided-diffusion's evaluator.py.
    """

    name = "inception"

    def __init__(self, weights: str | Path, device: torch.device | str = "cpu") -> None:
        """Read the weights file.

        Raises:
            ValueError: the file is not a plain state dict of this network.
        """
        from torch_fidelity.utils import create_feature_extractor

        self.path = Path(weights)
        self.device = torch.device(device)
        try:
            # torch-fidelity opens the file unrestricted, so first see that it holds nothing but tensors.
            torch.load(self.path, map_location="cpu", weights_only=True)
            self.network = create_feature_extractor(
                "inception-v3-compat",
                ["2048"],
                cuda=False,
                feature_extractor_weights_path=str(self.path),
                verbose=False,
            )
        except Exception as error:  # an arbitrary file can fail anywhere in the unpickler
            reason = str(error).strip().split("\n")[0][:120]
            raise ValueError(f"{self.path}: not the Inception weights ({type(error).__name__}: {reason})") from error
        self.sha256 = sha256(self.path)
        self.network.to(self.device)
        self._class_weights: Tensor = self.network.fc.weight.double().T  # (2048, 1008)
        self._spatial: Tensor | None = None
        self.network.Mixed_6d.branch1x1.register_forward_hook(self._keep_spatial)

    def _keep_spatial(self, module: Any, inputs: Any, output: Tensor) -> None:
        assert output.shape[1:] == (192, 17, 17), f"Mixed_6d.branch1x1 gives {tuple(output.shape)}"
        self._spatial = output[:, :7].permute(0, 2, 3, 1).flatten(1)

    @property
    def known(self) -> bool:
        """Whether these are the weights that published scores use."""
        return self.sha256.startswith(WEIGHTS_PREFIX)

    @property
    def identity(self) -> str:
        return json.dumps({"extractor": "inception-v3-compat", "weights_sha256": self.sha256})

    def check_shape(self, shape: tuple[int, int, int], path: str) -> None:
        if shape[0] != 3:
            raise ValueError(f"{path}: images of {shape[0]} channel(s); the inception extractor needs 8-bit RGB")

    def __call__(self, images: Tensor) -> Features:
        assert images.dtype == torch.uint8, images.dtype
        assert images.ndim == 4, images.shape
        assert images.shape[1] == 3, images.shape
        with full_precision(self.device):
            (pool,) = self.network(images.to(self.device))  # (N, 2048)
        spatial, self._spatial = self._spatial, None  # (N, 2023)
        return Features(pool, spatial)

    def logits(self, pool: Tensor) -> Tensor:
        return pool.to(self.device, torch.float64) @ self._class_weights

    def record(self) -> dict[str, Any]:
        name = "inception-2015-12-05" if self.known else "UNKNOWN"
        return {"name": name, "path": str(self.path), "sha256": self.sha256}


class PixelFeatures:
    """The images themselves in [-1, 1], area-reduced to at most 8 x 8 a channel: (N, C * 64). Needs no weights."""

    name = "pixels"
    identity = json.dumps({"extractor": "pixels-8x8"})

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def check_shape(self, shape: tuple[int, int, int], path: str) -> None:
        """Any shape will do."""

    def __call__(self, images: Tensor) -> Features:
        assert images.dtype == torch.uint8, images.dtype
        assert images.ndim == 4, images.shape
        x = images.to(self.device).float() / 127.5 - 1  # (N, C, H, W)
        side = (min(8, x.shape[2]), min(8, x.shape[3]))
        return Features(F.adaptive_avg_pool2d(x, side).flatten(1), None)

    def logits(self, pool: Tensor) -> None:
        """There are no classes."""

    def record(self) -> dict[str, Any]:
        return {"name": "none"}


def _downloaded_weights() -> Path:
    """The weights file in torch's cache, fetched from where torch-fidelity has it if absent, by one process."""
    from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3

    url: str = URL_INCEPTION_V3
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[-1]
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(f"{path}.lock"):
                if not path.exists():
                    torch.hub.download_url_to_file(url, str(path), hash_prefix=WEIGHTS_PREFIX)
        except (urllib.error.URLError, OSError, RuntimeError) as error:
            raise ValueError(
                f"inception_weights: cannot download {url} ({error}); fetch it elsewhere and give "
                "--inception_weights PATH"
            ) from error
    return path


def load_extractor(name: str, *, weights: str | None = None, device: torch.device | str | None = None) -> Extractor:
    """The extractor called `name`: inception (weights from a local file, or downloaded), or pixels.

    Without a device: a GPU where there is one.

    Raises:
        ValueError: unknown name, or weights that are missing, cannot be downloaded, or are not this network's.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "pixels":
        return PixelFeatures(device)
    if name != "inception":
        raise ValueError(f"extractor: {name}; choose inception or pixels")
    if weights is not None and not Path(weights).is_file():
        raise ValueError(f"inception_weights: {weights}: no such file")
    return InceptionFeatures(weights or _downloaded_weights(), device)
