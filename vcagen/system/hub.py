"""Repositories of the Hub: their files are here, or it is told at once why not."""

from __future__ import annotations

import re
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.pt|pth|bin)(?<!\.ckpt)(?<!\.safetensors)")


def is_hub_name(source: str | Path) -> bool:
    """Whether `source` is nothing on this machine and could be a repository user/name of the Hub."""
    return NAME.fullmatch(str(source)) is not None and not Path(source).exists()


def download(name: str, *patterns: str) -> Path:
    """The folder with those files of a repository whose names match; only what is missing is downloaded.

    Where the Hub cannot be reached, what has been downloaded before is taken, without waiting for the Hub to come back.

    Raises:
        ValueError: no such repository, or neither the Hub nor an earlier download.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # of the Hub, the network or the disk
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        line = next((line for line in lines if "Repository Not Found" in line), lines[0]).removeprefix("Got: ")
        raise ValueError(f"{name}: not on this machine; the Hub says: {line}") from error
