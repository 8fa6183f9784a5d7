"""LatentVAE: pixels to latents and back, through a diffusers AutoencoderKL or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from vcagen.data.images import from_uint8, to_uint8
from vcagen.processes.process import refuse_non_finite
from vcagen.system.precision import full_precision

DEFAULT_VAE = "stabilityai/sd-vae-ft-ema"


class LatentVAE:
    """Images in [-1, 1] (N, 3, H, W) to latents (N, C, H / downsample, W / downsample) and back.

    Latents are (mean + std * noise - shift_factor) * scaling_factor, as in Latent Diffusion. The VAE's weights are
    loaded by the first encode or decode; before that only its config is read, and with a description not even that.

    Args:
        path: hub name or local folder of a diffusers AutoencoderKL, or "identity": latents are the pixels.
        precision: of the VAE; moments, latents and images are float32 outside it.
        tiling: encode and decode in tiles, which saves memory.
        scaling_factor, shift_factor: take the place of those of the config or description.
        channels: image channels of the identity.
        description: `description()` of the one that is to be rebuilt; the VAE must then have the same weights.

    Raises:
        ValueError: the VAE cannot be had, is not an AutoencoderKL for RGB images, or has other weights; or a factor for
            the identity.
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
        self.path = path
        self.device = torch.device(device)
        self._dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self._tiling = tiling
        self._model: Any = None
        if description is None:
            description = _identity(channels) if path == "identity" else _from_config(path)
        self._sha256: str | None = description["sha256"]
        self.scaling_factor = float(description["scaling_factor"] if scaling_factor is None else scaling_factor)
        self.shift_factor = float(description["shift_factor"] if shift_factor is None else shift_factor)
        self.channels = int(description["channels"])
        self.downsample = int(description["downsample"])

    @classmethod
    def from_description(cls, description: dict[str, Any], *, path: str | None = None, **options: Any) -> LatentVAE:
        """Rebuild a VAE from what travels with shards and weights; `path`: where the VAE is now, if elsewhere."""
        return cls(path or description["path"], description=description, **options)

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
            "scaling_factor": self.scaling_factor,
            "shift_factor": self.shift_factor,
            "channels": self.channels,
            "downsample": self.downsample,
        }

    def moments(self, images: Tensor) -> Tensor:
        """Images (N, 3, H, W) in [-1, 1] to mean and log-variance (N, 2C, h, w), float32; identity: the images.

        The moments are not scaled: `sample` does that.
        """
        assert images.ndim == 4, f"images (N, 3, H, W), got {tuple(images.shape)}"
        if self.is_identity:
            return images.float()
        model = self._load()
        with full_precision(self.device):
            posterior = model.encode(images.to(self.device, self._dtype)).latent_dist
        moments: Tensor = posterior.parameters.float()
        return moments

    def sample(self, moments: Tensor, noise: Tensor) -> Tensor:
        """Moments (N, 2C, h, w) and standard normal noise (N, C, h, w) to latents (N, C, h, w), float32.

        uint8 images (N, 3, H, W) are encoded first. The identity returns its moments.
        """
        if moments.dtype == torch.uint8:
            moments = self.encode_uint8(moments)
        assert moments.shape[1] == self.moment_channels, f"{self.moment_channels} channels, got {tuple(moments.shape)}"
        if self.is_identity:
            return moments.float()
        mean, log_variance = moments.float().chunk(2, dim=1)
        std = torch.exp(0.5 * log_variance.clamp(-30, 20))
        return (mean + std * noise - self.shift_factor) * self.scaling_factor

    def decode(self, latents: Tensor, batch: int | None = None) -> Tensor:
        """Latents (N, C, h, w) to uint8 images (N, 3, H, W), `batch` at once; identity: (N, C, H, W).

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
            unscaled = part.to(self.device).float() / self.scaling_factor + self.shift_factor
            with full_precision(self.device):
                parts.append(model.decode(unscaled.to(self._dtype)).sample.float())
        images = torch.cat(parts)
        refuse_non_finite(images, "decoded image")
        return to_uint8(images)

    def encode_uint8(self, pixels: Tensor) -> Tensor:
        """`moments` of uint8 images (N, 3, H, W)."""
        return self.moments(from_uint8(pixels.to(self.device)))

    def verify(self) -> None:
        """Load the VAE, so that another one than expected raises ValueError now."""
        if not self.is_identity:
            self._load()

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


def _identity(channels: int) -> dict[str, Any]:
    return {"sha256": None, "scaling_factor": 1.0, "shift_factor": 0.0, "channels": channels, "downsample": 1}


@contextmanager
def _loading(path: str) -> Iterator[None]:
    """Whatever diffusers and the hub raise at no such folder, network, repository or VAE becomes one ValueError."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        advice = "name another hub name or local folder of a diffusers AutoencoderKL by vae.path or --vae"
        raise ValueError(f"{path}: this VAE cannot be loaded ({reason}); {advice}") from error


def _from_config(path: str) -> dict[str, Any]:
    """What a VAE's config.json tells; AutoencoderKL itself fills in what it leaves out and refuses what is wrong."""
    from diffusers import AutoencoderKL

    with _loading(path):
        values = AutoencoderKL.load_config(path)
        kind, channels = values.get("_class_name", "AutoencoderKL"), values.get("in_channels", 3)
        if kind != "AutoencoderKL" or channels != 3:
            raise ValueError(f"a {kind} of {channels} channels")
        with torch.device("meta"):
            config = AutoencoderKL.from_config(values).config
        return {
            "sha256": None,
            "scaling_factor": float(config.scaling_factor),
            "shift_factor": float(config.shift_factor or 0.0),
            "channels": int(config.latent_channels),
            "downsample": 2 ** (len(config.block_out_channels) - 1),
        }


def _load_vae(path: str) -> Any:
    """The AutoencoderKL in float32; a .bin file is read by diffusers with weights_only=True."""
    from diffusers import AutoencoderKL

    with _loading(path):
        return AutoencoderKL.from_pretrained(path, torch_dtype=torch.float32)


def _weights_sha256(model: torch.nn.Module) -> str:
    """SHA-256 over names, shapes and float32 values, so that it does not depend on the file format."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)} ".encode())
        digest.update(value.float().contiguous().numpy().tobytes())
    return digest.hexdigest()
