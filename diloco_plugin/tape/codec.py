"""Events and actions of the syncer core to msgpack and back, strictly: [class name, fields].

A step is [event, outcome]; the outcome is the list of actions, or a text: what the core raised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias, get_args

import msgspec

from diloco_plugin.core.actions import SyncerAction
from diloco_plugin.core.events import SyncerEvent
from diloco_plugin.errors import DamagedError

#: What came of an event: the actions, or what the core raised (a bug of ours).
Outcome: TypeAlias = tuple[SyncerAction, ...] | str

EVENTS: Final[dict[str, type[SyncerEvent]]] = {c.__name__: c for c in get_args(SyncerEvent)}
ACTIONS: Final[dict[str, type[SyncerAction]]] = {c.__name__: c for c in get_args(SyncerAction)}
_encoder: Final = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Step:
    """One event, and what the core made of it."""

    event: SyncerEvent
    outcome: Outcome


def encode_step(step: Step) -> bytes:
    """Msgpack of one step. Raises what msgspec raises, e.g. for an int of more than 64 bits."""
    outcome = step.outcome
    if not isinstance(outcome, str):
        return _encoder.encode((_named(step.event), [_named(action) for action in outcome]))
    return _encoder.encode((_named(step.event), outcome))


def join_steps(encoded: list[bytes]) -> bytes:
    """One payload of several encoded steps."""
    return _encoder.encode([msgspec.Raw(step) for step in encoded])


def decode_steps(payload: bytes) -> list[Step]:
    """The steps of a payload.

    Raises:
        DamagedError: it is not one; an unknown class or field is named.
    """
    try:
        items = msgspec.msgpack.decode(payload, type=list[tuple[Any, Any]])
    except Exception as error:  # also RecursionError and UnicodeDecodeError
        raise DamagedError(f"a record of the tape holds no steps: {error}.") from None
    return [Step(_thing(event, EVENTS), _outcome(outcome)) for event, outcome in items]


def _named(thing: SyncerEvent | SyncerAction) -> tuple[str, SyncerEvent | SyncerAction]:
    return type(thing).__name__, thing


def _outcome(item: Any) -> Outcome:
    if isinstance(item, str):
        return item
    if not isinstance(item, list):
        raise DamagedError(f"{item!r} on the tape is no outcome: expected a list of actions.")
    return tuple(_thing(action, ACTIONS) for action in item)


def _thing(item: Any, known: dict[str, Any]) -> Any:
    match item:
        case [str(name), dict(values)] if name in known:
            pass
        case [str(name), _]:
            raise DamagedError(
                f"{name!r} on the tape is unknown: expected one of {', '.join(known)}."
            )
        case _:
            raise DamagedError(f"{item!r:.80} on the tape is neither an event nor an action.")
    try:
        made = msgspec.convert(values, known[name])
        odd = _odd_fields(values, msgspec.to_builtins(made))
    except Exception as error:
        raise DamagedError(f"{name} on the tape has a wrong value: {error}.") from None
    if odd:
        raise DamagedError(
            f"{name} on the tape has other fields than this version's: {', '.join(sorted(odd))}."
        )
    return made


def _odd_fields(given: Any, made: Any) -> set[str]:
    """Fields that only one of two trees has: msgspec ignores or fills in those of dataclasses."""
    if isinstance(made, dict):
        odd = {str(name) for name in given.keys() ^ made.keys()}
        return odd.union(*(_odd_fields(given[name], made[name]) for name in given.keys() & made))
    if isinstance(made, (list, tuple)):
        pairs = zip(given, made, strict=True)
        return set[str]().union(*(_odd_fields(one, other) for one, other in pairs))
    return set()
