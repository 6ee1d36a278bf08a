"""What learners were told, what is on disk, and whether the two agree."""

from __future__ import annotations

import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from diloco_plugin.core import events as ev
from diloco_plugin.core.learner import LearnerCore
from diloco_plugin.status import fetch
from diloco_plugin.store.formats import (
    JOURNAL_KIND,
    MergeRecord,
    decode_entry,
    journal_path,
    numbers,
)
from diloco_plugin.store.records import read_records
from tests.end_to_end.fleet import Trainee


class Ear:
    """Everything that the syncer tells the learners of this process.

    Attributes:
        announced: by fragment, the newest version that any learner was told.
        epochs: of the syncers that let somebody in, in order.
        merged: (incarnation, round) of the pushes that were told to be merged.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.announced: dict[int, int] = defaultdict(lambda: -1)
        self.epochs: list[int] = []
        self.merged: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        step = LearnerCore.step

        def listen(core: LearnerCore, event: ev.LearnerEvent) -> Any:
            with self._lock:
                self._hear(core, event)
            return step(core, event)

        patch.setattr(LearnerCore, "step", listen)

    def _hear(self, core: LearnerCore, event: ev.LearnerEvent) -> None:
        match event:
            case ev.Announced():
                newest = max(self.announced[event.fragment], event.version)
                self.announced[event.fragment] = newest
            case ev.Welcomed():
                self.epochs.append(event.epoch)
            case ev.FateTold() if event.fate == "merged":
                self.merged.add((core.link._incarnation, event.round))

    def total(self) -> int:
        """Grows with every announced merge."""
        with self._lock:
            return sum(self.announced.values())

    def hears(self, trainee: Trainee, merges: int, seconds: float) -> None:
        """Wait, while it trains, until so many more merges were announced."""
        goal = self.total() + merges
        trainee.wait(lambda: self.total() >= goal, seconds, f"{merges} more merges")

    def check(self, address: str) -> dict[str, Any]:
        """Every version announced until now is in the status of the syncer, which is given."""
        with self._lock:
            announced = dict(self.announced)
        status = fetch(address)
        versions = [fragment["version"] for fragment in status["fragments"]]
        for fragment, version in announced.items():
            assert versions[fragment] >= version, (
                f"fragment {fragment}: version {version} was announced,"
                f" but the syncer goes on from {versions[fragment]}"
            )
        return status


class Ledger:
    """All merges of a run that ever were in its journals. Look often: old journals go."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.records: dict[tuple[int, int], MergeRecord] = {}

    def look(self) -> None:
        """Read the journals; their syncer may be at work."""
        for number in numbers(self.state, "journal"):
            path = journal_path(self.state, number)
            try:
                payloads = read_records(path, JOURNAL_KIND).payloads
            except FileNotFoundError:
                continue
            for payload in payloads:
                record = decode_entry(payload, path).record
                known = self.records.setdefault((record.fragment, record.version), record)
                assert known == record, "history was rewritten"

    def check(self, ear: Ear) -> None:
        """No merge is lost, none happened twice, and no push is in two of them."""
        by_fragment: dict[int, list[MergeRecord]] = defaultdict(list)
        for _, record in sorted(self.records.items()):
            by_fragment[record.fragment].append(record)
        for fragment, records in by_fragment.items():
            versions = [record.version for record in records]
            assert versions == list(range(1, len(records) + 1)), f"fragment {fragment}: {versions}"
            assert versions[-1] >= ear.announced[fragment]
            epochs = [record.epoch for record in records]
            assert epochs == sorted(epochs)
            bases: dict[str, int] = {}
            for record in records:
                for push in record.contributions:
                    before = bases.get(push.incarnation, -1)
                    assert before < push.base < record.version, "a push was merged twice"
                    bases[push.incarnation] = push.base
        rounds = [record.round for record in self.records.values()]
        assert len(rounds) == len(set(rounds)), "a round was merged twice"
        assert ear.merged <= self.pushes(), "a push was told to be merged and is not"
        assert ear.epochs
        assert set(ear.epochs) >= {record.epoch for record in self.records.values()}

    def pushes(self) -> set[tuple[str, int]]:
        """(incarnation, round) of everything that was merged."""
        return {
            (push.incarnation, record.round)
            for record in self.records.values()
            for push in record.contributions
        }
