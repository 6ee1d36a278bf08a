"""Both cores together: whole lives of learners and syncers in a simulated world."""

from __future__ import annotations

import pytest

from diloco_plugin.core.members import Stage
from diloco_plugin.core.parameters import Parameters
from diloco_plugin.core.syncer import RunState
from diloco_plugin.testing import World


def _parameters(**values: object) -> Parameters:
    return Parameters(**({"fragments": 4, "sync_every": 8} | values))  # type: ignore[arg-type]


def test_two_learners_train_one_model() -> None:
    world = World(_parameters())
    world.learner("a", step_ms=100)
    world.learner("b", step_ms=150)
    world.run(20)
    rounds = world.syncer.core.rounds
    assert min(rounds.versions) >= 20
    assert rounds.joined > 1.9 * rounds.merged, "b joins nearly every round"
    assert sum(rounds.rejections.values()) == 0


@pytest.mark.parametrize("steps", [(7, 20, 33), (7, 7, 7), (1, 8, 16)])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_learners_finish_one_after_the_other_and_leave_nothing_behind(
    steps: tuple[int, ...], alpha: float
) -> None:
    world = World(_parameters(alpha=alpha))
    learners = [
        world.learner(name, step_ms=50, steps=count)
        for name, count in zip("abc", steps, strict=True)
    ]
    world.run_until(lambda: not world.learners, 30)
    for learner in learners:
        assert learner.left
        assert all(part.done for part in learner.core.parts)
    assert not world.syncer.core.rounds.flights
    assert len(world.syncer.core.members) == 0


def test_the_last_one_to_leave_holds_the_newest_version_of_everything() -> None:
    world = World(_parameters())
    first = world.learner("a", step_ms=50, steps=11)
    last = world.learner("b", step_ms=50, steps=30)
    world.run_until(lambda: not world.learners, 30)
    assert first.left
    assert [part.base for part in last.core.parts] == world.syncer.core.rounds.versions


@pytest.mark.parametrize("quorum", [1, 2])
def test_a_run_ends_at_its_last_step_even_when_its_learners_stop_there_themselves(
    quorum: int,
) -> None:
    world = World(_parameters(quorum=quorum), steps=20)
    for name in "ab":
        world.learner(name, step_ms=3, steps=20)
    world.run_until(lambda: world.syncer.done, 30)
    world.run(0.5)
    assert not world.learners


def test_learners_without_an_end_stop_at_the_last_step_of_the_run() -> None:
    world = World(_parameters(), steps=30)
    learners = [world.learner(name, step_ms=step) for name, step in (("a", 40), ("b", 130))]
    world.run_until(lambda: world.syncer.done, 30)
    world.run(0.5)
    assert all(learner.left and learner.core.complete for learner in learners)


def test_a_seeder_that_dies_in_mid_seed_is_replaced() -> None:
    world = World(_parameters(lease=4.0), transfer_ms=500)
    world.learner("a", step_ms=50)
    world.run(0.3)
    assert world.syncer.core.state is RunState.SEEDING
    world.learner("b", step_ms=50)
    world.crash("a")
    world.run_until(lambda: world.syncer.core.rounds.merged > 3, 30)


def test_a_model_that_was_given_is_taken_by_everybody() -> None:
    world = World(_parameters(), seeded=True)
    world.learner("a", step_ms=50)
    world.run(2)
    assert world.syncer.core.rounds.merged > 3


def test_a_late_joiner_gets_in_while_rounds_run_fast() -> None:
    world = World(_parameters(fragments=4, sync_every=4), transfer_ms=60)
    world.learner("a", step_ms=10)
    world.run(5)
    world.learner("b", step_ms=10)
    world.run(3)
    stages = [member.stage for member in world.syncer.core.members]
    assert stages == [Stage.LIVE, Stage.LIVE]
    joined = next(m for m in world.syncer.core.members if m.life.name == "b")
    assert joined.rounds_joined > 3


def test_a_learner_in_validation_holds_nobody_up() -> None:
    world = World(_parameters(quorum=2, lease=2.0))
    world.learner("a", step_ms=50)
    paused = world.learner("b", step_ms=50)
    world.run(3)
    paused.paused = True
    world.run(5)
    before = world.syncer.core.rounds.merged
    world.run(5)
    assert world.syncer.core.rounds.merged > before + 30
    assert world.syncer.core.members.holder("b") is not None, "it is quiet, not gone"


def test_a_cut_learner_comes_back_with_what_it_trained_alone() -> None:
    world = World(_parameters(lease=3.0))
    world.learner("a", step_ms=50)
    world.run(3)
    world.cut("a")
    world.run(20)
    assert len(world.syncer.core.members) == 0
    before = world.syncer.core.rounds.merged
    world.mend("a")
    world.run(12)
    assert world.syncer.core.rounds.merged > before
    learner = world.learners["a"]
    assert learner.core.fates.keys() == {"merged"}


def test_a_syncer_that_comes_back_empty_is_filled_and_trained_on() -> None:
    world = World(_parameters())
    for name in "abc":
        world.learner(name, step_ms=50)
    world.run(5)
    clock = world.syncer.core.clock
    world.kill_syncer()
    world.run(30)
    assert all(learner.core.steps > 600 for learner in world.learners.values()), "training goes on"
    world.restart_syncer()
    world.run(15)
    assert world.syncer.core.rounds.merged > 10
    assert world.syncer.core.clock > clock
    assert len(world.syncer.core.members.in_stage(Stage.LIVE)) == 3


