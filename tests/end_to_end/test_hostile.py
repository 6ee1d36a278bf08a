"""No message changes the global model except by a legal push; every refusal has its reason."""

from __future__ import annotations

import os
import pickle  # noqa: TID251  (what an attacker would send)
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from diloco_plugin.core.conduct import STRIKES_MAX
from diloco_plugin.net.sockets import Line
from diloco_plugin.syncer import Syncer
from diloco_plugin.wire import messages as msg
from diloco_plugin.wire.framing import encode
from tests.end_to_end.fleet import Trainee, small_model
from tests.end_to_end.forged import Forged, one_weight
from tests.syncers import running_syncer
from tests.waiting import until

SIZE = 1000
SPECS = one_weight(SIZE)
GOOD = torch.full((SIZE,), 1e-3)


@pytest.fixture(scope="module")
def syncer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Syncer]:
    """A run that was given its model; every step of a learner makes a round of its one fragment."""
    folder: Path = tmp_path_factory.mktemp("init")
    torch.manual_seed(0)
    save_file({"w": torch.randn(SIZE)}, folder / "model.safetensors")
    with running_syncer(
        sync_every=1, fragments=1, overlap=0, config={"init": str(folder)}
    ) as running:
        yield running


@pytest.fixture
def forged(syncer: Syncer, request: pytest.FixtureRequest) -> Iterator[Forged]:
    with Forged(syncer.address, f"forger-{request.node.name}"[:128], SPECS) as forger:
        forger.join()
        forger.take()
        yield forger
    until(lambda: not syncer.status()["learners"])


def next_pull(forger: Forged) -> msg.Pull:
    """Step once, so that a round begins."""
    forger.progress(forger.clock + 1)
    return forger.pulled()


def theta(syncer: Syncer) -> tuple[bytes, int]:
    """The global model as others get it, and its version."""
    model = syncer._merging.the_model
    copy = model.wire_copy(0)
    assert copy is not None
    assert copy.data.numpy().tobytes() == model.theta[0].numpy().tobytes()
    return copy.data.numpy().tobytes(), syncer.status()["fragments"][0]["version"]


def rejections(syncer: Syncer) -> dict[str, int]:
    return dict(syncer.status()["fates"]["rejected"])


def strange(syncer: Syncer) -> dict[str, int]:
    return dict(syncer.status()["strange_messages"])


def idle(syncer: Syncer) -> bool:
    return syncer.status()["rounds"]["in_flight"] == 0


def refused(syncer: Syncer, before: tuple[bytes, int], count: dict[str, int], reason: str) -> None:
    """The model is bit for bit what it was, and the counter of this reason went up by one."""
    until(lambda: idle(syncer))
    assert theta(syncer) == before
    after = rejections(syncer)
    assert after.pop(reason) == count.pop(reason, 0) + 1
    assert after == count


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": 0}, "no tokens"),
        ({"steps": 0}, "no steps"),
        ({"fragment": 7}, "unknown fragment"),
        ({"fragment": 2**52}, "unknown fragment"),
        ({"base": 2**40}, "base from the future"),
    ],
)
def test_an_offer_that_breaks_a_rule_is_refused_with_the_reason(
    syncer: Syncer, forged: Forged, changes: dict[str, int], reason: str
) -> None:
    before, count = theta(syncer), rejections(syncer)
    pull = next_pull(forged)
    forged.offer(pull, **changes)
    fate = forged.hear(msg.Fate, lambda f: f.round == pull.round)
    assert (fate.fate, fate.reason) == ("rejected", reason)
    if "fragment" in changes:  # the round itself is still unanswered
        forged.offer(pull, nothing="no steps")
    refused(syncer, before, count, reason)


