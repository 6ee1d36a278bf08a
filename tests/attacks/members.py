"""Attacks by messages: of those who were let in, or could be."""

from __future__ import annotations

import contextlib
import math
import secrets
import struct
import time
from collections.abc import Iterator

import msgspec

from diloco_plugin.core.conduct import STRIKES_MAX
from diloco_plugin.describing import describe
from diloco_plugin.net.sockets import Line
from diloco_plugin.tensors.layout import TensorSpec
from diloco_plugin.wire import messages as msg
from diloco_plugin.wire.framing import encode, encode_model
from tests.attacks.stage import Stage, again_and_again
from tests.end_to_end.forged import Forged
from tests.soak import SOAK
from tests.waiting import until

EVER = 2**53
PACK = msgspec.msgpack.Encoder().encode


def many_tensors(count: int) -> msgspec.Raw:
    """Descriptions that are as short as can be."""
    return describe(TensorSpec(f"{i:x}", (1,), "f", "w") for i in range(count))


def hello_of(forged: Forged, model: msgspec.Raw) -> bytes:
    """A Hello of this client that describes this model."""
    return encode(
        msg.Hello(
            protocol=msg.PROTOCOL,
            run="",
            name=forged.name,
            incarnation=forged.incarnation,
            tensors=model,
        )
    )


# ---- at the door ----


def a_hello_of_100_000_tensors(stage: Stage) -> Iterator[None]:
    with stage.client() as forged:
        forged.say_bytes(hello_of(forged, many_tensors(msg.TENSORS_MAX)))
        assert forged.hear(msg.Refuse).code == "layout"
        many = many_tensors(1000)
        with again_and_again(lambda: forged.hello(tensors=many)):
            yield


def a_flood_of_long_hellos(stage: Stage) -> Iterator[None]:
    with stage.client() as forged:
        hello = hello_of(forged, many_tensors(msg.TENSORS_MAX))
        for _ in range(40):
            forged.say_bytes(hello)
        yield


def a_flood_of_hellos_from_many_connections(stage: Stage) -> Iterator[None]:
    with contextlib.ExitStack() as opened:
        clients = [opened.enter_context(stage.client()) for _ in range(12)]
        for client in clients:
            hello = hello_of(client, many_tensors(20_000))
            for _ in range(3):
                client.say_bytes(hello)
        yield


def a_model_that_is_not_the_runs(stage: Stage) -> Iterator[None]:
    wrong = [
        (),
        (msg.Tensor("a", (300_000,), "float32", "weight"),),
        tuple(msg.Tensor(n, (EVER,) * 16, "float32", "weight") for n in "ab"),
        tuple(msg.Tensor("a", (300_000,), "float32", "weight") for _ in "ab"),
        tuple(msg.Tensor(n, (300_000,), "no dtype", "no kind", "a") for n in "ab"),
    ]
    for tensors in wrong:
        with stage.client() as forged:
            forged.hello(tensors=encode_model(tensors))
            assert forged.hear(msg.Refuse).code == "layout"
    yield


def a_life_that_knows_another_epoch(stage: Stage) -> Iterator[None]:
    epoch = stage.status()["epoch"]
    with stage.client() as forged:
        forged.hello(epoch=epoch + 1)
        assert forged.hear(msg.Refuse).code == "fenced"
    with stage.client() as forged:
        forged.join(epoch=epoch - 1, versions=(EVER, EVER), clock=EVER)
        assert not forged.welcome.keep  # type: ignore[union-attr]
        yield


def messages_of_an_old_epoch(stage: Stage) -> Iterator[None]:
    with stage.member() as forged:
        for epoch in (forged.epoch - 1, forged.epoch + 1, 0, EVER):
            forged.say(msg.Progress(epoch=epoch, clock=EVER, step_ns=1, tokens=1))
            forged.say(msg.Offer(epoch=epoch, round=0, fragment=0, steps=1, tokens=1))
            forged.say(msg.Goodbye(epoch=epoch))
            forged.hear(msg.HelloRequired)
        yield


def a_living_learners_name(stage: Stage) -> Iterator[None]:
    """In plaintext the living one is asked, and says that it is there; with keys nobody asks."""
    with stage.client() as forged:
        for _ in range(5):
            forged.hello(name="alpha", incarnation=secrets.token_hex(16))
        refusal = forged.hear(msg.Refuse)
        assert refusal.code == ("identity" if stage.curve else "name")
        yield


