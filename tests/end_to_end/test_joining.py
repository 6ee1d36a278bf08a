"""The door: who may come in, what they hold then, and what is said to those who may not."""

from __future__ import annotations

import logging
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import diloco_plugin
from diloco_plugin.errors import RefusedError, UnreachableError
from diloco_plugin.learner import joining
from diloco_plugin.wire import messages as msg
from tests.end_to_end.fleet import (
    Trainee,
    largest_difference,
    sgd,
    small_model,
    train_until,
    values,
)
from tests.end_to_end.forged import Forged, one_weight
from tests.end_to_end.processes import free_ports
from tests.syncers import global_model, running_syncer
from tests.waiting import until


def test_learners_of_different_seeds_hold_the_global_model_before_their_first_step() -> None:
    with running_syncer(sync_every=4, fragments=2, overlap=1) as syncer:
        first = small_model(1)
        with diloco_plugin.attach(first, sgd(first), syncer.address, name="first"):
            assert largest_difference(values(first), values(small_model(1))) == 0.0
            for seed in (2, 3):
                model = small_model(seed)
                with diloco_plugin.attach(model, sgd(model), syncer.address, name=f"l{seed}"):
                    assert largest_difference(values(model), values(first)) == 0.0
                    held = dict(model.named_parameters())
                    for name, value in global_model(syncer).items():
                        assert torch.equal(held[name], value)


def test_a_learner_that_has_not_taken_the_model_cannot_push() -> None:
    specs = one_weight(10)
    with (
        running_syncer(sync_every=1, fragments=1, overlap=0) as syncer,
        Forged(syncer.address, "seeder", specs) as seeder,
        Forged(syncer.address, "hasty", specs) as hasty,
    ):
        seeder.join()
        seeder.seed([torch.zeros(10)])
        hasty.join()
        hasty.progress(1_000)  # its clock does not count either
        seeder.progress(1)
        pull = seeder.pulled()
        for base in (0, 1):
            hasty.offer(pull, base=base)
            fate = hasty.fate(pull)
            assert (fate.fate, fate.reason) == ("rejected", "unsynced")
        seeder.offer(pull, nothing="no steps")
        until(lambda: syncer.status()["rounds"]["abandoned"] == 1)
        assert syncer.status()["clock"] == 1
        assert global_model(syncer)["w"].count_nonzero() == 0
        hasty.take()
        hasty.progress(2)
        assert hasty.push(hasty.pulled(), torch.ones(10)).fate in ("merged", "late")


