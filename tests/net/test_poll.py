from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from diloco_plugin.net.sockets import Poll, Waker
from tests.net.conftest import Net
from tests.waiting import until

#: Longer than any of these waits may take; reaching it fails the test.
LONG = 30.0


@pytest.fixture
def waker() -> Iterator[Waker]:
    waker = Waker()
    yield waker
    waker.close()


def returns_soon(poll: Poll) -> bool:
    begin = time.monotonic()
    poll.wait(LONG)
    return time.monotonic() - begin < LONG / 2


def test_another_thread_wakes_the_poller(waker: Waker) -> None:
    poll = Poll()
    poll.add(waker)
    thread = threading.Thread(target=waker.wake)
    thread.start()
    assert returns_soon(poll)
    thread.join()
    waker.drain()
    begin = time.monotonic()
    poll.wait(0.02)
    assert time.monotonic() - begin >= 0.015


def test_waking_never_blocks_and_is_harmless_after_closing(waker: Waker) -> None:
    for _ in range(5000):
        waker.wake()
    waker.drain()
    waker.close()
    waker.close()
    waker.wake()
    waker.drain()
    assert waker.fileno() == -1


def test_doors_and_lines_wake_the_poller(net: Net) -> None:
    door, poll = net.door(), Poll()
    line = net.line(door.address)
    poll.add(line)
    poll.add(line)
    until(lambda: returns_soon(poll) and "connected" in line.events())
    assert line.send(b"x")
    door_poll = Poll()
    door_poll.add(door)
    assert returns_soon(door_poll)
    ((peer, _),) = until(door.receive)
    door.send(peer, b"y")
    until(lambda: returns_soon(poll) and line.receive())


def test_a_line_that_reopened_is_still_polled(net: Net) -> None:
    door, poll = net.door(), Poll()
    line = net.line(door.address)
    poll.add(line)
    until(lambda: line.connected)
    line.reopen()
    until(lambda: returns_soon(poll) and "connected" in line.events())


def test_a_connection_that_was_seen_already_is_not_slept_over(net: Net) -> None:
    door, poll = net.door(), Poll()
    line = net.line(door.address)
    poll.add(line)
    until(lambda: line.connected)
    assert returns_soon(poll)
    assert line.events() == ["connected"]


def test_removed_and_closed_things_are_not_polled(net: Net, waker: Waker) -> None:
    door, poll = net.door(), Poll()
    for thing in (door, waker):
        poll.add(thing)
    waker.wake()
    poll.remove(waker)
    poll.remove(waker)
    door.close()
    begin = time.monotonic()
    poll.wait(0.02)
    assert time.monotonic() - begin >= 0.015
    poll.wait(-1.0)


def test_waiting_for_nothing_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="would never end"):
        Poll().wait(None)
