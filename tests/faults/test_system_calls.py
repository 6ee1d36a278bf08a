"""The kernel refuses, or ends, a call of a real syncer: it stops, waits or starts again unharmed.

strace makes a call fail, or kills the process in it. It counts calls by thread: the third fsync is
one of the start or one of the third commit, whichever comes first.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from diloco_plugin.status import fetch
from diloco_plugin.store.formats import journal_path, numbers
from tests.end_to_end.fleet import Trainee, small_model
from tests.end_to_end.processes import free_ports
from tests.faults.ledger import Ear, Ledger
from tests.faults.nursery import Nursery, Syncer
from tests.soak import SOAK

FLAGS = ("--sync-every", "4", "--fragments", "4", "--overlap", "2")
PATIENCE = 60.0
DISK_FAILED = 74

#: Calls a syncer makes at its start and in every commit.
NTH = {"fsync": (1, 14), "rename": (4,), "fdatasync": (3,)}
if SOAK > 1:
    NTH = {call: tuple(range(1, 1 + SOAK)) for call in NTH}
DEADLY = [(call, n, what) for what in ("EIO", "KILL") for call in NTH for n in NTH[call]]


def strace_works() -> bool:
    try:
        return not subprocess.run(["strace", "-qq", "-e", "trace=none", "true"]).returncode
    except OSError:
        return False


pytestmark = pytest.mark.skipif(
    not strace_works(), reason="needs strace; tests/store fails the same calls inside the process"
)


def fault(call: str, inject: str, *paths: Path) -> list[str]:
    """Words for strace; `paths`: the only files that it is about."""
    only = [word for path in paths for word in ("-P", str(path))]
    return ["-e", f"trace={call}", "-e", f"inject={call}:{inject}", *only]


class Run:
    """One run, with one learner that trains through everything that happens to its syncer."""

    def __init__(self, nursery: Nursery, state: Path, patch: pytest.MonkeyPatch) -> None:
        self.nursery = nursery
        self.ear, self.ledger = Ear(patch), Ledger(state)
        self.bind = f"tcp://127.0.0.1:{free_ports()}"
        self.flags = ("--state", str(state), *FLAGS)
        self.trainee: Trainee | None = None

    def start(self, strace: Sequence[str] = ()) -> Syncer:
        return self.nursery.start(self.bind, *self.flags, strace=strace)

    def begin(self) -> None:
        """The model is brought, and merged a few times."""
        with self.start() as syncer:
            syncer.ready()
            self.trainee = Trainee(small_model(), self.bind, "a", step_seconds=0.002)
            self.merge(4)
            syncer.send(signal.SIGTERM)
            assert syncer.wait() == 0
        self.ledger.look()

    def merge(self, count: int) -> None:
        assert self.trainee is not None
        self.ear.hears(self.trainee, count, PATIENCE)

    def dies(self, strace: Sequence[str]) -> int:
        """The exit code of a syncer that meets its fault, at its start or later."""
        with self.start(strace) as syncer:
            assert self.trainee is not None
            self.trainee.wait(lambda: syncer.code is not None, PATIENCE, f"it dies of {strace}")
            self.ledger.look()
            self.ledger.check(self.ear)
            return syncer.wait()

    def end(self) -> None:
        """A syncer without a fault goes on with all that was announced."""
        with self.start() as syncer:
            syncer.ready()
            self.ear.check(self.bind)
            self.merge(4)
            assert self.trainee is not None
            self.trainee.finish(PATIENCE)
            syncer.send(signal.SIGTERM)
            assert syncer.wait() == 0
        self.ledger.look()
        self.ledger.check(self.ear)


@pytest.fixture
def run(nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    run = Run(nursery, tmp_path / "state", monkeypatch)
    run.begin()
    yield run
    run.end()


@pytest.mark.timeout(60 + 40 * len(DEADLY))
def test_a_disk_that_fails_stops_the_syncer_and_a_crash_in_any_call_takes_nothing_back(
    run: Run,
) -> None:
    for call, n, what in DEADLY:
        inject = f"signal=KILL:when={n}" if what == "KILL" else f"error=EIO:when={n}"
        code = run.dies(fault(call, inject))
        assert code == (-signal.SIGKILL if what == "KILL" else DISK_FAILED), (call, n, what)


def test_a_merge_whose_sync_failed_was_never_announced(run: Run, tmp_path: Path) -> None:
    state = tmp_path / "state"
    journal = journal_path(state, numbers(state, "journal")[-1])
    for call, n in (("fdatasync", 4), ("write", 2)):
        assert run.dies(fault(call, f"error=EIO:when={n}", journal)) == DISK_FAILED
        if call == "fdatasync":  # the record is there, and may or may not survive a power cut
            newest = max(run.ledger.records.values(), key=lambda record: record.round)
            assert run.ear.announced[newest.fragment] < newest.version


def test_on_a_full_disk_a_syncer_says_so_and_goes_on_when_there_is_room(
    run: Run, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    journal = journal_path(state, numbers(state, "journal")[-1])
    for call, files in (("write", [journal]), ("rename", [])):
        with run.start(fault(call, "error=ENOSPC:when=3..5", *files)) as syncer:
            syncer.ready()
            assert run.trainee is not None
            run.trainee.wait(lambda: fetch(run.bind)["rounds"]["stuck"], PATIENCE, "it is stuck")
            assert any("room" in problem for problem in fetch(run.bind)["problems"])
            run.merge(6)
            assert not run.ear.check(run.bind)["rounds"]["stuck"]
            syncer.kill()
        run.ledger.look()
        run.ledger.check(run.ear)
