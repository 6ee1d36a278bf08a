"""The control socket of the syncer: who is on which connection, what they say, what they are told.

It knows lives and messages, not decisions: the daemon makes events of what is heard here.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from diloco_plugin.core.conduct import QUARANTINE_NS, STRIKES_MAX, Conduct, cost_of
from diloco_plugin.core.events import Life
from diloco_plugin.errors import WireError
from diloco_plugin.net.sockets import Door, Sent
from diloco_plugin.syncer.security import Security
from diloco_plugin.wire import messages as msg
from diloco_plugin.wire.framing import decode_to_syncer, encode

QUARANTINE: Final = (
    f"{STRIKES_MAX} of its messages broke the protocol: nobody listens to it for"
    f" {QUARANTINE_NS // 10**9} s. If its line is noisy, use keys (`diloco keygen`)."
)


@dataclass(frozen=True, slots=True)
class Heard:
    """One message, and the connection that it came over."""

    route: bytes
    message: msg.ToSyncer
    #: the public key of who sent it, proven; empty in plaintext
    key: bytes = b""


class Control:
    """Owns the control door. For the daemon's thread."""

    def __init__(self, door: Door, security: Security) -> None:
        self.door = door
        self._security = security
        #: messages that break the protocol, by reason
        self.strange: Counter[str] = Counter()
        self._routes: dict[Life, bytes] = {}
        self._lives: dict[bytes, Life] = {}
        self._conduct = Conduct()
        self._conduct_lock = threading.Lock()  # the bulk thread reports as well
        #: lives whose quarantine begins
        self.disgraced: list[Life] = []

    def hear(self) -> Iterator[Heard]:
        """What has come in, one after the other: many descriptions of models at once would fill the
        memory. Bytes that are no message are counted and forgotten, and so is what goes beyond
        anybody's allowance.
        """
        for route, frames in self.door.receive():
            key = self.door.key_of(frames)
            message = self._decode(route, key, frames[0].buffer)
            if message is not None:
                yield Heard(route, message, key)

    def _decode(self, route: bytes, key: bytes, data: Any) -> msg.ToSyncer | None:
        speaker = self._speaker(route, key)
        with self._conduct_lock:
            allowed = self._conduct.allows(speaker, time.monotonic_ns(), cost_of(len(data)))
        if not allowed:
            self._strike("flood", route, key)
            return None
        try:
            return decode_to_syncer(data)
        except WireError as error:
            self._strike(error.reason, route, key)
            return None

    def _speaker(self, route: bytes, key: bytes) -> Hashable:
        """Whom to hold to account: the owner of the key, else the life, else the connection."""
        return key or self._lives.get(route) or route

    def _strike(self, reason: str, route: bytes, key: bytes) -> None:
        self.strange[reason] += 1
        with self._conduct_lock:
            quarantined = self._conduct.strike(self._speaker(route, key), time.monotonic_ns())
        life = self._life(route, key)
        if quarantined and life is not None:
            self.disgraced.append(life)

    def strange_model(self, heard: Heard, error: WireError) -> None:
        """What a Hello said about a model could not be read."""
        self._strike(error.reason, heard.route, heard.key)

    def strike(self, life: Life, key: bytes) -> bool:
        """A learner broke the protocol on its bulk connection. True: its quarantine begins. Any
        thread.
        """
        with self._conduct_lock:
            return self._conduct.strike(key or life, time.monotonic_ns())

    def in_quarantine(self) -> int:
        """How many speakers nobody listens to now."""
        with self._conduct_lock:
            return self._conduct.in_quarantine(time.monotonic_ns())

    def objection(self, heard: Heard, life: Life | None = None) -> tuple[str, str] | None:
        """Why nobody with that key, or that life, may say this, as (code, text) of a refusal."""
        speaker = heard.key or life or self._speaker(heard.route, heard.key)
        with self._conduct_lock:
            if self._conduct.quarantined(speaker, time.monotonic_ns()):
                return "quarantine", QUARANTINE
        name = getattr(heard.message, "name", None)
        return self._security.objection(heard.key, name)

    def life_of(self, heard: Heard) -> Life | None:
        """Who says this: who has introduced itself over this connection, with this key.

        A routing id alone proves nothing: when a connection is gone, another may take its id.
        """
        return self._life(heard.route, heard.key)

    def _life(self, route: bytes, key: bytes) -> Life | None:
        life = self._lives.get(route)
        if life is None or not self._security.belongs(key, life.name):
            return None
        return life

    def lives(self) -> list[Life]:
        """All that have a connection."""
        return list(self._routes)

    def knocking(self, heard: Heard, hello: msg.Hello) -> Life:
        """The life that knocks: of the owner of the key, whatever name it claims."""
        return Life(self._security.who(heard.key, hello.name), hello.incarnation)

    def bind(self, life: Life, route: bytes) -> None:
        """This life speaks over this connection now, and over no other."""
        old = self._routes.get(life)
        if old is not None and old != route:
            self._lives.pop(old, None)
        before = self._lives.get(route)
        if before is not None and before != life:
            self._routes.pop(before, None)
        self._routes[life], self._lives[route] = route, life

    def hang_up(self, life: Life) -> None:
        """Forget the connection of a life."""
        route = self._routes.pop(life, None)
        if route is not None:
            self._lives.pop(route, None)

    def send(self, life: Life, message: msg.Message) -> bool:
        """Say something to a life. False: it cannot be told, and its connection was forgotten."""
        route = self._routes.get(life)
        if route is None or self.answer(route, encode(message)):
            return True
        # Unroutable, or it has not read hundreds of messages: as good as gone.
        self.hang_up(life)
        return False

    def answer(self, route: bytes, data: bytes) -> bool:
        """Send encoded bytes over a connection."""
        return self.door.send(route, data) is Sent.OK
