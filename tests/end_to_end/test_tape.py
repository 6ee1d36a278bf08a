"""Real daemons record tapes that replay the same, whatever becomes of the daemon or of its disk."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_plugin.cli import main
from diloco_plugin.status import fetch
from diloco_plugin.tape.replay import replay
from tests.end_to_end.fleet import Trainee, small_model
from tests.end_to_end.processes import Daemon, Process
from tests.waiting import until

FLAGS = ("--sync-every", "4", "--fragments", "2", "--overlap", "1")


@pytest.mark.parametrize("state", [False, True])
def test_lives_of_a_daemon_with_real_learners_replay_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: bool
) -> None:
    tape = tmp_path / "tape"
    more = ("--state", str(tmp_path / "state")) if state else ()
    for life, end in enumerate((signal.SIGTERM, signal.SIGKILL, signal.SIGTERM), start=1):
        with (
            Daemon(*FLAGS, *more, "--tape", str(tape)) as daemon,
            Trainee(small_model(0), daemon.address, "a", close_timeout=1) as one,
            Trainee(small_model(0), daemon.address, "b", close_timeout=1, data=1) as two,
        ):
            one.wait(lambda: one.merged > 5 and two.merged > 5)
            one.wait(lambda: replay(tape, print).lives == life)  # noqa: B023
            daemon.send(end)
            assert daemon.wait() == (0 if end is signal.SIGTERM else -signal.SIGKILL)
            assert "tape" not in daemon.err
    assert main(["replay", str(tape)]) == 0
    said = capsys.readouterr().out.splitlines()
    found = re.fullmatch(r"the same: ([\d,]+) events, ([\d,]+) decisions, 3 lives.*", said[-1])
    assert found, said
    assert int(found[1].replace(",", "")) > 100
    assert said[:-1] in ([], ["000002.tape ends in the middle of a record, as after a kill"])


def test_a_tape_can_be_replayed_while_the_daemon_writes_it(tmp_path: Path) -> None:
    with (
        Daemon(*FLAGS, "--tape", str(tmp_path)) as daemon,
        Trainee(small_model(0), daemon.address, "a", close_timeout=1) as one,
    ):
        one.wait(lambda: one.merged > 5)
        until(lambda: list(tmp_path.iterdir()) and replay(tmp_path, print).decisions > 10)
        assert replay(tmp_path, print).difference is None


def test_a_full_disk_ends_the_tape_and_not_the_run(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=64k tmpfs {tmp_path}"
    if subprocess.run(["unshare", "-Urm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no small file system can be mounted here")
    syncer = f"{sys.executable} -m diloco_plugin.cli syncer --bind 'tcp://127.0.0.1:*'"
    command = f"{mount} && exec {syncer} --tape {tmp_path} {' '.join(FLAGS)}"
    program = "import os, sys; os.execvp('unshare', ['unshare', '-Urm', 'sh', '-c', sys.argv[1]])"
    with Process("-c", program, command) as daemon:
        found = until(lambda: re.search(r"learners join at (\S+)", daemon.err), 30)
        with Trainee(small_model(0), found[1], "a", close_timeout=5) as learner:
            learner.wait(lambda: "No space left" in daemon.err, 60)
            before = learner.merged
            learner.wait(lambda: learner.merged > before + 5)
            (problem,) = fetch(found[1])["problems"]
            assert "No space left" in problem
            assert problem.endswith("the run goes on")
        daemon.send(signal.SIGTERM)
        assert daemon.wait() == 0
        assert daemon.err.count("No space left") == 1
