from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from diloco_plugin.errors import ConfigError, UnreachableError
from diloco_plugin.net.asking import ask
from diloco_plugin.net.sockets import Door, Poll, Waker
from tests.net.conftest import Net


def serve(door: Door, stop: Waker, done: threading.Event, answer: Callable[[bytes], bytes]) -> None:
    poll = Poll()
    poll.add(door)
    poll.add(stop)
    while not done.is_set():
        poll.wait(10)
        for peer, frames in door.receive():
            door.send(peer, answer(frames[0].bytes))
    door.close()


def test_a_question_gets_its_answer(net: Net) -> None:
    door, stop, done = net.door(), Waker(), threading.Event()
    thread = threading.Thread(target=serve, args=(door, stop, done, bytes.upper))
    thread.start()
    try:
        assert ask(door.address, b"question", 10) == b"QUESTION"
        assert ask(str(door.address), b"again", 10) == b"AGAIN"
    finally:
        done.set()
        stop.wake()
        thread.join()
        stop.close()


def test_nobody_there_names_address_time_and_causes() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(UnreachableError) as caught:
            ask(address, b"x", 0.2)
    text = str(caught.value)
    assert f"{address} did not answer within 0.2 s: TCP did not connect." in text
    assert text.index("no syncer runs there") < text.index("firewall") < text.index("port is wrong")


def test_something_else_there_is_said_to_be_no_syncer() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(UnreachableError, match="TCP connected, but what listens there is no syncer"),
    ):
        ask(f"tcp://127.0.0.1:{server.getsockname()[1]}", b"x", 0.3)


def test_a_syncer_that_does_not_answer_is_said_to_be_stuck(net: Net) -> None:
    door = net.door()
    with pytest.raises(UnreachableError, match="busy or stuck"):
        ask(door.address, b"x", 0.3)


@pytest.mark.parametrize(
    ("given", "like"),
    [
        ("127.0.0.1:80", "tcp://127.0.0.1:80"),
        ("box", "tcp://box:5555"),
        ("70", "tcp://127.0.0.1:70"),
        ("", "tcp://127.0.0.1:5555"),
    ],
)
def test_an_address_without_a_scheme_is_told_how_to_be_written(given: str, like: str) -> None:
    with pytest.raises(ConfigError, match=f"no scheme. Write {like}\\.$"):
        ask(given, b"x", 1)
