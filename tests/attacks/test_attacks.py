"""Every attack, in plaintext and with keys: the run goes on, and the model is nobody else's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.attacks import members, states, strangers, transfers
from tests.attacks.stage import BUDGET, BUDGET_ALL, MIB, Stage, staged
from tests.soak import SOAK
from tests.waiting import until

Attack = Callable[[Stage], Iterator[None]]
EVERYWHERE: dict[str, Attack] = {
    attack.__name__: attack
    for attack in [*strangers.ATTACKS, *members.ATTACKS, *transfers.ATTACKS, *states.ATTACKS]
}
WITH_KEYS: dict[str, Attack] = {
    attack.__name__: attack for attack in [*strangers.WITH_KEYS, *members.WITH_KEYS]
}


@pytest.fixture(scope="module")
def plaintext() -> Iterator[Stage]:
    with staged(None) as stage:
        yield from _over_all(stage)


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with staged(tmp_path_factory.mktemp("keys")) as stage:
        yield from _over_all(stage)


def _over_all(stage: Stage) -> Iterator[Stage]:
    before = stage.rss()
    yield stage
    after = stage.rss()
    print(f"\nRSS of the daemon: {before / MIB:.0f} -> {after / MIB:.0f} MiB")
    assert after - before <= BUDGET_ALL, "memory piles up"


def withstand(stage: Stage, attack: Attack) -> None:
    """While it goes on and afterwards, all that is promised holds."""
    joined, rss = stage.honest_rounds(), stage.rss()
    with contextmanager(attack)(stage):
        stage.go_on()
    stage.go_on()
    stage.only_legal_pushes_were_merged()
    until(lambda: stage.rss() - rss <= BUDGET, 5, f"{stage.rss() - rss:,} bytes are left behind")
    now = stage.honest_rounds()
    assert all(now[name] > joined[name] for name in joined), "an honest learner was dismissed"


@pytest.mark.parametrize("name", EVERYWHERE)
def test_the_run_withstands_in_plaintext(plaintext: Stage, name: str) -> None:
    for _ in range(SOAK):
        withstand(plaintext, EVERYWHERE[name])


@pytest.mark.parametrize("name", EVERYWHERE | WITH_KEYS)
def test_the_run_withstands_with_keys(curve: Stage, name: str) -> None:
    for _ in range(SOAK):
        withstand(curve, (EVERYWHERE | WITH_KEYS)[name])
