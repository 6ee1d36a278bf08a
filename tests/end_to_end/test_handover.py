"""Who joins begins with the inner optimizer state of a healthy learner, or says why not."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import diloco_plugin
from diloco_plugin.learner import Learner
from diloco_plugin.syncer import Syncer
from diloco_plugin.wire import messages as msg
from diloco_plugin.wire.chunks import checksum
from diloco_plugin.wire.framing import encode
from tests.end_to_end.family import Family
from tests.end_to_end.fleet import batches, run_all, small_model, train_step
from tests.end_to_end.forged import Forged
from tests.syncers import running_syncer
from tests.waiting import until

State = dict[str, dict[str, Tensor]]


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return {
        name: {key: value.clone() for key, value in optimizer.state[parameter].items()}
        for name, parameter in model.named_parameters()
    }


def equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(
        one[name].keys() == other[name].keys()
        and all(torch.equal(value, other[name][key]) for key, value in one[name].items())
        for name in one
    )


class Donor:
    """A learner with AdamW in a thread of its own; remembers its state after every step."""

    def __init__(self, address: str, name: str, *, step_seconds: float = 0.002) -> None:
        self.model = small_model(0)
        self.optimizer = adamw(self.model)
        self.states: list[State] = []
        self.learner: Learner | None = None
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._arguments = address, name, step_seconds
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        until(lambda: len(self.states) > 20 or self._error, 30, "the donor trains")

    def _run(self) -> None:
        address, name, step_seconds = self._arguments
        supply = batches(1, 16)
        try:
            with diloco_plugin.attach(
                self.model, self.optimizer, address, name=name
            ) as self.learner:
                while not self._stop.is_set():
                    train_step(self.model, self.optimizer, supply[len(self.states) % 16])
                    self.states.append(state_of(self.model, self.optimizer))
                    time.sleep(step_seconds)
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Donor:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    @property
    def specs(self) -> Any:
        assert self.learner is not None
        return self.learner._census.specs


@pytest.fixture
def syncer() -> Iterator[Syncer]:
    with running_syncer(sync_every=500, fragments=2, overlap=1, lease=3) as running:
        yield running


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    """The lines about inner states that learners have logged."""
    caplog.set_level(logging.INFO, "diloco.learner")

    def lines() -> list[str]:
        texts = [record.getMessage() for record in caplog.records]
        return [text for text in texts if text.startswith("inner state: ")]

    return lines


def join(
    syncer: Syncer, make: Any = adamw, name: str = "joiner", **options: Any
) -> tuple[State, float]:
    """Join and leave at once; the inner state that it would have begun with, and its lr."""
    model = small_model(1)
    optimizer = make(model)
    learner = diloco_plugin.attach(model, optimizer, syncer.address, name=name, **options)
    state = {n: s for n, s in state_of(model, optimizer).items() if s}
    learner.abandon()
    return state, optimizer.param_groups[0]["lr"]


def test_the_joiner_has_the_donors_moments_of_one_step_to_the_bit(
    syncer: Syncer, said: Any
) -> None:
    with Donor(syncer.address, "berlin") as donor:
        state, _ = join(syncer)
        (step,) = {int(entry["step"]) for entry in state.values()}
        assert equal(state, donor.states[step - 1])
        assert said()[-1] == f"inner state: from peer 'berlin' at step {step}"
        assert said()[0] == "inner state: fresh: no other learner is training"
        assert donor.learner is not None
        assert donor.learner._session is not None
        giving = donor.learner._session.giving
        until(lambda: giving._flat is None, message="its memory is free again")


def test_the_furthest_learner_gives_and_joiners_wait_for_their_turn(
    syncer: Syncer, said: Any
) -> None:
    with (
        Donor(syncer.address, "fast", step_seconds=0.001),
        Donor(syncer.address, "slow", step_seconds=0.05),
    ):
        states = run_all([lambda i=i: join(syncer, name=f"j{i}")[0] for i in range(5)])
        assert all(len(state) == 4 for state in states)
        assert sum("from peer 'fast'" in line for line in said()) >= 1
        assert sum("from peer" in line for line in said()) == 6  # five, and slow itself


def test_a_learner_that_asks_for_none_begins_fresh(syncer: Syncer, said: Any) -> None:
    with Donor(syncer.address, "donor"):
        count = len(said())
        assert join(syncer, state="fresh")[0] == {}
        assert len(said()) == count


def test_with_another_optimizer_it_begins_fresh_and_says_why(syncer: Syncer, said: Any) -> None:
    with Donor(syncer.address, "donor"):
        make = lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)  # noqa: E731
        assert join(syncer, make)[0] == {}
    reason = "another optimizer (AdamW there, SGD here)"
    assert said()[-1] == f"inner state: fresh: {reason}"


def test_its_own_newer_state_wins(syncer: Syncer, said: Any) -> None:
    def resumed(step: int) -> Any:
        def make(model: torch.nn.Module) -> torch.optim.Optimizer:
            optimizer = adamw(model)
            train_step(model, optimizer, batches(9, 1)[0])
            for entry in optimizer.state.values():
                entry["step"].fill_(step)
                entry["exp_avg"].fill_(1.5)
            return optimizer

        return make

    with Donor(syncer.address, "donor"):
        newer, _ = join(syncer, resumed(1_000_000))
        assert all(bool((entry["exp_avg"] == 1.5).all()) for entry in newer.values())
        assert "this learner's own, of step 1000000: that of 'donor' is no newer" in said()[-1]
        older, _ = join(syncer, resumed(1))
        assert all(bool((entry["exp_avg"] != 1.5).all()) for entry in older.values())
        assert "from peer 'donor'" in said()[-1]


def test_a_lockstep_run_takes_none(said: Any) -> None:
    with running_syncer(lockstep=True, learners=1, sync_every=4, fragments=1) as syncer:
        join(syncer)
    assert said() == ["inner state: fresh: a lockstep run takes none: it is reproducible without"]


def test_a_killed_learner_that_comes_back_has_moments_again(
    syncer: Syncer, said: Any, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    attach = f"""
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
with diloco_plugin.attach(model, optimizer, {syncer.address!r}, name="phoenix"):
    steps = [int(entry["step"]) for entry in optimizer.state.values()]
    norms = [float(entry["exp_avg_sq"].norm()) for entry in optimizer.state.values()]
    print("began", min(steps, default=0), min(norms, default=0) > 0, flush=True)
    while True:
        step()
