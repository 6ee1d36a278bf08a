"""The messages of protocol version 1: what may be said, by whom, and how long it may be.

Control messages travel alone; bulk messages travel as two frames, header and payload. Everything is
msgpack by msgspec: typed, bounded, unknown fields refused. A tensor's size, dtype and place never
come from a message: both sides know them from the layout that was agreed at the door.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

import msgspec

PROTOCOL: Final = 1
#: Largest control message, in bytes. A model description of about 40,000 tensors fits.
CONTROL_BYTES_MAX: Final = 4 * 1024 * 1024
TENSORS_MAX: Final = 100_000
FRAGMENTS_MAX: Final = 4096
MODEL_CONFIG_BYTES_MAX: Final = 256 * 1024

#: Without control characters: names are printed in logs and terminals.
Name = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]{1,128}\Z")]
LongName = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Text = Annotated[str, msgspec.Meta(max_length=8192)]
Incarnation = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Fragment = Annotated[int, msgspec.Meta(ge=0, lt=FRAGMENTS_MAX)]
Token = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every message. The tag is the class name."""


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One tensor of a learner's model, as it introduces itself."""

    name: LongName
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=16)]
    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    kind: Annotated[str, msgspec.Meta(max_length=16)]
    alias_of: Annotated[str, msgspec.Meta(max_length=512)] = ""


# ---- learner to syncer, control ----


class Hello(Message, frozen=True):
    """I want to join, or to come back."""

    protocol: Count
    run: Annotated[str, msgspec.Meta(max_length=128)]
    name: Name
    incarnation: Incarnation
    #: the model, as `encode_model` says it: whoever reads it decides whether that is worth its time
    tensors: msgspec.Raw
    epoch: Count = 0
    #: versions held from that epoch, by fragment; empty when none are held
    versions: Annotated[tuple[Count, ...], msgspec.Meta(max_length=FRAGMENTS_MAX)] = ()
    clock: Count = 0
    #: seed of the data order, when the trainer has one (two equal ones are warned about)
    data_seed: int | None = None
    #: the model's config.json, if it has one; travels into the published folder
    model_config: Annotated[str, msgspec.Meta(max_length=MODEL_CONFIG_BYTES_MAX)] = ""
    version: Annotated[str, msgspec.Meta(max_length=64)] = ""
    #: I have no progress of my own: give me a peer's inner optimizer state
    wants_state: bool = False


class Heartbeat(Message, frozen=True):
    """I am alive (my process is; Progress says that training moves)."""

    epoch: Count


class Progress(Message, frozen=True):
    """My clock and how long a step takes."""

    epoch: Count
    clock: Count
    step_ns: Count
    tokens: Count


class Offer(Message, frozen=True):
    """I have what you pulled. `nothing` says why not, and then nothing follows."""

    epoch: Count
    round: Count
    fragment: Count
    base: Count = 0
    steps: Count = 0
    tokens: Count = 0
    nothing: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Taken(Message, frozen=True):
    """I hold the global model now."""

    epoch: Count


class ProbeAnswer(Message, frozen=True):
    """Yes, I am still here."""

    nonce: Count


class CloseRequest(Message, frozen=True):
    """I have finished: open a closing round for these fragments."""

    epoch: Count
    fragments: Annotated[tuple[Count, ...], msgspec.Meta(max_length=FRAGMENTS_MAX)]


class StateAnswer(Message, frozen=True):
    """My inner optimizer state as of `clock`: `size` bytes, to be fetched. `nothing` says why not,
    and then nothing follows.
    """

    epoch: Count
    ticket: Count
    clock: Count = 0
    size: Count = 0
    nothing: Annotated[str, msgspec.Meta(max_length=512)] = ""


class StateResult(Message, frozen=True):
    """I need no inner state any more, or why what I was offered is of no use (`problem`)."""

    epoch: Count
    ticket: Count
    problem: Annotated[str, msgspec.Meta(max_length=512)] = ""


class Goodbye(Message, frozen=True):
    """I leave; do not wait for me."""

    epoch: Count


class PlaceRequest(Message, frozen=True):
    """Which part of the data is mine? Anyone may ask before it joins."""

    name: Name


class StatusRequest(Message, frozen=True):
    """Anyone may ask. With a name: and could a learner of that name come in with my key?"""

    name: Name | None = None


# ---- syncer to learner, control ----


class Welcome(Message, frozen=True):
    """You are in. Everything that you must know to take part."""

    protocol: Count
    run: Annotated[str, msgspec.Meta(max_length=128)]
    epoch: Count
    index: Count
    count: Count
    clock: Count
    fragments: Annotated[int, msgspec.Meta(ge=1, le=FRAGMENTS_MAX)]
    fingerprint: Annotated[str, msgspec.Meta(max_length=128)]
    parameters: dict[str, Any]
    #: port of the bulk socket, on the host that the learner reached
    bulk_port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    #: says on the bulk socket who is speaking
    token: Token
    #: the versions that you hold are of this lineage: go on with them
    keep: bool = False


