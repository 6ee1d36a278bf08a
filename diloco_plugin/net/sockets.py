"""Doors (bound) and lines (connected): the two kinds of socket there are.

Threads: a `Door` or `Line` belongs to the thread that uses it and is never shared; it may be made
in one thread and handed to another before its first use. Nothing here blocks.
"""

from __future__ import annotations

import enum
import errno
import os
import socket as stdlib_socket
import stat
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import zmq

from diloco_plugin.errors import AddressInUseError, ConfigError
from diloco_plugin.net.address import Address, require_keys
from diloco_plugin.net.guard import Guard
from diloco_plugin.net.keys import Insecure, LineKeys
from diloco_plugin.net.options import FRAMES_MAX, Role, new_context, new_dealer, new_router
from diloco_plugin.net.poll import Poll, Source, Waker

__all__ = ["Door", "Line", "Poll", "Role", "Sent", "Waker", "new_context"]

Payload: TypeAlias = bytes | bytearray | memoryview | zmq.Frame
Context: TypeAlias = zmq.Context[Any]

#: A connection is looked at this often at least; what is lost comes back no sooner than
#: `RECONNECT_IVL`, so that no loss is overlooked.
LOOK_SECONDS: Final = 0.4


class Sent(enum.Enum):
    """What became of a message handed to `Door.send`."""

    OK = "ok"  # queued for the peer; whether it arrives, only an answer tells
    GONE = "gone"  # there is no such peer (any more)
    SLOW = "slow"  # the peer does not read: its queue is full


class Door:
    """One bound ROUTER: many peers, each under a routing id that this socket gave it.

    A routing id is only valid for one connection and proves nothing about who is there: with a
    guard, the key does (`key_of`).

    Raises:
        AddressInUseError: somebody else listens there.
        ConfigError: not loopback and no guard, not an address of this machine, or no permission.
    """

    def __init__(
        self,
        context: Context,
        address: Address | str,
        role: Role,
        guard: Guard | Insecure | None = None,
    ) -> None:
        asked = Address.parse(address) if isinstance(address, str) else address
        if guard is None:
            require_keys(asked)
        self._guarded = isinstance(guard, Guard)
        self.address = asked
        #: Messages thrown away because they had more frames than any message has.
        self.dropped = 0
        self.pending = self.awaits_room = False
        if asked.scheme == "ipc":
            _check_socket_file(asked)
        own = guard.own if isinstance(guard, Guard) else None
        self.socket = new_router(context, role, asked, own)
        try:
            self.socket.bind(str(asked))
        except zmq.ZMQError as error:
            self.socket.close(linger=0)
            raise _bind_error(asked, error) from None
        if asked.scheme == "ipc":
            os.chmod(str(asked).removeprefix("ipc://"), 0o600)
        else:
            endpoint = self.socket.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(endpoint, bytes)
            self.address = asked.with_port(int(endpoint.rstrip(b"\0").rpartition(b":")[2]))

    @property
    def port(self) -> int:
        """The port that peers have to use."""
        return self.address.port

    def near(self) -> Address:
        """Returns where this machine itself reaches it, also if it listens on all addresses."""
        if self.address.host in ("*", "0.0.0.0"):  # noqa: S104 - compared, not bound
            return replace(self.address, host="127.0.0.1")
        return replace(self.address, host="::1") if self.address.host == "::" else self.address

    @property
    def sockets(self) -> tuple[Source, ...]:
        return () if self.socket.closed else (self.socket,)

    def receive(self, limit: int = 64) -> list[tuple[bytes, list[zmq.Frame]]]:
        """Returns up to `limit` messages that are here now, as (peer, frames); peers in turn.

        Frames are not copied: `frame.buffer` is libzmq's memory and lives as long as the frame.
        """
        messages: list[tuple[bytes, list[zmq.Frame]]] = []
        for _ in range(limit):
            frames = _receive(self.socket, FRAMES_MAX + 1)
            if frames is None:
                break
            if len(frames) < 2:
                self.dropped += 1
                continue
            messages.append((frames[0].bytes, frames[1:]))
        return messages

    def key_of(self, frames: Sequence[zmq.Frame]) -> bytes:
        """Returns the public key whose owner has sent this message; empty without a guard.

        It was let in when it connected; whether it still may be here, the guard knows.
        """
        # In plaintext a peer may claim any User-Id.
        return str(frames[0].get("User-Id")).encode() if self._guarded else b""

    def send(self, peer: bytes, *frames: Payload) -> Sent:
        """Queues one message for a peer, all of it or nothing. The buffers are free on return."""
        try:
            _send(self.socket, (peer, *frames))
        except zmq.Again:
            return Sent.SLOW
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Sent.GONE
        return Sent.OK

    def close(self) -> None:
        """Closes it, drops what is queued; the port is free a moment later. Again is harmless."""
        self.socket.close(linger=0)

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        socket = getattr(self, "socket", None)
        if socket is None or socket.closed:
            return
        if _ending():  # what else is in this module may be gone already
            self.close()
        else:
            _close_forgotten(self)


