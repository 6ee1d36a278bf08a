"""A run outlives its syncer: what was announced is there again, and it stays the same run."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import diloco_plugin
from diloco_plugin import shard
from diloco_plugin.config import SyncerConfig, parameters_from
from diloco_plugin.errors import ConfigError, StateLockedError
from diloco_plugin.status import fetch
from diloco_plugin.syncer import Syncer
from tests.end_to_end.fleet import Trainee, merged, sgd, small_model, train_until
from tests.end_to_end.processes import Daemon, free_ports
from tests.syncers import global_model, running_syncer
from tests.waiting import until

RUN = {"sync_every": 4, "fragments": 2, "overlap": 1}


@pytest.fixture
def state(tmp_path: Path) -> dict[str, Any]:
    return {"state": str(tmp_path / "state")}


def versions(syncer: Syncer) -> list[int]:
    return [fragment["version"] for fragment in syncer.status()["fragments"]]


def train_some(syncer: Syncer, merges: int = 6, name: str = "a") -> None:
    model = small_model()
    optimizer = sgd(model)
    with diloco_plugin.attach(model, optimizer, syncer.address, name=name) as learner:
        train_until(model, optimizer, lambda: merged(learner) >= merges)


@pytest.mark.parametrize("durability", ["commit", "interval", "none"])
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_after_an_orderly_stop_a_run_goes_on_as_it_was(
    state: dict[str, Any], durability: str, codec: str
) -> None:
    config = state | {"durability": durability}
    with running_syncer(**RUN, codec=codec, config=config) as syncer:
        train_some(syncer)
        until(lambda: not syncer.status()["learners"])  # its last words have been heard
        before, model, clock = versions(syncer), global_model(syncer), syncer._core.clock
        momentum = [syncer._merging.the_model.durable(f) for f in range(2)]
    assert sum(before) >= 6
    with running_syncer(**RUN, codec=codec, config=config) as again:
        assert versions(again) == before
        assert again.status()["clock"] == clock
        assert all(torch.equal(model[k], v) for k, v in global_model(again).items())
        for fragment, tensors in enumerate(momentum):
            now = again._merging.the_model.durable(fragment)
            assert now.keys() == tensors.keys()
            assert all(torch.equal(now[key], value) for key, value in tensors.items())
        train_some(again, 2)
        assert sum(versions(again)) > sum(before)


def test_epochs_grow_with_every_start(state: dict[str, Any]) -> None:
    epochs = []
    for _ in range(3):
        with running_syncer(**RUN, config=state) as syncer:
            epochs.append(syncer.status()["epoch"])
    assert epochs == sorted(set(epochs))


def test_learners_keep_what_they_have_when_their_syncer_was_killed(tmp_path: Path) -> None:
    port = free_ports()
    flags = ["--state", str(tmp_path), "--sync-every", "4", "--fragments", "2", "--overlap", "1"]
    bind = f"tcp://127.0.0.1:{port}"
    with Daemon(*flags, bind=bind) as daemon:
        trainee = Trainee(small_model(), daemon.address, "a")
        trainee.wait(lambda: trainee.merged >= 4)
        known = fetch(daemon.address)
        daemon.kill()
    with Daemon(*flags, bind=bind) as daemon, trainee:
        trainee.wait(lambda: [m["name"] for m in fetch(bind)["learners"]] == ["a"], 30)
        assert "goes on with what it holds" in daemon.err
        first = fetch(bind)
        for old, new in zip(known["fragments"], first["fragments"], strict=True):
            assert new["version"] >= old["version"], "an announced version is lost"
        more = first["rounds"]["merged"] + 4
        trainee.wait(lambda: fetch(bind)["rounds"]["merged"] >= more, 30)
        daemon.send(signal.SIGTERM)
        assert daemon.wait() == 0


def test_a_run_refuses_other_parameters_and_takes_those_that_may_change(
    state: dict[str, Any],
) -> None:
    with running_syncer(**RUN, config=state) as syncer:
        train_some(syncer, 1)
    other = parameters_from(RUN | {"sync_every": 5, "quorum": 2}, source="the test")
    with pytest.raises(ConfigError, match=r"sync_every=4, now 5.*quorum=1, now 2.*--override"):
        Syncer(SyncerConfig(parameters=other, **state))
    with pytest.raises(ConfigError, match="sync_every=4, now 5"):
        Syncer(SyncerConfig(parameters=other, override=True, **state))
    with pytest.raises(ConfigError, match="run='main', now 'else'"):
        Syncer(SyncerConfig(run="else", parameters=parameters_from(RUN), **state))
    with running_syncer(**RUN, quorum=2, config=state | {"override": True}) as syncer:
        assert syncer.status()["parameters"]["quorum"] == 2
    # and it stays so, for a start that names no parameter at all
    unnamed = Syncer(SyncerConfig(bind="tcp://127.0.0.1:*", **state), given=frozenset({"state"}))
    assert unnamed.config.parameters.quorum == 2
    assert unnamed.config.parameters.sync_every == 4
    unnamed.stop("the test is over")
    unnamed.run()


def test_the_number_of_learners_may_change_outside_lockstep(tmp_path: Path) -> None:
    more = {"override": True, "bind": "tcp://127.0.0.1:*"}
    state = str(tmp_path / "state")
    with running_syncer(**RUN, learners=2, config={"state": state}) as syncer:
        train_some(syncer, 1)
    with running_syncer(**RUN, learners=3, config={"state": state, "override": True}) as syncer:
        assert len(shard(range(9), syncer.address, name="a")) == 3
    fixed = str(tmp_path / "lockstep")
    with running_syncer(**RUN, lockstep=True, learners=1, config={"state": fixed}) as syncer:
        train_some(syncer, 1)
    two = parameters_from(RUN | {"lockstep": True, "learners": 2}, source="the test")
    with pytest.raises(ConfigError, match="learners=1, now 2"):
        Syncer(SyncerConfig(parameters=two, state=fixed, **more))


@pytest.mark.parametrize("override", [False, True])
def test_a_last_step_that_the_run_has_passed_is_refused(
    state: dict[str, Any], override: bool
) -> None:
    with running_syncer(**RUN, config=state) as syncer:
        train_some(syncer)
        clock = syncer.status()["clock"]
    for steps in (1, clock):  # and again: a refused start is not what the next one goes by
        for _ in range(2):
            short = SyncerConfig(steps=steps, parameters=parameters_from(RUN), **state)
            with pytest.raises(ConfigError, match=rf"steps={steps}: .* reached step {clock}\."):
                Syncer(replace(short, override=override))
    with running_syncer(**RUN, config=state | {"steps": clock + 1}):
        pass


def test_a_run_that_has_ended_is_exported_again_by_the_same_command(
    state: dict[str, Any], tmp_path: Path
) -> None:
    export = tmp_path / "model.safetensors"
    bind = f"tcp://127.0.0.1:{free_ports()}"
    config = SyncerConfig(
        bind=bind, steps=8, export=str(export), parameters=parameters_from(RUN), **state
    )
    with Trainee(small_model(), bind, "a"):
        Syncer(config).run()
    written = load_file(export)
    export.unlink()
    again = Syncer(config)
    again.run()
    assert again.exit_code == 0
    exported = load_file(export)
    assert exported.keys() == written.keys()
    assert all(torch.equal(exported[name], value) for name, value in written.items())


def test_what_only_the_last_start_was_told_is_named(state: dict[str, Any], tmp_path: Path) -> None:
    export = str(tmp_path / "model.safetensors")
    with running_syncer(**RUN, outer_momentum=0.9, config=state | {"export": export}) as syncer:
        train_some(syncer, 1)
    with Daemon("--state", state["state"], "--steps", "500") as daemon:
        (line,) = [line for line in daemon.err.splitlines() if "the last start had" in line]
        assert f"WARNING the last start had export='{export}', and this one has not" in line
        assert "momentum" not in daemon.err, "nobody can change it any more"
        daemon.send(signal.SIGTERM)
        daemon.wait()
    with Daemon("--state", state["state"], "--steps", "600") as daemon:
        assert "the last start had" not in daemon.err


def test_one_state_serves_one_syncer(state: dict[str, Any]) -> None:
    with running_syncer(**RUN, config=state):
        with pytest.raises(StateLockedError, match="state"):
            Syncer(SyncerConfig(parameters=parameters_from(RUN), **state))
        flags = ["--state", state["state"], "--bind", "tcp://127.0.0.1:*"]
        command = [os.sys.executable, "-m", "diloco_plugin.cli", "syncer", *flags]  # type: ignore[attr-defined]
        assert subprocess.run(command, capture_output=True).returncode == 75


def test_a_syncer_that_failed_to_start_lets_its_state_go(state: dict[str, Any]) -> None:
    with running_syncer() as other:
        taken = SyncerConfig(bind=other.address, parameters=parameters_from(RUN), **state)
        with pytest.raises(Exception, match="in use"):
            Syncer(taken)
    with running_syncer(**RUN, config=state):
        pass


def test_all_who_trained_beyond_the_last_step_without_the_syncer_give_it_to_the_end_of_the_run(
    state: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    bind = f"tcp://127.0.0.1:{free_ports()}"
    flags = ["--bind", bind, "--state", state["state"], "--steps", "1900", "--lease", "3"]
    flags += ["--sync-every", "200", "--fragments", "1", "--quorum", "2"]
    with (
        Daemon(*flags) as daemon,
        Trainee(small_model(), bind, "a", data=1) as first,
        Trainee(small_model(), bind, "b", data=2) as second,
    ):
        both = (first, second)
        for trainee in both:
            trainee.wait(lambda t=trainee: t.merged and 50 < t.steps % 200 < 100)  # no round now
        daemon.kill()
        for trainee in both:
            trainee.wait(lambda t=trainee: t.steps > 2000)
        before = [trainee.merged for trainee in both]
        with Daemon(*flags) as again:
            assert again.wait(60) == 0
    assert all(trainee.merged > merged for trainee, merged in zip(both, before, strict=True))
    assert "refused this learner" not in caplog.text
    assert "without a closing round" not in caplog.text
