"""Attacks by pushes and other transfers: wrong ones, too many of them, half of them."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from diloco_plugin.core.conduct import STRIKES_MAX
from diloco_plugin.wire import messages as msg
from diloco_plugin.wire.chunks import CHUNK_ELEMENTS, checksum
from diloco_plugin.wire.framing import decode_bulk, decode_to_learner, encode
from tests.attacks.stage import ELEMENTS, MIB, Stage, again_and_again
from tests.end_to_end.forged import Forged
from tests.soak import SOAK
from tests.waiting import until

EVER = 2**53


def gift(value: float = 1e-6) -> Tensor:
    """A pseudo-gradient that is small and legal."""
    return torch.full((ELEMENTS,), value)


def listen(forged: Forged) -> None:
    """Hear what there is."""
    forged._heard += [decode_to_learner(f[0].buffer) for f in forged.control.receive()]
    assert forged.bulk is not None
    for frames in forged.bulk.receive():
        forged._bulk_heard.append((decode_bulk(frames[0].buffer), b""))


def newest_pull(forged: Forged) -> msg.Pull:
    """The pull that is most likely still open."""
    pull = forged.hear(msg.Pull)
    for other in [m for m in forged._heard if isinstance(m, msg.Pull)]:
        pull = other
    forged._heard = [m for m in forged._heard if not isinstance(m, (msg.Pull, msg.Announce))]
    return pull


def fate_or_want(forged: Forged, pull: msg.Pull) -> msg.Fate | None:
    """Its fate, or None as soon as its bytes are wanted."""

    def look() -> tuple[msg.Fate | None] | None:
        listen(forged)
        for fate in forged._heard:
            if isinstance(fate, msg.Fate) and fate.round == pull.round:
                return (fate,)
        wants = [w for w, _ in forged._bulk_heard if isinstance(w, msg.Want)]
        return (None,) if any(want.key == pull.round for want in wants) else None

    return until(look, 10, "a fate, or a want")[0]


def push(forged: Forged, values: Tensor, **changes: int) -> msg.Fate:
    """Answer the newest pull from its current version, fetched or not."""
    pull = newest_pull(forged)
    forged.offer(pull, **({"base": pull.version} | changes))
    fate = fate_or_want(forged, pull)
    if fate is not None:
        return fate
    for index, start in enumerate(range(0, ELEMENTS, CHUNK_ELEMENTS)):
        data = values[start : start + CHUNK_ELEMENTS].numpy().tobytes()
        header = msg.Chunk(
            kind="push", fragment=pull.fragment, key=pull.round, index=index, crc=checksum(data)
        )
        forged.say_bulk(encode(header), data)
    return forged.fate(pull)


def push_until(forged: Forged, wanted: set[str], values: Tensor, **changes: int) -> None:
    """Push until one is refused for one of these reasons; many rounds are over too soon."""
    deadline = time.monotonic() + 30
    while True:
        fate = push(forged, values, **changes)
        if fate.fate == "rejected" and fate.reason in wanted:
            return
        assert fate.fate != "merged", "it was merged"
        assert time.monotonic() < deadline, f"never {wanted}, at last {fate}"


# ---- what a push says ----


def pushes_that_are_not_finite(stage: Stage) -> Iterator[None]:
    with stage.member() as forged:
        for value in (float("nan"), float("inf"), -float("inf")):
            bad = gift()
            bad[ELEMENTS // 2] = value
            push_until(forged, {"not finite"}, bad)
        yield


def pushes_of_a_huge_norm(stage: Stage) -> Iterator[None]:
    with stage.member() as forged:
        for value in (1e6, 1e30, -1e6):
            push_until(forged, {"norm"}, gift(value))
        yield


def huge_norms_in_rounds_to_which_nobody_else_has_anything_to_give(stage: Stage) -> Iterator[None]:
    """Closing rounds in a row: three of them without a good push must not teach another norm."""
    with stage.member() as forged:
        fragments = (0, 1)

        def storm() -> None:
            forged.say(msg.CloseRequest(epoch=forged.epoch, fragments=fragments))
            fate = push(forged, gift(1e6))
            assert fate.fate != "merged", "a huge norm is the usual one now"

        with again_and_again(storm):
            stage.go_on(4)
            yield


def pushes_without_steps_or_tokens_or_base(stage: Stage) -> Iterator[None]:
    with stage.member() as forged:
        push_until(forged, {"no steps"}, gift(), steps=0)
        push_until(forged, {"no tokens"}, gift(), tokens=0)
        push_until(forged, {"base from the future"}, gift(), base=EVER)
        push_until(forged, {"unknown fragment"}, gift(), fragment=2)
        yield


def a_push_of_nothing_but_zeros(stage: Stage) -> Iterator[None]:
    """Breaks no rule."""
    with stage.member() as forged:
        for _ in range(4):
            stage.legal += push(forged, gift(0.0)).fate == "merged"
        yield


def a_push_of_more_tokens_than_there_are(stage: Stage) -> Iterator[None]:
    """Breaks no rule: an admitted learner that lies about its work has all the weight, and not
    more than the usual norm."""
    with stage.member() as forged:
        for _ in range(4):
            stage.legal += push(forged, gift(), tokens=EVER).fate == "merged"
        yield


def who_says_that_it_has_taken_the_model_and_has_not(stage: Stage) -> Iterator[None]:
    """Gains nothing: what it says of its base it could say after a fetch as well."""
    with stage.client() as forged:
        forged.join()
        forged.say(msg.Taken(epoch=forged.epoch))
        stage.legal += push(forged, gift()).fate == "merged"
        push_until(forged, {"norm"}, gift(1e6))
        yield


def pushes_before_the_model_is_taken(stage: Stage) -> Iterator[None]:
    with stage.client() as forged:
        forged.join()
        for round_ in range(20):
            forged.say(msg.Offer(epoch=forged.epoch, round=round_, fragment=0, steps=1, tokens=1))
            assert forged.hear(msg.Fate).reason == "unsynced"
        yield


# ---- what a push is made of ----


def spoiled(index: int, data: bytes, crc: int | None = None) -> tuple[int, bytes, int]:
    return index, data, checksum(data) if crc is None else crc


def chunks_that_are_not_what_was_wanted(stage: Stage) -> Iterator[None]:
    full = gift()[:CHUNK_ELEMENTS].numpy().tobytes()
    flipped = bytes([full[0] ^ 1]) + full[1:]
    cases = {
        "wrong size": [spoiled(0, full[:-4]), spoiled(1, full), spoiled(0, b"")],
        "corrupt": [
            spoiled(0, full, 1),
            spoiled(0, flipped, checksum(full)),
        ],
        "out of range": [spoiled(2, full), spoiled(EVER, full)],
    }
    for reason, chunks in cases.items():
        for index, data, crc in chunks:
            with stage.member() as forged:
                refused_for(forged, reason, index, data, crc)
    yield


def refused_for(forged: Forged, reason: str, index: int, data: bytes, crc: int) -> None:
    """Send this chunk until one of them comes in time to be looked at."""
    deadline = time.monotonic() + 20
    while True:
        pull = newest_pull(forged)
        forged.offer(pull, base=pull.version)
        if fate_or_want(forged, pull) is not None:
            continue
        header = msg.Chunk(
            kind="push", fragment=pull.fragment, key=pull.round, index=index, crc=crc
        )
        forged.say_bulk(encode(header), data)
        fate = forged.fate(pull)
        if fate.reason == reason:
            return
        assert fate.fate == "late"
        assert time.monotonic() < deadline, reason


def a_chunk_that_comes_twice(stage: Stage) -> Iterator[None]:
    data = gift()[:CHUNK_ELEMENTS].numpy().tobytes()
    with stage.member() as forged:
        pull = newest_pull(forged)
        forged.offer(pull, base=pull.version)
        if fate_or_want(forged, pull) is None:
            header = msg.Chunk(
                kind="push", fragment=pull.fragment, key=pull.round, index=0, crc=checksum(data)
            )
            for _ in range(20):
                forged.say_bulk(encode(header), data)
        yield


def chunks_that_nobody_asked_for(stage: Stage) -> Iterator[None]:
    data = bytes(MIB)
    with stage.member() as forged:
        for kind in ("push", "seed", "fetch", "state"):
            for index in range(40 * SOAK):
                header = msg.Chunk(
                    kind=kind, fragment=0, key=index, index=index, crc=checksum(data)
                )
                forged.say_bulk(encode(header), data)
        yield


def pushes_that_begin_and_never_end(stage: Stage) -> Iterator[None]:
    """Three members open a push in every round, closing ones too, and send half of it."""
    data = gift()[:CHUNK_ELEMENTS].numpy().tobytes()
    with contextlib.ExitStack() as opened:
        members = [opened.enter_context(stage.member()) for _ in range(3)]

        def begin() -> None:
            for forged in members:
                listen(forged)
                pulls = [m for m in forged._heard if isinstance(m, msg.Pull)]
                forged._heard.clear()
                forged.say(msg.CloseRequest(epoch=forged.epoch, fragments=(0, 1)))
                for pull in pulls:
                    forged.offer(pull, base=pull.version)
                    header = msg.Chunk(
                        kind="push", fragment=pull.fragment, key=pull.round, index=0,
                        crc=checksum(data),
                    )  # fmt: skip
                    forged.say_bulk(encode(header), data)
            time.sleep(0.005)  # a busy attacker only slows this very process

        with again_and_again(begin):
            yield


# ---- what is fetched ----


def wants_of_what_there_is_not(stage: Stage) -> Iterator[None]:
    wrong = [
        ("fetch", 0, EVER, 0, 1),
        ("fetch", 0, 0, 0, 64),
        ("fetch", 5, 0, 0, 1),
        ("push", 0, 0, 0, 1),
        ("nonsense", 0, 0, 0, 1),
        ("state", 0, 1, 0, 64),
    ]
    with stage.member() as forged:
        for kind, fragment, key, first, count in wrong:
            want = msg.Want(kind=kind, fragment=fragment, key=key, first=first, count=count)
            forged.say_bulk(encode(want))
        yield


def want_current(stage: Stage, forged: Forged, times: int) -> None:
    """Want the newest version of both fragments again and again."""
    for fragment in stage.status()["fragments"]:
        want = msg.Want(
            kind="fetch", fragment=fragment["index"], key=fragment["version"], first=0, count=2
        )
        for _ in range(times):
            forged.say_bulk(encode(want))


def a_storm_of_wants_by_one_that_never_reads(stage: Stage) -> Iterator[None]:
    with stage.client() as forged:
        forged.join()
        for _ in range(10 * SOAK):
            want_current(stage, forged, 50)
        yield


def a_storm_of_wants_by_one_that_reads(stage: Stage) -> Iterator[None]:
    with stage.member() as forged:

        def storm() -> None:
            want_current(stage, forged, 20)
            forged.bulk.receive()  # type: ignore[union-attr]

        with again_and_again(storm):
            yield


def guesses_of_tokens(stage: Stage) -> Iterator[None]:
    with stage.socket("bulk") as bulk:
        for _ in range(3000 * SOAK):
            bulk.send(encode(msg.BulkHello(token=secrets.token_bytes(16))))
        yield


def garbage_on_the_bulk_port(stage: Stage) -> Iterator[None]:
    with stage.member() as forged:
        for _ in range(STRIKES_MAX):
            forged.say_bulk(secrets.token_bytes(3000), bytes(MIB))
        forged.hear(msg.Fence)
        yield


ATTACKS = [
    pushes_that_are_not_finite,
    pushes_of_a_huge_norm,
    huge_norms_in_rounds_to_which_nobody_else_has_anything_to_give,
    pushes_without_steps_or_tokens_or_base,
    a_push_of_nothing_but_zeros,
    a_push_of_more_tokens_than_there_are,
    who_says_that_it_has_taken_the_model_and_has_not,
    pushes_before_the_model_is_taken,
    chunks_that_are_not_what_was_wanted,
    a_chunk_that_comes_twice,
    chunks_that_nobody_asked_for,
    pushes_that_begin_and_never_end,
    wants_of_what_there_is_not,
    a_storm_of_wants_by_one_that_never_reads,
    a_storm_of_wants_by_one_that_reads,
    guesses_of_tokens,
    garbage_on_the_bulk_port,
]
