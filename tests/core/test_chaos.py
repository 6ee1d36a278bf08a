"""Whatever happens, in whatever order: the invariants of the simulated world hold, and it ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from diloco_plugin.core.members import Stage
from diloco_plugin.core.parameters import Parameters
from diloco_plugin.core.syncer import RunState
from diloco_plugin.testing import World
from tests.soak import SOAK


class Chaos(RuleBasedStateMachine):
    """Learners come, go, pause, break and return; networks and syncers too."""

    lockstep = False
    names = ("a", "b", "c", "d")

    @initialize(
        seed=st.integers(0, 2**16),
        overlap=st.integers(0, 3),
        quorum=st.integers(1, 3),
        fragments=st.integers(1, 5),
        transfer_ms=st.sampled_from((1.0, 20.0, 300.0)),
        latency_ms=st.sampled_from((0.5, 5.0, 200.0)),
        max_staleness=st.integers(0, 2),
        merge_failures=st.sampled_from((0.0, 0.0, 0.2)),
        steps=st.sampled_from((0, 0, 60)),
        seeded=st.booleans(),
        durable=st.booleans(),
    )
    def start(self, seed: int, overlap: int, quorum: int, fragments: int, **world: Any) -> None:
        steps, staleness = world.pop("steps"), world.pop("max_staleness")
        parameters = Parameters(
            fragments=fragments,
            sync_every=fragments + 4,
            overlap=overlap,
            quorum=quorum,
            lockstep=self.lockstep,
            learners=2 if self.lockstep else 0,
            lease=4.0,
            close_timeout=10.0,
            max_staleness=staleness,
        )
        self.world = World(parameters, fragments=fragments, seed=seed, steps=steps, **world)

    @rule(
        data=st.data(),
        step_ms=st.sampled_from((10.0, 40.0, 100.0, 700.0)),
        steps=st.sampled_from((None, None, 7, 33)),
    )
    def starts(self, data: st.DataObject, step_ms: float, steps: int | None) -> None:
        name = data.draw(st.sampled_from(self.names))
        if name not in self.world.learners:
            self.world.learner(name, step_ms=step_ms, steps=steps)

    @rule(seconds=st.sampled_from((0.005, 0.05, 0.3, 1.0, 6.0)))
    def time_passes(self, seconds: float) -> None:
        self.world.run(seconds)

    @precondition(lambda self: self.world.learners)
    @rule(data=st.data(), what=st.sampled_from(
        ("crash", "cut", "silent", "mend", "pause", "go on", "finish", "nan", "explode", "corrupt",
         "replace", "rival")
    ))  # fmt: skip
    def something_happens_to(self, data: st.DataObject, what: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.learners)))
        learner = self.world.learners[name]
        match what:
            case "crash":
                self.world.crash(name)
            case "replace":
                self.world.crash(name)
                self.world.learner(name, step_ms=50)
            case "rival" if f"{name}'" not in self.world.learners:
                self.world.learner(learner.life.name, step_ms=50, label=f"{name}'")
            case "cut" | "silent":
                self.world.cut(name, silent=what == "silent")
            case "mend":
                self.world.mend(name)
            case "pause" | "go on":
                learner.paused = what == "pause"
            case "finish":
                learner.finish()
            case "nan":
                learner.finite = not learner.finite
            case "explode":
                learner.norm = 1e6 if learner.norm == 1.0 else 1.0
            case "corrupt":
                learner.corrupt = 2

    @rule(kill=st.booleans())
    def syncer_restarts(self, kill: bool) -> None:
        if kill:
            self.world.kill_syncer()
            self.world.run(1.0)
        self.world.restart_syncer()

    @rule(full=st.booleans())
    def the_disk_fills(self, full: bool) -> None:
        self.world.disk_full = full

    @invariant()
    def nobody_waits_for_another(self) -> None:
        for learner in self.world.learners.values() if hasattr(self, "world") else ():
            assert self.lockstep or not learner.core.must_wait()

    def teardown(self) -> None:
        """Peace: everybody who is there trains, merges and leaves with the global model."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.disk_full = False
        if not world.syncer.alive:
            world.restart_syncer()
        for name, learner in list(world.learners.items()):
            world.mend(name)
            learner.paused, learner.finite, learner.norm, learner.corrupt = False, True, 1.0, 0
        world.run(30.0)
        staying = list(world.learners.values())
        core = world.syncer.core
        if core.state is RunState.RUNNING and world.learners:
            merged = core.rounds.merged
            world.merge_failures = 0.0
            world.run(30.0)
            complete = not self.lockstep or len({one.life.name for one in staying}) == 2
            assert core.rounds.merged > merged or not complete, "nothing is merged any more"
            # a rival for a name may just have been let in, after somebody else has finished
            world.run_until(lambda: all(m.stage is Stage.LIVE for m in core.members), 10.0)
            staying = list(world.learners.values())
            assert all(one.inner for one in staying if one.core.link.connected), "still undecided"
        for learner in staying:
            learner.finish()
        world.run(40.0)
        assert not world.learners
        names = [learner.life.name for learner in staying]
        for learner in staying:  # rivals for a name get in one after the other, if at all
            rivals = names.count(learner.life.name) > 1
            assert learner.left or learner.core.complete or rivals, "no way out"
        assert not core.rounds.flights
        assert core.rounds.pending() == 0
        if core.state is not RunState.STOPPED:
            world.stop_syncer()
        assert core.state is RunState.STOPPED


class LockstepChaos(Chaos):
    """The same, with everybody waiting for everybody."""

    lockstep = True
    names = ("a", "b")


@pytest.mark.parametrize("machine", [Chaos, LockstepChaos])
def test_invariants_hold_whatever_happens(machine: type[Chaos]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=50 * SOAK,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
