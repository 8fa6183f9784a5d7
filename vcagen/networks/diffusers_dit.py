"""diffusers' DiT (DiTTransformer2DModel), such as facebook/DiT-XL-2-256, as the public DiT code's network.

The weights are those of the public code under other names, with the same embedders once more in every block. diffusers
spaces the frequencies of the time by 127 where that code and ours have 128, so its outputs differ from the published
network's; ours do not.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vcagen.networks.weights import Weights, read_weights
from vcagen.system.files import few, prefixing, reading

STEM = "diffusion_pytorch_model"
"""What diffusers calls the weights of a network."""
CLASSES = ("DiTTransformer2DModel", "Transformer2DModel")
"""The second is what it was called in diffusers before 0.28."""
OUTSIDE = {
    "pos_embed.proj.": "x_embedder.proj.", "pos_embed.pos_embed": "pos_embed", "proj_out_2.": "final_layer.linear.",
    "proj_out_1.": "final_layer.adaLN_modulation.1.",
}  # fmt: skip
IN_EVERY_BLOCK = {
    "norm1.emb.timestep_embedder.linear_1.": "t_embedder.mlp.0.", "norm1.emb.class_embedder.": "y_embedder.",
    "norm1.emb.timestep_embedder.linear_2.": "t_embedder.mlp.2.",
}  # fmt: skip
OF_A_BLOCK = {
    "norm1.linear.": "adaLN_modulation.1.", "attn1.to_out.0.": "attn.proj.", "ff.net.0.proj.": "mlp.fc1.",
    "ff.net.2.": "mlp.fc2.",
}  # fmt: skip
ARGUMENTS = {
    "num_attention_heads": "num_heads", "num_layers": "depth", "in_channels": "in_channels", "patch_size": "patch_size",
    "out_channels": "out_channels",
    "sample_size": "input_size", "num_embeds_ada_norm": "num_classes", "activation_fn": "activation_fn",
    "norm_type": "norm_type", "_class_name": "_class_name",
    "beta_schedule": "noise_schedule", "beta_start": "beta_start", "beta_end": "beta_end",
    "num_train_timesteps": "diffusion_steps", "prediction_type": "prediction",
}  # fmt: skip
"""Entries of the network's and the scheduler's config, and what training scripts call the same."""


def is_diffusers(path: Path) -> bool:
    """Whether this is a folder as diffusers saves a pipeline or a network, or a weights file in one."""
    if path.is_dir():
        return any((path / name).is_file() for name in ("model_index.json", "config.json"))
    return path.name.startswith(STEM) and (path.parent / "config.json").is_file()


def read_diffusers(path: Path) -> tuple[list[Path], Weights]:
    """The files, and what is in them under our names, of a pipeline's folder, a network's, or a weights file in one.

    Raises:
        ValueError: another pipeline or network, a part that is missing, or blocks whose embedders differ.
    """
    whole = (path / "model_index.json").is_file()
    folder = path.parent if path.is_file() else path / "transformer" if whole else path
    pipeline = folder.parent
    index = _json(pipeline / "model_index.json") if (pipeline / "model_index.json").is_file() else {}
    if index and index.get("_class_name") != "DiTPipeline":
        raise ValueError(f"{pipeline}: a {index.get('_class_name')} of diffusers; a DiTPipeline is needed")
    config = _json(folder / "config.json")
    if config.get("_class_name") not in CLASSES:
        raise ValueError(f"{folder}: a {config.get('_class_name')}; diffusers' {CLASSES[0]} is needed")
    scheduler = _json(pipeline / "scheduler" / "scheduler_config.json") if index else {}
    if index and "beta_schedule" not in scheduler:
        raise ValueError(f"{pipeline}: a {scheduler.get('_class_name')}; a scheduler of linear betas is needed")
    files = [path] if path.is_file() else weight_files(folder)
    state = {name: value for file in files for name, value in read_weights(file).state_dict.items()}
    with prefixing(f"{files[0]}: "):
        ours = from_diffusers(state)
    values = {**scheduler, **config}
    args = {name: values[key] for key, name in ARGUMENTS.items() if key in values}
    if isinstance(width := values.get("attention_head_dim"), int) and isinstance(args.get("num_heads"), int):
        args["hidden_size"] = args["num_heads"] * width
    with reading(pipeline / "model_index.json"):
        names = {int(label): str(name) for label, name in index.get("id2label", {}).items()}
    complete = sorted(names) == list(range(len(names))) and len(names) == config.get("num_embeds_ada_norm")
    vae = pipeline / "vae"
    return files, Weights(
        ours, "diffusers weights", None, args, vae=str(vae) if index and vae.is_dir() else None,
        class_names=tuple(names[label] for label in sorted(names)) if complete else (),
    )  # fmt: skip


def weight_files(folder: Path) -> list[Path]:
    """The weights of a network's folder: one file, or those of its index.

    Raises:
        ValueError: there are none, or several variants.
    """
    for ending in ("safetensors", "bin"):
        if (index := folder / f"{STEM}.{ending}.index.json").is_file():
            with reading(index):
                return sorted({folder / name for name in _json(index)["weight_map"].values()})
        files = sorted(folder.glob(f"{STEM}*.{ending}"))
        if folder / f"{STEM}.{ending}" in files:
            return [folder / f"{STEM}.{ending}"]
        if len(files) > 1:
            raise ValueError(f"{folder}: {few([file.name for file in files])}; name one of the files")
        if files:
            return files
    raise ValueError(f"{folder}: no {STEM}.safetensors or .bin")


def from_diffusers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of diffusers' DiT under the names of the public DiT code.

    Raises:
        ValueError: other names, a part that is missing, or blocks whose embedders differ.
    """
    ours: dict[str, Tensor] = {}
    copies: dict[str, dict[str, str]] = defaultdict(dict)  # our name -> block -> theirs
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)  # our name -> q, k, v
    blocks = {match[1] for name in state if (match := re.match(r"transformer_blocks\.(\d+)\.", name))}
    for name, value in state.items():
        match = re.match(r"transformer_blocks\.(\d+)\.(.+)", name)
        block, rest = match.groups() if match else ("", name)
        if match and (found := _renamed(rest, IN_EVERY_BLOCK)):
            if not ours.setdefault(found, value).equal(value):
                other = next(iter(copies[found].values()))
                raise ValueError(f"{name} differs from {other}; a DiT has one of them for all blocks")
            copies[found][block] = name
        elif match and (qkv := re.fullmatch(r"attn1\.to_([qkv])\.(weight|bias)", rest)):
            parts[f"blocks.{block}.attn.qkv.{qkv[2]}"][qkv[1]] = value
        elif found := _renamed(rest, OF_A_BLOCK if match else OUTSIDE):
            ours[f"blocks.{block}.{found}" if match else found] = value
        else:
            raise ValueError(f"{name}: no part of diffusers' DiT")
    lacking = [f"{name} of block {block}" for name, there in copies.items() for block in sorted(blocks - there.keys())]
    lacking += [f"{letter} of {name}" for name, there in parts.items() for letter in "qkv" if letter not in there]
    if lacking:
        raise ValueError(f"missing: {few(lacking)}")
    return {**ours, **{name: torch.cat([there[q] for q in "qkv"]) for name, there in parts.items()}}


def _renamed(name: str, names: Mapping[str, str]) -> str | None:
    return next((ours + name[len(theirs) :] for theirs, ours in names.items() if name.startswith(theirs)), None)


def _json(path: Path) -> dict[str, Any]:
    with reading(path):
        values = json.loads(path.read_text())
        if not isinstance(values, dict):
            raise ValueError("not a record")
        return values
