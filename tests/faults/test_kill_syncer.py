"""Kill the syncer again and again while learners train: nothing announced is lost or done twice."""

from __future__ import annotations

import random
import signal
import statistics
import time
from pathlib import Path

import pytest

from tests.end_to_end.fleet import Trainee, small_model
from tests.end_to_end.processes import free_ports
from tests.faults.ledger import Ear, Ledger
from tests.faults.nursery import Nursery
from tests.soak import SOAK

KILLS = 6 if SOAK == 1 else 5 * SOAK
FLAGS = ("--sync-every", "4", "--fragments", "4", "--overlap", "2", "--quorum", "2")
PATIENCE = 60.0


class Steady(Trainee):
    """A trainee that remembers the longest time between two of its steps."""

    longest = 0.0
    _last = 0.0

    @property
    def steps(self) -> int:
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        now = time.monotonic()
        if value > 1:
            self.longest = max(self.longest, now - self._last)
        self._steps, self._last = value, now


def step_on(trainee: Steady, steps: int) -> None:
    """Until it has made so many more steps."""
    goal = trainee.steps + steps
    trainee.wait(lambda: trainee.steps >= goal, PATIENCE)


@pytest.mark.timeout(120 + 30 * KILLS)
def test_a_syncer_killed_at_any_time_takes_nothing_back_and_merges_nothing_twice(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(7)
    ear, ledger = Ear(monkeypatch), Ledger(tmp_path)
    bind = f"tcp://127.0.0.1:{free_ports()}"
    flags = ("--state", str(tmp_path), *FLAGS)
    trainees: list[Steady] = []
    ready: list[float] = []
    for life in range(KILLS + 1):
        stepped = [trainee.steps for trainee in trainees]
        started = time.monotonic()
        with nursery.start(bind, *flags) as syncer:
            syncer.ready()
            ready.append(time.monotonic() - started)
            body = ear.check(bind)
            if not trainees:
                trainees = [
                    Steady(small_model(i), bind, f"l{i}", data=i, step_seconds=0.002)
                    for i in range(3)
                ]
            ear.hears(trainees[0], 4, PATIENCE)
            assert ear.epochs[-1] == body["epoch"]
            # nobody waited for the syncer while there was none
            assert all(t.steps > n for t, n in zip(trainees, stepped, strict=False))
            if life < KILLS:
                step_on(trainees[0], rng.randrange(200))
                syncer.kill()
                ledger.look()
                continue
            for trainee in trainees:
                trainee.finish(PATIENCE)
            last = ear.check(bind)
            syncer.send(signal.SIGTERM)
            assert syncer.wait() == 0
    ledger.look()
    ledger.check(ear)
    assert ear.epochs == sorted(ear.epochs)
    mine = [record for record in ledger.records.values() if record.epoch == last["epoch"]]
    assert last["rounds"]["merged"] == len(mine)
    assert last["fates"]["merged"] == sum(len(record.contributions) for record in mine)
    print(
        f"{KILLS} kills, {len(ledger.records)} merges, {len(ledger.pushes())} pushes merged;"
        f" ready after {statistics.median(ready):.2f} s (median), {max(ready):.2f} s (most);"
        f" longest time between two steps {max(t.longest for t in trainees):.3f} s"
        f" in {sum(t.steps for t in trainees)} steps"
    )
