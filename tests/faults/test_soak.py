"""A syncer that has merged for long needs no more memory, descriptors or disk than before."""

from __future__ import annotations

import signal
import statistics
from pathlib import Path

import psutil
import pytest

from diloco_plugin.net.keys import make_learner_keys, make_syncer_keys
from tests.end_to_end.fleet import Trainee, small_model
from tests.end_to_end.processes import free_ports
from tests.faults.ledger import Ear
from tests.faults.nursery import Nursery
from tests.soak import SOAK

MERGES = 600 * SOAK
WARM_UP = 300
SAMPLES = 12
MIB = 2**20
FLAGS = ("--sync-every", "4", "--fragments", "4", "--overlap", "2")


def slope(x: list[int], y: list[int]) -> float:
    """Of the line through the points that is right in the median (Theil and Sen)."""
    pairs = [(i, j) for i in range(len(x)) for j in range(i) if x[i] > x[j]]
    return statistics.median((y[i] - y[j]) / (x[i] - x[j]) for i, j in pairs)


def size(folder: Path) -> int:
    """Bytes of all files; those that go meanwhile do not count."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


@pytest.mark.timeout(180 + 120 * SOAK)
def test_memory_descriptors_and_disk_stay_as_they_are_over_many_merges(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ear = Ear(monkeypatch)
    keys, state, tape = (tmp_path / name for name in ("keys", "state", "tape"))
    make_syncer_keys(keys)
    for name in "ab":
        make_learner_keys(keys, name)
    bind = f"tcp://127.0.0.1:{free_ports()}"
    files = ("--keys", str(keys), "--state", str(state), "--tape", str(tape))
    with nursery.start(bind, *FLAGS, *files) as syncer:
        syncer.ready()
        trainees = [Trainee(small_model(), bind, name, keys=str(keys)) for name in "ab"]
        process = psutil.Process(syncer.pid)
        merges, rss, descriptors, disk = [], [], [], []
        ear.hears(trainees[0], WARM_UP, 120)
        for _ in range(SAMPLES):
            ear.hears(trainees[0], MERGES // SAMPLES, 30 + 10 * SOAK)
            merges.append(ear.total())
            rss.append(process.memory_info().rss)
            descriptors.append(process.num_fds())
            disk.append(size(state))
        for trainee in trainees:
            trainee.finish(60)
        syncer.send(signal.SIGTERM)
        assert syncer.wait() == 0
    per_10k = 10_000 * slope(merges, rss)
    print(
        f"{merges[-1]} merges: RSS {rss[0] / MIB:.1f} to {rss[-1] / MIB:.1f} MiB"
        f" ({per_10k / MIB:+.2f} MiB per 10,000 merges), descriptors {min(descriptors)} to"
        f" {max(descriptors)}, state at most {max(disk) / MIB:.2f} MiB, tape {size(tape)} bytes"
    )
    assert max(rss) - rss[0] < 4 * MIB
    if SOAK >= 10:  # before, the pages of one allocation look like a slope
        assert per_10k < MIB
    # a fragment's file or the journal may be open for a moment
    assert max(descriptors) - statistics.median_low(descriptors) <= 2
    assert max(disk) < 4 * MIB
    assert all(len(list(folder.iterdir())) <= 3 for folder in (state / "frag").iterdir())
    assert all(len(list((state / name).iterdir())) <= 3 for name in ("manifest", "journal"))
