"""What `diloco status` and `diloco check` say about a syncer."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from diloco_plugin import status
from diloco_plugin.cli import main
from diloco_plugin.config import parameters_to
from diloco_plugin.core.parameters import Parameters
from diloco_plugin.core.policy import diagnose
from diloco_plugin.errors import RefusedError, UnreachableError, WireError
from diloco_plugin.net.sockets import Door, Poll, Waker, new_context
from diloco_plugin.status import check, render, table
from diloco_plugin.testing.world import World
from diloco_plugin.wire.framing import encode
from diloco_plugin.wire.messages import PROTOCOL, HelloRequired, Status

ADDRESS = "tcp://127.0.0.1:5555"


def learner(name: str, index: int, **other: Any) -> dict[str, Any]:
    return {
        "name": name, "index": index, "state": "live", "clock": 118, "lag": 0, "step_s": 0.25,
        "rounds_asked": 40, "rounds_joined": 30, "lease_s": 14.2, "tokens": 1_250_000,
    } | other  # fmt: skip


def body(**other: Any) -> dict[str, Any]:
    versions = [14] * 24
    versions[5] = 15
    return {
        "run": "main", "epoch": 2, "protocol": PROTOCOL, "version": "0.1.0", "state": "running",
        "clock": 118, "steps": 480, "uptime_s": 3725.0, "parameters": {"learners": 4},
        "bulk_port": 0,
        "learners": [learner("eu", 0), learner("us", 1, lag=3), learner("ap", 2, state="gone")],
        "fragments": [
            {"index": i, "version": v, "elements": 5_000_000, "state": ""}
            for i, v in enumerate(versions)
        ],
        "fates": {"merged": 60, "late": 2, "stale": 1, "abandoned": 0, "rejected": {"norm": 3}},
        "refused": {"layout": 1},
        "rounds": {
            "merged": 30, "abandoned": 1, "in_flight": 2, "queued": 0, "grace_s": 0.2,
            "quorum_s": 0.1, "sync_s": 0.05, "joined_mean": 2.4,
        },
        "problems": ["us: connected, but no training step for a while."],
    } | other  # fmt: skip


@pytest.fixture
def listening() -> Iterator[Callable[[bytes], str]]:
    """Starts a socket that gives every request the same answer, and returns its address."""
    context, waker = new_context(), Waker()
    threads: list[threading.Thread] = []

    def start(answer: bytes) -> str:
        door = Door(context, "tcp://127.0.0.1:*", "control")
        poll = Poll()
        poll.add(door)
        poll.add(waker)

        def work() -> None:
            # Only the waker of this fixture ends it.
            while not ended.is_set():
                poll.wait(60.0)
                for peer, _ in door.receive():
                    door.send(peer, answer)
            door.close()

        ended = threading.Event()
        ends.append(ended)
        threads.append(threading.Thread(target=work))
        threads[-1].start()
        return str(door.address)

    ends: list[threading.Event] = []
    yield start
    for ended in ends:
        ended.set()
    waker.wake()
    for thread in threads:
        thread.join()
    waker.close()
    context.destroy(linger=0)


def test_status_and_check_ask_over_a_real_socket(
    listening: Callable[[bytes], str], capsys: pytest.CaptureFixture[str]
) -> None:
    address = listening(encode(Status(body=body())))
    assert main(["status", address]) == 0
    assert capsys.readouterr().out == render(body())
    assert main(["check", address]) == 0
    assert capsys.readouterr().out.startswith("yes: run 'main'")


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request", encode(HelloRequired(epoch=1))])
def test_an_answer_that_is_no_status_is_a_no(
    listening: Callable[[bytes], str], answer: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    address = listening(answer)
    assert main(["check", address]) == 69
    assert "not as a syncer" in capsys.readouterr().out
    assert main(["status", address]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_port_where_nobody_listens_is_unreachable() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(UnreachableError, match=f"^{address} did not answer within 0.1 s: TCP"):
            check(address, timeout_seconds=0.1)


def test_a_host_that_nobody_knows_is_called_that(capsys: pytest.CaptureFixture[str]) -> None:
    far = "tcp://no-such-host.invalid:5555"
    for address in (far, "tcp://no..host:5555"):
        with pytest.raises(UnreachableError, match="knows no host"):
            check(address, "insecure-plaintext", 0.1)
    assert main(["status", far, "--keys", "insecure-plaintext"]) == 69
    assert "knows no host 'no-such-host.invalid'" in capsys.readouterr().err


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A syncer whose next answers are this body."""
    answer = body()
    monkeypatch.setattr(status, "fetch", lambda *_, **__: answer)
    return answer


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fetch(*_: object, **__: object) -> dict[str, Any]:
        raise error

    monkeypatch.setattr(status, "fetch", fetch)


