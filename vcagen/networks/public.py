"""What a weights file of others is: its shapes, its arguments and its name, which must agree wherever they speak.

The conventions are those of the public DiT and SiT code (facebookresearch/DiT, willisma/SiT): both have twice the
output channels, so the shapes alone do not tell one from the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vcagen.config.options import ModelConfig
from vcagen.networks.dit import DIT_SIZES
from vcagen.networks.weights import Weights, architecture
from vcagen.system.files import reading

VAES = {name: f"stabilityai/sd-vae-ft-{name}" for name in ("ema", "mse")}
"""The public scripts' argument `vae`, and what it stands for."""
KINDS = {"dit": "diffusion", "sit": "flow"}
PREDICTIONS = {"velocity": "flow", "v": "flow", "noise": "diffusion", "epsilon": "diffusion", "eps": "diffusion"}
"""Predictions that are sampled, and the process they belong to."""
FIXED: dict[str, object] = {
    "path_type": "linear", "noise_schedule": "linear", "predict_xstart": False, "predict_v": False,
    "rescale_timesteps": False, "qk_norm": False, "use_qknorm": False, "use_rope": False, "use_swiglu": False,
    "activation_fn": "gelu-approximate", "norm_type": "ada_norm_zero", "beta_start": 0.0001, "beta_end": 0.02,
}  # fmt: skip
"""Arguments that change the network or its process beyond what its shapes tell, with the one value that is read."""

COUNTS = ("num_heads", "num_classes", "input_size", "image_size", "diffusion_steps")


@dataclass(frozen=True)
class PublicNetwork:
    """A DiT or SiT of others."""

    process: str
    """diffusion or flow."""
    told_by: str
    """What tells the process."""
    hidden_size: int
    depth: int
    num_heads: int | None
    """Where the width is that of a named size, or the arguments tell."""
    patch_size: int
    mlp_ratio: float
    in_channels: int
    num_classes: int
    has_null_label: bool
    grid: int | None
    """Tokens a side, where the position table is stored."""
    image_size: int | None
    """Pixels a side, where the arguments tell, or else the name, such as DiT-XL-2-512x512."""
    num_timesteps: int
    """Of a diffusion."""
    vae: str | None
    """The VAE, where one came with the weights or the arguments name one."""
    class_names: tuple[str, ...]
    """Where they came with the weights."""

    def model(self) -> ModelConfig:
        """The model section that builds it; the named size of its width, or S with another width."""
        name = _named_size(self.hidden_size)
        return ModelConfig(
            size=f"{name or 'S'}/{self.patch_size}", hidden_size=None if name else self.hidden_size, depth=self.depth,
            num_heads=self.num_heads, mlp_ratio=self.mlp_ratio,
            class_dropout_prob=ModelConfig.class_dropout_prob if self.has_null_label else 0.0,
        )  # fmt: skip


def identify(
    path: str | Path, weights: Weights, process: str | None = None, *, over_names: bool = True
) -> PublicNetwork:
    """What the weights in the file at `path` are.

    Args:
        process: diffusion or flow, where the file does not tell.
        over_names: `process` counts more than the names of the file and of its model.

    Raises:
        ValueError: shapes of no DiT or SiT, statements that do not agree, or a process that cannot be told.
    """
    path, args = Path(path), {name: value for name, value in weights.args.items() if value is not None}
    with reading(path):
        found = architecture(weights.state_dict)
        strange = [name for name, value in FIXED.items() if _plain(args.get(name, value)) != value]
        if "path_type" in strange or _plain(args.get("prediction", "v")) not in PREDICTIONS:
            strange += ["prediction"]
        if strange:
            shown = [f"{name} {args[name]}" for name in strange if name in args]
            raise ValueError(f"was trained with {', '.join(shown)}, which is not sampled here")
        model, size = _model(args)
        for name in COUNTS:
            if name in args and not (type(args[name]) is int and 0 < args[name] < 10**6):
                raise ValueError(f"its arguments say {name} {args[name]!r}")
        if "input_size" in args:
            args["grid"] = args["input_size"] // found["patch_size"]
        for name, value in {**size, **args}.items():
            if name in found and value != found[name]:
                raise ValueError(f"its arguments say {name} {value}, its shapes say {found[name]}")
        width = int(found["hidden_size"])
        heads = DIT_SIZES.get(_named_size(width) or "", {}).get("num_heads")
        if "num_heads" in size and args.get("num_heads", heads) != heads:
            raise ValueError(f"its arguments say model {model} and num_heads {args['num_heads']}")
        num_classes, has_null_label = _labels(args, int(found["num_labels"]))
        image_size = re.search(r"(\d+)x\1(?!\d)", path.name)
        network = PublicNetwork(
            process="", told_by="", hidden_size=width, depth=int(found["depth"]),
            num_heads=args.get("num_heads", heads), patch_size=int(found["patch_size"]), mlp_ratio=found["mlp_ratio"],
            in_channels=int(found["in_channels"]), num_classes=num_classes, has_null_label=has_null_label,
            grid=int(found["grid"]) if "grid" in found else args.get("grid"),
            image_size=args.get("image_size", int(image_size[1]) if image_size else None),
            class_names=weights.class_names,
            num_timesteps=args.get("diffusion_steps", 1000),
            vae=weights.vae or VAES.get(str(args.get("vae"))),
        )  # fmt: skip
    names = _names(path, model, args) if process is None or not over_names else {}
    chosen, told_by = _process(path, {**_facts(path, args, found), **names}, process)
    return replace(network, process=chosen, told_by=told_by)


