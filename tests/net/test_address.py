from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_plugin.errors import ConfigError
from diloco_plugin.net.address import Address, require_keys


@pytest.mark.parametrize(
    ("text", "address", "zmq_form"),
    [
        ("tcp://127.0.0.1:5555", Address("tcp", "127.0.0.1", 5555), "tcp://127.0.0.1:5555"),
        ("TCP://syncer:1", Address("tcp", "syncer", 1), "tcp://syncer:1"),
        ("tcp://127.0.0.1:*", Address("tcp", "127.0.0.1", 0), "tcp://127.0.0.1:*"),
        ("tcp://127.0.0.1:0", Address("tcp", "127.0.0.1", 0), "tcp://127.0.0.1:*"),
        ("tcp://[::1]:5555", Address("tcp", "::1", 5555), "tcp://[::1]:5555"),
        ("tcp://*:65535", Address("tcp", "*", 65535), "tcp://*:65535"),
        ("tcp://localhost:5", Address("tcp", "localhost", 5), "tcp://127.0.0.1:5"),
        ("ipc:///tmp/a.sock", Address("ipc", "/tmp/a.sock"), "ipc:///tmp/a.sock"),
    ],
)
def test_an_address_is_read_and_written(text: str, address: Address, zmq_form: str) -> None:
    assert Address.parse(text) == address
    assert str(address) == zmq_form


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("127.0.0.1:5555", "Write tcp://127.0.0.1:5555"),
        ("", "Write tcp://127.0.0.1:5555"),
        ("http://127.0.0.1:5555", "must begin with tcp:// or ipc://"),
        ("inproc://x", "must begin with tcp:// or ipc://"),
        ("tcp://127.0.0.1", "has no port"),
        ("tcp://127.0.0.1:", "has no port"),
        ("tcp://[::1]", "has no port"),
        ("tcp://[::1]5555", "has no port"),
        ("tcp://127.0.0.1:65536", "no valid port"),
        ("tcp://127.0.0.1:-1", "no valid port"),
        ("tcp://127.0.0.1:\u0665", "no valid port"),
        ("tcp://127.0.0.1:5555/path", "no valid port"),
        ("tcp://::1:5555", "needs brackets"),
        ("tcp://[::1:5555", "no IPv6 address in its brackets"),
        ("tcp://[host]:5555", "no IPv6 address in its brackets"),
        ("tcp://:5555", "no valid host"),
        ("tcp://a b:5555", "no valid host"),
        ("tcp://eth0;10.0.0.1:5555", "no valid host"),
        ("tcp://user@host:5555", "no valid host"),
        ("tcp://127.0.1:5555", "malformed IPv4"),
        ("tcp://300.0.0.1:5555", "malformed IPv4"),
        ("ipc://", "names no file"),
        ("ipc://*", "names no file"),
    ],
)
def test_nonsense_is_refused_with_the_fix(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Address.parse(text)
    assert says in str(caught.value)


@given(st.text(max_size=30) | st.text("tcp://[]:*0189.", max_size=30))
def test_any_text_is_an_address_or_a_config_error(text: str) -> None:
    for candidate in (text, f"tcp://{text}", f"tcp://{text}:5"):
        try:
            address = Address.parse(candidate)
        except ConfigError:
            continue
        assert str(Address.parse(str(address))) == str(address)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.200.3.4:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://[::ffff:127.0.0.1]:1", True),
        ("tcp://localhost:1", True),
        ("ipc:///tmp/x", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://*:1", False),
        ("tcp://[::]:1", False),
        ("tcp://[::ffff:10.0.0.1]:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://127.0.0.1.example.org:1", False),
        ("tcp://localhost.example.org:1", False),
    ],
)
def test_loopback_is_what_nobody_outside_can_reach(text: str, expected: bool) -> None:
    assert Address.parse(text).is_loopback is expected


def test_without_keys_only_loopback_is_allowed_and_both_ways_out_are_named() -> None:
    require_keys(Address.parse("tcp://localhost:5555"))
    address = Address.parse("tcp://gpu.example.org:5555")
    with pytest.raises(ConfigError) as listening:
        require_keys(address)
    with pytest.raises(ConfigError) as connecting:
        require_keys(address, connecting=True)
    listen, connect = str(listening.value), str(connecting.value)
    assert "`diloco keygen --keys DIR`" in listen
    assert "`diloco syncer --bind tcp://gpu.example.org:5555 --keys DIR`" in listen
    assert "--insecure-plaintext" in listen
    assert "DILOCO_KEYS;" in connect
    assert "keys='insecure-plaintext'" in connect
    assert "\n" not in listen + connect


@pytest.mark.parametrize(
    ("text", "beside"),
    [
        ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:5556"),
        ("tcp://[::1]:*", "tcp://[::1]:*"),
        ("tcp://127.0.0.1:65535", "tcp://127.0.0.1:*"),
        ("ipc:///tmp/x", "ipc:///tmp/x.1"),
    ],
)
def test_the_second_socket_stands_beside_the_first(text: str, beside: str) -> None:
    address = Address.parse(text).beside()
    assert str(address) == beside
    if "ipc" in text:
        assert str(Address.parse(text).with_port(address.port)) == beside
