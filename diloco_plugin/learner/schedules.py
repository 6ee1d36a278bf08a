"""Where learning rate schedulers stand: the numbers of their state, taken and given back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diloco_plugin.learner.counting import forwards
from diloco_plugin.wire.manifest import Position


def schedulers_of(scheduler: Any) -> list[Any]:
    """One scheduler, several or none, as a list of those that keep a state, unwrapped."""
    given = scheduler if isinstance(scheduler, (list, tuple)) else [scheduler]
    inner = [one.scheduler if forwards(one) and hasattr(one, "scheduler") else one for one in given]
    return [one for one in inner if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")]


def positions(schedulers: Sequence[Any]) -> tuple[Position, ...]:
    """Where they stand. May raise RuntimeError while another thread steps one."""
    return tuple(
        Position(type(one).__name__, _numbers(one.state_dict()) or {}) for one in schedulers
    )


def move(schedulers: Sequence[Any], told: Sequence[Position]) -> None:
    """Put schedulers of the same classes where others stand: all of them, or none.

    Raises whatever a scheduler raises when it does not take it.
    """
    before = [one.state_dict() for one in schedulers]
    try:
        for one, own, position in zip(schedulers, before, told, strict=True):
            one.load_state_dict(_merged(own, position.numbers))
    except BaseException:
        for one, own in zip(schedulers, before, strict=True):
            one.load_state_dict(own)
        raise


def _numbers(tree: Any) -> Any:
    """The numbers in a tree, in the dictionaries and lists of dictionaries that hold them.

    Truth values, texts, functions and lists of numbers say how a scheduler was made, not how far it
    is; what its learning rates are now travels with the optimizer.
    """
    if isinstance(tree, dict):
        found = {k: _numbers(v) for k, v in tree.items() if isinstance(k, str)}
        return {key: value for key, value in found.items() if value is not None}
    if isinstance(tree, (list, tuple)) and any(isinstance(one, dict) for one in tree):
        return [_numbers(one) or {} if isinstance(one, dict) else {} for one in tree]
    return tree if type(tree) in (int, float) else None


def _merged(own: Any, told: Any) -> Any:
    if isinstance(own, dict) and isinstance(told, dict):
        return {
            key: _merged(value, told[key]) if key in told else value for key, value in own.items()
        }
    if isinstance(own, (list, tuple)) and isinstance(told, list) and len(own) == len(told):
        return type(own)(_merged(one, other) for one, other in zip(own, told, strict=True))
    if type(own) in (int, float) and type(told) in (int, float):
        return told
    return own
