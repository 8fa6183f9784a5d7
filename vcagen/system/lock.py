"""A lock on a folder that no killed process leaves behind."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO


class FolderLock:
    """Held by one process at a time, through the file `.lock` in a folder that may not exist yet.

    The lock is the process's own: gone when it is killed, and not held on by loader workers that outlive it (as that of
    the filelock package would be).
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".lock"
        self._file: IO[str] | None = None

    def take(self) -> bool:
        """Whether the lock is this process's now. On a file system without locks it always is."""
        if self._file is not None:
            return True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("a")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.close()
            return False
        except OSError:
            pass  # no locks there
        self._file = file
        return True

    def release(self) -> None:
        """Let others take it."""
        if self._file is not None:
            self._file.close()
            self._file = None
