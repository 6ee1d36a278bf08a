"""One round on its way: who was asked, who answered, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from .events import Life


class Phase(str, Enum):
    """Where a round stands."""

    COLLECTING = "collecting"
    GRACE = "grace"
    MERGING = "merging"
    COMMITTING = "committing"


class Ask(str, Enum):
    """What became of one pull."""

    WAITING = "waiting"
    SENDING = "sending"
    IN = "in"
    NOTHING = "nothing"
    GONE = "gone"


@dataclass(slots=True)
class Push:
    """A push that was let in; it has no fate yet."""

    base: int
    steps: int
    tokens: int
    norm: float = 0.0


@dataclass(slots=True)
class Round:
    """One merge of one fragment, on its way."""

    number: int
    fragment: int
    closing: bool
    clock: int
    opened_ns: int
    asked: dict[Life, Ask]
    #: finished learners for whose sake this closing round was opened; it waits for them a while
    requesters: set[Life]
    phase: Phase = Phase.COLLECTING
    quorum: int = 0
    grace_until_ns: int = 0
    closed_ns: int = 0
    #: the commit failed, for want of room, and is tried again then; 0: it is under way
    retry_ns: int = 0
    pushes: dict[Life, Push] = field(default_factory=dict)
    refused_for_norm: int = 0

    @property
    def open(self) -> bool:
        """May pushes still come?"""
        return self.phase in (Phase.COLLECTING, Phase.GRACE)

    def count(self, *states: Ask) -> int:
        """How many pulls are in one of these states."""
        return sum(state in states for state in self.asked.values())