class Line:
    """One connected DEALER that reconnects by itself, and tells when it does.

    It tells by whether libzmq would take a message: it does exactly while the handshake stands
    (IMMEDIATE, and no limit on what is queued: bulk travels on credit, control is small). Not by a
    socket monitor: about one in a hundred blocked libzmq's only I/O thread for good at its first
    event (4.3.5, with the monitor connected before the socket was).

    Except after the other side broke the protocol (too large a message, no ZeroMQ at all) or
    refused our key: libzmq then gives up and does not say so. An owner that has heard nothing for
    too long must `reopen`.

    Raises:
        ConfigError: not loopback and no keys, or not an address to connect to.
    """

    def __init__(
        self,
        context: Context,
        address: Address | str,
        role: Role,
        keys: LineKeys | Insecure | None = None,
    ) -> None:
        self.address = Address.parse(address) if isinstance(address, str) else address
        #: when the socket was opened, in monotonic seconds
        self.opened = 0.0
        #: Messages thrown away because they had more frames than any message has.
        self.dropped = 0
        self._context = context
        self._role = role
        self._keys = keys
        self._open()

    def _open(self) -> None:
        if self._keys is None:
            require_keys(self.address, connecting=True)
        if self.address.scheme == "tcp" and self.address.port == 0:
            raise ConfigError(f"Connecting to {self.address} needs the port that is listened on.")
        self._events: list[str] = []
        self._connected = False
        self.opened = time.monotonic()
        keys = self._keys if isinstance(self._keys, LineKeys) else None
        self._socket = new_dealer(self._context, self._role, self.address, keys)
        try:
            self._socket.connect(str(self.address))
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"Cannot connect to {self.address}: {error.strerror}. Check the address."
            ) from None

    @property
    def sockets(self) -> tuple[Source, ...]:
        """What is to be polled; it changes in `reopen`."""
        return () if self._socket.closed else (self._socket,)

    @property
    def awaits_room(self) -> bool:
        """Room to send is the news of a connection."""
        return not self._connected

    @property
    def pending(self) -> bool:
        return bool(self._events)

    @property
    def connected(self) -> bool:
        """Whether the other side has completed the handshake and has not been lost since."""
        self._look()
        return self._connected

    def events(self) -> list[str]:
        """Returns what has happened since the last call, in order: "connected", "disconnected"."""
        self._look()
        events, self._events = self._events, []
        return events

    def receive(self, limit: int = 64) -> list[list[zmq.Frame]]:
        """Returns up to `limit` messages that are here now. Frames are not copied."""
        messages: list[list[zmq.Frame]] = []
        for _ in range(limit):
            frames = _receive(self._socket, FRAMES_MAX)
            if frames is None:
                break
            if not frames:
                self.dropped += 1
                continue
            messages.append(frames)
        return messages

    def send(self, *frames: Payload) -> bool:
        """Queues one message, all of it or nothing. False: not connected.

        True does not mean delivered: what is queued is lost with the connection. The buffers are
        free on return.
        """
        if not self.connected:
            return False
        try:
            _send(self._socket, frames)
        except zmq.Again:
            return False
        return True

    def reopen(self, address: Address | str | None = None) -> None:
        """Closes the socket and opens a new one, at another address if one is given.

        For a server that was declared dead although TCP has not noticed. Everything queued, and
        every event not yet read, is dropped.
        """
        self.close()
        if address is not None:
            self.address = Address.parse(address) if isinstance(address, str) else address
        self._open()

    def close(self) -> None:
        """Closes it and drops what is queued. Again is harmless."""
        self._socket.close(linger=0)
        self._events = []
        self._connected = False

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        socket = getattr(self, "_socket", None)
        if socket is None or socket.closed:
            return
        if _ending():  # what else is in this module may be gone already
            self.close()
        else:
            _close_forgotten(self)

    def _look(self) -> None:
        if self._socket.closed:
            return
        connected = bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)
        if connected != self._connected:
            self._connected = connected
            self._events.append("connected" if connected else "disconnected")