def test_a_status_shows_run_learners_fragments_fates_and_problems_in_words() -> None:
    assert render(body()).splitlines() == [
        "run 'main': running, clock 118 of 480, up 1 h 2 min"
        f" (epoch 2, diloco-plugin 0.1.0, protocol {PROTOCOL})",
        "",
        "learners: 2 of 4 live",
        "  learner  state  step  lag  s/step  joined  share  tokens  lease",
        "  eu        live   118    0    0.25   30/40   75 %  1.25 M   14 s",
        "  us        live   118    3    0.25   30/40   75 %  1.25 M   14 s",
        "  ap        gone   118    0    0.25   30/40   75 %  1.25 M   14 s",
        "",
        "fragments: 24, 120 M elements",
        "  0-4: version 14",
        "  5: version 15",
        "  6-23: version 14",
        "",
        "rounds: 30 merged, 1 abandoned, 2 in flight, 0 queued; 2.4 learners per round;"
        " quorum after 0.10 s, grace 0.20 s, sync 0.05 s",
        "pushes: 60 merged, 2 late, 1 stale, 0 abandoned, 3 rejected (norm 3)",
        "refused at the door: layout 1",
        "problems:",
        "  - us: connected, but no training step for a while.",
    ]


FOUR = [learner(name, index) for index, name in enumerate(("eu", "us", "ap", "sa"))]


def healthy(**other: Any) -> dict[str, Any]:
    """What a syncer with nothing to complain about knows before it looks for problems."""
    parameters = {"learners": 4, "quorum": 1, "overlap": 2}
    fates = {"merged": 90, "late": 0, "stale": 0, "abandoned": 0, "rejected": {}}
    rounds = body()["rounds"] | {"joined_mean": 3.6}
    usual = {"parameters": parameters, "learners": FOUR, "fates": fates, "rounds": rounds}
    return body(**usual, refused={}, turned_away=[]) | other


def rounds(**other: Any) -> dict[str, Any]:
    return healthy()["rounds"] | other


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            {"rounds": rounds(joined_mean=1.3)},
            "1.3 of 4 learners join a round: raise --quorum (now 1) or --overlap (now 2).",
        ),
        (
            {"learners": [*FOUR[:3], learner("sa", 3, state="gone")]},
            "3 of 4 expected learners are live.",
        ),
        (
            {"learners": [], "parameters": {"learners": 0, "quorum": 1, "overlap": 2}},
            "no learner is live: start one, or look at why they left.",
        ),
        (
            {"state": "empty", "learners": []},
            "no model yet: the first learner that joins brings it (or start with --init).",
        ),
        (
            {"fates": healthy()["fates"] | {"rejected": {"not finite": 7, "stale base": 1}}},
            "refused pushes (not finite): 7. Look at the loss of the learners.",
        ),
        (
            {"turned_away": [{"name": "za", "times": 1, "ago_s": 9.0, "text": "other model."}]},
            "learner 'za' was turned away (1 time, last 9 s ago): other model.",
        ),
        (
            {"learners": FOUR[:2], "parameters": {"learners": 0, "quorum": 3, "overlap": 2}},
            "2 learners live, which is less than the quorum (3): a round closes with all that are"
            " there.",
        ),
        ({"learners": FOUR[:1]}, "1 of 4 expected learners is live."),
    ],
)
def test_what_is_wrong_is_said_in_words_with_what_helps(found: dict[str, Any], said: str) -> None:
    status = healthy(**found)
    text = render(status | {"problems": diagnose(status)})
    assert text.endswith(f"problems:\n  - {said}\n")


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"rounds": rounds(joined_mean=1.3, merged=3)},  # too early to tell
        {"rounds": rounds(joined_mean=0.0, merged=0)},
    ],
)
def test_nothing_is_said_where_nothing_is_wrong(found: dict[str, Any]) -> None:
    status = healthy(**found)
    assert render(status | {"problems": diagnose(status)}).endswith("problems: none\n")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"quorum": 1, "overlap": 0}, ["1.0 of 4 learners join a round"]),
        ({"quorum": 4, "overlap": 0}, []),
        ({"quorum": 1, "overlap": 2}, []),
    ],
)
def test_learners_that_come_too_late_are_told_of_and_what_is_advised_helps(
    flags: dict[str, int], said: list[str]
) -> None:
    world = World(Parameters(fragments=2, sync_every=8, **flags), fragments=2)
    world.learner("quick", step_ms=100)
    for name in ("a", "b", "c"):
        world.learner(name, step_ms=200)
    world.run(60)
    found = world.syncer.core.status(world.now_ns)
    problems = diagnose(found | {"parameters": parameters_to(world.parameters)})
    assert [problem.partition(":")[0] for problem in problems] == said


