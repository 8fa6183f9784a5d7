"""What a recognition network of timm looks at: image files, and the maps of its Visual-Contrast Attention at them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config
from timm.models import load_state_dict
from torch import Tensor, nn

import vcagen.recognition  # noqa: F401  # registers its networks with timm
from vcagen.jobs.map_pages import Input
from vcagen.networks.attention import VisualContrastAttention
from vcagen.networks.maps import ContrastMaps, Grid, contrast_maps, layer_names, watching
from vcagen.system.files import few, reading


def load_classifier(name: str, weights: str | None) -> nn.Module:
    """A network of timm by its name, such as vca_deit_tiny_patch16_224, with the weights of a checkpoint.

    Args:
        weights: as timm's train.py writes it, or the weights alone; averaged weights where it has them.

    Raises:
        ValueError: no such network, or weights that are missing or not its own.
    """
    if not timm.is_model(name):
        raise ValueError(f"{name}: timm has no network of this name; a run needs no --images")
    if weights is None:
        raise ValueError(f"weights: missing; name a checkpoint of {name}, as timm's train.py writes it")
    with reading(weights), torch.serialization.safe_globals([argparse.Namespace]):
        state = load_state_dict(weights, use_ema=True, weights_only=True)
        head = timm.get_pretrained_cfg_value(name, "classifier")
        network: nn.Module = timm.create_model(name, num_classes=len(state[f"{head}.weight"]))
        found = network.load_state_dict(state, strict=False)
        if wrong := [*found.missing_keys, *found.unexpected_keys]:
            raise ValueError(f"not of {name}: {few(wrong)}")
    return network.eval()


@torch.no_grad()
def look_at_images(network: nn.Module, files: Sequence[str]) -> tuple[list[Input], dict[str, ContrastMaps]]:
    """Image files as the network sees them, each with the class that it is taken for; and the maps by block.

    Raises:
        ValueError: a file that is no image.
    """
    data = resolve_data_config({}, model=network)
    transform = create_transform(**data, is_training=False)
    seen = []
    for file in files:
        with reading(file):
            seen.append(transform(Image.open(file).convert("RGB")))
    x = torch.stack(seen)  # (N, 3, H, W), normalised
    names, maps = layer_names(network), dict[str, ContrastMaps]()

    def see(layer: VisualContrastAttention, tokens: Tensor, grid_size: Grid) -> None:
        maps[names[layer]] = contrast_maps(layer, tokens, grid_size)

    with watching(network, see):
        classes = network(x.to(next(network.parameters()).device)).argmax(1).tolist()
    mean, std = (torch.tensor(data[key]).reshape(1, -1, 1, 1) for key in ("mean", "std"))
    pictures = (x * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    inputs = []
    for file, picture, label in zip(files, pictures, classes, strict=True):
        stem = shorten(Path(file).stem, 16, placeholder="...")
        inputs.append(Input(f"{stem}\nclass {label}", picture, picture))
    return inputs, maps
