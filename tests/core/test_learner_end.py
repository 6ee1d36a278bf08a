"""The learner's half: closing, waiting in lockstep, calling a syncer that is not there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core.link import HELLO_ANSWER_NS, Standing
from diloco_plugin.core.policy import PROBE_NS

from .conftest import MS, LearnerBench

Make = Callable[..., LearnerBench]


# ---- the end ----


def test_a_finished_learner_closes_and_leaves_with_the_global_model(learner: Make) -> None:
    bench = learner()
    bench.join()
    bench.train()
    bench.do(ev.Stepped, 20, tokens=10)
    assert not bench.of(act.Report)
    bench.do(ev.FinishAsked, 1)
    assert bench.last == (
        act.Report(clock=2, step_ns=20 * MS, tokens=20),
        act.AskClose(fragments=(0, 1)),
    ), "the last clock is told, whenever the last report was"
    for fragment in (0, 1):
        bench.pull(fragment, fragment, closing=True)
        bench.do(ev.FinishAsked, 1)
        assert bench.one(act.Offer).exact
        assert not bench.of(act.AskClose), "it has asked already"
        bench.do(ev.PushSent, fragment=fragment)
        bench.fate(fragment, fragment, "merged")
        bench.land(fragment, 1)
    assert bench.core.link.standing is Standing.LEFT
    assert not bench.core.closing or bench.core.fates == {"merged": 2}


@pytest.mark.parametrize("fate", ["rejected", "stale"])
def test_a_refusal_at_the_end_is_not_argued_with(learner: Make, fate: str) -> None:
    bench = learner(fragments=1)
    bench.join()
    bench.train(2)
    bench.do(ev.FinishAsked)
    bench.pull(0, 0, closing=True)
    bench.do(ev.FinishAsked)
    bench.do(ev.PushSent, fragment=0)
    bench.fate(0, 0, fate, "not finite")
    bench.do(ev.FinishAsked)
    assert bench.last[-2:] == (act.Restore(), act.Leave())


def test_a_late_push_at_the_end_is_asked_for_again(learner: Make) -> None:
    bench = learner(fragments=1)
    bench.join()
    bench.train(2)
    bench.pull(0, 0)
    bench.do(ev.FinishAsked)
    assert not bench.of(act.AskClose), "a round has it"
    bench.do(ev.PushSent, fragment=0)
    bench.fate(0, 0, "late")
    bench.do(ev.FinishAsked)
    assert bench.one(act.AskClose).fragments == (0,)


def test_a_finished_learner_that_still_takes_the_model_takes_it_and_leaves(
    learner: Make,
) -> None:
    bench = learner(fragments=1)
    bench.welcome()
    bench.train(3)
    bench.do(ev.FinishAsked)
    assert not bench.of(act.AskClose)
    bench.land(0, 4)
    assert bench.core.link.standing is Standing.LEFT


def test_nothing_that_is_said_afterwards_brings_a_learner_back(learner: Make) -> None:
    bench = learner(fragments=1)
    bench.join()
    bench.do(ev.FinishAsked)
    assert bench.one(act.Leave)
    bench.welcome()
    bench.do(ev.TurnedAway, code="name", text="")
    bench.do(ev.Lost, reason="gone")
    bench.do(ev.Ticked, 60_000)
    assert bench.last == ()
    assert bench.core.link.standing is Standing.LEFT


def test_the_end_of_the_run_is_told_and_remembered(learner: Make) -> None:
    bench = learner()
    bench.join()
    bench.do(ev.RunCompleted, reason="step 100")
    bench.do(ev.Lost, reason="stops", deliberate=True)
    assert bench.core.complete == "step 100"
    late = learner()
    late.do(ev.TurnedAway, code="ended", text="over")
    assert late.core.complete == "over"


# ---- lockstep ----


def test_nobody_waits_outside_lockstep(learner: Make) -> None:
    bench = learner(overlap=0)
    bench.join()
    bench.train(9)
    assert not bench.core.must_wait()


@pytest.mark.parametrize("overlap", [0, 2])
def test_lockstep_takes_the_snapshot_when_due_and_waits_for_the_result(
    learner: Make, overlap: int
) -> None:
    bench = learner(fragments=1, lockstep=True, learners=1, overlap=overlap)
    bench.join()
    bench.train(4)
    assert bench.one(act.Snapshot)
    bench.train(overlap)
    assert bench.core.must_wait()
    bench.pull(0, 0)
    bench.do(ev.Paused)
    assert bench.one(act.Offer).steps == 4, "of the due step, not of now"
    bench.do(ev.PushSent, fragment=0)
    bench.fate(0, 0, "merged")
    bench.land(0, 1)
    assert not bench.core.must_wait()


def test_lockstep_applies_no_result_early(learner: Make) -> None:
    bench = learner(fragments=1, lockstep=True, learners=1, overlap=2)
    bench.join()
    bench.train(4)
    bench.pull(0, 0)
    bench.train()
    bench.do(ev.PushSent, fragment=0)
    bench.announce(0, 1)
    bench.do(ev.Arrived, fragment=0, version=1)
    bench.do(ev.Paused)
    assert not bench.of(act.Apply)
    bench.train()
    assert bench.one(act.Apply).version == 1


def test_lockstep_waits_for_a_buffer_rather_than_take_the_snapshot_later(learner: Make) -> None:
    bench = learner(fragments=4, staging=1, lockstep=True, learners=1, overlap=2)
    bench.join()
    bench.train(1)
    assert not bench.core.must_wait()
    bench.train(1)
    assert bench.core.must_wait(), "fragment 2 is due, and fragment 1 has the buffer"
    bench.pull(0, 1)
    bench.do(ev.Paused)
    bench.do(ev.PushSent, fragment=1)
    bench.do(ev.Paused)
    assert bench.one(act.Snapshot).fragment == 2
    assert not bench.core.must_wait()


def test_lockstep_with_a_refused_push_goes_on(learner: Make) -> None:
    bench = learner(fragments=1, lockstep=True, learners=1, overlap=0)
    bench.join()
    bench.train(4)
    bench.pull(0, 0)
    bench.do(ev.Paused)
    bench.do(ev.PushSent, fragment=0)
    bench.fate(0, 0, "rejected", "not finite")
    bench.do(ev.Paused)
    assert not bench.of(act.Snapshot), "no result of another snapshot would come"
    assert not bench.core.must_wait()


@pytest.mark.parametrize(
    "kind", [(ev.Lost, {"reason": "gone"}), (ev.RunCompleted, {"reason": "T"})]
)
def test_lockstep_does_not_wait_for_what_cannot_come(
    learner: Make, kind: tuple[type[ev.Event], dict[str, str]]
) -> None:
    bench = learner(fragments=1, lockstep=True, learners=1, overlap=0)
    bench.join()
    bench.train(4)
    assert bench.core.must_wait()
    bench.do(kind[0], **kind[1])
    assert not bench.core.must_wait()


def test_lockstep_closes_at_a_due_step_without_staging_twice(learner: Make) -> None:
    bench = learner(fragments=1, lockstep=True, learners=1, overlap=2)
    bench.join()
    bench.train(4)
    for _ in range(3):
        bench.do(ev.FinishAsked)
        assert not bench.of(act.Snapshot)


# ---- calling ----


def test_a_lost_syncer_is_called_with_growing_patience(learner: Make) -> None:
    bench = learner()
    calls = []
    while len(calls) < 6:
        bench.now_ms = max(bench.now_ms, -(-bench.core.next_deadline_ns() // MS))
        bench.do(ev.Ticked, 0)
        if bench.of(act.SayHello):
            calls.append(bench.now_ms)
    waits = [after - before for before, after in pairwise(calls)]
    assert all(HELLO_ANSWER_NS // MS <= wait <= 10_000 for wait in waits)
    assert HELLO_ANSWER_NS > 2 * PROBE_NS, "a claimed name is decided before it asks again"


def test_a_connection_that_breaks_again_and_again_does_not_delay_the_call(learner: Make) -> None:
    bench = learner()
    bench.join()
    bench.do(ev.Lost, reason="cut")
    deadline = bench.core.next_deadline_ns()
    for _ in range(9):
        bench.do(ev.Lost, 1, reason="cut")
    assert bench.core.next_deadline_ns() == deadline


def test_a_syncer_that_is_there_again_is_called_at_once_but_not_by_all_at_once(
    learner: Make,
) -> None:
    bench = learner()
    bench.do(ev.Connected)
    bench.do(ev.Ticked, 0)
    assert bench.of(act.SayHello)
    bench.join()
    bench.do(ev.Lost, reason="cut")
    bench.do(ev.Connected)
    assert bench.core.next_deadline_ns() <= (bench.now_ms + 1000) * MS


def test_silence_for_a_lease_ends_the_connection(learner: Make) -> None:
    bench = learner(lease=4.0)
    bench.join()
    beats = 0
    for _ in range(4):
        bench.do(ev.Ticked, 801)
        beats += len(bench.of(act.Beat))
    assert beats == 4
    bench.do(ev.Ticked, 801)
    assert bench.one(act.Reconnect)


def test_a_learner_that_was_asleep_reads_its_mail_before_it_gives_up(learner: Make) -> None:
    bench = learner(lease=4.0)
    bench.join()
    bench.do(ev.Ticked)
    bench.do(ev.Ticked, 3_600_000)
    assert not bench.of(act.Reconnect)
    bench.do(ev.SyncerHeard)
    bench.do(ev.Ticked, 3000)
    assert not bench.of(act.Reconnect)


def test_a_loss_frees_all_buffers_and_training_goes_on(learner: Make) -> None:
    bench = learner()
    bench.join()
    bench.train(2)
    bench.pull(0, 0)
    bench.train()
    bench.announce(1, 1)
    bench.do(ev.Lost, reason="cut")
    assert bench.last[:2] == (act.Release(fragment=1), act.Forfeit())
    bench.do(ev.PushSent, fragment=0)
    bench.train(5)
    bench.do(ev.Ticked, 20_000)
    assert bench.one(act.SayHello).versions == (0, 0)
    bench.welcome(keep=True)
    bench.pull(9, 0)
    bench.train()
    assert bench.one(act.Offer).steps == 9, "what was trained alone counts"


def test_being_turned_away_while_connected_frees_all_buffers(learner: Make) -> None:
    bench = learner()
    bench.join()
    bench.announce(1, 1)
    bench.do(ev.TurnedAway, code="name", text="taken")
    assert bench.one(act.Release).fragment == 1


@pytest.mark.parametrize(
    ("code", "again"),
    [("name", True), ("stopping", True), ("full", True), ("layout", False), ("ended", False)],
)
def test_only_a_final_refusal_ends_the_calls(learner: Make, code: str, again: bool) -> None:
    bench = learner()
    bench.do(ev.Ticked)
    bench.do(ev.TurnedAway, code=code, text="")
    bench.do(ev.Ticked, 60_000)
    assert bool(bench.of(act.SayHello)) is again


def test_who_is_a_stranger_to_the_syncer_introduces_itself_again(learner: Make) -> None:
    bench = learner()
    bench.join()
    bench.do(ev.Strange)
    bench.do(ev.Strange)
    assert bench.last == ()
    bench.do(ev.Ticked, 1000)
    assert bench.one(act.SayHello)


def test_a_pause_is_not_taken_for_a_slow_step(learner: Make) -> None:
    bench = learner()
    bench.join()
    bench.train(5)
    bench.do(ev.Stepped, 60_000, tokens=1)
    bench.do(ev.Paused, 60_000)
    bench.do(ev.Stepped, 60_000, tokens=1)
    assert bench.core.step_ns == 30 * MS


# ---- saying it again, and saying it to the user ----


def test_that_the_model_is_held_is_said_again_until_the_syncer_shows_that_it_knows(
    learner: Make,
) -> None:
    bench = learner()
    bench.join()
    bench.do(ev.Ticked, 4000)
    assert [type(a) for a in bench.last] == [act.Beat, act.SayTaken]
    bench.pull(0, 0)
    bench.do(ev.Ticked, 4000)
    assert bench.last == (act.Beat(),)


def test_closing_rounds_are_asked_for_again_until_one_pulls(learner: Make) -> None:
    bench = learner()
    bench.join()
    bench.train()
    bench.do(ev.FinishAsked)
    assert bench.one(act.AskClose).fragments == (0, 1)
    bench.pull(0, 0, closing=True)
    bench.do(ev.Ticked, 4000)
    assert bench.one(act.AskClose).fragments == (1,)
    bench.pull(1, 1, closing=True)
    bench.do(ev.Ticked, 4000)
    assert not bench.of(act.AskClose), "it would only open another round"


def test_what_is_released_at_a_boundary_makes_room_for_what_waits(learner: Make) -> None:
    bench = learner(fragments=2)
    bench.core.have_buffers(staging=2, arrivals=1)
    bench.join()
    bench.train()
    for fragment in (0, 1):
        bench.pull(fragment, fragment)
    bench.train()
    bench.do(ev.PushSent, fragment=0)
    bench.fate(0, 0, "merged")
    bench.land(0, 1)
    bench.do(ev.Announced, fragment=0, version=2, clock=0, exact=False)
    bench.do(ev.Arrived, fragment=0, version=2)
    bench.do(ev.PushSent, fragment=1)
    bench.fate(1, 1, "merged")
    bench.announce(1, 1)
    assert not bench.of(act.Fetch), "the only buffer is taken"
    bench.core.parts[0].steps = 0  # nothing was trained since fragment 0 was applied
    bench.do(ev.FinishAsked)
    assert bench.one(act.Release).fragment == 0
    assert bench.one(act.Fetch).fragment == 1


def test_a_refusal_is_told_to_who_trains_on_once_for_each_reason(learner: Make) -> None:
    bench = learner()
    bench.do(ev.TurnedAway, code="name", text="taken")
    bench.do(ev.Paused)
    assert bench.last == (), "whoever waits at the door is told there"
    bench.train()
    assert "taken" in bench.one(act.Note).text
    bench.do(ev.TurnedAway, code="name", text="taken")
    bench.train()
    assert not bench.of(act.Note)
    bench.do(ev.TurnedAway, code="layout", text="another model")
    bench.train()
    assert "another model" in bench.one(act.Note).text
    bench.join()
    bench.do(ev.TurnedAway, code="layout", text="another model")
    bench.train()
    assert bench.of(act.Note), "it was in since"


def test_a_refusal_that_is_not_final_does_not_sound_so(learner: Make) -> None:
    bench = learner()
    for code, end in (
        ("full", "training goes on, and it asks again"),
        ("run", "training goes on alone"),
    ):
        bench.do(ev.TurnedAway, code=code, text="No room. Wait.")
        bench.train()
        assert bench.one(act.Note).text.endswith(f"(No room. Wait); {end}")


@pytest.mark.parametrize(
    ("keep", "so"),
    [
        (True, "will be offered to the run"),
        (False, "count only if the run has no model yet: this learner takes the run's"),
    ],
)
def test_who_lost_its_syncer_says_that_it_found_it_again_and_what_its_steps_are_worth(
    learner: Make, keep: bool, so: str
) -> None:
    bench = learner()
    bench.welcome()
    assert not bench.of(act.Note)
    bench.do(ev.Lost, reason="the connection broke")
    bench.train(400)
    bench.welcome(keep=keep)
    found = "found the syncer again after 12 s; 400 steps taken alone"
    assert bench.one(act.Note).text == f"{found} {so}"
    bench.welcome()
    assert not bench.of(act.Note), "it was not alone"


@pytest.mark.parametrize(
    ("fate", "end"),
    [
        ("merged", "the 5 steps taken alone are in the global model"),
        ("late", "of the 5 steps taken alone, what they did to 1 of 2 fragments is in the global"),
    ],
)
def test_what_became_of_steps_taken_alone_is_said_once_all_of_it_is_known(
    learner: Make, fate: str, end: str
) -> None:
    bench = learner(fragments=2)
    bench.join()
    bench.do(ev.Lost, reason="the connection broke")
    bench.train(5)
    bench.welcome(epoch=8, keep=True)
    for fragment, met in ((0, "merged"), (1, fate)):
        bench.pull(fragment, fragment)
        bench.train()
        bench.do(ev.PushSent, fragment=fragment)
        assert not bench.of(act.Note)
        bench.fate(fragment, fragment, met)
        if met == "merged" and fragment == 0:
            assert not bench.of(act.Note), "the other fragment's fate is open"
    if fate == "late":  # it is offered again next time, but others were faster
        assert not bench.of(act.Note)
        bench.announce(1, 1)
        bench.do(ev.Arrived, fragment=1, version=1)
        bench.do(ev.Paused)
    assert bench.one(act.Note).text.startswith(end)
    bench.land(0, 1)
    bench.pull(9, 0)
    bench.train()
    bench.fate(9, 0, "merged")
    assert not bench.of(act.Note)


def test_a_syncer_that_ends_with_the_run_is_not_looked_for_in_words(learner: Make) -> None:
    bench = learner()
    bench.join()
    bench.do(ev.RunCompleted, reason="the run has reached its last step (9)")
    bench.do(ev.Lost, reason="the run has reached its last step (9)", deliberate=True)
    assert bench.one(act.Note).text == "the run is over, and its syncer ends"


def test_the_end_of_the_run_is_told_to_the_user_once(learner: Make) -> None:
    bench = learner()
    bench.join()
    bench.do(ev.RunCompleted, reason="the run has reached its last step (9)")
    assert "last step (9): stop training" in bench.one(act.Note).text
    bench.do(ev.RunCompleted, reason="the run has reached its last step (9)")
    assert not bench.of(act.Note)


def test_refused_progress_is_replaced_by_the_newest_version_that_was_heard_of(
    learner: Make,
) -> None:
    bench = learner(fragments=1, codec="bf16")
    bench.join()
    bench.train()
    bench.announce(0, 2)
    bench.do(ev.FetchFailed, fragment=0, version=2)
    bench.do(ev.FinishAsked)
    bench.pull(5, 0, closing=True)
    bench.do(ev.FinishAsked)
    bench.do(ev.PushSent, fragment=0)
    bench.fate(5, 0, "rejected", "consumed base")
    bench.do(ev.FinishAsked)
    assert not bench.of(act.Leave), "version 2 holds what it gave before"
    bench.do(ev.Announced, fragment=0, version=3, clock=9, exact=True)
    bench.do(ev.Arrived, fragment=0, version=3)
    bench.do(ev.FinishAsked)
    assert bench.of(act.Leave)


def test_in_lockstep_what_is_asked_for_now_goes_before_what_comes_due_later(learner: Make) -> None:
    """A learner that was alone for a while has a clock ahead of the syncer's."""
    bench = learner(fragments=3, sync_every=4, overlap=1, lockstep=True, learners=2)
    bench.join()
    bench.train(2)
    assert [part.due for part in bench.core.parts] == [None, 1, 2]
    bench.pull(0, 0)
    bench.do(ev.Paused)
    assert bench.of(act.Unstage) == [act.Unstage(fragment=2)]
    assert [(offer.round, offer.fragment) for offer in bench.of(act.Offer)] == [(0, 0)]
    bench.do(ev.PushSent, fragment=0)
    bench.do(ev.Paused)
    assert bench.of(act.Snapshot) == [act.Snapshot(fragment=2)], "its turn comes"


