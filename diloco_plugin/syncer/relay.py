"""Inner optimizer states passing through the syncer, from the learner that gives to one that joins.

Belongs to the bulk thread. Nothing is kept: a joiner's wants go to the donor, the donor's chunks to
the joiner, no more of them at a time than the credit. What breaks the rules ends its own transfer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from diloco_plugin.core.events import Life
from diloco_plugin.errors import WireError
from diloco_plugin.wire.framing import encode
from diloco_plugin.wire.manifest import chunk_range, chunks_of
from diloco_plugin.wire.messages import Chunk, Gone, Want

#: Chunks of 1 MiB that one joiner may have asked for and not got.
CREDIT: Final = 4


@dataclass(slots=True)
class Relay:
    """One ticket."""

    ticket: int
    donor: Life
    joiner: Life
    size: int
    #: chunks that the donor was asked for
    outstanding: set[int] = field(default_factory=set)
    #: when the last one passed
    moved: float = 0.0


class Relays:
    """All tickets that are open."""

    def __init__(self, send: Callable[..., None], failed: Callable[[Life, int, str], None]) -> None:
        """`send(life, *frames)` to a learner, if it is there; `failed(joiner, ticket, reason)`."""
        self._send = send
        self._failed = failed
        self._open: dict[int, Relay] = {}

    def begin(self, ticket: int, donor: Life, joiner: Life, size: int) -> None:
        """Let this joiner fetch this ticket from this donor."""
        self._open[ticket] = Relay(ticket, donor, joiner, size, moved=time.monotonic())

    def end(self, ticket: int) -> None:
        """Pass nothing on any more."""
        self._open.pop(ticket, None)

    def want(self, joiner: Life, want: Want) -> None:
        """A learner wants chunks.

        Raises:
            WireError: of a ticket that is not its own, beyond its end, or beyond the credit.
        """
        relay = self._open.get(want.key)
        if relay is None:  # it is over; that news may be on its way
            self._send(joiner, encode(Gone(kind="state", fragment=0, key=want.key)))
            return
        if relay.joiner != joiner:
            raise WireError("invalid", "a want of an inner state that was offered to another one")
        wanted = set(range(want.first, want.first + want.count))
        if want.first + want.count > chunks_of(relay.size):
            self._fail(relay, "out_of_range", "it wants more than there is")
        if len(wanted | relay.outstanding) > CREDIT:
            self._fail(relay, "credit", "it wants more at once than it may")
        if not wanted <= relay.outstanding:  # else all of them are on their way already
            relay.outstanding |= wanted
            self._send(relay.donor, encode(want))

    def chunk(self, donor: Life, chunk: Chunk, frames: list[Any]) -> None:
        """A learner sends a chunk.

        Raises:
            WireError: nobody asked it, or not for this one, or its size is wrong.
        """
        relay = self._open.get(chunk.key)
        if relay is None:
            return
        if relay.donor != donor:
            raise WireError("unwanted", "a chunk of an inner state that another one gives")
        if chunk.index not in relay.outstanding or len(frames) != 2:
            self._fail(relay, "unwanted", "it sends what nobody asked for")
        start, stop = chunk_range(chunk.index, relay.size)
        if memoryview(frames[1].buffer).nbytes != stop - start:
            self._fail(relay, "wrong_size", "it sends chunks of a wrong size")
        relay.outstanding.remove(chunk.index)
        relay.moved = time.monotonic()
        self._send(relay.joiner, encode(chunk), frames[1])

    def gone(self, donor: Life, message: Gone) -> None:
        """The donor has forgotten its snapshot."""
        relay = self._open.get(message.key)
        if relay is not None and relay.donor == donor:
            self._give_up(relay, "withdrawn")

    def greeted(self, donor: Life) -> None:
        """A learner has a new bulk connection: what it was asked for was lost with the old one."""
        for relay in self._open.values():
            if relay.donor == donor:
                for index in sorted(relay.outstanding):
                    want = Want(kind="state", fragment=0, key=relay.ticket, first=index, count=1)
                    self._send(donor, encode(want))

    def give_up_on_the_silent(self, limit: float) -> None:
        """End those of which nothing has moved since then (monotonic seconds)."""
        for relay in list(self._open.values()):
            if relay.moved < limit:
                self._give_up(relay, "stalled")

    def _fail(self, relay: Relay, code: str, reason: str) -> None:
        self._give_up(relay, reason)
        raise WireError(code, f"inner state, ticket {relay.ticket}: {reason}")

    def _give_up(self, relay: Relay, reason: str) -> None:
        del self._open[relay.ticket]
        self._failed(relay.joiner, relay.ticket, reason)
