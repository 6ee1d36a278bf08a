"""What outlives the syncer: merges are made durable here, in a thread of their own.

`durability` says when: "commit" syncs every merge to disk before anybody hears of it, so that no
crash takes an announced version back; "interval" announces at once and saves what has changed every
so often, so that a crash loses the merges of one interval; "none" saves at an orderly stop only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, Final

import msgspec
from torch import Tensor

from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core.past import Past
from diloco_plugin.errors import DamagedError, NoRoomError
from diloco_plugin.store import Contribution, MergeRecord, RunFile, Store, digest_of
from diloco_plugin.syncer.model import GlobalModel

log = logging.getLogger("diloco.syncer")

#: Merges after which the journal is folded into a manifest: what a start has to read.
RECORDS_MAX: Final = 512

Tensors = Mapping[str, Tensor]


class Keeper:
    """One store and its thread. Methods may be called in any thread and do not block, but `open`'s
    and `close`'s.

    Args:
        post: takes events, and exceptions: after those the daemon must not go on.
    """

    def __init__(
        self,
        store: Store,
        durability: str,
        interval_seconds: float,
        post: Callable[[ev.SyncerEvent | BaseException], None],
    ) -> None:
        self.store = store
        self.past = past_of(store)
        #: why nothing can be saved now (durability "interval")
        self.trouble = ""
        self._run: RunFile | None = store.run
        self._durability = durability
        self._interval = interval_seconds
        self._saved = time.monotonic()
        self._post = post
        self._records = len(store.records)
        #: by fragment, the newest merge that is announced and not on disk
        self._dirty: dict[int, act.Commit] = {}
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="diloco-store", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self._post(error)
                return

    # ---- the beginning ----

    def begin(self, run: RunFile, model: GlobalModel, done: Callable[[str | None], None]) -> None:
        """The model was brought: once it is on disk the run exists. `done` is told in the store's
        thread, with a sentence if the disk is full.
        """

        def job() -> None:
            past = Past.seeded(len(model.layout.fragments))
            fragments = (
                (_seed_record(self.store.epoch, index, model), model.durable(index))
                for index in range(len(model.layout.fragments))
            )
            if self._durability != "none":
                try:
                    self.store.checkpoint(run, msgspec.to_builtins(past, str_keys=True), fragments)
                except NoRoomError as error:
                    done(str(error))
                    return
            self._run, self.past = run, past
            done(None)

        self._jobs.put(job)

    def describe(self, run: RunFile) -> None:
        """The run goes on with these parameters."""
        if run != self._run:
            self._run = run
            self._jobs.put(self._fold)

    # ---- merges ----

    def commit(self, action: act.Commit, model: GlobalModel) -> None:
        """Make a merge as durable as the run asks for; answered with CommitDone or CommitFailed."""
        if self._durability == "commit":
            self._jobs.put(lambda: self._commit(action, model))
            return
        self._dirty[action.fragment] = action
        model.publish(action.fragment)
        self._post(ev.CommitDone(now_ns=time.monotonic_ns(), round=action.round))

    def _commit(self, action: act.Commit, model: GlobalModel) -> None:
        # Nobody changes the fragment before the answer: it has one round at a time.
        try:
            self._write(action, model.durable(action.fragment), model.held(action.fragment))
        except NoRoomError as error:
            now = time.monotonic_ns()
            self._post(ev.CommitFailed(now_ns=now, round=action.round, reason=str(error)))
            return
        model.publish(action.fragment)
        self._post(ev.CommitDone(now_ns=time.monotonic_ns(), round=action.round))
        self._fold_when_long()

    def _write(self, action: act.Commit, tensors: Tensors, held: Tensor) -> None:
        self.store.commit(_record(self.store.epoch, action, held), tensors)
        assert self.past is not None
        self.past.add(action)
        self._records += 1

    def _fold_when_long(self) -> None:
        if self._records >= RECORDS_MAX:
            self._fold()

    def _fold(self) -> None:
        """Fold the journal into a manifest."""
        assert self._run is not None
        try:
            self.store.checkpoint(self._run, msgspec.to_builtins(self.past, str_keys=True), ())
        except NoRoomError:
            return  # the journal still has it all
        self._records = 0

    # ---- from time to time ----

    @property
    def due(self) -> bool:
        """Is it time to save what has changed (durability "interval")?"""
        waits = self._durability == "interval" and bool(self._dirty)
        return waits and time.monotonic() >= self._saved + self._interval

    def save(self, model: GlobalModel) -> None:
        """Merge thread, where nobody changes a fragment meanwhile: copy what has changed, for the
        store's thread to write. Fragments with a newer merge on its way wait for it.
        """
        self._saved = time.monotonic()
        for fragment, action in list(self._dirty.items()):
            if model.version(fragment) != action.version:
                continue
            del self._dirty[fragment]
            tensors = {name: value.clone() for name, value in model.durable(fragment).items()}
            held = model.held(fragment).clone()
            self._jobs.put(lambda a=action, t=tensors, h=held: self._save(a, t, h))  # type: ignore[misc]

    def _save(self, action: act.Commit, tensors: Tensors, held: Tensor) -> None:
        try:
            self._write(action, tensors, held)
        except NoRoomError as error:
            if not self.trouble:
                log.error("nothing is saved until there is room: %s", error)
            self.trouble = f"nothing is saved until there is room: {error}"
            self._dirty.setdefault(action.fragment, action)
            return
        if self.trouble:
            log.info("there is room again: saving goes on")
            self.trouble = ""
        self._fold_when_long()

    # ---- the end ----

    def close(self, model: GlobalModel | None, clock: int, timeout_seconds: float) -> bool:
        """After the last merge: save what is not on disk and fold the journal. False: it could not
        be done, or not in time; what was durable before still is.
        """
        if self.past is not None:
            self.past.clock = max(self.past.clock, clock)
        saved = [False]

        def job() -> None:
            saved[0] = model is None or self._finish(model)
            self.store.close(clean=saved[0])

        self._jobs.put(job)
        self._jobs.put(None)
        self._thread.join(timeout_seconds)
        return saved[0] and not self._thread.is_alive()

    def abort(self) -> None:
        """The daemon failed: let go of the state as a crash would."""
        self._jobs.put(lambda: self.store.close(clean=False))
        self._jobs.put(None)
        self._thread.join(5.0)

    def _finish(self, model: GlobalModel) -> bool:
        if self._run is None or self.past is None:
            return True  # no model was ever brought
        unsaved = {fragment: self._dirty.pop(fragment) for fragment in list(self._dirty)}
        fragments = []
        for fragment in range(len(model.layout.fragments)):
            action = unsaved.get(fragment)
            if action is not None:
                self.past.add(action)
                record = _record(self.store.epoch, action, model.held(fragment))
            elif self._durability == "none" and self.store.run is None:
                record = _seed_record(self.store.epoch, fragment, model)
            else:
                continue
            fragments.append((record, model.durable(fragment)))
        try:
            self.store.checkpoint(
                self._run, msgspec.to_builtins(self.past, str_keys=True), fragments
            )
        except NoRoomError as error:
            log.error("the end of the run is not saved: %s", error)
            return False
        return True

    def status(self) -> dict[str, Any]:
        """The store's part of the status body."""
        return {
            "durability": self._durability,
            "free_bytes": self.store.free_bytes(),
            "unsaved": len(self._dirty),
        }


