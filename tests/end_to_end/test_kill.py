"""Kill anything at any time: half a push is never merged, and nobody else stops for a step."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import diloco_plugin
from diloco_plugin.status import fetch
from diloco_plugin.syncer import Syncer
from tests.end_to_end.family import Family
from tests.end_to_end.fleet import Trainee, sgd, small_model
from tests.end_to_end.forged import Forged, one_weight
from tests.end_to_end.processes import Daemon, Process, free_ports
from tests.syncers import global_model, running_syncer
from tests.waiting import until

ELEMENTS = 8 * 262_144  # eight chunks, twice the window


class OneWeight(nn.Module):
    """The model of `half_push`, as a real learner has it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(ELEMENTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w[:8].sum() * x.sum()


@pytest.fixture
def syncer(tmp_path: Path) -> Iterator[Syncer]:
    save_file({"w": torch.zeros(ELEMENTS)}, tmp_path / "model.safetensors")
    with running_syncer(
        sync_every=1, fragments=1, overlap=0, quorum=2, lease=3, config={"init": str(tmp_path)}
    ) as running:
        yield running


def half_push(syncer: Syncer, name: str, *more: str) -> Process:
    return Process("-m", "tests.end_to_end.half_push", syncer.address, name, str(ELEMENTS), *more)


def beat(learner: Forged) -> None:
    """A sign of life."""
    learner.progress(learner.clock)


def test_half_a_push_of_a_killed_learner_is_never_merged_and_rounds_go_on(syncer: Syncer) -> None:
    gift = torch.full((ELEMENTS,), 1e-3)
    with (
        half_push(syncer, "victim") as victim,
        Forged(syncer.address, "other", one_weight(ELEMENTS)) as other,
    ):
        other.join()
        other.take()
        clocks = lambda: {m["name"]: m["clock"] for m in syncer.status()["learners"]}  # noqa: E731
        until(lambda: beat(other) or clocks().get("victim") == 1_000, 60)
        other.progress(1)
        pull = other.pulled()
        other.offer(pull)
        for index in range(8):
            other.serve("push", 0, pull.round, gift, index)
        victim.prints("halfway", 60)
        victim.kill()
        # the round waits for a second push until the lease of the dead one is over, not longer
        until(lambda: beat(other) or len(syncer.status()["learners"]) == 1)
        assert other.fate(pull).fate == "merged"
        fates = syncer.status()["fates"]
        assert fates["abandoned"] == 1
        assert fates["merged"] == 1
        merged = global_model(syncer)["w"]
        assert float(merged.abs().max()) < 1.0
        assert torch.equal(merged, merged[:1].expand(ELEMENTS))  # chunk 0 got nothing of its own
        other.fetch(0)
        other.progress(2)
        assert other.push(other.pulled(), gift).fate == "merged"  # K is one now


def test_a_killed_learner_is_back_under_its_own_name_at_once(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(ELEMENTS)}, tmp_path / "model.safetensors")
    with (
        running_syncer(
            sync_every=1, fragments=1, overlap=0, lease=600, config={"init": str(tmp_path)}
        ) as syncer,
        half_push(syncer, "phoenix") as first,
        half_push(syncer, "sleeper", "idle") as second,
    ):
        first.prints("halfway", 60)
        second.prints("joined", 60)
        indices = {entry["name"]: entry["index"] for entry in syncer.status()["learners"]}
        first.kill()
        second.send(signal.SIGSTOP)  # its connection stands, but nobody answers the probe
        for name, seconds in (("phoenix", 5.0), ("sleeper", 7.0)):
            model = OneWeight()
            started = time.monotonic()
            with diloco_plugin.attach(model, sgd(model), syncer.address, name=name) as learner:
                assert time.monotonic() - started < seconds
                assert learner.index == indices[name]
        second.send(signal.SIGCONT)


def test_learners_train_on_while_the_syncer_is_killed_and_find_the_next_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = free_ports()
    flags = ("--sync-every", "4", "--fragments", "2", "--overlap", "1")
    bind = f"tcp://127.0.0.1:{port}"
    caplog.set_level(logging.WARNING, "diloco.learner")
    with Daemon(*flags, bind=bind) as first:
        a = Trainee(small_model(0), first.address, "a", step_seconds=0.005)
        b = Trainee(small_model(1), first.address, "b", step_seconds=0.005, data=1)
        try:
            a.wait(lambda: a.merged > 3 and b.merged > 3)
            first.kill()
            steps = a.steps, b.steps
            a.wait(lambda: a.steps > steps[0] + 50 and b.steps > steps[1] + 50)
            assert a.learner is not None
            assert b.learner is not None
            until(lambda: not a.learner.connected and not b.learner.connected)
            lost = [r for r in caplog.records if "lost the syncer" in r.getMessage()]
            assert len(lost) == 2
            with Daemon(*flags, bind=bind) as second:
                before = a.merged, b.merged
                a.wait(lambda: a.merged > before[0] + 3 and b.merged > before[1] + 3, 30)
                status = fetch(second.address)
                assert {entry["name"] for entry in status["learners"]} == {"a", "b"}
                assert status["fates"]["rejected"] == {}
                a.finish()
                b.finish()
            said = [r.getMessage() for r in caplog.records if r.name == "diloco.learner"]
            assert len(said) == 4, said
            assert sum("found the syncer again after" in line for line in said) == 2
        finally:
            a.finish()
            b.finish()


def test_a_training_that_ends_without_a_syncer_ends_in_time_with_a_warning(tmp_path: Path) -> None:
    with Daemon("--sync-every", "4", "--fragments", "2", "--close-timeout", "1.5") as daemon:
        body = f"""
with diloco_plugin.attach(model, optimizer, {daemon.address!r}) as learner:
    while learner.metrics()["diloco/pushes_merged"] < 3:
        step()
    print("merged", flush=True)
    while learner.connected:
        step()
    for _ in range(50):
        step()
print("done", learner.metrics()["diloco/steps"], flush=True)
"""
        with Family(tmp_path, {"script": body}) as family:
            family.prints("script", "merged")
            daemon.kill()
            assert family.ends("script", 15) == 0
            err = family.err("script")
            assert "done" in family.out("script")
            assert err.count("lost the syncer") == 1
            assert err.count("left without a closing round") == 1
            assert "Traceback" not in err
