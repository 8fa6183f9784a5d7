"""Networks that more than one benchmark takes, with random weights."""

from __future__ import annotations

from typing import Any

from vcagen.networks.dit import DiT, parse_size


def dit_s2() -> DiT:
    """DiT-S/2 for latents (4, 32, 32) of 1,000 classes, with a learned variance."""
    size: dict[str, Any] = parse_size("S/2")
    return DiT(input_size=32, in_channels=4, out_channels=8, num_classes=1000, **size)


def sd_vae() -> Any:
    """An AutoencoderKL of the size of Stable Diffusion's."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    ).eval()  # fmt: skip
