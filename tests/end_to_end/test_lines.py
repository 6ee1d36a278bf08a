"""A learner whose I/O thread, lines or syncer fail it: it says so, once, and trains on."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import diloco_plugin
from diloco_plugin.core import actions as act
from diloco_plugin.learner import Learner
from diloco_plugin.learner.session import Session
from tests.end_to_end.fleet import batches, merged, sgd, small_model, train_step, train_until
from tests.end_to_end.forged import Forged, one_weight
from tests.end_to_end.processes import free_ports
from tests.syncers import running_syncer


class Boom(Exception):
    """What goes wrong in these tests."""


def session_of(learner: Learner) -> Session:
    assert learner._session is not None
    return learner._session


@pytest.mark.parametrize("require_syncer", [True, False])
def test_attach_raises_what_ended_the_io_thread(
    monkeypatch: pytest.MonkeyPatch, require_syncer: bool
) -> None:
    def broken(session: Session) -> None:
        raise Boom

    monkeypatch.setattr(Session, "_turn", broken)
    started = Session.__init__

    def begin(session: Session, *arguments: Any) -> None:
        started(session, *arguments)
        session._thread.join()

    monkeypatch.setattr(Session, "__init__", begin)
    model = small_model()
    with pytest.raises(Boom):
        diloco_plugin.attach(
            model, sgd(model), "tcp://127.0.0.1:1", require_syncer=require_syncer, name="a"
        )


def test_training_goes_on_when_the_io_thread_dies_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise Boom("why it died")

    model = small_model()
    optimizer = sgd(model)
    with running_syncer(sync_every=2, fragments=1, overlap=0) as syncer:
        learner = diloco_plugin.attach(model, optimizer, syncer.address, name="a")
        session = session_of(learner)
        session._inbox.append(fail)
        session._waker.wake()
        train_until(model, optimizer, lambda: session.error is not None)
        assert not learner.connected
        assert learner.metrics()["diloco/connected"] == 0.0
        steps = learner.metrics()["diloco/steps"]
        for batch in batches(0, 50):
            train_step(model, optimizer, batch)
        session.post([act.Beat()])
        assert not session._inbox, "nobody would ever take it out"
        assert learner.metrics()["diloco/steps"] == steps + 50
        started = time.monotonic()
        learner.close()
        assert time.monotonic() - started < 5
    assert caplog.text.count("training goes on alone") == 1
    assert "its I/O thread had failed (why it died)" in caplog.text


def test_both_lines_are_opened_again_when_the_syncer_was_silent() -> None:
    model = small_model()
    optimizer = sgd(model)
    with running_syncer(sync_every=2, fragments=1, overlap=0) as syncer:
        learner = diloco_plugin.attach(model, optimizer, syncer.address, name="a")
        session = session_of(learner)
        assert session._bulk is not None
        before = (session._control.sockets, session._bulk.sockets)
        train_until(model, optimizer, lambda: merged(learner) > 2)
        session.post([act.Reconnect()])
        train_until(model, optimizer, lambda: session._bulk.sockets != before[1])  # type: ignore[union-attr]
        assert session._control.sockets != before[0]
        count = merged(learner)
        train_until(model, optimizer, lambda: merged(learner) > count + 2)
        learner.close()


def test_a_bulk_line_that_zeromq_has_given_up_is_opened_again() -> None:
    model = small_model()
    optimizer = sgd(model)
    with running_syncer(sync_every=2, fragments=1, overlap=0, lease=1.0) as syncer:
        learner = diloco_plugin.attach(model, optimizer, syncer.address, name="a")
        session = session_of(learner)
        bulk = session._bulk
        assert bulk is not None
        train_until(model, optimizer, lambda: merged(learner) > 2)
        broken = bulk.sockets

        def give_up() -> None:
            bulk._socket.disconnect(str(bulk.address))
            bulk._connected = False  # as its monitor would have it

        session._inbox.append(give_up)
        session._waker.wake()
        train_until(model, optimizer, lambda: bulk.sockets != broken)
        count = merged(learner)
        train_until(model, optimizer, lambda: merged(learner) > count + 2)
        learner.close()


def test_who_trains_alone_is_told_once_that_it_was_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = small_model()
    optimizer = sgd(model)
    with (
        running_syncer() as syncer,
        Forged(syncer.address, "first", one_weight(10)) as first,
    ):
        first.join()
        first.seed([torch.zeros(10)])
        learner = diloco_plugin.attach(
            model, optimizer, syncer.address, name="b", require_syncer=False
        )
        train_until(model, optimizer, lambda: "goes on alone" in caplog.text)
        for batch in batches(0, 20):
            train_step(model, optimizer, batch)
        learner.abandon()
    told = [r.getMessage() for r in caplog.records if "goes on alone" in r.getMessage()]
    assert len(told) == 1
    assert "the run has 1 tensors, this learner has 4" in told[0]


def test_a_learner_does_not_change_over_to_another_run_at_the_same_address() -> None:
    bind = f"tcp://127.0.0.1:{free_ports()}"
    model = small_model()
    optimizer = sgd(model)
    with running_syncer(bind=bind, config={"run": "first"}):
        learner = diloco_plugin.attach(model, optimizer, bind, name="a")
        assert learner.run == "first"
    core = learner._core
    assert core is not None
    with running_syncer(bind=bind, config={"run": "second"}) as second:
        train_until(model, optimizer, lambda: core.link.refusal)
        assert core.link.refusal is not None
        assert core.link.refusal[0] == "run"
        assert not second.status()["learners"]
        learner.abandon()


class Roundabout(nn.Module):
    """A model that is not called the way models are called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 1)

    def compute_loss(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.inner(x)).square().mean()


@pytest.mark.parametrize("told", [False, True])
def test_a_loop_that_goes_round_forward_is_told_that_its_work_is_not_counted(
    caplog: pytest.LogCaptureFixture, told: bool
) -> None:
    model = Roundabout()
    optimizer = sgd(model)
    with running_syncer(sync_every=1000, fragments=1, overlap=0) as syncer:
        learner = diloco_plugin.attach(model, optimizer, syncer.address, name="a")
        for x, _ in batches(0, 10):
            if told:
                learner.count_batch(x)
            optimizer.zero_grad()
            model.compute_loss(x).backward()
            optimizer.step()
        assert learner.metrics()["diloco/tokens"] == (160 if told else 10)
        learner.abandon()
    assert caplog.text.count("count_batch()") == (not told)
