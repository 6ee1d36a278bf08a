"""Rounds at the syncer: pull, quorum, grace, merge, commit, announce, one fate for every push."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev

from .conftest import SyncerBench

Make = Callable[..., SyncerBench]


def _due(bench: SyncerBench, clock: int = 4) -> act.Pull:
    """A learner's clock passes a due point."""
    bench.clock("a", clock)
    return bench.of(act.Pull)[0]


def test_a_fragment_that_comes_due_is_pulled_from_every_live_learner(syncer: Make) -> None:
    bench = syncer()
    bench.join("a", "b")
    bench.knock("c")
    bench.clock("a", 1)
    assert not bench.of(act.Pull)
    bench.clock("a", 2)
    pull = bench.one(act.Pull)
    assert [life.name for life in pull.lives] == ["a", "b"], "c has not taken the model"
    assert (pull.fragment, pull.version, pull.closing) == (1, 0, False)


def test_a_due_fragment_waits_once_in_the_queue(syncer: Make) -> None:
    bench = syncer(overlap=0)
    bench.join("a")
    bench.clock("a", 2)
    bench.clock("a", 40)
    bench.clock("a", 400)
    assert sorted(bench.core.rounds.queue) == [0, 1]


@pytest.mark.parametrize(("overlap", "most"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_rounds_in_flight_are_bounded(syncer: Make, overlap: int, most: int) -> None:
    bench = syncer(fragments=4, overlap=overlap)
    bench.join("a")
    bench.clock("a", 8)
    assert len(bench.core.rounds.flights) == most


def test_a_fragment_is_never_in_two_rounds(syncer: Make) -> None:
    bench = syncer(fragments=1)
    bench.join("a")
    bench.clock("a", 4)
    bench.clock("a", 8)
    bench.do(ev.CloseAsked, life=bench.life("a"), fragments=(0,))
    assert len(bench.core.rounds.flights) == 1


def test_the_life_of_a_round(syncer: Make) -> None:
    bench = syncer(fragments=1)
    bench.join("a")
    pull = _due(bench)
    life = bench.life("a")
    bench.offer("a", pull)
    assert bench.last == (act.Receive(life=life, round=0, fragment=0),)
    bench.receive("a", pull)
    assert bench.last == (
        act.Fold(life=life, round=0, fragment=0, tokens=40, steps=4),
        act.Merge(round=0, fragment=0, closing=False, reason="everybody asked has answered"),
    )
    bench.do(ev.MergeDone, round=0, ok=True)
    push = act.Contribution(life=life, index=0, base=0, steps=4, tokens=40, norm=1.0)
    assert bench.last == (
        act.Commit(round=0, fragment=0, version=1, clock=4, exact=False, contributions=(push,)),
    )
    bench.do(ev.CommitDone, round=0)
    assert bench.last == (
        act.TellFate(life=life, round=0, fragment=0, fate=act.Fate.MERGED, reason="version 1"),
        act.Announce(lives=(life,), fragment=0, version=1, clock=4, exact=False),
    )


def test_the_grace_window_waits_for_stragglers_and_then_closes(syncer: Make) -> None:
    bench = syncer(fragments=1, grace=0.5)
    bench.join("a", "b")
    bench.clock("b", 3, step_ms=100)
    bench.clock("a", 4, step_ms=100)
    pull = bench.one(act.Pull)
    bench.push("a", pull)
    assert not bench.of(act.Merge), "b may still come"
    deadline = bench.core.next_deadline_ns()
    bench.do(ev.Ticked, (deadline - 1) // 1_000_000 - bench.now_ms)
    assert not bench.of(act.Merge)
    bench.do(ev.Ticked, 1)
    assert bench.one(act.Merge).reason == "quorum of 1 and grace window over"
    bench.offer("b", pull)
    assert bench.fates() == [("b", "late", "the round is over")]


def test_the_grace_window_closes_early_when_everybody_has_answered(syncer: Make) -> None:
    bench = syncer(fragments=1)
    bench.join("a", "b")
    bench.clock("b", 1, step_ms=500)
    bench.clock("a", 4, step_ms=500)
    pull = bench.one(act.Pull)
    bench.push("a", pull)
    bench.nothing("b", pull)
    assert bench.one(act.Merge).reason == "everybody asked has answered"


def test_a_push_on_its_way_when_the_round_closes_is_late(syncer: Make) -> None:
    bench = syncer(fragments=1, overlap=0)
    bench.join("a", "b")
    pull = _due(bench)
    bench.offer("b", pull)
    bench.push("a", pull)
    assert bench.fates() == [("b", "late", "the round closed while it was on its way")]
    assert bench.one(act.Discard).life.name == "b"
    bench.receive("b", pull)
    assert bench.one(act.Discard).life.name == "b", "bytes that come all the same are forgotten"


def test_a_quorum_is_waited_for_beyond_the_window(syncer: Make) -> None:
    bench = syncer(fragments=1, quorum=2)
    bench.join("a", "b", "c")
    bench.clock("b", 4)
    pull = _due(bench)
    bench.push("a", pull)
    bench.do(ev.Heard, 9_000, life=bench.life("b"))
    assert not bench.of(act.Merge)
    bench.push("b", pull)
    bench.do(ev.Ticked)
    assert bench.core.rounds.flights[pull.round].phase.value == "merging"


def test_a_dead_learner_lowers_the_quorum(syncer: Make) -> None:
    bench = syncer(fragments=1, quorum=2)
    bench.join("a", "b")
    bench.clock("b", 4)
    pull = _due(bench)
    bench.push("a", pull)
    bench.do(ev.Vanished, life=bench.life("b"))
    assert bench.one(act.Merge)


def test_a_quiet_learner_is_not_waited_for(syncer: Make) -> None:
    bench = syncer(fragments=1, quorum=2)
    bench.join("a", "b")
    bench.clock("b", 4)
    pull = _due(bench)
    bench.push("a", pull)
    for _ in range(6):
        bench.do(ev.Heard, 3_000, life=bench.life("b"))
        bench.do(ev.Heard, life=bench.life("a"))
    assert bench.core.rounds.flights[pull.round].phase.value == "merging"


def test_rounds_are_not_opened_while_nobody_trains(syncer: Make) -> None:
    bench = syncer(fragments=2, overlap=0)
    bench.join("a", "b")
    bench.clock("a", 4)
    pull = bench.of(act.Pull)
    for _ in range(10):
        for name in "ab":
            bench.do(ev.Heard, 2_000, life=bench.life(name))
            pull += bench.of(act.Pull)
    assert len(pull) == 1
    assert len(bench.core.rounds.queue) == 1
    bench.clock("b", 5)
    assert bench.one(act.Pull), "it waited in the queue until somebody trained again"


def test_a_round_for_which_nobody_has_anything_changes_nothing(syncer: Make) -> None:
    bench = syncer(fragments=1)
    bench.join("a")
    pull = _due(bench)
    bench.nothing("a", pull)
    assert bench.one(act.Drop)
    assert bench.core.rounds.versions == [0]


@pytest.mark.parametrize(
    ("change", "fate", "reason"),
    [
        ({"steps": 0}, "rejected", "no steps"),
        ({"tokens": 0}, "rejected", "no tokens"),
        ({"base": 1}, "rejected", "base from the future"),
        ({"fragment": 9}, "rejected", "unknown fragment"),
        ({"fragment": 0}, "rejected", "wrong fragment"),
        ({"round": 99}, "rejected", "unknown round"),
    ],
)
def test_nonsense_becomes_a_fate(
    syncer: Make, change: dict[str, int], fate: str, reason: str
) -> None:
    bench = syncer(fragments=2, overlap=1)
    bench.join("a", "b")
    pull = _due(bench)
    assert pull.fragment == 1
    offer = {"round": pull.round, "fragment": pull.fragment, "base": 0, "steps": 1, "tokens": 1}
    bench.do(ev.Offered, life=bench.life("b"), **(offer | change))
    assert bench.fates() == [("b", fate, reason)]


def test_a_push_is_not_replayed(syncer: Make) -> None:
    bench = syncer(fragments=1)
    bench.join("a", "b")
    pull = _due(bench)
    bench.push("b", pull)
    bench.offer("b", pull)
    assert bench.fates() == [("b", "rejected", "replayed")]


def test_an_unsynced_learner_contributes_nothing(syncer: Make) -> None:
    bench = syncer(fragments=1)
    bench.join("a")
    bench.knock("b")
    pull = _due(bench)
    bench.offer("b", pull)
    assert bench.fates() == [("b", "rejected", "unsynced")]


def test_who_joined_after_the_pull_was_not_asked(syncer: Make) -> None:
    bench = syncer(fragments=1)
    bench.join("a")
    pull = _due(bench)
    bench.join("b")
    bench.offer("b", pull)
    assert bench.fates() == [("b", "rejected", "not asked")]


def test_an_old_base_is_stale(syncer: Make) -> None:
    bench = syncer(fragments=1, max_staleness=1)
    bench.join("a", "b")
    for version in range(2):
        pull = _due(bench, 4 * (version + 1))
        bench.nothing("b", pull)
        bench.push("a", pull)
        bench.commit(pull)
    pull = _due(bench, 12)
    bench.offer("b", pull, base=0)
    assert bench.fates() == [("b", "stale", "stale")]


def test_the_same_progress_is_not_merged_twice(syncer: Make) -> None:
    bench = syncer(fragments=1)
    bench.join("a")
    pull = _due(bench)
    bench.push("a", pull)
    bench.commit(pull)
    pull = _due(bench, 8)
    bench.offer("a", pull, base=0, steps=9)
    assert bench.fates() == [("a", "rejected", "consumed base")]


def test_the_same_progress_is_not_merged_twice_after_a_lost_lease(syncer: Make) -> None:
    bench = syncer(fragments=1, lease=4.0)
    bench.join("a", "b")
    pull = _due(bench)
    bench.push("a", pull)
    bench.nothing("b", pull)
    bench.do(ev.Vanished, life=bench.life("a"))
    bench.commit(pull)
    bench.knock("a", epoch=7, versions=(0,))
    assert bench.one(act.Admit).keep
    bench.clock("b", 8)
    bench.offer("a", bench.one(act.Pull), base=0, steps=9)
    assert bench.fates() == [("a", "rejected", "consumed base")]


@pytest.mark.parametrize(
    ("finite", "norm", "reason"), [(False, 1.0, "not finite"), (True, 99.0, "norm")]
)
def test_a_guarded_push_never_counts(syncer: Make, finite: bool, norm: float, reason: str) -> None:
    bench = syncer(fragments=1, norm_guard=10.0)
    bench.join("a")
    for version in range(3):
        pull = _due(bench, 4 * (version + 1))
        bench.push("a", pull)
        bench.commit(pull)
    pull = _due(bench, 16)
    bench.offer("a", pull)
    bench.receive("a", pull, finite=finite, norm=norm)
    assert bench.fates() == [("a", "rejected", reason)]
    assert not bench.of(act.Fold)
    assert bench.one(act.Drop)
    assert bench.core.rounds.versions == [3]


def test_norms_that_everybody_exceeds_become_the_usual_ones(syncer: Make) -> None:
    bench = syncer(fragments=1)
    bench.join("a")
    clock = 0
    for norm, merged in [(1.0, True)] * 3 + [(99.0, False)] * 3 + [(99.0, True)]:
        clock += 4
        pull = _due(bench, clock)
        bench.push("a", pull, norm=norm)
        assert bool(bench.of(act.Merge)) is merged
        if merged:
            bench.commit(pull)


def test_a_merge_that_is_not_finite_never_lands(syncer: Make) -> None:
    bench = syncer(fragments=1)
    bench.join("a")
    pull = _due(bench)
    bench.push("a", pull)
    bench.do(ev.MergeDone, round=pull.round, ok=False)
    assert bench.fates() == [("a", "rejected", "merge not finite")]
    assert bench.one(act.Drop)
    assert bench.core.rounds.versions == [0]


def test_broken_bytes_are_refused_with_their_reason(syncer: Make) -> None:
    bench = syncer(fragments=1)
    bench.join("a", "b")
    pull = _due(bench)
    bench.offer("b", pull)
    bench.do(
        ev.TransferFailed,
        life=bench.life("b"),
        round=pull.round,
        fragment=0,
        reason="corrupt",
    )
    assert bench.fates() == [("b", "rejected", "corrupt")]
    assert bench.core.rounds.rejections == {"corrupt": 1}


def test_who_dies_in_mid_push_is_abandoned_and_what_had_arrived_counts(syncer: Make) -> None:
    bench = syncer(fragments=1, quorum=3)
    bench.join("a", "b", "c")
    for name in "bc":
        bench.clock(name, 4)
    pull = _due(bench)
    bench.push("a", pull)
    bench.offer("b", pull)
    bench.do(ev.Vanished, life=bench.life("a"))
    bench.do(ev.Vanished, life=bench.life("b"))
    assert bench.fates() == [("b", "abandoned", "the learner is gone")]
    bench.nothing("c", pull)
    assert bench.one(act.Merge)
    bench.commit(pull)
    assert bench.fates() == [("a", "merged", "version 1")]


def test_a_closing_round_waits_for_who_asked_for_it(syncer: Make) -> None:
    bench = syncer(fragments=1, overlap=0)
    bench.stay("a", "b")
    bench.do(ev.CloseAsked, life=bench.life("b"), fragments=(0, 77))
    pull = bench.one(act.Pull)
    assert pull.closing
    bench.push("a", pull)
    assert not bench.of(act.Merge)
    bench.push("b", pull)
    assert bench.one(act.Merge).closing
    bench.commit(pull)
    assert bench.one(act.Announce).exact


def test_a_closing_round_whose_merge_is_not_finite_is_opened_again_for_who_gave_nothing(
    syncer: Make,
) -> None:
    bench = syncer(fragments=1, codec="bf16")
    bench.stay("a", "b")
    bench.do(ev.CloseAsked, life=bench.life("b"), fragments=(0,))
    for _ in range(4):
        pull = bench.one(act.Pull)
        assert pull.closing
        bench.push("a", pull)
        bench.nothing("b", pull)
        bench.do(ev.MergeDone, round=pull.round, ok=False)
    assert not bench.of(act.Pull), "not for ever"


def test_a_closing_round_is_not_opened_without_who_asked_for_it(syncer: Make) -> None:
    bench = syncer(fragments=1)
    bench.join("a")
    bench.knock("b")
    bench.do(ev.CloseAsked, life=bench.life("b"), fragments=(0,))
    assert not bench.of(act.Pull)
    bench.do(ev.TookModel, life=bench.life("b"))
    assert bench.one(act.Pull).closing


def test_progress_that_a_normal_round_took_needs_no_closing_round(syncer: Make) -> None:
    bench = syncer(fragments=1)
    bench.join("a")
    pull = _due(bench)
    bench.offer("a", pull)
    bench.do(ev.CloseAsked, life=bench.life("a"), fragments=(0,))
    bench.receive("a", pull)
    bench.commit(pull)
    assert not bench.of(act.Pull)
    assert not bench.core.rounds.closings


def test_lockstep_folds_in_the_order_of_names(syncer: Make) -> None:
    bench = syncer(fragments=1, lockstep=True, learners=2)
    bench.join("a", "b")
    bench.clock("b", 4)
    bench.clock("a", 4)
    pull = bench.one(act.Pull)
    bench.push("b", pull)
    assert not bench.of(act.Fold)
    bench.push("a", pull)
    assert [fold.life.name for fold in bench.of(act.Fold)] == ["a", "b"]
