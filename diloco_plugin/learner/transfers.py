"""Bytes in and out on the learner's side: pushes and seeds out, announced fragments in, on credit.

Belongs to the I/O thread. It knows buffers and chunks; what they are for is the core's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from diloco_plugin.errors import WireError
from diloco_plugin.learner.handover import Giving, Taking
from diloco_plugin.learner.replica import Buffer, Replica
from diloco_plugin.net.sockets import Line
from diloco_plugin.receiving import take_chunk
from diloco_plugin.tensors.codec import Codec, codec
from diloco_plugin.wire.chunks import (
    CHUNK_ELEMENTS,
    Receiver,
    checksum,
    chunk_bounds,
    chunk_count,
)
from diloco_plugin.wire.framing import decode_bulk, encode
from diloco_plugin.wire.messages import Bulk, BulkHello, Chunk, Gone, Want

#: Chunks of 1 MiB that one fetch may have on its way: each waits in the syncer's memory.
WINDOW: Final = 2


@dataclass(slots=True)
class Outgoing:
    """A push: the staged snapshot of a fragment, until every chunk of it was handed over once."""

    fragment: int
    buffer: Buffer
    codec: Codec
    missing: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Incoming:
    """An announced version on its way into an arrival buffer."""

    version: int
    codec: Codec
    buffer: Buffer
    receiver: Receiver


class Transfers:
    """All transfers of one learner. The callbacks tell the session what has ended."""

    def __init__(
        self,
        line: Line,
        replica: Replica,
        giving: Giving,
        taking: Taking,
        *,
        push_done: Callable[[int], None],
        fetch_done: Callable[[int, int, Buffer], None],
        fetch_gone: Callable[[int, int], None],
        still_holds: Callable[[int, int], bool],
    ) -> None:
        #: chunks that came or went
        self.moved = 0
        self._line = line
        self._replica = replica
        self._giving = giving
        self._taking = taking
        self._push_done = push_done
        self._fetch_done = fetch_done
        self._fetch_gone = fetch_gone
        self._still_holds = still_holds
        self._token = b""
        self._greeted = False
        #: wants for a seed that came before the base was ready; None: it is ready
        self._seed_wants: list[Want] | None = []
        self._pushes: dict[int, Outgoing] = {}
        self._fetches: dict[int, Incoming] = {}
        self._outbox: deque[tuple[Any, ...]] = deque()
        self._difference = torch.empty(CHUNK_ELEMENTS)

    @property
    def backlog(self) -> bool:
        """Does something wait for room in the socket?"""
        return bool(self._outbox)

    def welcome(self, token: bytes) -> None:
        """The syncer gave us a token: show it, and ask again for what was cut."""
        self._token = token
        self._greeted = False
        self.greet()

    def greet(self) -> None:
        """(Again) say who we are, if the connection stands."""
        if not self._token or self._greeted:
            return
        self._greeted = self._line.send(encode(BulkHello(token=self._token)))
        if self._greeted:
            for fragment, fetch in self._fetches.items():
                fetch.receiver.restart()
                self._grant(fragment, fetch)
            self._taking.restart()
            self.grant_state()

    def cut(self) -> None:
        """The bulk connection is gone; what was queued is lost, transfers go on after `greet`."""
        self._greeted = False
        self._outbox.clear()

    # ---- out ----

    def push(self, round_: int, fragment: int, buffer: Buffer, codec_name: str) -> None:
        """Let the syncer fetch this staged snapshot."""
        elements = self._replica.layout.fragments[fragment].elements
        missing = set(range(chunk_count(elements)))
        self._pushes[round_] = Outgoing(fragment, buffer, codec(codec_name), missing)

    def withdraw(self, round_: int) -> None:
        """The fate of a push is known: its buffer is free if it was not already."""
        push = self._pushes.pop(round_, None)
        if push is not None:
            self._replica.give_back(push.buffer)
            self._push_done(push.fragment)

    def withdraw_all(self) -> None:
        """The syncer is lost: no push will be fetched any more, no fetch will be answered."""
        for round_ in list(self._pushes):
            self.withdraw(round_)
        self._token = b""
        self._seed_wants = []
        self._giving.end()
        self._taking.end()
        self.cut()

    def serve_seed(self) -> None:
        """The base is the model that seeds the run: answer what the syncer wants of it."""
        wants, self._seed_wants = self._seed_wants or [], None
        for want in wants:
            self._serve(want)

    def _has(self, want: Want) -> bool:
        match want.kind:
            case "push":
                return want.key in self._pushes
            case "base":
                return self._still_holds(want.fragment, want.key)
        return want.kind == "seed"

    def _serve(self, want: Want) -> None:
        if want.kind == "state":
            self.moved += 1
            for message in self._giving.chunks(want):
                self._send(*message)
            return
        push = self._pushes.get(want.key) if want.kind == "push" else None
        if not self._has(want):
            self._send(encode(Gone(kind=want.kind, fragment=want.fragment, key=want.key)))
            return
        if want.kind == "seed" and self._seed_wants is not None:
            self._seed_wants.append(want)
            return
        if want.fragment >= len(self._replica.layout.fragments):
            raise WireError("invalid", f"the syncer wants fragment {want.fragment}")
        if push is not None and push.fragment != want.fragment:
            raise WireError("invalid", f"the syncer wants fragment {want.fragment} of another push")
        for index in range(want.first, want.first + want.count):
            self._send_chunk(want, index, push)
        if push is not None and not push.missing:
            self.withdraw(want.key)

    def _send_chunk(self, want: Want, index: int, push: Outgoing | None) -> None:
        self.moved += 1
        elements = self._replica.layout.fragments[want.fragment].elements
        start, stop = chunk_bounds(index, elements)
        if push is None:
            kind, values = codec("fp32"), self._replica.base_slice(want.fragment, start, stop)
        else:
            kind, values = push.codec, self._difference[: stop - start]
            self._replica.difference(want.fragment, push.buffer, start, stop, self._difference)
            push.missing.discard(index)
        # New memory for each chunk: it waits in the outbox while there is no connection.
        payload = torch.empty(kind.nbytes(stop - start), dtype=torch.uint8)
        kind.encode(values, payload)
        data = memoryview(payload.numpy())  # type: ignore[arg-type]
        header = Chunk(
            kind=want.kind, fragment=want.fragment, key=want.key, index=index, crc=checksum(data)
        )
        self._send(encode(header), data)

    # ---- in ----

    def fetch(self, fragment: int, version: int, codec_name: str, buffer: Buffer) -> None:
        """Fetch an announced version into an arrival buffer."""
        elements = self._replica.layout.fragments[fragment].elements
        receiver = Receiver(chunk_count(elements), WINDOW)
        self._fetches[fragment] = Incoming(version, codec(codec_name), buffer, receiver)
        self._grant(fragment, self._fetches[fragment])

    def release(self, fragment: int) -> None:
        """Stop fetching a fragment."""
        fetch = self._fetches.pop(fragment, None)
        if fetch is not None:
            self._replica.give_back(fetch.buffer)

    def grant_state(self) -> None:
        """Ask for what comes next of a peer's inner optimizer state, if any is on its way."""
        if self._greeted:
            for want in self._taking.wants():
                self._send(want)

    def _grant(self, fragment: int, fetch: Incoming) -> None:
        if not self._greeted:
            return
        for first, count in fetch.receiver.wants():
            want = Want(
                kind="fetch", fragment=fragment, key=fetch.version, first=first, count=count
            )
            self._send(encode(want))

    def take(self, frames: list[Any]) -> None:
        """One message from the bulk connection.

        Raises:
            WireError: its bytes break the protocol; the transfer that it belongs to goes on.
        """
        message: Bulk = decode_bulk(frames[0].buffer)
        match message:
            case Want():
                self._serve(message)
            case Chunk(kind="state"):
                self.moved += self._taking.receive(message, frames)
                self.grant_state()
            case Chunk():
                self._receive(message, frames)
            case Gone(kind="state"):
                self._taking.gone(message.key)
            case Gone():
                fetch = self._fetches.get(message.fragment)
                if fetch is not None and fetch.version == message.key:
                    self.release(message.fragment)
                    self._fetch_gone(message.fragment, message.key)
            case _:
                raise WireError("invalid", "a syncer does not introduce itself")

    def _receive(self, chunk: Chunk, frames: list[Any]) -> None:
        fetch = self._fetches.get(chunk.fragment)
        if fetch is None or fetch.version != chunk.key:
            return  # superseded while it was on its way
        elements = self._replica.layout.fragments[chunk.fragment].elements
        try:
            take_chunk(chunk, frames, fetch.receiver, fetch.codec, fetch.buffer.flat[:elements])
        except WireError as error:
            if error.reason in ("wrong_size", "corrupt"):
                fetch.receiver.restart()  # asked for again; what came whole stays
                self._grant(chunk.fragment, fetch)
            raise
        self.moved += 1
        if fetch.receiver.complete:
            del self._fetches[chunk.fragment]
            self._fetch_done(chunk.fragment, fetch.version, fetch.buffer)
        else:
            self._grant(chunk.fragment, fetch)

    # ---- socket ----

    def _send(self, *frames: Any) -> None:
        self._outbox.append(frames)
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it."""
        while self._outbox and self._line.send(*self._outbox[0]):
            self._outbox.popleft()
