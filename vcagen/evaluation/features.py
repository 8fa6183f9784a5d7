"""Features of uint8 images: ADM's Inception network through torch-fidelity, and the weight-free pixels."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from filelock import FileLock
from torch import Tensor
from torch.nn import functional as F

from vcagen.evaluation.extractor import Extractor, Features, MissingWeights, Shape, pick_device
from vcagen.evaluation.fashion import FashionFeatures
from vcagen.processes.process import check_choice
from vcagen.system.files import sha256
from vcagen.system.precision import full_precision

WEIGHTS_PREFIX = "6726825d"
"""First digits of the SHA-256 of the converted Inception 2015-12-05 weights that everybody uses."""


class InceptionFeatures(Extractor):
    """Pool (2048) and spatial (2023) features of the network and resize of the ADM evaluator.

    The spatial features are the first 7 channels of the ReLU output of Mixed_6d's 1x1 branch, flattened in the order
    (h, w, c), as `mixed_6/conv:0` of guided-diffusion's evaluator.py.
    """

    name = "inception"
    score_name = "fid"
    precision_recall: ClassVar[Mapping[str, bool]] = {"fp32": False, "adm_fp16": True}

    def __init__(self, weights: str | Path | None = None, device: torch.device | str | None = None) -> None:
        """Read the weights from a local file; download them where none is given.

        Raises:
            ValueError: no such file, or it is not a plain state dict of this network.
            MissingWeights: none was given, and the download fails.
        """
        from torch_fidelity.utils import create_feature_extractor

        if weights is not None and not Path(weights).is_file():
            raise ValueError(f"inception_weights: {weights}: no such file")
        self.path = Path(weights or _downloaded_weights())
        self.device = pick_device(device)
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
        self.identity = json.dumps({"extractor": "inception-v3-compat", "weights_sha256": self.sha256})
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
    def protocol(self) -> str:
        return f"adm-2021/{self.record()['name']}"

    def check_shape(self, shape: Shape, path: str) -> None:
        if shape[0] != 3:
            raise ValueError(f"{path}: images of {shape[0]} channel(s); the inception extractor needs 8-bit RGB")

    def sizes(self, shape: Shape | None) -> tuple[int, int | None]:
        return 2048, 2023

    def __call__(self, images: Tensor) -> Features:
        assert (images.dtype, images.ndim, images.shape[1]) == (torch.uint8, 4, 3), images.shape
        with full_precision(self.device):
            (pool,) = self.network(images.to(self.device))  # (N, 2048)
        spatial, self._spatial = self._spatial, None  # (N, 2023)
        return Features(pool, spatial)

    def logits(self, pool: Tensor) -> Tensor:
        return pool.to(self.device, torch.float64) @ self._class_weights

    def record(self) -> dict[str, Any]:
        name = "inception-2015-12-05" if self.known else "UNKNOWN"
        return {"name": name, "path": str(self.path), "sha256": self.sha256}

    def warnings(self, count: int, *, adm_reference: bool) -> list[str]:
        found = []
        if not self.known:
            found.append("the Inception weights are UNKNOWN (their SHA-256 is not 6726825d...): not comparable")
        if count != 50_000:
            found.append(f"{count} images: compare only with scores of as many; FID falls with their number")
        if not adm_reference:
            found.append("non-ADM-reference: scores are not those of the ADM evaluator's reference batch")
        return found


class PixelFeatures(Extractor):
    """The images themselves in [-1, 1], area-reduced to at most 8 x 8 a channel: (N, C * 64). Needs no weights."""

    name = "pixels"
    score_name = "fd_pixels"
    protocol = "pixels-8x8"
    identity = json.dumps({"extractor": "pixels-8x8"})
    precision_recall: ClassVar[Mapping[str, bool]] = {"pixels": False}

    def __init__(self, weights: None = None, device: torch.device | str | None = None) -> None:
        self.device = pick_device(device)

    def __call__(self, images: Tensor) -> Features:
        assert (images.dtype, images.ndim) == (torch.uint8, 4), images.shape
        x = images.to(self.device).float() / 127.5 - 1  # (N, C, H, W)
        side = (min(8, x.shape[2]), min(8, x.shape[3]))
        return Features(F.adaptive_avg_pool2d(x, side).flatten(1))


EXTRACTORS: dict[str, Callable[..., Extractor]] = {
    "inception": InceptionFeatures,
    "pixels": PixelFeatures,
    "fashion": FashionFeatures,
}
"""Name -> constructor with `weights`, a local file or None, and `device`, by default a GPU where there is one."""


def load_extractor(
    name: str, *, weights: str | Path | None = None, device: torch.device | str | None = None
) -> Extractor:
    """Make the extractor of this name.

    Raises:
        ValueError: unknown name, or as its constructor.
    """
    check_choice("extractor", name, EXTRACTORS)
    return EXTRACTORS[name](weights=weights, device=device)


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
            reason = f"cannot download {url} ({error}); fetch it elsewhere and give --inception_weights PATH"
            raise MissingWeights(f"inception_weights: {reason}") from error
    return path
