"""Real processes, and a daemon that can be signalled and killed."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO

from tests.waiting import until

ROOT = Path(__file__).parents[2]


def free_ports() -> int:
    """A port on loopback that is free, and the one after it as well.

    Below those that the system gives to outgoing connections (32768 and up on Linux): such a port
    may be taken again before it is listened on, even by a learner that tries to reach it.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def here() -> str:
    """An address of this machine that others can reach, or a loopback one if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


class Process:
    """A Python process whose two streams go to files, so that it never blocks on them."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self._out: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._err: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(env or {})},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def out(self) -> str:
        return _all(self._out)

    @property
    def err(self) -> str:
        return _all(self._err)

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def prints(self, text: str, seconds: float = 30) -> None:
        """Wait until it has printed a text on standard output."""

        def look() -> bool:
            assert text in self.out or self.code is None, f"it has ended: {self.out} {self.err}"
            return text in self.out

        until(look, seconds, f"it prints {text!r}")

    def wait(self, seconds: float = 20) -> int:
        """The exit code, once it has ended."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end: {self.out} {self.err}") from None

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self._out.close()
        self._err.close()


class Daemon(Process):
    """`diloco syncer` as a process, ready to be joined once it is made."""

    def __init__(
        self, *flags: str, bind: str = "tcp://127.0.0.1:*", env: dict[str, str] | None = None
    ) -> None:
        super().__init__("-m", "diloco_plugin.cli", "syncer", "--bind", bind, *flags, env=env)

        def find() -> str:
            assert self.code is None, f"it has ended: {self.err}"
            found = re.search(r"learners join at (\S+)", self.err)
            return found[1] if found else ""

        try:
            self.address = until(find, 30, "the daemon listens")
        except BaseException:
            self.__exit__(None, None, None)
            raise


def _all(stream: IO[bytes]) -> str:
    return os.pread(stream.fileno(), 1 << 24, 0).decode(errors="replace")