def test_an_offer_for_a_round_that_never_was_is_refused(syncer: Syncer, forged: Forged) -> None:
    before, count = theta(syncer), rejections(syncer)
    pull = next_pull(forged)
    forged.offer(pull, round=pull.round + 1000)
    fate = forged.hear(msg.Fate)
    assert (fate.fate, fate.reason) == ("rejected", "unknown round")
    forged.offer(pull, nothing="no steps")
    refused(syncer, before, count, "unknown round")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_push_that_is_not_finite_is_refused(syncer: Syncer, forged: Forged, value: float) -> None:
    before, count = theta(syncer), rejections(syncer)
    bad = GOOD.clone()
    bad[SIZE // 2] = value
    fate = forged.push(next_pull(forged), bad)
    assert (fate.fate, fate.reason) == ("rejected", "not finite")
    refused(syncer, before, count, "not finite")


def wrong_chunks() -> dict[str, tuple[str, int, list[bytes], int | None]]:
    """Case: reason, index, payload frames, checksum (None: the right one)."""
    data = GOOD.numpy().tobytes()
    return {
        "too short": ("wrong size", 0, [data[:-4]], None),
        "too long": ("wrong size", 0, [data + b"abcd"], None),
        "empty": ("wrong size", 0, [b""], None),
        "no payload": ("truncated", 0, [], 0),
        "two payloads": ("truncated", 0, [data, data], None),
        "bad checksum": ("corrupt", 0, [data], 1),
        "one flipped bit": ("corrupt", 0, [bytes([data[0] ^ 1]) + data[1:]], zlib.crc32(data)),
        "a chunk that does not exist": ("out of range", 1, [data], None),
        "pickled": ("wrong size", 0, [pickle.dumps(GOOD.tolist())], None),
    }


@pytest.mark.parametrize("case", wrong_chunks())
def test_a_chunk_with_wrong_bytes_ends_its_push(syncer: Syncer, forged: Forged, case: str) -> None:
    reason, index, frames, crc = wrong_chunks()[case]
    before, count = theta(syncer), rejections(syncer)
    pull = next_pull(forged)
    forged.offer(pull)
    forged.wanted("push", 0, pull.round, 0)
    checksum = zlib.crc32(frames[0]) if crc is None else crc
    header = msg.Chunk(kind="push", fragment=0, key=pull.round, index=index, crc=checksum)
    forged.say_bulk(encode(header), *frames)
    fate = forged.fate(pull)
    assert (fate.fate, fate.reason) == ("rejected", reason)
    refused(syncer, before, count, reason)


def test_a_chunk_larger_than_any_chunk_costs_the_connection_and_nothing_else(
    syncer: Syncer, forged: Forged
) -> None:
    before, fates = theta(syncer), syncer.status()["fates"]
    pull = next_pull(forged)
    forged.offer(pull)
    forged.wanted("push", 0, pull.round, 0)
    header = msg.Chunk(kind="push", fragment=0, key=pull.round, index=0, crc=0)
    forged.say_bulk(encode(header), bytes(2 * 1024 * 1024))
    bulk = forged.bulk
    assert bulk is not None
    until(lambda: "disconnected" in bulk.events())
    forged.say(msg.Goodbye(epoch=forged.epoch))
    until(lambda: syncer.status()["fates"]["abandoned"] == fates["abandoned"] + 1)
    until(lambda: idle(syncer))
    assert theta(syncer) == before


def test_a_push_is_merged_once_however_often_it_is_sent(syncer: Syncer, forged: Forged) -> None:
    pull = next_pull(forged)
    assert forged.push(pull, GOOD).fate == "merged"
    after, count = theta(syncer), rejections(syncer)
    forged.offer(pull)
    fate = forged.fate(pull)
    assert (fate.fate, fate.reason) == ("rejected", "replayed")
    header = msg.Chunk(
        kind="push", fragment=0, key=pull.round, index=0, crc=zlib.crc32(GOOD.numpy().tobytes())
    )
    forged.say_bulk(encode(header), GOOD.numpy().tobytes())
    refused(syncer, after, count, "replayed")


def test_progress_from_one_base_is_merged_once(syncer: Syncer, forged: Forged) -> None:
    assert forged.push(next_pull(forged), GOOD).fate == "merged"
    after, count = theta(syncer), rejections(syncer)
    forged.offer(next_pull(forged))  # it has not fetched what was announced
    fate = forged.hear(msg.Fate)
    assert (fate.fate, fate.reason) == ("rejected", "consumed base")
    refused(syncer, after, count, "consumed base")
    forged.fetch(0)
    assert forged.push(next_pull(forged), GOOD).fate == "merged"


def test_a_seed_that_nobody_asked_for_is_ignored(syncer: Syncer, forged: Forged) -> None:
    before = theta(syncer)
    data = GOOD.numpy().tobytes()
    header = msg.Chunk(kind="seed", fragment=0, key=0, index=0, crc=zlib.crc32(data))
    forged.say_bulk(encode(header), data)
    forged.offer(next_pull(forged), nothing="no steps")
    until(lambda: idle(syncer))
    assert theta(syncer) == before


GARBAGE = {
    "random": b"\x93\x01\x02" + os.urandom(50),
    "a pickle": pickle.dumps({"a": GOOD.tolist()[:10]}),
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "nothing": b"",
    "deep": b"\x91" * 2000,
}


@pytest.mark.parametrize("case", GARBAGE)
def test_garbage_in_messages_is_counted_on_both_ports(
    syncer: Syncer, forged: Forged, case: str
) -> None:
    before, count = theta(syncer), sum(strange(syncer).values())
    forged.say_bytes(GARBAGE[case])
    forged.say_bulk(GARBAGE[case])
    forged.say_bulk(GARBAGE[case], GOOD.numpy().tobytes())
    until(lambda: sum(strange(syncer).values()) == count + 3)
    assert theta(syncer) == before


def test_bytes_that_are_no_zeromq_get_nowhere_on_either_port(syncer: Syncer) -> None:
    before = theta(syncer)
    ports = [int(syncer.address.rpartition(":")[2]), syncer.status()["bulk_port"]]
    for port in ports:
        for data in (*GARBAGE.values(), b"\xff" * 64 * 1024):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(data)
    with Forged(syncer.address, "honest", SPECS) as honest:
        honest.join()
        honest.take()
        assert theta(syncer) == before
        assert honest.push(next_pull(honest), GOOD).fate == "merged"
    until(lambda: not syncer.status()["learners"])


def test_the_bulk_port_serves_nobody_without_a_token(syncer: Syncer, forged: Forged) -> None:
    before, count = theta(syncer), strange(syncer).get("stranger", 0)
    assert forged.welcome is not None
    pull = next_pull(forged)
    forged.offer(pull)
    forged.wanted("push", 0, pull.round, 0)
    own, forged.bulk = (
        forged.bulk,
        Line(forged._context, f"tcp://127.0.0.1:{forged.welcome.bulk_port}", "bulk"),
    )
    data = GOOD.numpy().tobytes()
    header = msg.Chunk(kind="push", fragment=0, key=pull.round, index=0, crc=zlib.crc32(data))
    forged.say_bulk(encode(header), data)
    forged.say_bulk(encode(msg.BulkHello(token=bytes(16))))
    forged.say_bulk(encode(msg.Want(kind="fetch", fragment=0, key=0, first=0, count=1)))
    until(lambda: strange(syncer).get("stranger", 0) == count + 3)
    assert forged.bulk.receive() == []
    forged.bulk.close()
    forged.bulk = own
    forged.say(msg.Goodbye(epoch=forged.epoch))
    until(lambda: idle(syncer))
    assert theta(syncer) == before


def test_a_learner_cannot_push_in_the_name_of_another(syncer: Syncer, forged: Forged) -> None:
    """Its chunks belong to its own connection, whatever their header says."""
    before = theta(syncer)
    pull = next_pull(forged)
    forged.offer(pull)
    forged.wanted("push", 0, pull.round, 0)
    with Forged(syncer.address, "intruder", SPECS) as intruder:
        intruder.join()
        intruder.take()
        data = torch.full((SIZE,), 1e6).numpy().tobytes()
        header = msg.Chunk(kind="push", fragment=0, key=pull.round, index=0, crc=zlib.crc32(data))
        intruder.say_bulk(encode(header), data)
        intruder.offer(pull)  # it was not asked in that round
        fate = intruder.fate(pull)
        assert (fate.fate, fate.reason) == ("rejected", "not asked")
    forged.serve("push", 0, pull.round, GOOD, 0)
    assert forged.fate(pull).fate == "merged"
    moved = torch.frombuffer(bytearray(theta(syncer)[0]), dtype=torch.float32)
    start = torch.frombuffer(bytearray(before[0]), dtype=torch.float32)
    assert float((moved - start).abs().max()) < 0.1


def attack(forger: Forged, bad: Tensor, version: int) -> None:
    """One of everything that a round allows; waits for each answer."""
    pull = forger.pulled()
    forger.offer(pull, round=pull.round + 10_000)
    assert forger.hear(msg.Fate, lambda f: f.reason == "unknown round")
    forger.say_bytes(GARBAGE["random"])
    forger.say_bulk(GARBAGE["a pickle"])
    forger.offer(pull, base=version)
    forger.serve("push", pull.fragment, pull.round, bad, 0)
    fate = forger.fate(pull)
    assert (fate.fate, fate.reason) == ("rejected", "not finite")


def test_other_learners_do_not_notice_an_attacker() -> None:
    with (
        running_syncer(sync_every=4, fragments=1, overlap=0, quorum=2) as syncer,
        Trainee(small_model(0), syncer.address, "honest") as honest,
    ):
        honest.wait(lambda: honest.merged > 0)
        assert honest.learner is not None
        specs = honest.learner._census.specs
        with Forged(syncer.address, "attacker", specs) as forger:
            forger.join()
            forger.take()
            forger.progress(1_000_000)  # the honest one, second, is the clock
            bad = torch.full((forger.layout.fragments[0].elements,), float("nan"))
            for _ in range(2):  # two broken messages each: the fifth would end it
                attack(forger, bad, syncer.status()["fragments"][0]["version"])
        rejected = rejections(syncer)
        assert rejected == {"unknown round": 2, "not finite": 2}
        at = honest.merged
        honest.wait(lambda: honest.merged > at + 5)
        assert all(bool(parameter.isfinite().all()) for parameter in honest.model.parameters())


@pytest.mark.parametrize("bulk", [False, True])
def test_who_breaks_the_protocol_again_and_again_is_put_into_quarantine(bulk: bool) -> None:
    with (
        running_syncer(sync_every=4, fragments=1, overlap=0) as syncer,
        Trainee(small_model(0), syncer.address, "honest") as honest,
    ):
        honest.wait(lambda: honest.merged > 0)
        assert honest.learner is not None
        specs = honest.learner._census.specs
        with Forged(syncer.address, "attacker", specs) as forger:
            forger.join()
            forger.take()
            for _ in range(STRIKES_MAX):
                (forger.say_bulk if bulk else forger.say_bytes)(GARBAGE["random"])
            assert "broke the protocol" in forger.hear(msg.Fence).reason
            assert [m["name"] for m in syncer.status()["learners"]] == ["honest"]
            assert syncer.status()["quarantined"] == 1
            forger.hello()
            assert forger.hear(msg.Refuse).code == "quarantine"
        at = honest.merged
        honest.wait(lambda: honest.merged > at + 5)


def test_a_flood_of_messages_is_cut_off_and_nobody_else_notices() -> None:
    with (
        running_syncer(sync_every=4, fragments=1, overlap=0) as syncer,
        Trainee(small_model(0), syncer.address, "honest") as honest,
    ):
        honest.wait(lambda: honest.merged > 0)
        assert honest.learner is not None
        with Forged(syncer.address, "attacker", honest.learner._census.specs) as forger:
            forger.join()
            beat = encode(msg.Heartbeat(epoch=forger.epoch))

            def flooded() -> bool:
                for _ in range(2_000):
                    forger.say_bytes(beat)
                return syncer.status()["strange_messages"].get("flood", 0) > 0

            honest.wait(flooded, 60)
            honest.wait(lambda: syncer.status()["quarantined"] == 1, 60)
        at = honest.merged
        honest.wait(lambda: honest.merged > at + 5)