def test_a_status_without_anything_in_it_can_still_be_shown() -> None:
    text = render({})
    assert "learners: none" in text
    assert "problems: none" in text
    assert "clock 0," in render(body(learners=[], fragments=[], steps=0, clock=0))


def test_a_name_from_elsewhere_cannot_steer_the_terminal() -> None:
    text = render(body(learners=[learner("a\x1b[2Jb\nc", 0)], problems=["\x1b]0;x\x07"], run="\r"))
    assert "\x1b" not in text
    assert "\r" not in text
    assert "a\N{REPLACEMENT CHARACTER}[2Jb\N{REPLACEMENT CHARACTER}c" in text


def test_a_table_aligns_its_columns() -> None:
    assert table(("n", "x"), [("long", 1), ("s", 1000)]) == [
        "  n        x", "  long     1", "  s     1000",
    ]  # fmt: skip


def test_json_prints_the_body_itself(
    answering: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", ADDRESS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == answering


def test_watch_prints_again_and_outlives_a_restart_of_the_syncer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: Iterator[Any] = iter(
        [body(clock=1), UnreachableError("nothing answered."), body(clock=2), KeyboardInterrupt()]
    )

    def fetch(*_: object, **__: object) -> dict[str, Any]:
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return dict(answer)

    monkeypatch.setattr(status, "fetch", fetch)
    monkeypatch.setattr(status, "WATCH_SECONDS", 0.0)
    assert main(["status", ADDRESS, "--watch"]) == 130
    out, err = capsys.readouterr()
    assert "clock 1 of" in out
    assert "clock 2 of" in out
    assert err == "diloco: nothing answered.\n"


def test_an_unreachable_syncer_is_exit_code_69(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, UnreachableError("nothing answered."))
    assert main(["status", ADDRESS]) == 69
    assert capsys.readouterr().err == "diloco: nothing answered.\n"
    assert main(["check", ADDRESS]) == 69
    out = capsys.readouterr().out
    assert out == "no: nothing answered.\n"


def test_the_address_may_come_from_the_environment(
    answering: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DILOCO_SYNCER", ADDRESS)
    assert main(["check"]) == 0
    assert ADDRESS in capsys.readouterr().out


def test_check_says_yes_with_what_was_found(answering: dict[str, Any]) -> None:
    sentence = check(ADDRESS)
    assert sentence.startswith(f"run 'main' at {ADDRESS} answers in ")
    assert f"(protocol {PROTOCOL}, 2 of 4 learners, clock 118)" in sentence
    answering["parameters"] = {"learners": 0}
    assert ", 2 learners, clock 118)" in check(ADDRESS)
    answering["learners"] = FOUR[:1]
    assert ", 1 learner, clock 118)" in check(ADDRESS)


def test_check_says_no_to_another_protocol(answering: dict[str, Any]) -> None:
    answering.update(protocol=PROTOCOL + 1, version="9.9")
    with pytest.raises(RefusedError) as caught:
        check(ADDRESS)
    assert f"speaks protocol {PROTOCOL + 1} (diloco-plugin 9.9)" in str(caught.value)
    assert "install the same version on both" in str(caught.value)


def test_check_says_no_when_a_stranger_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, WireError("garbage", "not a message"))
    with pytest.raises(UnreachableError, match=r"not as a syncer .*; check the port"):
        check(ADDRESS)


@pytest.mark.parametrize("state", ["ending", "stopping"])
def test_check_says_no_to_a_run_that_takes_nobody_any_more(
    answering: dict[str, Any], state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answering["state"] = state
    assert main(["check", ADDRESS]) == 77
    out = capsys.readouterr().out
    assert out.startswith("no: ")
    assert f"is {state} at clock 118" in out


def test_check_says_no_when_the_bulk_port_is_closed(answering: dict[str, Any]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]  # bound, but nobody listens
        answering["bulk_port"] = port
        with pytest.raises(UnreachableError, match=f"open port {port} on 127.0.0.1 as well"):
            check(ADDRESS)
        listener.listen()
        assert check(ADDRESS)
