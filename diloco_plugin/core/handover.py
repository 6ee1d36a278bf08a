"""The inner optimizer state on its way from a healthy learner to one that joins.

The global model comes from the syncer; momentum and second moments are the learners' own, and the
syncer only passes them on. `Handovers` is the syncer's half: who gives, and when to ask again.
`Wish` is the joiner's half. A donor decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from . import actions as act
from . import events as ev
from .events import Life
from .members import Member, Members, Stage
from .parameters import Parameters

#: How often one joiner's handover may begin anew, for whatever reason.
RESTARTS_MAX: Final = 3
ALONE: Final = "no other learner is training"
SLOW: Final = "the line is too slow for it: the run moves on faster than it arrives"


class Leg(str, Enum):
    """Where a handover stands."""

    WAITING = "waiting"  # all that could give are giving to somebody else
    ASKED = "asked"  # a donor makes its snapshot
    TRAVELING = "traveling"


@dataclass(slots=True)
class Handover:
    """One joiner's wish, until it ends with the state or with a reason."""

    joiner: Life
    deadline_ns: int
    leg: Leg = Leg.WAITING
    donor: Life | None = None
    ticket: int = 0
    #: of the snapshot
    clock: int = 0
    tickets: int = 0
    #: donors that could not give it
    failed: set[Life] = field(default_factory=set)
    reason: str = ALONE


class Handovers:
    """All handovers of a run; each donor gives to one joiner at a time."""

    def __init__(
        self, parameters: Parameters, members: Members, out: list[act.SyncerAction]
    ) -> None:
        """`out`: where the core's actions go."""
        self._parameters = parameters
        self._members = members
        self._out = out
        self._open: dict[Life, Handover] = {}
        self._tickets = 0

    def want(self, joiner: Life, now_ns: int) -> None:
        """A learner that was let in asks for it; `settle` looks for a donor."""
        self._open[joiner] = Handover(joiner, now_ns + self._parameters.lease_ns)

    def hear(self, event: ev.StateOffered | ev.StateTaken | ev.StateFailed, clock: int) -> None:
        """A donor or a joiner says something about its ticket, or the transfer has failed."""
        if isinstance(event, ev.StateOffered):
            self._offered(event, clock)
        elif isinstance(event, ev.StateTaken):  # whatever the ticket: it has it, or has better
            self._end(event.life)
        else:
            found = self._open.get(event.life)
            if found and found.ticket == event.ticket and found.leg is Leg.TRAVELING:
                self._fail(found, event.reason)

    def forget(self, life: Life) -> None:
        """A life is gone, or its connection is: what it wanted or gave is void."""
        self._end(life)
        for found in self._sorted():
            if found.donor == life:
                self._fail(found, f"{life.name!r} was lost while giving it")

    def settle(self, now_ns: int, clock: int) -> None:
        """Everything that follows from time, the clock, and who is there."""
        for found in self._sorted():
            if found.leg is Leg.ASKED and now_ns >= found.deadline_ns:
                assert found.donor is not None
                self._fail(found, f"{found.donor.name!r} did not answer")
            elif found.leg is Leg.TRAVELING and self._behind(found.clock, clock):
                self._restart(found, SLOW)
            if found.leg is Leg.WAITING:
                self._ask(found, now_ns)

    def deadlines(self) -> list[int]:
        """When `settle` must be called at the latest."""
        waiting = (Leg.WAITING, Leg.ASKED)
        return [found.deadline_ns for found in self._open.values() if found.leg in waiting]

    def check(self) -> None:
        """Assert every invariant."""
        donors = [found.donor for found in self._open.values() if found.donor is not None]
        assert len(donors) == len(set(donors)), "a donor gives to two"
        for found in self._open.values():
            assert self._members.get(found.joiner) is not None, "a joiner that is gone"
            assert found.donor is None or self._members.get(found.donor), "a donor that is gone"
            assert (found.donor is None) == (found.leg is Leg.WAITING)
            assert found.tickets <= 1 + RESTARTS_MAX

    # ---- one handover ----

    def _offered(self, event: ev.StateOffered, clock: int) -> None:
        found = self._by_ticket(event.ticket)
        if found is None or found.donor != event.life or found.leg is not Leg.ASKED:
            return
        if event.nothing:
            self._fail(found, f"{event.life.name!r} cannot give it: {event.nothing}")
        elif self._behind(event.clock, clock):
            self._restart(found, SLOW)
        else:
            found.leg, found.clock = Leg.TRAVELING, event.clock
            self._out.append(
                act.OfferState(
                    joiner=found.joiner,
                    ticket=found.ticket,
                    donor=event.life,
                    clock=event.clock,
                    size=event.size,
                )
            )

    def _ask(self, found: Handover, now_ns: int) -> None:
        if self._parameters.lockstep:
            self._give_up(found, "a lockstep run takes none: it is reproducible without")
            return
        able = [
            member
            for member in self._members.in_stage(Stage.LIVE)
            if self._may_give(member, found, now_ns)
        ]
        if not able or found.tickets > RESTARTS_MAX:
            self._give_up(found, found.reason)
            return
        busy = {other.donor for other in self._open.values()}
        idle = [member for member in able if member.life not in busy]
        if not idle:
            if now_ns >= found.deadline_ns:
                self._give_up(found, "all that could give theirs are giving it to others")
            return
        self._tickets += 1
        found.tickets += 1
        found.donor = min(idle, key=lambda member: (-member.clock, member.life.name)).life
        found.ticket, found.leg = self._tickets, Leg.ASKED
        found.deadline_ns = now_ns + self._parameters.lease_ns
        self._out.append(
            act.RequestState(donor=found.donor, ticket=found.ticket, joiner=found.joiner)
        )

    def _may_give(self, member: Member, found: Handover, now_ns: int) -> bool:
        """Live, training, and with something to give; the joiner itself never is."""
        trains = bool(member.tokens) and not member.closing
        quiet = member.quiet(now_ns, self._parameters.lease_ns)
        own = member.life in self._open
        return trains and not quiet and not own and member.life not in found.failed

    def _behind(self, snapshot: int, clock: int) -> bool:
        return clock - snapshot > self._parameters.sync_every

    def _end(self, joiner: Life) -> None:
        found = self._open.pop(joiner, None)
        if found is not None:
            self._let_go(found)

    def _fail(self, found: Handover, reason: str) -> None:
        """Not from this donor."""
        assert found.donor is not None
        found.failed.add(found.donor)
        self._restart(found, reason)

    def _restart(self, found: Handover, reason: str) -> None:
        found.reason = reason
        self._let_go(found)

    def _let_go(self, found: Handover) -> None:
        if found.donor is not None:
            self._out.append(
                act.EndState(donor=found.donor, ticket=found.ticket, joiner=found.joiner)
            )
        found.leg, found.donor = Leg.WAITING, None

    def _give_up(self, found: Handover, reason: str) -> None:
        del self._open[found.joiner]
        self._out.append(act.RefuseState(joiner=found.joiner, reason=reason))

    def _sorted(self) -> list[Handover]:
        return [self._open[life] for life in sorted(self._open)]

    def _by_ticket(self, ticket: int) -> Handover | None:
        return next((h for h in self._open.values() if h.donor and h.ticket == ticket), None)


