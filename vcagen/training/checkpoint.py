"""Checkpoints of a training: everything that the next step depends on, in safetensors and JSON."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vcagen.config.options import MUTABLE, Config, flat, may_change, plain
from vcagen.networks.weights import save_weights
from vcagen.system.files import atomic_file, atomic_folder, read_record, read_yaml, write_json
from vcagen.system.run_folder import checkpoint_folder, latest_checkpoint, list_checkpoints
from vcagen.training.ema import EMA


def check_same_run(run: Path, config: Config) -> None:
    """Check that the configuration is that of the run, where one has been started and saved there.

    Raises:
        ValueError: fields of the existing run that differ and may not, one by one; a damaged config.yaml.
    """
    path = run / "config.yaml"
    if latest_checkpoint(run) is not None:
        theirs = read_yaml(path)
        if not isinstance(theirs, dict):
            raise ValueError(f"{path}: damaged: not a configuration")
        theirs, ours = flat(theirs), flat(plain(config))
        differences = [
            f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} here"
            for key in {**theirs, **ours}
            if key != "run_dir" and not may_change(key) and theirs.get(key) != ours.get(key)
        ]
        if differences:
            raise ValueError(f"{run}: is another run; {'; '.join(differences)}; may change: {', '.join(MUTABLE)}")


def write_config(run: Path, config: Config) -> None:
    """Write config.yaml into the run folder."""
    with atomic_file(run / "config.yaml") as temporary:
        temporary.write_text(yaml.safe_dump(plain(config), sort_keys=False))


def save_checkpoint(
    run: Path,
    step: int,
    network: nn.Module,
    emas: list[EMA],
    optimizer: torch.optim.Optimizer,
    *,
    metadata: dict[str, Any],
    state: dict[str, Any],
    main: bool,
) -> None:
    """Write the checkpoint of a step whole or not at all. Every process calls it, the main one writes.

    Args:
        metadata: of the weights files; step and ema_decay are added.
        state: what else the run needs, JSON-able.
    """
    names = [name for name, _ in network.named_parameters()]
    raw = {name: _full(parameter, main) for name, parameter in network.named_parameters()}
    averaged = [{name: _full(a, main) for name, a in zip(names, ema.averages, strict=True)} for ema in emas]
    moments = {
        f"{name}.{key}": _full(value, main)
        for name, parameter in network.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    if not main:
        return
    with atomic_folder(checkpoint_folder(run, step)) as folder:
        save_weights(folder / "model.safetensors", raw, {**metadata, "step": step, "ema_decay": None})
        for ema, weights in zip(emas, averaged, strict=True):
            described = {**metadata, "step": step, "ema_decay": ema.decay}
            save_weights(folder / f"ema_{ema.decay}.safetensors", weights, described)
        save_weights(folder / "optimizer.safetensors", moments, {"format": 1})
        write_json(folder / "state.json", {"step": step, **state})
    newest = checkpoint_folder(run, step) / f"ema_{emas[0].decay}.safetensors"
    with atomic_file(run / "weights.safetensors", sync=False) as temporary:
        try:
            os.link(newest, temporary)
        except OSError:  # a file system without hard links
            shutil.copyfile(newest, temporary)


def read_state(folder: Path) -> dict[str, Any]:
    """state.json of a checkpoint.

    Raises:
        ValueError: a damaged file.
    """
    path = folder / "state.json"
    state = read_record(path)

    def check(part: dict[str, Any], kinds: dict[str, Any]) -> None:
        for key, kind in kinds.items():
            if key not in part or not isinstance(part[key], kind):
                raise ValueError(f"{path}: damaged: {key}: {part.get(key, 'missing')!r}")

    check(state, {"step": int, "num_items": int, "num_processes": int, "meter": dict, "scaler": dict | None})
    check(state["meter"], {"sums": dict, "images": int})
    check(state["meter"]["sums"], dict.fromkeys(state["meter"]["sums"], int | float))
    return state


MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of a parameter."""


