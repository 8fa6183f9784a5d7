"""What a sampling session costs beside its network and VAE: noise, labels, sampler, PNG."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from vcagen.bench._timing import seconds_of
from vcagen.bench.vae import sd_vae
from vcagen.build import build_model
from vcagen.config.job_options import SampleBenchConfig
from vcagen.config.options import Config, ModelConfig, ProcessConfig, SampleConfig
from vcagen.data.latents import DataSpec
from vcagen.data.vae import LatentVAE
from vcagen.networks.weights import save_weights
from vcagen.sampling.load_run import LoadedRun
from vcagen.sampling.session import SamplingSession
from vcagen.system.files import FORMAT, write_json


def run(config: SampleBenchConfig) -> None:
    """Print seconds of a session and of its network and VAE calls alone, and how much longer the session takes."""
    batch = config.batch or (128 if torch.cuda.is_available() else 4)
    count = config.num_images or 2 * batch
    whole: list[float] = []
    alone: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        weights = str(_random_weights(config, Path(folder)))
        given = {"num_images": count, "num_steps": config.num_steps}
        options = SampleConfig(
            checkpoint=weights, batch=batch, precision=config.precision, compile=config.compile,
            given=frozenset(given), **given,
        )  # fmt: skip
        for repeat in range(config.repeats + 1):
            session = SamplingSession(replace(options, out=f"{folder}/{repeat}"))
            session.prepare()
            device, bare = session.accelerator.device, partial(_bare, session.run, batch, count, config.num_steps)
            if config.compile:
                bare()
            alone.append(seconds_of(bare, device))
            whole.append(seconds_of(session.make_images, device))
    session_s, alone_s = min(whole[1:]), min(alone[1:])  # the first pair warms up
    extra = 100 * (session_s / alone_s - 1)
    speed = count / session_s
    print(
        f"{count} images, batch {batch}, {config.size} {config.attention}, {config.num_steps} steps, "
        f"{'bf16' if config.precision == 'bf16' else 'float32'}, {'compiled' if config.compile else 'eager'}, {device}"
    )
    print(f"session {session_s:.3f} s, network and VAE alone {alone_s:.3f} s: {extra:+.2f} %; {speed:.2f} images/s")
    if config.json is not None:
        numbers = {"session_s": session_s, "alone_s": alone_s, "extra_percent": extra, "images_per_second": speed}
        sizes = {"batch": batch, "num_images": count, "device": str(device)}
        write_json(config.json, {**asdict(config), **sizes, **numbers})


def _random_weights(config: SampleBenchConfig, folder: Path) -> Path:
    """A weights file of a random network on the latents of a VAE."""
    path = config.vae
    if path == "random":
        path = str(folder / "vae")
        sd_vae().save_pretrained(path)
    data = DataSpec.of(LatentVAE(path).description(), config.image_size, [str(label) for label in range(1000)])
    recipe = Config(
        str(folder), model=ModelConfig(config.size, config.attention), process=ProcessConfig(config.process)
    )
    metadata = {"format": FORMAT, "config": asdict(recipe), "data": data.to_dict(), "step": 0, "ema_decay": None}
    network = build_model(recipe.model, recipe.process, data)
    save_weights(folder / "weights.safetensors", network.state_dict(), metadata)
    return folder / "weights.safetensors"


@torch.no_grad()
def _bare(run: LoadedRun, batch: int, count: int, num_steps: int) -> None:
    """The network and VAE calls of a session and nothing else."""
    for _ in range(0, count, batch):
        x = torch.zeros(batch, *run.latent_shape, device=run.vae.device)
        t = y = torch.zeros(batch, dtype=torch.long, device=run.vae.device)
        for _ in range(num_steps):
            run.network(x, t, y)
        run.vae.decode(x)