class Wish:
    """The joiner's half: training must not begin before `open` is False."""

    def __init__(self, *, wanted: bool, own: int) -> None:
        """`own`: steps that its own optimizer state has behind it (a resumed checkpoint)."""
        self.open = wanted
        self._own = own
        self._ticket = 0
        self._source = ""
        self._arrived = False

    def hear(self, event: ev.StateEvent) -> list[act.LearnerAction]:
        """Something about it was said, or has arrived."""
        if not self.open:
            return []
        match event:
            case ev.StateAnnounced():
                return self._announced(event)
            case ev.StateArrived() if event.ticket == self._ticket:
                self._arrived = True
            case ev.StateUnusable() if event.ticket == self._ticket:
                self._ticket, self._arrived = 0, False
                return [act.SayState(ticket=event.ticket, problem=event.reason)]
            case ev.StateRefused():
                return [*self.drop(), *self._keep(event.reason)]
        return []

    def _announced(self, event: ev.StateAnnounced) -> list[act.LearnerAction]:
        dropped = self.drop()
        if event.clock <= self._own:
            reason = f"that of {event.donor!r} is no newer (step {event.clock})"
            return [*dropped, *self._keep(reason), act.SayState(ticket=event.ticket)]
        self._ticket = event.ticket
        self._source = f"from peer {event.donor!r} at step {event.clock}"
        return [*dropped, act.FetchState(ticket=event.ticket, size=event.size)]

    def take(self) -> list[act.LearnerAction]:
        """The training thread can take it now, if it is there."""
        if not self.open or not self._arrived:
            return []
        apply = act.ApplyState(ticket=self._ticket, source=self._source)
        self.open = False
        return [apply, act.SayState(ticket=self._ticket)]

    def drop(self) -> list[act.LearnerAction]:
        """What was on its way is void."""
        ticket, self._ticket, self._arrived = self._ticket, 0, False
        return [act.DropState(ticket=ticket)] if ticket else []

    def give_up(self) -> list[act.LearnerAction]:
        """Training has begun: what others have is no better any more."""
        if not self.open:
            return []
        self.open = False
        return self.drop()

    def _keep(self, reason: str) -> list[act.LearnerAction]:
        self.open = False
        kept = f"this learner's own, of step {self._own}" if self._own else "fresh"
        return [act.NoteState(text=f"{kept}: {reason}")]
