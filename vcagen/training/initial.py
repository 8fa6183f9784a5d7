"""The weights a training starts from: those of its seed, or those of `init`, made to fit."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vcagen.build import build_model
from vcagen.config.command_line import from_mapping
from vcagen.config.options import Config, ModelConfig, flatten, may_change
from vcagen.data.imagenet import public_class_names
from vcagen.data.latents import DataSpec
from vcagen.networks.dit import DiT, parse_size, sincos_positions
from vcagen.networks.public import KINDS, identify
from vcagen.networks.source import open_source
from vcagen.networks.weights import Weights, load_into
from vcagen.system.files import few, prefixing, reading
from vcagen.system.run_folder import latest_checkpoint
from vcagen.training.checkpoint import saved_config

TABLE = "y_embedder.embedding_table.weight"


@dataclass(frozen=True)
class Start:
    """Weights to start from, and what they were trained for."""

    path: Path
    weights: Weights
    model: ModelConfig
    class_names: Sequence[str]
    """() where they are not known."""
    num_classes: int
    num_heads: int | None
    """None where it is not known."""


def with_model_of_init(config: Config) -> Config:
    """The configuration with the model options of `init` where none were given on the command line or in its files.

    A run that goes on keeps its own: `init` may be gone by then. Options that may change are not taken over.

    Raises:
        ValueError: `init` cannot be read, or was trained for another process.
    """
    if config.init is None or config.given is None:
        return config
    newest = latest_checkpoint(config.run_dir)
    model = open_init(config.init, config).model if newest is None else saved_config(newest).model
    theirs, ours = flatten(asdict(model)), flatten(asdict(config.model))
    values: dict[str, Any] = {}
    for name, value in ours.items():
        section, _, option = name.rpartition(".")
        keep = f"model.{name}" in config.given or may_change(f"model.{name}")
        (values.setdefault(section, {}) if section else values)[option] = value if keep else theirs[name]
    with prefixing("model."):
        return replace(config, model=from_mapping(ModelConfig, values), given=None)


def open_init(source: str, config: Config) -> Start:
    """The weights that `init` names.

    Raises:
        ValueError: they cannot be read, or were trained for another process than that of `config`.
    """
    process = config.process.name
    with prefixing("init: "):
        opened = open_source(source)
        path, weights = opened.path, opened.weights
        if weights.metadata is not None:
            with reading(path):
                theirs = from_mapping(Config, weights.metadata["config"])
                names = weights.metadata["data"]["class_names"]
            if theirs.process.name != process:
                raise ValueError(f"{path}: was trained for {theirs.process.name}; process.name is {process}")
            return Start(path, weights, theirs.model, names, len(names), _num_heads(theirs.model))
        # A process of a plugin knows best what it can start from.
        public = identify(path, weights, process if process in KINDS.values() else "flow", over_names=False)
        names = public_class_names(public.class_names, public.num_classes)
        return Start(path, weights, public.model(), names, public.num_classes, public.num_heads)


def initial_network(config: Config, data: DataSpec) -> DiT:
    """The network with the initial weights of the seed, or with those of `init`.

    Of `init`, the rows of the label table are kept by class name, and a position table of another resolution is
    replaced, since it is fixed. Both are said on stderr.

    Raises:
        ValueError: weights that do not fit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = build_model(config.model, config.process, data)
    if config.init is None or latest_checkpoint(config.run_dir) is not None:
        return network
    start = open_init(config.init, config)
    state, new = dict(start.weights.state_dict), network.state_dict()
    if start.num_heads not in (None, heads := _num_heads(config.model)):
        raise ValueError(f"init: {start.path}: {start.num_heads} attention heads; model.num_heads is {heads}")
    notes = [f"starts from {start.weights.name} of {start.path}, {config.process.name}"]
    if TABLE in state and state[TABLE].shape[1:] == new[TABLE].shape[1:]:
        null = start.model.class_dropout_prob > 0 and network.null_label is not None
        kept = kept_labels(start, data.class_names, null=null)
        if list(kept.items()) != [(row, row) for row in range(max(len(new[TABLE]), len(state[TABLE])))]:
            names, added = [*data.class_names, "no class"], len(new[TABLE]) - len(kept)
            notes.append(f"label rows kept: {few([names[row] for row in kept]) or 'none'}; new: {added}")
        table = new[TABLE].clone()
        table[list(kept)] = state[TABLE][list(kept.values())].to(table.dtype)
        state[TABLE] = table
    old = state.setdefault("pos_embed", new["pos_embed"])
    if old.shape != new["pos_embed"].shape and _is_fixed(old):
        grid = " x ".join(map(str, network.grid_size))
        notes.append(f"its position table is for {old.shape[1]} tokens; it is rebuilt for {grid}")
        state["pos_embed"] = new["pos_embed"]
    with prefixing(f"init: {start.path}: "):
        load_into(network, state)
    if int(os.environ.get("RANK", "0")) == 0:
        for note in notes:
            print(f"init: {note}", file=sys.stderr)
    return network


def kept_labels(start: Start, ours: Sequence[str], *, null: bool) -> dict[int, int]:
    """Row of the new label table -> row of the old one that stands for the same class; `null`: both have a null label.

    Where the old names are not known, as many classes are taken for the same ones.
    """
    theirs = start.class_names
    if start.weights.metadata is None and not set(theirs) & set(ours):
        theirs = ours if len(ours) == start.num_classes else ()
    rows = {name: row for row, name in enumerate(theirs)}
    kept = {row: rows[name] for row, name in enumerate(ours) if name in rows}
    return {**kept, len(ours): start.num_classes} if null else kept


def _num_heads(model: ModelConfig) -> int:
    return model.num_heads or parse_size(model.size)["num_heads"]


def _is_fixed(table: Tensor) -> bool:
    """Whether a position table (1, T, D) is the one that is never trained, of a square image."""
    side = round(table.shape[-2] ** 0.5) if table.ndim == 3 else 0
    if table.ndim != 3 or side**2 != table.shape[1] or table.shape[2] % 4:
        return False
    fixed = sincos_positions((side, side), table.shape[2])
    return torch.allclose(table.float(), fixed, atol=0.01)  # bfloat16 rounds to 0.004
