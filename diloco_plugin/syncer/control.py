"""The control socket of the syncer: who is on which connection, what they say, what they are told.

It knows lives and messages, not decisions: the daemon makes events of what is heard here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from diloco_plugin.core.events import Life
from diloco_plugin.errors import WireError
from diloco_plugin.net.sockets import Door, Sent
from diloco_plugin.syncer.security import Security
from diloco_plugin.wire import messages as msg
from diloco_plugin.wire.framing import decode_to_syncer, encode


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

    def hear(self) -> list[Heard]:
        """What has come in; bytes that are no message are counted and forgotten."""
        heard: list[Heard] = []
        for route, frames in self.door.receive():
            message = self._decode(frames[0].buffer)
            if message is not None:
                heard.append(Heard(route, message, self.door.key_of(frames)))
        return heard

    def _decode(self, data: Any) -> msg.ToSyncer | None:
        try:
            return decode_to_syncer(data)
        except WireError as error:
            self.strange[error.reason] += 1
            return None

    def objection(self, heard: Heard) -> tuple[str, str] | None:
        """Why nobody with that key may say this, as (code, text) of a refusal."""
        name = getattr(heard.message, "name", None)
        return self._security.objection(heard.key, name)

    def life_of(self, heard: Heard) -> Life | None:
        """Who says this: who has introduced itself over this connection, with this key.

        A routing id alone proves nothing: when a connection is gone, another may take its id.
        """
        life = self._lives.get(heard.route)
        if life is None or not self._security.belongs(heard.key, life.name):
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
