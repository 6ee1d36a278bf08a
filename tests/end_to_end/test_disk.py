"""Disks that are full or fail, under a real syncer: what it says, and that it goes on."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_plugin.cli import main
from tests.end_to_end.fleet import Trainee, small_model
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
