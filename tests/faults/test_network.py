"""One learner of four is behind a bad line: nobody waits for it, and it is back when it heals."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco_plugin.core import report
from diloco_plugin.syncer import Syncer
from tests.end_to_end.fleet import Trainee
from tests.end_to_end.processes import free_ports
from tests.faults.ledger import Ear, Ledger
from tests.faults.proxy import HOST, Proxy
from tests.soak import SOAK
from tests.syncers import global_model, running_syncer
from tests.waiting import until

PATIENCE = 60.0
ROUNDS = 20 * SOAK
#: Into a chunk of some 300 KiB, past any header.
MIDDLE = 100_000


def host_works() -> bool:
    try:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not host_works(), reason=f"needs {HOST}, as Linux has it")


def wide_model(seed: int) -> nn.Module:
    """Two fragments of some 300 KiB; the inputs and outputs of `small_model`."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 256), nn.Linear(256, 1))


@dataclass
class Fleet:
    syncer: Syncer
    proxy: Proxy
    good: list[Trainee]
    bad: Trainee
    ledger: Ledger

    def joined(self) -> Counter[str]:
        """Rounds that each has joined."""
        learners = self.syncer.status()["learners"]
        return Counter({learner["name"]: learner["rounds_joined"] for learner in learners})

    @property
    def merged(self) -> int:
        return int(self.syncer.status()["rounds"]["merged"])

    @property
    def rejected(self) -> set[str]:
        return set(self.syncer.status()["fates"]["rejected"])

    def merges(self, count: int) -> None:
        goal = self.merged + count
        self.bad.wait(lambda: self.merged >= goal, PATIENCE * SOAK, f"{count} merges")

    def recovers(self) -> None:
        """The one behind the bad line takes part again."""
        goal = self.joined()["bad"] + 3
        self.bad.wait(lambda: self.joined()["bad"] >= goal, PATIENCE, "it takes part again")
        self.ledger.look()


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Everybody trains; a round needs three pushes, so those behind good lines are enough."""
    port = free_ports()
    options: dict[str, Any] = {"sync_every": 8, "fragments": 2, "overlap": 2, "quorum": 3}
    ear, ledger = Ear(monkeypatch), Ledger(tmp_path)
    with running_syncer(
        bind=f"tcp://127.0.0.1:{port}", config={"state": str(tmp_path)}, **options
    ) as syncer:
        with Proxy(port) as proxy:
            step = {"step_seconds": 0.01}
            good = [
                Trainee(wide_model(i), syncer.address, f"l{i}", data=i, **step) for i in range(3)
            ]
            bad = Trainee(wide_model(3), proxy.address, "bad", data=3, **step)
            fleet = Fleet(syncer, proxy, good, bad, ledger)
            until(lambda: min([*fleet.joined().values(), len(fleet.joined()) - 2]) >= 2, PATIENCE)
            yield fleet
            proxy.heal()
            for trainee in [*good, bad]:
                trainee.finish(PATIENCE)
        report.check(syncer._core)
        rounds = syncer._core.rounds
        until(lambda: not rounds.pending(), PATIENCE)
        assert rounds.offered == sum(rounds.fates.values())
        model = global_model(syncer)
        assert all(bool(tensor.isfinite().all()) for tensor in model.values())
        assert all(torch.equal(p, model[name]) for name, p in bad.model.named_parameters())
    ledger.look()
    ledger.check(ear)


def test_nobody_waits_for_a_learner_behind_a_black_hole(fleet: Fleet) -> None:
    fleet.proxy.hold()
    steps, merged, before = fleet.bad.steps, fleet.merged, fleet.joined()
    fleet.merges(ROUNDS)
    joined, rounds = fleet.joined() - before, fleet.merged - merged
    # A round that is short of a push, because somebody has nothing new to give, may wait for the
    # silent one: until its lease is over, and then never again.
    assert sum(joined[f"l{i}"] for i in range(3)) >= 2 * rounds, joined
    assert joined["bad"] <= 4
    assert fleet.bad.steps > steps, "it waited for the line"
    fleet.proxy.heal()
    fleet.recovers()


def test_nobody_waits_for_a_learner_behind_a_slow_line(fleet: Fleet) -> None:
    fleet.proxy.delay, fleet.proxy.rate = 0.1, 200_000.0
    fleet.merges(ROUNDS)
    fleet.proxy.heal()
    fleet.recovers()


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("kind", ["cut", "flip"])
def test_a_chunk_that_is_cut_or_spoiled_in_its_middle_leaves_no_trace(
    fleet: Fleet, kind: Any, way: Any
) -> None:
    expected = {"corrupt"} if (kind, way) == ("flip", "up") else set()
    for time in range(4):  # five spoiled chunks are no accident any more: quarantine
        harmed = fleet.proxy.harmed
        fleet.proxy.harm(kind, way, MIDDLE + 1000 * time)
        fleet.bad.wait(lambda n=harmed: fleet.proxy.harmed > n, PATIENCE, "it happens")
        fleet.recovers()
        # a push that comes too late for its round is not looked at any more
        if time and fleet.rejected == expected:
            break
    fleet.merges(ROUNDS)
    assert fleet.rejected == expected


def test_all_connections_may_break_at_any_time(fleet: Fleet) -> None:
    for _ in range(2 * SOAK):
        fleet.proxy.cut()
        fleet.merges(3)
        fleet.recovers()
