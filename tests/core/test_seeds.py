"""Thousands of seeded runs of a small world: nothing that is promised breaks, and it goes on.

The world checks its invariants after every step; `scenarios` makes things happen, then peace. A
seed that fails can be run alone: `Scenario(seed).run()`.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.scenarios import Scenario
from tests.soak import SOAK

ROOT = Path(__file__).parent.parent.parent
SEEDS = 2000

FAULTS = {
    "start", "crash", "crash and restart", "rival", "cut", "cut silently", "mend", "blip",
    "connect anew", "pause", "freeze", "finish", "nan", "explode", "corrupt", "bar", "admit again",
    "kill syncer", "restart syncer", "restart syncer again", "older syncer", "stop syncer",
    "syncer sleeps", "die when durable", "disk full", "room again",
}  # fmt: skip
REACHED = {
    "fate merged", "fate late", "fate stale", "fate abandoned", "fate rejected: norm",
    "fate rejected: not finite", "fate rejected: corrupt", "fate rejected: consumed base",
    "fate rejected: merge not finite", "nothing: no steps", "nothing: already given",
    "admitted", "kept its model", "a member knocks again", "kept across a restart of the syncer",
    "durable, announced by the next life",
    "refused: name", "refused: fenced", "refused: quarantine", "refused: stopping",
    "refused: ended", "refused: full",
    "gone: silent", "gone: it has finished", "gone: its connection is gone",
    "gone: not admitted any more", "gone: a newer life of the same name replaced it",
    "RequestSeed", "Probe", "Caution", "Discard", "Drop", "CompleteRun",
    "commit", "commit retried", "heard CommitFailed", "a merge that is not finite",
    "closing round", "heard TransferFailed", "heard Vanished", "heard StateFailed",
    "handover begun", "handover restarted", "handover refused", "a donor has no state",
    "inner state: from", "inner state: fresh:",
    "merges have resumed", "the run has ended", "left", "gave up",
}  # fmt: skip


@pytest.fixture
def without_collections() -> Iterator[None]:
    """The garbage of a world is no cycle worth looking for while thousands of them run."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.timeout(600 * SOAK)
@pytest.mark.usefixtures("without_collections")
def test_whatever_breaks_nothing_promised_breaks_and_peace_brings_merges_back() -> None:
    reached, faults, events, seconds = Counter[str](), Counter[str](), 0, 0
    for seed in range(SEEDS * SOAK):
        scenario = Scenario(seed)
        try:
            scenario.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        reached += scenario.reached
        faults += scenario.faults
        events += scenario.watch.events
        seconds += scenario.world.now_ns // 1_000_000_000
        if seed % 100 == 99:
            gc.collect()
    print(
        f"{SEEDS * SOAK:,} seeds, {seconds / 3600:.1f} hours of virtual time, {events:,} events at"
        f" the syncer, {faults.total():,} faults; {dict(sorted(reached.items()))}"
    )
    assert faults.keys() == FAULTS
    assert reached.keys() >= REACHED, f"never reached: {sorted(REACHED - reached.keys())}"


def test_the_same_seed_makes_the_same_decisions_whatever_the_hash_seed() -> None:
    program = [sys.executable, "-m", "tests.core.scenarios", *map(str, range(20))]
    digests = []
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        digests.append(done.stdout.splitlines())
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 20
