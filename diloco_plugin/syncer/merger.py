"""The merge thread: everything whose time is proportional to bytes, in the order in which it was asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

Job: TypeAlias = Callable[[], None]


class Merger:
    """Runs jobs one after the other. An exception in a job is our bug: it is handed to `on_error`."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._on_error = on_error
        self._thread = threading.Thread(target=self._run, name="diloco-merger", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Run `job` after all that were submitted before. Any thread; never blocks."""
        self._jobs.put(job)

    def close(self, timeout_seconds: float) -> bool:
        """Finish what was submitted, then stop. False: it did not finish in time."""
        self._jobs.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self._on_error(error)
                return