class Refuse(Message, frozen=True):
    """You are not in, and why. `code` is one of core.policy's refusal codes."""

    code: Name
    text: Text


class Salvage(Message, frozen=True):
    """The syncer has lost versions that you hold: open a bulk connection, and give me the base of
    these (fragment, version) while you train on. Follows a Refuse ("repair").
    """

    #: of which your Hello said that your versions are
    epoch: Count
    bulk_port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    token: Token
    fragments: Annotated[tuple[tuple[Fragment, Count], ...], msgspec.Meta(max_length=FRAGMENTS_MAX)]


class HelloRequired(Message, frozen=True):
    """I do not know you: introduce yourself."""

    epoch: Count


class HeartbeatAnswer(Message, frozen=True):
    """I heard you."""

    epoch: Count


class SeedRequest(Message, frozen=True):
    """The run is empty: your model becomes the global one. I will fetch it."""


class Pull(Message, frozen=True):
    """Give me your pseudo-gradient of this fragment."""

    round: Count
    fragment: Fragment
    version: Count
    closing: bool


class Announce(Message, frozen=True):
    """Fragment `fragment` has reached `version`; fetch it when you can."""

    fragment: Fragment
    version: Count
    clock: Count
    codec: Annotated[str, msgspec.Meta(max_length=16)]


class Fate(Message, frozen=True):
    """What became of your push."""

    round: Count
    fragment: Count
    fate: Name
    reason: Text = ""


class StateRequest(Message, frozen=True):
    """Somebody joins: make a snapshot of your inner optimizer state, and say when it is there."""

    ticket: Count


class StateOver(Message, frozen=True):
    """The snapshot that you made for this ticket is not needed any more."""

    ticket: Count


class StateOffer(Message, frozen=True):
    """A peer's inner optimizer state, as of its step `clock`: `size` bytes, to be fetched."""

    ticket: Count
    donor: Name
    clock: Count
    size: Count


class NoState(Message, frozen=True):
    """Nobody gives you an inner optimizer state: begin with what you have."""

    reason: Text


class Probe(Message, frozen=True):
    """Somebody claims your name. Are you still there?"""

    nonce: Count


class Fence(Message, frozen=True):
    """You are no longer this learner; somebody newer is."""

    reason: Text


class RunComplete(Message, frozen=True):
    """The run has reached its last step: stop training and close."""

    reason: Text


class GoingAway(Message, frozen=True):
    """The syncer stops. Train on; look for it again later."""

    reason: Text


class Warn(Message, frozen=True):
    """Something that the learner's user should read."""

    text: Text


class Place(Message, frozen=True):
    """The answer to PlaceRequest; `count` is 0 when the syncer was not told how many there are."""

    index: Count
    count: Count


class Status(Message, frozen=True):
    """The answer to StatusRequest: a plain tree for people and programs."""

    body: dict[str, Any]


# ---- bulk, both directions: receiver-driven. Want is the credit; nothing moves without it ----


class BulkHello(Message, frozen=True):
    """Binds a bulk connection to the learner that got this token in its Welcome."""

    token: Token


class Want(Message, frozen=True):
    """Send me chunks `first` to `first + count - 1` of this transfer.

    kind "push": syncer to learner, `key` is the round. kind "seed": syncer to learner, `key` is 0.
    kind "fetch": learner to syncer, `key` is the version. kind "state": joiner to syncer, which
    passes it on to the donor; `key` is the ticket, fragment is 0, chunks are of bytes. kind "base":
    a repair to a learner, `key` is the version.
    """

    kind: Annotated[str, msgspec.Meta(max_length=8)]
    fragment: Fragment
    key: Count
    first: Count
    count: Annotated[int, msgspec.Meta(ge=1, le=64)]


class Chunk(Message, frozen=True):
    """One chunk; its payload is the second frame. `crc` is zlib.crc32 of the payload."""

    kind: Annotated[str, msgspec.Meta(max_length=8)]
    fragment: Fragment
    key: Count
    index: Count
    crc: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class Gone(Message, frozen=True):
    """That transfer does not exist (any more): the version is superseded, or the round is over."""

    kind: Annotated[str, msgspec.Meta(max_length=8)]
    fragment: Fragment
    key: Count


ToSyncer: TypeAlias = (
    Hello | Heartbeat | Progress | Offer | Taken | ProbeAnswer | CloseRequest | StateAnswer
    | StateResult | Goodbye | PlaceRequest | StatusRequest
)  # fmt: skip
ToLearner: TypeAlias = (
    Welcome | Refuse | Salvage | HelloRequired | HeartbeatAnswer | SeedRequest | Pull | Announce
    | Fate | StateRequest | StateOver | StateOffer | NoState | Probe | Fence | RunComplete
    | GoingAway | Warn | Place | Status
)  # fmt: skip
Bulk: TypeAlias = BulkHello | Want | Chunk | Gone
