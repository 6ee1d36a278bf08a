"""`diloco syncer` as a process: signals, ports, files, exit codes, and the Hub."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import diloco_plugin
from diloco_plugin.cli import main
from diloco_plugin.status import fetch
from tests.end_to_end.fleet import Trainee, batches, sgd, small_model, train_step
from tests.end_to_end.processes import Daemon, Process
from tests.hub.fake_hub import FakeHub
from tests.waiting import until

FLAGS = ("--sync-every", "4", "--fragments", "2", "--overlap", "1")


def test_sigterm_exports_the_model_and_tells_the_learners(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = {name: p.detach().clone() for name, p in small_model(3).named_parameters()}
    save_file(start, tmp_path / "start.safetensors")
    export = tmp_path / "end.safetensors"
    files = ("--init", str(tmp_path / "start.safetensors"), "--export", str(export))
    with (
        Daemon(*FLAGS, *files, bind="tcp://[::1]:*") as daemon,
        Trainee(small_model(0), daemon.address, "a", close_timeout=5) as learner,
    ):
        assert daemon.address.startswith("tcp://[::1]:")
        learner.wait(lambda: learner.merged > 3)
        assert main(["status", "--json", daemon.address]) == 0
        body = json.loads(capsys.readouterr().out)
        assert body["learners"][0]["name"] == "a"
        assert body["rounds"]["merged"] > 3
        assert main(["check", daemon.address]) == 0
        assert "1 learner" in capsys.readouterr().out
        daemon.send(signal.SIGTERM)
        assert daemon.wait() == 0
        assert "Traceback" not in daemon.err
        assert "received SIGTERM" in daemon.err
        assert learner.learner is not None
        link = learner.learner._core.link  # type: ignore[union-attr]
        learner.wait(lambda: link.gone_away and not link.connected)
        before = learner.steps
        learner.wait(lambda: learner.steps > before + 20)  # it trains on
        end = load_file(export)
        assert end.keys() == start.keys()
        assert any(not torch.equal(end[name], start[name]) for name in start)
        assert all(bool(tensor.isfinite().all()) for tensor in end.values())
        model = small_model(9)
        model.load_state_dict(end)


def test_a_run_with_an_end_ends_by_itself(tmp_path: Path) -> None:
    export = tmp_path / "model.safetensors"
    with Daemon(*FLAGS, "--steps", "40", "--export", str(export)) as daemon:
        model = small_model(0)
        optimizer = sgd(model)
        with diloco_plugin.attach(model, optimizer, daemon.address, name="a") as learner:
            steps = 0
            for batch in batches(0, 5000):
                if learner.should_stop:
                    break
                train_step(model, optimizer, batch)
                steps += 1
            assert 40 <= steps < 5000
        assert daemon.wait() == 0
        assert "Traceback" not in daemon.err
        end = load_file(export)
        held = dict(model.named_parameters())
        assert all(torch.equal(held[name], tensor) for name, tensor in end.items())


def test_what_cannot_start_says_why_in_one_line_and_with_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with Process("-m", "diloco_plugin.cli", "syncer", "--bind", busy) as process:
            assert process.wait(60) == 75
            assert process.err.count("\n") == 1
            assert "is in use" in process.err
    assert main(["syncer", "--bind", "tcp://0.0.0.0:5555"]) == 78
    err = capsys.readouterr().err
    assert "would let anybody in" in err
    assert err.count("\n") == 1
    assert main(["syncer", "--init", str(tmp_path / "nothing.safetensors")]) == 78
    assert "does not exist" in capsys.readouterr().err


@pytest.fixture
def hub() -> FakeHub:
    return FakeHub()


def at(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",  # the fake hub is on this machine
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": "hf_secret",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def test_the_model_is_published_at_the_end_and_a_second_signal_ends_it_at_once(
    hub: FakeHub, tmp_path: Path
) -> None:
    flags = (*FLAGS, "--export", str(tmp_path / "m.safetensors"), "--publish", "hf://lab/run")
    try:
        with Daemon(*flags, env=at(hub, tmp_path)) as daemon:
            with Trainee(small_model(0), daemon.address, "a") as learner:
                learner.wait(lambda: learner.merged > 3)
            daemon.send(signal.SIGINT)
            assert daemon.wait(60) == 0
            assert "lab/run" in hub.repos, daemon.err
            assert "model.safetensors" in hub.repos["lab/run"]
            assert "published" in daemon.err
        hub.gate.clear()  # from now on the Hub takes requests and never answers
        hub.reached.clear()
        with Daemon(*flags, "--every", "1s", env=at(hub, tmp_path)) as daemon:
            with Trainee(small_model(0), daemon.address, "a") as learner:
                until(hub.reached.is_set, 60)  # stuck in the middle of a publication
                before = fetch(daemon.address)["rounds"]["merged"]
                learner.wait(lambda: fetch(daemon.address)["rounds"]["merged"] > before + 5)
            daemon.send(signal.SIGTERM)
            until(lambda: "the global model is in" in daemon.err, 20)
            assert daemon.code is None  # it waits for the Hub, but the model is safe
            daemon.send(signal.SIGTERM)
            assert daemon.wait(5) == -signal.SIGTERM
            assert load_file(tmp_path / "m.safetensors")
    finally:
        hub.close()


def test_a_hub_that_is_gone_delays_no_round_and_costs_one_warning(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.close()
    flags = (*FLAGS, "--export", str(tmp_path / "m.safetensors"), "--publish", "hf://lab/run")
    with Daemon(*flags, env=at(hub, tmp_path)) as daemon:
        with Trainee(small_model(0), daemon.address, "a") as learner:
            learner.wait(lambda: learner.merged > 10)
        daemon.send(signal.SIGTERM)
        assert daemon.wait(60) == 0
        assert daemon.err.count("publishing 'step") == 1, daemon.err
        assert (
            load_file(tmp_path / "m.safetensors").keys()
            == dict(small_model(0).named_parameters()).keys()
        )
