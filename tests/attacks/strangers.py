"""Attacks by those who need not be let in: bytes, handshakes and keys."""

from __future__ import annotations

import contextlib
import os
import pickle  # noqa: TID251  (what an attacker would send)
import socket
import struct
import time
from collections.abc import Iterator

from diloco_plugin.net.keys import LineKeys, new_pair
from diloco_plugin.net.sockets import Line, new_context
from tests.attacks import zmtp
from tests.attacks.stage import MIB, Stage, again_and_again
from tests.end_to_end.forged import Forged
from tests.soak import SOAK
from tests.waiting import until

#: A peer that does not finish the handshake is hung up on after 5 s.
HANDSHAKE_SECONDS = 12
TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + os.urandom(197)


def a_port_scan(stage: Stage) -> Iterator[None]:
    for _ in range(100 * SOAK):
        with stage.raw():
            pass
    yield


def a_tls_hello(stage: Stage) -> Iterator[None]:
    with stage.raw(TLS_HELLO, each=20) as raw:
        until(lambda: all(zmtp.hung_up(r) for r in raw), HANDSHAKE_SECONDS, "hung up on")
        yield


def an_http_request(stage: Stage) -> Iterator[None]:
    with stage.raw(b"GET / HTTP/1.1\r\nHost: syncer\r\n\r\n", each=20) as raw:
        until(lambda: all(zmtp.hung_up(r) for r in raw), HANDSHAKE_SECONDS, "hung up on")
        yield


def a_peer_that_says_one_byte_now_and_then(stage: Stage) -> Iterator[None]:
    letters = zmtp.greeting()
    with stage.raw(each=10) as raw:

        def drip() -> None:
            for at in range(len(letters)):
                for one in raw:
                    zmtp.say(one, letters[at : at + 1])
                time.sleep(0.05)  # what makes it slow

        with again_and_again(drip):
            yield


def silent_peers_and_half_greetings_which_are_hung_up_on(stage: Stage) -> Iterator[None]:
    with stage.raw(each=20) as silent, stage.raw(zmtp.greeting()[:20], each=20) as half:
        yield
        raw = silent + half
        until(lambda: all(zmtp.hung_up(r) for r in raw), HANDSHAKE_SECONDS, "hung up on")


def a_greeting_and_then_garbage(stage: Stage) -> Iterator[None]:
    with stage.raw(zmtp.greeting(), os.urandom(64 * 1024), each=10):
        yield


def a_header_of_4_gib_before_the_handshake(stage: Stage) -> Iterator[None]:
    before = stage.process.memory_info().vms
    for flags in (0, zmtp.COMMAND):
        with stage.raw(zmtp.greeting(), zmtp.header(2**32, flags), each=5) as raw:
            until(lambda r=raw: all(zmtp.hung_up(x) for x in r), HANDSHAKE_SECONDS, "hung up on")
    assert stage.process.memory_info().vms - before < 2**31
    yield


def a_header_of_2_to_the_63_after_the_handshake(stage: Stage) -> Iterator[None]:
    before = stage.process.memory_info().vms
    start = (zmtp.greeting(), zmtp.ready())
    for size in (2**32, 2**63, 2**64 - 1):
        with stage.raw(*start, zmtp.header(size), each=5) as raw:
            until(lambda r=raw: all(zmtp.hung_up(x) for x in r), HANDSHAKE_SECONDS, "hung up on")
    assert stage.process.memory_info().vms - before < 2**31
    yield


def frames_without_end_in_plaintext(stage: Stage) -> Iterator[None]:
    """64 MiB of one message that never ends: they are held while the connection stands."""
    part = zmtp.frame(bytes(MIB), zmtp.MORE)
    with stage.raw(zmtp.greeting(), zmtp.ready()) as raw:
        for _ in range(64):
            zmtp.say(raw[1], part)
        yield


def floods_that_end_with_a_reset(stage: Stage) -> Iterator[None]:
    """The connection breaks while libzmq holds what it could not queue."""
    flood = zmtp.frame(bytes(100)) * 400
    for _ in range(20):
        with stage.raw(zmtp.greeting(), zmtp.ready(), flood) as connections:
            for raw in connections:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    yield


def a_message_of_a_thousand_frames(stage: Stage) -> Iterator[None]:
    with stage.socket() as control, stage.socket("bulk") as bulk:
        for _ in range(4 * SOAK):
            control.send_multipart([bytes(16 * 1024)] * 1000)
            bulk.send_multipart([bytes(16 * 1024)] * 1000)
        yield


def a_peer_of_zmtp_1_0(stage: Stage) -> Iterator[None]:
    with stage.raw(b"\x01\x00", b"\x06\x00hello" * 1000, each=20):
        yield


def sockets_of_other_kinds(stage: Stage) -> Iterator[None]:
    kinds = (b"REQ", b"SUB", b"PUSH", b"PAIR", b"ROUTER", b"\0" * 200, b"")
    with contextlib.ExitStack() as opened:
        for kind in kinds:
            parts = (zmtp.greeting(), zmtp.ready(kind), zmtp.frame(b"\x01topic"), zmtp.frame(b""))
            opened.enter_context(stage.raw(*parts, each=3))
        yield


