"""`diloco repair --from-learners`: announced versions come back to the bit, or not at all."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco_plugin.errors import AddressInUseError, DiLoCoError
from diloco_plugin.net.keys import LineKeys
from diloco_plugin.net.sockets import Line
from diloco_plugin.status import fetch
from diloco_plugin.store import RunFile
from diloco_plugin.store.formats import RUN_FILE, fragment_path, read_sealed, versions
from diloco_plugin.store.repair import examine
from diloco_plugin.syncer.repairing import Options, repair
from diloco_plugin.syncer.resuming import specs_of
from diloco_plugin.tensors.layout import build_layout
from diloco_plugin.wire import messages as msg
from diloco_plugin.wire.chunks import checksum
from diloco_plugin.wire.framing import encode
from tests.end_to_end.fleet import Trainee, small_model
from tests.end_to_end.forged import Forged
from tests.end_to_end.processes import Daemon, Process, free_ports
from tests.keyring import Keyring
from tests.repair.states import (
    FLAGS,
    RUN,
    SLOW,
    base_of,
    bases,
    finished_run,
    newest,
    rot,
    theta,
)
from tests.store.states import content
from tests.syncers import running_syncer
from tests.waiting import until


class Repair:
    """A repair in a thread: what it says, and its exit code once it has ended."""

    def __init__(self, state: Path, **options: Any) -> None:
        values = {"bind": f"tcp://127.0.0.1:{free_ports()}", "wait": "20s"} | options
        self.options = Options(state=str(state), from_learners=True, **values)
        self.said: list[str] = []
        self.code: int | None = None
        self.error: DiLoCoError | None = None
        self.address = self.options.bind
        self._thread = threading.Thread(target=self._run, name="repair", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.code = repair(self.options, self.said.append)
        except DiLoCoError as error:
            self.error, self.code = error, error.exit_code

    def says(self, text: str) -> None:
        until(lambda: any(text in line for line in self.said), 20, f"{text!r} in {self.said}")

    def wait(self, seconds: float = 40) -> int:
        self._thread.join(seconds)
        assert self.code is not None, f"it does not end: {self.said}"
        return self.code


class Claimer(Forged):
    """Says that it holds versions, true or not, and gives whatever it is told to give."""

    def __init__(self, repair: Repair, state: Path, name: str, keys: LineKeys | None = None):
        run = read_sealed(state / RUN_FILE, RunFile)
        super().__init__(repair.address, name, specs_of(run), keys=keys)
        self.sizes = [f.elements for f in build_layout(self.specs, run.fragments).fragments]

    def claim(self, versions: list[int]) -> msg.Salvage:
        """Call, and be asked."""
        self.hello(epoch=7, versions=tuple(versions))
        assert self.hear(msg.Refuse).code == "repair"
        return self.hear(msg.Salvage)

    def come(self, salvage: msg.Salvage) -> None:
        """Open the bulk connection."""
        bulk = self._address.with_port(salvage.bulk_port)
        self.bulk = Line(self._context, bulk, "bulk", self._keys)
        self._poll.add(self.bulk)
        self.say_bulk(encode(msg.BulkHello(token=salvage.token)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in order; not to be changed."""
    state = tmp_path_factory.mktemp("run") / "state"
    finished_run(state)
    return state


@pytest.fixture
def state(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "state"))


@contextmanager
def lost(state: Path, fragment: int, **options: Any) -> Iterator[tuple[Repair, Tensor, list[int]]]:
    """A repair that looks for the newest version of a fragment; the value that is lost; versions
    that a learner with the newest of everything holds.
    """
    value = theta(newest(state, fragment)).clone()
    held = [versions(state, f)[-1] for f in range(2)]
    rot(newest(state, fragment))
    repairing = Repair(state, **options)
    repairing.says("Learners are waited for at")
    yield repairing, value, held
    assert repairing.code is not None, "the test has not waited for its end"


