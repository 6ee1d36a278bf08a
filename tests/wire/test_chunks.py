from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from diloco_plugin.errors import WireError
from diloco_plugin.wire.chunks import (
    CHUNK_ELEMENTS,
    RUN_MAX,
    Receiver,
    check_payload,
    checksum,
    chunk_bounds,
    chunk_count,
)


@given(st.integers(0, 40 * CHUNK_ELEMENTS))
def test_chunks_tile_the_elements(elements: int) -> None:
    at = 0
    for index in range(chunk_count(elements)):
        start, stop = chunk_bounds(index, elements)
        assert start == at
        assert 0 < stop - start <= CHUNK_ELEMENTS
        at = stop
    assert at == elements


@pytest.mark.parametrize("index", [-1, 2, 2**53])
def test_a_chunk_that_does_not_exist_has_no_bounds(index: int) -> None:
    with pytest.raises(WireError) as caught:
        chunk_bounds(index, CHUNK_ELEMENTS + 1)
    assert caught.value.reason == "out_of_range"


class Transfers(RuleBasedStateMachine):
    """A receiver whose chunks come in any order, twice, unasked, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.receiver: Receiver | None = None
        self.asked: set[int] = set()
        self.got: set[int] = set()

    @precondition(lambda self: self.receiver is None)
    @rule(chunks=st.integers(0, 200), window=st.integers(1, 100))
    def begin(self, chunks: int, window: int) -> None:
        self.receiver = Receiver(chunks, window)

    @precondition(lambda self: self.receiver is not None)
    @rule()
    def want(self) -> None:
        self.take(self.receiver)

    def take(self, receiver: Any) -> None:
        before = len(self.asked)
        for first, count in receiver.wants():
            assert 1 <= count <= RUN_MAX
            run = set(range(first, first + count))
            assert not run & self.asked, "wanted twice while outstanding"
            assert not run & self.got, "wanted though received"
            assert max(run) < receiver.chunks
            self.asked |= run
        missing = receiver.chunks - len(self.got)
        assert len(self.asked) == max(before, min(receiver.window, missing)), "credit left over"

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.asked)))
        assert self.receiver is not None
        self.receiver.receive(index)
        self.asked.remove(index)
        self.got.add(index)

    @precondition(lambda self: self.receiver is not None)
    @rule(index=st.integers(-3, 203) | st.integers())
    def arrive_unasked(self, index: int) -> None:
        assert self.receiver is not None
        if index in self.asked:
            return
        with pytest.raises(WireError) as caught:
            self.receiver.receive(index)
        assert caught.value.reason == ("duplicate" if index in self.got else "unwanted")

    @precondition(lambda self: self.receiver is not None)
    @rule()
    def lose_the_connection(self) -> None:
        assert self.receiver is not None
        self.receiver.restart()
        self.asked.clear()

    @invariant()
    def counts_agree(self) -> None:
        if self.receiver is not None:
            assert self.receiver.received == len(self.got)
            assert self.receiver.outstanding == len(self.asked) <= self.receiver.window
            assert self.receiver.complete == (len(self.got) == self.receiver.chunks)

    def teardown(self) -> None:
        if self.receiver is None:
            return
        while not self.receiver.complete:
            self.take(self.receiver)
            for index in sorted(self.asked, reverse=True):
                self.receiver.receive(index)
                self.got.add(index)
            self.asked.clear()
        assert self.receiver.wants() == []


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_nothing_to_receive_is_complete() -> None:
    receiver = Receiver(0, 4)
    assert receiver.complete
    assert receiver.wants() == []


def test_a_window_is_asked_for_in_runs_of_at_most_64() -> None:
    assert Receiver(150, 140).wants() == [(0, 64), (64, 64), (128, 12)]


def test_after_a_lost_connection_only_the_missing_are_wanted() -> None:
    receiver = Receiver(6, 6)
    receiver.wants()
    receiver.receive(1)
    receiver.receive(4)
    receiver.restart()
    assert receiver.wants() == [(0, 1), (2, 2), (5, 1)]


@pytest.mark.parametrize(("chunks", "window"), [(-1, 1), (1, 0)])
def test_nonsense_is_refused(chunks: int, window: int) -> None:
    with pytest.raises(ValueError, match=r"chunks=-?[0-9]+"):
        Receiver(chunks, window)


def test_a_payload_must_have_its_size_and_its_checksum() -> None:
    payload = bytearray(range(100))
    crc = checksum(payload)
    check_payload(memoryview(payload), 100, crc)
    with pytest.raises(WireError) as caught:
        check_payload(payload[:99], 100, crc)
    assert caught.value.reason == "wrong_size"
    payload[50] ^= 1
    with pytest.raises(WireError) as caught:
        check_payload(payload, 100, crc)
    assert caught.value.reason == "corrupt"
