"""A thawed core is the frozen one: it decides alike, and its parts are shared alike."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core.events import Life
from diloco_plugin.core.parameters import Parameters
from diloco_plugin.core.syncer import SyncerCore
from diloco_plugin.errors import DamagedError
from diloco_plugin.tape.freezing import freeze, thaw
from tests.tape.worlds import eventful


def over_bytes(core: SyncerCore) -> SyncerCore:
    return thaw(msgspec.msgpack.decode(msgspec.msgpack.encode(freeze(core))))


class Twin:
    """Steps a copy beside each core; now and then the copy is frozen and thawed, or made anew."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._core: SyncerCore | None = None
        self._copy: SyncerCore | None = None
        self.thawed = 0

    def decide(self, core: SyncerCore, event: ev.SyncerEvent) -> tuple[act.SyncerAction, ...]:
        copy = self._copy if core is self._core else None
        chance = self._random.random()
        if copy is None or chance < 0.02:
            copy = over_bytes(core)
        elif chance < 0.1:
            copy, self.thawed = over_bytes(copy), self.thawed + 1
        self._core, self._copy = core, copy
        assert copy.next_deadline_ns() == core.next_deadline_ns()
        actions = core.step(event)
        assert copy.step(event) == actions
        copy.check()
        return actions


@given(seed=st.integers(0, 2**32), lockstep=st.booleans())
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_a_thawed_core_decides_exactly_like_the_one_that_was_frozen(
    seed: int, lockstep: bool
) -> None:
    twin = Twin(seed)
    world = eventful(seed, lockstep=lockstep, merge_failures=0.1, decide=twin.decide)
    assert twin.thawed > 0
    assert freeze(over_bytes(world.syncer.core)) == freeze(world.syncer.core)


def test_what_was_one_object_is_one_object_again() -> None:
    core = over_bytes(eventful(1).syncer.core)
    assert core.rounds._members is core.members
    assert core.rounds._out is core._out
    assert core.rounds.parameters is core.parameters
    assert isinstance(core.rounds.queue, deque)
    assert isinstance(core.rounds.fates, Counter)


def test_the_order_of_dictionaries_is_kept() -> None:
    core = SyncerCore(Parameters(), epoch=1)
    for name in ("z", "a", "m"):
        core.step(ev.PlaceAsked(now_ns=1, name=name))
    assert list(over_bytes(core).members._reserved) == ["z", "a", "m"]


def test_a_core_that_holds_what_no_tape_can_hold_is_not_frozen() -> None:
    core = SyncerCore(Parameters(), epoch=1)
    core.refused["x"] = print  # type: ignore[assignment]
    with pytest.raises(TypeError, match="cannot be written"):
        freeze(core)
    core = SyncerCore(Parameters(), epoch=1)
    core.more = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="grown"):
        freeze(core)


SOME = freeze(eventful(3).syncer.core)


@pytest.mark.parametrize(
    "tree",
    [
        None, 7, "SyncerCore", [], ["SyncerCore"], ["SyncerCore", {}], ["ref", 0], ["ref", True],
        ["list", []], ["object", "os.system", ["id"]], ["Popen", {}], ["Fate", "lucky"],
        ["deque", -1, []], ["dict", [[["list", []], 1]]], ["set", [["list", []]]], ["Life", ["a"]],
        [SOME[0], SOME[1] | {"more": 1}], [SOME[0], SOME[1] | {"members": ["system", {}]}],
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_our_error(tree: Any) -> None:
    with pytest.raises(DamagedError):
        thaw(tree)


def mutated(tree: Any, draw: random.Random) -> Any:
    """The tree with one node replaced."""
    if not isinstance(tree, (list, dict)) or not tree or draw.random() < 0.1:
        return draw.choice((None, -1, 2**63, "x", [], {}, ["ref", 0], ["ref", 10**6], ["list", [1]],
                            ["deque", "a", []], ["Stage", "live"], ["dict", 3], ["set", [[]]],
                            float("nan")))  # fmt: skip
    key = draw.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
    changed = dict(tree) if isinstance(tree, dict) else list(tree)
    changed[key] = mutated(tree[key], draw)
    return changed


def test_a_changed_state_is_thawed_or_refused_with_our_error_and_no_other() -> None:
    draw, refused = random.Random(5), 0
    for _ in range(2000):
        try:
            thaw(mutated(SOME, draw))
        except DamagedError:
            refused += 1
    assert refused > 200


def test_deep_nesting_is_refused_with_our_error() -> None:
    tree: Any = 1
    for _ in range(5000):
        tree = ["tuple", [tree]]
    with pytest.raises(DamagedError):
        thaw(tree)


def test_a_life_is_a_life_again() -> None:
    core = SyncerCore(Parameters(), epoch=1)
    core.step(ev.Knocked(now_ns=1, life=Life("a", "1"), fragments=2))
    (member,) = over_bytes(core).members
    assert type(member.life) is Life
