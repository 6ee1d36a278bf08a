"""Builders: a syncer core and a learner core with a clock and sane defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core.events import Life
from diloco_plugin.core.learner import LearnerCore
from diloco_plugin.core.parameters import Parameters
from diloco_plugin.core.syncer import SyncerCore

MS = 1_000_000
A = TypeVar("A")


class SyncerBench:
    """A syncer core, driven by hand. `act(kind)` finds the actions of the last step."""

    def __init__(self, fragments: int = 2, steps: int = 0, **parameters: Any) -> None:
        values = {"fragments": fragments, "sync_every": 4, "overlap": 2} | parameters
        self.fragments = fragments
        self.core = SyncerCore(Parameters(**values), epoch=7, steps=steps, seeded=True)
        self.now_ms = 0
        self.last: tuple[act.SyncerAction, ...] = ()

    def life(self, name: str, number: int = 1) -> Life:
        return Life(name, f"{number:016x}{name.encode().hex()[:16]:0>16}")

    def do(self, kind: type[ev.Event], after_ms: int = 1, **fields: Any) -> None:
        self.now_ms += after_ms
        self.last = self.core.step(kind(now_ns=self.now_ms * MS, **fields))  # type: ignore[arg-type]
        self.core.check()

    def of(self, kind: type[A]) -> list[A]:
        return [action for action in self.last if isinstance(action, kind)]

    def one(self, kind: type[A]) -> A:
        (action,) = self.of(kind)
        return action

    def knock(self, name: str, number: int = 1, **fields: Any) -> None:
        self.do(ev.Knocked, life=self.life(name, number), fragments=self.fragments, **fields)

    def join(self, *names: str) -> None:
        for name in names:
            self.knock(name)
            self.do(ev.TookModel, life=self.life(name))

    def stay(self, *names: str, seconds: int = 600) -> None:
        """They have been here for so long: closing rounds may wait for them for a while."""
        self.join(*names)
        for _ in range(seconds):
            for name in names:
                self.do(ev.Heard, 1000 // len(names), life=self.life(name))
        for name in names:
            self.clock(name, self.core.clock + 1)

    def clock(self, name: str, clock: int, step_ms: int = 0) -> None:
        life = self.life(name)
        self.do(ev.Progressed, life=life, clock=clock, step_ns=step_ms * MS)

    def offer(self, name: str, pull: act.Pull, **fields: Any) -> None:
        values = {"base": pull.version, "steps": 4, "tokens": 40} | fields
        life = self.life(name)
        self.do(ev.Offered, life=life, round=pull.round, fragment=pull.fragment, **values)

    def receive(
        self,
        name: str,
        pull: act.Pull,
        *,
        norm: float = 1.0,
        finite: bool = True,
        after_ms: int = 1,
    ) -> None:
        self.do(
            ev.Received,
            after_ms,
            life=self.life(name),
            round=pull.round,
            fragment=pull.fragment,
            norm=norm,
            finite=finite,
        )

    def push(self, name: str, pull: act.Pull, **fields: Any) -> None:
        norm = fields.pop("norm", 1.0)
        self.offer(name, pull, **fields)
        self.receive(name, pull, norm=norm)

    def nothing(self, name: str, pull: act.Pull) -> None:
        self.offer(name, pull, nothing="no steps")

    def commit(self, pull: act.Pull) -> None:
        self.do(ev.MergeDone, round=pull.round, ok=True)
        self.do(ev.CommitDone, round=pull.round)

    def fates(self) -> list[tuple[str, str, str]]:
        return [(a.life.name, a.fate.value, a.reason) for a in self.of(act.TellFate)]


class LearnerBench:
    """A learner core, driven by hand."""

    def __init__(self, fragments: int = 2, staging: int = 2, **parameters: Any) -> None:
        values = {"fragments": fragments, "sync_every": 4, "overlap": 2} | parameters
        self.parameters = Parameters(**values)
        self.fragments = fragments
        self.core = LearnerCore(incarnation="0" * 32, staging=staging)
        self.now_ms = 0
        self.last: tuple[act.LearnerAction, ...] = ()

    def do(self, kind: type[ev.Event], after_ms: int = 30, **fields: Any) -> None:
        self.now_ms += after_ms
        self.last = self.core.step(kind(now_ns=self.now_ms * MS, **fields))  # type: ignore[arg-type]
        self.core.check()

    def of(self, kind: type[A]) -> list[A]:
        return [action for action in self.last if isinstance(action, kind)]

    def one(self, kind: type[A]) -> A:
        (action,) = self.of(kind)
        return action

    def welcome(self, epoch: int = 7, clock: int = 0, *, keep: bool = False) -> None:
        self.core.lay_out(self.parameters, self.fragments)
        self.do(ev.Welcomed, epoch=epoch, clock=clock, keep=keep)

    def announce(self, fragment: int, version: int, clock: int = 0) -> None:
        self.do(ev.Announced, fragment=fragment, version=version, clock=clock)

    def land(self, fragment: int, version: int, clock: int = 0) -> None:
        """A version is announced, arrives, is applied at a pause, and becomes the base."""
        self.announce(fragment, version, clock)
        self.do(ev.Arrived, fragment=fragment, version=version)
        self.do(ev.Paused)
        self.do(ev.Rebased, fragment=fragment)

    def join(self, clock: int = 0) -> None:
        self.welcome(clock=clock)
        for fragment in range(self.fragments):
            self.land(fragment, 0, clock)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.do(ev.Stepped, tokens=10)

    def pull(self, round_: int, fragment: int, *, closing: bool = False) -> None:
        self.do(ev.Pulled, round=round_, fragment=fragment, closing=closing)

    def fate(self, round_: int, fragment: int, fate: str, reason: str = "") -> None:
        self.do(ev.FateTold, round=round_, fragment=fragment, fate=fate, reason=reason)


@pytest.fixture
def syncer() -> Callable[..., SyncerBench]:
    return SyncerBench


@pytest.fixture
def learner() -> Callable[..., LearnerBench]:
    return LearnerBench
