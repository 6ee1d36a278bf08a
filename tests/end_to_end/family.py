"""Many processes for the price of one: the parent imports torch once, and forks.

`python -m tests.end_to_end.family FOLDER` runs every FOLDER/*.py in a child of its own, with its
streams in FOLDER/NAME.out and FOLDER/NAME.err, and writes exit codes to FOLDER/NAME.code. Children
run to the end of their script and leave as any interpreter does.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from types import TracebackType

from tests.end_to_end.processes import Process
from tests.waiting import until

#: What every script begins with: a model, an optimizer, and `step()`, one step of a plain loop.
PRELUDE = """
import sys, time
import torch
from torch import nn
import diloco_plugin

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def step():
    optimizer.zero_grad()
    x = torch.randn(16, 8)
    nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
    time.sleep(0.001)
"""


class Family:
    """Scripts of plain PyTorch, each in a process of its own."""

    def __init__(self, folder: Path, bodies: dict[str, str]) -> None:
        self._folder = folder
        self._names = {name: f"child{number}" for number, name in enumerate(bodies)}
        for name, body in bodies.items():
            (folder / f"{self._names[name]}.py").write_text(PRELUDE + body)
        self._parent = Process("-m", "tests.end_to_end.family", str(folder))

    def __enter__(self) -> Family:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._parent.__exit__(kind, error, trace)

    def _text(self, name: str, stream: str) -> str:
        path = self._folder / f"{self._names[name]}.{stream}"
        return path.read_text() if path.exists() else ""

    def out(self, name: str) -> str:
        """What a script has printed so far."""
        return self._text(name, "out")

    def err(self, name: str) -> str:
        """What a script and its interpreter have complained about so far."""
        return self._text(name, "err")

    def code(self, name: str) -> int | None:
        """The exit code, once it has ended; -9 for SIGKILL."""
        text = self._text(name, "code")
        return int(text) if text else None

    def pid(self, name: str) -> int:
        """The process of a script that runs."""
        return int(self._text(name, "pid"))

    def prints(self, name: str, text: str, seconds: float = 60) -> None:
        """Wait until a script has printed a text."""

        def look() -> bool:
            ended = self.code(name)
            alive = self._parent.code is None
            assert alive or ended is not None, f"the family has ended: {self._parent.err}"
            there = text in self.out(name)
            assert there or ended is None, f"{name!r} has ended ({ended}): {self.err(name)}"
            return there

        until(look, seconds, f"{name!r} prints {text!r}; {self.err(name)}")

    def ends(self, name: str, seconds: float) -> int:
        """Wait for a script to end; returns its exit code."""
        until(
            lambda: self.code(name) is not None,
            seconds,
            f"{name!r} ends; {self.out(name)} {self.err(name)}",
        )
        code = self.code(name)
        assert code is not None
        return code


def _child(path: Path) -> None:
    for number, suffix in ((1, "out"), (2, "err")):
        stream = os.open(path.with_suffix(f".{suffix}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(stream, number)
    path.with_suffix(".pid").write_text(str(os.getpid()))
    sys.argv = [str(path)]
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})


def main() -> None:
    """The parent: fork a child for every script, then write down how each ends."""
    import torch

    import diloco_plugin.learner  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()  # or every child copies all of it when it collects garbage
    running: dict[int, Path] = {}
    for path in sorted(Path(sys.argv[1]).glob("*.py")):
        pid = os.fork()
        if pid == 0:
            _child(path)
            return
        running[pid] = path
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if os.getppid() == 1:  # the test is gone
                for orphan in running:
                    os.kill(orphan, 9)
            time.sleep(0.01)
            continue
        code = running.pop(pid).with_suffix(".code.part")
        code.write_text(str(os.waitstatus_to_exitcode(status)))
        code.rename(code.with_suffix(""))


if __name__ == "__main__":
    main()
