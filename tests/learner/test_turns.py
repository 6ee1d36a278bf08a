"""What the ranks of a learner do at a boundary, and what the two threads hand each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diloco_plugin
from diloco_plugin.config import parameters_from, parameters_to
from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.errors import ConfigError
from diloco_plugin.learner import Learner
from diloco_plugin.learner.innerstate import InnerState
from diloco_plugin.learner.island import Solo
from diloco_plugin.learner.place import Place, read_place
from diloco_plugin.learner.replica import Replica
from diloco_plugin.learner.turns import Turns, _encode_plan
from diloco_plugin.tensors.layout import build_layout, census
from diloco_plugin.wire import messages as msg
from tests.syncers import running_syncer
from tests.waiting import until


class Told(Solo):
    """The island of a rank that is not the leader: it gets ones."""

    def share_flat(self, tensor: Tensor) -> None:
        tensor.fill_(1.0)


@pytest.fixture
def learner() -> Iterator[Learner]:
    """A learner that has joined, and for which no round opens."""
    model = nn.Linear(2, 2)
    with running_syncer(sync_every=1000, fragments=1, overlap=0) as syncer:
        learner = diloco_plugin.attach(
            model, torch.optim.SGD(model.parameters(), lr=0.1), syncer.address, name="a"
        )
        yield learner
        learner.abandon()


@pytest.mark.parametrize("alpha", [0.25, 0.1, 1 / 3])
def test_other_ranks_blend_by_the_leaders_alpha(alpha: float) -> None:
    model = nn.Linear(2, 2, bias=False)
    before = model.weight.detach().clone()
    found = census(model, buffers="merge")
    follower = Turns(found, [], InnerState({}, [], None), Told(), None, None)
    # not told by the parameters: those may be of an earlier life of the syncer
    follower.replica = Replica(build_layout(found.specs, 1), found.tensors)
    follower._follow(_encode_plan([(act.Apply(fragment=0, version=1, alpha=alpha), None)]))
    leader = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        leader.weight.copy_(before)
    replica = Replica(build_layout(found.specs, 1), dict(leader.named_parameters()))
    buffer = replica.take_arrival()
    assert buffer is not None
    buffer.flat.fill_(1.0)
    replica.apply(0, buffer, alpha, [])
    assert torch.equal(model.weight, leader.weight)
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("action", [act.Release(fragment=0), act.Unstage(fragment=0)])
def test_a_buffer_is_in_its_pool_as_soon_as_the_core_counts_it_as_free(
    learner: Learner, action: act.LearnerAction, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, core, replica = learner._session, learner._core, learner._turns.replica
    assert session is not None
    assert core is not None
    assert replica is not None
    arrives = isinstance(action, act.Release)
    take = replica.take_arrival if arrives else replica.take_staging
    held = session.arrived if arrives else session.staged
    posted: list[Any] = []
    monkeypatch.setattr(session, "post", posted.append)

    def by_training() -> None:
        assert learner._turns._decide(ev.Paused(now_ns=time.monotonic_ns()), []) == []

    def by_io() -> None:
        monkeypatch.setattr(session, "_carry_out", posted.append)
        session._step(ev.Paused(now_ns=time.monotonic_ns()))
        assert action in posted, "a fetch may have to be stopped as well"
        posted.clear()

    with monkeypatch.context() as patch:
        patch.setattr(core, "step", lambda event: (action,))
        for decide in (by_training, by_io):
            buffer = take()
            assert buffer is not None
            held[0] = buffer
            decide()
            assert not held
            assert buffer in buffer._pool
            assert posted == []


def test_who_waits_in_lockstep_goes_on_when_the_syncer_is_lost() -> None:
    model = nn.Linear(2, 2)
    with running_syncer(lockstep=True, learners=1, sync_every=1000, fragments=1) as syncer:
        learner = diloco_plugin.attach(
            model, torch.optim.SGD(model.parameters(), lr=0.1), syncer.address, name="a"
        )
    until(lambda: not learner.connected, message="it knows that the syncer has stopped")
    pause = ev.Paused(now_ns=time.monotonic_ns())
    assert learner._turns.turn(pause, over=False), "or it would ask again and again"
    assert not learner._turns.turn(pause, over=False, joining=True)
    learner.abandon()


def test_a_learner_takes_a_welcome_with_an_outer_optimizer_that_its_torch_lacks(
    learner: Learner,
) -> None:
    session = learner._session
    assert session is not None
    assert session.place is not None
    told = parameters_to(session.place.parameters) | {"outer_optimizer": "OfTheFuture"}
    del told["outer_options"]
    welcome = msg.Welcome(
        protocol=msg.PROTOCOL,
        run="main",
        epoch=1,
        index=0,
        count=1,
        clock=0,
        fragments=len(session.place.layout.fragments),
        fingerprint=session.place.layout.fingerprint,
        parameters=told,
        bulk_port=1,
        token=b"0" * 16,
    )
    assert isinstance(read_place(welcome, learner._census.specs, session.place), Place)
    with pytest.raises(ConfigError):
        parameters_from(told)
