"""Seeded runs of a small world in which everything that can break does, and what they reached.

python -m tests.core.scenarios SEED...      prints a digest of each run's events and actions
"""

from __future__ import annotations

import gc
import hashlib
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Final

from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core import policy
from diloco_plugin.core.events import Life
from diloco_plugin.core.parameters import SECOND_NS, Parameters
from diloco_plugin.core.syncer import RunState, SyncerCore
from diloco_plugin.testing import Learner, World

LEASE: Final = 4.0
#: After so many seconds of peace, merges must have resumed: a lease until the dead are noticed,
#: the longest pause between two calls of who waits for a place of theirs, and a lease to go on in.
RESUME_S: Final = 2 * LEASE + policy.BACKOFF_MAX_NS / SECOND_NS
HAPPENINGS: Final = 14
STEPS_MS: Final = (30.0, 90.0, 250.0, 250.0)
PAUSES: Final = (0.004, 0.03, 0.15, 0.15, 0.6, 0.6, 2.0)


class Watch:
    """Looks over the syncer's shoulder and counts what was reached."""

    def __init__(self) -> None:
        self.reached: Counter[str] = Counter()
        self.events = 0
        self._asked: dict[Life, int] = {}
        self._epochs: dict[Life, int] = {}
        self._announced: set[tuple[int, int]] = set()
        self._committed: set[tuple[int, int]] = set()

    def decide(self, core: SyncerCore, event: ev.SyncerEvent) -> tuple[act.SyncerAction, ...]:
        """Steps the core."""
        self.events += 1
        self._hear(core, event)
        actions = core.step(event)
        for action in actions:
            self._see(core, action)
        return actions

    def _hear(self, core: SyncerCore, event: ev.SyncerEvent) -> None:
        match event:
            case ev.CommitFailed() | ev.TransferFailed() | ev.StateFailed() | ev.Vanished():
                self.reached[f"heard {type(event).__name__}"] += 1
            case ev.MergeDone(ok=False):
                self.reached["a merge that is not finite"] += 1
            case ev.Knocked() if core.members.get(event.life) is not None:
                self.reached["a member knocks again"] += 1
            case ev.Offered(nothing=why) if why:
                self.reached[f"nothing: {why}"] += 1
            case ev.StateOffered(nothing=why) if why:
                self.reached["a donor has no state"] += 1

    def _see(self, core: SyncerCore, action: act.SyncerAction) -> None:
        match action:
            case act.TellFate():
                why = f": {action.reason}" if action.fate is act.Fate.REJECTED else ""
                self.reached[f"fate {action.fate.value}{why}"] += 1
            case act.Refuse():
                self.reached[f"refused: {action.code}"] += 1
            case act.Dismiss():
                self.reached[f"gone: {action.reason.split(' for ')[0]}"] += 1
            case act.Admit():
                self._asked.pop(action.life, None)
                self.reached["kept its model" if action.keep else "admitted"] += 1
                before = self._epochs.setdefault(action.life, core.epoch)
                if action.keep and before != core.epoch:
                    self.reached["kept across a restart of the syncer"] += 1
                self._epochs[action.life] = core.epoch
            case act.RequestState():
                self._asked[action.joiner] = self._asked.get(action.joiner, 0) + 1
                again = self._asked[action.joiner] > 1
                self.reached["handover restarted" if again else "handover begun"] += 1
            case act.RefuseState():
                self.reached["handover refused"] += 1
            case act.Commit():
                key = (core.epoch, action.round)
                self.reached["commit retried" if key in self._committed else "commit"] += 1
                self._committed.add(key)
            case act.Merge() if action.closing:
                self.reached["closing round"] += 1
            case act.Announce():
                self._announce(core, action)
            case act.Pull() | act.Fold():
                pass
            case _:
                self.reached[type(action).__name__] += 1

    def _announce(self, core: SyncerCore, action: act.Announce) -> None:
        key = (action.fragment, action.version)
        adopted = core.rounds.merged == 0 and action.version > 0
        if adopted and key not in self._announced:
            self.reached["durable, announced by the next life"] += 1
        self._announced.add(key)


