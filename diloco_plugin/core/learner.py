"""The learner's half: what to count, what to send, what to apply, when to wait, when to call again.

Both the training thread (Stepped, Paused, FinishAsked) and the I/O thread (everything else) step
this core, under one lock held by the shell. Actions that touch parameters (Apply, Snapshot,
CaptureBase, Restore) come out of training-thread events only.
"""

from __future__ import annotations

from typing import Final

from . import actions as act
from . import events as ev
from . import parts, policy
from .alone import Alone
from .closing import Closing
from .handover import Wish
from .link import Duty, Link, Standing
from .pace import Pace
from .parameters import Parameters
from .parts import Part
from .staging import Staging

#: What the reasons of fates mean, where they say too little to people.
_MEANING: Final = {
    "stale": "it began at a version that is too old by now",
    "consumed base": "it was merged before",
    "norm": "it is far larger than is usual here (norm)",
    "not finite": "it holds values that are not finite",
}


class LearnerCore:
    """Decides; carries nothing out."""

    def __init__(
        self,
        *,
        incarnation: str,
        staging: int = 2,
        arrivals: int = 2,
        now_ns: int = 0,
        wish: Wish | None = None,
    ) -> None:
        """A learner that knows nobody yet; `staging`, `arrivals`: the shell's buffers of each."""
        self.link = Link(incarnation, now_ns)
        self.wish = wish or Wish(wanted=False, own=0)
        self.parameters: Parameters | None = None
        self._lockstep, self._overlap = False, 0
        self.parts: list[Part] = []
        self.clock = 0
        self.steps = 0
        self.tokens = 0
        #: why the run is over, once it is over
        self.complete: str | None = None
        self.fates: dict[str, int] = {}
        self.applied = 0
        self._staging = Staging(staging)
        self._arrivals = self._arrivals_free = arrivals
        self._seed_pending = False
        #: the base is on its way to the syncer, which has not said yet that it holds it
        self._seed_serving = False
        #: the syncer was told that the model is held, and has given no sign that it heard so
        self._taken_unheard = False
        self._closing = Closing()
        self._alone = Alone()
        self._now_ns = now_ns
        self._pace = Pace(now_ns)
        self._out: list[act.LearnerAction] = []

    def lay_out(self, parameters: Parameters, fragments: int) -> None:
        """The syncer's parameters and the number of fragments are known (before Welcomed)."""
        self.parameters = parameters
        self._lockstep, self._overlap = parameters.lockstep, parameters.overlap
        if len(self.parts) != fragments:
            self.parts = [Part() for _ in range(fragments)]

    def have_buffers(self, *, staging: int, arrivals: int) -> None:
        """The shell has made so many buffers of each kind now."""
        self._staging.resize(staging)
        self._arrivals_free += arrivals - self._arrivals
        self._arrivals = arrivals

    def step(self, event: ev.LearnerEvent) -> tuple[act.LearnerAction, ...]:
        """Take one event in; return what is to be done, in order."""
        self._out = []
        self._now_ns = max(self._now_ns, event.now_ns)
        match event:
            case ev.Stepped():
                self._out += self.wish.give_up()
                self._note(self.link.refusal_news())
                self._count(event)
                self._mark_due()
                self._boundary()
            case ev.Paused():
                self._pace.pause()
                self._boundary()
            case ev.FinishAsked():
                self._closing.begun = True
                self._boundary()
            case _:
                self._from_io(event)
        return tuple(self._out)

    # ---- questions that the shell asks ----

    @property
    def closing(self) -> bool:
        """Is training over here?"""
        return self._closing.begun

    @property
    def holds_model(self) -> bool:
        """Is a version of every fragment in the parameters?"""
        return all(part.base >= 0 for part in self.parts)

    @property
    def joined(self) -> bool:
        """May training begin?"""
        return self.link.standing is Standing.LIVE and not self.wish.open

    @property
    def step_ns(self) -> int:
        """How long a step takes here, on average."""
        return self._pace.step_ns

    def still_holds(self, fragment: int, version: int) -> bool:
        """Is the base this version, whole, and stays it until somebody welcomes this learner?"""
        if self.link.connected or fragment >= len(self.parts):
            return False
        settled = self._arrivals_free == self._arrivals  # an applied one is the base a moment later
        return settled and self.parts[fragment].base == version

    def must_wait(self) -> bool:
        """Lockstep only: is a snapshot due, or the result of one, that is not there yet?"""
        if not self._lockstep or not self.link.connected:
            return False
        if self.closing or self.complete is not None:
            return False
        return any(part.unstaged or self._over(part) for part in self.parts)

    def nothing_left(self) -> bool:
        """Has the syncer taken all progress, and does this learner hold all that was announced?"""
        settled = self.link.standing is Standing.LIVE and not self._seed_serving
        return settled and self._closing.holds_all(self.parts)

    def next_deadline_ns(self) -> int:
        """The latest time at which a Ticked event must come if nothing else happens."""
        return self.link.next_deadline_ns(self._now_ns)

    # ---- the training thread ----

    def _count(self, event: ev.Stepped) -> None:
        self.steps += 1
        self.clock += 1
        self.tokens += event.tokens
        self.link.steps_alone += not self.link.connected
        for part in self.parts:
            part.steps += 1
            part.tokens += event.tokens
        self._pace.step(self._now_ns)

    def _boundary(self) -> None:
        """Apply what has arrived, stage what is due, answer pulls, report. Never waits."""
        if self.parameters is None or not self.link.connected:
            return
        if self._seed_pending:
            self._seed()
        self._out += self._staging.stage_due(self.parts)
        released = False
        for index, part in enumerate(self.parts):
            if part.arrived is not None and self._closing.ignores(part, self.parts):
                self._release(index, part)
                released = True
            elif part.arrived is not None and self._may_apply(part):
                self._apply(index, part, part.arrived)
        self._out += self.wish.take()
        if self.link.standing is Standing.TAKING and self.holds_model and not self.wish.open:
            self.link.standing = Standing.LIVE
            self._taken_unheard = True
            self._out.append(act.SayTaken())
        if self.link.standing is Standing.LIVE:
            self._out += self._staging.answer(self.parts)
        self._report()
        if self.closing:
            self._close()
        if released:  # its buffer is free for what others wait for
            self._fetch_next()

    def _may_apply(self, part: Part) -> bool:
        """Lockstep applies a result exactly `overlap` steps after its due point, not earlier."""
        if part.sending:
            return False
        if self.closing and self.link.standing is Standing.LIVE and not part.taken_or_refused:
            return False  # the last progress is given first: there is no later round for it
        return not self._lockstep or part.due is None or self.closing or self._over(part)

    def _over(self, part: Part) -> bool:
        return part.due is not None and self.clock >= part.due + self._overlap

    def _apply(self, index: int, part: Part, version: int) -> None:
        assert self.parameters is not None
        whole = self.closing or self.link.standing is Standing.TAKING
        alpha = 0.0 if whole else self.parameters.alpha
        self._out.append(act.Apply(fragment=index, version=version, alpha=alpha))
        self.applied += 1
        if part.staged is not None:
            self._out.append(self._staging.unstage(index, part))
        if part.owed is None:  # else the fate of what was given is still to come
            self._note(self._alone.settle(index, merged=False))
        part.rebase(version)
        self._closing.chased += self.closing
        self.clock = max(self.clock, part.clock)

    def _seed(self) -> None:
        """The model as it is now becomes version 0 of every fragment."""
        self._seed_pending = False
        self._seed_serving = True
        for part in self.parts:
            part.base, part.base_exact, part.steps, part.tokens = 0, True, 0, 0
        self.link.standing = Standing.LIVE
        self._out += [act.CaptureBase(), act.ServeSeed()]

    def _mark_due(self) -> None:
        """Lockstep: the snapshot is taken at the due step itself, before anybody asks."""
        if not self._lockstep or self.closing or self.link.standing is not Standing.LIVE:
            return
        assert self.parameters is not None
        due = policy.due_between(self.clock - 1, self.clock, self.parameters, len(self.parts))
        for index in due:
            if self.parts[index].due is None:
                self.parts[index].due = self.clock

    def _note(self, text: str) -> None:
        if text:
            self._out.append(act.Note(text=text))

    def _report(self) -> None:
        # the last clock of a learner that closes counts: the run may end with it
        urgent = self._lockstep or self.closing
        if self._pace.may_report(self._now_ns, self.clock, urgent=urgent):
            self._out.append(act.Report(clock=self.clock, step_ns=self.step_ns, tokens=self.tokens))

    def _close(self) -> None:
        """Ask for closing rounds until all progress is taken, then leave with the global model."""
        if self.link.standing is not Standing.LIVE:
            return
        left = self._closing.begin(self.parts)
        if left:
            self._out.append(act.AskClose(fragments=left))
        if self.nothing_left():
            self.link.standing = Standing.LEFT
            assert self.parameters is not None
            if self._closing.restore or self.parameters.alpha > 0.0:
                self._out.append(act.Restore())
            self._out.append(act.Leave())

    # ---- the I/O thread ----

    def _from_io(self, event: ev.LearnerEvent) -> None:
        match event:
            case ev.Ticked():
                self._tick()
            case ev.PushSent():
                self._staging.sent(self.parts[event.fragment])
            case ev.Rebased():
                self._arrivals_free += 1
                self._fetch_next()
            case _ if self.link.standing is Standing.LEFT:
                pass
            case ev.Welcomed() if event.epoch < self.link.epoch:
                self._let_go()
                text = policy.older_life(event.epoch, self.link.epoch)
                self.link.refuse(self._now_ns, "fenced", text)
            case ev.Welcomed():
                self._welcome(event)
            case ev.TurnedAway():
                self._let_go()
                self.link.refuse(self._now_ns, event.code, event.text)
                if event.code == "ended":
                    self.complete = self.complete or event.text
            case ev.Lost():
                self._lose(event.reason, deliberate=event.deliberate)
            case ev.Connected():
                if not self.link.connected and not self.link.over:
                    self.link.call_soon(self._now_ns)
            case ev.Strange():
                if self.link.connected:
                    self._lose("it does not know this learner any more")
                    self.link.call_soon(self._now_ns)
            case _:
                self._hear(event)

    def _hear(self, event: ev.LearnerEvent) -> None:
        self.link.hear(self._now_ns)
        if isinstance(event, ev.RunCompleted):
            if self.complete is None:
                self._note(f"{event.reason}: stop training; learner.should_stop is True")
            self.complete = event.reason
        elif isinstance(event, ev.StateEvent):
            self._out += self.wish.hear(event)
        elif self.link.connected and not isinstance(event, ev.SyncerHeard):
            self._about_model(event)

    def _about_model(self, event: ev.LearnerEvent) -> None:
        if isinstance(event, ev.SeedAsked):
            self._seed_pending = True
            return
        assert isinstance(event, (ev.Pulled, ev.Announced, ev.Arrived, ev.FetchFailed, ev.FateTold))
        if event.fragment >= len(self.parts):
            return
        part = self.parts[event.fragment]
        match event:
            case ev.Pulled():
                self._taken_unheard = False  # only those that hold the model are asked
                part.hear_pull(event.round, closing=event.closing)
            case ev.Announced():
                self._seed_serving = False
                news = part.hear_version(event.version, event.clock, exact=event.exact)
                if not news and event.version == part.base:  # the clock is the news
                    self.clock = max(self.clock, event.clock)
            case ev.Arrived() if part.fetching == event.version:
                part.fetching, part.arrived = None, event.version
            case ev.FetchFailed() if part.fetching == event.version:
                part.fetching = None
                self._arrivals_free += 1
                if part.announced == event.version:
                    # it was superseded: its successor is announced in a moment
                    part.announced = part.base
            case ev.FateTold():
                self._hear_fate(event, part)
        self._fetch_next()

    def _fetch_next(self) -> None:
        """Fetch announced versions, oldest round first, into free arrival buffers."""
        if not self.link.connected:
            return
        wanted = [
            (part.clock, index)
            for index, part in enumerate(self.parts)
            if part.wanted and not self._closing.ignores(part, self.parts)
        ]
        for _, index in sorted(wanted)[: self._arrivals_free]:
            part = self.parts[index]
            self._arrivals_free -= 1
            part.fetching, part.incoming_exact = part.announced, part.announced_exact
            self._out.append(act.Fetch(fragment=index, version=part.announced))

    def _hear_fate(self, event: ev.FateTold, part: Part) -> None:
        refused = event.fate in ("rejected", "stale")
        key = f"rejected ({event.reason})" if event.fate == "rejected" else event.fate
        if key not in self.fates and refused:
            why = _MEANING.get(event.reason, event.reason)
            self._note(f"the syncer did not take progress of fragment {event.fragment}: {why}")
        self.fates[key] = self.fates.get(key, 0) + 1
        again = part.hear_fate(event.round, event.fate)
        if not again:
            merged = event.fate == "merged"
            self._note(self._alone.settle(event.fragment, merged=merged))
        if again and refused and self.closing:
            part.give_up()
            self._closing.restore = True

    # ---- the link ----

    def _welcome(self, event: ev.Welcomed) -> None:
        assert self.parameters is not None, "lay_out() comes first"
        self._let_go()  # a second Welcome replaces the first
        if event.keep and self.link.steps_alone:
            moved = [index for index, part in enumerate(self.parts) if part.steps]
            self._alone.bring(self.link.steps_alone, moved)
        self._note(self.link.found(self._now_ns, keep=event.keep))
        self.link.welcome(self._now_ns, event.epoch, self.parameters.lease_ns, keep=event.keep)
        self.clock = max(self.clock, event.clock)
        for part in self.parts:
            if not event.keep:
                part.base = -1
            part.announced = part.base

    def _lose(self, reason: str, *, deliberate: bool = False) -> None:
        """Train on alone."""
        known = self.link.connected
        self._let_go()
        self.link.lose(self._now_ns, deliberate=deliberate)
        if not known:
            return
        what = f"lost the syncer ({reason.rstrip('.')}); training on, looking for it"
        if deliberate:
            what = f"the syncer stops ({reason.rstrip('.')}); training on, looking for the next one"
        self._note("the run is over, and its syncer ends" if self.complete else what)

    def _let_go(self) -> None:
        """What was on its way is void: the buffers are free again (those of pushes by PushSent)."""
        self._out += self.wish.drop()
        unsure = self._seed_serving  # somebody else may seed the run: our base is of no lineage
        self._seed_pending = self._seed_serving = self._taken_unheard = False
        for index, part in enumerate(self.parts):
            if unsure:
                part.base = -1
            if part.staged is not None:
                self._out.append(self._staging.unstage(index, part))
            if part.fetching is not None or part.arrived is not None:
                self._release(index, part)
            part.let_go()
        if any(part.sending for part in self.parts):
            self._out.append(act.Forfeit())

    def _release(self, index: int, part: Part) -> None:
        part.fetching = part.arrived = None
        self._arrivals_free += 1
        self._out.append(act.Release(fragment=index))

    def _tick(self) -> None:
        match self.link.tick(self._now_ns):
            case Duty.BEAT:
                self._out.append(act.Beat())
                self._say_again()
            case Duty.CALL:
                versions = tuple(part.base for part in self.parts) if self.holds_model else ()
                self._out.append(
                    act.SayHello(
                        epoch=self.link.epoch,
                        versions=versions,
                        clock=self.clock,
                        wants_state=self.wish.open,
                    )
                )
            case Duty.DEAD:
                self._lose("it has been silent for a whole lease")
                self._out.append(act.Reconnect())

    def _say_again(self) -> None:
        """A message may be lost without the connection: with a full queue, or at a busy syncer."""
        if self._taken_unheard:
            self._out.append(act.SayTaken())
        unheard = self._closing.unheard(self.parts)
        if unheard and self.link.standing is Standing.LIVE:
            self._out.append(act.AskClose(fragments=unheard))

    def check(self) -> None:
        """Assert every invariant."""
        parts.check(
            self.parts,
            staging=(self._staging.free, self._staging.buffers),
            arrivals=(self._arrivals_free, self._arrivals),
        )
