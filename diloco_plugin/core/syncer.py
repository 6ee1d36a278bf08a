"""The syncer's decisions: membership, clock, start and end of a run. Rounds are in `rounds`.

Rules: `step(event)` is the only door; it is synchronous and total (remote nonsense becomes a fate or a
refusal, only our own bugs raise). Time comes in with the event. Iteration is sorted, so the same events give the
same actions on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from . import policy
from .actions import (
    Admit,
    AskHello,
    Caution,
    CompleteRun,
    Dismiss,
    Fate,
    Note,
    Probe,
    Refuse,
    RequestSeed,
    Stop,
    SyncerAction,
)
from .events import (
    CloseAsked,
    CommitDone,
    FromLife,
    Heard,
    Knocked,
    Left,
    Life,
    MergeDone,
    Offered,
    ProbeAnswered,
    Progressed,
    Received,
    SeedFailed,
    SeedReceived,
    StopAsked,
    SyncerEvent,
    Ticked,
    TookModel,
    TransferFailed,
    Vanished,
)
from .members import Member, Members, Stage
from .parameters import SECOND_NS, Parameters
from .rounds import Rounds


class RunState(str, Enum):
    """Life of a run within one life of the syncer."""

    EMPTY = "empty"
    SEEDING = "seeding"
    RUNNING = "running"
    ENDING = "ending"  # the last step is reached; learners are closing
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Claim:
    """Somebody knocks under a name that is held; the holder has until the deadline to object."""

    knock: Knocked
    nonce: int
    deadline_ns: int


class SyncerCore:
    """Decides; carries nothing out."""

    def __init__(
        self,
        parameters: Parameters,
        *,
        epoch: int,
        steps: int = 0,
        seeded: bool = False,
        now_ns: int = 0,
    ) -> None:
        """A run without learners. `steps` is T (0: no end); `seeded` says that a model was given (--init)."""
        self.parameters = parameters
        self.epoch = epoch
        self.steps = steps
        self.state = RunState.EMPTY
        self.clock = 0
        self.members = Members()
        self._out: list[SyncerAction] = []
        self.rounds = Rounds(parameters, self.members, self._out.append)
        self.refused: dict[str, int] = {}
        self._seeded = seeded
        self._assembled = not parameters.lockstep
        self._claims: dict[str, Claim] = {}
        self._nonce = 0
        self._now_ns = now_ns
        self._started_ns = now_ns
        self._end_deadline_ns = 0
        self._stop_reason = ""

    def step(self, event: SyncerEvent) -> tuple[SyncerAction, ...]:
        """Take one event in; return what is to be done, in order. Raises only on our own bugs."""
        self._out.clear()
        now = max(event.now_ns, self._now_ns)
        self._mind_the_gap(now)
        self._now_ns = now
        self._dispatch(event, now)
        self._settle(now)
        return tuple(self._out)

    def next_deadline_ns(self) -> int:
        """The latest time at which a Ticked event must come if nothing else happens."""
        deadlines = [self._now_ns + self.parameters.lease_ns // 4]
        deadlines += [member.lease_until_ns for member in self.members]
        deadlines += [claim.deadline_ns for claim in self._claims.values()]
        deadlines += [
            f.grace_until_ns for f in self.rounds.flights.values() if f.phase.value == "grace"
        ]
        if self.state is RunState.ENDING:
            deadlines.append(self._end_deadline_ns)
        return max(self._now_ns, min(deadlines))

    # ---- events ----

    def _dispatch(self, event: SyncerEvent, now: int) -> None:
        match event:
            case Knocked():
                self._knock(event, now)
            case MergeDone():
                self.rounds.merge_done(event.round, event.ok)
            case CommitDone():
                self.rounds.commit_done(event.round, now)
            case StopAsked():
                if self.state not in (RunState.STOPPING, RunState.STOPPED):
                    self._wind_down(now, event.reason)
            case Received():
                self.rounds.receive(event)
            case TransferFailed():
                self.rounds.fail(event)
            case Ticked():
                pass
            case FromLife():
                member = self.members.get(event.life)
                if member is not None:
                    self._from_member(event, member, now)
                elif not isinstance(event, (Left, Vanished, ProbeAnswered)):
                    self._out.append(AskHello(life=event.life))

    def _from_member(self, event: FromLife, member: Member, now: int) -> None:
        if not isinstance(event, Vanished):
            member.lease_until_ns = now + self.parameters.lease_ns
        match event:
            case Progressed():
                if event.clock > member.clock:
                    member.moved_ns = now
                member.clock = min(max(member.clock, event.clock), policy.CLOCK_MAX)
                member.step_ns = event.step_ns
                member.tokens = event.tokens
            case Offered():
                member.moved_ns = now
                self.rounds.offer(event, member)
            case ProbeAnswered():
                self._still_here(member, event.nonce)
            case SeedReceived():
                self._seed_received(member)
            case SeedFailed():
                self._turn_out(member, f"its model cannot seed the run: {event.reason}", tell=True)
            case TookModel():
                if member.stage is Stage.TAKING:
                    member.stage = Stage.LIVE
                    member.moved_ns = now
            case CloseAsked():
                member.closing = True
                self.rounds.ask_closing(member.life, event.fragments)
            case Left():
                self._turn_out(member, "it has finished", tell=False)
            case Vanished():
                self._turn_out(member, "its connection is gone", tell=False)
            case Heard():
                pass

    # ---- the door ----

    def _knock(self, knock: Knocked, now: int) -> None:
        refusal = knock.problem or self._door_closed(knock)
        if refusal is not None:
            self._refuse(knock.life, *refusal)
            return
        holder = self.members.holder(knock.life.name)
        if holder is None:
            self._admit(knock, now)
        elif holder.life == knock.life:
            self._readmit(holder, knock, now)
        elif knock.life.name in self._claims:
            if self._claims[knock.life.name].knock.life != knock.life:
                self._refuse(knock.life, "name", self._name_taken(knock.life.name))
        else:
            self._nonce += 1
            self._claims[knock.life.name] = Claim(knock, self._nonce, now + policy.PROBE_NS)
            self._out.append(Probe(life=holder.life, nonce=self._nonce))

    def _door_closed(self, knock: Knocked) -> tuple[str, str] | None:
        if self.state in (RunState.ENDING, RunState.STOPPING, RunState.STOPPED):
            return "ended", "this run has reached its end: start a new run, or raise --steps."
        expected = self.parameters.learners
        newcomer = self.members.holder(knock.life.name) is None
        if self.parameters.lockstep and newcomer and len(self.members) >= expected:
            return (
                "full",
                f"all {expected} places of this lockstep run are taken: raise --learners.",
            )
        return None

    def _name_taken(self, name: str) -> str:
        return f"a living learner is already called {name!r}: give each learner a name of its own."

    def _refuse(self, life: Life, code: str, text: str) -> None:
        self.refused[code] = self.refused.get(code, 0) + 1
        self._out.append(Refuse(life=life, code=code, text=text))

    def _still_here(self, holder: Member, nonce: int) -> None:
        claim = self._claims.get(holder.life.name)
        if claim is not None and claim.nonce == nonce:
            del self._claims[holder.life.name]
            self._refuse(claim.knock.life, "name", self._name_taken(holder.life.name))

    def _admit(self, knock: Knocked, now: int) -> None:
        if not self.rounds.versions:
            self.rounds.lay_out(knock.fragments)
            if self._seeded:
                self.state = RunState.RUNNING
        member = self.members.add(
            knock.life, now, self.parameters.lease_ns, self.clock, knock.data_seed
        )
        self._welcome(member)
        twin = self.members.twin_of(member)
        if twin is not None:
            self._out.append(
                Caution(
                    life=member.life,
                    text=f"learner {twin.life.name!r} draws its data with the same seed ({member.data_seed}):"
                    " averaging two equal runs teaches nothing; set another data seed or use"
                    " diloco_plugin.shard().",
                )
            )

    def _readmit(self, member: Member, knock: Knocked, now: int) -> None:
        """The same life comes back over a new connection: what was on the old one is lost."""
        self.rounds.forget(member.life)
        member.lease_until_ns = now + self.parameters.lease_ns
        member.moved_ns = now
        member.closing = False
        if member.stage is Stage.SEEDING:
            self.state = RunState.EMPTY
        member.stage = Stage.WAITING
        keep = (
            self.state is RunState.RUNNING
            and knock.epoch == self.epoch
            and len(knock.versions) == len(self.rounds.versions)
        )
        self._welcome(member, keep=keep)
        if keep:
            self._catch_up(member, knock.versions)
        # otherwise _settle hands it the whole model

    def _welcome(self, member: Member, *, keep: bool = False) -> None:
        count = self.parameters.learners or max(m.index + 1 for m in self.members)
        self._out.append(
            Admit(
                life=member.life,
                index=member.index,
                count=count,
                clock=self.clock,
                keep=keep,
            )
        )

    def _catch_up(self, member: Member, held: tuple[int, ...]) -> None:
        """A returning life holds every fragment in some version: it may contribute at once."""
        member.stage = Stage.LIVE
        for fragment, version in enumerate(self.rounds.versions):
            if version > held[fragment]:
                self.rounds.announce(fragment, [member], self.clock, exact=False)

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
            self._out.append(RequestSeed(life=seeder.life))
        if self.state in (RunState.RUNNING, RunState.ENDING):
            for member in waiting:
                member.stage = Stage.TAKING
                for fragment in range(len(self.rounds.versions)):
                    self.rounds.announce(fragment, [member], self.clock, exact=False)

    def _seed_received(self, member: Member) -> None:
        if member.stage is Stage.SEEDING:
            member.stage = Stage.LIVE
            self.state = RunState.RUNNING
            self._out.append(Note(text=f"learner {member.life.name!r} brought the model"))

    # ---- leaving ----

    def _turn_out(self, member: Member, reason: str, *, tell: bool) -> None:
        self.members.remove(member.life)
        self.rounds.forget(member.life)
        if member.stage is Stage.SEEDING:
            self.state = RunState.EMPTY
        self._out.append(Dismiss(life=member.life, reason=reason, tell=tell))

    def _expire(self, now: int) -> None:
        for member in list(self.members):
            if now >= member.lease_until_ns:
                self._turn_out(member, f"silent for {self.parameters.lease:g} s", tell=False)
        for name in sorted(self._claims):
            claim, holder = self._claims[name], self.members.holder(name)
            if holder is not None and now < claim.deadline_ns:
                continue
            del self._claims[name]
            if holder is not None:
                self._turn_out(holder, "a newer life of the same name replaced it", tell=True)
            self._admit(claim.knock, now)

    def _mind_the_gap(self, now: int) -> None:
        """The syncer itself was asleep (suspended, stopped): nobody could renew a lease meanwhile."""
        if now - self._now_ns > self.parameters.lease_ns // 2:
            for member in self.members:
                member.lease_until_ns = max(
                    member.lease_until_ns, now + self.parameters.lease_ns // 2
                )

    # ---- time passes ----

    def _settle(self, now: int) -> None:
        """Everything that follows from the new state: leases, clock, rounds, the end."""
        self._expire(now)
        self._hand_out_model()
        if self.state is RunState.RUNNING:
            self._advance(now)
        if self.state in (RunState.RUNNING, RunState.ENDING):
            self.rounds.launch(now, self.clock)
        self.rounds.settle(now)
        if self.state is RunState.ENDING and (
            not len(self.members) or now >= self._end_deadline_ns
        ):
            self._wind_down(now, self._stop_reason)
        if self.state is RunState.STOPPING and not self.rounds.flights:
            self.state = RunState.STOPPED
            lives = tuple(member.life for member in self.members)
            self._out.append(Stop(lives=lives, reason=self._stop_reason))

    def _advance(self, now: int) -> None:
        training = [
            member
            for member in self.members.in_stage(Stage.LIVE)
            if not member.closing
            and (self.parameters.lockstep or not member.quiet(now, self.parameters.lease_ns))
        ]
        if self.parameters.lockstep:
            self._assembled = self._assembled or len(training) >= self.parameters.learners
            if not self._assembled:
                return
        wanted = self.parameters.learners if self.parameters.lockstep else self.parameters.quorum
        before = self.clock
        self.clock = policy.advance_clock(before, [member.clock for member in training], wanted)
        if self.clock > before:
            fragments = len(self.rounds.versions)
            upto = min(self.clock, self.steps) if self.steps else self.clock
            self.rounds.enqueue(policy.due_between(before, upto, self.parameters, fragments))
        if self.steps and self.clock >= self.steps:
            self._end(now)

    def _end(self, now: int) -> None:
        """T is reached: learners close, then the run is over."""
        self.state = RunState.ENDING
        self._stop_reason = f"the run has reached its last step ({self.steps})"
        patience = self.parameters.close_timeout + self.parameters.lease
        self._end_deadline_ns = now + int(patience * SECOND_NS)
        lives = tuple(member.life for member in self.members)
        self._out.append(CompleteRun(lives=lives, reason=self._stop_reason))

    def _wind_down(self, now: int, reason: str) -> None:
        self.state = RunState.STOPPING
        self._stop_reason = reason
        self.rounds.wind_down(now, reason)

    # ---- looking in ----

    def status(self, now_ns: int) -> dict[str, Any]:
        """The core's part of the status body: a plain tree (units in the key: `_s` seconds)."""
        rounds, lease = self.rounds, self.parameters.lease_ns
        busy = {flight.fragment: flight.phase.value for flight in rounds.flights.values()}
        learners = []
        for member in self.members:
            quiet = member.stage is Stage.LIVE and member.quiet(now_ns, lease)
            state = "closing" if member.closing else "quiet" if quiet else member.stage.value
            learners.append(
                {
                    "name": member.life.name,
                    "index": member.index,
                    "state": state,
                    "clock": member.clock,
                    "lag": self.clock - member.clock,
                    "step_s": member.step_ns / SECOND_NS,
                    "rounds_asked": member.rounds_asked,
                    "rounds_joined": member.rounds_joined,
                    "lease_s": max(0, member.lease_until_ns - now_ns) / SECOND_NS,
                    "tokens": member.tokens,
                }
            )
        fates: dict[str, Any] = {fate.value: count for fate, count in sorted(rounds.fates.items())}
        fates["rejected"] = dict(sorted(rounds.rejections.items()))
        for fate in ("merged", "late", "stale", "abandoned"):
            fates.setdefault(fate, 0)
        return {
            "epoch": self.epoch,
            "state": self.state.value,
            "clock": self.clock,
            "steps": self.steps,
            "uptime_s": (now_ns - self._started_ns) / SECOND_NS,
            "learners": learners,
            "fragments": [
                {"index": index, "version": version, "state": busy.get(index, "idle")}
                for index, version in enumerate(rounds.versions)
            ],
            "fates": fates,
            "refused": dict(sorted(self.refused.items())),
            "rounds": {
                "merged": rounds.merged,
                "abandoned": rounds.abandoned,
                "in_flight": len(rounds.flights),
                "queued": len(rounds.queue) + len(rounds.closing_queue),
                "grace_s": rounds.grace_ns() / SECOND_NS,
                "quorum_s": rounds.quorum_ns / SECOND_NS,
                "sync_s": rounds.sync_ns / SECOND_NS,
                "joined_mean": rounds.joined / rounds.merged if rounds.merged else 0.0,
            },
        }

    def check(self) -> None:
        """Assert every invariant. Cheap enough for every step of a test."""
        rounds = self.rounds
        assert rounds.offered == sum(rounds.fates.values()) + rounds.pending(), (
            "a push without fate"
        )
        assert sum(rounds.rejections.values()) == rounds.fates[Fate.REJECTED]
        fragments = [flight.fragment for flight in rounds.flights.values()]
        assert len(fragments) == len(set(fragments)), "two rounds of one fragment"
        assert len(rounds.queue) == len(set(rounds.queue)), "a fragment is queued twice"
        indices = [member.index for member in self.members]
        assert len(indices) == len(set(indices)), "two learners share an index"
        seeders = self.members.in_stage(Stage.SEEDING)
        assert len(seeders) == (self.state is RunState.SEEDING), (
            "one seeder while seeding, else none"
        )
