"""What a run folder or a weights file holds, for `python -m vcagen inspect`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vcagen.networks.weights import architecture, few, find_weights, read_weights
from vcagen.system.run_folder import list_checkpoints


def describe(path: str | Path) -> dict[str, Any]:
    """What a weights file or a run folder holds, as a JSON object.

    Raises:
        ValueError: neither a run folder nor a weights file.
    """
    path = Path(path)
    if path.is_dir():
        checkpoints = list_checkpoints(path)
        file = find_weights(path)
        names = sorted(file.name.removesuffix(".safetensors") for file in file.parent.glob("ema_*.safetensors"))
        return {
            **describe(file),
            "path": str(path),
            "kind": "run",
            "checkpoints": list(checkpoints),
            "weights": ["raw", *names],
        }
    weights = read_weights(path)
    kind = "vcagen weights" if weights.metadata else ("public training file" if weights.args else "weights")
    description: dict[str, Any] = {
        "path": str(path),
        "kind": kind,
        "weights": [weights.name],
        "parameters": sum(value.numel() for value in weights.state_dict.values()),
        "dtypes": sorted({str(value.dtype).removeprefix("torch.") for value in weights.state_dict.values()}),
    }
    if weights.metadata is None:
        if weights.args is not None:
            description["args"] = {str(key): value if isinstance(value, int | float | str) else str(value)
                                   for key, value in weights.args.items()}  # fmt: skip
        try:
            return {**description, "architecture": architecture(weights.state_dict)}
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    config, data = weights.metadata["config"], weights.metadata["data"]
    return {
        **description,
        "step": weights.metadata["step"],
        "ema_decay": weights.metadata["ema_decay"],
        **{key: config[key] for key in ("seed", "model", "process", "vae") if key in config},
        "data": data,
    }


def table(description: dict[str, Any]) -> str:
    """A description as lines of name and value; long lists are cut."""
    lines = list(_flatten(description))
    width = max(len(key) for key, _ in lines) + 2
    return "\n".join(f"{key:<{width}}{value}" for key, value in lines)


def _flatten(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flatten(item, f"{before}{key}.")
        elif isinstance(item, list | tuple):
            yield before + key, f"{few(list(item), 10)} ({len(item)})" if len(item) > 10 else ", ".join(map(str, item))
        else:
            yield before + key, str(item)
