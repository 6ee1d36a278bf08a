"""Makes a damaged state directory usable again, from what is intact and what learners still hold.

Nothing is lost silently: damaged files are kept in evidence/, an announced version is given up only
by `accept_loss`, and the lineage ends, so that every learner takes the model anew.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError
from torch import Tensor

from diloco_plugin.errors import ConfigError, DamagedError, StoreError
from diloco_plugin.store import examining, files
from diloco_plugin.store.directory import evidence_folder, lock_directory
from diloco_plugin.store.examining import FragmentState, Report
from diloco_plugin.store.formats import (
    EPOCH_FILE,
    JOURNAL_KIND,
    RUN_FILE,
    THETA,
    Entry,
    Life,
    Manifest,
    digest_of,
    digest_record,
    encode_entry,
    fragment_path,
    journal_path,
    manifest_path,
    numbers,
    seal,
    versions,
)
from diloco_plugin.store.fragments import read_fragment, write_fragment
from diloco_plugin.store.records import RecordFile

__all__ = ["FragmentState", "Report", "examine", "rebuild"]

Replacements = Mapping[int, Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class _Choice:
    """The version of a fragment to go on with, what to say of it, its values if they are new."""

    entry: Entry
    note: str = ""
    tensors: Mapping[str, Tensor] | None = None


def examine(directory: Path) -> Report:
    """What is damaged in a state directory that no syncer uses, and what of it is there.

    Raises:
        StateLockedError: a syncer uses it.
        ConfigError: there is no such directory, or a newer version of the package wrote it.
        StoreError: something cannot be read.
    """
    with _locked(directory):
        return examining.examine(directory)


def rebuild(
    directory: Path,
    replacements: Replacements,
    *,
    accept_loss: bool = False,
    past: Any | None = None,
) -> list[str]:
    """Writes a new manifest and journal, from which the next life goes on in a new lineage.

    Args:
        replacements: by fragment, fp32 values that learners hold, flat; those are taken whose
            digest is the `base_digest` wanted. Outer state comes from the version before, if any.
        accept_loss: give up announced versions that are nowhere; an older one is used.
        past: used when no manifest can be read.

    Returns:
        what was done, sentences.

    Raises:
        StateLockedError: a syncer uses the directory.
        ConfigError: there is no such directory, or a newer version of the package wrote it.
        DamagedError: something is missing, and what would help. Nothing was changed.
        StoreError: the disk is full or failed; it can be done again.
    """
    with _locked(directory):
        report = examining.examine(directory)
        if not report.problems:
            return ["Nothing is damaged."]
        manifest = _base(report, past)
        choices = _choose(report, replacements, accept_loss)
        notes = [choice.note for choice in choices if choice.note]
        if not notes:
            notes.append("Every fragment goes on from its newest version.")
        notes += [f"{path.name} was made anew." for path in _sealed_files(report)]
        notes.append(_keep_evidence(report, choices))
        _write(report, manifest, choices)
        return [*notes, "All learners take the model anew when the syncer starts."]


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    if not directory.is_dir():
        raise ConfigError(f"state: {directory} does not exist. Give the directory of --state.")
    lock = lock_directory(directory)
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StoreError(
            f"{directory}: the disk failed ({error}). Repair it again when it works."
        ) from error
    finally:
        os.close(lock)


def _base(report: Report, past: Any | None) -> Manifest:
    if report.run is None:
        raise DamagedError(
            f"{report.root}: run.json and its copy in epoch.json are lost. Nothing was changed. Put"
            " a copy of either back, or start a new run in another directory with --init."
        )
    if report.manifest:
        return report.manifest
    if past is None:
        raise DamagedError(
            f"{report.root}: no manifest can be read, so the run's past is lost. Nothing was"
            " changed. Put a copy of one back, or give a past."
        )
    return Manifest(number=0, entries=(), past=past)


def _choose(report: Report, replacements: Replacements, accept_loss: bool) -> list[_Choice]:
    choices, lost = [], []
    for state in report.fragments:
        choice = _choice(report, state, replacements.get(state.fragment, ()), accept_loss)
        if choice:
            choices.append(choice)
        else:
            wanted = f" with digest {state.base_digest}" if state.base_digest else ""
            older = f"version {state.held} is intact" if state.held >= 0 else "no version is intact"
            lost.append(f"fragment {state.fragment}: version {state.version}{wanted} ({older})")
    if lost:
        raise DamagedError(
            f"{report.root}: announced versions are lost: {'; '.join(lost)}. Nothing was changed."
            " Give the values from a learner that holds them, or accept the loss of those whose"
            " older version is intact."
        )
    return choices


def _choice(
    report: Report, state: FragmentState, given: Sequence[Tensor], accept_loss: bool
) -> _Choice | None:
    name = f"fragment {state.fragment}: version {state.version}"
    known = report.entries[state.fragment]
    if state.intact:
        return _Choice(known[state.version])
    for theta in given:
        if state.base_digest and digest_of(theta) == state.base_digest:
            tensors = {THETA: theta}
            outer = "without outer state"
            if 0 <= state.held < state.version:
                path = fragment_path(report.root, state.fragment, state.held)
                tensors = {**read_fragment(path)[1], THETA: theta}
                outer = f"with the outer state of version {state.held}"
            entry = known[state.version]
            digest = digest_record(entry.record, tensors)
            record = msgspec.structs.replace(entry.record, digest=digest)
            taken = msgspec.structs.replace(entry, record=record)
            return _Choice(taken, f"{name} was taken from a learner, {outer}.", tensors)
    if accept_loss and state.held >= 0:
        return _Choice(known[state.held], f"{name} is lost; version {state.held} is used.")
    return None


def _sealed_files(report: Report) -> list[Path]:
    """Those damaged files of which there is one and which is written again."""
    return [
        report.root / name
        for name in (RUN_FILE, EPOCH_FILE)
        if report.root / name in report.damaged
    ]


def _keep_evidence(report: Report, choices: list[_Choice]) -> str:
    """Copies what is damaged or given up, durably; the originals go once all is written."""
    for choice in choices:
        record = choice.entry.record
        for version in versions(report.root, record.fragment):
            path = fragment_path(report.root, record.fragment, version)
            if version > record.version and path not in report.damaged:
                report.damaged.append(path)
    kept = [path for path in report.damaged if path.is_file()]
    if not kept:
        return "No damaged file is left to keep."
    aside = evidence_folder(report.root)
    for path in kept:
        name = "-".join(path.relative_to(report.root).parts)
        files.replace(aside / name, path.read_bytes())
    files_are = "file is" if len(kept) == 1 else "files are"
    return f"{len(kept)} damaged {files_are} kept in {aside}."


def _write(report: Report, manifest: Manifest, choices: list[_Choice]) -> None:
    root = report.root
    known = [entry for entries in report.entries.values() for entry in entries.values()]
    epochs = [entry.record.epoch for entry in known] + [report.life.epoch if report.life else 1]
    # Not "commit": the next life begins a lineage, and removes newer files than are named here.
    life = Life(
        epoch=max(epochs),
        lineage=max(epochs),
        durability="repaired",
        started=True,
        start=report.life.start if report.life else {},
        run=report.run,
    )
    assert report.run is not None
    if root / RUN_FILE in report.damaged:
        files.replace(root / RUN_FILE, seal(report.run))
    files.replace(root / EPOCH_FILE, seal(life))
    for folder in ("manifest", "journal", "frag"):
        files.make_folder(root / folder)
    for choice in choices:
        if choice.tensors is not None:
            record = choice.entry.record
            path = fragment_path(root, record.fragment, record.version)
            write_fragment(path, choice.entry, choice.tensors)
    number = max(numbers(root, "manifest") + numbers(root, "journal"), default=0) + 1
    entries = manifest.entries or tuple(choice.entry for choice in choices)
    journal = RecordFile.create(journal_path(root, number), kind=JOURNAL_KIND)
    try:
        for entry in _journal(report, entries, choices):
            journal.append(encode_entry(entry))
        journal.sync()
    finally:
        journal.close()
    files.sync_folder(root / "journal")
    remade = Manifest(number=number, entries=entries, past=manifest.past)
    files.replace(manifest_path(root, number), seal(remade))
    written = {
        fragment_path(root, choice.entry.record.fragment, choice.entry.record.version)
        for choice in choices
    }
    for path in report.damaged:
        if path not in written and path not in _sealed_files(report):
            files.remove(path)


def _journal(report: Report, base: tuple[Entry, ...], choices: list[_Choice]) -> list[Entry]:
    """What leads from the manifest's versions to the chosen ones, chained anew."""
    before = {entry.record.fragment: entry.record for entry in base}
    steps = []
    for choice in choices:
        chosen = choice.entry.record
        known = report.entries[chosen.fragment]
        start = before[chosen.fragment].version
        steps += [known[v].record for v in sorted(known) if start < v < chosen.version]
        if chosen != before[chosen.fragment]:
            steps.append(chosen)
    steps.sort(key=lambda record: (record.epoch, record.round))
    chained = []
    for record in steps:
        chained.append(Entry(record=record, after=before[record.fragment].digest))
        before[record.fragment] = record
    return chained
