"""Syncers as processes of their own that start at once, so that many lives fit into one test.

A nursery is a process that has imported everything and waits; every syncer is a fork of it, which
runs the command line from there on. As a program: reads commands from standard input.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.end_to_end.processes import ROOT
from tests.waiting import until


class Nursery:
    """The process that is forked. For one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, **command: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, bind: str, *flags: str, strace: Sequence[str] = ()) -> Syncer:
        """A new syncer. `strace`: what is done to its system calls, from the first one on."""
        self._count += 1
        log = self._folder / f"syncer-{self._count}.log"
        log.touch()
        arguments = ["syncer", "--bind", bind, *flags]
        pid = self.ask(do="start", arguments=arguments, log=str(log), traced=bool(strace))
        return Syncer(self, pid, log, strace)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


class Syncer:
    """One life of a syncer."""

    def __init__(self, nursery: Nursery, pid: int, log: Path, strace: Sequence[str]) -> None:
        self.pid = pid
        self._nursery = nursery
        self._log = log
        self._code: int | None = None
        self._tracer: subprocess.Popen[bytes] | None = None
        if strace:
            command = ["strace", "-f", "-qq", "-o", "/dev/null", *strace, "-p", str(pid)]
            self._tracer = subprocess.Popen(command)

    @property
    def err(self) -> str:
        """What it has said."""
        return self._log.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self._code is None:
            self._code = self._nursery.ask(do="poll", pid=self.pid)
        return self._code

    def ready(self, seconds: float = 60) -> Syncer:
        """Wait until it listens."""

        def look() -> bool:
            assert self.code is None, f"it has ended: {self.err}"
            return re.search(r"learners join at (\S+)", self.err) is not None

        until(look, seconds, "the syncer listens")
        return self

    def send(self, number: signal.Signals) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()

    def wait(self, seconds: float = 60) -> int:
        """The exit code, once it has ended."""
        until(lambda: self.code is not None, seconds, f"it ends: {self.err}")
        assert self._code is not None
        return self._code

    def __enter__(self) -> Syncer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._tracer is not None:
            self._tracer.wait(20)


def serve() -> int:
    """The nursery's own process; returns in its forks, too."""
    # The first optimizer that is made imports it: half the time of a start.
    import torch._dynamo  # noqa: F401

    import diloco_plugin.syncer  # noqa: F401
    from diloco_plugin import advice, cli  # noqa: F401

    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "start":
            pid = os.fork()
            if pid == 0:
                _become(command["log"])
                while command["traced"] and _tracer() == 0:
                    time.sleep(0.001)
                return cli.main(command["arguments"])
            answer: int | None = pid
        else:
            found, status = os.waitpid(command["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if found else None
        print(json.dumps(answer), flush=True)
    return 0


def _become(log: str) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for own, new in ((0, null), (1, out), (2, out)):
        os.dup2(new, own)
    os.closerange(3, 64)


def _tracer() -> int:
    found = re.search(r"TracerPid:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) if found else 0


if __name__ == "__main__":
    sys.exit(serve())