class Scenario:
    """One seed: a world, what happens to it, and the peace after that."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draw = random.Random(seed)
        self.watch = Watch()
        self.reached = self.watch.reached
        self.faults: Counter[str] = Counter()
        self.lockstep = self.draw.random() < 0.2
        self.names = ("a", "b", "a", "b", "c") if self.lockstep else ("a", "b", "c")
        self.world = self._world()
        self.everybody: list[Learner] = []

    def _world(self) -> World:
        draw, fragments = self.draw, self.draw.randint(1, 4)
        parameters = Parameters(
            fragments=fragments,
            sync_every=fragments + draw.randint(1, 4),
            overlap=draw.choice((0, 1, 1, 2)),
            quorum=draw.choice((1, 1, 2, 3)),
            alpha=draw.choice((0.0, 0.0, 0.5)),
            codec=draw.choice(("fp32", "fp32", "bf16")),
            lockstep=self.lockstep,
            learners=2 if self.lockstep else 0,
            lease=LEASE,
            close_timeout=20.0,
            max_staleness=draw.randint(0, 2),
        )
        return World(
            parameters,
            fragments=fragments,
            seed=self.seed,
            steps=draw.choice((0, 0, 0, 30)),
            seeded=draw.random() < 0.3,
            durable=draw.random() < 0.6,
            transfer_ms=draw.choice((1.0, 20.0, 300.0)),
            latency_ms=draw.choice((0.5, 5.0, 200.0)),
            merge_failures=draw.choice((0.0, 0.0, 0.0, 0.1)),
            poll_ms=20.0,
            decide=self.watch.decide,
        )

    def run(self) -> Scenario:
        """War, then peace. Raises AssertionError when an invariant breaks."""
        self._start(self.names[0])
        for _ in range(HAPPENINGS):
            self._something()
            self.world.run(self.draw.choice(PAUSES))
        self.heal()
        self.resume()
        self.leave()
        return self

    # ---- war ----

    def _start(self, name: str, label: str = "") -> None:
        learner = self.world.learner(
            name,
            step_ms=self.draw.choice(STEPS_MS),
            steps=self.draw.choice((None, None, None, 5, 20)),
            data_seed=self.draw.choice((None, None, 7)),
            label=label,
        )
        self.everybody.append(learner)

    def _something(self) -> None:
        name = self.draw.choice(self.names)
        if name not in self.world.learners and self.draw.random() < 0.7:
            self.faults["start"] += 1
            self._start(name)
        elif self.world.learners and self.draw.random() < 0.7:
            label = self.draw.choice(sorted(self.world.learners))
            self._to_learner(label, self.world.learners[label])
        else:
            self._to_syncer()

    def _to_learner(self, label: str, learner: Learner) -> None:
        faults: dict[str, Callable[[], object]] = {
            "crash": learner.die,
            "crash and restart": lambda: (learner.die(), self._start(learner.life.name, label)),
            "rival": lambda: self._start(learner.life.name, f"rival {len(self.everybody)}"),
            "cut": lambda: learner.cut(silent=False),
            "cut silently": lambda: learner.cut(silent=True),
            "mend": learner.mend,
            "blip": lambda: (learner.cut(silent=False), learner.mend()),
            "connect anew": learner.connect,
            "pause": lambda: setattr(learner, "paused", not learner.paused),
            "freeze": lambda: learner.standstill.begin(self.draw.choice((0.2, 2.0, 6.0))),
            "finish": learner.finish,
            "nan": lambda: setattr(learner, "finite", not learner.finite),
            "explode": lambda: setattr(learner, "norm", 1e6 if learner.norm == 1.0 else 1.0),
            "corrupt": lambda: setattr(learner, "corrupt", 2),
            "bar": lambda: self.world.bar(learner.life.name),
        }
        self._do(faults)

    def _to_syncer(self) -> None:
        world = self.world
        faults: dict[str, Callable[[], object]] = {
            "kill syncer": world.kill_syncer,
            "restart syncer": world.restart_syncer,
            "restart syncer again": world.restart_syncer,
            "die when durable": lambda: setattr(world, "dies_when_durable", True),
            "disk full": lambda: setattr(world, "disk_full", True),
            "room again": lambda: setattr(world, "disk_full", False),
            "syncer sleeps": lambda: world.syncer.standstill.begin(
                self.draw.choice((0.2, 2.5, 5.0))
            ),
            "admit again": world.barred.clear,
        }
        if not world.durable:
            faults["older syncer"] = lambda: world.restart_syncer(older=True)
        if self.draw.random() < 0.05:
            faults = {"stop syncer": world.stop_syncer}
        self._do(faults)

    def _do(self, faults: dict[str, Callable[[], object]]) -> None:
        what = self.draw.choice(list(faults))
        self.faults[what] += 1
        faults[what]()

    # ---- peace ----

    def heal(self) -> None:
        """Nothing is broken any more."""
        world = self.world
        world.run_until(lambda: not world.syncer.standstill.now, 2 * LEASE)
        world.run(0.0)  # what it has heard in its sleep
        world.disk_full = world.dies_when_durable = False
        world.merge_failures = 0.0
        world.barred.clear()
        stopped = world.syncer.core.state in (RunState.STOPPING, RunState.STOPPED)
        ended = stopped and world.syncer.core._ended
        if not world.syncer.alive or world.outdated or (stopped and not ended):
            world.restart_syncer()
        for learner in list(world.learners.values()):
            learner.mend()
            learner.paused, learner.finite, learner.norm, learner.corrupt = False, True, 1.0, 0

    def resume(self) -> None:
        """Merges go on soon, if the run does."""
        world, core = self.world, self.world.syncer.core
        if core.state in (RunState.ENDING, RunState.STOPPING, RunState.STOPPED):
            self.reached["the run has ended"] += 1
            return
        for name in self.names[: 2 if self.lockstep else 1]:
            world.learner(name, step_ms=50.0, label=f"{name} anew")
        merged = core.rounds.merged
        over = (RunState.ENDING, RunState.STOPPING, RunState.STOPPED)
        world.run_until(lambda: core.rounds.merged > merged or core.state in over, RESUME_S)
        self.reached["merges have resumed"] += 1

    def leave(self) -> None:
        """Everybody leaves, with the global model."""
        world = self.world
        staying = list(world.learners.values())
        # who finished in the war may have lost its patience there
        patient = [learner for learner in staying if not learner.finishing]
        for learner in staying:
            learner.finish()
        world.run_until(lambda: not world.learners, 40.0)
        names = [learner.life.name for learner in staying]
        crowded = self.lockstep and len(set(names)) > world.parameters.learners
        for learner in patient:  # rivals for a name or place get in one after the other, if at all
            rivals = crowded or names.count(learner.life.name) > 1
            assert learner.left or learner.core.complete or rivals, "no way out"
            self.reached["left" if learner.left else "gave up"] += 1
        core = world.syncer.core
        world.run_until(lambda: not core.rounds.flights, 2 * LEASE)
        assert core.rounds.pending() == 0
        if core.state is not RunState.STOPPED:
            world.stop_syncer()
        assert core.state is RunState.STOPPED
        for learner in self.everybody:
            self.reached[f"inner state: {learner.inner.split(' ')[0] or 'undecided'}"] += 1


def main(seeds: list[int]) -> None:
    """Prints a digest for each seed."""
    for seed in seeds:
        log = Scenario(seed).run().world.log
        print(seed, hashlib.blake2b(str(log).encode(), digest_size=16).hexdigest())


if __name__ == "__main__":
    gc.disable()
    main([int(seed) for seed in sys.argv[1:]])
