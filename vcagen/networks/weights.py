"""Weights on disk: our runs and files, and the sets in files of others. Works on state dicts, never builds a network.

A checkpoint of a run is a folder `checkpoints/step_0000000/`, complete or absent, with `model.safetensors` (raw),
`ema_DECAY.safetensors` (one a decay), `optimizer.safetensors` and `state.json`. Weights of ours carry the metadata
{"format": 2, "config": ..., "data": ..., "step": ..., "ema_decay": ..., "sha256": ...}.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict

import torch
import yaml
from msgspec import Meta
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vcagen.system.files import atomic_file, few, parse_record, reading
from vcagen.system.pickles import read_pickle
from vcagen.system.run_folder import list_checkpoints

PREFIXES = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put in front of every name."""
AVERAGE = re.compile(r"(^|[^a-z])(ema|avg|averaged?|shadow)([^a-z]|$)")
"""In the name of a set of averaged weights: ema, model_ema, ema_state_dict and the like."""
RAW = ("model", "state_dict", "model_state_dict", "network", "net", "module", "weights")
"""Names of the network's own weights, where a file has other sets of tensors too."""
ARGUMENTS = ("args", "config", "hyper_parameters", "hparams")
"""Where training scripts keep their options; of their sections those in SECTIONS speak of the network."""
SECTIONS = ("model", "network", "params", "transport", "diffusion")


@dataclass(frozen=True)
class Weights:
    """Weights read from a file."""

    state_dict: dict[str, Tensor]
    name: str
    """Which set: raw or ema_DECAY of ours; of others the set's name in the file, or weights where it has no name."""
    metadata: Metadata | None = None
    """Our metadata; None for files of others."""
    args: dict[str, Any] = field(default_factory=dict)
    """What a file of others says about itself: the options that its training script stored beside the weights."""
    vae: str | None = None
    """The VAE that came with the weights."""
    class_names: tuple[str, ...] = ()
    """The class names that came with weights of others."""


# --- one file ---


class Metadata(TypedDict):
    """What weights of ours say about themselves."""

    format: int
    config: dict[str, Any]
    """`to_plain` of the training's Config."""
    data: dict[str, Any]
    """`DataSpec.to_dict`."""
    step: Annotated[int, Meta(ge=0)]
    ema_decay: float | None
    """None for the weights themselves."""


def save_weights(path: str | Path, state_dict: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write safetensors with `metadata`, atomically; the same weights and metadata give the same bytes."""
    tensors = {key: value.detach().cpu().contiguous() for key, value in state_dict.items()}
    # One key: safetensors writes several in no fixed order.
    text = json.dumps({**metadata, "sha256": tensors_sha256(tensors)}, sort_keys=True)
    with atomic_file(path) as temporary:
        save_file(tensors, temporary, metadata={"vcagen": text})


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors on the CPU, with their names, types and shapes."""

    def digest(name: str) -> bytes:
        tensor = tensors[name]
        found = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return found.digest()

    with ThreadPoolExecutor() as pool:
        return hashlib.sha256(b"".join(pool.map(digest, sorted(tensors)))).hexdigest()


def verified_tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped, so that a machine holds them once; those of ours as they were written.

    Raises:
        ValueError: a damaged file, or tensors that are not those that were written.
    """
    with reading(path), safe_open(path, framework="pt") as file:
        tensors = load_file(path)
        expected = json.loads((file.metadata() or {}).get("vcagen", "{}")).get("sha256")
        if expected is not None and tensors_sha256(tensors) != expected:
            raise ValueError("damaged: the tensors are not those that were written (SHA-256)")
        return tensors


def read_metadata(path: str | Path) -> Metadata | None:
    """Our metadata of a safetensors file without reading its tensors; None for a file of others.

    Raises:
        ValueError: not a safetensors file, or metadata that is not ours to read.
    """
    with reading(path), safe_open(path, framework="pt") as file:
        text = (file.metadata() or {}).get("vcagen")
        if text is None:
            return None
        if "config" not in parse_record(text, dict):
            raise ValueError("state of the optimizer; model.safetensors and ema_*.safetensors are the weights")
        metadata = parse_record(text, Metadata)
        metadata.pop("sha256", None)  # type: ignore[typeddict-item]  # of `verified_tensors`
        return metadata


def own_metadata(path: str | Path) -> Metadata:
    """As `read_metadata`, of a file that must be ours.

    Raises:
        ValueError: a damaged file, or one of others.
    """
    if (metadata := read_metadata(path)) is None:
        raise ValueError(f"{path}: damaged, or not written by vcagen")
    return metadata


def read_weights(path: str | Path, *, which: str = "ema") -> Weights:
    """Read a weights file on the CPU: safetensors, or a .pt file, which may not run any code.

    `module.` and `_orig_mod.` in front of all names are taken off. A file of others with several sets (`model` and
    `ema`, as the public training scripts write) gives the average for `which="ema"`, the weights beside it for "raw",
    or the set of that name.

    Raises:
        ValueError: not a weights file, or one that would run code, or one that does not tell which set is meant.
        OSError: the file cannot be opened.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path}: a folder; a weights file is needed (a run folder is given as --run_dir)")
    if _is_safetensors(path):
        metadata, state_dict = read_metadata(path), verified_tensors(path)
        name = _set_name(metadata)
        with safe_open(path, framework="pt") as file:
            stored = {} if metadata else file.metadata() or {}
        args = {key: _value(text) for key, text in stored.items() if key != "format"}
        return Weights(_strip(path, state_dict), name, metadata, args)
    content = read_pickle(path)
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path}: holds a {type(content).__name__}; a dict of tensors is needed")
    chosen = _choose_set(path, content, which)
    found = content if chosen is None else _state_dict(content[chosen]) or {}
    args = {key: value for place in ARGUMENTS for key, value in _arguments(content.get(place)).items()}
    return Weights(_strip(path, found), chosen or "weights", None, args)