def test_the_story_from_the_rot_to_the_next_merge(tmp_path: Path) -> None:
    """The daemon is killed, a file rots, it refuses to start, learners bring the value back while
    they train on, it starts again with what they had, and merges go on.
    """
    state = tmp_path / "state"
    bind = f"tcp://127.0.0.1:{free_ports()}"
    flags = ["--state", str(state), *FLAGS]
    with Daemon(*flags, bind=bind) as daemon:
        trainees = [Trainee(small_model(), bind, name, data=i) for i, name in enumerate("ab")]
        _settle(bind, trainees)
        daemon.kill()
    fragment = _held_by(trainees[0], state)
    value = theta(newest(state, fragment)).clone()
    version = versions(state, fragment)[-1]
    assert torch.equal(base_of(trainees[0], fragment), value)
    rotten = rot(newest(state, fragment))

    command = ["-m", "diloco_plugin.cli"]
    with Process(*command, "syncer", *flags, "--bind", bind) as refused:
        assert refused.wait() == 4
        assert f"diloco repair --state {state}" in refused.err
    steps = [trainee.steps for trainee in trainees]
    ways = ["--from-learners", "--bind", bind, "--wait", "40s"]
    with Process(*command, "repair", "--state", str(state), *ways) as repairing:
        assert repairing.wait(60) == 0, repairing.err
        assert f"holds version {version} to the bit." in repairing.out
        assert "was taken from a learner" in repairing.out
    for trainee, before in zip(trainees, steps, strict=True):
        trainee.wait(lambda t=trainee, n=before: t.steps > n)
        trainee._step_seconds = 0.001
    (evidence,) = state.glob(f"evidence/*/frag-{fragment:04}-*")
    assert evidence.read_bytes() == rotten
    assert examine(state).problems == []
    assert torch.equal(theta(newest(state, fragment)), value)

    with Daemon(*flags, bind=bind), trainees[0], trainees[1]:
        trainees[0].wait(lambda: _names(bind) == ["a", "b"], 40)
        assert fetch(bind)["fragments"][fragment]["version"] >= version
        more = fetch(bind)["rounds"]["merged"] + 4
        trainees[0].wait(lambda: fetch(bind)["rounds"]["merged"] >= more, 40)


@pytest.mark.parametrize(("codec", "keys"), [("fp32", False), ("bf16", True)])
def test_what_learners_hold_comes_back_whatever_the_codec(
    tmp_path: Path, codec: str, keys: bool
) -> None:
    """What a learner holds is the value after its way over the wire; that is what is wanted."""
    state = tmp_path / "state"
    ring = Keyring(tmp_path / "keys") if keys else None
    mine = {"keys": str(ring.learner("a"))} if ring else {}
    theirs = {"keys": str(ring.syncer)} if ring else {}
    visitor = ring.line("a") if ring else None
    bind = f"tcp://127.0.0.1:{free_ports()}"
    config = {"state": str(state), **theirs}
    with running_syncer(**RUN, bind=bind, codec=codec, config=config):
        trainee = Trainee(small_model(), bind, "a", **mine)
        _settle(bind, [trainee], visitor)
    fragment = _held_by(trainee, state)
    value = base_of(trainee, fragment)
    rot(newest(state, fragment))
    if ring:
        forgetful = Repair(state, bind=bind)
        assert forgetful.wait() == 78
        assert f"Add --keys {ring.syncer}." in str(forgetful.error)
    repairing = Repair(state, bind=bind, **theirs)
    assert repairing.wait() == 0, repairing.error
    assert torch.equal(theta(newest(state, fragment)), value)
    trainee._step_seconds = 0.001
    with running_syncer(**RUN, bind=bind, codec=codec, config=config) as syncer, trainee:
        merges = syncer.status()["rounds"]["merged"]
        trainee.wait(lambda: syncer.status()["rounds"]["merged"] >= merges + 4, 40)


def _settle(address: str, trainees: list[Trainee], keys: LineKeys | None = None) -> None:
    """Some merges, then slow steps, until every learner holds the newest of all."""
    for trainee in trainees:
        trainee.wait(lambda t=trainee: t.merged >= 4, 40)
        trainee._step_seconds = SLOW

    def settled() -> bool:
        body = fetch(address, keys=keys)
        now = [fragment["version"] for fragment in body["fragments"]]
        idle = not body["rounds"]["in_flight"] and not body["rounds"]["queued"]
        return idle and all(bases(trainee) == now for trainee in trainees)

    until(settled, 40, "all hold the newest")


def _held_by(trainee: Trainee, state: Path) -> int:
    """A fragment whose newest version on disk is this learner's base: one round at most was open
    when the syncer ended, so there is one.
    """
    on_disk = [versions(state, fragment)[-1] for fragment in range(2)]
    return next(f for f in range(2) if bases(trainee)[f] == on_disk[f])


def _names(address: str) -> list[str]:
    return sorted(entry["name"] for entry in fetch(address)["learners"])


def test_a_liar_is_refused_and_the_next_learner_asked(state: Path) -> None:
    with lost(state, 0) as (repairing, value, held), Claimer(repairing, state, "liar") as liar:
        salvage = liar.claim(held)
        assert (salvage.epoch, salvage.fragments) == (7, ((0, held[0]),))
        liar.come(salvage)
        liar.serve("base", 0, held[0], value + 1e-3, 0)
        repairing.says("'liar' cannot give version")
        assert "other values than were announced" in repairing.said[-1]
        # and it is not asked again for the same
        liar.hello(epoch=7, versions=tuple(held))
        assert liar.hear(msg.Refuse).code == "repair"
        with Claimer(repairing, state, "honest") as honest:
            honest.come(honest.claim(held))
            honest.serve("base", 0, held[0], value, 0)
            assert repairing.wait() == 0
    assert not any(isinstance(message, msg.Salvage) for message in liar._heard)
    assert torch.equal(theta(newest(state, 0)), value)
    assert examine(state).problems == []


