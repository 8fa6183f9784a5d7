"""Checkpoints of a training: everything that the next step depends on, in safetensors and JSON."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from vcagen.config.command_line import from_mapping
from vcagen.config.options import MUTABLE, Config, flatten, may_change, to_plain
from vcagen.data.latents import DataSpec
from vcagen.networks.weights import own_metadata, save_weights, verified_tensors
from vcagen.system.files import FORMAT, atomic_folder, few, read_json, reading, write_json
from vcagen.system.run_folder import checkpoint_folder, latest_checkpoint, list_checkpoints
from vcagen.training.ema import EMA
from vcagen.training.metrics_log import Losses

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""Whole tensors on the CPU, to save those of the main process; each process reads the files for itself."""
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of a parameter."""


def check_same_run(run_dir: Path, config: Config) -> None:
    """Check that the configuration is that of the run, where one has been saved there.

    Raises:
        ValueError: fields that differ and may not, one by one; a checkpoint of an earlier version.
    """
    if (newest := latest_checkpoint(run_dir)) is None:
        return
    theirs, ours = (flatten(to_plain(one)) for one in (saved_config(newest), config))
    differences = [
        f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} here"
        for key in {**theirs, **ours}
        if key != "run_dir" and not may_change(key) and theirs.get(key) != ours.get(key)
    ]
    if differences:
        raise ValueError(f"{run_dir}: is another run; {'; '.join(differences)}; may change: {', '.join(MUTABLE)}")


def saved_config(checkpoint: Path) -> Config:
    """The configuration of a checkpoint; options that are newer than it have their defaults."""
    with reading(path := checkpoint / "model.safetensors"):
        return from_mapping(Config, own_metadata(path)["config"])


def check_same_data(run_dir: Path, data: DataSpec) -> None:
    """Raise ValueError where a run goes on with data of other classes, size or VAE than it was started with."""
    if (newest := latest_checkpoint(run_dir)) is None:
        return
    with reading(path := newest / "model.safetensors"):
        theirs = DataSpec.from_dict(own_metadata(path)["data"])
    if differences := data.differences(theirs):
        raise ValueError(f"data: not that of {newest}: {'; '.join(differences)}")


def save_checkpoint(
    run_dir: Path,
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
    with atomic_folder(checkpoint_folder(run_dir, step)) if main else nullcontext() as folder:

        def save(name: str, tensors: Mapping[str, Any], metadata: dict[str, Any]) -> None:
            if folder is not None:
                save_weights(folder / f"{name}.safetensors", tensors, metadata)

        weights = get_model_state_dict(network, options=WHOLE)
        save("model", weights, {**metadata, "step": step, "ema_decay": None})
        for ema in emas:
            with ema.applied(network.parameters()):
                weights = get_model_state_dict(network, options=WHOLE)
                save(f"ema_{ema.decay}", weights, {**metadata, "step": step, "ema_decay": ema.decay})
        moments: Any = get_optimizer_state_dict(network, optimizer, options=WHOLE).get("state", {})
        save("optimizer", flatten(moments), {"format": FORMAT})
        if folder is not None:
            write_json(folder / "state.json", {"format": FORMAT, "step": step, **state})


class State(TypedDict):
    """state.json of a checkpoint."""

    format: int
    step: int
    num_items: int
    num_processes: int
    losses: Losses
    scaler: dict[str, float] | None
    """Of fp16."""


def read_state(folder: Path) -> State:
    """state.json of a checkpoint.

    Raises:
        ValueError: a damaged file, or a folder that was renamed.
    """
    state = read_json(folder / "state.json", State)
    if folder != checkpoint_folder(folder.parent.parent, state["step"]):
        raise ValueError(f"{folder}: holds the checkpoint of step {state['step']}; was the folder renamed?")
    return state


def load_checkpoint(folder: Path, network: nn.Module, emas: list[EMA], optimizer: torch.optim.Optimizer) -> None:
    """Restore weights, averages and optimizer in place.

    Raises:
        ValueError: a damaged file, or tensors that do not fit.
    """
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    for ema in emas:
        with ema.applied(network.parameters()):
            set_model_state_dict(network, _read(folder / f"ema_{ema.decay}.safetensors", shapes), options=WHOLE)
    set_model_state_dict(network, _read(folder / "model.safetensors", shapes), options=WHOLE)

    trained = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    shapes = {f"{name}.{key}": () if key == "step" else shapes[name] for name in trained for key in MOMENTS}
    moments = _read(folder / "optimizer.safetensors", shapes)
    state = {name: {key: moments[f"{name}.{key}"] for key in MOMENTS} for name in trained}
    (group,) = optimizer.param_groups  # learning rate and all are those of the configuration
    whole: dict[str, Any] = {"state": state, "param_groups": [{**group, "params": trained}]}
    set_optimizer_state_dict(network, optimizer, whole, options=WHOLE)


def _read(path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The tensors of a safetensors file, which must be those."""
    with reading(path):
        tensors = verified_tensors(path)
        found = {name: tuple(value.shape) for name, value in tensors.items()}
        if wrong := [name for name in {**found, **shapes} if found.get(name) != shapes.get(name)]:
            raise ValueError(f"damaged: {few(wrong)}: missing, too many, or of another shape")
        return tensors


def prune_checkpoints(run_dir: Path, *, keep_last: int, keep_every: int) -> None:
    """Delete all checkpoints but the newest and those at multiples of `keep_every` (0: none)."""
    checkpoints = list_checkpoints(run_dir)
    for step in list(checkpoints)[:-keep_last]:
        if keep_every and step % keep_every == 0:
            continue
        # Renamed first: a deletion that is cut short must not leave something that looks complete.
        doomed = checkpoints[step].with_name(f".{checkpoints[step].name}.0.tmp")
        shutil.rmtree(doomed, ignore_errors=True)
        checkpoints[step].rename(doomed)
        shutil.rmtree(doomed)


def remove_leftovers(run_dir: Path) -> None:
    """Delete what a training that was killed left half-written, by the names that `atomic_file` gives."""
    for folder in (run_dir, run_dir / "checkpoints", run_dir / "previews"):
        for path in folder.glob(".*.[0-9]*.tmp"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
