"""Who is in: the door, leases, and whose name is whose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core.members import Members, Stage

from .conftest import MS, SyncerBench

Make = Callable[..., SyncerBench]


# ---- the door ----


def test_a_learner_is_let_in_and_handed_the_model(syncer: Make) -> None:
    bench = syncer()
    bench.knock("a")
    life = bench.life("a")
    assert bench.last == (
        act.Admit(life=life, index=0, count=1, clock=0, keep=False),
        act.Announce(lives=(life,), fragment=0, version=0, clock=0, exact=False),
        act.Announce(lives=(life,), fragment=1, version=0, clock=0, exact=False),
    )


def test_a_problem_found_by_the_shell_is_a_refusal(syncer: Make) -> None:
    bench = syncer()
    bench.knock("a", problem=("layout", "other shapes"))
    assert bench.last == (act.Refuse(life=bench.life("a"), code="layout", text="other shapes"),)
    assert bench.core.refused == {"layout": 1}


def test_who_was_turned_away_is_named_until_it_is_let_in(syncer: Make) -> None:
    bench = syncer()

    def named() -> list[tuple[str, int]]:
        away = bench.core.status(bench.now_ms * MS)["turned_away"]
        assert all(one["text"] == "other shapes" for one in away)
        return [(one["name"], one["times"]) for one in away]

    for name in "aba":
        bench.knock(name, problem=("layout", "other shapes"))
    assert named() == [("b", 1), ("a", 2)]
    bench.knock("a")
    assert named() == [("b", 1)]
    for number in range(100):
        bench.knock(f"c{number}", problem=("layout", "other shapes"))
    assert len(named()) == 8


def test_who_shares_its_part_of_the_data_is_told_what_to_do(syncer: Make) -> None:
    bench = syncer(learners=2)
    bench.join("a")
    bench.knock("b")
    assert not bench.of(act.Caution)
    bench.knock("c")
    (caution,) = bench.of(act.Caution)
    assert caution.life.name == "c"
    assert "number 3 of 2 expected" in caution.text
    assert "--learners 3 (and --override" in caution.text


def test_a_stranger_is_asked_to_introduce_itself(syncer: Make) -> None:
    bench = syncer()
    bench.do(ev.Heard, life=bench.life("a"))
    assert bench.last == (act.AskHello(life=bench.life("a")),)
    bench.do(ev.Left, life=bench.life("a"))
    assert bench.last == ()


def test_equal_data_seeds_are_cautioned_about(syncer: Make) -> None:
    bench = syncer()
    bench.knock("a", data_seed=3)
    bench.knock("b", data_seed=3)
    assert "shard" in bench.one(act.Caution).text


def test_a_returning_name_keeps_its_index(syncer: Make) -> None:
    bench = syncer()
    bench.join("a", "b")
    bench.do(ev.Left, life=bench.life("a"))
    bench.knock("a", number=2)
    assert bench.one(act.Admit).index == 0


def test_departed_lives_are_remembered_up_to_a_bound() -> None:
    members, bench = Members(), SyncerBench()
    for number in range(1500):
        life = bench.life("a", number)
        members.add(life, 0, 1, 0, None)
        members.ledger(life).consume(0, 1)
        members.remove(life)
    assert members.ledger(bench.life("a", 0)).consumed == {}
    assert members.ledger(bench.life("a", 1499)).consumed == {0: 1}


# ---- leases ----


def test_silence_beyond_the_lease_ends_a_membership(syncer: Make) -> None:
    bench = syncer(lease=4.0)
    bench.join("a", "b")
    for _ in range(4):
        bench.do(ev.Heard, 1000, life=bench.life("b"))
    assert bench.one(act.Dismiss).life.name == "a"
    assert not bench.one(act.Dismiss).tell


def test_a_syncer_that_was_asleep_does_not_expire_everybody(syncer: Make) -> None:
    bench = syncer(lease=4.0)
    bench.join("a", "b")
    bench.clock("a", 2)
    bench.do(ev.Ticked, 3_600_000)
    assert not bench.of(act.Dismiss)
    assert not bench.of(act.Drop), "nor does it take them for quiet"
    bench.do(ev.Heard, 1000, life=bench.life("a"))
    bench.do(ev.Heard, 1001, life=bench.life("a"))
    assert bench.one(act.Dismiss).life.name == "b", "but silence still counts from then on"


def test_a_returning_life_keeps_what_it_holds(syncer: Make) -> None:
    bench = syncer(fragments=1)
    bench.join("a", "b")
    bench.clock("a", 4)
    pull = bench.one(act.Pull)
    bench.offer("a", pull)
    bench.knock("a", epoch=7, versions=(0,))
    assert bench.fates() == [("a", "abandoned", "the learner is gone")]
    assert bench.one(act.Admit).keep
    assert bench.one(act.Announce).version == 0, "else it could not know that it misses nothing"
    member = bench.core.members.get(bench.life("a"))
    assert member is not None
    assert member.stage is Stage.LIVE


@pytest.mark.parametrize(
    "held", [{"epoch": 6, "versions": (0,)}, {"epoch": 7}, {"epoch": 7, "versions": (5,)}]
)
def test_who_holds_nothing_of_this_lineage_takes_the_model(
    syncer: Make, held: dict[str, object]
) -> None:
    bench = syncer(fragments=1)
    bench.join("a")
    bench.knock("a", **held)
    assert not bench.one(act.Admit).keep
    assert bench.one(act.Announce).fragment == 0


def test_a_life_that_this_syncer_never_met_keeps_nothing(syncer: Make) -> None:
    bench = syncer(fragments=1)
    bench.knock("a", epoch=7, versions=(0,))
    assert not bench.one(act.Admit).keep


def test_a_life_that_lost_its_lease_keeps_what_it_holds(syncer: Make) -> None:
    bench = syncer(fragments=1)
    bench.join("a")
    bench.do(ev.Vanished, life=bench.life("a"))
    bench.knock("a", epoch=7, versions=(0,))
    assert bench.one(act.Admit).keep


# ---- names ----


def test_a_held_name_is_given_away_when_its_holder_does_not_answer(syncer: Make) -> None:
    bench = syncer()
    bench.join("a")
    bench.knock("a", number=2)
    assert bench.last == (act.Probe(life=bench.life("a"), nonce=1),)
    bench.do(ev.Ticked, 1999)
    assert bench.last == ()
    bench.do(ev.Ticked, 1)
    assert bench.one(act.Dismiss).tell
    assert bench.one(act.Admit).life == bench.life("a", 2)


def test_a_held_name_is_refused_when_its_holder_answers(syncer: Make) -> None:
    bench = syncer()
    bench.join("a")
    bench.knock("a", number=2)
    bench.do(ev.ProbeAnswered, life=bench.life("a"), nonce=99)
    assert bench.last == (), "that answers another question"
    bench.do(ev.ProbeAnswered, life=bench.life("a"), nonce=1)
    assert bench.one(act.Refuse).life == bench.life("a", 2)
    bench.do(ev.Ticked, 3000)
    assert bench.core.members.get(bench.life("a")) is not None


def test_a_holder_that_reconnects_while_its_name_is_claimed_keeps_it(syncer: Make) -> None:
    bench = syncer()
    bench.join("a")
    bench.knock("a", number=2)
    bench.knock("a", epoch=7, versions=(0, 0))
    assert bench.one(act.Refuse).life == bench.life("a", 2)
    bench.do(ev.Ticked, 3000)
    assert bench.core.members.get(bench.life("a")) is not None


def test_a_third_claimant_is_refused_and_the_second_asks_again_unharmed(syncer: Make) -> None:
    bench = syncer()
    bench.join("a")
    bench.knock("a", number=2)
    bench.knock("a", number=2)
    assert bench.last == ()
    bench.knock("a", number=3)
    assert bench.one(act.Refuse).code == "name"


def test_a_claimant_that_goes_away_takes_its_claim_along(syncer: Make) -> None:
    bench = syncer()
    bench.join("a")
    bench.knock("a", number=2)
    bench.do(ev.Vanished, life=bench.life("a", 2))
    bench.do(ev.Ticked, 3000)
    assert bench.last == ()
    assert bench.core.members.get(bench.life("a")) is not None


def test_a_sleeping_syncer_decides_no_claim_before_it_has_read_the_answer(syncer: Make) -> None:
    bench = syncer()
    bench.join("a")
    bench.knock("a", number=2)
    bench.do(ev.Ticked, 60_000)
    assert not bench.of(act.Dismiss)
    bench.do(ev.ProbeAnswered, life=bench.life("a"), nonce=1)
    assert bench.one(act.Refuse).code == "name"


def test_a_claim_is_not_granted_after_the_end_of_the_run(syncer: Make) -> None:
    bench = syncer(steps=4)
    bench.join("a", "b")
    bench.knock("a", number=2)
    bench.clock("b", 4)
    bench.do(ev.Ticked, 2000)
    assert bench.one(act.Refuse).code == "ended"
    assert not bench.of(act.Admit)


def test_a_learner_of_an_earlier_life_brings_its_model_though_one_was_given(syncer: Make) -> None:
    """Handing out the initial model again would undo what was trained since."""
    bench = syncer()
    bench.knock("a", epoch=3, versions=(4, 4))
    assert [seed.life for seed in bench.of(act.RequestSeed)] == [bench.life("a")]
    bench.knock("b")
    assert bench.of(act.Announce) == []


def test_who_is_barred_is_dismissed_at_once_and_told_why(syncer: Make) -> None:
    bench = syncer()
    bench.join("a", "b")
    bench.do(ev.Barred, life=bench.life("a"), reason="its key is not admitted any more")
    dismissed = bench.one(act.Dismiss)
    assert (dismissed.life, dismissed.tell) == (bench.life("a"), True)
    assert dismissed.reason == "its key is not admitted any more"
    assert [member.life.name for member in bench.core.members] == ["b"]
    bench.do(ev.Heard, life=bench.life("a"))
    assert bench.last == (act.AskHello(life=bench.life("a")),)


def test_who_is_barred_leaves_no_claim_behind(syncer: Make) -> None:
    bench = syncer()
    bench.join("a")
    bench.knock("a", number=2)
    for number in (1, 2):
        bench.do(ev.Barred, life=bench.life("a", number), reason="barred")
    bench.do(ev.Ticked, 5000)
    assert not bench.of(act.Admit)
    assert not len(bench.core.members)


def test_who_was_barred_and_is_let_in_again_is_no_problem_any_more(syncer: Make) -> None:
    bench = syncer()
    barred = ev.Life("a (key 1234, taken off the list)", "0" * 32)
    bench.do(ev.Knocked, life=barred, fragments=bench.fragments, problem=("key", "not admitted"))
    bench.knock("ab")
    assert list(bench.core.turned_away) == [barred.name]
    bench.knock("a")
    assert not bench.core.turned_away