def past_of(store: Store) -> Past | None:
    """What earlier lives have left, or None if there is no model yet."""
    if store.run is None or store.past is None:
        return None
    try:
        past = msgspec.convert(store.past, Past, str_keys=True)
    except msgspec.ValidationError as error:
        raise DamagedError(
            f"the newest manifest cannot be read ({error}): use the diloco-plugin version that"
            f" wrote it ({store.run.version})."
        ) from None
    for record in store.records:
        past.add(commit_of(record))
    return past


def _record(epoch: int, action: act.Commit, held: Tensor) -> MergeRecord:
    return MergeRecord(
        epoch=epoch,
        round=action.round,
        fragment=action.fragment,
        version=action.version,
        clock=action.clock,
        exact=action.exact,
        contributions=tuple(
            Contribution(
                name=push.life.name,
                incarnation=push.life.incarnation,
                index=push.index,
                base=push.base,
                steps=push.steps,
                tokens=push.tokens,
                norm=push.norm,
            )
            for push in action.contributions
        ),
        base_digest=digest_of(held),
    )


def _seed_record(epoch: int, fragment: int, model: GlobalModel) -> MergeRecord:
    seed = act.Commit(round=0, fragment=fragment, version=0, clock=0, exact=False, contributions=())
    return _record(epoch, seed, model.held(fragment))


def commit_of(record: MergeRecord) -> act.Commit:
    """The merge that a record is of."""
    return act.Commit(
        round=record.round,
        fragment=record.fragment,
        version=record.version,
        clock=record.clock,
        exact=record.exact,
        contributions=tuple(
            act.Contribution(
                life=ev.Life(push.name, push.incarnation),
                index=push.index,
                base=push.base,
                steps=push.steps,
                tokens=push.tokens,
                norm=push.norm,
            )
            for push in record.contributions
        ),
    )