def test_a_learner_that_finishes_while_the_syncer_is_away_closes_when_it_is_back() -> None:
    world = World(_parameters(close_timeout=60.0))
    learner = world.learner("a", step_ms=50)
    world.run(3)
    world.kill_syncer()
    learner.finish()
    world.run(3)
    world.restart_syncer()
    world.run_until(lambda: not world.learners, 60)
    assert learner.left
    assert world.syncer.core.state is RunState.RUNNING, "its model was taken before it left"


def test_a_learner_whose_loss_is_nan_leaves_all_the_same() -> None:
    world = World(_parameters())
    world.learner("a", step_ms=50)
    sick = world.learner("b", step_ms=50)
    world.run(2)
    sick.finite = False
    world.run(2)
    rounds = world.syncer.core.rounds.next_round
    sick.finish()
    world.run(3)
    assert sick.left
    assert world.syncer.core.rounds.next_round < rounds + 40, "and does not ask again and again"
    assert set(world.syncer.core.rounds.rejections) == {"not finite"}


@pytest.mark.parametrize("overlap", [0, 1, 2, 3])
@pytest.mark.parametrize("fragments", [1, 4, 8])
def test_lockstep_goes_on_and_keeps_everybody_together(overlap: int, fragments: int) -> None:
    parameters = _parameters(fragments=fragments, overlap=overlap, lockstep=True, learners=2)
    world = World(parameters, fragments=fragments)
    fast, slow = world.learner("a", step_ms=20), world.learner("b", step_ms=90)
    world.run(20)
    assert abs(fast.core.clock - slow.core.clock) <= overlap + 1 + 8 // fragments
    assert fast.waits > slow.waits
    rounds = world.syncer.core.rounds
    assert rounds.merged >= 2 * fragments
    assert rounds.joined == 2 * rounds.merged
    assert rounds.fates.keys() == {"merged"}


def test_lockstep_survives_a_death_and_a_return() -> None:
    world = World(_parameters(overlap=2, lockstep=True, learners=2, lease=3.0))
    world.learner("a", step_ms=20)
    world.learner("b", step_ms=30)
    world.run(3)
    for _ in range(3):
        world.crash("b")
        world.run(5)
        world.learner("b", step_ms=30)
        world.run(2.5)
        before = world.syncer.core.clock
        world.run(3)
        assert world.syncer.core.clock > before + 20


def test_lockstep_ends_when_one_finishes_earlier() -> None:
    world = World(_parameters(overlap=0, lockstep=True, learners=2))
    world.learner("a", step_ms=20, steps=16)
    world.learner("b", step_ms=20, steps=45)
    world.run_until(lambda: not world.learners, 30)


def test_the_same_seed_gives_the_same_story() -> None:
    def story(seed: int) -> list[object]:
        world = World(_parameters(), seed=seed)
        world.learner("a", step_ms=50)
        world.learner("b", step_ms=70)
        world.run(3)
        world.restart_syncer()
        world.run(3)
        return list(world.log)

    assert story(1) == story(1)
    assert story(1) != story(2)


def test_clocks_of_slow_learners_are_carried_along() -> None:
    world = World(_parameters())
    world.learner("a", step_ms=20)
    slow = world.learner("b", step_ms=400)
    world.run(20)
    assert slow.core.steps < 60
    assert slow.core.clock > 900


def test_what_arrives_broken_is_refused_and_given_again() -> None:
    world = World(_parameters())
    learner = world.learner("a", step_ms=50)
    world.run(2)
    learner.corrupt = 3
    world.run(4)
    assert world.syncer.core.rounds.rejections == {"corrupt": 3}
    assert learner.core.fates["rejected (corrupt)"] == 3
    assert min(world.syncer.core.rounds.versions) > 5


def test_a_quorum_of_two_is_not_stalled_by_a_clock_that_ran_ahead() -> None:
    world = World(_parameters(quorum=2), transfer_ms=50, merge_failures=1.0)
    world.learner("a", step_ms=5)
    world.run(20)
    world.learner("b", step_ms=500)
    world.run(10)
    world.merge_failures = 0.0
    world.run(10)
    assert world.syncer.core.rounds.merged > 0
    assert world.learners["b"].core.clock >= 4000


def test_a_learner_leaves_though_others_merge_faster_than_it_can_fetch() -> None:
    world = World(_parameters(fragments=8, overlap=2), transfer_ms=120.0)
    for name in "bcd":
        world.learner(name, step_ms=20)
    first = world.learner("a", step_ms=20, steps=50)
    world.run_until(lambda: first.left, 60)


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_a_learner_that_finishes_before_it_took_the_model_takes_it_and_leaves(codec: str) -> None:
    world = World(_parameters(codec=codec), seeded=True)
    learner = world.learner("a", step_ms=50)
    learner.finish()
    world.run_until(lambda: not world.learners, 10)
    assert learner.left
    assert all(part.base >= 0 for part in learner.core.parts)


@pytest.mark.parametrize("steps", [5, 9, 14, 23])
def test_the_last_progress_is_merged_and_not_overwritten_by_others(steps: int) -> None:
    world = World(_parameters())
    others = [world.learner(name, step_ms=30) for name in "bc"]
    first = world.learner("a", step_ms=50, steps=steps)
    world.run_until(lambda: first.core.closing, 60)
    had = [part for part in first.core.parts if part.steps and not part.taken_or_refused]
    before = first.core.fates.get("merged", 0)
    world.run_until(lambda: first.left, 60)
    assert first.core.fates["merged"] - before >= len(had)
    assert all(learner.alive for learner in others)