def many_names_on_one_connection(stage: Stage) -> Iterator[None]:
    with stage.client() as forged:
        for number in range(100):
            forged.hello(name=f"sybil-{number}", incarnation=secrets.token_hex(16))
        yield
    until(lambda: len(stage.status()["learners"]) <= 3, 20, "at most one of them is a learner")


def lives_that_come_and_go_without_a_word(stage: Stage) -> Iterator[None]:
    for _ in range(8):
        forged = stage.client()
        forged.join()
        forged.close()
    yield


def a_recorded_conversation_of_a_learner_that_has_left(stage: Stage) -> Iterator[None]:
    with stage.client() as victim:
        welcome = victim.join()
        victim.take()
        recorded = [
            encode(msg.Progress(epoch=victim.epoch, clock=1, step_ns=1, tokens=1)),
            encode(msg.Offer(epoch=victim.epoch, round=0, fragment=0, base=0, steps=1, tokens=1)),
            encode(msg.Taken(epoch=victim.epoch)),
        ]
        said = hello_of(victim, describe(victim.specs))
    with stage.client() as replayer:
        replayer.say_bytes(said)
        for data in recorded * 3:
            replayer.say_bytes(data)
        if stage.curve:
            assert replayer.hear(msg.Refuse).code == "identity"
        else:  # nothing proves who it is; but it has no token, and its push was given already
            replayer.hear(msg.Welcome)
            fate = replayer.hear(msg.Fate)
            assert fate.fate in ("rejected", "late")
        address = replayer._address.with_port(stage.ports[1])
        with contextlib.closing(Line(replayer._context, address, "bulk", replayer._keys)) as bulk:
            until(lambda: bulk.send(encode(msg.BulkHello(token=welcome.token))))
            until(
                lambda: bulk.send(
                    encode(msg.Want(kind="fetch", fragment=0, key=0, first=0, count=1))
                )
            )
            yield
            assert bulk.receive() == []


# ---- fields ----


def fields_that_are_no_numbers_of_this_world(stage: Stage) -> Iterator[None]:
    values = [math.nan, math.inf, -1, 2**63, 2**64 - 1, 1e300, "1", True, None, [{}]]
    for place in range(0, len(values), STRIKES_MAX):
        with stage.member() as forged:
            for value in values[place : place + STRIKES_MAX]:
                fields = {"epoch": forged.epoch, "clock": value, "step_ns": value, "tokens": value}
                forged.say_bytes(PACK({"type": "Progress", **fields}))
            forged.hear(msg.Fence)
    yield


def messages_that_are_deep_or_endless(stage: Stage) -> Iterator[None]:
    bombs = [
        b"\x91" * 1_000_000,
        b"\x81\xa1a" * 300_000,
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        PACK({"type": "Heartbeat", "epoch": 1} | {f"x{i}": i for i in range(50_000)}),
        PACK({"type": "CloseRequest", "epoch": 1, "fragments": list(range(100_000))}),
        PACK({"type": "PlaceRequest", "name": "n" * 4_000_000}),
        b"\x82\xa4type\xa9Heartbeat\xa5epoch\xcf" + struct.pack(">Q", 2**64 - 1),
    ]
    for place in range(0, len(bombs), STRIKES_MAX):
        with stage.member() as forged:
            for bomb in bombs[place : place + STRIKES_MAX]:
                forged.say_bytes(bomb)
            forged.hear(msg.Fence)
    yield


# ---- in ----


def a_clock_that_nobody_can_have(stage: Stage) -> Iterator[None]:
    """The second largest clock counts: a lone liar moves nothing."""
    before = stage.status()["clock"]
    with stage.member() as forged:
        forged.progress(EVER)
        for _ in range(50):
            forged.say(msg.Progress(epoch=forged.epoch, clock=EVER, step_ns=EVER, tokens=EVER))
        yield
        assert stage.status()["clock"] < before + 10_000


def offers_for_rounds_that_do_not_exist(stage: Stage) -> Iterator[None]:
    with stage.member() as forged:
        for round_ in (EVER, stage.status()["rounds"]["merged"] + 10_000):
            for fragment in (0, 1, 2, EVER):
                forged.say(
                    msg.Offer(
                        epoch=forged.epoch, round=round_, fragment=fragment, steps=1, tokens=1
                    )
                )
                assert forged.hear(msg.Fate).fate == "rejected"
        yield


