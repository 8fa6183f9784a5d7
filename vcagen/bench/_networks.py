"""A VAE of random weights that more than one benchmark takes."""

from __future__ import annotations

from typing import Any


def sd_vae() -> Any:
    """An AutoencoderKL of the size of Stable Diffusion's."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    ).eval()  # fmt: skip
