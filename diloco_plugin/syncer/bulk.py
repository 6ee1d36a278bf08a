"""The bulk thread of the syncer: pushes and seeds in, fragments out, all on the receivers' credit.

It knows transfers, not rounds: what may come or go is told by the daemon through commands, what has
come is told to the daemon through `Reports`. A push that is not complete leaves no trace.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor

from diloco_plugin.core.events import Life
from diloco_plugin.errors import WireError
from diloco_plugin.net.poll import Poll, Waker
from diloco_plugin.net.sockets import Door, Sent
from diloco_plugin.receiving import take_chunk
from diloco_plugin.syncer.model import GlobalModel, WireCopy
from diloco_plugin.syncer.relay import Relays
from diloco_plugin.syncer.security import Security
from diloco_plugin.tensors.codec import Codec, codec
from diloco_plugin.wire.chunks import (
    Receiver,
    checksum,
    chunk_bounds,
    chunk_count,
)
from diloco_plugin.wire.framing import decode_bulk, encode
from diloco_plugin.wire.messages import BulkHello, Chunk, Gone, Want

#: Chunks of 1 MiB that one incoming transfer may have on its way.
WINDOW: Final = 4
#: Messages that may wait for a peer that reads slowly; beyond it, it is forgotten.
BACKLOG_MAX: Final = 256
RETRY_SECONDS: Final = 0.005
#: While others wait for its room, a push may go this share of the patience without a byte.
CROWDED: Final = 8
#: Names that are remembered for pushes that stood still; beyond it, the oldest is forgotten.
STALLERS_MAX: Final = 4096
#: Chunks in a row that come after their transfer was given up: those on their way, of all rounds.
UNWANTED_MAX: Final = 64

PushKey: TypeAlias = tuple[Life, int]


class Reports(Protocol):
    """What the bulk thread tells the daemon. Called in that thread; must not block."""

    def push_arrived(self, life: Life, round_: int, fragment: int, slot: Tensor) -> None: ...
    def push_failed(self, life: Life, round_: int, fragment: int, reason: str) -> None: ...
    def seed_arrived(self, life: Life) -> None: ...
    def seed_failed(self, life: Life, reason: str) -> None: ...
    def state_failed(self, joiner: Life, ticket: int, reason: str) -> None: ...
    def strange_bytes(self, reason: str, life: Life | None, key: bytes) -> None: ...
    def broken(self, error: BaseException) -> None: ...


@dataclass(slots=True)
class Incoming:
    """One transfer towards us."""

    life: Life
    kind: str
    key: int
    fragment: int
    codec: Codec
    target: Tensor | None = None  # flat fp32, exactly as long as the fragment
    receiver: Receiver | None = None
    #: when its last byte came, or when it was granted
    moved: float = 0.0


@dataclass(slots=True)
class Peer:
    """One bulk connection whose learner is known."""

    life: Life
    #: the public key that it has shown; empty in plaintext
    key: bytes
    #: chunks in a row that belong to no transfer
    unwanted: int = 0
    outbox: deque[tuple[bytes, ...]] = field(default_factory=deque)
    #: what it is fetching: an older version stays readable until it has been fetched
    reading: dict[int, WireCopy] = field(default_factory=dict)


class Bulk:
    """Owns the bulk door. All but the constructor and the commands runs in its own thread."""

    def __init__(
        self, door: Door, security: Security, kept: int, patience: float, reports: Reports
    ) -> None:
        """`kept`: pushes that are kept until their round closes (lockstep), else 0.

        `patience`: seconds that a transfer may go without a byte.
        """
        self._door = door
        self._security = security
        self._patience = patience
        self._reports = reports
        self._kept = kept
        #: elements that pushes on their way in, or not folded yet, may take, and do take
        self._room = 0
        self._taken = 0
        self._largest = 0
        #: names whose last push stood still while others waited: oldest first
        self._stallers: dict[str, None] = {}
        self._model: GlobalModel | None = None
        self._tokens: dict[bytes, Life] = {}
        self._peers: dict[bytes, Peer] = {}
        self._routes: dict[Life, bytes] = {}
        self._incoming: dict[PushKey, Incoming] = {}
        self._waiting: deque[PushKey] = deque()
        self._seed: Incoming | None = None
        self._relays = Relays(self._tell, reports.state_failed)
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._waker = Waker()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="diloco-bulk", daemon=True)

    @property
    def port(self) -> int:
        """Where the bulk door listens."""
        return self._door.port

    # ---- commands: any thread ----

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def use_model(self, model: GlobalModel) -> None:
        """The run has a layout now (another one than before, if nobody has brought a model yet)."""

        def command() -> None:
            self._model = model
            largest = max(fragment.elements for fragment in model.layout.fragments)
            # Two at least: one learner that stops halfway must not keep all others out.
            self._room = max(model.layout.elements // 3, 2 * largest, self._kept * largest)
            self._largest = largest

        self._command(command)

    def expect(self, token: bytes, life: Life) -> None:
        """Whoever shows this token is that learner."""
        self._command(lambda: self._tokens.__setitem__(token, life))

    def forget(self, life: Life) -> None:
        """A life is over: its unfinished transfers leave no trace."""
        self._command(lambda: self._forget(life))

    def receive(self, life: Life, round_: int, fragment: int, codec_name: str) -> None:
        """Let a push come, as soon as there is room for it."""
        transfer = Incoming(life, "push", round_, fragment, codec(codec_name))
        self._command(lambda: self._await_room(transfer))

    def receive_seed(self, life: Life) -> None:
        """Fetch the whole model from this learner, straight into theta."""
        self._command(lambda: self._begin_seed(life))

    def discard(self, life: Life, round_: int) -> None:
        """A push will not be merged; if its bytes are complete already, this does nothing."""
        self._command(lambda: self._discard((life, round_)))

    def relay(self, ticket: int, donor: Life, joiner: Life, size: int) -> None:
        """Pass an inner optimizer state on, from one learner to another."""
        self._command(lambda: self._relays.begin(ticket, donor, joiner, size))

    def end_relay(self, ticket: int) -> None:
        """A ticket is over."""
        self._command(lambda: self._relays.end(ticket))

    def release(self, slot: Tensor) -> None:
        """A push was folded or is not wanted: its memory is free again."""
        self._command(lambda: self._free(slot))

    def stop(self, timeout_seconds: float) -> None:
        """Close the door and end the thread."""
        self._command(lambda: setattr(self, "_stopping", True))
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._waker.wake()

    # ---- the thread ----

    def _run(self) -> None:
        poll = Poll()
        poll.add(self._door)
        poll.add(self._waker)
        try:
            while not self._stopping:
                backlog = any(peer.outbox for peer in self._peers.values())
                rest = self._patience / (2 * CROWDED if self._queued() else 2)
                poll.wait(RETRY_SECONDS if backlog else rest)
                self._waker.drain()
                messages = self._door.receive()
                # Only then: what a learner says here may answer what the daemon has told it since.
                self._carry_out_commands()
                for route, frames in messages:
                    self._take(route, frames)
                for route in list(self._peers):
                    self._flush(route)
                self._give_up_on_the_silent()
                self._make_room()
        except BaseException as error:
            self._reports.broken(error)
        finally:
            self._door.close()
            self._waker.close()

    def _carry_out_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                break
            command()

    def _take(self, route: bytes, frames: list[Any]) -> None:
        """One message. Bytes that break the protocol are counted; they harm only their transfer."""
        try:
            message = decode_bulk(frames[0].buffer)
            key = self._door.key_of(frames)
            if isinstance(message, BulkHello):
                self._greet(route, message.token, key)
            elif route not in self._peers or self._peers[route].key != key:
                raise WireError("stranger", "a bulk message before a token")
            elif isinstance(message, (Want, Chunk, Gone)) and message.kind == "state":
                self._pass_on(self._peers[route].life, message, frames)
            elif isinstance(message, Want):
                self._serve(route, message)
            elif isinstance(message, Chunk):
                self._receive_chunk(route, message, frames)
            elif isinstance(message, Gone):
                self._gone(self._peers[route].life, message)
        except WireError as error:
            peer = self._peers.get(route)
            life, key = (peer.life, peer.key) if peer is not None else (None, b"")
            self._reports.strange_bytes(error.reason, life, key)

    def _pass_on(self, life: Life, message: Want | Chunk | Gone, frames: list[Any]) -> None:
        match message:
            case Want():
                self._relays.want(life, message)
            case Chunk():
                self._relays.chunk(life, message, frames)
            case Gone():
                self._relays.gone(life, message)

    def _greet(self, route: bytes, token: bytes, key: bytes) -> None:
        life = self._tokens.get(token)
        if life is None or not self._security.belongs(key, life.name):
            raise WireError("stranger", "an unknown token, or that of another learner")
        if route in self._peers:
            raise WireError("stranger", "a second introduction on one connection")
        self._disconnect(life)
        self._peers[route] = Peer(life, key)
        self._routes[life] = route
        for transfer in [*self._incoming.values(), self._seed]:  # what was cut goes on from here
            if transfer is not None and transfer.life == life and transfer.receiver is not None:
                transfer.receiver.restart()
                self._grant(transfer)
        self._relays.greeted(life)

    def _forget(self, life: Life) -> None:
        for token in [t for t, holder in self._tokens.items() if holder == life]:
            del self._tokens[token]
        self._disconnect(life)
        for key in [key for key in self._incoming if key[0] == life]:
            self._discard(key)
        if self._seed is not None and self._seed.life == life:
            self._seed = None

    def _disconnect(self, life: Life) -> None:
        route = self._routes.pop(life, None)
        if route is not None:
            self._peers.pop(route, None)

    # ---- in ----

    def _await_room(self, transfer: Incoming) -> None:
        key = (transfer.life, transfer.key)
        self._incoming[key] = transfer
        self._waiting.append(key)

    def _make_room(self) -> None:
        """Whoever let a push stand still last time never gets what is left for the others."""
        waiting, self._waiting = self._waiting, deque()
        for key in waiting:
            transfer = self._incoming.get(key)
            if transfer is None:
                continue
            assert self._model is not None
            elements = self._model.layout.fragments[transfer.fragment].elements
            stalls = transfer.life.name in self._stallers and not self._kept
            reserve = self._largest if stalls else 0
            if self._queued() or self._taken + elements + reserve > self._room:
                self._waiting.append(key)
                continue
            self._taken += elements
            transfer.target = torch.empty(elements)
            transfer.receiver = Receiver(chunk_count(elements), WINDOW)
            self._grant(transfer)

    def _queued(self) -> bool:
        """Does anybody wait for room who makes good use of it?"""
        return any(life.name not in self._stallers for life, _ in self._waiting)

    def _give_up_on_the_silent(self) -> None:
        """A transfer that stands still must not hold its room, nor its round."""
        now = time.monotonic()
        self._relays.give_up_on_the_silent(now - self._patience)
        patience = self._patience / CROWDED if self._queued() else self._patience
        for transfer in list(self._incoming.values()):
            if transfer.receiver is not None and transfer.moved < now - patience:
                self._stallers.pop(transfer.life.name, None)
                self._stallers[transfer.life.name] = None
                if len(self._stallers) > STALLERS_MAX:
                    del self._stallers[next(iter(self._stallers))]
                self._fail(transfer, "stalled")
        seed = self._seed
        if seed is None or seed.receiver is None or seed.moved >= now - self._patience:
            return
        # A seeder serves from its next boundary on, however long its steps are.
        if seed.receiver.received or seed.fragment:
            self._fail(seed, "stalled")

    def _free(self, slot: Tensor) -> None:
        self._taken -= slot.numel()

    def _begin_seed(self, life: Life, fragment: int = 0) -> None:
        assert self._model is not None
        target = self._model.theta[fragment]
        self._seed = Incoming(life, "seed", 0, fragment, codec("fp32"), target)
        self._seed.receiver = Receiver(chunk_count(target.numel()), WINDOW)
        self._grant(self._seed)

    def _grant(self, transfer: Incoming) -> None:
        transfer.moved = time.monotonic()
        route = self._routes.get(transfer.life)
        if route is None or transfer.receiver is None:
            return  # granted when its bulk connection shows its token
        for first, count in transfer.receiver.wants():
            want = Want(
                kind=transfer.kind,
                fragment=transfer.fragment,
                key=transfer.key,
                first=first,
                count=count,
            )
            self._send(route, encode(want))

    def _receive_chunk(self, route: bytes, message: Chunk, frames: list[Any]) -> None:
        life = self._peers[route].life
        pushes = self._incoming
        transfer = self._seed if message.kind == "seed" else pushes.get((life, message.key))
        if (
            transfer is None
            or transfer.life != life
            or transfer.fragment != message.fragment
            or transfer.receiver is None
        ):
            # The round may have closed while the chunk was on its way, but there are only so many.
            self._peers[route].unwanted += 1
            if self._peers[route].unwanted > UNWANTED_MAX:
                raise WireError("unwanted", "chunks that nobody asked for")
            return
        self._peers[route].unwanted = 0
        try:
            assert transfer.target is not None
            take_chunk(message, frames, transfer.receiver, transfer.codec, transfer.target)
        except WireError as error:
            if error.reason != "duplicate":  # a want may be repeated after a reconnect
                self._fail(transfer, error.reason.replace("_", " "))
            raise
        if not transfer.receiver.complete:
            self._grant(transfer)
        elif transfer.kind == "seed":
            self._seed_fragment_done(transfer)
        else:
            del self._incoming[(life, transfer.key)]
            self._stallers.pop(life.name, None)
            assert transfer.target is not None
            self._reports.push_arrived(life, transfer.key, transfer.fragment, transfer.target)

    def _seed_fragment_done(self, transfer: Incoming) -> None:
        assert self._model is not None
        following = transfer.fragment + 1
        if following < len(self._model.theta):
            self._begin_seed(transfer.life, following)
        else:
            self._seed = None
            self._reports.seed_arrived(transfer.life)

    def _gone(self, life: Life, message: Gone) -> None:
        transfer = self._incoming.get((life, message.key)) if message.kind == "push" else None
        if transfer is not None:
            self._fail(transfer, "withdrawn")

    def _fail(self, transfer: Incoming, reason: str) -> None:
        if transfer.kind == "seed":
            self._seed = None
            self._reports.seed_failed(transfer.life, reason)
            return
        self._discard((transfer.life, transfer.key))
        self._reports.push_failed(transfer.life, transfer.key, transfer.fragment, reason)

    def _discard(self, key: PushKey) -> None:
        transfer = self._incoming.pop(key, None)
        if transfer is not None and transfer.target is not None:
            self._free(transfer.target)

    # ---- out ----

    def _serve(self, route: bytes, want: Want) -> None:
        """Send the wanted chunks of an announced version, or say that it is gone."""
        peer = self._peers[route]
        if want.kind != "fetch" or self._model is None or want.fragment >= len(self._model.theta):
            raise WireError("invalid", f"a want of kind {want.kind!r}, fragment {want.fragment}")
        copy = peer.reading.get(want.fragment)
        if copy is None or copy.version != want.key:
            peer.reading.pop(want.fragment, None)
            copy = self._model.wire_copy(want.fragment)
            if copy is None or copy.version != want.key:
                gone = Gone(kind="fetch", fragment=want.fragment, key=want.key)
                self._send(route, encode(gone))
                return
            peer.reading[want.fragment] = copy  # until it has it all, or wants another version
        elements = self._model.layout.fragments[want.fragment].elements
        last = want.first + want.count - 1
        whole = memoryview(copy.data.numpy())  # type: ignore[arg-type]
        size = codec(copy.codec).nbytes
        for index in range(want.first, want.first + want.count):
            start, stop = chunk_bounds(index, elements)
            payload = whole[size(start) : size(stop)]
            header = Chunk(
                kind="fetch",
                fragment=want.fragment,
                key=want.key,
                index=index,
                crc=checksum(payload),
            )
            if not self._send(route, encode(header), payload):
                return
        if last >= chunk_count(elements) - 1:
            peer.reading.pop(want.fragment, None)

    def _tell(self, life: Life, *frames: Any) -> None:
        route = self._routes.get(life)
        if route is not None:
            self._send(route, *frames)

    def _send(self, route: bytes, *frames: Any) -> bool:
        """Queue one message. False: nobody is there (any more), or nobody reads."""
        peer = self._peers.get(route)
        if peer is None:
            return False
        peer.outbox.append(frames)
        if len(peer.outbox) > BACKLOG_MAX:
            self._hang_up(route)
        else:
            self._flush(route)
        return route in self._peers

    def _flush(self, route: bytes) -> None:
        peer = self._peers.get(route)
        while peer is not None and peer.outbox:
            sent = self._door.send(route, *peer.outbox[0])
            if sent is Sent.SLOW:
                return
            if sent is Sent.GONE:
                self._hang_up(route)
                return
            peer.outbox.popleft()

    def _hang_up(self, route: bytes) -> None:
        """Its transfers wait for the learner's next connection, or for the end of its lease."""
        peer = self._peers.pop(route)
        if self._routes.get(peer.life) == route:
            del self._routes[peer.life]
