"""What an evaluation costs: images a second beside torch-fidelity's own loop, the Frechet distance beside scipy."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from vcagen.bench._timing import fastest, open_device
from vcagen.config import command_line as cli
from vcagen.evaluation.features import InceptionFeatures
from vcagen.evaluation.image_source import open_samples
from vcagen.evaluation.reference import measure
from vcagen.evaluation.scores import frechet_distance
from vcagen.system.files import write_json


@dataclass(frozen=True)
class EvaluateBenchConfig:
    """Time the evaluation of a folder of PNG files and the Frechet distance, each against a yardstick, in turns."""

    images: int = 64
    """Files of 256 x 256 pixels; 0: leave them out."""
    batch: int = 16
    """Images a forward pass."""
    dimensions: int = 2048
    """Size of the covariance matrices; 0: leave them out."""
    repeats: int = 2
    """Turns of each; the fastest counts."""
    num_workers: int = 4
    """Decoding threads."""
    device: str = "cpu"
    """Device to measure on: cpu or cuda."""
    inception_weights: str | None = None
    """File of the Inception weights. Default: random ones, which cost the same."""
    json: str | None = None
    """File to write the numbers to as well."""


def main(args: list[str]) -> None:
    """Print one line a measurement."""
    config = cli.parse(EvaluateBenchConfig, args, prog="python -m vcagen bench evaluate")
    cli.at_least(config, images=0, batch=1, dimensions=0, repeats=1, num_workers=1)
    device = open_device(config.device)
    result: dict[str, Any] = {"device": config.device, "threads": torch.get_num_threads(), "cores": os.cpu_count()}
    if config.images:
        with tempfile.TemporaryDirectory() as folder:
            result["folder"] = _folder(config, Path(folder), device)
    if config.dimensions:
        result["frechet"] = _frechet(config.dimensions, config.repeats)
    if config.json is not None:
        write_json(config.json, result)


def _folder(config: EvaluateBenchConfig, folder: Path, device: torch.device) -> dict[str, float]:
    from torch_fidelity.utils import create_feature_extractor, extract_featuresdict_from_input_id

    weights = config.inception_weights or _random_weights(folder / "random.pth")
    samples = _write_pictures(folder / "images", config.images)
    extractor = InceptionFeatures(weights, config.device)
    cuda = config.device != "cpu"
    options = {"feature_extractor_weights_path": str(weights), "verbose": False}
    theirs = create_feature_extractor("inception-v3-compat", ["2048"], cuda=cuda, **options)
    loop = {"input1": samples, "batch_size": config.batch, "cuda": cuda, "cache": False, **options}

    def ours() -> None:
        measure(open_samples(samples, num_workers=config.num_workers), extractor, config.batch, config.images, False)

    works = [ours, lambda: extract_featuresdict_from_input_id(1, theirs, **loop)]
    seconds = fastest(works, config.repeats, device)
    rates = [config.images / s for s in seconds]
    print(f"{config.images} PNG files, images/s: vcagen {rates[0]:.2f}, torch-fidelity's loop {rates[1]:.2f}, "
          f"ratio {rates[0] / rates[1]:.3f}")  # fmt: skip
    return {"images_per_s": rates[0], "torch_fidelity_images_per_s": rates[1], "ratio": rates[0] / rates[1]}


def _frechet(d: int, repeats: int) -> dict[str, float]:
    try:
        from scipy.linalg import sqrtm
    except ImportError as error:
        raise ValueError("dimensions: scipy is missing for the comparison; install it, or give 0") from error
    generator = torch.Generator().manual_seed(0)
    a, b = (_covariance(d, generator) for _ in range(2))
    mean = torch.zeros(d, dtype=torch.float64)
    works = [lambda: frechet_distance(mean, a, mean, b), lambda: sqrtm(a.numpy() @ b.numpy())]
    seconds = fastest(works, repeats, mean.device)
    print(f"Frechet distance, {d} dimensions: {seconds[0]:.2f} s, scipy's sqrtm alone {seconds[1]:.2f} s, "
          f"ratio {seconds[0] / seconds[1]:.3f}")  # fmt: skip
    return {"seconds": seconds[0], "scipy_sqrtm_seconds": seconds[1], "ratio": seconds[0] / seconds[1]}


def _covariance(d: int, generator: torch.Generator) -> Tensor:
    factor = torch.randn(d, 2 * d, dtype=torch.float64, generator=generator)
    return factor @ factor.T / (2 * d)


def _write_pictures(folder: Path, count: int) -> str:
    """Smooth random pictures with a little noise, which compress about as photographs do."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        coarse = torch.rand(1, 3, 8, 8, generator=generator) * 255
        smooth = F.interpolate(coarse, size=(256, 256), mode="bicubic")[0]
        pixels = (smooth + 4 * torch.randn(smooth.shape, generator=generator)).clamp(0, 255).to(torch.uint8)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / f"{i:06d}.png", compress_level=1)
    return str(folder)


def _random_weights(path: Path) -> str:
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    class Untrained(FeatureExtractorInceptionV3):  # type: ignore[misc]
        def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
            """Keep the initial weights."""

    torch.save({}, path)
    network = Untrained("random", ["2048"], feature_extractor_weights_path=str(path))
    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    torch.save(network.state_dict(), path)
    return str(path)
