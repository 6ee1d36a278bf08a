"""Attacks on inner optimizer states that pass from one learner through the syncer to another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from diloco_plugin.wire import messages as msg
from diloco_plugin.wire.chunks import checksum
from diloco_plugin.wire.framing import encode
from diloco_plugin.wire.manifest import CHUNK_BYTES, MANIFEST_BYTES_MAX, Manifest, tail_of
from tests.attacks.stage import ELEMENTS, Stage
from tests.end_to_end.forged import Forged
from tests.soak import SOAK
from tests.waiting import until

EVER = 2**53


@contextlib.contextmanager
def ahead(stage: Stage) -> Iterator[Forged]:
    """A member that is chosen as a donor, for its clock."""
    with stage.member() as donor:
        donor.progress(stage.status()["clock"] + 1_000_000)
        until(lambda: clock_of(stage, donor) > stage.status()["clock"] + 1000)
        yield donor


@contextlib.contextmanager
def handover(stage: Stage, size: int) -> Iterator[tuple[Forged, Forged, int]]:
    """A donor, a joiner and their ticket."""
    with ahead(stage) as donor, stage.client() as joiner:
        joiner.join(wants_state=True)
        joiner.take()
        ticket = donor.hear(msg.StateRequest).ticket
        donor.say(msg.StateAnswer(epoch=donor.epoch, ticket=ticket, clock=EVER, size=size))
        yield donor, joiner, ticket


def clock_of(stage: Stage, forged: Forged) -> int:
    clocks = {m["name"]: m["clock"] for m in stage.status()["learners"]}
    return int(clocks[forged.name])


def want_state(ticket: int, first: int, count: int) -> bytes:
    return encode(msg.Want(kind="state", fragment=0, key=ticket, first=first, count=count))


def state_chunk(ticket: int, index: int, data: bytes) -> tuple[bytes, bytes]:
    header = msg.Chunk(kind="state", fragment=0, key=ticket, index=index, crc=checksum(data))
    return encode(header), data


def an_inner_state_of_more_bytes_than_it_can_have(stage: Stage) -> Iterator[None]:
    for size in (EVER, 16 * 4 * 2 * ELEMENTS + MANIFEST_BYTES_MAX + 1):
        with handover(stage, size) as (donor, _, ticket):
            assert donor.hear(msg.StateOver).ticket == ticket
    yield


def an_inner_state_wanted_with_another_ticket_or_beyond_its_end_or_credit(
    stage: Stage,
) -> Iterator[None]:
    for first, count in ((0, 64), (100, 1), (EVER - 1, 1)):
        with handover(stage, 20 * CHUNK_BYTES) as (donor, joiner, ticket), stage.member() as third:
            joiner.hear(msg.StateOffer)
            third.say_bulk(want_state(ticket, 0, 1))
            third.say_bulk(want_state(ticket + 1, 0, 1))
            joiner.say_bulk(want_state(ticket, first, count))
            donor.hear(msg.StateOver)
    yield


def an_inner_state_of_endless_chunks(stage: Stage) -> Iterator[None]:
    with handover(stage, 4 * CHUNK_BYTES) as (donor, joiner, ticket):
        joiner.hear(msg.StateOffer)
        for index in range(64 * SOAK):
            donor.say_bulk(*state_chunk(ticket, index, bytes(CHUNK_BYTES)))
        assert donor.hear(msg.StateOver).ticket == ticket
        yield


def inner_states_that_lie_to_an_honest_joiner(stage: Stage) -> Iterator[None]:
    """Noise, and a manifest that describes nothing of its model: it trains anyway."""
    other = tail_of(Manifest(optimizers=(), rates=(), positions=()))
    for stream in (bytes(range(256)) * 16, other):
        with ahead(stage) as donor:
            late = stage.trainee("late")
            ticket = donor.hear(msg.StateRequest).ticket
            size = len(stream)
            donor.say(msg.StateAnswer(epoch=donor.epoch, ticket=ticket, clock=EVER, size=size))
            donor.wanted("state", 0, ticket, 0)
            donor.say_bulk(*state_chunk(ticket, 0, stream))
            late.wait(lambda t=late: t.steps > 3)
        late.finish()
        stage.legal += int(late.merged)
    yield


ATTACKS = [
    an_inner_state_of_more_bytes_than_it_can_have,
    an_inner_state_wanted_with_another_ticket_or_beyond_its_end_or_credit,
    an_inner_state_of_endless_chunks,
    inner_states_that_lie_to_an_honest_joiner,
]
