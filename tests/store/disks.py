"""Disks that fail, processes that stop, and power that goes, at any call that the store makes."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from safetensors import SafetensorError

#: The calls by which the store changes a disk; writing a fragment's tensors is one of them.
CALLS = ("write", "fsync", "fdatasync", "rename", "unlink", "ftruncate", "mkdir")


class Stopped(BaseException):
    """The process is dead: nothing that it does has an effect any more."""


class Disk:
    """Passes on the calls of the store, and counts, fails or watches them.

    Attributes:
        calls: the names of the calls so far.
        at: the call that fails, counted from 0; none when negative.
        error: the errno that it fails with, once; 0 stops the process in the middle of it.
    """

    def __init__(self, at: int = -1, error: int = 0) -> None:
        self.calls: list[str] = []
        self.at = at
        self.error = error
        self._real = {name: getattr(os, name) for name in CALLS}
        # Nobody cuts the power here: a sync that does nothing only makes the test fast.
        self._real |= {"fsync": lambda fd: None, "fdatasync": lambda fd: None}
        self._save = safetensors.torch.save_file

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self._wrapped(name))
            patch.setattr(safetensors.torch, "save_file", self._saved)
            yield

    def _wrapped(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._fails(name):
                if name == "write" and len(args[1]) > 1:
                    self._real["write"](args[0], bytes(args[1])[: len(args[1]) // 2])
                self._fail(OSError(self.error, os.strerror(self.error)))
            result = self._real[name](*args, **kwargs)
            self.done(name, *args)
            return result

        return call

    def _saved(self, tensors: Any, path: Path, metadata: Any) -> None:
        fails = self._fails("save")
        self._save(tensors, path, metadata=metadata)
        if fails:
            path.write_bytes(path.read_bytes()[:-7])
            text = f"I/O error: {os.strerror(self.error)} (os error {self.error})"
            self._fail(SafetensorError(text))
        self.done("save")

    def _fails(self, name: str) -> bool:
        index = len(self.calls)
        self.calls.append(name)
        if self.at >= 0 and index > self.at and not self.error:
            raise Stopped
        return index == self.at

    def _fail(self, error: Exception) -> None:
        if not self.error:
            raise Stopped
        raise error

    def done(self, name: str, *args: Any) -> None:
        """A call was carried out."""


class ShadowDisk(Disk):
    """Knows what is durable, and makes the images that a power cut after each call may leave.

    A file's bytes are durable as of its last sync, a folder's names as of the sync of the folder.
    Whatever is not synced may be on the disk or not, each file and folder by itself.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root
        self._bytes: dict[int, bytes] = {}
        self._names: dict[str, dict[str, int | None]] = {}
        self._kept_open: list[int] = []  # so that no inode number is used twice

    def close(self) -> None:
        for fd in self._kept_open:
            os.close(fd)

    def done(self, name: str, *args: Any) -> None:
        if name not in ("fsync", "fdatasync"):
            return
        path = Path(os.readlink(f"/proc/self/fd/{args[0]}"))
        if path.is_dir():
            self._names[str(path)] = _names(path)
        else:
            self._kept_open.append(os.dup(args[0]))
            self._bytes[os.fstat(args[0]).st_ino] = path.read_bytes()

    def image(self, to: Path, rng: random.Random | None) -> None:
        """A disk after a power cut now; without `rng`, one that lost all that may be lost."""
        current = {path.stat().st_ino: path for path in self._root.rglob("*") if path.is_file()}
        self._copy(self._root, to, current, rng)

    def _copy(
        self, folder: Path, to: Path, current: dict[int, Path], rng: random.Random | None
    ) -> None:
        names = dict(self._names.get(str(folder), {}))
        if rng and folder.is_dir():
            now = _names(folder)
            for name in sorted(names.keys() | now.keys()):
                if names.get(name) != now.get(name) and rng.random() < 0.5:
                    names.pop(name, None)
                    if name in now:
                        names[name] = now[name]
        to.mkdir()
        for name, inode in names.items():
            if inode is None:
                self._copy(folder / name, to / name, current, rng)
                continue
            data = self._bytes.get(inode, b"")
            if rng and inode in current and rng.random() < 0.7:
                latest = current[inode].read_bytes()
                data = latest[: rng.choice((len(latest), rng.randrange(len(latest) + 1)))]
                if len(data) < len(self._bytes.get(inode, b"")):
                    data = self._bytes[inode]
            (to / name).write_bytes(data)


def _names(folder: Path) -> dict[str, int | None]:
    return {path.name: None if path.is_dir() else path.stat().st_ino for path in folder.iterdir()}
