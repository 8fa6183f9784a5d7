"""What a sampling run costs beside its network and VAE: noise, labels, sampler, PNG, features and statistics."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vcagen.bench._networks import sd_vae
from vcagen.bench._timing import open_device, seconds_of
from vcagen.build import build_model, build_process, build_sampler
from vcagen.config import command_line as cli
from vcagen.config.options import ModelConfig, ProcessConfig, SamplingConfig
from vcagen.data.latents import DataSpec
from vcagen.data.vae import LatentVAE
from vcagen.evaluation.evaluate import Evaluator
from vcagen.evaluation.features import PixelFeatures
from vcagen.sampling.image_store import SampleStore
from vcagen.sampling.noise import LabelRule, SeededNoise, generate_images, missing_chunks, resolve_sampling
from vcagen.system.files import write_json


@dataclass(frozen=True)
class SampleBenchConfig:
    """Time whole sampling runs against the same network and VAE calls alone, in turns, all of random weights."""

    size: str = "S/2"
    """Network."""
    attention: str = "mhsa"
    """Its attention."""
    process: Literal["diffusion", "flow"] = "diffusion"
    """DDPM or SDE sampling."""
    image_size: int = 256
    """Side of the images in pixels."""
    vae: str = "random"
    """random: the size of Stable Diffusion's, downsampling by 8; or a hub name or local folder."""
    num_images: int = 8
    """Images of a run."""
    batch: int = 4
    """Images a network call."""
    num_steps: int = 10
    """Steps of the sampler; the recipe's 250 make the share of all but the noise 25 times smaller."""
    repeats: int = 3
    """Pairs of runs; the fastest of each kind count."""
    npz: bool = False
    """Write samples.npz too."""
    device: str = "cpu"
    """Device to measure on."""
    json: str | None = None
    """File to write the numbers to as well."""


class Timed:
    """A function that counts the seconds spent in it, the device's included."""

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self.function = function
        self.device = device
        self.seconds = 0.0

    def __call__(self, *args: Any, **options: Any) -> Any:
        results: list[Any] = []
        self.seconds += seconds_of(lambda: results.append(self.function(*args, **options)), self.device)
        return results[0]


def main(args: list[str]) -> None:
    """Print seconds of a run by part, and how much longer it takes than its network and VAE alone."""
    config = cli.parse(SampleBenchConfig, args, prog="python -m vcagen bench sample")
    cli.at_least(config, num_images=1, batch=1, num_steps=1, repeats=1)
    device = open_device(config.device)
    with tempfile.TemporaryDirectory() as folder:
        vae = LatentVAE(_random_vae(folder) if config.vae == "random" else config.vae, device=device)
        data = DataSpec.of(vae.description(), config.image_size, [str(label) for label in range(1000)])
        process = ProcessConfig(name=config.process)
        model = build_model(ModelConfig(size=config.size, attention=config.attention), process, data)
        network, decode = Timed(model.to(device).eval().requires_grad_(False), device), Timed(vae.decode, device)
        settings = resolve_sampling(SamplingConfig(num_steps=config.num_steps), SamplingConfig(), config.process)
        sample = build_sampler(network, build_process(process), settings, null_label=model.null_label)
        run = Timed(partial(_run, sample, decode, config, data, device), device)
        bare = partial(_bare, network.function, decode.function, config, data, device)
        whole: list[float] = []
        alone: list[float] = []
        parts = {"network": 0.0, "VAE": 0.0, "scores": 0.0}
        bare(num_chunks=1)
        for repeat in range(config.repeats):
            alone.append(seconds_of(bare, device))
            network.seconds = decode.seconds = run.seconds = 0.0
            scores = run(Path(folder) / str(repeat))
            whole.append(run.seconds)
            if whole[-1] == min(whole):
                parts = {"network": network.seconds, "VAE": decode.seconds, "scores": scores}
    parts["rest"] = min(whole) - sum(parts.values())
    extra = min(whole) / min(alone) - 1
    print(f"{config.num_images} images, batch {config.batch}, {config.size}, {config.num_steps} steps, {device}\n")
    for name, seconds in (*parts.items(), ("whole run", min(whole)), ("network and VAE alone", min(alone))):
        print(f"{name:<24}{seconds:>9.3f} s{100 * seconds / min(whole):>8.2f} %")
    beside = (parts["rest"] + parts["scores"]) / min(whole)
    print(f"\nbeside network and VAE: {100 * beside:.2f} % of the run; the run over these alone: {100 * extra:+.2f} %")
    if config.json is not None:
        numbers = {
            "whole_s": min(whole),
            "alone_s": min(alone),
            "beside_percent": 100 * beside,
            "extra_percent": 100 * extra,
            "parts_s": parts,
        }
        write_json(config.json, {"size": config.size, "batch": config.batch, "num_images": config.num_images,
                                 "num_steps": config.num_steps, "device": str(device), **numbers})  # fmt: skip


def _random_vae(folder: str) -> str:
    """A VAE of random weights in a new folder."""
    path = f"{folder}/vae"
    sd_vae().save_pretrained(path)
    return path


def _run(
    sample: Any, decode: Timed, config: SampleBenchConfig, data: DataSpec, device: torch.device, folder: Path
) -> float:
    """A sampling run as sample.py does it, scored on pixels; returns the seconds of the scores."""
    shape = (3, config.image_size, config.image_size)
    store = SampleStore(folder, config.num_images, config.batch, image_shape=shape, settings={}, npz=config.npz)
    scores: Any = Evaluator(PixelFeatures(device), None, max(2, config.num_images), folder=folder / "features")
    scores.update = update = Timed(scores.update, device)
    store.prepare()
    generate_images(
        sample, decode, store, chunks=missing_chunks(store, scores), noise=SeededNoise(0),
        labels=LabelRule("random", data.num_classes), latent_shape=(data.channels, data.height, data.width),
        device=device, scores=scores,
    )  # fmt: skip
    store.finish()
    return update.seconds


@torch.no_grad()
def _bare(
    network: Callable[..., Tensor], decode: Callable[[Tensor], Tensor], config: SampleBenchConfig, data: DataSpec,
    device: torch.device, num_chunks: int | None = None,
) -> None:  # fmt: skip
    """The network and VAE calls of such a run and nothing else."""
    for start in range(0, config.num_images, config.batch)[:num_chunks]:
        x = torch.zeros(config.batch, data.channels, data.height, data.width, device=device)
        t = y = torch.zeros(config.batch, dtype=torch.long, device=device)
        for _ in range(config.num_steps):
            network(x, t, y)
        decode(x[: config.num_images - start])
