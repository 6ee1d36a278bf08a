"""What a state directory holds after any crash: reads only, and returns what is to be done.

The newest valid manifest and the journal after it name the newest version of every fragment. A file
that follows one of these and is intact is one whose journal record was lost: it is adopted, because
it may have been announced. Entries are chained by digests, so a foreign file never fits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from diloco_plugin.errors import DamagedError
from diloco_plugin.store.files import TEMPORARY
from diloco_plugin.store.formats import (
    EPOCH_FILE,
    JOURNAL_KIND,
    RUN_FILE,
    Entry,
    Life,
    Manifest,
    MergeRecord,
    RunFile,
    damaged,
    decode_entry,
    fragment_path,
    journal_path,
    manifest_path,
    numbers,
    read_sealed,
    versions,
)
from diloco_plugin.store.fragments import read_entry, read_fragment
from diloco_plugin.store.records import Scan, read_records

COMMIT: Final = "commit"


@dataclass
class Recovered:
    """What was found.

    Attributes:
        newest: the entry of the newest version of every fragment, adopted ones included.
        records: since the manifest, in order, adopted ones last.
        journal: number of the segment to go on with, 0 if there is none; `scan` is what it holds.
        adopted: to be appended to it.
        spoiled: manifests that are not needed and cannot be read: to be put aside.
        leftovers: files that nothing refers to: to be removed.
        whole: no announced version can have been taken back, as far as the files tell.
    """

    life: Life | None = None
    run: RunFile | None = None
    past: Any = None
    newest: dict[int, Entry] = field(default_factory=dict)
    records: list[MergeRecord] = field(default_factory=list)
    journal: int = 0
    scan: Scan | None = None
    adopted: list[Entry] = field(default_factory=list)
    spoiled: list[Path] = field(default_factory=list)
    leftovers: list[Path] = field(default_factory=list)
    whole: bool = True
    notes: list[str] = field(default_factory=list)


def recover(root: Path) -> Recovered:
    """Reads a state directory; the newest files of fragments are verified when they are loaded.

    Raises:
        DamagedError: an announced version, or what led to it, may be lost.
        ConfigError: a newer version of the package wrote it.
        OSError: something cannot be read.
    """
    found = Recovered()
    contents = [path for path in (root / "frag").glob("*/v*.safetensors") if path.is_file()]
    contents += [journal_path(root, number) for number in numbers(root, "journal")]
    contents += [path for path in [root / RUN_FILE] if path.is_file()]
    manifests = numbers(root, "manifest")
    if contents or manifests or (root / EPOCH_FILE).exists():
        found.life = read_sealed(root / EPOCH_FILE, Life)
    _temporary(root, found)
    if manifests:
        manifest = _manifest(root, manifests, found)
        found.run = read_sealed(root / RUN_FILE, RunFile)
        found.past = manifest.past
        found.newest = {entry.record.fragment: entry for entry in manifest.entries}
        _replay(root, manifest.number, found)
        _check_fragments(root, found)
    elif found.life is not None and found.life.started:
        raise damaged(manifest_path(root, 1), "it and all later ones are missing")
    elif contents:
        found.leftovers += contents
        found.notes.append(f"{root}: removed what is left of a start that was not finished.")
    return found


def _temporary(root: Path, found: Recovered) -> None:
    for pattern in ("*", "manifest/*", "frag/*/*"):
        found.leftovers += sorted(root.glob(pattern + TEMPORARY))
    if found.leftovers:
        found.notes.append(f"{root}: removed {len(found.leftovers)} unfinished files.")


def _manifest(root: Path, manifests: list[int], found: Recovered) -> Manifest:
    """The newest one that is valid. The journals since then must tell the rest."""
    newest: DamagedError | None = None
    for number in reversed(manifests):
        path = manifest_path(root, number)
        try:
            manifest = read_sealed(path, Manifest)
        except DamagedError as error:
            newest = newest or error
            found.spoiled.append(path)
            continue
        if manifest.number != number:
            raise damaged(path, f"it is manifest {manifest.number}")
        if found.spoiled:
            found.notes.append(
                f"{found.spoiled[0]} is damaged: went on from manifest {number} and the journals"
                " after it; the damaged file is in evidence/."
            )
        return manifest
    assert newest is not None
    raise newest


def _replay(root: Path, first: int, found: Recovered) -> None:
    segments = [number for number in numbers(root, "journal") if number >= first]
    if not segments or segments != list(range(first, segments[-1] + 1)):
        missing = next(n for n in range(first, first + len(segments) + 1) if n not in segments)
        raise damaged(journal_path(root, missing), "it is missing")
    for number in segments:
        path = journal_path(root, number)
        scan = read_records(path, JOURNAL_KIND)
        last = number == segments[-1]
        if last and scan.end == "torn" and not scan.valid_bytes and number > first:
            found.leftovers.append(path)
            found.notes.append(f"{path}: removed a journal without records that was not finished.")
            continue
        if scan.end == "damaged" or not scan.valid_bytes or (scan.end == "torn" and not last):
            raise damaged(
                path, scan.reason.replace(f"{path}: ", "").replace(str(path), "it").rstrip(".")
            )
        for payload in scan.payloads:
            _follow(decode_entry(payload, path), path, found)
        found.journal, found.scan = number, scan


def _follow(entry: Entry, path: Path, found: Recovered) -> None:
    record = entry.record
    before = found.newest.get(record.fragment)
    if before is None or entry.after != before.record.digest:
        raise damaged(
            path,
            f"version {record.version} of fragment {record.fragment} does not follow"
            f" version {before.record.version if before else 'none'}, the newest known",
        )
    found.newest[record.fragment] = entry
    found.records.append(record)


def _check_fragments(root: Path, found: Recovered) -> None:
    assert found.life is not None
    assert found.scan is not None
    rolls_back = found.life.durability != COMMIT and not found.life.clean and not found.spoiled
    for fragment, entry in sorted(found.newest.items()):
        version = entry.record.version
        path = fragment_path(root, fragment, version)
        there = read_entry(path).record
        if there != entry.record:
            raise damaged(path, f"digest {entry.record.digest} was expected, it has {there.digest}")
        later = [
            fragment_path(root, fragment, number)
            for number in versions(root, fragment)
            if number > version
        ]
        if rolls_back:
            found.leftovers += later
        else:
            _adopt(later, fragment, found)
    found.adopted.sort(key=lambda entry: (entry.record.epoch, entry.record.round))
    found.records += [entry.record for entry in found.adopted]
    _judge_tail(root, found)


def _adopt(later: list[Path], fragment: int, found: Recovered) -> None:
    """A file under its final name was whole when it got it, so each of these must be intact."""
    for path in later:
        entry, _ = read_fragment(path)
        before = found.newest[fragment].record
        if (entry.record.fragment, entry.after) != (fragment, before.digest):
            raise damaged(path, f"it does not follow version {before.version}, the newest known")
        found.newest[fragment] = entry
        found.adopted.append(entry)
        found.notes.append(
            f"{path}: adopted version {entry.record.version} of fragment {fragment}, whose record"
            " was not in the journal."
        )


def _judge_tail(root: Path, found: Recovered) -> None:
    assert found.scan is not None
    if found.scan.end == "torn":
        found.notes.append(f"{found.scan.reason} They were cut off.")
        # The file of a version is durable before its record is begun, so no crash leaves the torn
        # record alone: an announced version may be gone, and learners must not go on from it.
        found.whole = bool(found.adopted)
