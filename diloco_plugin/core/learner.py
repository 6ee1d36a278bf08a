"""The learner's half: what to count, what to send, what to apply, when to wait, when to call again.

Both the training thread (Stepped, Paused, FinishAsked) and the I/O thread (everything else) step this core,
under one lock held by the shell. Actions that touch parameters (Apply, Snapshot, CaptureBase, Restore) come out of
training-thread events only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from . import policy
from .actions import (
    Apply,
    AskClose,
    Beat,
    CaptureBase,
    Fetch,
    LearnerAction,
    Leave,
    Note,
    Offer,
    Reconnect,
    Release,
    Report,
    Restore,
    SayHello,
    SayTaken,
    ServeSeed,
    Snapshot,
    Unstage,
)
from .events import (
    Announced,
    Arrived,
    Connected,
    FateTold,
    FetchFailed,
    FinishAsked,
    LearnerEvent,
    Lost,
    Paused,
    Pulled,
    PushSent,
    Rebased,
    RunCompleted,
    SeedAsked,
    Stepped,
    Strange,
    SyncerHeard,
    Ticked,
    TurnedAway,
    Welcomed,
)
from .link import Duty, Link, Standing
from .parameters import SECOND_NS, Parameters

#: Reports travel at most this often outside lockstep.
REPORT_NS: Final = SECOND_NS // 40
#: A boundary that comes later than this multiple of the usual step followed a pause, not a step.
PAUSE_STEPS: Final = 10


@dataclass(slots=True)
class Part:
    """What the learner knows about one fragment."""

    steps: int = 0
    tokens: int = 0
    #: version of the base, -1: none from this syncer's life
    base: int = -1
    #: newest version that was announced, and the clock of its round
    announced: int = -1
    clock: int = 0
    #: version that is being fetched, or has arrived and waits for the next boundary
    fetching: int | None = None
    arrived: int | None = None
    #: round that asked and has no answer yet
    pull: int | None = None
    #: that round is a closing one: the push travels in fp32
    exact: bool = False
    #: round that got a push from the current base; the same progress is not given twice
    given: int | None = None
    #: lockstep: the step of the due point whose snapshot is staged or whose result is awaited
    due: int | None = None
    #: the staged snapshot's (steps, tokens); None: nothing is staged
    staged: tuple[int, int] | None = None
    close_asked: bool = False


class LearnerCore:
    """Decides; carries nothing out."""

    def __init__(
        self, *, incarnation: str, staging: int = 2, arrivals: int = 2, now_ns: int = 0
    ) -> None:
        """A learner that knows nobody yet. `staging`, `arrivals`: buffers that the shell has of each."""
        self.link = Link(incarnation, now_ns)
        self.parameters: Parameters | None = None
        self.parts: list[Part] = []
        self.clock = 0
        self.steps = 0
        self.tokens = 0
        self.step_ns = 0
        self.closing = False
        #: why the run is over, once it is
        self.complete: str | None = None
        self.fates: dict[str, int] = {}
        self.applied = 0
        self._staging_free = staging
        self._arrivals_free = arrivals
        self._seed_pending = False
        self._restore = False
        self._now_ns = now_ns
        self._report_ns = now_ns - REPORT_NS
        self._reported = -1
        self._boundary_ns: int | None = None
        self._out: list[LearnerAction] = []

    def lay_out(self, parameters: Parameters, fragments: int) -> None:
        """The syncer's parameters and the number of fragments are known (before Welcomed)."""
        self.parameters = parameters
        if len(self.parts) != fragments:
            self.parts = [Part() for _ in range(fragments)]

    def step(self, event: LearnerEvent) -> tuple[LearnerAction, ...]:
        """Take one event in; return what is to be done, in order."""
        self._out = []
        self._now_ns = max(self._now_ns, event.now_ns)
        match event:
            case Stepped():
                self._count(event)
                self._boundary()
            case Paused():
                self._boundary_ns = None
                self._boundary()
            case FinishAsked():
                self.closing = True
                self._boundary()
            case _:
                self._from_io(event)
        return tuple(self._out)

    # ---- questions that the shell asks ----

    def must_wait(self) -> bool:
        """Lockstep only: is the result of a fragment due that has not been applied?"""
        if not self.link.connected or self.parameters is None or not self.parameters.lockstep:
            return False
        overlap = self.parameters.overlap
        return any(p.due is not None and self.clock >= p.due + overlap for p in self.parts)

    def nothing_left(self) -> bool:
        """Has the syncer taken all progress, and does this learner hold all that was announced?"""
        return self.link.standing is Standing.LIVE and all(
            part.steps == 0 and part.announced <= part.base and part.arrived is None
            for part in self.parts
        )

    def next_deadline_ns(self) -> int:
        """The latest time at which a Ticked event must come if nothing else happens."""
        return self.link.next_deadline_ns(self._now_ns)

    # ---- the training thread ----

    def _count(self, event: Stepped) -> None:
        self.steps += 1
        self.clock += 1
        self.tokens += event.tokens
        for part in self.parts:
            part.steps += 1
            part.tokens += event.tokens
        if self._boundary_ns is not None:
            took = self._now_ns - self._boundary_ns
            if self.step_ns == 0 or took < PAUSE_STEPS * self.step_ns:
                self.step_ns = policy.moving_average(self.step_ns, took)
        self._boundary_ns = self._now_ns

    def _boundary(self) -> None:
        """Apply what has arrived, stage what is due, answer what was pulled, report. Never waits."""
        if self.parameters is None or not self.link.connected:
            return
        if self._seed_pending:
            self._seed()
        if self.parameters.lockstep:
            self._stage_due()
        for index, part in enumerate(self.parts):
            if part.arrived is not None and self._may_apply(part):
                self._apply(index, part, part.arrived)
        if self.link.standing is Standing.TAKING and all(part.base >= 0 for part in self.parts):
            self.link.standing = Standing.LIVE
            self._out.append(SayTaken())
        if self.link.standing is Standing.LIVE:
            self._answer_pulls()
        if self.closing:
            self._close()
        self._report()

    def _may_apply(self, part: Part) -> bool:
        """Lockstep applies a result exactly `overlap` steps after its due point, not earlier."""
        assert self.parameters is not None
        if not self.parameters.lockstep or part.due is None or self.closing:
            return True
        return self.clock >= part.due + self.parameters.overlap

    def _apply(self, index: int, part: Part, version: int) -> None:
        assert self.parameters is not None
        alpha = (
            0.0 if self.closing or self.link.standing is Standing.TAKING else self.parameters.alpha
        )
        self._out.append(Apply(fragment=index, version=version, alpha=alpha))
        self.applied += 1
        if part.staged is not None:
            self._unstage(index, part)
        part.base, part.arrived, part.given, part.due = version, None, None, None
        part.steps = part.tokens = 0
        part.close_asked = False
        self.clock = max(self.clock, part.clock)

    def _seed(self) -> None:
        """The model as it is now becomes version 0 of every fragment."""
        self._seed_pending = False
        for part in self.parts:
            part.base, part.steps, part.tokens = 0, 0, 0
        self.link.standing = Standing.LIVE
        self._out += [CaptureBase(), ServeSeed()]

    def _stage_due(self) -> None:
        """Lockstep: the snapshot is taken at the due step itself, before anybody asks."""
        assert self.parameters is not None
        due = policy.due_between(self.clock - 1, self.clock, self.parameters, len(self.parts))
        for index in due:
            part = self.parts[index]
            if (
                self.link.standing is Standing.LIVE
                and part.due is None
                and part.steps
                and self._staging_free > 0
            ):
                part.due = self.clock
                self._stage(index, part)

    def _stage(self, index: int, part: Part) -> None:
        self._staging_free -= 1
        part.staged = (part.steps, part.tokens)
        self._out.append(Snapshot(fragment=index))

    def _unstage(self, index: int, part: Part) -> None:
        part.staged = None
        self._staging_free += 1
        self._out.append(Unstage(fragment=index))

    def _answer_pulls(self) -> None:
        pulls = sorted((p.pull, i) for i, p in enumerate(self.parts) if p.pull is not None)
        for number, index in pulls:
            part = self.parts[index]
            if part.given is not None:
                self._decline(index, part, number, "already given")
            elif part.staged is not None:
                self._give(index, part, number)
            elif part.steps == 0:
                self._decline(index, part, number, "no steps")
            elif self._staging_free > 0:
                self._stage(index, part)
                self._give(index, part, number)

    def _give(self, index: int, part: Part, number: int) -> None:
        assert part.staged is not None
        steps, tokens = part.staged
        part.staged, part.pull, part.given = None, None, number
        self._out.append(
            Offer(
                round=number,
                fragment=index,
                base=part.base,
                steps=steps,
                tokens=tokens,
                exact=part.exact,
            )
        )

    def _decline(self, index: int, part: Part, number: int, why: str) -> None:
        part.pull = None
        self._out.append(Offer(round=number, fragment=index, nothing=why))

    def _report(self) -> None:
        assert self.parameters is not None
        at_once = self.parameters.lockstep and self.clock != self._reported
        if at_once or self._now_ns - self._report_ns >= REPORT_NS:
            self._report_ns, self._reported = self._now_ns, self.clock
            self._out.append(Report(clock=self.clock, step_ns=self.step_ns, tokens=self.tokens))

    def _close(self) -> None:
        """Ask for closing rounds until the syncer has all progress, then leave with the global model."""
        if self.link.standing is not Standing.LIVE:
            return
        left = []
        for index, part in enumerate(self.parts):
            part.due = None
            if part.steps and part.given is None and not part.close_asked:
                part.close_asked = True
                left.append(index)
        if left:
            self._out.append(AskClose(fragments=tuple(left)))
        if self.nothing_left():
            self.link.standing = Standing.LEFT
            if self._restore or (self.parameters is not None and self.parameters.alpha > 0.0):
                self._out.append(Restore())
            self._out.append(Leave())

    # ---- the I/O thread ----

    def _from_io(self, event: LearnerEvent) -> None:
        match event:
            case Ticked():
                self._tick()
            case Welcomed():
                self._welcome(event)
            case TurnedAway():
                self.link.refuse(self._now_ns, event.code, event.text)
                if event.code == "ended":
                    self.complete = self.complete or event.text
            case Lost():
                self._lose(event.reason, deliberate=event.deliberate)
            case Connected():
                if not self.link.connected and not self.link.over:
                    self.link.call_soon(self._now_ns)
            case Strange():
                if self.link.connected:
                    self._lose("it does not know this learner any more")
                    self.link.call_soon(self._now_ns)
            case PushSent():
                self._staging_free += 1
            case Rebased():
                self._arrivals_free += 1
                self._fetch_next()
            case _:
                self.link.hear(self._now_ns)
                if isinstance(event, RunCompleted):
                    self.complete = event.reason
                elif self.link.connected and not isinstance(event, SyncerHeard):
                    self._about_model(event)

    def _about_model(self, event: LearnerEvent) -> None:
        if isinstance(event, SeedAsked):
            self._seed_pending = True
            return
        assert isinstance(event, (Pulled, Announced, Arrived, FetchFailed, FateTold))
        if event.fragment >= len(self.parts):
            return
        part = self.parts[event.fragment]
        match event:
            case Pulled():
                if part.pull is None or event.round > part.pull:
                    part.pull, part.exact = event.round, event.closing
            case Announced():
                if event.version > part.announced:
                    part.announced, part.clock = event.version, event.clock
            case Arrived():
                part.fetching, part.arrived = None, event.version
            case FetchFailed():  # it was superseded; its successor is announced in a moment
                part.fetching = None
                part.announced = max(part.base, part.announced - (part.announced == event.version))
                self._arrivals_free += 1
            case FateTold():
                self._hear_fate(event, part)
        self._fetch_next()

    def _fetch_next(self) -> None:
        """Fetch announced versions, oldest round first, into free arrival buffers."""
        wanted = [
            (part.clock, index)
            for index, part in enumerate(self.parts)
            if part.announced > part.base and part.fetching is None and part.arrived is None
        ]
        for _, index in sorted(wanted)[: self._arrivals_free]:
            part = self.parts[index]
            self._arrivals_free -= 1
            part.fetching = part.announced
            self._out.append(Fetch(fragment=index, version=part.announced))

    def _hear_fate(self, event: FateTold, part: Part) -> None:
        key = f"rejected ({event.reason})" if event.fate == "rejected" else event.fate
        if key not in self.fates and event.fate in ("rejected", "stale"):
            self._out.append(
                Note(
                    text=f"the syncer refused fragment {event.fragment}: {event.fate} ({event.reason})"
                )
            )
        self.fates[key] = self.fates.get(key, 0) + 1
        if event.fate == "merged" or part.given != event.round:
            return
        part.given, part.close_asked, part.due = None, False, None
        if self.closing and event.fate == "rejected":
            # it will not be wanted the next time either: leave with the global value instead
            part.steps = part.tokens = 0
            self._restore = True

    # ---- the link ----

    def _welcome(self, event: Welcomed) -> None:
        assert self.parameters is not None, "lay_out() comes first"
        self.link.welcome(self._now_ns, event.epoch, self.parameters.lease_ns, keep=event.keep)
        self.clock = max(self.clock, event.clock)
        for part in self.parts:
            if not event.keep:
                part.base = -1
            part.announced = part.base
            part.pull = part.given = part.due = None
            part.close_asked = False

    def _lose(self, reason: str, *, deliberate: bool = False) -> None:
        """Train on alone. The buffers of everything that was on its way are free again."""
        if self.link.standing is Standing.LEFT:
            return
        known = self.link.connected
        self.link.lose(self._now_ns, deliberate=deliberate)
        self._seed_pending = False
        for index, part in enumerate(self.parts):
            if part.staged is not None:
                self._unstage(index, part)
            if part.fetching is not None or part.arrived is not None:
                part.fetching = part.arrived = None
                self._arrivals_free += 1
                self._out.append(Release(fragment=index))
            part.pull = part.given = part.due = None
        if known:
            self._out.append(
                Note(text=f"lost the syncer ({reason}); training goes on, looking for it")
            )

    def _tick(self) -> None:
        match self.link.tick(self._now_ns):
            case Duty.BEAT:
                self._out.append(Beat())
            case Duty.CALL:
                held = tuple(part.base for part in self.parts)
                versions = held if held and min(held) >= 0 else ()
                self._out.append(
                    SayHello(epoch=self.link.epoch, versions=versions, clock=self.clock)
                )
            case Duty.DEAD:
                self._lose("it has been silent for a whole lease")
                self._out.append(Reconnect())
            case Duty.NOTHING:
                pass

    # ---- looking in ----

    def check(self) -> None:
        """Assert every invariant."""
        for part in self.parts:
            assert part.steps >= 0
            assert part.tokens >= 0
            assert part.arrived is None or part.fetching is None, "fetched and arrived at once"
        assert self._staging_free >= 0
        assert self._arrivals_free >= 0