"""
    wait = f"import os\nwhile not os.path.exists({str(again)!r}):\n    time.sleep(0.01)\n"
    lives = {"first": attach, "second": wait + attach}
    with Donor(syncer.address, "donor"), Family(tmp_path, lives) as family:
        for life in lives:
            family.prints(life, "began")
            found = re.search(r"began (\d+) (True|False)", family.out(life))
            assert found is not None
            assert int(found[1]) > 20
            assert found[2] == "True"
            os.kill(family.pid(life), signal.SIGKILL)
            again.touch()


# ---- when it goes wrong ----


@contextmanager
def forged_donor(syncer: Syncer, specs: Any, name: str = "forged") -> Iterator[Forged]:
    """A hand-written learner that is further than anybody else."""
    with Forged(syncer.address, name, specs) as donor:
        donor.join()
        donor.take()
        until(lambda: any(m["name"] == name and m["state"] == "live" for m in members(syncer)))
        donor.progress(donor.clock + 400)
        until(lambda: any(m["name"] == name and m["clock"] > 300 for m in members(syncer)))
        yield donor


def members(syncer: Syncer) -> list[dict[str, Any]]:
    return list(syncer.status()["learners"])


class Joining:
    """`join` in a thread."""

    def __init__(self, syncer: Syncer, **options: Any) -> None:
        self.result: list[Any] = []
        self.thread = threading.Thread(
            target=lambda: self.result.append(join(syncer, **options)[0]), daemon=True
        )
        self.thread.start()

    def state(self, seconds: float = 30) -> State:
        self.thread.join(seconds)
        assert self.result, "it did not join"
        found: State = self.result[0]
        return found


def answer(donor: Forged, size: int, **changes: Any) -> int:
    """Offer a state of this size; returns the ticket."""
    ticket = donor.hear(msg.StateRequest).ticket
    values = {"epoch": donor.epoch, "ticket": ticket, "clock": donor.clock, "size": size}
    donor.say(msg.StateAnswer(**(values | changes)))
    return ticket


def test_a_donor_that_dies_in_the_middle_is_followed_by_the_next_one(
    syncer: Syncer, said: Any
) -> None:
    with Donor(syncer.address, "real") as real, forged_donor(syncer, real.specs) as forged:
        joining = Joining(syncer)
        answer(forged, 3_000_000)
        forged.hear_bulk(msg.Want, lambda want: want.kind == "state")
        forged.close()
        forged.welcome = None
        state = joining.state()
        (step,) = {int(entry["step"]) for entry in state.values()}
        assert equal(state, real.states[step - 1])
        assert "from peer 'real'" in said()[-1]


def test_a_line_that_is_too_slow_ends_in_a_fresh_state_and_a_joiner_that_trains(
    said: Any,
) -> None:
    """Whenever the state travels, the run moves on by more than H steps."""
    with running_syncer(sync_every=20, fragments=2, overlap=1, lease=20) as syncer:
        with Donor(syncer.address, "first", step_seconds=0.05) as first:
            specs = first.specs
            donors = forged_donor(syncer, specs)
            forged = donors.__enter__()
        joining = Joining(syncer)
        tickets = []
        for _ in range(4):
            tickets.append(answer(forged, 3_000_000))
            forged.hear_bulk(msg.Want, lambda want: want.kind == "state")
            at = forged.clock + 60
            forged.progress(at)
            over = forged.hear(msg.StateOver)
            assert over.ticket == tickets[-1]
        assert len(set(tickets)) == 4
        assert joining.state() == {}
        assert said()[-1].startswith("inner state: fresh: the line is too slow for it")
        donors.__exit__(None, None, None)


def test_a_donor_that_says_no_or_nothing_is_no_obstacle(syncer: Syncer, said: Any) -> None:
    with Donor(syncer.address, "seeder") as seeder:
        specs = seeder.specs
        donors = forged_donor(syncer, specs)
        forged = donors.__enter__()
    joining = Joining(syncer, name="j1")
    answer(forged, 0, nothing="its optimizer keeps no state")
    assert joining.state() == {}
    assert "'forged' cannot give it: its optimizer keeps no state" in said()[-1]
    joining = Joining(syncer, name="j2")
    forged.hear(msg.StateRequest)
    beats = time.monotonic()
    while joining.thread.is_alive() and time.monotonic() < beats + 10:
        forged.progress(forged.clock)
        time.sleep(0.2)
    assert joining.state() == {}
    assert "'forged' did not answer" in said()[-1]
    donors.__exit__(None, None, None)


def chunk_of(data: bytes, ticket: int, **changes: Any) -> tuple[bytes, bytes]:
    values: dict[str, Any] = {"kind": "state", "fragment": 0, "key": ticket, "index": 0}
    return encode(msg.Chunk(**(values | {"crc": checksum(data)} | changes))), data


HOSTILE: dict[str, tuple[bytes, int, dict[str, Any], str]] = {
    # what it sends, what it announced, what is changed in the header, what the joiner says
    "garbage": (os.urandom(3_000), 3_000, {}, "it is damaged"),
    "zeros": (bytes(3_000), 3_000, {}, "it is damaged"),
    "longer than announced": (bytes(3_001), 3_000, {}, "it sends chunks of a wrong size"),
    "shorter than announced": (bytes(2_999), 3_000, {}, "it sends chunks of a wrong size"),
    "not asked for": (bytes(3_000), 3_000, {"index": 7}, "it sends what nobody asked for"),
    "wrong checksum": (bytes(3_000), 3_000, {"crc": 1}, "its bytes are corrupt"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_donor_that_sends_nonsense_ends_its_own_transfer_and_nobody_else_notices(
    syncer: Syncer, said: Any, case: str
) -> None:
    data, size, changes, _ = HOSTILE[case]
    with Donor(syncer.address, "real") as real, forged_donor(syncer, real.specs) as forged:
        joining = Joining(syncer)
        ticket = answer(forged, size)
        forged.hear_bulk(msg.Want, lambda want: want.kind == "state")
        forged.say_bulk(*chunk_of(data, ticket, **changes))
        forged.say(msg.StateAnswer(epoch=forged.epoch, ticket=ticket, clock=9, size=9))  # again
        state = joining.state()
        assert len(state) == 4  # from the other one
        assert "from peer 'real'" in said()[-1]
        steps = len(real.states)
        until(lambda: len(real.states) > steps + 20, message="others train on")
        assert forged.hear(msg.StateOver).ticket == ticket


@pytest.mark.parametrize("case", HOSTILE)
def test_the_reason_for_refusing_nonsense_is_said(said: Any, case: str) -> None:
    data, size, changes, reason = HOSTILE[case]
    with running_syncer(sync_every=500, fragments=2, overlap=1, lease=3) as syncer:
        with Donor(syncer.address, "real") as real:
            donors = forged_donor(syncer, real.specs)
            forged = donors.__enter__()
        joining = Joining(syncer)
        ticket = answer(forged, size)
        forged.hear_bulk(msg.Want, lambda want: want.kind == "state")
        forged.say_bulk(*chunk_of(data, ticket, **changes))
        assert joining.state() == {}
        assert reason in said()[-1]
        donors.__exit__(None, None, None)


def test_a_size_beyond_any_state_of_this_model_is_refused_at_the_syncer(
    syncer: Syncer, said: Any
) -> None:
    with Donor(syncer.address, "real") as real, forged_donor(syncer, real.specs) as forged:
        joining = Joining(syncer)
        answer(forged, 2**40)
        assert len(joining.state()) == 4
        assert "from peer 'real'" in said()[-1]


def strange(syncer: Syncer) -> int:
    return sum(syncer.status()["strange_messages"].values())


def test_a_joiner_fetches_its_own_ticket_only_and_on_credit(syncer: Syncer, said: Any) -> None:
    def want(ticket: int, first: int = 0, count: int = 1) -> bytes:
        return encode(msg.Want(kind="state", fragment=0, key=ticket, first=first, count=count))

    with Donor(syncer.address, "real") as real, forged_donor(syncer, real.specs) as forged:
        with Forged(syncer.address, "greedy", real.specs) as greedy:
            greedy.join(wants_state=True)
            ticket = answer(forged, 40_000_000)
            assert greedy.hear(msg.StateOffer).ticket == ticket
            joining = Joining(syncer)  # gets its own from the other donor
            assert len(joining.state()) == 4
            with Forged(syncer.address, "thief", real.specs) as thief:
                thief.join()
                count = strange(syncer)
                thief.say_bulk(want(ticket))
                until(lambda: strange(syncer) == count + 1)
                thief.say_bulk(want(ticket + 1000))
                thief.hear_bulk(msg.Gone, lambda gone: gone.key == ticket + 1000)
            greedy.say_bulk(want(ticket, 0, 4))
            forged.hear_bulk(msg.Want, lambda w: w.key == ticket and w.count == 4)
            greedy.say_bulk(want(ticket, 4, 1))
            until(lambda: strange(syncer) == count + 2)
            assert forged.hear(msg.StateOver).ticket == ticket
        steps = len(real.states)
        until(lambda: len(real.states) > steps + 20, message="others train on")


RANK = """
import hashlib, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import diloco_plugin
from tests.end_to_end.fleet import batches, small_model, train_step

rank, meeting, address = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
torch.set_num_threads(1)
model = DistributedDataParallel(small_model(1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
with diloco_plugin.attach(model, optimizer, address, name="ddp", scheduler=scheduler):
    for _ in range(2):
        digest = hashlib.sha256()
        for entry in optimizer.state.values():
            for key in sorted(entry):
                digest.update(entry[key].numpy().tobytes())
        steps = {int(entry["step"]) for entry in optimizer.state.values()}
        print(digest.hexdigest(), *steps, flush=True)
        train_step(model, optimizer, batches(rank, 1)[0])
dist.barrier()
dist.destroy_process_group()
"""


def test_all_ranks_of_a_learner_take_the_same_state(syncer: Syncer, tmp_path: Path) -> None:
    with Donor(syncer.address, "donor"):
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank), str(tmp_path / "meeting"), syncer.address],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            outputs = [rank.communicate(timeout=90) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    one, other = (out.splitlines()[-2:] for out, _ in outputs)
    assert one == other
    assert int(one[0].split()[1]) > 20
