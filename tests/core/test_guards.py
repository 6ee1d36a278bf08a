"""What a hostile learner might do to the others by obeying the letter of the rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core.closings import CLOSINGS_MAX
from diloco_plugin.core.policy import NORM_HISTORY_MIN, NORM_ROUNDS_REFUSED_MAX

from .conftest import MS, SyncerBench

Make = Callable[..., SyncerBench]
LEASE_MS = 15_000


def _closing(bench: SyncerBench, name: str) -> list[act.Pull]:
    bench.do(ev.CloseAsked, life=bench.life(name), fragments=(0,))
    return [pull for pull in bench.of(act.Pull) if pull.closing]


def _goes_mute(bench: SyncerBench, name: str) -> int:
    """It steps, is asked, and does not answer. Returns its steps until the others went on."""
    bench.join("honest", name)
    bench.clock(name, 4)
    bench.clock("honest", 4)
    pull = bench.one(act.Pull)
    bench.push("honest", pull)
    waited = 0
    while not bench.of(act.Merge):
        waited += 1
        bench.clock("honest", 4 + waited)
        bench.do(ev.Progressed, 500, life=bench.life(name), clock=4 + waited, step_ns=1, tokens=1)
        assert waited < 100
    bench.commit(pull)
    return waited


def test_one_of_two_cannot_teach_a_norm_in_rounds_to_which_the_other_gives_nothing(
    syncer: Make,
) -> None:
    bench = syncer(fragments=1, overlap=0, norm_guard=10.0)
    bench.join("honest", "liar")
    for round_ in range(NORM_HISTORY_MIN):
        bench.clock("honest", 4 * round_ + 4)
        pull = bench.one(act.Pull)
        bench.push("honest", pull)
        bench.push("liar", pull)
        bench.commit(pull)
    for _ in range(min(CLOSINGS_MAX, NORM_ROUNDS_REFUSED_MAX + 1)):
        (pull,) = _closing(bench, "liar")
        bench.nothing("honest", pull)
        bench.push("liar", pull, norm=99.0)
        assert bench.fates() == [("liar", "rejected", "norm")]


def test_a_closing_round_waits_once_for_who_asks_and_does_not_answer(syncer: Make) -> None:
    bench = syncer(fragments=1, overlap=0, lease=LEASE_MS / 1000)
    bench.stay("honest", "idle")
    (pull,) = _closing(bench, "idle")
    bench.push("honest", pull)
    for _ in range(16):  # words do not prolong it
        bench.clock("honest", bench.core.clock)
        bench.do(
            ev.Offered, life=bench.life("idle"), round=77, fragment=0, base=0, steps=1, tokens=1
        )
        bench.do(ev.CloseAsked, 1000, life=bench.life("idle"), fragments=(0,))
        if bench.of(act.Merge):
            break
    bench.commit(pull)
    assert not _closing(bench, "idle")
    bench.clock("honest", 1000)
    assert not bench.one(act.Pull).closing


def test_who_steps_and_never_answers_holds_up_one_round_for_a_lease(syncer: Make) -> None:
    bench = syncer(fragments=1, overlap=0, quorum=2, lease=LEASE_MS / 1000)
    assert _goes_mute(bench, "mute") <= 2 * LEASE_MS // 1000 + 2
    following = bench.one(act.Pull)
    bench.push("honest", following, base=1)
    assert bench.of(act.Merge), "nobody waits for it again"


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize("stay", [0, 25, 100])
def test_closing_rounds_block_due_ones_for_a_25th_of_the_askers_stay_and_an_8th_of_a_lease(
    syncer: Make, stay: int, sends: bool
) -> None:
    bench = syncer(fragments=1, overlap=0, lease=LEASE_MS / 1000)
    bench.stay("honest", "greedy", seconds=stay)
    held_ms = 0
    for _ in range(CLOSINGS_MAX):
        for pull in _closing(bench, "greedy"):
            if sends:
                bench.offer("greedy", pull, base=pull.version)
            bench.push("honest", pull, base=pull.version)
            ready_ms = bench.now_ms
            while not bench.of(act.Merge):
                bench.do(ev.Heard, 0, life=bench.life("greedy"))
                clock = bench.core.clock + 4  # the fragment is due again
                bench.do(ev.Progressed, 50, life=bench.life("honest"), clock=clock, step_ns=MS)
            held_ms += bench.now_ms - ready_ms
            bench.commit(pull)
    least = LEASE_MS / 8 + stay * 1000 / 25
    assert least <= held_ms <= least + CLOSINGS_MAX * 100


def test_a_closing_round_does_not_wait_for_leavers_when_nobody_else_gives_to_a_due_fragment(
    syncer: Make,
) -> None:
    bench = syncer(fragments=1, overlap=0, quorum=2, lease=LEASE_MS / 1000)
    bench.join("honest", "half")
    (pull,) = _closing(bench, "half")
    bench.nothing("honest", pull)
    bench.offer("half", pull)
    bench.clock("honest", 4)
    assert not bench.of(act.Drop)
    bench.do(ev.Heard, LEASE_MS // 7, life=bench.life("half"))
    assert bench.one(act.Drop).round == pull.round
    bench.do(ev.Heard, life=bench.life("half"))
    assert not bench.one(act.Pull).closing


def test_a_leaver_that_asks_for_nothing_and_takes_its_time_holds_up_no_due_round(
    syncer: Make,
) -> None:
    bench = syncer(fragments=2, overlap=1, lease=LEASE_MS / 1000)
    bench.stay("honest", "idle")
    pulls = bench.of(act.Pull)
    bench.do(ev.CloseAsked, life=bench.life("idle"), fragments=())
    for _ in range(6):
        (pull,) = pulls
        bench.push("honest", pull, base=pull.version)
        assert bench.one(act.Merge).round == pull.round
        bench.nothing("idle", pull)  # late enough
        bench.commit(pull)
        pulls = bench.of(act.Pull)
        while not pulls:
            bench.clock("honest", bench.core.clock + 1)
            pulls = bench.of(act.Pull)


def _held(bench: SyncerBench) -> act.Pull:
    """A closing round for "half" that blocks a due one."""
    (pull,) = _closing(bench, "half")
    bench.push("honest", pull, base=pull.version)
    bench.offer("half", pull, base=pull.version)
    bench.clock("honest", bench.core.clock + 4)
    assert not bench.of(act.Merge)
    return pull


def test_who_leaves_while_it_is_waited_for_is_waited_for_when_it_comes_back(syncer: Make) -> None:
    bench = syncer(fragments=1, overlap=0, lease=LEASE_MS / 1000)
    bench.stay("honest", "half")
    pull = _held(bench)
    bench.do(ev.Vanished, life=bench.life("half"))
    bench.commit(pull)
    (due,) = bench.of(act.Pull)
    bench.push("honest", due, base=due.version)
    bench.commit(due)
    bench.do(ev.Heard, 3_600_000, life=bench.life("honest"))
    bench.knock("half", epoch=7, versions=tuple(bench.core.rounds.versions))
    _held(bench)


def test_while_the_syncer_sleeps_nobody_uses_up_the_patience_of_others(syncer: Make) -> None:
    bench = syncer(fragments=1, overlap=0, lease=LEASE_MS / 1000)
    bench.stay("honest", "half")
    pull = _held(bench)
    bench.do(ev.Heard, 600_000, life=bench.life("half"))
    assert not bench.of(act.Merge)
    bench.receive("half", pull)
    assert bench.one(act.Merge)


def test_nobody_is_hurried_when_all_who_are_there_close(syncer: Make) -> None:
    bench = syncer(fragments=1, overlap=0, lease=LEASE_MS / 1000)
    bench.join("quick", "slow")
    bench.do(ev.CloseAsked, life=bench.life("quick"), fragments=())
    (pull,) = _closing(bench, "slow")
    bench.push("quick", pull)
    for _ in range(LEASE_MS // 1000 - 1):
        bench.do(ev.Heard, 500, life=bench.life("quick"))
        bench.do(ev.Heard, 500, life=bench.life("slow"))
        assert not bench.of(act.Merge)
    bench.push("slow", pull)
    assert bench.of(act.Merge)


def test_closing_rounds_do_not_take_the_place_of_all_others(syncer: Make) -> None:
    bench = syncer(fragments=1, overlap=0)
    bench.join("honest", "storm")
    for _ in range(CLOSINGS_MAX):
        (pull,) = _closing(bench, "storm")
        bench.nothing("honest", pull)
        bench.nothing("storm", pull)
    assert not _closing(bench, "storm")
    bench.clock("honest", 4)
    assert not bench.one(act.Pull).closing


def test_who_lets_a_closing_round_wait_for_bytes_is_not_heard_again(syncer: Make) -> None:
    bench = syncer(fragments=1, overlap=0)
    bench.stay("honest", "half")
    (pull,) = _closing(bench, "half")
    bench.push("honest", pull)
    bench.offer("half", pull)
    life = bench.life("half")
    bench.do(ev.TransferFailed, life=life, round=pull.round, fragment=0, reason="stalled")
    bench.commit(pull)
    assert not _closing(bench, "half")


def test_who_did_not_answer_a_round_is_still_waited_for_once_it_has_finished(syncer: Make) -> None:
    bench = syncer(fragments=1, overlap=0, quorum=2, lease=LEASE_MS / 1000)
    _goes_mute(bench, "slow")
    due = bench.one(act.Pull)
    bench.nothing("honest", due)
    assert bench.one(act.Drop).round == due.round, "nobody waits for it"
    (pull,) = _closing(bench, "slow")
    assert not bench.of(act.Merge)
    assert not bench.of(act.Drop)
    bench.nothing("honest", pull)
    bench.push("slow", pull)
    bench.commit(pull)
    assert bench.fates() == [("slow", "merged", "version 2")]


def test_who_answers_a_closing_round_too_late_may_ask_again(syncer: Make) -> None:
    bench = syncer(fragments=1, overlap=0, lease=LEASE_MS / 1000)
    bench.stay("honest", "slow")
    (pull,) = _closing(bench, "slow")
    bench.push("honest", pull)
    while not bench.of(act.Merge):
        bench.do(ev.Heard, 1, life=bench.life("slow"))
        bench.do(ev.Heard, 1000, life=bench.life("honest"))
    bench.commit(pull)
    assert not _closing(bench, "slow")
    bench.offer("slow", pull)
    assert bench.fates() == [("slow", "late", "the round is over")]
    (again,) = _closing(bench, "slow")
    bench.nothing("honest", again)
    bench.push("slow", again)
    assert bench.of(act.Merge)
