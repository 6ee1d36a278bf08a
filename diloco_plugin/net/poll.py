"""How one thread waits for all of its sockets, and how others wake it.

A `Poll` belongs to one thread. Only `Waker.wake` may be called from anywhere.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from typing import Protocol, TypeAlias

import zmq

#: What zmq_poll takes: a zmq socket or a file descriptor.
Source: TypeAlias = zmq.Socket[bytes] | int


class Pollable(Protocol):
    """What `Poll` can wait for."""

    @property
    def sockets(self) -> tuple[Source, ...]:
        """What to poll now; empty once closed."""

    @property
    def awaits_room(self) -> bool:
        """Whether room to send is news, too."""

    @property
    def pending(self) -> bool:
        """Whether something is ready that polling would not show."""


class Waker:
    """Wakes the thread that polls it, from any other thread or from a signal handler."""

    def __init__(self) -> None:
        self._mine, self._theirs = socket.socketpair()
        self._mine.setblocking(False)
        self._theirs.setblocking(False)
        self.pending = self.awaits_room = False

    @property
    def sockets(self) -> tuple[Source, ...]:
        return () if self._mine.fileno() < 0 else (self._mine.fileno(),)

    def wake(self) -> None:
        """Makes the poller return. Any thread; never blocks; harmless after `close`."""
        # Full means that a wake-up is pending already; closed, that nobody polls any more.
        with contextlib.suppress(OSError):
            self._theirs.send(b"\0")

    def drain(self) -> None:
        """Takes all wake-ups so far as seen. Call it before looking at what they were for."""
        with contextlib.suppress(OSError):
            while self._mine.recv(4096):
                pass

    def fileno(self) -> int:
        """The descriptor to poll for reading; -1 once closed."""
        return self._mine.fileno()

    def close(self) -> None:
        """Closes both ends. Again is harmless."""
        self._mine.close()
        self._theirs.close()


class Poll:
    """Waits until something that was added can be read."""

    def __init__(self) -> None:
        self._things: list[Pollable] = []

    def add(self, thing: Pollable) -> None:
        """Adds a Door, Line or Waker; again is harmless."""
        if not any(known is thing for known in self._things):
            self._things.append(thing)

    def remove(self, thing: Pollable) -> None:
        """Forgets a thing; one that is not there is harmless, and so is one that is closed."""
        self._things = [known for known in self._things if known is not thing]

    def wait(self, timeout_seconds: float | None) -> None:
        """Returns when something can be read, or after the time; None waits for good.

        An interrupted system call goes on waiting: a signal handler that wants to be noticed wakes
        a `Waker`. Rounds up to a millisecond, so that a short rest does not become a spin.
        """
        if any(thing.pending for thing in self._things):
            return
        # Looked up every time: a Line that reopened has new sockets.
        sources = [
            (source, zmq.POLLIN | (zmq.POLLOUT if thing.awaits_room else 0))
            for thing in self._things
            for source in thing.sockets
        ]
        if timeout_seconds is None:
            if not sources:
                raise ValueError("Nothing is open that could ever be read: this would never end.")
            zmq.zmq_poll(sources, -1)
        elif sources:
            milliseconds = math.ceil(max(0.0, timeout_seconds) * 1000)
            zmq.zmq_poll(sources, min(milliseconds, 2**31 - 1))
        else:
            time.sleep(max(0.0, timeout_seconds))
