"""The whole state of a syncer core as a plain tree, and back.

Numbers, texts, truth and None stand for themselves; everything else is a list that begins with its
kind. What may be held in two places (objects and mutable containers) is numbered in the order in
which it is met, and ["ref", number] afterwards: what was one object is one object again. Only the
classes listed here are ever made, without calling anything of theirs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Final

import msgspec

from diloco_plugin.core.actions import Fate
from diloco_plugin.core.claims import Claim, Claims
from diloco_plugin.core.closings import Closings
from diloco_plugin.core.events import Knocked, Life
from diloco_plugin.core.flight import Ask, Phase, Push, Round
from diloco_plugin.core.handover import Handover, Handovers, Leg
from diloco_plugin.core.members import Ledger, Member, Members, Stage, Stay
from diloco_plugin.core.norms import Norms
from diloco_plugin.core.parameters import Parameters
from diloco_plugin.core.room import Room
from diloco_plugin.core.rounds import Rounds
from diloco_plugin.core.syncer import RunState, SyncerCore
from diloco_plugin.errors import DamagedError

_OBJECTS: Final[dict[str, type]] = {
    c.__name__: c
    for c in (
        SyncerCore, Members, Member, Ledger, Rounds, Round, Push, Norms, Claims, Claim, Knocked,
        Parameters, Handovers, Handover, Closings, Room, Stay,
    )
}  # fmt: skip
_ENUMS: Final[dict[str, type[Enum]]] = {
    c.__name__: c for c in (RunState, Stage, Phase, Ask, Fate, Leg)
}
_SCALARS: Final = (bool, int, float, str, type(None))
_encoder: Final = msgspec.msgpack.Encoder()


def freeze(core: SyncerCore) -> list[Any]:
    """The state of a core between two steps.

    Raises:
        TypeError: the core holds something that is not on the list above.
    """
    return _Freezer().object(core)


def thaw(tree: Any) -> SyncerCore:
    """A core that decides exactly as the frozen one would have.

    Raises:
        DamagedError: this is not the state of a core of this version.
    """
    try:
        core = _Thawer().thing(tree)
    except DamagedError:
        raise
    except Exception as error:  # a key that cannot be one, a negative length, too deep, ...
        raise DamagedError(f"a state on the tape cannot be restored: {error}.") from None
    if type(core) is not SyncerCore:
        raise DamagedError(f"a {type(core).__name__} on the tape where a syncer's state should be.")
    return core


def _attributes(kind: type) -> frozenset[str]:
    if is_dataclass(kind):
        return frozenset(f.name for f in fields(kind))
    return _plain_attributes()[kind]


@cache
def _plain_attributes() -> dict[type, frozenset[str]]:
    """What the plain classes of the core hold, as a fresh core shows it."""
    core = SyncerCore(Parameters(), epoch=1)
    core.rounds.lay_out(1)
    found: dict[type, frozenset[str]] = {}
    waiting: list[Any] = [core]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif type(one) in _OBJECTS.values() and not is_dataclass(one) and type(one) not in found:
            found[type(one)] = frozenset(vars(one))
            waiting += vars(one).values()
    return found


class _Freezer:
    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def thing(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is tuple:
            return ["tuple", self._all(value)]
        if kind is Life:
            return ["Life", self._all(value)]
        if kind is frozenset:
            return ["frozenset", self._in_order(value)]
        if _ENUMS.get(kind.__name__) is kind:
            return [kind.__name__, value.value]
        known = self._numbers.get(id(value))
        if known is not None:
            return ["ref", known]
        if _OBJECTS.get(kind.__name__) is kind:
            return self.object(value)
        self._numbers[id(value)] = len(self._numbers)
        if kind is list:
            return ["list", self._all(value)]
        if kind is set:
            return ["set", self._in_order(value)]
        if kind is deque:
            return ["deque", value.maxlen, self._all(value)]
        if kind is dict or kind is Counter:
            pairs = [[self.thing(k), self.thing(v)] for k, v in value.items()]
            return [kind.__name__, pairs]
        raise TypeError(f"a {kind.__name__} in the core cannot be written to a tape: {value!r:.80}")

    def object(self, value: Any) -> list[Any]:
        self._numbers[id(value)] = len(self._numbers)
        names = sorted(_attributes(type(value)))
        if hasattr(value, "__dict__") and vars(value).keys() != set(names):
            raise TypeError(f"{type(value).__name__} has grown attributes since it was made")
        return [type(value).__name__, {name: self.thing(getattr(value, name)) for name in names}]

    def _all(self, values: Iterable[Any]) -> list[Any]:
        return [self.thing(value) for value in values]

    def _in_order(self, values: Iterable[Any]) -> list[Any]:
        """A set has no order that another process would repeat."""
        met = len(self._numbers)
        items = self._all(values)
        if len(self._numbers) > met:
            raise TypeError("a set of objects in the core cannot be written to a tape")
        return sorted(items, key=_encoder.encode)


class _Thawer:
    def __init__(self) -> None:
        self._met: list[Any] = []

    def thing(self, tree: Any) -> Any:
        if type(tree) in _SCALARS:
            return tree
        match tree:
            case ["ref", int(number)] if 0 <= number < len(self._met):
                return self._met[number]
            case ["tuple", list(items)]:
                return tuple(self._all(items))
            case ["frozenset", list(items)]:
                return frozenset(self._all(items))
            case ["Life", [str(name), str(incarnation)]]:
                return Life(name, incarnation)
            case [str(kind), value] if kind in _ENUMS:
                return _ENUMS[kind](value)
            case [str(kind), dict(values)] if kind in _OBJECTS:
                return self._object(_OBJECTS[kind], values)
            case _:
                return self._container(tree)

    def _container(self, tree: Any) -> Any:
        made: Any
        match tree:
            case ["list", list(items)]:
                made = self._meet([])
                made += self._all(items)
            case ["set", list(items)]:
                made = self._meet(set())
                made.update(self._all(items))
            case ["deque", length, list(items)]:
                made = self._meet(deque(maxlen=length))
                made.extend(self._all(items))
            case ["dict" | "Counter" as kind, list(pairs)]:
                made = self._meet({} if kind == "dict" else Counter())
                for key, value in pairs:
                    made[self.thing(key)] = self.thing(value)
            case _:
                raise DamagedError(f"{tree!r:.80} on the tape is no part of a syncer's state.")
        return made

    def _object(self, kind: type, values: dict[Any, Any]) -> Any:
        wanted = _attributes(kind)
        if values.keys() != wanted:
            odd = ", ".join(sorted(map(str, values.keys() ^ wanted)))
            raise DamagedError(
                f"{kind.__name__} on the tape has other parts than this version's: {odd}."
            )
        made = self._meet(object.__new__(kind))
        for name in sorted(values):
            object.__setattr__(made, name, self.thing(values[name]))
        return made

    def _all(self, items: list[Any]) -> list[Any]:
        return [self.thing(item) for item in items]

    def _meet(self, made: Any) -> Any:
        self._met.append(made)
        return made
