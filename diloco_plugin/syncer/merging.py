"""The numbers of the daemon: its merge thread, and the pushes that wait there for a verdict.

Everything whose time is proportional to bytes happens in that thread, in the order in which it was
asked for. What comes of it goes back to the daemon as events.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

from torch import Tensor

from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core.events import Life
from diloco_plugin.syncer.model import GlobalModel
from diloco_plugin.tensors.merge import Measure

Job: TypeAlias = Callable[[], None]


class Merging:
    """Measures, folds and merges. Methods may be called in any thread and never block.

    Args:
        post: takes events, and exceptions: those are our bugs, and the daemon must not go on.
        release: takes a receive slot that is free again.
    """

    def __init__(
        self,
        post: Callable[[ev.SyncerEvent | BaseException], None],
        release: Callable[[Tensor], None],
    ) -> None:
        self.model: GlobalModel | None = None
        self._post = post
        self._release = release
        self._slots: dict[tuple[Life, int], tuple[Tensor, Measure]] = {}
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="diloco-merger", daemon=True)
        self._thread.start()

    @property
    def the_model(self) -> GlobalModel:
        """The global model; there is one since the first learner was admitted."""
        assert self.model is not None, "no learner was admitted yet"
        return self.model

    def submit(self, job: Job) -> None:
        """Run `job` after all that was asked for before."""
        self._jobs.put(job)

    def close(self, timeout_seconds: float) -> bool:
        """Finish what was asked for, then stop. False: it did not finish in time."""
        self._jobs.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self._post(error)
                return

    def measure(self, life: Life, round_: int, fragment: int, slot: Tensor) -> None:
        """All bytes of a push are in `slot`: measure it and let the core judge."""

        def job() -> None:
            model = self.the_model
            size = model.measure(fragment, slot)
            self._slots[(life, round_)] = (slot, size)
            self._post(
                ev.Received(
                    now_ns=time.monotonic_ns(),
                    life=life,
                    round=round_,
                    fragment=fragment,
                    norm=size.total if size.finite else 0.0,
                    finite=size.finite,
                )
            )

        self.submit(job)

    def complete_seed(
        self, life: Life, keep: Callable[[Callable[[str | None], None]], None]
    ) -> None:
        """Theta was filled by this learner: check and encode it, and let `keep` make it durable."""

        def failed(reason: str, *, full: bool) -> None:
            now = time.monotonic_ns()
            self._post(ev.SeedFailed(now_ns=now, life=life, reason=reason, full=full))

        def kept(no_room: str | None) -> None:
            if no_room is None:
                self._post(ev.SeedReceived(now_ns=time.monotonic_ns(), life=life))
            else:
                failed(no_room, full=True)

        def job() -> None:
            problem = self.the_model.complete_seed()
            if problem is None:
                keep(kept)
            else:
                failed(problem, full=False)

        self.submit(job)

    def discard(self, action: act.Discard) -> None:
        """The bytes of a push are not needed any more."""
        self.submit(lambda: self._free((action.life, action.round)))

    def fold(self, action: act.Fold, *, closing: bool) -> None:
        """Add a push to the accumulators of its round; its slot is free afterwards."""

        def job() -> None:
            model, key = self.the_model, (action.life, action.round)
            slot, size = self._slots[key]
            model.fold(
                action.round,
                action.fragment,
                slot,
                size,
                tokens=action.tokens,
                steps=action.steps,
                closing=closing,
            )
            self._free(key)

        self.submit(job)

    def merge(self, action: act.Merge, version: int) -> None:
        """Take the outer step and encode `version`."""

        def job() -> None:
            ok = self.the_model.merge(
                action.round, action.fragment, version, closing=action.closing
            )
            self._post(ev.MergeDone(now_ns=time.monotonic_ns(), round=action.round, ok=ok))

        self.submit(job)

    def drop(self, action: act.Drop) -> None:
        """Forget a round, and the pushes that were kept for it."""

        def job() -> None:
            self.the_model.drop(action.round)
            for key in [key for key in self._slots if key[1] == action.round]:
                self._free(key)

        self.submit(job)

    def _free(self, key: tuple[Life, int]) -> None:
        slot, _ = self._slots.pop(key, (None, None))
        if slot is not None:
            self._release(slot)
