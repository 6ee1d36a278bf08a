from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from diloco_plugin.net.diagnosis import mechanism
from diloco_plugin.net.guard import REFUSED_MAX, Guard
from diloco_plugin.net.keys import DoorKeys, LineKeys, fingerprint, new_pair
from diloco_plugin.net.sockets import Door, Line
from tests.keyring import Keyring
from tests.net.conftest import ANY, Net
from tests.waiting import until


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    ring = Keyring(tmp_path)
    ring.learner("berlin")
    return ring


class Guarded:
    """A door with a guard."""

    def __init__(self, net: Net, keys: DoorKeys) -> None:
        self.failures: list[BaseException] = []
        self.guard = Guard(net.context, keys, self.failures.append)
        self.door = net.door(ANY, "control", self.guard)


@pytest.fixture
def guarded(net: Net, ring: Keyring) -> Iterator[Guarded]:
    made = Guarded(net, ring.door)
    yield made
    made.guard.close()


def never_connects(line: Line, seconds: float = 0.3) -> bool:
    """A handshake on loopback takes milliseconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not line.connected:
        zmq.zmq_poll([(s, zmq.POLLOUT) for s in line.sockets], 20)
    return not line.connected


def refusals(guarded: Guarded) -> dict[str, int]:
    return {refusal.fingerprint: refusal.count for refusal in guarded.guard.refused()}


def test_a_key_on_the_list_comes_in_and_is_known_with_every_message(
    net: Net, ring: Keyring, guarded: Guarded
) -> None:
    keys = ring.line("berlin")
    line = net.line(guarded.door.address, "control", keys)
    until(lambda: line.send(b"hello", b"there"))
    ((peer, frames),) = until(guarded.door.receive)
    assert guarded.door.key_of(frames) == keys.own.public
    assert guarded.guard.name_of(keys.own.public) == "berlin"
    guarded.door.send(peer, b"welcome")
    assert until(line.receive)[0][0].bytes == b"welcome"
    assert guarded.guard.refused() == []


def test_the_syncer_s_own_key_comes_in_under_its_name(
    net: Net, ring: Keyring, guarded: Guarded
) -> None:
    own = ring.door.own
    line = net.line(guarded.door.address, "control", LineKeys("syncer", own, own.public))
    until(lambda: line.send(b"hello"))
    ((_, frames),) = until(guarded.door.receive)
    assert guarded.guard.name_of(guarded.door.key_of(frames)) == "syncer"


def test_an_unknown_key_is_refused_and_counted_with_its_address(
    net: Net, ring: Keyring, guarded: Guarded
) -> None:
    stranger = ring.line("mallory", admitted=False)
    line = net.line(guarded.door.address, "control", stranger)
    until(guarded.guard.refused)
    assert never_connects(line)
    (refusal,) = guarded.guard.refused()
    assert refusal.fingerprint == fingerprint(stranger.own.public)
    assert (refusal.count, refusal.address) == (1, "127.0.0.1")
    line.reopen()
    until(lambda: guarded.guard.refused()[0].count == 2)
    assert guarded.guard.refused_total == 2
    assert guarded.door.receive() == []


def test_who_has_no_key_or_pins_another_syncer_never_connects(
    net: Net, ring: Keyring, guarded: Guarded
) -> None:
    plain = net.line(guarded.door.address)
    keys = ring.line("berlin")
    misled = net.line(
        guarded.door.address, "control", LineKeys("berlin", keys.own, new_pair().public)
    )
    assert never_connects(plain)
    assert never_connects(misled)
    assert guarded.guard.refused() == []


def test_a_line_with_keys_speaks_to_no_plaintext_door(net: Net, ring: Keyring) -> None:
    door = net.door()
    assert never_connects(net.line(door.address, "control", ring.line("berlin")))
    assert door.receive() == []


def test_a_key_is_admitted_later_and_barred_again_without_a_new_door(
    net: Net, ring: Keyring, guarded: Guarded
) -> None:
    keys = ring.line("tokyo", admitted=False)
    line = net.line(guarded.door.address, "control", keys)
    until(guarded.guard.refused)
    ring.admit("tokyo")
    guarded.guard.admit(ring.door.learners)
    assert guarded.guard.refused() == []  # it is no stranger any more
    line.reopen()
    until(lambda: line.send(b"hello"))
    ((_, frames),) = until(guarded.door.receive)
    assert guarded.guard.name_of(guarded.door.key_of(frames)) == "tokyo"
    ring.bar("tokyo")
    guarded.guard.admit(ring.door.learners)
    line.send(b"still here")  # the connection stands, but its key is nobody's
    ((_, frames),) = until(guarded.door.receive)
    assert guarded.guard.name_of(guarded.door.key_of(frames)) is None
    line.reopen()
    until(lambda: refusals(guarded).get(fingerprint(keys.own.public)))


@pytest.mark.parametrize("lethal", ["answering", "closing"])
def test_when_the_guard_dies_nobody_comes_in_and_the_owner_hears_of_it(
    net: Net, ring: Keyring, guarded: Guarded, monkeypatch: pytest.MonkeyPatch, lethal: str
) -> None:
    if lethal == "answering":

        def fail(request: list[bytes]) -> list[bytes]:
            raise RuntimeError("a bug")

        monkeypatch.setattr(guarded.guard, "_answer", fail)
        first = net.line(guarded.door.address, "control", ring.line("berlin"))
        until(lambda: guarded.failures)
        assert never_connects(first)
        assert "a bug" in str(guarded.failures[0])
    else:
        guarded.guard.close()
    for name in ("berlin", "mallory"):
        keys = ring.line(name, admitted=False)
        assert never_connects(net.line(guarded.door.address, "control", keys))


def test_without_a_guard_in_its_context_a_guarded_door_lets_nobody_in(
    net: Net, ring: Keyring, guarded: Guarded
) -> None:
    elsewhere = Net()
    try:
        door = elsewhere.door(ANY, "control", guarded.guard)
        assert never_connects(net.line(door.address, "control", ring.line("berlin")))
    finally:
        elsewhere.close()


def request(guarded: Guarded, **changes: Any) -> list[bytes]:
    known = guarded.guard.own.public
    parts: dict[str, Any] = {
        "version": b"1.0", "sequence": b"7", "domain": b"diloco", "address": b"10.0.0.7",
        "routing": b"", "mechanism": b"CURVE", "credentials": [z85.decode(known)],
    } | changes  # fmt: skip
    credentials = parts.pop("credentials")
    return [*parts.values(), *credentials]


@pytest.mark.parametrize(
    "changes",
    [
        {"version": b"2.0"},
        {"domain": b""},
        {"domain": b"other"},
        {"mechanism": b"NULL", "credentials": []},
        {"mechanism": b"NULL"},
        {"mechanism": b"PLAIN", "credentials": [b"user", b"password"]},
        {"credentials": []},
        {"credentials": [bytes(32)]},
        {"credentials": [bytes(32), bytes(32)]},
    ],
)
def test_anything_but_a_known_key_over_curve_at_our_door_is_refused(
    guarded: Guarded, changes: dict[str, Any]
) -> None:
    version, sequence, status, _, user, _ = guarded.guard._answer(request(guarded, **changes))
    assert (version, sequence, status, user) == (b"1.0", b"7", b"400", b"")
    good = guarded.guard._answer(request(guarded))
    assert (good[2], good[4]) == (b"200", guarded.guard.own.public)


def test_refused_keys_are_remembered_up_to_a_limit_and_the_latest_stay(guarded: Guarded) -> None:
    keys = [z85.encode(bytes([n]) * 32) for n in range(1, REFUSED_MAX + 11)]
    for key in keys:
        guarded.guard._answer(request(guarded, credentials=[z85.decode(key)]))
    assert [r.fingerprint for r in guarded.guard.refused()] == [
        fingerprint(key) for key in keys[-REFUSED_MAX:]
    ]
    assert guarded.guard.refused_total == len(keys)


def test_in_plaintext_a_claimed_user_id_is_nobody_s_key(net: Net, ring: Keyring) -> None:
    door = net.door()
    claimed = ring.line("berlin").own.public

    def metadata(name: bytes, value: bytes) -> bytes:
        return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value

    ready = b"\x05READY" + metadata(b"Socket-Type", b"DEALER") + metadata(b"User-Id", claimed)
    with socket.create_connection(("127.0.0.1", door.port)) as raw:
        raw.settimeout(5)
        raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 1 + 31))
        assert raw.recv(64, socket.MSG_WAITALL)
        raw.sendall(b"\x04" + bytes([len(ready)]) + ready)
        assert raw.recv(8, socket.MSG_WAITALL)
        raw.sendall(b"\x00\x05hello")
        ((_, frames),) = until(door.receive)
    assert frames[0].bytes == b"hello"
    assert frames[0].get("User-Id") == claimed.decode()  # libzmq passes it on
    assert door.key_of(frames) == b""


def test_the_mechanism_of_what_listens_is_seen_without_a_key(net: Net, guarded: Guarded) -> None:
    assert mechanism(guarded.door.address) == "CURVE"
    assert mechanism(net.door().address) == "NULL"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert mechanism(guarded.door.address.with_port(unused.getsockname()[1])) == ""


@pytest.mark.parametrize(
    "speak",
    [
        lambda peer: peer.sendall(b"SSH-2.0-OpenSSH_9.6\r\n"),
        lambda peer: peer.sendall(b"\xff"),
        lambda peer: peer.close(),
        lambda peer: None,
    ],
)
def test_what_is_no_zeromq_has_no_mechanism_and_holds_nobody_up(
    guarded: Guarded, speak: Callable[[socket.socket], None]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            peers.append(peer)
            speak(peer)

        peers: list[socket.socket] = []
        thread = threading.Thread(target=serve)
        thread.start()
        began = time.monotonic()
        assert mechanism(guarded.door.address.with_port(server.getsockname()[1])) == ""
        assert time.monotonic() - began < 5
        thread.join()
        for peer in peers:
            peer.close()


def test_every_option_of_encryption_is_set(net: Net, ring: Keyring, guarded: Guarded) -> None:
    door: Door = guarded.door
    line = net.line(door.address, "bulk", ring.line("berlin"))
    assert door.socket.getsockopt(zmq.CURVE_SERVER) == 1
    assert door.socket.getsockopt(zmq.ZAP_DOMAIN).rstrip(b"\0") == b"diloco"
    assert door.socket.getsockopt(zmq.MECHANISM) == zmq.CURVE
    (dealer,) = line.sockets
    assert isinstance(dealer, zmq.Socket)
    assert dealer.getsockopt(zmq.MECHANISM) == zmq.CURVE
    assert dealer.getsockopt(zmq.CURVE_SERVER) == 0
