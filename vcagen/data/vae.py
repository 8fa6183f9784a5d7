"""LatentVAE: pixels to latents and back, through a diffusers AutoencoderKL or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import torch
from msgspec import Meta
from torch import Tensor

from vcagen.data.images import from_uint8, to_uint8
from vcagen.data.latent_scale import SCALE_FIELDS, LatentScale, check_scale
from vcagen.processes.process import refuse_non_finite
from vcagen.system.files import few
from vcagen.system.hub import download, is_hub_name
from vcagen.system.precision import full_precision

DEFAULT_VAE = "stabilityai/sd-vae-ft-ema"

Size = Annotated[int, Meta(ge=1, le=1 << 16)]
"""Of an image or of channels, in a record on disk."""


class LaterFields(TypedDict, total=False):
    """What the first descriptions do not have."""

    image_channels: Size


class VaeRecord(LaterFields):
    """What a description on disk must hold; `check_scale` looks at the scale."""

    path: str
    sha256: str | None
    channels: Size
    downsample: Size


class LatentVAE:
    """Images in [-1, 1] (N, I, H, W) to latents (N, C, H / downsample, W / downsample) and back.

    Latents are mean + std * noise, scaled as `LatentScale` says. The VAE's weights are loaded by the first encode or
    decode; before that only its config is read, and with a description not even that.

    Args:
        path: hub name or local folder of a diffusers AutoencoderKL of I = 1 or 3 channels, or "identity": latents are
            the pixels.
        precision: of the VAE; moments, latents and images are float32 outside it.
        tiling: encode and decode in tiles, which saves memory.
        scaling_factor, shift_factor: take the place of those of the config or description.
        channels: image channels I of the identity.
        description: `description()` of the one that is to be rebuilt; the VAE must then have the same weights.

    Raises:
        ValueError: the VAE cannot be had, is not an AutoencoderKL for such images, has other weights, or a scale that
            is not possible; or a factor for the identity.
    """

    def __init__(
        self,
        path: str,
        *,
        precision: Literal["float32", "bfloat16"] = "float32",
        tiling: bool = False,
        scaling_factor: float | None = None,
        shift_factor: float | None = None,
        device: str | torch.device = "cpu",
        channels: int = 3,
        description: dict[str, Any] | None = None,
    ) -> None:
        if path == "identity" and (scaling_factor, shift_factor) != (None, None):
            raise ValueError("vae.scaling_factor, vae.shift_factor: identity does not scale")
        self.path = path = find_vae(path)
        self.device = torch.device(device)
        self._dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self._tiling = tiling
        self._model: Any = None
        if description is None:
            description = _identity(channels) if path == "identity" else _from_config(path)
        self._sha256: str | None = description["sha256"]
        given = {"scaling_factor": scaling_factor, "shift_factor": shift_factor}
        self.scale_fields = with_given_scale(description, given)
        self.scale = LatentScale(self.scale_fields, self.device)
        self.channels = int(description["channels"])
        self.image_channels = int(description.get("image_channels", self.channels if path == "identity" else 3))
        self.downsample = int(description["downsample"])

    @classmethod
    def from_description(
        cls, description: dict[str, Any], *, path: str | None = None, near: str | Path | None = None, **options: Any
    ) -> LatentVAE:
        """Rebuild a VAE from what travels with shards and weights.

        Args:
            path: where the VAE is now, if elsewhere.
            near: the shards or the run; a relative path in the description may also count from a folder above.
        """
        return cls(path or find_vae(description["path"], near), description=description, **options)

    @property
    def is_identity(self) -> bool:
        """Whether latents are pixels."""
        return self.path == "identity"

    @property
    def moment_channels(self) -> int:
        """Channels of `moments`: 2C, or C for the identity."""
        return self.channels if self.is_identity else 2 * self.channels

    def description(self) -> dict[str, Any]:
        """What identifies the VAE, JSON-able. Loads the VAE's weights unless it was built from one."""
        if not self.is_identity and self._sha256 is None:
            self._load()
        return {
            "path": self.path,
            "sha256": self._sha256,
            **self.scale_fields,
            "channels": self.channels,
            "image_channels": self.image_channels,
            "downsample": self.downsample,
        }

    def moments(self, images: Tensor) -> Tensor:
        """Images (N, I, H, W) in [-1, 1] to mean and log-variance (N, 2C, h, w), float32; identity: the images.

        The moments are not scaled: `sample` does that.
        """
        assert images.ndim == 4, f"images (N, I, H, W), got {tuple(images.shape)}"
        if self.is_identity:
            return images.float()
        model = self._load()
        with full_precision(self.device):
            posterior = model.encode(images.to(self.device, self._dtype)).latent_dist
        moments: Tensor = posterior.parameters.float()
        return moments

    def sample(self, moments: Tensor, noise: Tensor) -> Tensor:
        """Moments (N, 2C, h, w) and standard normal noise (N, C, h, w) to latents (N, C, h, w), float32.

        uint8 images (N, I, H, W) are encoded first. Moments of C channels are latents that somebody sampled already:
        they are scaled, and the noise does nothing. The identity returns its moments.
        """
        if moments.dtype == torch.uint8:
            moments = self.encode_uint8(moments)
        if self.is_identity:
            return moments.float()
        if moments.shape[1] == self.channels:
            return self.scale.scale(moments.float())
        assert moments.shape[1] == self.moment_channels, f"{self.moment_channels} channels, got {tuple(moments.shape)}"
        mean, log_variance = moments.float().chunk(2, dim=1)
        std = torch.exp(0.5 * log_variance.clamp(-30, 20))
        return self.scale.scale(mean + std * noise)

    def decode(self, latents: Tensor, batch: int | None = None) -> Tensor:
        """Latents (N, C, h, w) to uint8 images (N, I, H, W), `batch` at once.

        Raises:
            NonFiniteError: NaN or infinity in latents or in decoded images; a ValueError that has the `rows`.
        """
        assert latents.shape[1] == self.channels, f"{self.channels} channels, got {tuple(latents.shape)}"
        refuse_non_finite(latents, "latent")
        if self.is_identity:
            return to_uint8(latents)
        model = self._load()
        parts = []
        for part in torch.split(latents, batch or len(latents)):
            unscaled = self.scale.unscale(part.to(self.device).float())
            with full_precision(self.device):
                parts.append(model.decode(unscaled.to(self._dtype)).sample.float())
        images = torch.cat(parts)
        refuse_non_finite(images, "decoded image")
        return to_uint8(images)

    def encode_uint8(self, pixels: Tensor) -> Tensor:
        """`moments` of uint8 images (N, I, H, W)."""
        return self.moments(from_uint8(pixels.to(self.device)))

    def verify(self) -> None:
        """Load the VAE, so that another one than expected raises ValueError now."""
        self.autoencoder()

    def autoencoder(self) -> Any:
        """The AutoencoderKL itself; None for the identity."""
        return None if self.is_identity else self._load()

    def _load(self) -> Any:
        if self._model is None:
            model = _load_vae(self.path)
            found = _weights_sha256(model)
            if self._sha256 not in (None, found):
                hashes = f"its weights have SHA-256 {found[:12]}, expected {str(self._sha256)[:12]}"
                raise ValueError(f"{self.path}: another VAE than the latents were made with; {hashes}")
            self._sha256 = found
            if self._tiling:
                model.enable_tiling()
            if self._dtype == torch.bfloat16:
                model = model.bfloat16()
            self._model = model.to(self.device).eval()
        return self._model


