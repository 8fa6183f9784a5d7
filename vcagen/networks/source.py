"""Weights, wherever they are: a run folder, a file, a folder of diffusers, a repository of the Hub."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from vcagen.networks.diffusers_dit import is_diffusers, read_diffusers
from vcagen.networks.weights import Weights, find_weights, read_metadata, read_weights
from vcagen.system.files import few, sha256
from vcagen.system.hub import download, is_hub_name
from vcagen.system.run_folder import list_checkpoints

EXPORTED = Path("transformer", "diffusion_pytorch_model.safetensors")
"""The weights in a folder of `vcagen export --format hub`."""


@dataclass(frozen=True)
class Source:
    """Weights and where they lie."""

    path: Path
    """File, or folder of several."""
    files: list[Path]
    weights: Weights

    def sha256(self) -> str:
        """SHA-256 of the file; of several that of their SHA-256s."""
        digests = [sha256(file) for file in self.files]
        return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def open_source(source: str | Path, *, weights: str = "ema", step: int | None = None) -> Source:
    """Read the weights of a run folder, a file, a folder that diffusers reads, or a repository with one of these.

    Args:
        weights: ema, ema_DECAY or raw; of a file of others also the name of a set in it.
        step: checkpoint of a run. Default: the newest.

    Raises:
        ValueError: there are no weights, or not those.
        OSError: a file cannot be opened.
    """
    path = _downloaded(str(source)) if is_hub_name(source) else Path(source)
    if list_checkpoints(path):
        path = find_weights(path, weights=weights, step=step)
    elif step is not None:
        raise ValueError(f"step: {source} is no run folder; steps are of run folders")
    if _is_ours(path / EXPORTED):
        vae = path / "vae"
        path = path / EXPORTED
        return Source(path, [path], replace(read_weights(path), vae=str(vae) if vae.is_dir() else None))
    if is_diffusers(path) and not _is_ours(path):
        files, read = read_diffusers(path)
        return Source(path, files, read)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".safetensors", ".pt"))
        if len(files) != 1:
            found = few([file.name for file in files]) or "no weights"
            raise ValueError(f"{source}: {found}; a run folder of train.py, diffusers' DiT or one file is needed")
        path = files[0]
    return Source(path, [path], read_weights(path, which=weights))


def _is_ours(file: Path) -> bool:
    return file.suffix == ".safetensors" and file.is_file() and read_metadata(file) is not None


def _downloaded(name: str) -> Path:
    """The folder of a repository of the Hub; .bin and .pt files only where it has no safetensors."""
    folder = download(name, "*.json", "*.safetensors")
    if not any(any(part.glob("*.safetensors")) for part in (folder, folder / "transformer")):
        folder = download(name, "*.json", "*.bin", "*.pt")
    return folder
