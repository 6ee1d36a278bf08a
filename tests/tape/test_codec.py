"""Events and actions survive the tape; nothing else is read from it."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.errors import DamagedError
from diloco_plugin.tape.codec import (
    ACTIONS,
    EVENTS,
    Step,
    decode_steps,
    encode_step,
    join_steps,
)

INTS = st.integers(-(2**63), 2**64 - 1)  # what msgpack holds
TEXTS = st.text()
LIVES = st.builds(ev.Life, TEXTS, TEXTS)
CONTRIBUTIONS = st.builds(
    act.Contribution,
    life=LIVES,
    index=INTS,
    base=INTS,
    steps=INTS,
    tokens=INTS,
    norm=st.floats(allow_nan=False),
)
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: INTS,
    bool: st.booleans(),
    float: st.floats(),
    str: TEXTS,
    ev.Life: LIVES,
    act.Fate: st.sampled_from(act.Fate),
    tuple[int, ...]: st.lists(INTS).map(tuple),
    tuple[ev.Life, ...]: st.lists(LIVES).map(tuple),
    tuple[act.Contribution, ...]: st.lists(CONTRIBUTIONS).map(tuple),
    int | None: st.none() | INTS,
    tuple[str, str] | None: st.none() | st.tuples(TEXTS, TEXTS),
}
EVENT = ev.Ticked(now_ns=1)


def after_tape(step: Step) -> Step:
    (back,) = decode_steps(join_steps([encode_step(step)]))
    return back


def any_of(kind: type) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{name: BY_TYPE[hint] for name, hint in get_type_hints(kind).items()})


def subclasses(base: type) -> set[type]:
    return {base}.union(*(subclasses(c) for c in base.__subclasses__()))


@pytest.mark.parametrize("kind", EVENTS.values(), ids=list(EVENTS))
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_event_survives(kind: type[ev.SyncerEvent], data: st.DataObject) -> None:
    event = data.draw(any_of(kind))
    back = after_tape(Step(event, ())).event
    assert type(back) is kind
    assert repr(back) == repr(event)  # nan is not itself


@pytest.mark.parametrize("kind", ACTIONS.values(), ids=list(ACTIONS))
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_action_survives(kind: type[act.SyncerAction], data: st.DataObject) -> None:
    action = data.draw(any_of(kind))
    back = after_tape(Step(EVENT, (action, action))).outcome
    assert back == (action, action)


def test_what_the_core_raised_and_what_is_not_a_number_survive() -> None:
    assert after_tape(Step(EVENT, "AssertionError: x")).outcome == "AssertionError: x"
    life = ev.Life("a", "b")
    norm = ev.Received(now_ns=1, life=life, round=0, fragment=0, norm=math.inf, finite=False)
    assert after_tape(Step(norm, ())) == Step(norm, ())


def test_every_class_that_the_core_knows_is_known_to_the_tape() -> None:
    of_learner = {c.__name__ for c in ev.LearnerEvent.__args__}  # type: ignore[attr-defined]
    bases = {"Event", "FromLife"}
    assert {c.__name__ for c in subclasses(ev.Event)} - of_learner - bases <= EVENTS.keys()


@pytest.mark.parametrize(
    "plain",
    [
        None, {}, "x", [1], [[]], [[1, []]], [[["Ticked", {"now_ns": 1}]]],
        [[["Ticked", {"now_ns": 1}], None]], [[["Ticked", {"now_ns": 1}], [1]]],
        [[["Ticked", {}], []]], [[["Ticked", {"now_ns": 1, "more": 2}], []]],
        [[["Ticked", {"now_ns": "1"}], []]], [[["Ticked", {"now_ns": 1.5}], []]],
        [[["system", {"command": "id"}], []]], [[["Event", {"now_ns": 1}], []]],
        [[["Stop", {"lives": [], "reason": ""}], []]],
        [[["Ticked", {"now_ns": 1}], [["Ticked", {"now_ns": 1}]]]],
        [[["Ticked", {"now_ns": 1}], [["Beat", {}]]]],
        [[["Ticked", {"now_ns": 1}], [["TellFate", {"life": ["a", "b"], "round": 0, "fragment": 0,
                                                    "fate": "lucky", "reason": ""}]]]],
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_our_error(plain: Any) -> None:
    with pytest.raises(DamagedError):
        decode_steps(msgspec.msgpack.encode(plain))


def test_an_unknown_field_is_found_at_any_depth() -> None:
    push = act.Contribution(life=ev.Life("a", "b"), index=0, base=0, steps=1, tokens=1, norm=1.0)
    commit = act.Commit(round=0, fragment=0, version=1, clock=1, exact=False, contributions=(push,))
    tree = msgspec.msgpack.decode(encode_step(Step(EVENT, (commit,))))
    decode_steps(msgspec.msgpack.encode([tree]))
    tree[1][0][1]["contributions"][0]["more"] = 1
    with pytest.raises(DamagedError, match=r"Commit .* other fields .*: more"):
        decode_steps(msgspec.msgpack.encode([tree]))


@given(st.binary(max_size=200))
def test_any_bytes_are_steps_or_our_error(data: bytes) -> None:
    with suppress(DamagedError):
        decode_steps(data)