def mechanisms_that_nobody_offers(stage: Stage) -> Iterator[None]:
    plain = zmtp.frame(b"\x05HELLO\x05admin\x05admin", zmtp.COMMAND)
    with (
        stage.raw(zmtp.greeting(b"PLAIN"), plain, each=5),
        stage.raw(zmtp.greeting(b"GSSAPI"), os.urandom(500), each=5),
        stage.raw(zmtp.greeting(b"CURVE"), zmtp.frame(os.urandom(200), zmtp.COMMAND), each=5),
    ):
        yield


def three_hundred_connections_that_are_left_open(stage: Stage) -> Iterator[None]:
    before = stage.descriptors()
    with stage.raw(zmtp.greeting(), each=150):
        yield
        assert stage.descriptors() - before <= 310
    until(lambda: stage.descriptors() <= before + 10, 20, "descriptors are free again")


def connections_that_come_and_go(stage: Stage) -> Iterator[None]:
    start = (zmtp.greeting(), zmtp.ready(), zmtp.frame(b"\x00"))

    def act() -> None:
        with stage.raw(*start, each=4):
            pass

    with again_and_again(act):
        yield


def the_routing_id_of_another_learner(stage: Stage) -> Iterator[None]:
    """Ids are given by the door, unknown to others; whoever claims one is only itself."""
    with contextlib.ExitStack() as opened:
        for _ in range(2):
            one = opened.enter_context(stage.socket(ROUTING_ID=b"alpha"))
            one.send(b"\x81")
        for number in range(50):
            claimed = b"\0" + number.to_bytes(4, "big")
            opened.enter_context(stage.raw(zmtp.greeting(), zmtp.ready(identity=claimed)))
        yield


def pickles_to_every_decoder(stage: Stage) -> Iterator[None]:
    with stage.member() as forged, stage.socket() as control, stage.socket("bulk") as bulk:
        for protocol in range(2, 6):
            bad = pickle.dumps({"a": [1.0] * 10, "b": OSError}, protocol=protocol)
            control.send(bad)
            bulk.send_multipart([bad, bad])
            forged.say_bytes(bad)
            forged.say_bulk(bad, bad)
        yield


# ---- who has no key, or the wrong one ----


def a_peer_without_a_key(stage: Stage) -> Iterator[None]:
    start = (zmtp.greeting(), zmtp.ready(), zmtp.frame(b"\x80"))
    refused = stage.status()["refused_keys"]
    with stage.raw(*start, each=10) as raw:
        yield
        until(lambda: all(zmtp.hung_up(r) for r in raw), HANDSHAKE_SECONDS, "hung up on")
    assert stage.status()["refused_keys"] == refused


def _shut_out(stage: Stage, keys: LineKeys) -> Iterator[None]:
    with Forged(stage.address, "mallory", stage.specs, keys=keys) as forged:
        bulk = Line(new_context(), f"tcp://127.0.0.1:{stage.ports[1]}", "bulk", keys)
        yield
        assert not forged.control.connected
        assert not bulk.connected
        bulk._context.destroy(linger=0)


def a_key_that_nobody_knows(stage: Stage) -> Iterator[None]:
    yield from _shut_out(stage, LineKeys("mallory", new_pair(), stage.server_key))


def many_keys_that_nobody_knows(stage: Stage) -> Iterator[None]:
    context = new_context()
    lines = [
        Line(context, stage.address, "control", LineKeys("mallory", new_pair(), stage.server_key))
        for _ in range(100 * SOAK)
    ]
    yield
    assert not any(line.connected for line in lines)
    context.destroy(linger=0)
    assert len(stage.status()["refused_keys"]) <= 64


def the_public_key_of_a_learner_without_its_secret(stage: Stage) -> Iterator[None]:
    assert stage.ring is not None
    own, others = new_pair(), stage.ring.line("alpha").own
    own = type(own)(others.public, own.secret)
    yield from _shut_out(stage, LineKeys("alpha", own, stage.server_key))


def the_wrong_key_of_the_syncer(stage: Stage) -> Iterator[None]:
    keys = stage.identity()[1]
    assert keys is not None
    yield from _shut_out(stage, LineKeys(keys.name, keys.own, new_pair().public))


ATTACKS = [
    a_port_scan,
    a_tls_hello,
    an_http_request,
    a_peer_that_says_one_byte_now_and_then,
    silent_peers_and_half_greetings_which_are_hung_up_on,
    a_greeting_and_then_garbage,
    a_header_of_4_gib_before_the_handshake,
    a_header_of_2_to_the_63_after_the_handshake,
    frames_without_end_in_plaintext,
    floods_that_end_with_a_reset,
    a_message_of_a_thousand_frames,
    a_peer_of_zmtp_1_0,
    sockets_of_other_kinds,
    mechanisms_that_nobody_offers,
    three_hundred_connections_that_are_left_open,
    connections_that_come_and_go,
    the_routing_id_of_another_learner,
    pickles_to_every_decoder,
]
#: those that only make sense where there are keys
WITH_KEYS = [
    a_peer_without_a_key,
    a_key_that_nobody_knows,
    many_keys_that_nobody_knows,
    the_public_key_of_a_learner_without_its_secret,
    the_wrong_key_of_the_syncer,
]
