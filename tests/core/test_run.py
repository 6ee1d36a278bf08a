"""A run at the syncer: its seed, its clock, its end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core.parameters import Parameters
from diloco_plugin.core.syncer import RunState, SyncerCore

from .conftest import MS, SyncerBench

Make = Callable[..., SyncerBench]


def _empty(bench: SyncerBench) -> SyncerBench:
    """The same run, without --init."""
    bench.core = SyncerCore(bench.core.parameters, epoch=7, steps=bench.core.steps)
    return bench


# ---- the seed ----


def test_the_first_learner_brings_the_model_and_the_others_wait_for_it(syncer: Make) -> None:
    bench = _empty(syncer())
    bench.knock("b")
    assert bench.one(act.RequestSeed).life.name == "b"
    bench.knock("a")
    assert not bench.of(act.Announce)
    bench.do(ev.SeedReceived, life=bench.life("b"))
    told = [(life.name, a.fragment) for a in bench.of(act.Announce) for life in a.lives]
    assert told == [("b", 0), ("b", 1), ("a", 0), ("a", 1)], "the seeder hears that we hold it"
    assert bench.core.state is RunState.RUNNING


@pytest.mark.parametrize("kind", [ev.Vanished, ev.Left, ev.SeedFailed])
def test_when_the_seeder_fails_the_next_one_seeds(syncer: Make, kind: type[ev.Event]) -> None:
    bench = _empty(syncer())
    bench.knock("a")
    bench.knock("b")
    fields = {"reason": "not finite"} if kind is ev.SeedFailed else {}
    bench.do(kind, life=bench.life("a"), **fields)
    assert bench.one(act.RequestSeed).life.name == "b"
    bench.do(ev.SeedReceived, life=bench.life("a"))
    assert bench.core.state is RunState.SEEDING, "that seed is not wanted any more"


def test_without_room_for_the_first_model_everybody_is_told_and_the_pauses_grow(
    syncer: Make,
) -> None:
    bench = _empty(syncer())
    no_room = "the disk is full"
    bench.knock("a")
    bench.knock("b")
    bench.do(ev.SeedFailed, life=bench.life("a"), reason=no_room, full=True)
    assert {(a.life.name, a.code) for a in bench.of(act.Refuse)} == {("a", "room"), ("b", "room")}
    assert all(no_room in a.text for a in bench.of(act.Refuse))
    assert bench.one(act.Note).urgent
    assert not bench.of(act.RequestSeed), "that would fill the disk without end"
    assert bench.core.status(0)["rounds"]["stuck"] == no_room

    pauses = []
    for _ in range(8):
        began = bench.now_ms
        while not bench.of(act.RequestSeed):
            bench.knock("c")
            bench.now_ms += 499
        pauses.append((bench.now_ms - began) // 1000)
        bench.do(ev.SeedFailed, life=bench.life("c"), reason=no_room, full=True)
        assert not bench.of(act.Note), "said once"
    assert pauses[:4] == [5, 10, 20, 40]
    assert pauses[-1] == 300
    bench.do(ev.Ticked, 301_000)
    bench.knock("a")
    bench.do(ev.SeedReceived, life=bench.life("a"))
    assert not bench.core.status(0)["rounds"]["stuck"]
    assert bench.core.state is RunState.RUNNING


def test_a_seeder_that_reconnects_is_asked_again(syncer: Make) -> None:
    bench = _empty(syncer())
    bench.knock("a")
    bench.knock("b")
    bench.knock("a")
    assert bench.one(act.RequestSeed).life.name == "a"


def test_a_seeder_that_was_replaced_holds_nothing_of_the_lineage(syncer: Make) -> None:
    bench = _empty(syncer(fragments=1))
    bench.knock("a")
    bench.do(ev.Vanished, life=bench.life("a"))
    bench.knock("b")
    bench.do(ev.SeedReceived, life=bench.life("b"))
    bench.knock("a", epoch=7, versions=(0,))
    assert not bench.one(act.Admit).keep, "its version 0 is another model"


@pytest.mark.parametrize("kind", [ev.SeedReceived, ev.Vanished])
def test_a_stopped_syncer_is_not_brought_back_by_its_seeder(
    syncer: Make, kind: type[ev.Event]
) -> None:
    bench = _empty(syncer())
    bench.knock("a")
    bench.do(ev.StopAsked, reason="told to")
    bench.do(kind, life=bench.life("a"))
    assert bench.core.state is RunState.STOPPED


# ---- the clock ----


def test_a_joiner_starts_at_the_clock_of_the_run(syncer: Make) -> None:
    bench = syncer()
    bench.join("a")
    bench.clock("a", 50)
    bench.knock("b")
    assert bench.one(act.Admit).clock == 50
    bench.do(ev.TookModel, life=bench.life("b"))
    bench.do(ev.Left, life=bench.life("a"))
    assert bench.core.clock == 50


def test_the_clock_does_not_wait_for_quiet_or_closing_learners(syncer: Make) -> None:
    bench = syncer(quorum=3)
    bench.join("a", "b", "c")
    bench.clock("a", 10)
    assert bench.core.clock == 0
    bench.do(ev.CloseAsked, life=bench.life("b"), fragments=())
    for clock in range(11, 19):
        bench.do(ev.Heard, 2000, life=bench.life("b"))
        bench.do(ev.Heard, life=bench.life("c"))
        bench.clock("a", clock)
    assert bench.core.clock == 18


def test_learners_behind_a_standing_clock_are_told_where_it_stands_once(syncer: Make) -> None:
    bench = syncer(quorum=2)
    bench.join("a")
    bench.knock("b")
    bench.clock("a", 90)
    bench.do(ev.TookModel, life=bench.life("b"))
    told = bench.of(act.Announce)
    assert [(life.name, a.clock) for a in told for life in a.lives] == [("b", 90)]
    bench.clock("b", 3)
    assert not bench.of(act.Announce)


def test_a_lockstep_run_starts_when_all_are_there_and_takes_no_more(syncer: Make) -> None:
    bench = syncer(lockstep=True, learners=2)
    bench.join("a")
    bench.clock("a", 4)
    assert bench.core.clock == 0
    bench.join("b")
    bench.knock("c")
    assert bench.one(act.Refuse).code == "full"
    bench.clock("b", 3)
    assert bench.core.clock == 3


def test_a_lockstep_clock_stands_still_while_somebody_joins(syncer: Make) -> None:
    bench = syncer(lockstep=True, learners=2)
    bench.join("a", "b")
    bench.do(ev.Vanished, life=bench.life("b"))
    bench.clock("a", 1)
    bench.knock("b", number=2)
    bench.clock("a", 2)
    assert bench.core.clock == 1, "b was told that the clock stands at 1, and must find it there"
    bench.do(ev.TookModel, life=bench.life("b", 2))
    assert bench.core.clock == 1
    bench.do(ev.Progressed, life=bench.life("b", 2), clock=2, step_ns=0)
    assert bench.core.clock == 2


# ---- the end ----


def test_the_run_ends_at_its_last_step_when_everybody_has_closed(syncer: Make) -> None:
    bench = syncer(fragments=1, steps=4)
    bench.join("a", "b")
    bench.clock("a", 5)
    assert {life.name for life in bench.one(act.CompleteRun).lives} == {"a", "b"}
    pull = bench.one(act.Pull)
    for name in "ab":
        bench.push(name, pull)
    bench.commit(pull)
    bench.do(ev.Left, life=bench.life("a"))
    assert bench.core.state is RunState.ENDING
    bench.do(ev.Left, life=bench.life("b"))
    assert bench.one(act.Stop).lives == ()


def test_the_end_does_not_wait_for_ever_for_learners_that_do_not_close(syncer: Make) -> None:
    bench = syncer(steps=4, lease=4.0, close_timeout=5.0)
    bench.join("a")
    bench.clock("a", 4)
    for _ in range(8):
        bench.do(ev.Heard, 1000, life=bench.life("a"))
    assert bench.core.state is RunState.ENDING
    bench.do(ev.Heard, 1000, life=bench.life("a"))
    assert bench.one(act.Stop).lives == (bench.life("a"),)


def test_after_the_end_a_newcomer_is_refused_but_a_member_may_come_back(syncer: Make) -> None:
    bench = syncer(steps=4)
    bench.join("a")
    bench.clock("a", 4)
    bench.knock("b")
    assert bench.one(act.Refuse).code == "ended"
    bench.knock("a", epoch=7, versions=(0, 0))
    assert bench.one(act.Admit).keep
    assert bench.one(act.CompleteRun).lives == (bench.life("a"),), "it may have missed that"


def test_who_knocks_while_the_operator_stops_the_syncer_may_ask_again(syncer: Make) -> None:
    bench = syncer(fragments=1)
    bench.join("a")
    bench.clock("a", 4)
    bench.push("a", bench.one(act.Pull))
    bench.do(ev.StopAsked, reason="told to")
    bench.knock("b")
    assert bench.one(act.Refuse).code == "stopping"


def test_a_stop_finishes_what_has_its_quorum_and_abandons_the_rest(syncer: Make) -> None:
    bench = syncer(fragments=2)
    bench.join("a", "b")
    bench.clock("a", 4, step_ms=500)
    bench.clock("b", 4, step_ms=500)
    first, second = bench.core.rounds.flights.values()
    assert (first.fragment, second.fragment) == (1, 0)
    pull = act.Pull(lives=(), round=first.number, fragment=1, version=0, closing=False, reason="")
    bench.push("a", pull)
    bench.offer("b", act.Pull(lives=(), round=second.number, fragment=0, version=0,
                              closing=False, reason=""))  # fmt: skip
    bench.do(ev.StopAsked, reason="told to")
    assert bench.fates() == [("b", "abandoned", "told to")]
    assert bench.one(act.Merge).round == first.number
    assert bench.one(act.Drop).round == second.number
    assert not bench.of(act.Stop)
    bench.commit(pull)
    assert bench.one(act.Stop).reason == "told to"
    bench.do(ev.StopAsked, reason="again")
    assert bench.last == ()


def test_the_status_counts_what_happened(syncer: Make) -> None:
    bench = syncer(fragments=1, lease=15.0)
    bench.join("a", "b")
    bench.clock("a", 4)
    pull = bench.one(act.Pull)
    bench.push("a", pull)
    bench.nothing("b", pull)
    bench.commit(pull)
    status = bench.core.status(bench.now_ms * MS)
    assert status["fates"] == {
        "merged": 1, "late": 0, "stale": 0, "rejected": {}, "abandoned": 0
    }  # fmt: skip
    assert status["fragments"] == [{"index": 0, "version": 1, "state": "idle"}]
    assert [learner["state"] for learner in status["learners"]] == ["live", "live"]
    assert status["rounds"]["joined_mean"] == 1.0


def test_the_deadline_is_never_in_the_past() -> None:
    core = SyncerCore(Parameters(), epoch=1, now_ns=10)
    assert 10 <= core.next_deadline_ns() <= 10 + core.parameters.lease_ns