def _receive(socket: zmq.Socket[bytes], frames_max: int) -> list[zmq.Frame] | None:
    """Returns one message, [] for one with too many frames, None if there is none."""
    try:
        frame = socket.recv(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    frames = [frame]
    more = frame.more
    while more:  # a message is only handed out whole, so the rest is here
        frame = socket.recv(zmq.NOBLOCK, copy=False)
        more = frame.more
        if len(frames) <= frames_max:
            frames.append(frame)
    return frames if len(frames) <= frames_max else []


def _send(socket: zmq.Socket[bytes], payloads: Sequence[Payload]) -> None:
    """Sends all frames or raises zmq.Again; the socket is at a message boundary either way."""
    # Made first: a bad buffer must not leave half a message behind. Copied, although pyzmq can send
    # without: a process that exits while libzmq holds a Python buffer crashes (pyzmq frees it
    # through a socket of its own that is gone by then), and copying 1 MiB takes some 25 us.
    frames = [
        part if isinstance(part, zmq.Frame) else zmq.Frame(part, copy=True) for part in payloads
    ]
    last = len(frames) - 1
    lost: zmq.Again | None = None
    for i, frame in enumerate(frames):
        flags = zmq.NOBLOCK | (zmq.SNDMORE if i < last else 0)
        try:
            socket.send(frame, flags, copy=False)
        except zmq.Again as again:
            if i == 0:
                # libzmq looks at its mail only now and then; reading EVENTS makes it look, and
                # then a peer that has just connected, or has just read, is known.
                if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
                    raise
                socket.send(frame, flags, copy=False)
                continue
            # The connection died within the message: a DEALER swallows the frames up to its end.
            lost = again
    if lost is not None:
        raise lost


def _close_forgotten(thing: Door | Line) -> None:
    # pyzmq warns first; where warnings are errors its socket stays open, and the end of the context
    # then waits for it forever.
    thing.close()
    warnings.warn(
        f"{type(thing).__name__} at {thing.address} was never closed: call close().",
        ResourceWarning,
        stacklevel=3,
    )


def _bind_error(address: Address, error: zmq.ZMQError) -> Exception:
    if error.errno == zmq.EADDRINUSE:
        return AddressInUseError(
            f"{address} is in use: somebody else listens there. Stop that process, or choose "
            "another port."
        )
    if error.errno in (zmq.EADDRNOTAVAIL, errno.ENODEV):
        return ConfigError(
            f"{address} is not an address of this machine. Use 127.0.0.1 or one that it has."
        )
    return ConfigError(f"Cannot listen on {address}: {error.strerror}. Choose another address.")


def _check_socket_file(address: Address) -> None:
    """Raises unless the path is free or holds a dead socket: libzmq would remove anything."""
    path = str(address).removeprefix("ipc://")
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is no socket. Choose another path.")
    with stdlib_socket.socket(stdlib_socket.AF_UNIX) as probe:
        probe.setblocking(False)
        # Only a refused connection proves that nobody listens.
        if probe.connect_ex(path) != errno.ECONNREFUSED:
            raise AddressInUseError(
                f"{address} is in use: somebody else listens there. Stop that process, or choose "
                "another path."
            )
