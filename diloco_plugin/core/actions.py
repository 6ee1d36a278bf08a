"""What may be done. Actions are intentions: the shells know about sockets, tensors and files."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from .events import Life


class Fate(str, Enum):
    """What became of a push. Every push has exactly one."""

    MERGED = "merged"
    LATE = "late"
    STALE = "stale"
    REJECTED = "rejected"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Base of every action."""


# ---- of the syncer ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit(Action):
    """Let a learner in. For a life that is in already: it comes back over a new connection, and all
    transfers of the old one are void.
    """

    life: Life
    index: int
    count: int
    clock: int
    #: the versions that it holds are of this lineage: it need not take the model again
    keep: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse(Action):
    """Turn a learner away, with a reason."""

    life: Life
    code: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TellPlace(Action):
    """The answer to PlaceAsked; `count` is 0 when nobody said how many learners there will be."""

    name: str
    index: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskHello(Action):
    """Somebody unknown speaks: ask it to introduce itself."""

    life: Life


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Action):
    """Ask the holder of a claimed name whether it is still there."""

    life: Life
    nonce: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismiss(Action):
    """Forget a life: its connection, transfers and buffers; `tell`: it should hear why."""

    life: Life
    reason: str
    tell: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSeed(Action):
    """Fetch the whole model from this learner; it becomes the global one."""

    life: Life


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull(Action):
    """Ask these learners for their pseudo-gradients of a fragment."""

    lives: tuple[Life, ...]
    round: int
    fragment: int
    version: int
    closing: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive(Action):
    """Let the bytes of an offered push come."""

    life: Life
    round: int
    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard(Action):
    """Forget the bytes of a push that will not be merged."""

    life: Life
    round: int
    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold(Action):
    """Add a complete push to its round's accumulators, weighted by tokens and steps."""

    life: Life
    round: int
    fragment: int
    tokens: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge(Action):
    """Close the accumulators of a round and take the outer step. Answer with MergeDone."""

    round: int
    fragment: int
    closing: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop(Action):
    """Forget a round and its accumulators; the fragment does not change."""

    round: int
    fragment: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """A push that is part of a merge."""

    life: Life
    index: int
    base: int
    steps: int
    tokens: int
    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit(Action):
    """Make the new version durable. Answer with CommitDone, or CommitFailed when nothing has
    changed on disk and it may be tried again.
    """

    round: int
    fragment: int
    version: int
    clock: int
    #: it came out of a closing round
    exact: bool
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce(Action):
    """Tell these learners about a version; `exact` asks for fp32 whatever the codec."""

    lives: tuple[Life, ...]
    fragment: int
    version: int
    clock: int
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TellFate(Action):
    """Tell a learner what became of its push."""

    life: Life
    round: int
    fragment: int
    fate: Fate
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestState(Action):
    """Ask a donor for a snapshot of its inner optimizer state, for a learner that joins."""

    donor: Life
    ticket: int
    joiner: Life


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferState(Action):
    """Let a joiner fetch a donor's snapshot, of so many bytes, as of its step `clock`."""

    joiner: Life
    ticket: int
    donor: Life
    clock: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndState(Action):
    """A ticket is over: pass nothing on any more, and let the donor forget its snapshot."""

    donor: Life
    ticket: int
    joiner: Life


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseState(Action):
    """Tell a joiner that nobody gives it: it begins with what it has."""

    joiner: Life
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteRun(Action):
    """Tell these learners that the run has reached its last step."""

    lives: tuple[Life, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Caution(Action):
    """Something that this learner's user should read."""

    life: Life
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(Action):
    """Something worth a line in the log; `urgent`: somebody has to do something."""

    text: str
    urgent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Action):
    """Nothing is left to decide: tell these learners, export, exit."""

    lives: tuple[Life, ...]
    reason: str


# ---- of the learner; the first five are for the training thread ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply(Action):
    """Write an arrived version into the parameters: `local <- alpha*local + (1-alpha)*global`."""

    fragment: int
    version: int
    alpha: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(Action):
    """Copy the local value of a fragment into a free staging buffer."""

    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureBase(Action):
    """The local model as it is now becomes the base of every fragment (this life seeds the run)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore(Action):
    """Overwrite the local values with the base: blending left the learner off the global model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyState(Action):
    """Begin with the inner optimizer state that has arrived; `source` says whose it is."""

    ticket: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Action):
    """Offer the staged snapshot of a fragment (or say why there is `nothing`)."""

    round: int
    fragment: int
    base: int = 0
    steps: int = 0
    tokens: int = 0
    nothing: str = ""
    #: a closing round: fp32 whatever the codec
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unstage(Action):
    """The staged snapshot of a fragment will not be pulled any more."""

    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forfeit(Action):
    """The syncer is lost: free the staging buffers of all pushes on offer (PushSent for each)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch(Action):
    """Fetch an announced version into a free arrival buffer."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(Action):
    """Stop fetching this fragment and forget what has arrived of it: its arrival buffer is free."""

    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchState(Action):
    """Fetch a peer's inner optimizer state, and see whether it fits."""

    ticket: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropState(Action):
    """Stop fetching it, and forget what has arrived."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SayState(Action):
    """Tell the syncer that nothing more is needed, or why what it offered cannot be used."""

    ticket: int
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteState(Action):
    """Say which inner optimizer state this training begins with."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSeed(Action):
    """The base is ready to be fetched by the syncer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SayHello(Action):
    """Introduce yourself; `versions` are the bases held from `epoch`, if all are held."""

    epoch: int
    versions: tuple[int, ...]
    clock: int
    wants_state: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconnect(Action):
    """Close the sockets and open new ones: this connection is dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat(Action):
    """Send a heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Action):
    """Tell the syncer clock, step time and tokens."""

    clock: int
    step_ns: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SayTaken(Action):
    """Tell the syncer that the global model is held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskClose(Action):
    """Ask for a closing round of these fragments."""

    fragments: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave(Action):
    """Say goodbye: everything that this learner had to give was taken."""


SyncerAction: TypeAlias = (
    Admit | Refuse | TellPlace | AskHello | Probe | Dismiss | RequestSeed | Pull | Receive
    | Discard | Fold | Merge | Drop | Commit | Announce | TellFate | RequestState | OfferState
    | EndState | RefuseState | CompleteRun | Caution | Note | Stop
)  # fmt: skip
LearnerAction: TypeAlias = (
    Apply | Snapshot | CaptureBase | Restore | ApplyState | Offer | Unstage | Forfeit | Fetch
    | Release | FetchState | DropState | SayState | NoteState | ServeSeed | SayHello | Reconnect
    | Beat | Report | SayTaken | AskClose | Leave | Note
)  # fmt: skip