def test_only_learners_that_hold_what_is_lost_are_asked(state: Path) -> None:
    with lost(state, 0) as (repairing, value, held):
        older = [held[0] - 1, held[1]]
        for versions_told in ((), tuple(older), tuple(held[:1])):
            with Claimer(repairing, state, "a") as claimer:
                claimer.hello(epoch=7, versions=versions_told)
                claimer.hear(msg.Refuse)
                claimer.hello(epoch=7, versions=tuple(held))
                claimer.hear(msg.Salvage)  # in order: nothing came for the first Hello
                assert not claimer._heard or isinstance(claimer._heard[0], msg.Refuse)
        with Claimer(repairing, state, "b") as claimer:
            claimer.come(claimer.claim(held))
            claimer.serve("base", 0, held[0], value, 0)
            assert repairing.wait() == 0


def test_learners_of_another_run_or_model_hear_what_the_syncer_would_say(state: Path) -> None:
    with lost(state, 0, wait="3s") as (repairing, _, held):
        with Claimer(repairing, state, "a") as other:
            other.hello(run="else", versions=tuple(held))
            assert other.hear(msg.Refuse).code == "run"
            other.hello(protocol=99, versions=tuple(held))
            assert other.hear(msg.Refuse).code == "protocol"
            other.specs = other.specs[:1]
            other.hello(versions=tuple(held))
            refusal = other.hear(msg.Refuse)
            assert refusal.code == "layout"
            assert "not the one that run 'main' trains" in refusal.text
        with pytest.raises(DiLoCoError, match="is being repaired"):
            fetch(repairing.address)
        assert repairing.wait() == 4


def test_when_nobody_has_it_nothing_is_changed(state: Path) -> None:
    with lost(state, 0, wait="0.2s") as (repairing, _, held):
        before = content(state)
        assert repairing.wait() == 4
        assert f"announced and lost: version {held[0]} of fragment 0" in str(repairing.error)
        assert "No learner gave it back within 0.2s" in str(repairing.error)
        assert content(state) == before


def test_what_nobody_has_can_be_given_up_after_the_wait(state: Path) -> None:
    with lost(state, 0, wait="0.2s", accept_loss=True) as (repairing, _, held):
        assert repairing.wait() == 0
        assert any(f"version {held[0]} is lost" in line for line in repairing.said)
    assert versions(state, 0)[-1] == held[0] - 1


def test_broken_bytes_are_refused_and_a_withdrawal_is_believed(state: Path) -> None:
    with lost(state, 0) as (repairing, value, held):
        data = value.numpy().tobytes()

        def chunk(**changes: Any) -> bytes:
            values = {"kind": "base", "fragment": 0, "key": held[0], "index": 0}
            return encode(msg.Chunk(**{**values, "crc": checksum(data), **changes}))

        for name, frames, why in (
            ("short", (chunk(crc=checksum(data[:-4])), data[:-4]), "wrong size"),
            ("noisy", (chunk(crc=1), data), "corrupt"),
            ("bare", (chunk(),), "truncated"),
            ("beyond", (chunk(index=9), data), "out of range"),
            ("gone", (encode(msg.Gone(kind="base", fragment=0, key=held[0])),), "any more"),
        ):
            with Claimer(repairing, state, name) as claimer:
                claimer.come(claimer.claim(held))
                claimer.wanted("base", 0, held[0], 0)
                claimer.say_bulk(*frames)
                repairing.says(f"learner {name!r} cannot give version {held[0]} back")
                assert why in repairing.said[-1]
        with Claimer(repairing, state, "odd") as odd:
            salvage = odd.claim(held)
            odd.come(salvage)
            odd.wanted("base", 0, held[0], 0)
            for frames in ((b"\x00garbage",), (chunk(kind="push"), data), (chunk(key=99), data)):
                odd.say_bulk(*frames)  # belongs to nothing, harms nothing
            odd.say_bulk(chunk(), data)
            assert repairing.wait() == 0
    assert torch.equal(theta(newest(state, 0)), value)


