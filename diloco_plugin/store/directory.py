"""The state directory as a whole: who uses it, and where its damaged files are put."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from diloco_plugin.errors import ConfigError, DiLoCoError, StateLockedError, disk_trouble
from diloco_plugin.store import files
from diloco_plugin.store.formats import LOCK


def lock_directory(directory: Path) -> int:
    """A descriptor that holds the lock of `directory`, which is made if it is not there.

    Raises:
        StateLockedError: another process holds it.
        ConfigError: the directory cannot be used.
        NoRoomError, StoreError: the disk is full, or fails.
    """
    path = directory / LOCK
    try:
        if not directory.is_dir():
            directory.mkdir(mode=0o700, parents=True)
            files.sync_folder(directory.parent)
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(directory, error, "used", "another") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode(errors="replace") or "unknown"
        os.close(lock)
        raise StateLockedError(
            f"state: {directory} is in use by process {holder}. Stop it, or use another directory."
        ) from None
    except OSError as error:
        os.close(lock)
        raise _unusable(directory, error, "locked", "a file system with locks") from error
    except BaseException:
        os.close(lock)
        raise
    return lock


def _unusable(directory: Path, error: OSError, what: str, instead: str) -> DiLoCoError:
    text = f"state: {directory} cannot be {what}"
    return disk_trouble(error, text) or ConfigError(f"{text} ({error}). Use {instead}.")


def evidence_folder(root: Path) -> Path:
    """A new folder for damaged files, named by the time of day in UTC."""
    name = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    files.make_folder(root / "evidence")
    taken = len(list((root / "evidence").glob(name + "*")))
    folder = root / "evidence" / (f"{name}-{taken}" if taken else name)
    files.make_folder(folder)
    return folder