def read_tensors(path: str | Path) -> Any:
    """All that a weights file of others holds, on the CPU: tensors by name, or whatever torch.save wrote.

    Raises:
        ValueError: not a weights file, or one that would run code.
        OSError: the file cannot be opened.
    """
    if not _is_safetensors(Path(path)):
        return read_pickle(path)
    return verified_tensors(path)


def _choose_set(path: Path, content: dict[Any, Any], which: str) -> str | None:
    """The key of the set of weights that is meant; None where the content itself is one."""
    sets = [key for key, value in content.items() if isinstance(key, str) and _state_dict(value)]
    averages = [key for key, value in content.items()
                if isinstance(key, str) and AVERAGE.search(key.lower()) and _holds_tensors(value)]  # fmt: skip
    if which in sets or not (sets or averages):
        return which if which in sets else None
    others = [key for key in sets if key not in averages]
    others = [key for key in RAW if key in others] or others
    candidates = averages if averages and which != "raw" else others
    if len(candidates) == 1 and candidates[0] in sets:
        return candidates[0]
    there = f"holds {', '.join({**dict.fromkeys(sets), **dict.fromkeys(averages)})}"
    if unread := [key for key in candidates if key not in sets]:
        raise ValueError(f"{path}: {there}; {unread[0]} is not a dict of tensors; --weights raw takes the others")
    if not candidates:
        raise ValueError(f"{path}: {there}, averaged weights only; raw weights were asked for")
    raise ValueError(f"{path}: {there}; name one of them by --weights")


def _state_dict(value: Any) -> dict[str, Tensor] | None:
    """The state dict that `value` is, or that lies in it under `module` or `state_dict`."""
    if not isinstance(value, dict) or not value:
        return None
    if all(isinstance(key, str) and isinstance(inner, Tensor) for key, inner in value.items()):
        return value
    inner = [_state_dict(value[key]) for key in ("module", "state_dict") if isinstance(value.get(key), dict)]
    return inner[0] if len(inner) == 1 else None


def _holds_tensors(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(inner, Tensor) or _holds_tensors(inner) for inner in values)


def _arguments(stored: Any) -> dict[str, Any]:
    """Stored options by name, sections that speak of the network included."""
    values = vars(stored) if isinstance(stored, argparse.Namespace) else stored if isinstance(stored, dict) else {}
    nested = [_arguments(values[key]) for key in SECTIONS if isinstance(values.get(key), dict | argparse.Namespace)]
    return {str(key): value for section in (*nested, values) for key, value in section.items()}


def _value(text: str) -> Any:
    """A value of safetensors metadata, which is always text."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _is_safetensors(path: Path) -> bool:
    """By content: eight bytes of length, then a JSON object."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _strip(path: Path, state_dict: dict[str, Any]) -> dict[str, Tensor]:
    wrong = [key for key, value in state_dict.items() if not (isinstance(key, str) and _is_weight(value))]
    if wrong or not state_dict:
        found = f"{few(wrong)} beside or instead of dense floating-point tensors" if wrong else "no tensors"
        raise ValueError(f"{path}: holds {found}; needs a state dict, or a dict with 'ema', 'model' or 'state_dict'")
    while prefix := next((p for p in PREFIXES if all(key.startswith(p) for key in state_dict)), None):
        state_dict = {key[len(prefix) :]: value for key, value in state_dict.items()}
    return state_dict


