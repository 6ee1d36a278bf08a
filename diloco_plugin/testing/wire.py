"""Connections of the simulated world, and what a push carries in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

MS: Final = 1_000_000


@dataclass(slots=True)
class Wire:
    """One connection. What was sent before it broke may still arrive at either end (`drains`)."""

    open: bool = True
    drains: bool = False
    #: nothing passes, and nobody has noticed yet
    silent: bool = False
    last_ns: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a snapshot holds: the progress of one fragment since it was last overwritten."""

    fragment: int
    base: int
    lineage: int
