"""What is damaged in a state directory, and what of it is still there. Only reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from diloco_plugin.errors import ConfigError, DamagedError
from diloco_plugin.store.formats import (
    EPOCH_FILE,
    JOURNAL_KIND,
    RUN_FILE,
    Entry,
    Life,
    Manifest,
    RunFile,
    decode_entry,
    fragment_path,
    journal_path,
    manifest_path,
    numbers,
    read_sealed,
    versions,
)
from diloco_plugin.store.fragments import read_fragment
from diloco_plugin.store.records import read_records, salvage_records
from diloco_plugin.store.recovery import recover

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class FragmentState:
    """What is there of one fragment.

    Attributes:
        version: the newest that may have been announced, -1 when no trace of any is left.
        base_digest: of the values that learners hold of it, "" when its record is lost.
        intact: its file is.
        held: the newest version whose file is intact, -1 if there is none.
    """

    fragment: int
    version: int
    base_digest: str
    intact: bool
    held: int


@dataclass
class Report:
    """What was found.

    Attributes:
        problems: one sentence for each; none: the syncer can start.
        run: from run.json, or its copy in epoch.json.
        damaged: the files that are not what was written there.
        manifest: the newest that can be read; without one its `past` is lost.
        entries: by fragment and version, all that is known for sure.
        intact: (fragment, version) of the files that are.
    """

    root: Path
    problems: list[str] = field(default_factory=list)
    damaged: list[Path] = field(default_factory=list)
    life: Life | None = None
    run: RunFile | None = None
    manifest: Manifest | None = None
    fragments: list[FragmentState] = field(default_factory=list)
    entries: dict[int, dict[int, Entry]] = field(default_factory=dict)
    intact: set[tuple[int, int]] = field(default_factory=set)

    def note(self, path: Path, error: DamagedError) -> None:
        """The file at `path` is damaged."""
        self.damaged.append(path)
        self.say(error)

    def say(self, error: DamagedError) -> None:
        """One more problem, unless it is known."""
        sentence = str(error).partition(" Nothing was changed.")[0]
        if sentence not in self.problems:
            self.problems.append(sentence)


def examine(directory: Path) -> Report:
    """Reads everything, to the last byte of the last fragment. Hold the lock of the directory.

    Raises:
        ConfigError: a newer version of the package wrote it, or there is no such directory.
        OSError: something cannot be read.
    """
    if not (directory / EPOCH_FILE).exists() and not numbers(directory, "frag"):
        raise ConfigError(f"state: {directory} holds no run. Give the directory of --state.")
    report = Report(directory)
    report.life = _sealed(report, directory / EPOCH_FILE, Life)
    report.run = _sealed(report, directory / RUN_FILE, RunFile)
    if report.run is None and report.life is not None:
        report.run = report.life.run
    manifests = numbers(directory, "manifest")
    if report.life and not report.life.started and not manifests:
        raise ConfigError(
            f"state: no run has begun in {directory}, so there is nothing to repair. Start the"
            " syncer with it."
        )
    for number in reversed(manifests):
        report.manifest = _sealed(report, manifest_path(directory, number), Manifest)
        if report.manifest:
            break
    for entry in _known(report):
        report.entries.setdefault(entry.record.fragment, {})[entry.record.version] = entry
    count = report.run.fragments if report.run else 0
    for fragment in sorted({*range(count), *report.entries, *numbers(directory, "frag")}):
        report.fragments.append(_fragment(report, fragment))
    try:
        newest = recover(directory).newest
    except DamagedError as error:
        report.say(error)
    else:
        if all((f, entry.record.version) in report.intact for f, entry in newest.items()):
            # A newest manifest that is not needed, a torn end: recovery gets along with these.
            report.problems.clear()
    return report


def _sealed(report: Report, path: Path, kind: type[T]) -> T | None:
    try:
        return read_sealed(path, kind)
    except DamagedError as error:
        report.note(path, error)
        return None


def _known(report: Report) -> Iterator[Entry]:
    """The entries of the newest manifest and of the journals after it, whatever their order."""
    first = 0
    if report.manifest:
        first = report.manifest.number
        yield from report.manifest.entries
    for number in numbers(report.root, "journal"):
        path = journal_path(report.root, number)
        if number < first:
            continue
        if read_records(path, JOURNAL_KIND).end == "damaged":
            report.damaged.append(path)
        for payload in salvage_records(path, JOURNAL_KIND):
            try:
                yield decode_entry(payload, path)
            except DamagedError as error:
                report.note(path, error)


def _fragment(report: Report, fragment: int) -> FragmentState:
    known = report.entries.setdefault(fragment, {})
    there, spoiled = [], []
    for version in versions(report.root, fragment):
        path = fragment_path(report.root, fragment, version)
        try:
            entry, _ = read_fragment(path)
        except DamagedError as error:
            spoiled.append(version)
            report.note(path, error)
            continue
        if known.setdefault(version, entry).record == entry.record:
            there.append(version)
            report.intact.add((fragment, version))
        else:
            spoiled.append(version)
            report.damaged.append(path)
    newest = max([*known, *spoiled], default=-1)
    return FragmentState(
        fragment=fragment,
        version=newest,
        base_digest=known[newest].record.base_digest if newest in known else "",
        intact=newest in there,
        held=max(there, default=-1),
    )
