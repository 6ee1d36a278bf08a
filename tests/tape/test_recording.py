"""What a recorder leaves on disk, and that it is never in the way."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from diloco_plugin.core import events as ev
from diloco_plugin.core.parameters import Parameters
from diloco_plugin.core.syncer import SyncerCore
from diloco_plugin.errors import ConfigError
from diloco_plugin.store import records
from diloco_plugin.store.records import read_records
from diloco_plugin.tape import recording
from diloco_plugin.tape.recording import Recorder
from diloco_plugin.tape.replay import replay
from diloco_plugin.tape.segments import number_of, read_segment, segment_paths
from tests.tape.worlds import eventful
from tests.waiting import until

EVENT = ev.Ticked(now_ns=1)


def record(directory: Path, seed: int, turns: int = 40, **options: Any) -> None:
    """A tape of an eventful world; records end where they are full, and not when a second is."""
    recorder = Recorder(directory, **{"flush_seconds": 1e6, **options})
    eventful(seed, turns, decide=recorder.step)
    recorder.close()
    assert not recorder.trouble


def quiet(line: str) -> None:
    raise AssertionError(line)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_tape_of_several_lives_replays_the_same(tmp_path: Path, seed: int) -> None:
    record(tmp_path, seed)
    result = replay(tmp_path, quiet)
    headers = [read_segment(path).header() for path in segment_paths(tmp_path)]
    assert result.difference is None
    assert result.lives == len({header.epoch for header in headers}) == len(headers)
    assert result.events > 500
    assert result.decisions > 50


def test_the_same_run_gives_the_same_tape_whatever_the_hash_seed() -> None:
    digests = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.tape.test_recording"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout)
    assert len(digests) == 1


def test_a_directory_stays_bounded_and_every_segment_that_is_kept_replays(tmp_path: Path) -> None:
    segment, total = 200_000, 900_000
    recorder = Recorder(tmp_path, segment_bytes=segment, total_bytes=total, flush_seconds=0.01)
    sizes: list[int] = []

    def decide(core: SyncerCore, event: ev.SyncerEvent) -> Any:
        if recorder._full:
            sizes.append(sum(path.stat().st_size for path in segment_paths(tmp_path)))
        # a world has no time: what the writer has not written yet comes on top of the bound
        until(lambda: len(recorder._waiting) < 100, 60)
        return recorder.step(core, event)

    eventful(11, 80, decide=decide)
    recorder.close()
    paths = segment_paths(tmp_path)
    assert (number_of(paths[0]) or 0) > 1, "nothing was dropped"
    assert max(sizes) < total + segment
    assert len(paths) >= 3
    assert replay(tmp_path, quiet).difference is None
    for path in paths:
        assert replay(path, quiet).difference is None


def test_segments_of_one_life_follow_each_other_without_a_seam(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    core = SyncerCore(Parameters(), epoch=7)
    recorder.step(core, EVENT)
    recorder._full = True
    recorder.step(core, EVENT)
    recorder.close()
    assert len(segment_paths(tmp_path)) == 2
    result = replay(tmp_path, quiet)
    assert (result.events, result.lives, result.difference) == (2, 1, None)


def test_the_next_life_goes_on_after_the_newest_segment_and_touches_no_other_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "notes.tape").write_text("mine")
    (tmp_path / "000041.tape").write_bytes(b"")
    recorder = Recorder(tmp_path, segment_bytes=10, total_bytes=0)
    recorder.step(SyncerCore(Parameters(), epoch=1), EVENT)
    recorder.close()
    assert sorted(os.listdir(tmp_path)) == ["000042.tape", "notes.tape"]


def test_steps_are_on_disk_soon_even_when_nothing_follows(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, flush_seconds=0.01)
    recorder.step(SyncerCore(Parameters(), epoch=1), EVENT)
    # it may be read in the middle of a write
    until(lambda: segment_paths(tmp_path) and replay(tmp_path, print).events == 1)
    recorder.close()


def test_what_the_core_raises_is_the_last_thing_on_the_tape_and_is_raised(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    core = SyncerCore(Parameters(), epoch=1)
    with pytest.raises(KeyError):
        recorder.step(core, ev.MergeDone(now_ns=1, round=5, ok=True))
    recorder.close()
    (step,) = read_segment(tmp_path / "000001.tape").steps()
    assert step.outcome == "KeyError: 5"
    assert replay(tmp_path, quiet).difference is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failing_disk_ends_the_tape_with_one_warning_and_not_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    whole = records._write

    def write(fd: int, data: bytes) -> None:
        whole(fd, data[: len(data) // 2])
        if os.fstat(fd).st_size > 100_000:
            raise OSError(number, os.strerror(number))
        whole(fd, data[len(data) // 2 :])

    monkeypatch.setattr(records, "_write", write)
    recorder = Recorder(tmp_path, flush_seconds=0.01)
    stepped = 0

    def decide(core: SyncerCore, event: ev.SyncerEvent) -> Any:
        nonlocal stepped
        stepped += 1
        until(lambda: len(recorder._waiting) < 1000, 60)
        return recorder.step(core, event)

    eventful(2, 60, decide=decide)
    recorder.close()
    assert os.strerror(number) in recorder.trouble
    assert len([r for r in caplog.records if "has ended" in r.message]) == 1
    result = replay(tmp_path, quiet)  # what was written before is whole
    assert result.difference is None
    assert 0 < result.events < stepped


def test_a_disk_that_hangs_ends_the_tape_and_holds_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(records, "_write", lambda fd, data: hangs.wait(60))
    monkeypatch.setattr(recording, "WAITING_MAX", 1000)
    monkeypatch.setattr(recording, "CLOSE_SECONDS", 0.01)
    recorder = Recorder(tmp_path)
    core = SyncerCore(Parameters(), epoch=1)
    for _ in range(2000):
        recorder.step(core, EVENT)
    assert "too slow" in recorder.trouble
    assert not recorder._waiting
    recorder.close()
    hangs.set()


def test_a_directory_that_cannot_be_made_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written to"):
        Recorder(tmp_path / "file" / "tape")


def test_a_core_that_cannot_be_frozen_costs_the_tape_only(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    core = SyncerCore(Parameters(), epoch=1)
    core.more = 1  # type: ignore[attr-defined]
    assert recorder.step(core, EVENT) == ()
    recorder.close()
    assert "grown" in recorder.trouble


if __name__ == "__main__":  # one process of the test with two hash seeds
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for seed in range(3):
            record(Path(folder), seed)
        for path in segment_paths(Path(folder)):
            for payload in read_records(path, "tape").payloads:
                print(hashlib.sha256(payload).hexdigest())
