"""The main part of the demo: a syncer, four learners, one of which dies and comes back."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from backstage.processes import Child, ChildFailedError, Children
from diloco_plugin.errors import DiLoCoError
from diloco_plugin.status import fetch

EXAMPLES: Final = Path(__file__).resolve().parents[1]
POLL_SECONDS: Final = 0.3
_START_SECONDS: Final = 120.0
_LIVE: Final = ("live", "quiet", "closing")

#: Name of each learner and the script that it runs.
CAST: Final = {
    "lightning-1": "lightning_lm.py",
    "lightning-2": "lightning_lm.py",
    "huggingface-1": "transformers_lm.py",
    "huggingface-2": "transformers_lm.py",
}
VICTIM: Final = "huggingface-2"
KILL_AT: Final = 1 / 3
#: Importing PyTorch and the Trainer takes so long that it is back at two thirds, or a bit later.
START_AGAIN_AT: Final = 0.35


@dataclass(slots=True)
class Act:
    """One learner as the audience sees it."""

    name: str
    script: str
    state: str = "starting"
    status: dict[str, Any] = field(default_factory=dict)
    losses: list[dict[str, float]] = field(default_factory=list)
    #: clocks at which it was seen to take part
    seen: list[int] = field(default_factory=list)
    lives: int = 1

    @property
    def loss(self) -> float | None:
        """Its newest training loss."""
        return next((line["loss"] for line in reversed(self.losses) if "loss" in line), None)


class Run:
    """Starts everything, looks at it a few times a second, and is over when the syncer is.

    Attributes:
        body: the newest status of the syncer.
        clocks: the clock at every look, as (seconds, clock).
        events: what happened, as (seconds, clock, sentence).
    """

    def __init__(
        self, children: Children, folder: Path, steps: int, seed: int, flags: list[str]
    ) -> None:
        self.folder, self.steps, self.seed, self.flags = folder, steps, seed, flags
        self.acts = {name: Act(name, script) for name, script in CAST.items()}
        self.body: dict[str, Any] = {}
        self.events: list[tuple[float, int, str]] = []
        self.clocks: list[tuple[float, int]] = []
        self.address = ""
        self._children = children
        self._learners: dict[str, Child] = {}
        self._began = time.time()

    @property
    def clock(self) -> int:
        """The run's logical step."""
        return int(self.body.get("clock", 0))

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.time() - self._began

    def play(self) -> Iterator[None]:
        """Run it all; yields after every look."""
        syncer = self._start_syncer()
        self._tell(f"syncer at {self.address}")
        for number, name in enumerate(CAST, start=1):
            self._start_learner(name, self.seed + number)
        while syncer.code is None:
            self._look()
            self._direct()
            yield
            time.sleep(POLL_SECONDS)
        syncer.check()
        self._curtain()
        yield

    # ---- starting ----

    def _start_syncer(self) -> Child:
        syncer = self._children.start(
            "syncer",
            *("-m", "diloco_plugin.cli", "syncer", "--bind", "tcp://127.0.0.1:*"),
            *("--steps", self.steps, "--learners", len(CAST), "--lease", 5.0),
            *("--export", self.folder / "model.safetensors"),
            *self.flags,
        )
        while not self.address:
            syncer.check()
            found = re.search(r"learners join at (tcp://\S+)", syncer.log.read_text())
            self.address = found[1] if found else ""
            if self.seconds > _START_SECONDS:
                raise ChildFailedError(f"the syncer did not start.\n{syncer.tail()}")
            time.sleep(POLL_SECONDS)
        return syncer

    def _start_learner(self, name: str, seed: int) -> None:
        self._learners[name] = self._children.start(
            name,
            *(EXAMPLES / CAST[name], self.address, "--name", name),
            *("--steps", self.steps, "--seed", seed, "--report", self._report(name)),
        )

    def _report(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.jsonl"

    # ---- looking ----

    def _look(self) -> None:
        try:
            self.body = fetch(self.address, POLL_SECONDS * 5)
            self.clocks.append((self.seconds, self.clock))
        except DiLoCoError:
            return  # it is about to end; its exit code tells
        known = {learner["name"]: learner for learner in self.body.get("learners", [])}
        for name, act in self.acts.items():
            act.losses = _read(self._report(name), self._began)
            act.status = known.get(name, act.status)
            if (
                act.state in ("starting", "starting again")
                and known.get(name, {}).get("state") in _LIVE
            ):
                self._tell(f"{name} {'is back' if act.lives > 1 else 'joined'}")
                act.state = "training"
            if act.state == "training":
                act.seen.append(self.clock)
            child = self._learners[name]
            child.check()
            if child.code == 0 and act.state == "training":
                act.state = "finished"

    def _direct(self) -> None:
        """Kill the victim, and start it again."""
        act = self.acts[VICTIM]
        own = act.status.get("clock", 0)
        if act.state == "training" and act.lives == 1 and own >= KILL_AT * self.steps:
            self._learners[VICTIM].kill()
            act.state = "killed"
            self._tell(f"{VICTIM} was killed (SIGKILL)")
        elif act.state == "killed" and self.clock >= START_AGAIN_AT * self.steps:
            self._start_learner(VICTIM, self.seed + len(CAST) + 1)
            act.state, act.lives = "starting again", 2
            self._tell(f"{VICTIM} was started again")

    def _curtain(self) -> None:
        """The syncer is gone; who took part has the global model and ends by itself."""
        for name, act in self.acts.items():
            child = self._learners[name]
            if act.state == "training":
                child.end()
                child.check()
                act.state = "finished"
            elif act.state in ("starting", "starting again"):
                child.terminate()
                act.state = "came too late"
                self._tell(f"{name} was still starting when the run ended")
            act.losses = _read(self._report(name), self._began)
        self._tell("the run is over")

    def _tell(self, sentence: str) -> None:
        self.events.append((self.seconds, self.clock, sentence))


def _read(report: Path, began: float) -> list[dict[str, float]]:
    """The lines of a report so far, with the time in seconds since `began`."""
    if not report.exists():
        return []
    lines = report.read_text(encoding="utf-8").split("\n")[:-1]  # what follows is half a line
    return [line | {"time": line["time"] - began} for line in map(json.loads, lines)]
