from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import zmq

from diloco_plugin.errors import AddressInUseError, ConfigError
from diloco_plugin.net import options
from diloco_plugin.net.address import Address
from diloco_plugin.net.diagnosis import listens
from diloco_plugin.net.keys import INSECURE
from diloco_plugin.net.sockets import Door, Line, Role, Sent
from diloco_plugin.wire.chunks import CHUNK_ELEMENTS
from diloco_plugin.wire.framing import BULK_BYTES_MAX
from diloco_plugin.wire.messages import CONTROL_BYTES_MAX
from tests.net.conftest import ANY, Net
from tests.waiting import until


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def texts(messages: list[list[zmq.Frame]]) -> list[list[bytes]]:
    return [[frame.bytes for frame in frames] for frames in messages]


@pytest.mark.parametrize(
    "address",
    [
        ANY,
        "tcp://localhost:0",
        pytest.param(
            "tcp://[::1]:*",
            marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1"),
        ),
        "ipc",
    ],
)
def test_both_sides_hear_each_other(net: Net, address: str, tmp_path: Path) -> None:
    door = net.door(f"ipc://{tmp_path}/s" if address == "ipc" else address, "control")
    line, peer = net.connect(door)
    assert line.connected
    assert listens(line.address)
    assert line.events() == ["connected"]
    assert door.send(peer, b"a", memoryview(b"b")) is Sent.OK
    assert texts(until(line.receive)) == [[b"a", b"b"]]
    assert door.port == door.address.port
    assert (door.port > 0) == (address != "ipc")


def test_a_payload_of_one_chunk_arrives_without_a_copy(net: Net) -> None:
    door = net.door(ANY, "bulk")
    line, peer = net.connect(door, "bulk")
    payload = os.urandom(CHUNK_ELEMENTS * 4)
    assert door.send(peer, b"h" * BULK_BYTES_MAX, memoryview(payload)) is Sent.OK
    ((_, frame),) = until(line.receive)
    assert isinstance(frame.buffer, memoryview)
    assert frame.buffer == payload
    assert line.send(b"h", memoryview(payload).toreadonly())
    ((_, frames),) = until(door.receive)
    assert frames[1].buffer == payload


def test_receive_takes_at_most_its_limit(net: Net) -> None:
    door = net.door()
    line, _ = net.connect(door)
    for i in range(5):
        assert line.send(b"%d" % i)
    got: list[bytes] = []

    def take() -> bool:
        batch = door.receive(limit=2)
        assert len(batch) <= 2
        got.extend(frames[0].bytes for _, frames in batch)
        return len(got) == 5

    until(take)
    assert got == [b"0", b"1", b"2", b"3", b"4"]


def test_a_message_of_too_many_frames_is_dropped_whole(net: Net) -> None:
    door = net.door()
    line, peer = net.connect(door)
    assert line.send(*[b"x"] * 50)
    assert line.send(b"1", b"2", b"3", b"4")
    ((_, frames),) = until(door.receive)
    assert texts([frames]) == [[b"1", b"2", b"3", b"4"]]
    assert door.dropped == 1
    assert door.send(peer, *[b"x"] * 5) is Sent.OK
    assert door.send(peer, b"good") is Sent.OK
    assert texts(until(line.receive)) == [[b"good"]]
    assert line.dropped == 1


def test_a_bad_buffer_leaves_no_half_message_behind(net: Net) -> None:
    door = net.door()
    line, peer = net.connect(door)
    bad: Any = object()
    with pytest.raises(TypeError):
        line.send(b"first half", bad)
    with pytest.raises(TypeError):
        door.send(peer, b"first half", bad)
    assert line.send(b"whole")
    assert door.send(peer, b"whole") is Sent.OK
    assert texts(until(line.receive)) == [[b"whole"]]
    ((_, frames),) = until(door.receive)
    assert texts([frames]) == [[b"whole"]]


@pytest.mark.parametrize("role", ["control", "bulk"])
def test_an_oversize_message_is_dropped_and_others_are_not_disturbed(net: Net, role: Role) -> None:
    door = net.door(ANY, role)
    other, _ = net.connect(door, role)
    line, _ = net.connect(door, role)
    assert line.send(bytes(CONTROL_BYTES_MAX + 1))
    until(lambda: "disconnected" in line.events())
    assert other.send(b"still here")
    ((_, frames),) = until(door.receive)
    assert texts([frames]) == [[b"still here"]]
    until(lambda: line.send(b"back again"))
    ((_, frames),) = until(door.receive)
    assert texts([frames]) == [[b"back again"]]


