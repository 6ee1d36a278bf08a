"""The syncer's decisions: membership, clock, start and end of a run. Rounds are in `rounds`.

Rules: `step(event)` is the only door; it is synchronous and total (remote nonsense becomes a fate
or a refusal, only our own bugs raise). Time comes in with the event. Iteration is sorted, so the
same events give the same actions on every machine.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

from . import actions as act
from . import events as ev
from . import policy, report
from .claims import Claims
from .events import Knocked, Life
from .handover import Handovers
from .members import MEMBERS_MAX, Member, Members, Stage
from .parameters import SECOND_NS, Parameters
from .past import Past
from .room import Room
from .rounds import Rounds

#: Learners that were turned away and are remembered by name.
TURNED_AWAY_MAX: Final = 8


class RunState(str, Enum):
    """Life of a run within one life of the syncer."""

    EMPTY = "empty"
    SEEDING = "seeding"
    RUNNING = "running"
    ENDING = "ending"  # the last step is reached; learners are closing
    STOPPING = "stopping"
    STOPPED = "stopped"


class SyncerCore:
    """Decides; carries nothing out."""

    def __init__(
        self,
        parameters: Parameters,
        *,
        epoch: int,
        steps: int = 0,
        seeded: bool = False,
        past: Past | None = None,
        clean: bool = False,
        lineage: int | None = None,
        now_ns: int = 0,
    ) -> None:
        """A run without learners.

        `steps` is T (0: no end); `seeded` says that a model was given (--init). `past` is what
        earlier lives have made durable, `clean` that the last one was stopped in order; all that
        was announced since epoch `lineage` is in it (default: this epoch), so that learners may
        keep what they hold from then on.
        """
        self.parameters = parameters
        self.epoch = epoch
        self.steps = steps
        self.state = RunState.EMPTY
        self.clock = 0
        self.members = Members()
        self._out: list[act.SyncerAction] = []
        self.rounds = Rounds(parameters, self.members, self._out)
        self.handovers = Handovers(parameters, self.members, self._out)
        self.refused: dict[str, int] = {}
        #: by name, the last ones of `refused` that were not let in since: how often, when last, why
        self.turned_away: dict[str, tuple[int, int, str]] = {}
        self.room = Room()
        self._lineage = epoch if lineage is None else lineage
        self._seeded = seeded
        self._assembled = not parameters.lockstep
        self._claims = Claims()
        self._now_ns = self.started_ns = now_ns
        self._end_deadline_ns = 0
        self._stop_reason = ""
        #: the last step was reached (as opposed to: the operator stops the daemon)
        self._ended = False
        #: names that took part in the last rounds of an earlier life and are not back yet
        self._awaited: set[str] = set()
        self._awaited_until_ns = now_ns + policy.regather_ns(parameters)
        self._said_who_lacks = False
        if past is not None:
            self.state, self.clock = RunState.RUNNING, past.clock
            self.rounds.resume(past)
            self.members.remember(past)
            if self._lineage < epoch and not (clean and self._at_the_end()):
                self._awaited = past.lately(parameters.max_staleness)

    def step(self, event: ev.SyncerEvent) -> tuple[act.SyncerAction, ...]:
        """Take one event in; return what is to be done, in order. Raises only on our own bugs."""
        now = max(event.now_ns, self._now_ns)
        self._mind_the_gap(now)
        self._now_ns = now
        self._dispatch(event, now)
        self._settle(now)
        actions = tuple(self._out)
        self._out.clear()
        return actions

    def next_deadline_ns(self) -> int:
        """The latest time at which a Ticked event must come if nothing else happens."""
        deadlines = [self._now_ns + self.parameters.lease_ns // 4]
        deadlines += [member.lease_until_ns for member in self.members]
        deadlines += self._claims.deadlines()
        deadlines += self.rounds.deadlines(self._now_ns)
        deadlines += self.handovers.deadlines()
        if self.state is RunState.ENDING:
            deadlines.append(self._end_deadline_ns)
        if self._lacks_somebody(self._now_ns):
            deadlines.append(self._awaited_until_ns)
        return max(self._now_ns, min(deadlines))

    # ---- events ----

    def _dispatch(self, event: ev.SyncerEvent, now: int) -> None:
        match event:
            case Knocked():
                self._knock(event, now)
            case ev.MergeDone():
                self.rounds.merge_done(event.round, event.ok)
            case ev.CommitDone():
                self.rounds.commit_done(event.round, now)
            case ev.CommitFailed():
                last = self.state is RunState.STOPPING
                self.rounds.commit_failed(event.round, event.reason, now, last=last)
            case ev.StopAsked():
                if self.state not in (RunState.STOPPING, RunState.STOPPED):
                    self._wind_down(now, event.reason)
            case ev.Received():
                self.rounds.receive(event)
            case ev.TransferFailed():
                self.rounds.fail(event)
            case ev.StateOffered() | ev.StateTaken() | ev.StateFailed():
                self.handovers.hear(event, self.clock)
            case ev.PlaceAsked():
                index = self.members.reserve(event.name, now)
                count = self.parameters.learners
                self._out.append(act.TellPlace(name=event.name, index=index, count=count))
            case ev.FromLife():
                member = self.members.get(event.life)
                if member is not None:
                    self._from_member(event, member, now)
                elif isinstance(event, (ev.Barred, ev.Left, ev.Vanished)):
                    self._claims.forget(event.life)
                elif not isinstance(event, ev.ProbeAnswered):
                    self._out.append(act.AskHello(life=event.life))

    def _from_member(self, event: ev.FromLife, member: Member, now: int) -> None:
        if not isinstance(event, ev.Vanished):
            member.lease_until_ns = now + self.parameters.lease_ns
        match event:
            case ev.Progressed():
                if event.clock > member.clock:
                    member.moved_ns = now
                most = member.clock + 1 + (now - member.clocked_ns) // policy.STEP_MIN_NS
                member.clock = max(member.clock, min(event.clock, most))
                member.clocked_ns = now
                member.step_ns = event.step_ns
                member.tokens = event.tokens
            case ev.Offered():
                # one that closes moves by giving: by words alone it could hold up rounds for good
                if self.rounds.offer(event, member) or not member.closing:
                    member.moved_ns = now
            case ev.ProbeAnswered():
                claim = self._claims.get(member.life.name)
                if claim is not None and claim.nonce == event.nonce:
                    self._object(member)
            case ev.SeedReceived():
                self._seed_received(member)
            case ev.SeedFailed():
                self._seed_failed(member, event)
            case ev.TookModel():
                if member.stage is Stage.TAKING:
                    self._make_live(member)
                    member.moved_ns = now
            case ev.CloseAsked():
                member.close(now)
                self.rounds.ask_closing(member, event.fragments)
            case ev.Barred() | ev.Left() | ev.Vanished():
                self._turn_out(member, _why_gone(event), tell=isinstance(event, ev.Barred))
            case ev.Heard():
                pass

    # ---- the door ----

    def _knock(self, knock: Knocked, now: int) -> None:
        holder = self.members.holder(knock.life.name)
        problem = knock.problem
        if problem and problem[0] == "room":
            self._no_room(problem[1])
            problem = self.room.refusal(now)
        refusal = problem or self._fence(knock) or self._door_closed(knock.life, holder)
        if refusal is not None:
            self._refuse(knock.life, *refusal)
        elif holder is None:
            self._admit(knock, now)
        elif holder.life == knock.life:
            self._object(holder)
            self._readmit(holder, knock, now)
        else:
            claim = self._claims.get(knock.life.name)
            if claim is None:
                claim = self._claims.open(knock, now)
                self._out.append(act.Probe(life=holder.life, nonce=claim.nonce))
            elif claim.knock.life != knock.life:
                self._refuse(knock.life, "name", self._name_taken(knock.life.name))

    def _fence(self, knock: Knocked) -> tuple[str, str] | None:
        """Whoever has known a newer life of the syncer must not be taken back to this one."""
        if knock.epoch <= self.epoch:
            return None
        return "fenced", policy.older_life(self.epoch, knock.epoch)

    def _door_closed(self, life: Life, holder: Member | None) -> tuple[str, str] | None:
        if self.state in (RunState.STOPPING, RunState.STOPPED) and not self._ended:
            return "stopping", "the syncer is being stopped: training goes on, ask again later."
        no_room = self.room.refusal(self._now_ns)
        if no_room and self.state is RunState.EMPTY:
            return no_room
        back = (holder is not None and holder.life == life) or self.members.kin(life)
        if self._ended and not (back and self.state is RunState.ENDING):
            return "ended", "this run has reached its end: start a new run, or raise --steps."
        if holder is None and len(self.members) >= MEMBERS_MAX:
            return "full", f"the syncer has {MEMBERS_MAX} learners: it takes no more."
        expected = self.parameters.learners
        if self.parameters.lockstep and holder is None and len(self.members) >= expected:
            return (
                "full",
                f"all {expected} places of this lockstep run are taken: more need another run.",
            )
        return None

    def _name_taken(self, name: str) -> str:
        return (
            f"a living learner is already called {name!r}: give each learner a name of its own"
            " (where there are keys, a key of its own)."
        )

    def _refuse(self, life: Life, code: str, text: str) -> None:
        self.refused[code] = self.refused.get(code, 0) + 1
        times = self.turned_away.pop(life.name, (0, 0, ""))[0]
        self.turned_away[life.name] = times + 1, self._now_ns, text
        if len(self.turned_away) > TURNED_AWAY_MAX:
            del self.turned_away[next(iter(self.turned_away))]
        self._out.append(act.Refuse(life=life, code=code, text=text))

    def _object(self, holder: Member) -> None:
        """The holder of a name is there: whoever claims it is not let in."""
        claim = self._claims.close(holder.life.name)
        if claim is not None:
            self._refuse(claim.knock.life, "name", self._name_taken(holder.life.name))

    def _admit(self, knock: Knocked, now: int) -> None:
        if self.state is RunState.EMPTY and not len(self.members):
            self.rounds.lay_out(knock.fragments)
            if self._seeded and knock.epoch == 0:
                self.state = RunState.RUNNING
            elif self._seeded:  # handing out the initial model again would undo its training
                self._seeded = False
                text = "it comes from an earlier life of the syncer: its model is taken, not --init"
                self._out.append(act.Note(text=f"learner {knock.life.name!r}: {text}"))
        for name in list(self.turned_away):  # whose key was barred goes by name and key
            if name.split(" ")[0] == knock.life.name:
                del self.turned_away[name]
        keep = self._may_keep(knock)
        member = self.members.add(
            knock.life, now, self.parameters.lease_ns, self.clock, knock.data_seed
        )
        self._welcome(member, knock, keep=keep)
        expected = self.parameters.learners
        if 0 < expected <= member.index:
            text = policy.caution_about_place(member.index, expected)
            self._out.append(act.Caution(life=member.life, text=text))
        twin = self.members.twin_of(member)
        if twin is not None:
            text = policy.caution_about_twin(twin.life.name, member.data_seed)
            self._out.append(act.Caution(life=member.life, text=text))

    def _readmit(self, member: Member, knock: Knocked, now: int) -> None:
        """The same life comes back over a new connection: what was on the old one is lost."""
        self.rounds.forget(member.life)
        self.handovers.forget(member.life)
        member.lease_until_ns = now + self.parameters.lease_ns
        member.moved_ns = now
        member.closing = False
        if member.stage is Stage.SEEDING:
            self._unseed()
        member.stage = Stage.WAITING
        self._welcome(member, knock, keep=self._may_keep(knock))

    def _may_keep(self, knock: Knocked) -> bool:
        """Is what this life holds of our lineage, and is it on record what it has given?"""
        versions = self.rounds.versions
        return (
            self.state in (RunState.RUNNING, RunState.ENDING)
            and self._lineage <= knock.epoch <= self.epoch
            and self.members.kin(knock.life)
            and len(knock.versions) == len(versions)
            and all(held <= version for held, version in zip(knock.versions, versions, strict=True))
        )

    def _welcome(self, member: Member, knock: Knocked, *, keep: bool) -> None:
        count = self.parameters.learners or max(m.index + 1 for m in self.members)
        self._out.append(
            act.Admit(
                life=member.life, index=member.index, count=count, clock=self.clock, keep=keep
            )
        )
        self.members.ledger(member.life).kin = keep
        if knock.wants_state:
            self.handovers.want(member.life, self._now_ns)
        self._awaited.discard(member.life.name)
        if keep:  # else _settle hands it the whole model
            member.stage = Stage.LIVE
            # what it holds already, too: it may not leave before it knows
            self._announce_model(member)
        if self.state is RunState.ENDING:  # it may have missed that
            self._out.append(act.CompleteRun(lives=(member.life,), reason=self._stop_reason))

    # ---- the model ----

    def _hand_out_model(self) -> None:
        """Whoever waits gets the model, or is asked to bring it."""
        waiting = sorted(self.members.in_stage(Stage.WAITING), key=lambda member: member.order)
        if not waiting:
            return
        if self.state is RunState.EMPTY:
            seeder = waiting.pop(0)
            seeder.stage = Stage.SEEDING
            self.state = RunState.SEEDING
            self._out.append(act.RequestSeed(life=seeder.life))
        if self.state in (RunState.RUNNING, RunState.ENDING):
            for member in waiting:
                member.stage = Stage.TAKING
                self._announce_model(member)

    def _seed_received(self, member: Member) -> None:
        if member.stage is not Stage.SEEDING or self.state is not RunState.SEEDING:
            return
        self._make_live(member)
        self.state = RunState.RUNNING
        self._out.append(act.Note(text=f"learner {member.life.name!r} brought the model"))
        # it holds version 0, but must know that we do: it may not leave before
        self._announce_model(member)

    def _announce_model(self, member: Member) -> None:
        for fragment in range(len(self.rounds.versions)):
            self.rounds.announce(fragment, [member], self.clock)

    def _make_live(self, member: Member) -> None:
        member.stage = Stage.LIVE
        self.members.ledger(member.life).kin = True

    def _unseed(self) -> None:
        """The seeder is gone before its model was here: the next one that waits seeds the run."""
        if self.state is RunState.SEEDING:
            self.state = RunState.EMPTY

    def _seed_failed(self, member: Member, event: ev.SeedFailed) -> None:
        if event.full and self.state is RunState.SEEDING:
            self._no_room(event.reason)
        else:
            self._turn_out(member, f"its model cannot seed the run: {event.reason}", tell=True)

    def _no_room(self, reason: str) -> None:
        """The first model cannot be saved: there is nothing to train together for now."""
        if self.room.lack(self._now_ns, reason):
            text = f"the first model cannot be saved, and learners are turned away: {reason}"
            self._out.append(act.Note(text=text, urgent=True))
        refusal = self.room.refusal(self._now_ns)
        assert refusal is not None
        for member in list(self.members):
            self._refuse(member.life, *refusal)
            self._turn_out(member, "there is no room for its model", tell=False)

    # ---- leaving ----

    def _turn_out(self, member: Member, reason: str, *, tell: bool) -> None:
        self.members.remove(member.life)
        self.rounds.forget(member.life)
        self.handovers.forget(member.life)
        member.stay.hold(self._now_ns, holds=False)
        if member.stage is Stage.SEEDING:
            self._unseed()
        self._out.append(act.Dismiss(life=member.life, reason=reason, tell=tell))

    def _expire(self, now: int) -> None:
        for member in list(self.members):
            if now >= member.lease_until_ns:
                self._turn_out(member, f"silent for {self.parameters.lease:g} s", tell=False)
        for name in self._claims.names():
            claim, holder = self._claims.get(name), self.members.holder(name)
            if claim is None or (holder is not None and now < claim.deadline_ns):
                continue
            self._claims.close(name)
            if holder is not None:
                self._turn_out(holder, "a newer life of the same name replaced it", tell=True)
            self._knock(claim.knock, now)

    def _mind_the_gap(self, now: int) -> None:
        """The syncer itself was asleep (suspended, stopped): nobody could give a sign meanwhile."""
        gap, half = now - self._now_ns, self.parameters.lease_ns // 2
        if gap <= half:
            return
        for member in self.members:
            member.lease_until_ns = max(member.lease_until_ns, now + half)
            member.moved_ns = max(member.moved_ns, now - half)
            member.stay.slept(gap)
        self.rounds.postpone(now - half)
        self._claims.postpone(now + policy.PROBE_NS // 2)
        self._end_deadline_ns += gap
        self._awaited_until_ns += gap

    # ---- time passes ----

    def _settle(self, now: int) -> None:
        """Everything that follows from the new state: leases, clock, rounds, the end."""
        self._expire(now)
        self._hand_out_model()
        if self.state is RunState.RUNNING:
            if self.room.reason:
                self.room.reason = ""
                self._out.append(act.Note(text="there is room again: the first model is saved"))
            self._advance(now)
        going = self.state in (RunState.RUNNING, RunState.ENDING)
        if going and not self._lacks_somebody(now):
            self.rounds.launch(now, self.clock)
        self.rounds.settle(now)
        self.handovers.settle(now, self.clock)
        if self.state is RunState.ENDING and (
            not len(self.members) or now >= self._end_deadline_ns
        ):
            self._wind_down(now, self._stop_reason)
        if self.state is RunState.STOPPING and not self.rounds.flights:
            self.state = RunState.STOPPED
            lives = tuple(member.life for member in self.members)
            self._out.append(act.Stop(lives=lives, reason=self._stop_reason))

    def _advance(self, now: int) -> None:
        training = self.members.training(now, self.parameters)
        if self.parameters.lockstep:
            self._assembled = self._assembled or len(training) >= self.parameters.learners
            # whoever still takes the model must find the clock where it was told that it stands
            joining = self.members.in_stage(Stage.WAITING, Stage.TAKING)
            if not self._assembled or joining:
                return
        before, clocks = self.clock, [member.clock for member in training]
        self.clock = policy.advance_clock(before, clocks, self.parameters.wanted)
        if self.clock == before and not self.parameters.lockstep:
            self._carry(training)
        if self.clock > before:
            fragments = len(self.rounds.versions)
            upto = min(self.clock, self.steps) if self.steps else self.clock
            self.rounds.enqueue(policy.due_between(before, upto, self.parameters, fragments))
        if self._lacks_somebody(now):
            self._say_who_lacks(now)
        elif self._at_the_end():
            self._end(now)

    def _at_the_end(self) -> bool:
        return 0 < self.steps <= self.clock

    def _carry(self, training: list[Member]) -> None:
        """Tell those behind a standing clock where it stands, once: no round may come to tell them.

        The clock stood with others who are gone now, or moved while these were joining.
        """
        behind = [member for member in training if member.clock < self.clock]
        needed = policy.effective_quorum(self.parameters.wanted, len(training))
        if len(training) - len(behind) < needed:
            unaware = [member for member in behind if member.carried < self.clock]
            for member in unaware:
                member.carried = self.clock
            self.rounds.announce(0, unaware, self.clock)

    def _end(self, now: int) -> None:
        """T is reached: learners close, then the run is over."""
        self.state, self._ended = RunState.ENDING, True
        self._stop_reason = f"the run has reached its last step ({self.steps})"
        patience = self.parameters.close_timeout + self.parameters.lease
        self._end_deadline_ns = now + int(patience * SECOND_NS)
        lives = tuple(member.life for member in self.members)
        self._out.append(act.CompleteRun(lives=lives, reason=self._stop_reason))

    def _lacks_somebody(self, now: int) -> bool:
        """Is somebody not back yet that may have trained on while the syncer was down?

        A merge without it would overwrite what it has done, and so would the end of the run.
        """
        return bool(self._awaited) and now < self._awaited_until_ns

    def awaited(self, now_ns: int) -> list[str]:
        """Names of an earlier life that merges wait for."""
        return sorted(self._awaited) if self._lacks_somebody(now_ns) else []

    def _say_who_lacks(self, now: int) -> None:
        if self._said_who_lacks or not len(self.members):
            return
        self._said_who_lacks = True
        wait = (self._awaited_until_ns - now) / SECOND_NS
        text = f"merges wait for those that are not back since the restart, {wait:.0f} s at most"
        self._out.append(act.Note(text=f"{text}: {', '.join(self.awaited(now))}"))

    def _wind_down(self, now: int, reason: str) -> None:
        self.state = RunState.STOPPING
        self._stop_reason = reason
        self.rounds.wind_down(now, reason)

    # ---- looking in ----

    def status(self, now_ns: int) -> dict[str, Any]:
        """The core's part of the status body."""
        return report.status(self, now_ns)

    def check(self) -> None:
        """Assert every invariant. Cheap enough for every step of a test."""
        report.check(self)


def _why_gone(event: ev.Barred | ev.Left | ev.Vanished) -> str:
    if isinstance(event, ev.Barred):
        return event.reason
    return "it has finished" if isinstance(event, ev.Left) else "its connection is gone"
