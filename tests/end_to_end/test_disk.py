"""Disks that are full or fail, under a real syncer: what it says, and that it goes on."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_model

import diloco_plugin
from diloco_plugin.cli import main
from diloco_plugin.errors import RefusedError
from diloco_plugin.status import check, fetch
from tests.end_to_end.fleet import Trainee, sgd, small_model
from tests.end_to_end.processes import Daemon
from tests.end_to_end.test_resume import RUN, versions
from tests.syncers import running_syncer


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for 2 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(ballast: Path) -> None:
    """Take all the room that there is."""
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)


def test_on_a_full_disk_nothing_is_announced_until_there_is_room(small_disk: Path) -> None:
    config = {"state": str(small_disk / "state")}
    with (
        running_syncer(**RUN, config=config) as syncer,
        Trainee(small_model(), syncer.address, "a") as trainee,
    ):
        trainee.wait(lambda: trainee.merged >= 2)
        ballast = small_disk / "ballast"
        fill(ballast)
        trainee.wait(lambda: syncer.status()["rounds"]["stuck"], 30)
        assert any("room" in problem for problem in syncer.status()["problems"])
        stuck, steps = versions(syncer), trainee.steps
        # others still get in and take the last version that is durable
        with Trainee(small_model(1), syncer.address, "b") as late:
            late.wait(lambda: late.steps > 5)
            trainee.wait(lambda: trainee.steps > steps + 50)
            assert versions(syncer) == stuck
            ballast.unlink()
            trainee.wait(lambda: sum(versions(syncer)) > sum(stuck) + 4, 30)
        assert not syncer.status()["rounds"]["stuck"]
    with running_syncer(**RUN, config=config) as syncer:
        assert sum(versions(syncer)) > sum(stuck)


def test_saving_that_finds_no_room_is_a_problem_until_there_is(small_disk: Path) -> None:
    config = {"state": str(small_disk / "state"), "durability": "interval", "interval": "0.1s"}
    with (
        running_syncer(**RUN, config=config) as syncer,
        Trainee(small_model(), syncer.address, "a") as trainee,
    ):
        trainee.wait(lambda: trainee.merged >= 2)
        fill(small_disk / "ballast")

        def unsaved() -> bool:
            return any("nothing is saved" in problem for problem in syncer.status()["problems"])

        trainee.wait(unsaved, 20)
        (small_disk / "ballast").unlink()
        trainee.wait(lambda: not unsaved(), 20)


@pytest.mark.parametrize("flag", ["--state", "--export", "--tape"])
@pytest.mark.parametrize("how", ["full", "read-only"])
def test_a_start_that_the_disk_prevents_may_be_tried_again(
    small_disk: Path, how: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 74: a supervisor tries again, which it does not after a wrong setting."""
    options = "remount,nr_inodes=2" if how == "full" else "remount,ro"
    (small_disk / "ballast").touch()  # of two inodes the other is the folder's
    subprocess.run(["mount", "-o", options, str(small_disk)], check=True)
    place = small_disk / "new" / "model.safetensors"
    assert main(["syncer", "--bind", "tcp://127.0.0.1:*", flag, str(place)]) == 74
    assert ("the disk is full" if how == "full" else "the disk fails") in capsys.readouterr().err


@pytest.mark.parametrize("init", [False, True])
def test_a_disk_too_small_for_the_first_model_is_told_and_not_tried_without_end(
    small_disk: Path, tmp_path: Path, init: bool
) -> None:
    model = small_model()
    flags = ["--state", str(small_disk / "state"), "--export", str(tmp_path / "model.safetensors")]
    if init:
        save_model(model, str(tmp_path / "init.safetensors"))
        flags += ["--init", str(tmp_path / "init.safetensors")]
    told = r"cannot save the first model: .*disk is full"
    with Daemon(*flags) as daemon:
        fill(small_disk / "ballast")
        with Trainee(model, daemon.address, "a", require_syncer=False) as trainee:
            trainee.wait(lambda: re.search(told, str(refusal_of(trainee))), 20)
            with pytest.raises(RefusedError, match=told):
                diloco_plugin.attach(small_model(), sgd(model), daemon.address, name="b")
            assert daemon.err.count("ERROR") == 1
            problems = fetch(daemon.address)["problems"]
            assert any("first model cannot be saved" in problem for problem in problems)
            with pytest.raises(RefusedError, match=told):
                check(daemon.address)
            (small_disk / "ballast").unlink()
            trainee.wait(lambda: trainee.merged >= 2, 40)
        assert "there is room again" in daemon.err
        assert not fetch(daemon.address)["rounds"]["stuck"]
        daemon.send(signal.SIGTERM)
        assert daemon.wait() == 0


def refusal_of(trainee: Trainee) -> tuple[str, str] | None:
    core = trainee.learner._core if trainee.learner is not None else None
    return core.link.refusal if core is not None else None
