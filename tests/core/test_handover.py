"""Who gives its inner optimizer state to a joiner, when it begins anew, and when that ends."""

from __future__ import annotations

from collections.abc import Callable

from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core.handover import RESTARTS_MAX, SLOW

from .conftest import SyncerBench

Make = Callable[..., SyncerBench]
H = 4
LEASE_MS = 15_000


def _trains(bench: SyncerBench, name: str, clock: int) -> None:
    bench.do(ev.Progressed, life=bench.life(name), clock=clock, step_ns=1000, tokens=100 * clock)


def _run(syncer: Make, *names: str) -> SyncerBench:
    """Learners that train; the first is the furthest."""
    bench = syncer(fragments=1, sync_every=H, lease=LEASE_MS / 1000)
    bench.join(*names)
    for index, name in enumerate(names):
        _trains(bench, name, 3 - index)
    return bench


def _wants(bench: SyncerBench, name: str) -> None:
    bench.knock(name, wants_state=True)


def _offers(bench: SyncerBench, asked: act.RequestState, clock: int, nothing: str = "") -> None:
    fields = {"ticket": asked.ticket, "clock": clock, "size": 8, "nothing": nothing}
    bench.do(ev.StateOffered, life=asked.donor, **fields)


def test_the_furthest_gives_and_the_joiner_hears_of_one_step(syncer: Make) -> None:
    bench = _run(syncer, "far", "near")
    _wants(bench, "new")
    asked = bench.one(act.RequestState)
    assert asked.donor.name == "far"
    _offers(bench, asked, clock=3)
    offer = bench.one(act.OfferState)
    assert (offer.joiner.name, offer.clock, offer.size) == ("new", 3, 8)


def test_a_state_that_is_h_steps_old_on_its_way_is_asked_for_anew_and_not_for_ever(
    syncer: Make,
) -> None:
    bench = _run(syncer, "far")
    _wants(bench, "new")
    clock = 3
    for _ in range(RESTARTS_MAX):
        asked = bench.one(act.RequestState)
        _offers(bench, asked, clock)
        _trains(bench, "far", clock + H)
        assert not bench.of(act.EndState), "H steps are not too old"
        clock += H + 1
        _trains(bench, "far", clock)
        assert bench.one(act.EndState).ticket == asked.ticket
    _offers(bench, bench.one(act.RequestState), clock)
    _trains(bench, "far", clock + H + 1)
    assert bench.one(act.RefuseState).reason == SLOW


def test_a_donor_that_has_none_or_does_not_answer_is_followed_by_the_next(syncer: Make) -> None:
    bench = _run(syncer, "far", "middle", "near")
    _wants(bench, "new")
    _offers(bench, bench.one(act.RequestState), clock=3, nothing="its state is in shards")
    assert bench.one(act.RequestState).donor.name == "middle"
    for second in range(LEASE_MS // 1000):
        bench.do(ev.Heard, 0, life=bench.life("middle"))
        _trains(bench, "near", 2 + second)
        bench.do(ev.Heard, 1000, life=bench.life("new"))
    assert bench.one(act.RequestState).donor.name == "near"


def test_a_donor_gives_to_one_at_a_time(syncer: Make) -> None:
    bench = _run(syncer, "far")
    _wants(bench, "first")
    asked = bench.one(act.RequestState)
    _wants(bench, "second")
    assert not bench.of(act.RequestState)
    bench.do(ev.StateTaken, life=bench.life("first"), ticket=asked.ticket)
    assert bench.one(act.RequestState).joiner.name == "second"


def test_a_donor_that_is_lost_ends_what_it_gave(syncer: Make) -> None:
    bench = _run(syncer, "far", "near")
    _wants(bench, "new")
    _offers(bench, bench.one(act.RequestState), clock=3)
    bench.do(ev.Vanished, life=bench.life("far"))
    assert bench.one(act.RequestState).donor.name == "near"
