"""From a run folder or a weights file to all that sampling needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vcagen.build import build_model, build_process, build_sampler, rehearse, resolve_sampling, with_kernel
from vcagen.config.command_line import from_mapping
from vcagen.config.options import Config, ProcessConfig, SamplingConfig
from vcagen.data.imagenet import public_class_names
from vcagen.data.latents import DataSpec, vae_options
from vcagen.data.vae import DEFAULT_VAE, LatentVAE
from vcagen.networks.public import identify
from vcagen.networks.source import open_source
from vcagen.networks.weights import Weights, load_into
from vcagen.processes.guidance import with_cfg
from vcagen.processes.process import Model, NonFiniteError, Process, check_choice
from vcagen.sampling.image_store import to_pil
from vcagen.sampling.noise import LabelRule, SeededNoise
from vcagen.system.files import reading
from vcagen.system.precision import matrix_products


@dataclass(frozen=True)
class LoadedRun:
    """A trained network with all that sampling needs."""

    network: Model
    """In eval mode, on the VAE's device."""
    process: Process
    vae: LatentVAE
    config: Config
    """Of the training run; of a public file what its shapes tell, the rest at its defaults."""
    data: DataSpec
    """Without class names where they are not known."""
    step: int | None
    ema_decay: float | None
    weights_sha256: str
    tf32: bool = False
    """Allow TF32 matrix products of the network on GPUs."""
    notes: Sequence[str] = ()
    """Which weights these are, and what their user should know."""

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the latents."""
        return self.data.channels, self.data.height, self.data.width

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the images."""
        scale = self.vae.downsample
        return self.vae.image_channels, self.data.height * scale, self.data.width * scale

    @property
    def null_label(self) -> int | None:
        """The label of "no class"; None for a network without."""
        return self.data.num_classes if self.config.model.class_dropout_prob > 0 else None

    def sampling(self, **options: Any) -> SamplingConfig:
        """The run's own sampling section with other options, checked.

        Raises:
            ValueError: an option that does not exist, would do nothing, or that the sampler or the guidance refuses.
        """
        settings = resolve_sampling(self.config.sampling, options, self.config.process.name)
        channels = self.data.channels
        if settings.guided_channels is not None and settings.guided_channels > channels:
            raise ValueError(f"guided_channels: {settings.guided_channels}; the latents have {channels}")
        rehearse(settings, self.process, null_label=self.null_label)
        return settings

    @torch.no_grad()
    def latents_of(
        self, indices: Sequence[int], y: Tensor, *, settings: SamplingConfig, noise: SeededNoise
    ) -> Tensor:  # fmt: skip
        """Latents (N, C, h, w) of the images of these indices and labels y (N,), in one batch."""
        start = noise.initial(indices, self.latent_shape, self.vae.device)  # (N, C, h, w), from (seed, index) alone
        predict = with_cfg(
            self.network, y.to(self.vae.device), cfg_scale=settings.cfg_scale, null_label=self.null_label,
            guided_channels=settings.guided_channels, interval=settings.cfg_interval,
        )  # fmt: skip
        sampler = build_sampler(settings)
        with matrix_products(tf32=self.tf32):
            return sampler(self.process, predict, start, randn_like=noise.of_steps(indices))

    @torch.no_grad()
    def images(
        self,
        indices: Sequence[int],
        y: Tensor,
        *,
        settings: SamplingConfig,
        noise: SeededNoise,
        decode_batch: int | None = None,
    ) -> Tensor:
        """Images of these indices and labels y (N,), in one batch: uint8 (N, C, H, W).

        Raises:
            ValueError: NaN or infinity in an image, by index.
        """
        try:
            return self.vae.decode(self.latents_of(indices, y, settings=settings, noise=noise), batch=decode_batch)
        except NonFiniteError as error:
            raise ValueError(f"image {indices[error.rows[0]]}: {error}; nothing is written of its chunk") from error

    def sample(
        self,
        labels: str | Sequence[int | str] | None = None,
        *,
        indices: Sequence[int] | None = None,
        seed: int = 0,
        batch: int = 64,
        output: str = "pil",
        **options: Any,
    ) -> list[Image.Image] | Tensor:
        """Sample images: the very ones that sample.py makes of the same seed, indices, labels, options and batch.

        Args:
            labels: a label or class name for each image, or a rule of sample.py. Default: the run's rule.
            indices: which images. Default: the first ones, as many as labels; of a rule 16.
            batch: images a network call; a chunk is always whole, so a small batch spares the time of a few images.
            output: pil, or tensor for uint8 (N, C, H, W).
            options: of SamplingConfig, such as cfg_scale or num_steps. Default: the run's own.

        Raises:
            ValueError: a label, an index or an option that is not possible.
        """
        check_choice("output", output, ("pil", "tensor"))
        images = self._each(self.images, labels, indices, seed, batch, options)
        if output == "tensor":
            return images
        return [to_pil(image.permute(1, 2, 0).numpy()) for image in images]

    @torch.no_grad()
    def latents(
        self,
        labels: str | Sequence[int | str] | None = None,
        *,
        indices: Sequence[int] | None = None,
        seed: int = 0,
        batch: int = 64,
        **options: Any,
    ) -> Tensor:
        """What the VAE decodes to the images of `sample`, with the same arguments: float32 (N, C, h, w), on the CPU.

        Raises:
            ValueError: a label, an index or an option that is not possible.
        """
        return self._each(self.latents_of, labels, indices, seed, batch, options)

    def _each(
        self,
        make: Callable[..., Tensor],
        labels: str | Sequence[int | str] | None,
        indices: Sequence[int] | None,
        seed: int,
        batch: int,
        options: dict[str, Any],
    ) -> Tensor:
        """What `make` makes of each index, in whole chunks of `batch`: (N, ...) on the CPU."""
        asked = labels is not None
        labels = np.asarray(labels).tolist() if asked else self.config.sampling.labels
        each = not isinstance(labels, str)
        if indices is None:
            indices = range(len(labels) if each else options.get("num_images", 16))
        if each and len(labels) != len(indices):
            raise ValueError(f"labels: {len(labels)} for {len(indices)} images")
        if batch < 1 or min(indices, default=0) < 0:
            raise ValueError(f"batch: {batch}, indices: {list(indices)[:5]}; needs 1 and 0 or more")
        settings, noise = self.sampling(**options), SeededNoise(seed)
        rule = LabelRule(labels, self.data.num_classes, self.data.class_names, chosen=asked)
        label_of = dict(zip(indices, rule.given, strict=True)) if each else {}
        made: dict[int, Tensor] = {}
        for chunk in sorted({index // batch for index in indices}):
            whole = range(chunk * batch, (chunk + 1) * batch)
            y = torch.tensor([label_of.get(i, 0) for i in whole]) if each else rule(whole, noise)
            made.update(zip(whole, make(whole, y, settings=settings, noise=noise).cpu(), strict=True))
        return torch.stack([made[i] for i in indices])


def load(
    source: str | Path,
    *,
    weights: str | None = None,
    step: int | None = None,
    process: str | None = None,
    vae: str | None = None,
    device: torch.device | str = "cpu",
) -> LoadedRun:
    """Load what was trained: by us, by the public DiT or SiT code, or a DiT of diffusers.

    Args:
        source: run folder of train.py, weights file of ours, public DiT or SiT file, folder of diffusers' DiT or of
            `vcagen export --format hub`, or the name user/name of a repository of the Hub with one of these.
        weights: ema (the default), ema_DECAY or raw; of a file of others also the name of a set in it.
        step: checkpoint of a run. Default: the newest.
        process: diffusion (DiT) or flow (SiT) of a public file, where neither its name nor its arguments tell.
        vae: where the VAE is now, if not where the weights say; of a public file which one.

    Raises:
        ValueError: nothing to load there, damaged metadata, weights that do not fit, or a VAE that does not.
    """
    found = open_source(source, weights=weights or "ema", step=step)
    path, read = found.path, found.weights
    if read.metadata is None:
        config, data, opened, notes = _public(path, read, process, vae, device)
        step = ema_decay = None
    else:
        if weights not in (None, "ema", read.name):
            raise ValueError(f"weights: {path} holds {read.name}, not {weights}")
        with reading(path):
            config = from_mapping(Config, read.metadata["config"])
            data = DataSpec.from_dict(read.metadata["data"])
            opened = LatentVAE.from_description(
                data.vae, path=vae or read.vae, near=path, **vae_options(config.vae, device)
            )  # fmt: skip
            step, ema_decay = read.metadata["step"], read.metadata["ema_decay"]
            if process not in (None, config.process.name):
                raise ValueError(f"process: {process}; the weights were trained for {config.process.name}")
            notes = [f"{path}: {read.name}, {config.process.name}, step {step}"]
            notes += _young_average(config, step, ema_decay)
            if opened.channels != data.channels:
                raise ValueError(f"damaged metadata ({opened.channels} and {data.channels} latent channels)")
    if opened.is_identity and (opened.channels not in (1, 3) or opened.downsample != 1):
        raise ValueError(f"vae: identity; {path} has {opened.channels} latent channels, images have 1 or 3")
    if not opened.is_identity and data.vae["sha256"] is None:
        raise ValueError(f"vae: {vae}; {path} was trained on the pixels, without a VAE")
    if torch.device(device).type != "cuda":
        config = replace(config, model=with_kernel(config.model, "maps"))
    with reading(path):
        network = build_model(config.model, config.process, data)
        table = {} if read.metadata else {"pos_embed": network.pos_embed}  # of others, who may not have saved it
        load_into(network, {**table, **read.state_dict})
    return LoadedRun(
        network.to(device).eval().requires_grad_(False), build_process(config.process), opened, config, data, step,
        ema_decay, found.sha256(), config.train.tf32, notes,
    )  # fmt: skip


def _public(
    path: Path, read: Weights, process: str | None, vae: str | None, device: torch.device | str
) -> tuple[Config, DataSpec, LatentVAE, list[str]]:
    """Configuration, data and VAE of weights of others, and what had to be assumed.

    Raises:
        ValueError: what the file says does not agree, does not tell enough, or is not for this VAE.
    """
    public = identify(path, read, process)
    if public.num_heads is None:
        raise ValueError(f"{path}: width {public.hidden_size}, of no named size; the number of heads is not known")
    notes = [f"{path}: {read.name}, {public.process} by {public.told_by}"]
    if "_class_name" in read.args:
        notes.append("read as the public DiT code's network: its time frequencies are i / 128, diffusers runs i / 127")
    opened = LatentVAE(vae or public.vae or DEFAULT_VAE, channels=public.in_channels, device=device)
    scale = public.patch_size * opened.downsample
    grid = public.grid
    if grid is None:
        grid = (public.image_size or 256) // scale
        notes.append(f"{path}: without a position table: it is rebuilt for images of {grid * scale} x {grid * scale}")
    if "image_size" in read.args and read.args["image_size"] != grid * scale:
        said = f"its arguments say image_size {read.args['image_size']}"
        raise ValueError(f"{path}: {said}, its position table and the VAE say {grid * scale}")
    names = public_class_names(public.class_names, public.num_classes)
    config = Config(
        run_dir="",
        model=public.model(),
        process=ProcessConfig(name=public.process, num_timesteps=public.num_timesteps),
    )
    side = grid * public.patch_size
    data = DataSpec(
        channels=opened.channels, height=side, width=side, num_classes=public.num_classes, class_names=names,
        image_size=side * opened.downsample, vae=opened.description(),
    )  # fmt: skip
    return config, data, opened, notes


def _young_average(config: Config, step: int, decay: float | None) -> list[str]:
    """A line where an average still holds much of the weights it started from."""
    if decay is None or config.train.ema_warmup or step >= 5 / (1 - decay):
        return []
    share = f"{100 * decay**step:.2g} % of it is still the initial weights"
    return [f"the average of decay {decay} is young at step {step}: {share}; --weights raw has none of them"]
