"""Fast and slow learners in one run: nobody waits, and nobody is left out."""

from __future__ import annotations

from tests.end_to_end.fleet import Trainee, small_model
from tests.syncers import running_syncer


def test_a_slow_learner_takes_part_in_most_rounds_and_the_fast_one_never_waits() -> None:
    with (
        running_syncer(sync_every=12, fragments=4, overlap=2) as syncer,
        Trainee(small_model(0), syncer.address, "fast", step_seconds=0.01) as fast,
        Trainee(small_model(0), syncer.address, "slow", step_seconds=0.03, data=1) as slow,
    ):
        slow.wait(lambda: slow.merged >= 5 and (fast.error or fast.merged >= 5))

        def learners() -> dict[str, dict[str, int]]:
            return {entry["name"]: entry for entry in syncer.status()["learners"]}

        before, fast_steps, slow_steps = learners(), fast.steps, slow.steps
        slow.wait(lambda: learners()["slow"]["rounds_asked"] >= before["slow"]["rounds_asked"] + 40)
        after = learners()
        joined = after["slow"]["rounds_joined"] - before["slow"]["rounds_joined"]
        assert joined > 0.5 * (after["slow"]["rounds_asked"] - before["slow"]["rounds_asked"])
        # three times as fast alone, and still much faster together: it does not wait for the other
        assert fast.steps - fast_steps > 1.5 * (slow.steps - slow_steps)
        assert fast.learner is not None
        assert fast.learner.boundary_seconds < 0.2 * fast.steps * 0.01
        # the clock carries the slow one along
        assert abs(after["fast"]["clock"] - after["slow"]["clock"]) < 12