def _is_weight(value: Any) -> bool:
    """Whether this is a dense tensor of real floating-point numbers."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and value.is_floating_point()
        and not (value.is_nested or value.is_meta)
    )


def _set_name(metadata: Metadata | None) -> str:
    if metadata is None:
        return "weights"
    return "raw" if metadata["ema_decay"] is None else f"ema_{metadata['ema_decay']}"


# --- into a network ---


def load_into(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Load strictly, every name and every shape.

    Public SiT files have twice the output channels and use the first half: where the network has half the channels of
    the file, the first half of each patch position is kept, which is exact (rows of `final_layer.linear` are ordered
    (patch, patch, channel)).

    Raises:
        ValueError: missing or extra names, or shapes that differ, with the likely cause.
    """
    wanted = model.state_dict()
    state = dict(state_dict)
    if missing := [key for key in wanted if key not in state]:
        raise ValueError(f"weights: {few(missing)} missing{_likely(missing[0])}")
    if extra := [key for key in state if key not in wanted]:
        raise ValueError(f"weights: {few(extra)} not in the network{_likely(extra[0])}")
    patch = "x_embedder.proj.weight"
    for key in ("final_layer.linear.weight", "final_layer.linear.bias"):
        same_patch = key in wanted and wanted[patch].shape == state[patch].shape
        if same_patch and state[key].shape[:1] == (2 * wanted[key].shape[0],):
            positions = wanted[patch].shape[-1] ** 2
            halves = state[key].reshape(positions, 2, -1, *state[key].shape[1:])  # (p * p, half, channel, D)
            state[key] = halves[:, 0].flatten(0, 1)
    for key, value in wanted.items():
        if state[key].shape != value.shape:
            shapes = f"{tuple(state[key].shape)} in the file, {tuple(value.shape)} in the network"
            raise ValueError(f"weights: {key}: {shapes}{_likely(key)}")
    model.load_state_dict(state, strict=True)


CAUSES = {
    r"^y_embedder": "another number of classes, or with and without a null label",
    r"^pos_embed": "another image size or patch size",
    r"^x_embedder": "another patch size, width or number of latent channels",
    r"^final_layer\.linear": "another patch size or number of output channels",
    r"lambda[12]|(positive|negative)_embedding|norm[12]\.weight": "another attention, or other options of it",
    r"^blocks\.\d+": "another depth or width",
    r"": "another width, or not a DiT or SiT",
}


def _likely(key: str) -> str:
    return "; likely cause: " + next(cause for pattern, cause in CAUSES.items() if re.search(pattern, key))


def architecture(state_dict: Mapping[str, Tensor]) -> dict[str, int | float]:
    """What the shapes of a DiT state dict tell; the number of heads is not among it.

    Returns hidden_size, depth, patch_size, in_channels, out_channels, num_labels (with the null label), mlp_ratio, and
    grid (tokens a side) where the position table is stored.

    Raises:
        ValueError: not the names and shapes of a DiT.
    """
    try:
        width, in_channels, patch, _ = state_dict["x_embedder.proj.weight"].shape
        rows = state_dict["final_layer.linear.weight"].shape[0]
        found: dict[str, int | float] = {
            "hidden_size": width,
            "depth": 1 + max(int(key.split(".")[1]) for key in state_dict if key.startswith("blocks.")),
            "patch_size": patch,
            "in_channels": in_channels,
            "out_channels": rows // patch**2,
            "num_labels": state_dict["y_embedder.embedding_table.weight"].shape[0],
            "mlp_ratio": state_dict["blocks.0.mlp.fc1.weight"].shape[0] / width,
        }
        if "pos_embed" in state_dict:
            found["grid"] = round(state_dict["pos_embed"].shape[-2] ** 0.5)
        return found
    except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
        raise ValueError(f"weights: names or shapes that no DiT or SiT has ({error})") from None


# --- a run folder ---


def find_weights(run: str | Path, *, weights: str = "ema", step: int | None = None) -> Path:
    """The weights file of a run: `weights` is ema (the first decay of the configuration), ema_DECAY or raw.

    Raises:
        ValueError: no checkpoint, no such step, or no such weights, the message names those there are; or a checkpoint
            whose folder was renamed.
    """
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        raise ValueError(f"{run}: no checkpoints in it; a run folder of train.py is needed")
    step = max(checkpoints) if step is None else step
    if step not in checkpoints:
        raise ValueError(f"step: {run} has no checkpoint {step}; it has {few(list(checkpoints), 20)}")
    averages = {path.stem: path for path in sorted(checkpoints[step].glob("ema_*.safetensors"))}
    if weights == "ema" and averages:
        with reading(file := next(iter(averages.values()))):
            weights = f"ema_{own_metadata(file)['config']['train']['ema_decays'][0]}"
    files = {"raw": checkpoints[step] / "model.safetensors", **averages}
    if weights not in files:
        raise ValueError(f"weights: {checkpoints[step]} has no {weights}; it has {', '.join(files)}")
    if (metadata := read_metadata(files[weights])) is not None and metadata["step"] != step:
        raise ValueError(f"{files[weights]}: is of step {metadata['step']}; was the folder renamed?")
    return files[weights]


def export_weights(run: str | Path, out: str | Path, *, weights: str = "ema", step: int | None = None) -> Path:
    """Copy one set of weights of a run, with its metadata, to a file of its own; returns where it came from.

    Raises:
        ValueError: as `find_weights`, or `out` exists.
    """
    source = find_weights(run, weights=weights, step=step)
    if Path(out).exists():
        raise ValueError(f"out: {out} exists; choose another file")
    read = read_weights(source)
    save_weights(out, read.state_dict, read.metadata or {})
    return source