def closing_rounds_for_everything_again_and_again(stage: Stage) -> Iterator[None]:
    with stage.member() as forged:
        fragments = tuple(range(msg.FRAGMENTS_MAX))
        ask = msg.CloseRequest(epoch=forged.epoch, fragments=fragments)

        def storm() -> None:
            forged.say(ask)
            pulls = [m for m in forged._heard if isinstance(m, msg.Pull)]
            forged._heard.clear()
            for pull in pulls or [forged.hear(msg.Pull)]:
                forged.offer(pull, nothing="no steps")

        with again_and_again(storm):
            yield


def closing_rounds_that_are_asked_for_and_not_answered(stage: Stage) -> Iterator[None]:
    with stage.member() as forged:
        ask = msg.CloseRequest(epoch=forged.epoch, fragments=(0, 1))

        def storm() -> None:
            forged.say(ask)
            time.sleep(0.01)  # a busy attacker only slows this very process

        with again_and_again(storm):
            yield


def answers_to_probes_of_others(stage: Stage) -> Iterator[None]:
    with stage.member() as forged:
        for nonce in (*range(100), EVER):
            forged.say(msg.ProbeAnswer(nonce=nonce))
        yield


def a_flood_of_status_requests(stage: Stage) -> Iterator[None]:
    with stage.client() as forged:
        ask = encode(msg.StatusRequest())

        def flood() -> None:
            for _ in range(100):
                forged.say_bytes(ask)
            forged.control.receive()

        with again_and_again(flood):
            yield


def a_flood_of_place_requests_with_many_names(stage: Stage) -> Iterator[None]:
    with stage.client() as forged:
        for number in range(3000 * SOAK):
            forged.say(msg.PlaceRequest(name=f"{number:0128d}"))
        yield


def who_never_reads_what_it_is_told(stage: Stage) -> Iterator[None]:
    with stage.socket(RCVHWM=1, RCVBUF=4096) as control:
        for _ in range(3000 * SOAK):
            control.send(encode(msg.StatusRequest()))
        yield


def a_flood_of_heartbeats(stage: Stage) -> Iterator[None]:
    with stage.member() as forged:
        beat = encode(msg.Heartbeat(epoch=forged.epoch))

        def flood() -> None:
            for _ in range(200):
                forged.say_bytes(beat)
            forged.control.receive()

        with again_and_again(flood):
            yield


ATTACKS = [
    a_hello_of_100_000_tensors,
    a_flood_of_long_hellos,
    a_flood_of_hellos_from_many_connections,
    a_model_that_is_not_the_runs,
    a_life_that_knows_another_epoch,
    messages_of_an_old_epoch,
    a_living_learners_name,
    many_names_on_one_connection,
    lives_that_come_and_go_without_a_word,
    a_recorded_conversation_of_a_learner_that_has_left,
    fields_that_are_no_numbers_of_this_world,
    messages_that_are_deep_or_endless,
    a_clock_that_nobody_can_have,
    offers_for_rounds_that_do_not_exist,
    closing_rounds_for_everything_again_and_again,
    closing_rounds_that_are_asked_for_and_not_answered,
    answers_to_probes_of_others,
    a_flood_of_status_requests,
    a_flood_of_place_requests_with_many_names,
    who_never_reads_what_it_is_told,
    a_flood_of_heartbeats,
]


def the_right_key_and_the_name_of_another(stage: Stage) -> Iterator[None]:
    with stage.client() as forged:
        for name in ("alpha", "syncer", "m000", "nobody"):
            forged.hello(name=name, incarnation=secrets.token_hex(16))
            assert forged.hear(msg.Refuse).code == "identity"
        yield


def a_stolen_token_with_another_key(stage: Stage) -> Iterator[None]:
    with stage.member() as victim, stage.member() as thief:
        assert victim.welcome is not None
        strange = stage.status()["strange_messages"].get("stranger", 0)
        thief.say_bulk(encode(msg.BulkHello(token=victim.welcome.token)))
        until(lambda: stage.status()["strange_messages"].get("stranger", 0) > strange)
        yield


WITH_KEYS = [the_right_key_and_the_name_of_another, a_stolen_token_with_another_key]