def find_vae(path: str, near: str | Path | None = None) -> str:
    """Where the VAE of that name lies; the name itself where it is no local folder, such as one of the hub.

    A relative path counts from the working folder, then from the folders above `near`. In the folder of a whole
    pipeline the VAE is vae/.
    """
    above = [] if near is None else Path(near).resolve().parents
    for folder in (place / Path(path).expanduser() for place in (Path(), *above) if path not in ("", "identity")):
        for found in (folder, folder / "vae"):
            if (found / "config.json").is_file():
                return str(found)
    return path


def with_given_scale(description: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The SCALE_FIELDS of a description, with the values of `given` that are not None in place of its own.

    Raises:
        ValueError: a scale that is not possible, as `check_scale`.
    """
    fields = {name: description.get(name) for name in SCALE_FIELDS}
    fields |= {name: float(value) for name, value in given.items() if value is not None}
    check_scale(fields, int(description["channels"]))
    return fields


def _identity(channels: int) -> dict[str, Any]:
    scale = {"scaling_factor": 1.0, "shift_factor": 0.0}
    return {"sha256": None, **scale, "channels": channels, "image_channels": channels, "downsample": 1}


@contextmanager
def _loading(path: str) -> Iterator[None]:
    """Whatever diffusers and the hub raise at no such folder, network, repository or VAE becomes one ValueError."""
    from diffusers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # our line says it
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        advice = "name another hub name or local folder of a diffusers AutoencoderKL by vae.path or --vae"
        if Path(path).is_file():
            reason, advice = "a file, not a folder", f"vcagen convert-vae {path} --out FOLDER makes a folder of it"
        elif not (Path(path).is_absolute() or Path(path).is_dir()):
            advice += "; a relative path counts from the working folder or from one above the run or shards"
        raise ValueError(f"{path}: this VAE cannot be loaded ({reason}); {advice}") from error
    finally:
        logging.set_verbosity(level)


def _from_config(path: str) -> dict[str, Any]:
    """What a VAE's config.json tells; AutoencoderKL itself fills in what it leaves out and refuses what is wrong."""
    from diffusers import AutoencoderKL

    with _loading(path):
        values = AutoencoderKL.load_config(_folder(path, "*.json"))
        kind = values.get("_class_name", "AutoencoderKL")
        if kind != "AutoencoderKL":
            raise ValueError(f"it is an {kind}; an AutoencoderKL is needed")
        with torch.device("meta"):
            config = AutoencoderKL.from_config(values).config
        if config.in_channels != config.out_channels or config.in_channels not in (1, 3):
            shapes = f"{config.in_channels} channels to images of {config.out_channels}"
            raise ValueError(f"it is for images of {shapes}; 1 or 3 and the same are needed")
        description = {
            "sha256": None,
            "scaling_factor": config.scaling_factor,
            "shift_factor": config.shift_factor or 0.0,
            "latents_mean": config.latents_mean,
            "latents_std": config.latents_std,
            "channels": int(config.latent_channels),
            "image_channels": int(config.in_channels),
            "downsample": 2 ** (len(config.block_out_channels) - 1),
        }
        check_scale(description, int(config.latent_channels))
        return description


def _load_vae(path: str) -> Any:
    """The AutoencoderKL in float32; a .bin file is read by diffusers with weights_only=True.

    Raises:
        ValueError: it cannot be loaded, or its weights are not those of its config.json.
    """
    from diffusers import AutoencoderKL

    with _loading(path):
        folder = _folder(path, "*.json", "*.safetensors")
        if not any(folder.glob("*.safetensors")):
            folder = _folder(path, "*.json", "*.bin")
        model, found = AutoencoderKL.from_pretrained(
            folder, torch_dtype=torch.float32, variant=_variant(folder), output_loading_info=True
        )
        for words, names in (("lack", found["missing_keys"]), ("also have", found["unexpected_keys"])):
            if names:
                raise ValueError(f"its weights {words} {few(sorted(names))}, unlike its config.json")
        return model


def _folder(path: str, *patterns: str) -> Path:
    """The folder of a VAE, with those files of it where it is on the Hub.

    Raises:
        ValueError: there is none.
    """
    if is_hub_name(path):
        return download(path, *patterns)
    if not Path(path).is_dir():
        raise ValueError("no such folder")
    return Path(path)


def _variant(folder: Path) -> str | None:
    """The variant of a folder that holds its weights only under such a name, as diffusion_pytorch_model.fp16.bin.

    Raises:
        ValueError: several variants.
    """
    names = [file.name.split(".") for file in folder.glob("diffusion_pytorch_model.*")]
    variants = {name[1] for name in names if len(name) == 3 and name[2] in ("safetensors", "bin")}
    if not variants or any(len(name) == 2 for name in names):
        return None
    if len(variants) > 1:
        raise ValueError(f"several variants ({', '.join(sorted(variants))}); leave one of them in the folder")
    return variants.pop()


def _weights_sha256(model: torch.nn.Module) -> str:
    """SHA-256 over names, shapes and float32 values, so that it does not depend on the file format."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)} ".encode())
        digest.update(value.float().contiguous().numpy().tobytes())
    return digest.hexdigest()
