"""Whole files that are either there or not: temporary file, sync, rename, sync of the folder.

Every step goes through ``os``, one call a line: their order is what makes a file durable.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from safetensors import SafetensorError

from diloco_plugin.errors import FULL, StoreError

#: A file of this name is not finished: nothing refers to it.
TEMPORARY: Final = ".tmp"


def is_full(error: BaseException) -> bool:
    """Says whether `error` means that there is no room, also when it comes from safetensors."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in FULL
    found = re.search(r"\(os error (\d+)\)", str(error))
    return isinstance(error, OSError | SafetensorError) and bool(found and int(found[1]) in FULL)


def temporary(path: Path) -> Path:
    """Where the bytes of `path` are until they are all there."""
    return path.with_name(path.name + TEMPORARY)


def prepare(path: Path, data: bytes) -> None:
    """Writes `data` to the temporary file of `path`, durably."""
    flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC
    fd = os.open(temporary(path), flags, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_temporary(path: Path) -> None:
    """Makes the bytes of the temporary file of `path` durable, whoever wrote them."""
    fd = os.open(temporary(path), os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish(path: Path) -> None:
    """Gives the temporary file of `path` its name, durably."""
    os.rename(temporary(path), path)
    sync_folder(path.parent)


def replace(path: Path, data: bytes) -> None:
    """`path` holds `data`, durably; a crash leaves what was there before."""
    prepare(path, data)
    publish(path)


def make_folder(path: Path) -> None:
    """`path` is a folder, durably."""
    if not path.is_dir():
        os.mkdir(path, 0o700)
        sync_folder(path.parent)


def remove(path: Path) -> None:
    """`path` is not there; a crash may bring it back."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def sync_folder(path: Path) -> None:
    """The names in the folder are durable.

    Raises:
        StoreError: they may not be, whatever the cause: no second sync would tell.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        raise StoreError(
            f"{path}: the folder could not be synced ({error}), so what is on disk is unsure."
            " Start again when the disk works."
        ) from error
    finally:
        os.close(fd)
