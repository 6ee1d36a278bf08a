"""One life of the syncer after another: what is inherited, what is fenced, what waits for room."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core.events import Life
from diloco_plugin.core.link import Standing
from diloco_plugin.core.parameters import Parameters
from diloco_plugin.core.past import LIVES_MAX, Past
from diloco_plugin.core.policy import COMMIT_RETRY_NS
from diloco_plugin.core.syncer import RunState, SyncerCore
from diloco_plugin.testing import World

from .conftest import MS, LearnerBench, SyncerBench


def merge(bench: SyncerBench, past: Past, clock: int) -> None:
    """Merge what is due, durably."""
    bench.clock("a", clock)
    while pulls := bench.of(act.Pull):
        (pull,) = pulls
        bench.push("a", pull)
        bench.do(ev.MergeDone, round=pull.round, ok=True)
        past.add(bench.one(act.Commit))
        bench.do(ev.CommitDone, round=pull.round)


def next_life(bench: SyncerBench, past: Past, lineage: int, **options: Any) -> SyncerBench:
    after = SyncerBench(bench.fragments)
    after.core = SyncerCore(
        bench.core.parameters,
        epoch=bench.core.epoch + 1,
        past=copy.deepcopy(past),
        lineage=lineage,
        now_ns=0,
        **options,
    )
    return after


@pytest.fixture
def lived(syncer: Callable[..., SyncerBench]) -> tuple[SyncerBench, Past]:
    """A life with learner a and merges of both fragments."""
    bench, past = syncer(overlap=1), Past.seeded(2)
    bench.join("a")
    merge(bench, past, 4)
    return bench, past


def test_the_next_life_goes_on_where_the_last_one_was(lived: tuple[SyncerBench, Past]) -> None:
    bench, past = lived
    after = next_life(bench, past, lineage=7)
    assert after.core.state is RunState.RUNNING
    assert after.core.rounds.versions == bench.core.rounds.versions == past.versions
    assert after.core.clock == past.clock == 4
    assert after.core.rounds.next_round >= bench.core.rounds.next_round - 1


def test_a_learner_keeps_what_it_holds_of_the_same_lineage(
    lived: tuple[SyncerBench, Past],
) -> None:
    bench, past = lived
    after = next_life(bench, past, lineage=7)
    after.knock("a", epoch=7, versions=(1, 0))
    assert after.one(act.Admit).keep
    assert [a.version for a in after.of(act.Announce)] == past.versions


def test_a_learner_of_a_lineage_that_was_rolled_back_takes_the_model_again(
    lived: tuple[SyncerBench, Past],
) -> None:
    bench, past = lived
    after = next_life(bench, past, lineage=8)
    after.knock("a", epoch=7, versions=(1, 1))
    assert not after.one(act.Admit).keep


def test_who_gave_nothing_to_an_earlier_life_takes_the_model_again(
    lived: tuple[SyncerBench, Past],
) -> None:
    bench, past = lived
    after = next_life(bench, past, lineage=7)
    after.knock("b", epoch=7, versions=(1, 1))
    assert not after.one(act.Admit).keep


def test_progress_that_an_earlier_life_has_merged_is_not_merged_again(
    lived: tuple[SyncerBench, Past],
) -> None:
    bench, past = lived
    after = next_life(bench, past, lineage=7)
    after.knock("a", epoch=7, versions=(0, 0))  # the announcements were lost with the syncer
    after.clock("a", 8)
    (pull,) = after.of(act.Pull)
    after.offer("a", pull, base=0)
    assert [(fate, reason) for _, fate, reason in after.fates()] == [("rejected", "consumed base")]


def test_a_syncer_refuses_who_knows_a_newer_life(syncer: Callable[..., SyncerBench]) -> None:
    bench = syncer()
    bench.knock("a", epoch=8)
    refusal = bench.one(act.Refuse)
    assert refusal.code == "fenced"
    assert "older" in refusal.text


def test_a_learner_refuses_an_older_life_and_goes_on_looking(
    learner: Callable[..., LearnerBench],
) -> None:
    bench = learner()
    bench.join()
    bench.do(ev.Lost, reason="gone")
    bases = [part.base for part in bench.core.parts]
    bench.welcome(epoch=6)
    assert bench.core.link.standing is Standing.ALONE
    assert bench.core.link.refusal is not None
    assert bench.core.link.refusal[0] == "fenced"
    assert [part.base for part in bench.core.parts] == bases, "it keeps what it has"
    bench.do(ev.Ticked, after_ms=20_000)
    hello = bench.one(act.SayHello)
    assert (hello.epoch, hello.versions) == (7, tuple(bases))
    bench.welcome(epoch=8, keep=True)
    assert bench.core.link.standing is Standing.LIVE


def test_what_finds_no_room_is_tried_again_and_nobody_hears_of_it_before(
    syncer: Callable[..., SyncerBench],
) -> None:
    bench = syncer(overlap=1)
    bench.join("a")
    bench.clock("a", 4)
    (pull,) = bench.of(act.Pull)
    bench.push("a", pull)
    bench.do(ev.MergeDone, round=pull.round, ok=True)
    first = bench.one(act.Commit)
    bench.do(ev.CommitFailed, round=pull.round, reason="the disk is full")
    assert not bench.of(act.Announce)
    assert not bench.fates()
    assert bench.one(act.Note).urgent
    assert bench.core.status(0)["rounds"]["stuck"] == "the disk is full"
    assert bench.core.next_deadline_ns() <= bench.now_ms * MS + COMMIT_RETRY_NS
    bench.do(ev.Ticked, COMMIT_RETRY_NS // MS)
    assert bench.one(act.Commit) == first
    bench.do(ev.CommitFailed, round=pull.round, reason="the disk is full")
    assert not bench.of(act.Note), "said once"
    bench.do(ev.Ticked, COMMIT_RETRY_NS // MS)
    bench.do(ev.CommitDone, round=pull.round)
    assert bench.one(act.Announce).version == 1
    assert not bench.one(act.Note).urgent
    assert [fate for _, fate, _ in bench.fates()] == ["merged"]
    assert not bench.core.status(0)["rounds"]["stuck"]


def test_a_full_disk_does_not_keep_the_syncer_from_stopping(
    syncer: Callable[..., SyncerBench],
) -> None:
    bench = syncer(overlap=1)
    bench.join("a")
    bench.clock("a", 4)
    (pull,) = bench.of(act.Pull)
    bench.push("a", pull)
    bench.do(ev.MergeDone, round=pull.round, ok=True)
    bench.do(ev.CommitFailed, round=pull.round, reason="the disk is full")
    bench.do(ev.StopAsked, reason="told to stop")
    assert [fate for _, fate, _ in bench.fates()] == ["abandoned"]
    assert bench.core.state is RunState.STOPPED


@pytest.mark.parametrize("seed", range(5))
def test_the_past_is_the_same_as_what_the_core_remembers(seed: int) -> None:
    parameters = Parameters(fragments=3, sync_every=6, overlap=2, lease=4.0)
    world = World(parameters, fragments=3, seed=seed, seeded=True, durable=True)
    for name in ("a", "b", "c"):
        world.learner(name, step_ms=40)
    world.run(20)
    core, past = world.syncer.core, world.past
    assert past is not None
    assert past.versions == list(world.syncer.durable.values())
    for life, known in past.known():
        ledger = core.members.ledger(life)
        assert all(known.consumed[f] >= base for f, base in ledger.consumed.items())
        assert known.index == core.members.index_of(life.name)
    for norms, history in zip(core.rounds._norms, past.norms, strict=True):
        kept = list(norms.history)
        assert history[: len(kept)] == kept or history[-len(kept) :] == kept
    tree = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(past, str_keys=True)))
    assert msgspec.convert(tree, Past, str_keys=True) == past


def test_the_past_remembers_a_bounded_number_of_lives() -> None:
    past = Past.seeded(1)
    for number in range(LIVES_MAX + 10):
        push = act.Contribution(
            life=Life("a", f"{number:032x}"), index=0, base=number, steps=1, tokens=1, norm=1.0
        )
        past.add(
            act.Commit(
                round=number,
                fragment=0,
                version=number + 1,
                clock=number,
                exact=False,
                contributions=(push,),
            )
        )
    assert len(past.lives) == LIVES_MAX
    assert f"{LIVES_MAX + 9:032x}" in past.lives


def back(bench: SyncerBench, name: str) -> None:
    """It returns with what it holds and the steps that it has taken alone."""
    bench.knock(name, epoch=7, versions=tuple(bench.core.rounds.versions))


def of_two(syncer: Callable[..., SyncerBench]) -> tuple[SyncerBench, Past]:
    """A life in which both a and b have given."""
    bench, past = syncer(overlap=1, fragments=1, quorum=2), Past.seeded(1)
    bench.join("a", "b")
    for name in "ab":
        bench.clock(name, 4)
    (pull,) = bench.of(act.Pull)
    for name in "ab":
        bench.push(name, pull)
    bench.do(ev.MergeDone, round=pull.round, ok=True)
    past.add(bench.one(act.Commit))
    bench.do(ev.CommitDone, round=pull.round)
    return bench, past


def with_one_back(syncer: Callable[..., SyncerBench]) -> SyncerBench:
    """The next life of such a run, which ends at step 8; a is back, b is not."""
    bench, past = of_two(syncer)
    after = next_life(bench, past, lineage=7, steps=8)
    back(after, "a")
    return after


def test_merges_and_the_end_wait_for_all_who_trained_on_while_the_syncer_was_down(
    syncer: Callable[..., SyncerBench],
) -> None:
    after = with_one_back(syncer)
    assert after.one(act.Note).text.endswith("at most: b")
    after.clock("a", 9)
    assert after.core.state is RunState.RUNNING
    assert not after.of(act.Note), "once"
    assert not after.of(act.Pull)
    back(after, "b")
    assert after.one(act.Admit).keep
    assert after.one(act.CompleteRun).lives == (after.life("a"), after.life("b"))
    assert after.one(act.Pull).lives == (after.life("a"), after.life("b"))


def test_nobody_is_waited_for_that_left_long_ago_or_must_take_the_model_anew(
    syncer: Callable[..., SyncerBench],
) -> None:
    bench, past = of_two(syncer)
    anew = next_life(bench, past, lineage=8)
    past.versions[0] += bench.core.parameters.max_staleness + 1
    later = next_life(bench, past, lineage=7)
    for after in (anew, later):
        after.join("c")
        after.clock("c", 12)
        assert after.one(act.Pull).lives == (after.life("c"),)


def test_while_the_syncer_sleeps_nobody_misses_the_wait_for_those_who_trained_on(
    syncer: Callable[..., SyncerBench],
) -> None:
    after = with_one_back(syncer)
    after.clock("a", 9)
    after.do(ev.Heard, 60_000, life=after.life("a"))
    assert not after.of(act.Pull)
    back(after, "b")
    assert after.one(act.CompleteRun).lives == (after.life("a"), after.life("b"))


def test_who_lost_its_connection_when_the_run_ended_is_let_into_the_end(
    syncer: Callable[..., SyncerBench],
) -> None:
    after = with_one_back(syncer)
    back(after, "b")
    after.do(ev.Vanished, life=after.life("b"))
    after.clock("a", 9)
    assert after.one(act.CompleteRun).lives == (after.life("a"),)
    back(after, "b")
    assert after.one(act.Admit).keep
    assert after.one(act.CompleteRun).lives == (after.life("b"),)
    after.knock("c")
    assert after.one(act.Refuse).code == "ended"


def test_the_end_does_not_wait_long_for_those_who_do_not_come_back(
    syncer: Callable[..., SyncerBench],
) -> None:
    after = with_one_back(syncer)
    after.clock("a", 9)
    while not after.of(act.CompleteRun):
        after.do(ev.Heard, 1000, life=after.life("a"))
        assert after.now_ms < after.core.parameters.lease * 1000 + 12_000


def test_a_run_that_had_ended_in_order_waits_for_nobody(
    syncer: Callable[..., SyncerBench],
) -> None:
    bench, past = of_two(syncer)
    for clean in (True, False):
        after = next_life(bench, past, lineage=7, steps=4, clean=clean)
        after.do(ev.Ticked)
        assert (after.core.state is RunState.STOPPED) == clean