def test_an_oversize_message_from_the_server_is_not_taken_and_reopening_helps(net: Net) -> None:
    door = net.door()
    line, peer = net.connect(door)
    assert line.events() == ["connected"]
    assert door.send(peer, bytes(CONTROL_BYTES_MAX + 1)) is Sent.OK
    until(lambda: line.events() == ["disconnected"])
    assert line.receive() == []
    line.reopen()  # libzmq does not reconnect after a breach of the protocol
    until(lambda: line.send(b"back"))
    until(door.receive)


def test_the_largest_messages_fit(net: Net) -> None:
    for role, size in (
        ("control", CONTROL_BYTES_MAX),
        ("bulk", CHUNK_ELEMENTS * 4 + BULK_BYTES_MAX),
    ):
        door = net.door(ANY, role)  # type: ignore[arg-type]
        line, _ = net.connect(door, role)  # type: ignore[arg-type]
        assert line.send(bytes(size))
        ((_, frames),) = until(door.receive)
        assert len(frames[0].buffer) == size


def test_a_peer_that_closed_is_gone(net: Net) -> None:
    door = net.door()
    line, peer = net.connect(door)
    assert door.send(b"nobody", b"x") is Sent.GONE
    line.close()
    until(lambda: door.send(peer, b"x") is Sent.GONE)


def test_a_peer_that_does_not_read_is_slow_and_others_are_not(net: Net) -> None:
    door = net.door(ANY, "bulk")
    _lazy, peer = net.connect(door, "bulk")
    other, other_peer = net.connect(door, "bulk")
    payload = memoryview(bytes(CHUNK_ELEMENTS * 4))
    sent = 0
    while door.send(peer, b"h", payload) is Sent.OK:
        sent += 1
        assert sent < 200, "nothing bounds what a slow peer piles up"
    assert door.send(other_peer, b"h", payload) is Sent.OK
    assert len(until(other.receive)) == 1


def test_a_slow_peer_that_reads_again_gets_whole_messages(net: Net) -> None:
    door = net.door(ANY, "bulk")
    line, peer = net.connect(door, "bulk")
    payload = memoryview(bytes(CHUNK_ELEMENTS * 4))
    sent = 0
    while door.send(peer, b"h", payload) is Sent.OK:
        sent += 1
    got: list[int] = []

    def drained() -> bool:
        got.extend(len(frames) for frames in line.receive())
        return len(got) >= sent

    until(drained)
    assert got == [2] * sent
    until(lambda: door.send(peer, b"last") is Sent.OK)
    assert texts(until(line.receive)) == [[b"last"]]


def test_a_line_without_a_server_is_not_connected(net: Net) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        line = net.line(f"tcp://127.0.0.1:{unused.getsockname()[1]}", "control")
        assert not line.connected
        assert not line.send(b"x")
        assert line.events() == []
        assert line.receive() == []


def test_a_line_tells_that_the_server_died_and_that_it_is_back(net: Net) -> None:
    door = net.door()
    line, _ = net.connect(door)
    assert line.events() == ["connected"]
    door.close()
    until(lambda: line.events() == ["disconnected"])
    assert not line.connected
    assert not line.send(b"x")
    door = net.door_again(door.address)
    until(lambda: line.events() == ["connected"])
    assert line.send(b"again")
    ((_, frames),) = until(door.receive)
    assert texts([frames]) == [[b"again"]]


def test_a_line_reopens_to_a_restarted_server_and_to_another(net: Net) -> None:
    door = net.door()
    line, _ = net.connect(door)
    door.close()
    door = net.door_again(door.address)
    line.reopen()
    until(lambda: line.connected)
    assert line.send(b"new socket")
    until(door.receive)
    elsewhere = net.door()
    line.reopen(elsewhere.address)
    until(lambda: line.send(b"moved"))
    until(elsewhere.receive)
    assert line.address == elsewhere.address


GARBAGE = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": bytes.fromhex("16030100f8010000f40303") + bytes(200),
    "noise": bytes(range(1, 256)) * 16,
    "silence": b"",
    "a greeting, then a frame of 2**63 bytes": b"\xff" + bytes(8) + b"\x7f\x03\x00"
    + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x02" + b"\x7f" + b"\xff" * 7,
}  # fmt: skip


def test_garbage_on_the_port_is_dropped_and_disturbs_nobody(net: Net) -> None:
    door = net.door()
    line, peer = net.connect(door)
    with contextlib.ExitStack() as stack:
        raws = {}
        for name, garbage in GARBAGE.items():
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", door.port)))
            raw.setblocking(False)
            raw.sendall(garbage)
            raws[name] = raw
        assert line.send(b"ping")
        heard = until(lambda: [m for m in door.receive() if m[0] == peer])
        assert texts([heard[0][1]]) == [[b"ping"]]
        # The silent ones go when the handshake has had its 5 s.
        for name, raw in raws.items():
            until(functools.partial(closed_by_peer, raw), 15, f"{name} is still connected")
    assert line.events() == ["connected"]


