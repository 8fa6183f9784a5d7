"""Autoencoders of Latent Diffusion's code, such as VA-VAE, as folders of a diffusers AutoencoderKL."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vcagen.config.job_options import ConvertVaeConfig
from vcagen.data.latent_scale import check_scale, read_statistics
from vcagen.data.vae import LatentVAE
from vcagen.networks.weights import read_tensors
from vcagen.system.files import atomic_folder, check_writable, few, prefixing

PARTS = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")
FIRST = "encoder.conv_in.weight"


def run(config: ConvertVaeConfig) -> None:
    """Write the folder.

    Raises:
        ValueError: a file without such an autoencoder, statistics that do not fit it, or a folder that exists.
    """
    from diffusers import AutoencoderKL

    out = Path(config.out)
    if out.exists():
        raise ValueError(f"out: {out} exists; choose another folder")
    check_writable(out)
    with prefixing(f"{config.source}: "):
        theirs = _autoencoder(read_tensors(config.source))
        values = _architecture(theirs)
    values |= {"scaling_factor": config.scaling_factor, "shift_factor": 0.0, "latents_mean": None, "latents_std": None}
    if config.stats is not None:
        values |= read_statistics(config.stats)
    with prefixing(f"{config.stats}: "):
        check_scale(values, values["latent_channels"])
    ours = {_rename(name, levels=len(values["block_out_channels"])): value for name, value in theirs.items()}
    with torch.device("meta"):
        model = AutoencoderKL(**values)
    wanted = model.state_dict()
    for name, value in ours.items():
        if ".attentions." in name and value.ndim == 4:  # 1 x 1 convolutions there, linear layers here
            ours[name] = value[:, :, 0, 0]
    wrong = [name for name in {**wanted, **ours}
             if name not in ours or name not in wanted or ours[name].shape != wanted[name].shape]  # fmt: skip
    if wrong:
        raise ValueError(f"{config.source}: not an autoencoder of Latent Diffusion's code: {few(wrong)} do not fit")
    model.load_state_dict({name: value.float().contiguous() for name, value in ours.items()}, assign=True)
    with atomic_folder(out) as temporary:
        model.save_pretrained(temporary)
    vae = LatentVAE(str(out))
    vae.verify()
    told = f"{vae.channels} latent channels, downsampling by {vae.downsample}"
    print(f"{out}: an AutoencoderKL of {told}; encode --vae {out}", file=sys.stderr)
    if config.stats is None and config.scaling_factor == 1:
        print("note: neither --stats nor --scaling_factor: encode says if its latents need one", file=sys.stderr)


def _autoencoder(content: Any) -> dict[str, Tensor]:
    """The weights of encoder and decoder in what a file holds, under their own names.

    Raises:
        ValueError: none there, or several.
    """
    sets = {"": content, **(content if isinstance(content, dict) else {})}
    found = {(key, name.removesuffix(FIRST)) for key, tensors in sets.items() if isinstance(tensors, dict)
             for name in tensors if isinstance(name, str) and name.endswith(FIRST)}  # fmt: skip
    if len(found) != 1:
        there = few(sorted(key + prefix or "the file itself" for key, prefix in found)) or "none"
        raise ValueError(f"one encoder and decoder of Latent Diffusion's code are needed; there: {there}")
    ((key, prefix),) = found
    own = {name.removeprefix(prefix): value for name, value in sets[key].items() if name.startswith(prefix)}
    return {name: value for name, value in own.items() if name.startswith(PARTS) and isinstance(value, Tensor)}


def _architecture(weights: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments of AutoencoderKL that the names and shapes tell.

    Raises:
        ValueError: names or shapes that no such autoencoder has.
    """
    try:
        count = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.down."))
        levels = range(count)
        down = ["Attn" * (f"encoder.down.{i}.attn.0.q.weight" in weights) + "DownEncoderBlock2D" for i in levels]
        up = ["Attn" * (f"decoder.up.{i}.attn.0.q.weight" in weights) + "UpDecoderBlock2D" for i in reversed(levels)]
        return {
            "in_channels": weights[FIRST].shape[1],
            "out_channels": weights["decoder.conv_out.weight"].shape[0],
            "latent_channels": weights["decoder.conv_in.weight"].shape[1],
            "block_out_channels": [weights[f"encoder.down.{i}.block.0.conv2.weight"].shape[0] for i in levels],
            "layers_per_block": sum(
                bool(re.fullmatch(r"encoder\.down\.0\.block\.\d+\.conv1\.weight", k)) for k in weights
            ),
            "down_block_types": down,
            "up_block_types": up,
            "mid_block_add_attention": "encoder.mid.attn_1.q.weight" in weights,
            "use_quant_conv": "quant_conv.weight" in weights,
            "use_post_quant_conv": "post_quant_conv.weight" in weights,
            "sample_size": 256,
        }
    except (KeyError, ValueError, IndexError) as error:
        raise ValueError(f"not an autoencoder of Latent Diffusion's code ({error})") from None


def _rename(name: str, *, levels: int) -> str:
    """The name in diffusers of a weight in Latent Diffusion's code; decoder levels count from the other end there."""
    name = re.sub(r"^decoder\.up\.(\d+)", lambda level: f"decoder.up_blocks.{levels - 1 - int(level[1])}", name)
    name = re.sub(r"\.block_([12])\.", lambda block: f"_block.resnets.{int(block[1]) - 1}.", name)
    for theirs, ours in {
        ".down.": ".down_blocks.",
        ".block.": ".resnets.",
        ".downsample.": ".downsamplers.0.",
        ".upsample.": ".upsamplers.0.",
        ".mid.attn_1.": ".mid_block.attentions.0.",
        ".attn.": ".attentions.",
        ".nin_shortcut.": ".conv_shortcut.",
        "coder.norm_out.": "coder.conv_norm_out.",
    }.items():
        name = name.replace(theirs, ours)
    if ".attentions." in name:
        name = name.replace(".norm.", ".group_norm.").replace(".proj_out.", ".to_out.0.")
        name = re.sub(r"\.([qkv])\.", r".to_\1.", name)
    return name
