"""What a run folder, a weights file or a folder of latents holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vcagen.config.job_options import InspectConfig
from vcagen.config.options import flatten
from vcagen.data.latents import LatentDataset
from vcagen.networks.public import identify
from vcagen.networks.source import open_source
from vcagen.networks.weights import Weights, architecture, find_weights
from vcagen.system.files import few, prefixing, reading, write_json
from vcagen.system.run_folder import list_checkpoints


def run(config: InspectConfig) -> None:
    """Print what is found as a table, or as JSON.

    Raises:
        ValueError: neither a run folder nor a weights file.
    """
    description = describe(config.path)
    print(json.dumps(description, indent=2) if config.json == "-" else table(description))
    if config.json not in (None, "-"):
        write_json(config.json, description)


def describe(path: str | Path) -> dict[str, Any]:
    """What a weights file, a run folder or a folder of latents holds, as a JSON object.

    Raises:
        ValueError: none of these, or tensors that are not those that were written.
    """
    if (Path(path) / "shards.json").is_file():
        return _describe_latents(Path(path))
    if list_checkpoints(path):
        file = find_weights(path)
        names = sorted(file.stem for file in file.parent.glob("ema_*.safetensors"))
        run = {"path": str(path), "kind": "run", "checkpoints": list(list_checkpoints(path))}
        return {**describe(file), **run, "weights": ["raw", *names]}
    source = open_source(path)
    path, weights = source.path, source.weights
    description: dict[str, Any] = {
        "path": str(path),
        "kind": _kind(weights),
        "weights": [weights.name],
        "parameters": sum(value.numel() for value in weights.state_dict.values()),
        "dtypes": sorted({str(value.dtype).removeprefix("torch.") for value in weights.state_dict.values()}),
    }
    with reading(path):
        if (metadata := weights.metadata) is not None:
            config = {key: metadata["config"][key] for key in ("seed", "model", "process", "vae")}
            return {**description, **config, **{key: metadata[key] for key in ("step", "ema_decay", "data")}}
    came_with = {"vae": weights.vae, "class_names": list(weights.class_names)}
    description |= {name: value for name, value in came_with.items() if value}
    if weights.args:
        description["args"] = {key: value if isinstance(value, int | float | str) else str(value)
                               for key, value in weights.args.items()}  # fmt: skip
    with prefixing(f"{path}: "):
        description["architecture"] = architecture(weights.state_dict)
    try:
        public = identify(path, weights)
        description["process"] = f"{public.process}, by {public.told_by}"
    except ValueError as error:  # what is there is still worth seeing
        description["process"] = f"not known ({error})"
    return description


def _kind(weights: Weights) -> str:
    if weights.metadata is not None:
        return "vcagen weights"
    if "_class_name" in weights.args:
        return "diffusers DiT"
    return "public training file" if weights.args else "weights"


def _describe_latents(path: Path) -> dict[str, Any]:
    """Of a folder of latent shards, after all of them have been read."""
    latents = LatentDataset(path)
    latents.verify()
    facts = {"items": len(latents), "dtype": str(latents.dtype).removeprefix("torch."), "std": latents.latent_std}
    return {"path": str(path), "kind": "latents", **facts, "data": latents.spec.to_dict()}


def table(description: dict[str, Any]) -> str:
    """A description as lines of name and value; long lists are cut."""
    lines = flatten(description)
    width = max(map(len, lines)) + 2
    return "\n".join(f"{key:<{width}}{_cell(value)}" for key, value in lines.items())


def _cell(value: Any) -> str:
    if not isinstance(value, list | tuple):
        return str(value)
    return f"{few(value, 10)} ({len(value)})" if len(value) > 10 else ", ".join(map(str, value))
