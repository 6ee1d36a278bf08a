"""Keys of a syncer and of learners, in the folders where they would be on their machines."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diloco_plugin.net.keys import (
    DoorKeys,
    LineKeys,
    make_learner_keys,
    make_syncer_keys,
    read_door_keys,
    read_line_keys,
)
from diloco_plugin.net.options import Role, new_context
from diloco_plugin.net.sockets import Line


class Keyring:
    """`syncer` is the folder on the syncer's machine; `learner(name)` makes one for a learner."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.syncer = folder / "syncer"
        make_syncer_keys(self.syncer)

    @property
    def door(self) -> DoorKeys:
        return read_door_keys(self.syncer)

    def learner(self, name: str, *, admitted: bool = True) -> Path:
        """A folder with the learner's key; `admitted`: the syncer has its public key."""
        folder = self._folder / name
        make_learner_keys(folder, name)
        shutil.copy(self.syncer / "syncer.pub", folder)
        if admitted:
            self.admit(name)
        return folder

    def admit(self, name: str) -> None:
        shutil.copy(self._folder / name / "learners.d" / f"{name}.pub", self.syncer / "learners.d")

    def bar(self, name: str) -> None:
        (self.syncer / "learners.d" / f"{name}.pub").unlink()

    def line(self, name: str, *, admitted: bool = True) -> LineKeys:
        folder = self._folder / name
        return read_line_keys(
            folder if folder.exists() else self.learner(name, admitted=admitted), name
        )


@contextmanager
def line_to(address: str, keys: LineKeys, role: Role = "control") -> Iterator[Line]:
    """A line that is closed at the end, in a context of its own."""
    context = new_context()
    try:
        line = Line(context, address, role, keys)
        yield line
    finally:
        context.destroy(linger=0)
