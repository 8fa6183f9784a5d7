"""Files that torch.save wrote, read without running any code."""

from __future__ import annotations

import argparse
import re
import zipfile
from pathlib import Path
from typing import Any

import torch


def read_pickle(path: str | Path) -> Any:
    """Read tensors, plain containers and argparse.Namespace on the CPU; refuse anything else before it runs.

    Raises:
        ValueError: not such a file, or one that would run code.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            # Memory-mapped: the optimizer state beside the weights is never read.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a damaged file can fail anywhere in the unpickler
        if name := re.search(r"GLOBAL ([\w.]+)", str(error)):
            reason = f"it needs {name[1]}, which could run code; only tensors and plain values are read"
        elif inner := re.search(r"WeightsUnpickler error:\s*(.+)", str(error)):  # before it there is advice to run code
            reason = f"torch.save did not write it ({inner[1]})"
        else:
            reason = (str(error).splitlines() or [repr(error)])[0]
        raise ValueError(f"{path}: not a weights file: {reason}") from None
