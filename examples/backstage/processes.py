"""Child processes that end with their parent, and whose last words can be read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final

_GRACE_SECONDS: Final = 5.0
_TAIL_LINES: Final = 20


class ChildFailedError(Exception):
    """A process ended with an error, or did not do in time what it was started for."""


class Child:
    """One process of a Python script, with a log that later lives under the same name append to."""

    def __init__(self, name: str, command: Iterable[object], folder: Path) -> None:
        self.name = name
        self.log = folder / "logs" / f"{name}.log"
        self.log.parent.mkdir(exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for us: we end them in order
            )

    @property
    def code(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """SIGKILL: no goodbye, no clean-up."""
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        """Ask it to end, if it runs."""
        if self.code is None:
            self._process.terminate()

    def end(self) -> None:
        """Wait a little for its end, then enforce it."""
        try:
            self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def check(self) -> None:
        """Raise `ChildFailedError` if it ended with an error that was not our SIGKILL."""
        if self.code not in (None, 0, -signal.SIGKILL):
            raise ChildFailedError(f"{self.name} ended with exit code {self.code}.\n{self.tail()}")

    def tail(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        text = "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:])
        return f"The end of {self.log}:\n{text or '    (empty)'}"


class Children:
    """All children; whatever happens, none of them outlives the block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._all: list[Child] = []

    def start(self, name: str, *command: object) -> Child:
        """Start a Python script as a child."""
        child = Child(name, command, self._folder)
        self._all.append(child)
        return child

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._all:
            child.terminate()
        for child in self._all:
            child.end()


def _environment() -> dict[str, str]:
    """Ours, without settings of some other run; one thread for each child."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DILOCO_")}
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
    }