def test_a_token_is_known_however_soon_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads may run between two lines of the bulk thread, as long as a whole join takes."""
    specs = one_weight(10)
    with (
        running_syncer(sync_every=1, fragments=1, overlap=0) as syncer,
        Forged(syncer.address, "quick", specs) as quick,
    ):
        door, waits = syncer._bulk._door, threading.Event()
        receive = door.receive

        def receive_late(limit: int = 64) -> Any:
            waits.set()
            monkeypatch.setattr(door, "receive", receive)
            return until(lambda: receive(limit), message="the token is here")

        monkeypatch.setattr(door, "receive", receive_late)
        syncer._bulk._waker.wake()
        assert waits.wait(10)
        quick.join()
        quick.seed([torch.zeros(10)])
        assert syncer.status()["strange_messages"] == {}


def test_late_joiners_come_in_while_rounds_run_fast() -> None:
    with (
        running_syncer(sync_every=2, fragments=2, overlap=1) as syncer,
        Trainee(small_model(0), syncer.address, "a", step_seconds=0.0005) as a,
        Trainee(small_model(0), syncer.address, "b", data=1, step_seconds=0.0005) as b,
    ):
        a.wait(lambda: a.merged > 5 and (b.error or b.merged > 0))
        for number in range(5):
            before = a.merged
            with Trainee(small_model(number), syncer.address, f"late-{number}") as late:
                late.wait(lambda: late.merged > 0)
                assert all(bool(p.isfinite().all()) for p in late.model.parameters())
            a.wait(lambda: a.merged > before)  # noqa: B023


class Wide(nn.Module):
    """The usual model, with something else in it."""

    def __init__(self, *, hidden: int = 16, extra: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(8, hidden)
        self.b = nn.Linear(8, hidden)
        if tied:
            self.b.weight = self.a.weight
        if extra:
            self.c = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Wide(hidden=4), ["a.weight: the run has shape (16, 8), this learner has (4, 8)"]),
        (
            Wide(extra=True),
            ["the run has 4 tensors, this learner has 6", "c.bias: this learner has it"],
        ),
        (nn.Linear(8, 16), ["the run has 4 tensors, this learner has 2", "weight"]),
        (Wide(tied=True), ["b.weight", "not tied", "tied to a.weight"]),
    ],
    ids=["shape", "count", "names", "tied"],
)
def test_another_model_is_refused_with_the_first_differences(
    other: nn.Module, says: list[str]
) -> None:
    with running_syncer(sync_every=4, fragments=2, overlap=1) as syncer:
        model = Wide()
        with (
            diloco_plugin.attach(model, sgd(model), syncer.address, name="right"),
            pytest.raises(RefusedError) as refused,
        ):
            diloco_plugin.attach(other, sgd(other), syncer.address, name="wrong")
        assert syncer.status()["refused"] == {"layout": 1}
    assert refused.value.code == "layout"
    for part in says:
        assert part in str(refused.value)


def test_compiled_distributed_and_plain_learners_share_a_run(tmp_path: Path) -> None:
    torch._dynamo.reset()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plain = small_model(1)
        compiled = torch.compile(small_model(2), backend="eager")
        spread = DistributedDataParallel(small_model(3))
        with running_syncer(sync_every=2, fragments=2, overlap=1) as syncer:
            models = {"plain": plain, "compiled": compiled, "ddp": spread}
            for name, model in models.items():
                optimizer = sgd(model)
                with diloco_plugin.attach(model, optimizer, syncer.address, name=name) as learner:
                    done = lambda: learner.metrics()["diloco/pushes_merged"] >= 3  # noqa: E731
                    train_until(model, optimizer, done)
                held = [p.detach() for p in model.parameters()]
                expected = global_model(syncer)
                names = [n for n, _ in small_model(0).named_parameters()]
                assert largest_difference(held, [expected[n] for n in names]) == 0.0
    finally:
        dist.destroy_process_group()


def test_two_live_learners_cannot_have_one_name() -> None:
    with (
        running_syncer(sync_every=4, fragments=2, overlap=1) as syncer,
        Trainee(small_model(0), syncer.address, "twin") as first,
    ):
        first.wait(lambda: first.merged > 0)
        model = small_model(0)
        with pytest.raises(RefusedError) as refused:
            diloco_plugin.attach(model, sgd(model), syncer.address, name="twin")
        assert refused.value.code == "name"
        before = first.merged
        first.wait(lambda: first.merged > before)


def test_two_learners_with_one_data_seed_are_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running_syncer(sync_every=4, fragments=2, overlap=1) as syncer:
        a, b, c = (small_model(0) for _ in range(3))
        with (
            diloco_plugin.attach(a, sgd(a), syncer.address, name="a", data_seed=7),
            diloco_plugin.attach(b, sgd(b), syncer.address, name="b", data_seed=8),
        ):
            assert "same seed" not in caplog.text
            with diloco_plugin.attach(c, sgd(c), syncer.address, name="c", data_seed=7):
                by = lambda logger: [  # noqa: E731
                    r.getMessage() for r in caplog.records if r.name == logger
                ]
                said = "learner 'a' draws its data with the same seed (7)"
                until(lambda: any(said in text for text in by("diloco.learner")))
                assert any(said in text for text in by("diloco.syncer"))


def test_nobody_at_the_address_is_an_error_in_time_with_what_to_do(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"tcp://127.0.0.1:{free_ports()}"
    model = small_model(0)
    started = time.monotonic()
    monkeypatch.setattr(joining, "NEWS_SECONDS", 0.1)
    with pytest.raises(UnreachableError, match="diloco syncer --bind") as error:
        diloco_plugin.attach(model, sgd(model), address, connect_timeout=0.5)
    said = [record.getMessage() for record in caplog.records]
    assert sum("not in the run yet, and waiting for it, 0 s in all" in line for line in said) == 1
    assert time.monotonic() - started < 10
    assert address in str(error.value)
    assert "require_syncer=False" in str(error.value)
    train_until(model, sgd(model), lambda: True)  # the optimizer and model are as they were


def test_without_a_syncer_it_trains_alone_and_joins_when_one_appears() -> None:
    port = free_ports()
    model = small_model(5)
    optimizer = sgd(model)
    learner = diloco_plugin.attach(
        model, optimizer, f"tcp://127.0.0.1:{port}", name="early", require_syncer=False
    )
    steps = iter(range(1_000_000))
    train_until(model, optimizer, lambda: next(steps) == 20)
    assert learner.metrics()["diloco/steps"] == 20
    assert not learner.connected
    with running_syncer(
        bind=f"tcp://127.0.0.1:{port}", sync_every=4, fragments=2, overlap=1
    ) as syncer:
        merged = lambda: learner.metrics()["diloco/pushes_merged"] >= 2  # noqa: E731
        train_until(model, optimizer, merged)
        learner.close()
        held = dict(model.named_parameters())
        assert all(torch.equal(held[n], v) for n, v in global_model(syncer).items())


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.6\r\n", b"\xff" * 100])
def test_something_else_at_the_address_is_a_clear_error(greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        over = threading.Event()
        guests: list[socket.socket] = []

        def serve() -> None:
            while not over.is_set():
                try:
                    guest = server.accept()[0]
                    guests.append(guest)
                    guest.sendall(greeting)
                except OSError:
                    continue

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            model = small_model(0)
            address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
            with pytest.raises(UnreachableError, match="but is no syncer"):
                diloco_plugin.attach(model, sgd(model), address, connect_timeout=1)
        finally:
            over.set()
            thread.join()
            for guest in guests:
                guest.close()


def test_a_run_of_another_name_is_refused() -> None:
    logging.getLogger("diloco.syncer").setLevel(logging.NOTSET)
    with running_syncer(config={"run": "ours"}) as syncer:
        model = small_model(0)
        with pytest.raises(RefusedError, match="serves run 'ours', not 'theirs'") as refused:
            diloco_plugin.attach(model, sgd(model), syncer.address, run="theirs")
        assert refused.value.code == "run"
        assert syncer.status()["strange_messages"] == {}
        with Forged(syncer.address, "old", one_weight(3)) as old:
            old.hello(protocol=msg.PROTOCOL + 1)
            assert old.hear(msg.Refuse).code == "protocol"


def test_a_first_learner_that_brought_nothing_does_not_fix_the_model() -> None:
    """It knocked, and died before anybody had its model: the next one may have another."""
    with running_syncer(lease=1.0) as syncer:
        with Forged(syncer.address, "dead", one_weight(4, 4)) as dead:
            dead.hello()
            until(lambda: syncer.status()["learners"], message="the first one is in")
        other = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        until(lambda: not syncer.status()["learners"], 15, "its lease is over")
        diloco_plugin.attach(other, optimizer, syncer.address, name="next").close()
        assert sorted(global_model(syncer)) == ["bias", "weight"]
