"""What can happen. Time comes in with every event (`now_ns`, monotonic nanoseconds), only so.

A life is one incarnation of a learner: the same name may live several times, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class Life(NamedTuple):
    """One incarnation of a learner."""

    name: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation[:6]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of every event."""

    now_ns: int


# ---- at the syncer ----


@dataclass(frozen=True, slots=True, kw_only=True)
class FromLife(Event):
    """Base of what a learner's life causes."""

    life: Life


@dataclass(frozen=True, slots=True, kw_only=True)
class Knocked(FromLife):
    """A learner wants in. The shell compared run, protocol, layout: `problem` is (code, text)."""

    fragments: int
    epoch: int = 0
    versions: tuple[int, ...] = ()
    data_seed: int | None = None
    #: it has no progress of its own: it would take the inner optimizer state of another one
    wants_state: bool = False
    problem: tuple[str, str] | None = None


class Heard(FromLife):
    """Any sign of life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed(FromLife):
    """A learner's clock moved."""

    clock: int
    step_ns: int
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswered(FromLife):
    """The old holder of a claimed name is still there."""

    nonce: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered(FromLife):
    """An answer to a pull: a push is on offer, or `nothing` says why not."""

    round: int
    fragment: int
    base: int = 0
    steps: int = 0
    tokens: int = 0
    nothing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received(FromLife):
    """All bytes of a push are here: `norm` is its L2 norm, `finite` whether every element is."""

    round: int
    fragment: int
    norm: float
    finite: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFailed(FromLife):
    """The bytes of a push were wrong, are not to be had, or do not come for a whole lease."""

    round: int
    fragment: int
    reason: str


class SeedReceived(FromLife):
    """The seeder's whole model is here and finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedFailed(FromLife):
    """The seeder's model cannot be used, or (`full`) the disk has no room for it."""

    reason: str
    full: bool = False


class TookModel(FromLife):
    """The learner holds every fragment of the global model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseAsked(FromLife):
    """The learner has finished training and has progress in these fragments."""

    fragments: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Barred(FromLife):
    """The operator does not admit this learner any more."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOffered(FromLife):
    """A donor's snapshot of its inner optimizer state, as of `clock`, can be fetched; `nothing`
    says why not.
    """

    ticket: int
    clock: int = 0
    #: bytes
    size: int = 0
    nothing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTaken(FromLife):
    """A joiner has the inner optimizer state that it begins with, a peer's or its own."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFailed(FromLife):
    """What was offered to this joiner cannot be used there, or does not come."""

    ticket: int
    reason: str


class Left(FromLife):
    """The learner said goodbye."""


class Vanished(FromLife):
    """The transport says that nobody is there any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeDone(Event):
    """The outer step of a round was computed; `ok` is False when its result was not finite."""

    round: int
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitDone(Event):
    """The new version of the round's fragment is as durable as the run asks for."""

    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFailed(Event):
    """There is no room for the new version (the disk is full); nothing has changed there."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceAsked(Event):
    """Somebody wants to know its place among the learners before it joins, to shard its data."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked(Event):
    """The operator wants the daemon to stop."""

    reason: str


class Ticked(Event):
    """Time passed."""


# ---- at the learner ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped(Event):
    """A boundary after a real optimizer step that used `tokens` units of work."""

    tokens: int


class Paused(Event):
    """A boundary without a step: joining, closing, or waiting in lockstep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcomed(Event):
    """The syncer let this learner in."""

    epoch: int
    clock: int
    #: what this learner holds is of the syncer's lineage
    keep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedAway(Event):
    """The syncer refused this learner."""

    code: str
    text: str


class SeedAsked(Event):
    """This learner's model becomes the global one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled(Event):
    """The syncer wants the pseudo-gradient of a fragment."""

    round: int
    fragment: int
    closing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced(Event):
    """A newer version of a fragment exists; `exact`: it travels without losing a digit."""

    fragment: int
    version: int
    clock: int
    exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived(Event):
    """All bytes of an announced version are in an arrival buffer."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFailed(Event):
    """The announced version cannot be had any more; a newer one is or will be announced."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebased(Event):
    """The base of a fragment is the applied version now, and its arrival buffer is free."""

    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSent(Event):
    """The staging buffer of a push is free again (once for each Offer that offered something)."""

    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FateTold(Event):
    """What became of a push."""

    round: int
    fragment: int
    fate: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateAnnounced(Event):
    """A peer's inner optimizer state, as of its step `clock`, can be fetched: `size` bytes."""

    ticket: int
    donor: str
    clock: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateArrived(Event):
    """All of it is here, and it fits this learner's optimizer."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateUnusable(Event):
    """It does not fit, is damaged, or does not come."""

    ticket: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRefused(Event):
    """Nobody gives it: training begins without."""

    reason: str


class SyncerHeard(Event):
    """Any sign of life of the syncer."""


class Connected(Event):
    """The transport reached something at the syncer's address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Event):
    """The transport lost the syncer, or the syncer said that it goes away (`deliberate`)."""

    reason: str
    deliberate: bool = False


class Strange(Event):
    """The syncer does not know this learner (it was restarted, or the lease ended)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCompleted(Event):
    """The run has reached its last step."""

    reason: str


class FinishAsked(Event):
    """Training is over here: close and leave."""


StateEvent: TypeAlias = StateAnnounced | StateArrived | StateUnusable | StateRefused
SyncerEvent: TypeAlias = (
    Knocked | Heard | Progressed | ProbeAnswered | Offered | Received | TransferFailed
    | SeedReceived | SeedFailed | TookModel | CloseAsked | StateOffered | StateTaken | StateFailed
    | Barred | Left | Vanished | MergeDone | CommitDone | CommitFailed | PlaceAsked | StopAsked
    | Ticked
)  # fmt: skip
LearnerEvent: TypeAlias = (
    Stepped | Paused | Welcomed | TurnedAway | SeedAsked | Pulled | Announced | Arrived
    | FetchFailed | Rebased | PushSent | FateTold | StateEvent | SyncerHeard | Connected | Lost
    | Strange | RunCompleted | FinishAsked | Ticked
)  # fmt: skip
