"""From a run folder or a weights file to all that sampling needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vcagen.build import build_model, build_process
from vcagen.config.command_line import from_mapping
from vcagen.config.options import Config, ModelConfig, ProcessConfig
from vcagen.data.latents import DataSpec, vae_options
from vcagen.data.vae import DEFAULT_VAE, LatentVAE
from vcagen.networks.dit import DIT_SIZES, DiT
from vcagen.networks.weights import architecture, find_weights, load_into, read_weights
from vcagen.processes.diffusion import GaussianDiffusion
from vcagen.processes.flow import LinearInterpolant
from vcagen.system.files import sha256


@dataclass(frozen=True)
class LoadedRun:
    """A trained network with all that sampling needs."""

    model: DiT
    """In eval mode, on the device."""
    process: GaussianDiffusion | LinearInterpolant
    vae: LatentVAE
    config: Config
    """Of the training run; of a public file what its shapes tell, the rest at its defaults."""
    data: DataSpec
    """Without class names where they are not known."""
    step: int | None
    ema_decay: float | None
    weights_sha256: str

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the latents."""
        return self.data.channels, self.data.height, self.data.width

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the images."""
        scale = self.vae.downsample
        channels = self.vae.channels if self.vae.is_identity else 3
        return channels, self.data.height * scale, self.data.width * scale


def load_run(
    path: str | Path,
    *,
    weights: str | None = None,
    step: int | None = None,
    process: str | None = None,
    vae: str | None = None,
    device: torch.device | str = "cpu",
) -> LoadedRun:
    """Load a run folder of train.py, a weights file of ours, or a public DiT or SiT file.

    Args:
        weights: ema (the default), ema_DECAY or raw.
        step: checkpoint of a run. Default: the newest.
        process: diffusion (DiT) or flow (SiT) of a public file, where neither its name nor its arguments tell.
        vae: where the VAE is now, if not where the weights say; of a public file which one.

    Raises:
        ValueError: nothing to load there, damaged metadata, weights that do not fit, or a VAE that does not.
    """
    path = Path(path)
    if path.is_dir():
        path = find_weights(path, weights=weights or "ema", step=step)
    elif step is not None:
        raise ValueError(f"step: {path} is one file; steps are of run folders")
    read = read_weights(path, which="raw" if weights == "raw" else "ema")
    if read.metadata is not None:
        if weights not in (None, "ema", read.name):
            raise ValueError(f"weights: {path} holds {read.name}, not {weights}")
        with _damage_named(path):
            config = from_mapping(Config, read.metadata["config"])
            data = DataSpec.from_dict(read.metadata["data"])
            opened = LatentVAE.from_description(data.vae, path=vae, **vae_options(config.vae, device))
            if opened.channels != data.channels:
                raise ValueError(f"damaged metadata ({opened.channels} and {data.channels} latent channels)")
    else:
        with _damage_named(path):
            found = architecture(read.state_dict)
        config = public_config(path, found, read.args or {}, process)
        opened = LatentVAE(vae or DEFAULT_VAE, channels=int(found["in_channels"]), device=device)
        side = int(found["grid"] * found["patch_size"])
        num_classes = int(found["num_labels"]) - 1
        description = opened.description()
        data = DataSpec(
            channels=opened.channels, height=side, width=side, num_classes=num_classes, class_names=(),
            image_size=side * opened.downsample, vae=description,
        )  # fmt: skip
    if opened.is_identity and (opened.channels not in (1, 3) or opened.downsample != 1):
        raise ValueError(f"vae: identity; {path} has {opened.channels} latent channels, images have 1 or 3")
    if not opened.is_identity and data.vae["sha256"] is None:
        raise ValueError(f"vae: {vae}; {path} was trained on the pixels, without a VAE")
    with _damage_named(path):
        model = build_model(config.model, config.process, data)
        load_into(model, read.state_dict)
    metadata = read.metadata or {"step": None, "ema_decay": None}
    return LoadedRun(
        model=model.to(device).eval().requires_grad_(False),
        process=build_process(config.process),
        vae=opened,
        config=config,
        data=data,
        step=metadata["step"],
        ema_decay=metadata["ema_decay"],
        weights_sha256=sha256(path),
    )


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turn whatever odd metadata or weights lead to into a ValueError that names the file."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, MemoryError) as error:
        raise ValueError(f"{path}: damaged metadata ({type(error).__name__}: {error})") from error


def public_config(path: Path, found: dict[str, int | float], args: dict[str, Any], process: str | None) -> Config:
    """The configuration of a public file: named size by the width, process by the argument, else by what is stored.

    Both kinds have twice the output channels, so the shapes do not tell DiT from SiT: training arguments of SiT, or one
    of the two in the file's name, do.

    Raises:
        ValueError: a width of no named size, or a process that cannot be told.
    """
    names = {sizes["hidden_size"]: name for name, sizes in DIT_SIZES.items()}
    if found["hidden_size"] not in names:
        raise ValueError(f"{path}: width {found['hidden_size']}, of no named size; the number of heads is not known")
    if "grid" not in found:
        raise ValueError(f"{path}: pos_embed missing; a public DiT or SiT file has it")
    told = {name for word, name in (("dit", "diffusion"), ("sit", "flow")) if word in path.name.lower()}
    if found["out_channels"] == found["in_channels"] or "path_type" in args:
        told = {"flow"}
    if process is None and len(told) != 1:
        raise ValueError(f"process: {path} does not tell whether it is DiT or SiT; give --process diffusion or flow")
    learned = ProcessConfig(name="flow" if (process or told.pop()) == "flow" else "diffusion")
    size = f"{names[int(found['hidden_size'])]}/{found['patch_size']}"
    return Config(
        run_dir="",
        model=ModelConfig(size=size, depth=int(found["depth"]), mlp_ratio=found["mlp_ratio"]),
        process=learned,
    )
