"""Who may come in: answers libzmq's question about every key, in a thread of its own.

libzmq asks over ZAP (RFC 27) on an inproc address, once for each handshake. Without this thread it
would let in every key, unless the door enforces its domain, as ours do: then it lets in none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import zmq
from zmq.utils import z85

from diloco_plugin.net.keys import SYNCER, DoorKeys, Pair, fingerprint
from diloco_plugin.net.options import DOMAIN
from diloco_plugin.net.poll import Poll, Waker

Context: TypeAlias = zmq.Context[Any]

#: Refused keys that are remembered; the one that was refused least recently goes first.
REFUSED_MAX: Final = 64
_ADDRESS: Final = "inproc://zeromq.zap.01"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A key that was not let in: how often, and where the last attempt came from."""

    fingerprint: str
    count: int
    address: str


class Guard:
    """Lets in the keys of a list, and counts the others. One for each context, made before doors.

    All methods may be called from any thread. A guard that fails reports it and lets nobody in any
    more; connections that stand go on, so the owner has to end them.
    """

    def __init__(
        self, context: Context, keys: DoorKeys, broken: Callable[[BaseException], None]
    ) -> None:
        """Starts the thread. `broken` is called in it, with what ended it before its time."""
        self.own: Pair = keys.own
        #: by fingerprint, least recently refused first
        self._refused: dict[str, Refusal] = {}
        #: how often a key was not let in
        self.refused_total = 0
        self._lock = threading.Lock()
        self._broken = broken
        self._waker = Waker()
        self._closing = False
        self.admit(keys.learners)
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ADDRESS)
        self.sockets = (self._socket,)
        self.pending = self.awaits_room = False
        self._thread = threading.Thread(target=self._run, name="diloco-guard", daemon=True)
        self._thread.start()

    def admit(self, learners: Mapping[bytes, str]) -> None:
        """From now on these keys are let in (public key -> name), and the syncer's own."""
        self._names = {**learners, self.own.public: SYNCER}
        with self._lock:
            for key in self._names:
                self._refused.pop(fingerprint(key), None)

    def name_of(self, key: bytes) -> str | None:
        """Whose key this is; None: nobody's who may be here, or not any more."""
        return self._names.get(key)

    def refused(self) -> list[Refusal]:
        """Keys that were not let in, the latest last."""
        with self._lock:
            return list(self._refused.values())

    def forget_refused(self) -> None:
        """Count from zero again."""
        with self._lock:
            self._refused.clear()
            self.refused_total = 0

    def close(self) -> None:
        """Ends the thread; from now on nobody comes in. Again is harmless."""
        self._closing = True
        self._waker.wake()
        self._thread.join()
        self._waker.close()

    def _run(self) -> None:
        poll = Poll()
        poll.add(self)
        poll.add(self._waker)
        try:
            while not self._closing:
                poll.wait(None)
                self._waker.drain()
                while self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                    self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except BaseException as error:
            self._broken(error)
        finally:
            self._socket.close(linger=0)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, sequence, domain, address, _, mechanism, *credentials = request
        status, user = b"400", b""
        if (version, domain, mechanism) == (b"1.0", DOMAIN, b"CURVE") and len(credentials) == 1:
            key = z85.encode(credentials[0])
            if self.name_of(key) is not None:
                status, user = b"200", key
            else:
                self._note(fingerprint(key), address.decode(errors="replace"))
        return [b"1.0", sequence, status, b"", user, b""]

    def _note(self, print_: str, address: str) -> None:
        address = address.removeprefix("::ffff:")  # a v4 address at a v6 socket
        with self._lock:
            self.refused_total += 1
            known = self._refused.pop(print_, None)
            self._refused[print_] = Refusal(print_, known.count + 1 if known else 1, address)
            while len(self._refused) > REFUSED_MAX:
                del self._refused[next(iter(self._refused))]
