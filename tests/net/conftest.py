from __future__ import annotations

from collections.abc import Iterator

import pytest

from diloco_plugin.errors import AddressInUseError
from diloco_plugin.net.address import Address
from diloco_plugin.net.guard import Guard
from diloco_plugin.net.keys import Insecure, LineKeys
from diloco_plugin.net.sockets import Door, Line, Role, new_context
from tests.waiting import until

ANY = "tcp://127.0.0.1:*"


class Net:
    """Makes doors and lines, and closes them at the end of the test."""

    def __init__(self) -> None:
        self.context = new_context()
        self._made: list[Door | Line] = []

    def door(
        self,
        address: Address | str = ANY,
        role: Role = "control",
        guard: Guard | Insecure | None = None,
    ) -> Door:
        door = Door(self.context, address, role, guard)
        self._made.append(door)
        return door

    def door_again(self, address: Address) -> Door:
        """A door where one has just closed: the port is free only a moment later."""

        def attempt() -> Door | None:
            try:
                return self.door(address)
            except AddressInUseError:
                return None

        door = until(attempt)
        assert door is not None
        return door

    def line(
        self,
        address: Address | str,
        role: Role = "control",
        keys: LineKeys | Insecure | None = None,
    ) -> Line:
        line = Line(self.context, address, role, keys)
        self._made.append(line)
        return line

    def connect(self, door: Door, role: Role = "control") -> tuple[Line, bytes]:
        """A line that the door has heard, and its routing id there."""
        line = self.line(door.address, role)
        until(lambda: line.send(b"hello"))
        ((peer, _),) = until(door.receive)
        return line, peer

    def close(self) -> None:
        for thing in self._made:
            thing.close()
        self.context.destroy(linger=0)


@pytest.fixture
def net() -> Iterator[Net]:
    net = Net()
    yield net
    net.close()