def test_only_admitted_learners_are_asked_and_only_for_themselves(
    state: Path, tmp_path: Path
) -> None:
    ring = Keyring(tmp_path / "keys")
    key_a, key_b = ring.line("a"), ring.line("b")
    with lost(state, 0, keys=str(ring.syncer)) as (repairing, value, held):
        with Claimer(repairing, state, "b", key_a) as thief:
            thief.hello(epoch=7, versions=tuple(held))
            assert thief.hear(msg.Refuse).code == "identity"
        with (
            Claimer(repairing, state, "a", key_a) as a,
            Claimer(repairing, state, "b", key_b) as b,
        ):
            salvage = a.claim(held)
            b.come(salvage)  # with another one's token
            a.come(salvage)
            a.serve("base", 0, held[0], value, 0)
            assert repairing.wait() == 0
        assert any("learner 'a' holds version" in line for line in repairing.said)


def test_learners_with_narrow_parameters_are_told_why_they_cannot_help(state: Path) -> None:
    with lost(state, 0, wait="5s") as (repairing, value, held):
        with Claimer(repairing, state, "narrow") as narrow:
            kinds = [type(s)(s.name, s.shape, "bfloat16", s.kind, s.alias_of) for s in narrow.specs]
            narrow.specs = tuple(kinds)
            narrow.come(narrow.claim(held))
            narrow.serve("base", 0, held[0], value.bfloat16().float(), 0)
            repairing.says("to the bit: it trains")
            assert "in bfloat16" in repairing.said[-1]
        assert repairing.wait() == 4


def test_the_address_must_be_free(state: Path) -> None:
    rot(newest(state, 0))
    with running_syncer(**RUN) as syncer:
        options = Options(state=str(state), from_learners=True, bind=syncer.address)
        with pytest.raises(AddressInUseError):
            repair(options, print)


def test_two_lost_fragments_come_from_whoever_has_them(state: Path) -> None:
    values = [theta(newest(state, f)).clone() for f in range(2)]
    rot(newest(state, 1))
    with (
        lost(state, 0) as (repairing, _, held),
        Claimer(repairing, state, "a") as a,
        Claimer(repairing, state, "b") as b,
    ):
        a.come(a.claim([held[0], held[1] - 1]))
        b.come(b.claim([held[0] - 1, held[1]]))
        a.serve("base", 0, held[0], values[0], 0)
        b.serve("base", 1, held[1], values[1], 0)
        assert repairing.wait() == 0
    for fragment in range(2):
        assert torch.equal(theta(newest(state, fragment)), values[fragment])


def test_a_transfer_that_was_cut_goes_on_over_the_next_connection(state: Path) -> None:
    with lost(state, 0) as (repairing, value, held), Claimer(repairing, state, "a") as a:
        salvage = a.claim(held)
        a.come(salvage)
        a.wanted("base", 0, held[0], 0)
        assert a.bulk is not None
        a.bulk.close()
        a._bulk_heard.clear()
        a.come(salvage)
        a.serve("base", 0, held[0], value, 0)
        assert repairing.wait() == 0


def test_a_learner_that_stops_halfway_does_not_hold_the_others_up(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_plugin.syncer.salvaging.PATIENCE", 0.2)
    with lost(state, 0) as (repairing, value, held):
        with Claimer(repairing, state, "slow") as slow, Claimer(repairing, state, "b") as b:
            slow.come(slow.claim(held))
            slow.wanted("base", 0, held[0], 0)
            b.come(b.claim(held))
            begun = time.monotonic()
            b.serve("base", 0, held[0], value, 0)
            assert repairing.wait() == 0
            assert time.monotonic() - begun < 10
        assert any("'slow' cannot give version" in line for line in repairing.said)


def test_a_fragment_of_which_no_file_is_left_begins_without_outer_state(state: Path) -> None:
    value = theta(newest(state, 0)).clone()
    held = [versions(state, f)[-1] for f in range(2)]
    for version in versions(state, 0):
        rot(fragment_path(state, 0, version))
    repairing = Repair(state)
    repairing.says("Learners are waited for at")
    with Claimer(repairing, state, "a") as a:
        a.come(a.claim(held))
        a.serve("base", 0, held[0], value, 0)
        assert repairing.wait() == 0
    assert any("without outer state" in line for line in repairing.said)
    with running_syncer(**RUN, config={"state": str(state)}) as syncer:
        assert [entry["version"] for entry in syncer.status()["fragments"]] == held
        assert torch.equal(syncer._merging.the_model.theta[0], value)


def test_older_versions_are_no_replacement(state: Path) -> None:
    older = theta(fragment_path(state, 0, versions(state, 0)[-2])).clone()
    with lost(state, 0, wait="2s") as (repairing, _, held):
        with Claimer(repairing, state, "a") as a:
            a.come(a.claim(held))
            a.serve("base", 0, held[0], older, 0)
            repairing.says("other values than were announced")
        assert repairing.wait() == 4
