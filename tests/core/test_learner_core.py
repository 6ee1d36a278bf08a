"""The learner's half: counting, applying, answering, closing, waiting in lockstep, calling."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core.link import Standing

from .conftest import LearnerBench

Make = Callable[..., LearnerBench]


# ---- joining ----


def test_a_learner_introduces_itself_takes_the_model_and_is_live(learner: Make) -> None:
    bench = learner()
    bench.do(ev.Ticked)
    assert bench.last == (act.SayHello(epoch=0, versions=(), clock=0),)
    bench.welcome(clock=9)
    assert bench.core.clock == 9
    bench.announce(0, 3, clock=11)
    assert bench.last == (act.Fetch(fragment=0, version=3),)
    bench.do(ev.Arrived, fragment=0, version=3)
    bench.do(ev.Paused)
    assert act.Apply(fragment=0, version=3, alpha=0.0) in bench.last
    assert bench.core.clock == 11, "carried along"
    assert bench.core.link.standing is Standing.TAKING
    bench.land(1, 2)
    assert bench.core.link.standing is Standing.LIVE


def test_taking_overwrites_even_when_blending_is_on(learner: Make) -> None:
    bench = learner(alpha=0.5)
    bench.join()
    bench.announce(0, 1)
    bench.do(ev.Arrived, fragment=0, version=1)
    bench.do(ev.Paused)
    assert bench.one(act.Apply).alpha == 0.5
    bench.welcome()
    bench.announce(0, 1)
    bench.do(ev.Arrived, fragment=0, version=1)
    bench.do(ev.Paused)
    assert bench.one(act.Apply).alpha == 0.0


def test_who_has_not_taken_the_model_answers_no_pull(learner: Make) -> None:
    bench = learner()
    bench.welcome()
    bench.train()
    bench.pull(0, 0)
    bench.train()
    assert not bench.of(act.Offer)


def test_the_seeder_captures_its_base_at_a_boundary(learner: Make) -> None:
    bench = learner()
    bench.welcome()
    bench.do(ev.SeedAsked)
    assert bench.last == ()
    bench.train()
    assert bench.last[:2] == (act.CaptureBase(), act.ServeSeed())
    assert [part.steps for part in bench.core.parts] == [0, 0]


def test_a_seeder_does_not_leave_before_the_syncer_holds_its_model(learner: Make) -> None:
    bench = learner()
    bench.welcome()
    bench.do(ev.SeedAsked)
    bench.do(ev.FinishAsked)
    assert not bench.of(act.Leave)
    for fragment in (0, 1):
        bench.do(ev.FinishAsked)
        assert not bench.of(act.Leave)
        bench.announce(fragment, 0)
    bench.do(ev.FinishAsked)
    assert bench.one(act.Leave)


def test_a_seeder_that_is_lost_in_mid_seed_claims_no_lineage(learner: Make) -> None:
    bench = learner()
    bench.welcome()
    bench.do(ev.SeedAsked)
    bench.train()
    bench.do(ev.Lost, reason="cut")
    bench.do(ev.Ticked, 10_000)
    assert bench.one(act.SayHello).versions == ()


def test_a_second_welcome_replaces_the_first_and_leaks_no_buffer(learner: Make) -> None:
    bench = learner()
    bench.join()
    bench.train(2)
    bench.pull(0, 0)
    bench.train()
    bench.announce(1, 4)
    bench.welcome(epoch=8)
    assert bench.last == (act.Release(fragment=1), act.Forfeit())
    bench.do(ev.PushSent, fragment=0)
    for fragment in (0, 1):
        bench.announce(fragment, 5)
        assert bench.one(act.Fetch).version == 5


# ---- answering ----


def test_a_pull_is_answered_at_the_next_boundary(learner: Make) -> None:
    bench = learner()
    bench.join()
    bench.train(3)
    bench.pull(5, 1)
    assert bench.last == ()
    bench.train()
    assert bench.last[:2] == (
        act.Snapshot(fragment=1),
        act.Offer(round=5, fragment=1, base=0, steps=4, tokens=40),
    )


def test_what_has_arrived_is_applied_before_a_pull_is_answered(learner: Make) -> None:
    bench = learner()
    bench.join()
    bench.train(3)
    bench.announce(0, 1)
    bench.do(ev.Arrived, fragment=0, version=1)
    bench.pull(5, 0)
    bench.train()
    assert bench.of(act.Apply)
    assert bench.one(act.Offer).nothing == "no steps"


def test_the_same_progress_is_not_given_twice(learner: Make) -> None:
    bench = learner()
    bench.join()
    bench.train()
    bench.pull(0, 0)
    bench.train()
    bench.do(ev.PushSent, fragment=0)
    bench.fate(0, 0, "merged")
    bench.pull(1, 0)
    bench.train()
    assert bench.one(act.Offer).nothing == "already given"


@pytest.mark.parametrize("fate", ["late", "abandoned", "stale", "rejected"])
def test_progress_that_was_not_merged_is_given_again(learner: Make, fate: str) -> None:
    bench = learner()
    bench.join()
    bench.train()
    bench.pull(0, 0)
    bench.train()
    bench.do(ev.PushSent, fragment=0)
    bench.fate(0, 0, fate, "why")
    assert bool(bench.of(act.Note)) is (fate in ("stale", "rejected"))
    bench.pull(1, 0)
    bench.train()
    assert bench.one(act.Offer).steps == 3


def test_a_pull_waits_for_a_staging_buffer(learner: Make) -> None:
    bench = learner(staging=1)
    bench.join()
    bench.train()
    bench.pull(0, 0)
    bench.pull(1, 1)
    bench.train()
    assert bench.one(act.Offer).fragment == 0
    bench.do(ev.PushSent, fragment=0)
    bench.train()
    assert bench.one(act.Offer).fragment == 1


def test_the_base_stays_while_a_push_travels_that_is_differenced_against_it(
    learner: Make,
) -> None:
    bench = learner()
    bench.join()
    bench.train(2)
    bench.announce(0, 1)
    bench.pull(7, 0)
    bench.train()
    assert bench.one(act.Offer).base == 0
    bench.do(ev.Arrived, fragment=0, version=1)
    bench.train()
    assert not bench.of(act.Apply)
    bench.do(ev.PushSent, fragment=0)
    bench.train()
    assert bench.one(act.Apply).version == 1


# ---- fetching ----


def test_fetches_take_the_oldest_round_first_and_no_more_than_there_are_buffers(
    learner: Make,
) -> None:
    bench = learner(fragments=4)
    bench.core.have_buffers(staging=2, arrivals=1)
    bench.welcome()
    bench.announce(3, 1, clock=9)
    assert bench.one(act.Fetch).fragment == 3
    for fragment, clock in ((0, 8), (1, 5), (2, 7)):
        bench.announce(fragment, 1, clock)
        assert not bench.of(act.Fetch)
    order = [3]
    for _ in range(3):
        bench.do(ev.Arrived, fragment=order[-1], version=1)
        bench.do(ev.Paused)
        bench.do(ev.Rebased, fragment=order[-1])
        order.append(bench.one(act.Fetch).fragment)
    assert order == [3, 1, 2, 0]


def test_a_superseded_version_is_not_asked_for_again(learner: Make) -> None:
    bench = learner()
    bench.join()
    bench.announce(0, 6)
    bench.do(ev.FetchFailed, fragment=0, version=6)
    assert bench.last == (), "neither version 6 nor one before it"
    bench.announce(0, 7)
    assert bench.one(act.Fetch).version == 7


def test_a_newer_version_is_fetched_when_the_older_one_cannot_be_had(learner: Make) -> None:
    bench = learner()
    bench.join()
    bench.announce(0, 6)
    bench.announce(0, 7)
    assert bench.last == ()
    bench.do(ev.FetchFailed, fragment=0, version=6)
    assert bench.one(act.Fetch).version == 7


def test_nothing_is_fetched_from_a_lost_syncer(learner: Make) -> None:
    bench = learner()
    bench.core.have_buffers(staging=2, arrivals=1)
    bench.join()
    bench.announce(0, 1)
    bench.do(ev.Arrived, fragment=0, version=1)
    bench.do(ev.Paused)
    bench.announce(1, 1)
    bench.do(ev.Lost, reason="cut")
    bench.do(ev.Rebased, fragment=0)
    assert bench.last == ()


def test_what_was_released_does_not_arrive_any_more(learner: Make) -> None:
    bench = learner()
    bench.join()
    bench.announce(0, 6)
    bench.do(ev.Lost, reason="cut")
    bench.welcome(keep=True)
    bench.do(ev.Arrived, fragment=0, version=6)
    bench.do(ev.Paused)
    assert not bench.of(act.Apply)


def test_an_announcement_of_what_is_held_already_carries_the_clock_only(learner: Make) -> None:
    bench = learner()
    bench.join()
    bench.announce(0, 0, clock=70)
    assert bench.last == ()
    assert bench.core.clock == 70


def test_a_base_can_be_given_back_only_while_nobody_can_change_it(learner: Make) -> None:
    bench = learner()
    bench.join()
    assert not bench.core.still_holds(0, 0), "a syncer is there"
    bench.announce(0, 1)
    bench.do(ev.Arrived, fragment=0, version=1)
    bench.do(ev.Paused)
    bench.do(ev.Lost, reason="it was killed")
    assert not bench.core.still_holds(1, 0), "an applied fragment is not the base yet"
    bench.do(ev.Rebased, fragment=0)
    assert bench.core.still_holds(0, 1)
    assert bench.core.still_holds(1, 0)
    assert not bench.core.still_holds(0, 0)
    assert not bench.core.still_holds(9, 0)
    bench.do(ev.TurnedAway, code="repair", text="it is being repaired")
    bench.train()
    assert bench.core.still_holds(0, 1), "training does not change the base"
    bench.welcome(epoch=8)
    assert not bench.core.still_holds(0, 1)


def test_a_learner_asks_a_syncer_again_that_is_being_repaired(learner: Make) -> None:
    bench = learner()
    bench.join()
    bench.do(ev.Lost, reason="it was killed")
    for _ in range(3):
        bench.do(ev.Ticked, 20_000)
        assert bench.one(act.SayHello).versions == (0, 0)
        bench.do(ev.TurnedAway, code="repair", text="it is being repaired")
    assert not bench.core.link.over