def load_checkpoint(folder: Path, network: nn.Module, emas: list[EMA], optimizer: torch.optim.Optimizer) -> None:
    """Restore weights, averages and optimizer in place. Files are mapped, so a machine holds them once.

    Raises:
        ValueError: a damaged file, an average that the checkpoint does not have, or tensors that do not fit.
    """
    names = [name for name, _ in network.named_parameters()]
    _copy(folder / "model.safetensors", names, list(network.parameters()))
    for ema in emas:
        path = folder / f"ema_{ema.decay}.safetensors"
        if not path.exists():
            raise ValueError(f"train.ema_decays: {folder} has no average with decay {ema.decay}")
        _copy(path, names, ema.averages)
    # The groups (learning rate, ...) are those of the configuration, the moments those of the file.
    parameters = dict(network.named_parameters())
    with _opened(folder / "optimizer.safetensors") as file:
        names = file.keys()
        owners = {name.rpartition(".")[0] for name in names}
        _check_names(names, [f"{owner}.{key}" for owner in owners & parameters.keys() or parameters for key in MOMENTS])
        for name in names:
            owner, _, key = name.rpartition(".")
            parameter = parameters[owner]
            optimizer.state[parameter][key] = _read(file, name, parameter, scalar=key == "step").clone()


def prune_checkpoints(run: Path, *, keep_last: int, keep_every: int) -> None:
    """Delete all checkpoints but the newest and those at multiples of `keep_every` (0: none)."""
    checkpoints = list_checkpoints(run)
    for step in list(checkpoints)[: -max(keep_last, 1)]:
        if keep_every and step % keep_every == 0:
            continue
        # Renamed first: a deletion that is cut short must not leave something that looks complete.
        doomed = checkpoints[step].with_name(f".{checkpoints[step].name}.0.tmp")
        shutil.rmtree(doomed, ignore_errors=True)
        checkpoints[step].rename(doomed)
        shutil.rmtree(doomed)


LEFTOVERS = (
    ".config.yaml.[0-9]*.tmp",
    ".metrics.jsonl.[0-9]*.tmp",
    ".weights.safetensors.[0-9]*.tmp",
    "checkpoints/.step_[0-9]*.tmp",
    "previews/.step_[0-9]*.tmp",
)
"""What `atomic_file` and `atomic_folder` call the files of a training while they are written."""


def remove_leftovers(run: Path) -> None:
    """Delete what a training that was killed left half-written."""
    for path in [path for pattern in LEFTOVERS for path in run.glob(pattern)]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _full(tensor: Tensor, keep: bool) -> Tensor:
    """The whole tensor on the CPU, where it is to be kept; all processes take part where it is sharded."""
    tensor = tensor.detach()
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.cpu() if keep else torch.empty(0)


@torch.no_grad()
def _copy(path: Path, names: list[str], targets: list[Tensor]) -> None:
    with _opened(path) as file:
        _check_names(file.keys(), names)
        for name, target in zip(names, targets, strict=True):
            target.copy_(_read(file, name, target))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file; what is wrong with it is told with its path."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path}: damaged: {error}") from error


def _check_names(found: Iterable[str], wanted: Iterable[str]) -> None:
    if wrong := set(found) ^ set(wanted):
        raise ValueError(f"{', '.join(sorted(wrong)[:3])} missing or too many")


def _read(file: Any, name: str, like: Tensor, *, scalar: bool = False) -> Tensor:
    value, shape = file.get_tensor(name), () if scalar else tuple(like.shape)
    if value.shape != shape:
        raise ValueError(f"{name}: shape {tuple(value.shape)}; needs {shape}")
    return _placed(value, like)


def _placed(value: Tensor, like: Tensor) -> Tensor:
    """On the device of `like`, and sharded as it is; the step counter of the optimizer is a scalar and is not."""
    value = value.to(like.device)
    if isinstance(like, DTensor) and value.ndim == like.ndim:
        return distribute_tensor(value, like.device_mesh, like.placements)
    return value