@pytest.mark.parametrize("told", [False, True])
def test_who_never_heard_what_became_of_its_push_does_not_leave_without_the_version_that_has_it(
    learner: Make, told: bool
) -> None:
    bench = learner(fragments=1)
    bench.join()
    bench.train(2)
    bench.pull(0, 0)
    bench.train()
    bench.do(ev.PushSent, fragment=0)
    bench.land(0, 1)  # others made that one, while the push was on its way
    if told:
        bench.fate(0, 0, "merged")
        bench.do(ev.Announced, fragment=0, version=2, clock=0, exact=False)
    bench.do(ev.Lost, reason="the connection broke")
    bench.do(ev.FinishAsked)
    bench.welcome(keep=True)
    bench.do(ev.Announced, fragment=0, version=2, clock=0, exact=False)
    bench.do(ev.FinishAsked)
    assert not bench.of(act.Leave)
    bench.do(ev.Arrived, fragment=0, version=2)
    bench.do(ev.FinishAsked)
    assert bench.one(act.Apply).version == 2
    assert bench.one(act.AskClose).fragments == (0,), "its copy is not exact"
    assert not bench.of(act.Leave)


def test_who_is_back_does_not_leave_before_it_knows_what_it_misses(learner: Make) -> None:
    bench = learner(fragments=1)
    bench.join()
    bench.do(ev.Lost, reason="the connection broke")
    bench.do(ev.FinishAsked)
    bench.welcome(keep=True)
    bench.do(ev.FinishAsked)
    assert not bench.of(act.Leave)
    bench.announce(0, 0)
    bench.do(ev.FinishAsked)
    assert bench.one(act.Leave)