def closed_by_peer(raw: socket.socket) -> bool:
    try:
        return raw.recv(4096) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_what_does_not_speak_zeromq_does_not_stay_connected(net: Net) -> None:
    """For a moment libzmq may take it for a peer of version 1, which has no handshake."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = net.line(f"tcp://127.0.0.1:{server.getsockname()[1]}", "control")
        server.settimeout(10)
        raw, _ = server.accept()
        with raw:
            raw.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            assert raw.recv(4096)  # its own greeting
        assert listens(line.address)
        until(lambda: not line.connected)


def test_a_busy_address_is_in_use(net: Net, tmp_path: Path) -> None:
    for address in (ANY, f"ipc://{tmp_path}/s"):
        door = net.door(address, "control")
        with pytest.raises(AddressInUseError, match="Stop that process") as caught:
            net.door(door.address)
        assert str(door.address) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_an_address_that_is_not_ours_or_not_loopback_is_refused(net: Net) -> None:
    with pytest.raises(ConfigError, match="without keys would let anybody in"):
        net.door("tcp://0.0.0.0:*", "control")
    with pytest.raises(ConfigError, match="in plaintext"):
        net.line("tcp://192.0.2.1:5555", "control")
    with pytest.raises(ConfigError, match="needs the port"):
        net.line("tcp://127.0.0.1:*", "control")
    with pytest.raises(ConfigError, match="No such file"):
        net.door("ipc:///nonexistent/socket", "control")


def test_an_address_of_another_machine_is_a_config_error(net: Net) -> None:
    with pytest.raises(ConfigError, match="not an address of this machine"):
        net.door("tcp://203.0.113.1:*", "control", INSECURE)


def test_a_socket_file_is_private_and_replaces_only_dead_sockets(net: Net, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    door = net.door(f"ipc://{path}", "control")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    door.close()
    precious = tmp_path / "precious"
    precious.write_text("mine")
    with pytest.raises(ConfigError, match="is no socket"):
        net.door(f"ipc://{precious}", "control")
    assert precious.read_text() == "mine"


def test_closing_twice_is_harmless(net: Net) -> None:
    door = net.door()
    line, _ = net.connect(door)
    for thing in (line, door):
        thing.close()
        thing.close()
        assert thing.sockets == ()
    assert line.events() == []


def test_every_option_is_set_as_the_table_says(net: Net) -> None:
    door = net.door(ANY, "bulk")
    line = net.line(door.address)
    for thing, option, value in (
        (door.socket, zmq.MAXMSGSIZE, CHUNK_ELEMENTS * 4 + BULK_BYTES_MAX),
        (line.sockets[0], zmq.MAXMSGSIZE, CONTROL_BYTES_MAX),
        (door.socket, zmq.SNDHWM, 8),
        (line.sockets[0], zmq.IMMEDIATE, 1),
        (line.sockets[0], zmq.LINGER, 0),
        (door.socket, zmq.HANDSHAKE_IVL, 5000),
    ):
        assert isinstance(thing, zmq.Socket)
        assert thing.getsockopt(option) == value


def test_no_socket_has_heartbeats_of_libzmq(net: Net) -> None:
    """One that is due for a connection that was reset while its queue was full ends the process."""
    door = net.door(ANY, "bulk")
    for thing in (door.socket, *net.line(door.address).sockets):
        assert isinstance(thing, zmq.Socket)
        assert thing.getsockopt(zmq.HEARTBEAT_IVL) == 0


def test_an_old_libzmq_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: (4, 3, 4))
    with pytest.raises(ConfigError, match="pip install -U pyzmq"):
        options.new_context()


def test_a_string_and_an_address_are_the_same(net: Net) -> None:
    door = net.door(Address.parse(ANY), "control")
    line = net.line(str(door.address), "control")
    assert line.address == door.address


@pytest.mark.parametrize("kind", ["door", "line"])
def test_a_forgotten_socket_is_closed_and_complained_about(net: Net, kind: str) -> None:
    door = net.door()
    forgotten: list[Door | Line] = [
        Door(net.context, ANY, "control")
        if kind == "door"
        else Line(net.context, door.address, "bulk")
    ]
    with pytest.warns(ResourceWarning, match="was never closed"):
        forgotten.clear()
