"""The state of a syncer on disk: what `commit` returned from is there after any crash.

Not thread-safe: one thread at a time may call.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from safetensors import SafetensorError
from torch import Tensor

from diloco_plugin.errors import NoRoomError, StoreError
from diloco_plugin.store import files
from diloco_plugin.store.directory import evidence_folder, lock_directory
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
from diloco_plugin.store.recovery import COMMIT, Recovered, recover

_KEPT = 2


class Store:
    """The open state directory of a run; `open` makes one.

    Attributes:
        epoch: number of this life, larger than that of any life before, durable.
        lineage: the oldest epoch whose announced versions are all durable.
        run: what is trained; None when nothing was ever started here.
        past: the tree of the newest manifest, as JSON gives it back.
        records: of the merges after that manifest, in order. Only of earlier lives.
        notes: what was repaired, sentences for the log.
        start: what `note_start` was told in the last life that told it anything.
        clean: the last life was closed with everything written.
    """

    def __init__(self, root: Path, lock: int, found: Recovered) -> None:
        self._root = root
        self._lock = lock
        self._newest = dict(found.newest)
        self._journal: RecordFile | None = None
        self._failure = ""
        self.run = found.run
        self.past = found.past
        self.records = list(found.records)
        self.notes = list(found.notes)
        self.start: Mapping[str, Any] = found.life.start if found.life else {}
        self.clean = found.life is not None and found.life.clean

    @classmethod
    def open(cls, directory: Path, *, durability: str, now_ms: int) -> Store:
        """Locks the directory, repairs what a crash left, and begins a new epoch there.

        Args:
            directory: is made when it is not there.
            durability: "commit" when every version is committed before it is announced.
            now_ms: wall-clock time in milliseconds; epochs follow it, but never go back.

        Raises:
            StateLockedError: another process uses it.
            DamagedError: what was announced may be lost. Nothing was changed.
            ConfigError: it cannot be used at all, or a newer version wrote it.
            NoRoomError, StoreError: the disk is full, or fails.
        """
        lock = lock_directory(directory)
        store: Store | None = None
        try:
            found = recover(directory)
            store = cls(directory, lock, found)
            store._clear(found)
            if found.whole:
                store._mend(found)
                store._begin(found, durability, now_ms)
            else:
                # What is lost must be known to be lost before its last trace is cut off.
                store._begin(found, durability, now_ms)
                store._mend(found)
        except BaseException as error:
            if store:
                store.close(clean=False)
            else:
                os.close(lock)
            _raise_ours(error, directory, "opened")
        return store

    def _clear(self, found: Recovered) -> None:
        for path in found.leftovers:
            files.remove(path)
        for folder in sorted({path.parent for path in found.leftovers}):
            files.sync_folder(folder)
        for name in ("manifest", "journal", "frag", "evidence"):
            files.make_folder(self._root / name)

    def _mend(self, found: Recovered) -> None:
        if found.scan is None:
            return
        self._journal = RecordFile.reopen(journal_path(self._root, found.journal), found.scan)
        for entry in found.adopted:
            self._journal.append(encode_entry(entry))
        self._sync(self._journal)
        if found.spoiled:
            aside = evidence_folder(self._root)
            for path in found.spoiled:
                os.rename(path, aside / path.name)
            files.sync_folder(aside)
            files.sync_folder(self._root / "manifest")

    def _begin(self, found: Recovered, durability: str, now_ms: int) -> None:
        before = found.life
        self.epoch = max(before.epoch + 1 if before else 1, now_ms)
        self.lineage = self.epoch
        if before and found.run and found.whole and (before.durability == COMMIT or before.clean):
            self.lineage = before.lineage
        self._write_life(
            Life(
                epoch=self.epoch,
                lineage=self.lineage,
                durability=durability,
                started=found.run is not None,
                start=dict(self.start),
                run=found.run,
            )
        )

    def _write_life(self, life: Life) -> None:
        files.replace(self._root / EPOCH_FILE, seal(life))
        self._life = life

    def note_start(self, start: Mapping[str, Any]) -> None:
        """How this life was started, for the next one to see. Raises as `commit` does."""
        if start != self._life.start:
            self._change_life(start=dict(start))

    def _change_life(self, **changes: Any) -> None:
        with self._undoing("a note of this life") as undo:
            undo.append(lambda: files.remove(files.temporary(self._root / EPOCH_FILE)))
            self._write_life(msgspec.structs.replace(self._life, **changes))

    def checkpoint(
        self,
        run: RunFile,
        past: Any,
        fragments: Iterable[tuple[MergeRecord, Mapping[str, Tensor]]],
    ) -> None:
        """Everything in one place, durably: the run, `past`, and the newest of every fragment.

        Args:
            past: any tree that JSON holds; comes back with string keys, lists and plain objects.
            fragments: those whose newest version was not committed. Versions that are there
                already are not written again. The first checkpoint must bring every fragment.

        Raises:
            NoRoomError: the disk is full; the last checkpoint and all commits still hold.
            StoreError: the disk failed; the store cannot be used again.
        """
        newest = dict(self._newest)
        number = self._next_number()
        changed = run != self.run
        with self._undoing("a checkpoint") as undo:
            undo.append(lambda: files.remove(files.temporary(self._root / RUN_FILE)))
            if changed:
                files.prepare(self._root / RUN_FILE, seal(run))
            for record, tensors in fragments:
                known = newest.get(record.fragment)
                if known is None or msgspec.structs.replace(known.record, digest="") != record:
                    newest[record.fragment] = self._write(record, tensors, undo)
            if sorted(newest) != list(range(run.fragments)):
                raise ValueError(f"{len(newest)} of {run.fragments} fragments were ever stored.")
            journal = self._new_journal(number, undo)
            entries = tuple(newest[fragment] for fragment in sorted(newest))
            path = manifest_path(self._root, number)
            undo.append(lambda: files.remove(files.temporary(path)))
            files.prepare(path, seal(Manifest(number=number, entries=entries, past=past)))
            if changed:
                files.publish(self._root / RUN_FILE)
            files.publish(path)
            if self._journal:
                self._journal.close()
            self._journal, self._newest, self.run = journal, newest, run
        self._collect(newest)
        if not self._life.started or self._life.run != run:
            # Only against the loss of other files later, and the next life makes up for it.
            with contextlib.suppress(NoRoomError):
                self._change_life(started=True, run=run)

    def commit(self, record: MergeRecord, tensors: Mapping[str, Tensor]) -> MergeRecord:
        """A new version of a fragment, durable on return.

        Args:
            record: its version is larger than any before.
            tensors: contiguous CPU tensors; they must not change meanwhile.

        Returns:
            the record with its digest.

        Raises:
            NoRoomError: the disk is full; everything is as before.
            StoreError: the disk failed; the store cannot be used again.
        """
        if self._journal is None or record.fragment not in self._newest:
            raise ValueError(f"fragment {record.fragment} was never in a checkpoint.")
        journal = self._journal
        with self._undoing("a commit") as undo:
            entry = self._write(record, tensors, undo)
            # The record must be gone before its file is.
            undo.append(journal.sync)
            journal.append(encode_entry(entry))
            undo.clear()
            self._sync(journal)
        self._newest[record.fragment] = entry
        self._collect((record.fragment,))
        return entry.record

    def load(self, fragment: int) -> tuple[MergeRecord, dict[str, Tensor]]:
        """The newest version of a fragment, verified.

        Raises:
            DamagedError: its file is not what was written.
            StoreError: it cannot be read.
        """
        expected = self._newest[fragment].record
        path = fragment_path(self._root, fragment, expected.version)
        try:
            entry, tensors = read_fragment(path)
        except OSError as error:
            raise StoreError(f"{path} cannot be read ({error}).") from error
        if entry.record != expected:
            raise damaged(path, f"digest {expected.digest} was expected, not {entry.record.digest}")
        return expected, tensors

    def free_bytes(self) -> int:
        """Room on the disk for this process."""
        room = os.statvfs(self._root)
        return room.f_bavail * room.f_frsize

    def close(self, *, clean: bool) -> None:
        """Lets the directory go, whatever is raised. A second call does nothing.

        Args:
            clean: the newest version of every fragment that was announced is stored.
        """
        if self._lock < 0:
            return
        try:
            if clean and not self._failure:
                self._change_life(clean=True)
        finally:
            self._failure = self._failure or "it is closed"
            if self._journal:
                self._journal.close()
            os.close(self._lock)
            self._lock = -1

    def _write(
        self, record: MergeRecord, tensors: Mapping[str, Tensor], undo: list[Callable[[], None]]
    ) -> Entry:
        known = self._newest.get(record.fragment)
        if known and record.version <= known.record.version:
            raise ValueError(
                f"version {record.version} of fragment {record.fragment} does not follow"
                f" version {known.record.version}."
            )
        digest = digest_record(record, tensors)
        after = known.record.digest if known else ""
        entry = Entry(record=msgspec.structs.replace(record, digest=digest), after=after)
        if not all(math.isfinite(push.norm) for push in record.contributions):
            raise ValueError(f"{record} has a norm that JSON cannot hold.")
        path = fragment_path(self._root, record.fragment, record.version)

        def take_back() -> None:
            files.remove(files.temporary(path))
            files.remove(path)

        undo.append(take_back)
        write_fragment(path, entry, tensors)
        return entry

    def _new_journal(self, number: int, undo: list[Callable[[], None]]) -> RecordFile:
        path = journal_path(self._root, number)
        journal = RecordFile.create(path, kind=JOURNAL_KIND)

        def take_back() -> None:
            journal.close()
            files.remove(path)

        undo.append(take_back)
        self._sync(journal)
        files.sync_folder(path.parent)
        return journal

    @staticmethod
    def _sync(journal: RecordFile) -> None:
        try:
            journal.sync()
        except OSError as error:
            raise StoreError(f"{journal.path} could not be synced ({error}).") from error

    @contextlib.contextmanager
    def _undoing(self, what: str) -> Iterator[list[Callable[[], None]]]:
        """Undoes a step that had no room; after any other failure the store is not used again."""
        if self._failure:
            raise StoreError(f"{self._root} cannot be used again: {self._failure}. Start again.")
        undo: list[Callable[[], None]] = []
        try:
            yield undo
        except BaseException as error:
            self._failure = f"{what} failed ({error!r})"
            if files.is_full(error):
                try:
                    for step in reversed(undo):
                        step()
                except OSError as worse:
                    raise StoreError(
                        f"{self._root}: {what} could not be undone ({worse})."
                    ) from error
                self._failure = ""
            _raise_ours(error, self._root, "written")

    def _next_number(self) -> int:
        there = numbers(self._root, "manifest") + numbers(self._root, "journal")
        return max(there, default=0) + 1

    def _collect(self, fragments: Iterable[int]) -> None:
        """Removes what no recovery needs. Some file systems need room even for that: then later."""
        with contextlib.suppress(NoRoomError), self._undoing("the removal of old files"):
            kept = numbers(self._root, "manifest")[-_KEPT:]
            for folder, where in (("manifest", manifest_path), ("journal", journal_path)):
                for number in numbers(self._root, folder):
                    if number < kept[0]:
                        files.remove(where(self._root, number))
            for fragment in fragments:
                for version in versions(self._root, fragment)[:-_KEPT]:
                    files.remove(fragment_path(self._root, fragment, version))


def _raise_ours(error: BaseException, root: Path, what: str) -> NoReturn:
    if files.is_full(error):
        raise NoRoomError(
            f"{root} could not be {what}: the disk is full ({error}). Everything is as before;"
            " make room and try again."
        ) from error
    if isinstance(error, OSError | SafetensorError):
        raise StoreError(
            f"{root} could not be {what} ({error}), so what is on disk is unsure."
            " Start again when the disk works."
        ) from error
    raise error
