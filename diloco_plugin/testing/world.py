"""A world in one process: learner cores and a syncer core under a virtual clock, without tensors.

The shells here are minimal but keep the real ones' contract: messages are first in, first out on a
connection, buffers are counted, slow work returns as an event. Whatever is random lives here,
seeded; after every step all invariants are checked, so a test need only make things happen:

    world = World(Parameters(fragments=4, sync_every=8))
    world.learner("a", step_ms=100)
    world.run(5)
"""

from __future__ import annotations

import copy
import heapq
import itertools
import random
from collections.abc import Callable
from typing import Final

from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core.events import Life
from diloco_plugin.core.parameters import SECOND_NS, Parameters
from diloco_plugin.core.past import Past
from diloco_plugin.core.syncer import SyncerCore
from diloco_plugin.testing.learner import Learner
from diloco_plugin.testing.syncer import Syncer
from diloco_plugin.testing.wire import MS, Progress, Wire

BARRED: Final = "not admitted any more"
EPOCHS_APART: Final = 1000


class World:
    """Everything that happens, in order. Times given to methods are seconds or milliseconds."""

    def __init__(
        self,
        parameters: Parameters | None = None,
        *,
        fragments: int = 4,
        steps: int = 0,
        seeded: bool = False,
        seed: int = 0,
        latency_ms: float = 2.0,
        transfer_ms: float = 10.0,
        work_ms: float = 4.0,
        poll_ms: float = 5.0,
        merge_failures: float = 0.0,
        durable: bool = False,
        decide: Callable[[SyncerCore, ev.SyncerEvent], tuple[act.SyncerAction, ...]] | None = None,
    ) -> None:
        """`durable`: what was committed outlives the syncer. `poll_ms`: how often a learner looks
        whether it may go on.
        """
        self.parameters = parameters or Parameters(fragments=fragments, sync_every=2 * fragments)
        self.fragments, self.steps, self.seeded = fragments, steps, seeded
        self.latency_ms, self.transfer_ms, self.work_ms = latency_ms, transfer_ms, work_ms
        self.poll_ns = poll_ms * MS
        #: share of the merges whose result is not finite
        self.merge_failures = merge_failures
        #: steps the syncer's core; a test may look over its shoulder
        self.decide = decide or SyncerCore.step
        self.random = random.Random(seed)  # noqa: S311 - a simulation
        self.durable, self.disk_full = durable, False
        #: the syncer dies as soon as a version is durable, before anybody hears of it
        self.dies_when_durable = False
        #: names that the operator does not admit
        self.barred: set[str] = set()
        #: what is on disk, and what was said about it
        self.past: Past | None = Past.seeded(fragments) if durable and seeded else None
        self.announced: dict[int, int] = {}
        self.merged: set[tuple[Life, Progress]] = set()
        self.taken: set[Life] = set()
        self.given: dict[tuple[Life, int], int] = {}
        self.now_ns = 0
        self.learners: dict[str, Learner] = {}
        #: (time, who, what): every event and action of the syncer, for stories
        self.log: list[tuple[int, str, ev.Event | act.Action]] = []
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._counter = itertools.count()
        self._lives = self._newest = 0
        self.syncer = self._new_syncer()

    # ---- time ----

    def at(self, delay_ns: float, do: Callable[[], None]) -> None:
        """Let something happen after a while."""
        moment = self.now_ns + max(0, int(delay_ns))
        heapq.heappush(self._agenda, (moment, next(self._counter), do))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.run_until(lambda: False, seconds, must=False)

    def run_until(
        self, condition: Callable[[], bool], seconds: float = 600.0, *, must: bool = True
    ) -> None:
        """Let time pass until something holds; `must`: it is an error if it never does."""
        end = self.now_ns + int(seconds * SECOND_NS)
        while not condition():
            if not self._agenda or self._agenda[0][0] > end:
                assert not must, f"still not so after {seconds} s"
                self.now_ns = end
                return
            self.now_ns, _, do = heapq.heappop(self._agenda)
            do()

    def work_ns(self, milliseconds: float) -> float:
        """About this long."""
        return milliseconds * MS * (0.75 + 0.5 * self.random.random())

    # ---- what a test may do ----

    def learner(
        self,
        name: str,
        *,
        step_ms: float = 100.0,
        steps: int | None = None,
        data_seed: int | None = None,
        norm: float = 1.0,
        wants_state: bool = True,
        label: str = "",
    ) -> Learner:
        """Start a learner (again); it finishes after so many steps.

        `label` tells two processes apart that use the same name.
        """
        assert (label or name) not in self.learners, "that process runs"
        learner = Learner(self, name, step_ms, steps, data_seed, norm, wants_state)
        self.learners[label or name] = learner
        learner.connect()
        learner.turn()
        return learner

    def crash(self, name: str) -> None:
        """A learner's process dies; nobody is told."""
        self.learners[name].die()

    def cut(self, name: str, *, silent: bool = False) -> None:
        """A learner's connection breaks and cannot be made; `silent`: nobody notices at first."""
        self.learners[name].cut(silent=silent)

    def mend(self, name: str) -> None:
        """The network is there again for this learner."""
        self.learners[name].mend()

    def kill_syncer(self) -> None:
        """The syncer dies; all connections break."""
        self.syncer.alive = False
        for learner in list(self.learners.values()):
            learner.broken("the syncer died")

    def bar(self, name: str) -> None:
        """The operator does not admit this name (until it is taken out of `barred`)."""
        self.barred.add(name)
        for life in sorted(life for life in self.syncer.routes if life.name == name):
            self.syncer.step(ev.Barred(now_ns=0, life=life, reason=BARRED))

    def restart_syncer(self, *, older: bool = False) -> None:
        """A new life of the syncer, with what is durable.

        `older`: the machine's clock was set back, and with it the epoch; only where that comes from
        the clock.
        """
        self.kill_syncer()
        assert not (older and self.durable)
        self.syncer = self._new_syncer(older=older)
        for learner in list(self.learners.values()):
            learner.connect()

    def stop_syncer(self, reason: str = "told to stop") -> None:
        """The operator stops the daemon."""
        self.syncer.step(ev.StopAsked(now_ns=self.now_ns, reason=reason))

    @property
    def outdated(self) -> bool:
        """Is the syncer's epoch older than one that was there before?"""
        return self.syncer.core.epoch < self._newest

    def _new_syncer(self, *, older: bool = False) -> Syncer:
        self._lives += 1
        epoch = self._newest - self._lives if older else EPOCHS_APART * self._lives
        self._newest = max(self._newest, epoch)
        core = SyncerCore(
            self.parameters,
            epoch=epoch,
            steps=self.steps,
            seeded=self.seeded,
            past=copy.deepcopy(self.past),
            lineage=1 if self.durable else None,
            now_ns=self.now_ns,
        )
        return Syncer(self, core)

    def by_life(self, life: Life) -> Learner | None:
        """The running learner of this life."""
        return next((one for one in self.learners.values() if one.life == life), None)

    def travel_ns(self, wire: Wire, direction: str) -> int:
        """How long a message takes; none overtakes another."""
        arrives = self.now_ns + int(self.work_ns(self.latency_ms))
        wire.last_ns[direction] = arrives = max(arrives, wire.last_ns.get(direction, 0))
        return arrives - self.now_ns