def _plain(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _named_size(width: int) -> str | None:
    return next((name for name, sizes in DIT_SIZES.items() if sizes["hidden_size"] == width), None)


def _model(args: dict[str, Any]) -> tuple[str, dict[str, int]]:
    """The argument `model`, such as DiT-XL/2, and the sizes it stands for.

    Raises:
        ValueError: the name of another network.
    """
    model = args.get("model")
    if not isinstance(model, str):
        return "", {}
    match = re.fullmatch(r"(DiT|SiT)-(\w+)/(\d+)", model)
    if match is None or match[2] not in DIT_SIZES:
        raise ValueError(f"its arguments say model {model}; a DiT or SiT is needed")
    return model, {**DIT_SIZES[match[2]], "patch_size": int(match[3])}


def _labels(args: dict[str, Any], rows: int) -> tuple[int, bool]:
    """The number of classes, and whether the last row of the label table is the null label.

    Raises:
        ValueError: arguments that do not fit the table.
    """
    dropout = args.get("class_dropout_prob")
    num_classes = args.get("num_classes", rows if dropout == 0 else rows - 1)
    has_null_label = num_classes == rows - 1
    if num_classes not in (rows, rows - 1) or (dropout is not None and has_null_label != (dropout > 0)):
        said = ", ".join(f"{name} {args[name]}" for name in ("num_classes", "class_dropout_prob") if name in args)
        raise ValueError(f"its arguments say {said}, its label table has {rows} rows")
    return num_classes, has_null_label


def _facts(path: Path, args: dict[str, Any], found: dict[str, int | float]) -> dict[str, str]:
    """What the arguments and the shapes tell of the process: statement -> process.

    Raises:
        ValueError: arguments and shapes that do not agree.
    """
    channels, outputs = int(found["in_channels"]), int(found["out_channels"])
    if "learn_sigma" in args and bool(args["learn_sigma"]) != (outputs == 2 * channels):
        said = f"its arguments say learn_sigma {args['learn_sigma']}"
        raise ValueError(f"{path}: {said}, its shapes say {outputs} output channels for {channels}")
    facts = {}
    for name in ("path_type", "prediction", "noise_schedule", "diffusion_steps"):
        if name in args:
            process = {"path_type": "flow", "prediction": PREDICTIONS.get(_plain(args[name]))}.get(name, "diffusion")
            facts[f"{name} {args[name]}"] = process or ""
    if outputs == channels:
        facts[f"{outputs} output channels without a learned variance"] = "flow"
    return facts


def _names(path: Path, model: str, args: dict[str, Any]) -> dict[str, str]:
    """What the names of the file and of its model tell of the process."""
    if "_class_name" in args:
        return {str(args["_class_name"]): "diffusion"}
    words = re.findall(r"(?<![a-z])(dit|sit)(?![a-z])", path.name.lower())
    told = {f"model {model}": KINDS[model[:3].lower()]} if model else {}
    return {**told, **{f"the {word} in its name": KINDS[word] for word in words}}


def _process(path: Path, told: dict[str, str], given: str | None) -> tuple[str, str]:
    """The process, and what tells it.

    Raises:
        ValueError: nothing tells, or not all that tell agree.
    """
    told = {**told, **({f"process {given}": given} if given else {})}
    if not told:
        raise ValueError(f"process: {path} does not tell whether it is DiT or SiT; give --process diffusion or flow")
    if len(set(told.values())) > 1:
        said = ", ".join(f"{what} ({process})" for what, process in told.items())
        way_out = "" if given else "; --process counts more than names"
        raise ValueError(f"process: {path} does not agree with itself: {said}{way_out}")
    told_by, process = next(iter(told.items()))
    return process, told_by
