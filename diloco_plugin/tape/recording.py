"""The recorder: steps a core and writes down what came of it, without ever being in its way.

The thread that steps the core only queues; a thread of the recorder encodes and writes. Whatever
goes wrong with the tape ends the tape, with one warning, and nothing else.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Final

import msgspec

from diloco_plugin.core.actions import SyncerAction
from diloco_plugin.core.events import SyncerEvent
from diloco_plugin.core.syncer import SyncerCore
from diloco_plugin.errors import ConfigError, disk_trouble
from diloco_plugin.store.records import RecordFile
from diloco_plugin.tape.codec import Step, encode_step, join_steps
from diloco_plugin.tape.freezing import freeze
from diloco_plugin.tape.segments import KIND, Header, number_of, segment_paths

log = logging.getLogger("diloco.tape")

SEGMENT_BYTES: Final = 64 * 2**20
TOTAL_BYTES: Final = 2**30
FLUSH_SECONDS: Final = 1.0
#: Encoded steps are written when there are so many bytes of them, or after FLUSH_SECONDS.
RECORD_BYTES: Final = 64 * 2**10
#: So many queued steps wake the writer.
WAKE_STEPS: Final = 256
#: With so many the disk is too slow for the run.
WAITING_MAX: Final = 100_000
CLOSE_SECONDS: Final = 5.0


class Recorder:
    """Records the lives of a core. `step` and `close` are for the thread that steps the core."""

    def __init__(
        self,
        directory: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        total_bytes: int = TOTAL_BYTES,
        flush_seconds: float = FLUSH_SECONDS,
    ) -> None:
        """Raises ConfigError: there is no such directory, and none can be made, to write to;
        NoRoomError, StoreError: because the disk is full, or fails.
        """
        _probe(directory)
        #: why the tape has ended before its time, or empty
        self.trouble = ""
        self._directory = directory
        self._segment_bytes, self._total_bytes = segment_bytes, total_bytes
        self._flush_seconds = flush_seconds
        self._core: SyncerCore | None = None
        self._events = 0
        #: both threads: appending and popping are atomic
        self._waiting: deque[Step | Header] = deque()
        self._wake = threading.Event()
        self._full = self._closing = False
        self._file: RecordFile | None = None
        self._asked = False
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._flushed = 0.0
        self._thread = threading.Thread(target=self._run, name="diloco-tape", daemon=True)

    def step(self, core: SyncerCore, event: SyncerEvent) -> tuple[SyncerAction, ...]:
        """What `core.step(event)` returns or raises, written down. A new core is a new life."""
        if self.trouble:
            return core.step(event)
        if core is not self._core or self._full:
            self._begin(core)
        try:
            actions = core.step(event)
        except Exception as error:
            self._put(Step(event, f"{type(error).__name__}: {error}"))
            raise
        self._put(Step(event, actions))
        return actions

    def close(self) -> None:
        """Write what is queued, within bounds. May be called twice."""
        self._closing = True
        self._wake.set()
        if self._core is not None:
            self._thread.join(CLOSE_SECONDS)

    def _begin(self, core: SyncerCore) -> None:
        if self._core is None:
            self._thread.start()
        if core is not self._core:
            self._core, self._events = core, 0
        self._full = False
        try:
            state = freeze(core)
        except Exception as error:  # a bug of ours, and no reason to end the run
            self._give_up(error)
            return
        self._waiting.append(Header(epoch=core.epoch, events_before=self._events, state=state))
        self._wake.set()

    def _put(self, step: Step) -> None:
        self._events += 1
        self._waiting.append(step)
        waiting = len(self._waiting)
        if waiting > WAITING_MAX:
            self._give_up("the disk is too slow")
        elif waiting >= WAKE_STEPS and not self._wake.is_set():
            self._wake.set()

    def _give_up(self, why: Exception | str) -> None:
        if not self.trouble:
            self.trouble = f"the tape in {self._directory} has ended: {why}"
            log.warning("%s. The run goes on without it.", self.trouble)
        self._waiting.clear()

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while not self.trouble:
                closing = self._closing  # before the queue is looked at: nothing comes after it
                self._take()
                if closing or time.monotonic() - self._flushed >= self._flush_seconds:
                    self._write()
                if closing:
                    break
                self._wake.wait(self._flush_seconds)
                self._wake.clear()
        except Exception as error:
            self._give_up(error)
        finally:
            if self._file is not None:
                self._file.close()

    def _take(self) -> None:
        while self._waiting:
            try:
                item = self._waiting.popleft()
            except IndexError:  # given up in between
                return
            if isinstance(item, Header):
                self._open(item)
                continue
            encoded = encode_step(item)
            self._pending.append(encoded)
            self._pending_bytes += len(encoded)
            if self._pending_bytes >= RECORD_BYTES:
                self._write()

    def _write(self) -> None:
        self._flushed = time.monotonic()
        if self._file is None or not self._pending:
            return
        self._file.append(join_steps(self._pending))
        self._pending, self._pending_bytes = [], 0
        if self._file.size >= self._segment_bytes and not self._asked:
            self._asked = self._full = True  # the core's thread begins another segment

    def _open(self, header: Header) -> None:
        self._write()
        if self._file is not None:
            self._file.close()
        number = self._make_room() + 1
        self._file = RecordFile.create(self._directory / f"{number:06}.tape", kind=KIND)
        self._file.append(msgspec.msgpack.encode(header))
        self._asked = False

    def _make_room(self) -> int:
        """Drop the oldest segments until one more fits in; returns the newest number."""
        paths = segment_paths(self._directory)
        newest = (number_of(paths[-1]) or 0) if paths else 0
        sizes = [path.stat().st_size for path in paths]
        total = sum(sizes)
        for path, size in zip(paths, sizes, strict=True):
            if total + self._segment_bytes <= self._total_bytes:
                break
            path.unlink()
            total -= size
        return newest


def _probe(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        what = f"tape={str(directory)!r} cannot be written to"
        raise disk_trouble(error, what) or ConfigError(
            f"{what} ({error}): choose another directory."
        ) from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(
            f"tape={str(directory)!r} cannot be written to: choose another directory."
        )
