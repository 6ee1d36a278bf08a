"""Rounds: pull, quorum, grace, merge, commit, announce, and the one fate of every push.

It knows fragments, versions and who answered; it knows nothing about tensors.
"""

from __future__ import annotations

from collections import Counter, deque

from . import actions as act
from . import policy
from .actions import Fate
from .closings import Closings
from .events import Life, Offered, Received, TransferFailed
from .flight import Ask, Phase, Push, Round
from .members import Member, Members, Stage
from .norms import Norms
from .parameters import Parameters
from .past import Past


class Rounds:
    """All rounds of a run. Every method may emit actions; nothing else is changed from outside."""

    def __init__(
        self, parameters: Parameters, members: Members, out: list[act.SyncerAction]
    ) -> None:
        """Actions are appended to `out`, the core's."""
        self.parameters = parameters
        self._members = members
        self._out = out
        self.versions: list[int] = []
        self.queue: deque[int] = deque()
        self.closings = Closings()
        self.flights: dict[int, Round] = {}
        self.next_round = 0
        self.offered = 0
        self.fates: Counter[Fate] = Counter()
        self.rejections: Counter[str] = Counter()
        self.merged = 0
        self.abandoned = 0
        self.joined = 0
        self.quorum_ns = 0
        self.sync_ns = 0
        #: why nothing can be made durable now
        self.stuck = ""
        self._norms: list[Norms] = []
        #: by fragment, whether its version came out of a closing round: it travels in fp32
        self._exact: list[bool] = []

    def lay_out(self, fragments: int) -> None:
        """The run's model is known now: it has so many fragments."""
        self.versions = [0] * fragments
        self._exact = [False] * fragments
        self._norms = [Norms() for _ in range(fragments)]

    def resume(self, past: Past) -> None:
        """Go on from what an earlier life of the syncer has made durable."""
        self.lay_out(len(past.versions))
        self.versions, self._exact = list(past.versions), list(past.exact)
        self.next_round = past.next_round
        for norms, history in zip(self._norms, past.norms, strict=True):
            norms.history.extend(history)

    def _emit(self, action: act.SyncerAction) -> None:
        self._out.append(action)

    # ---- opening ----

    def enqueue(self, fragments: list[int]) -> None:
        """Fragments that have come due join the FIFO, once."""
        for fragment in fragments:
            if fragment not in self.queue:
                self.queue.append(fragment)

    def ask_closing(self, member: Member, fragments: tuple[int, ...]) -> None:
        """A finished learner has progress in these fragments."""
        known = len(self.versions)
        self.closings.ask(member, (fragment for fragment in fragments if 0 <= fragment < known))

    def launch(self, now_ns: int, clock: int) -> None:
        """Open as many due rounds as may be in flight, one per fragment."""
        live = self._members.in_stage(Stage.LIVE)
        if not any(self._awake(member, now_ns) for member in live):
            return
        busy = {flight.fragment for flight in self.flights.values()}
        due = self.closings.due({member.life for member in live})
        for fragment in self._admissible(due, busy, closing=True):
            self._open(now_ns, clock, fragment, live, self.closings.take(fragment, live))
        for fragment in self._admissible(list(self.queue), busy, closing=False):
            self.queue.remove(fragment)
            self._open(now_ns, clock, fragment, live, set())

    def _admissible(self, fragments: list[int], busy: set[int], *, closing: bool) -> list[int]:
        running = sum(flight.closing == closing for flight in self.flights.values())
        free = max(0, policy.in_flight_max(self.parameters, closing=closing) - running)
        chosen = [fragment for fragment in fragments if fragment not in busy][:free]
        busy.update(chosen)
        return chosen

    def _open(
        self, now_ns: int, clock: int, fragment: int, live: list[Member], requesters: set[Life]
    ) -> None:
        closing = bool(requesters)
        flight = Round(
            number=self.next_round,
            fragment=fragment,
            closing=closing,
            clock=clock,
            opened_ns=now_ns,
            asked={member.life: Ask.WAITING for member in live},
            requesters=requesters,
        )
        self.next_round += 1
        self.flights[flight.number] = flight
        for member in live:
            member.rounds_asked += 1
        self._emit(
            act.Pull(
                lives=tuple(flight.asked),
                round=flight.number,
                fragment=fragment,
                version=self.versions[fragment],
                closing=closing,
                reason="a learner has finished" if closing else f"due at step {clock}",
            )
        )

    # ---- answers ----

    def offer(self, event: Offered, member: Member) -> bool:
        """An answer to a pull; remote nonsense becomes a fate. True: its bytes may come."""
        flight = self.flights.get(event.round)
        if event.nothing:
            self._nothing_comes(flight, member)
            return False
        self.offered += 1
        fate, reason = self._judge(event, member, flight)
        if fate is not None:
            self._nothing_comes(flight, member)
            self._tell(member.life, event.round, event.fragment, fate, reason)
            return False
        assert flight is not None
        flight.asked[member.life] = Ask.SENDING
        flight.pushes[member.life] = Push(event.base, event.steps, event.tokens)
        self._emit(act.Receive(life=member.life, round=event.round, fragment=event.fragment))
        return True

    def _nothing_comes(self, flight: Round | None, member: Member) -> None:
        if flight and flight.asked.get(member.life) is Ask.WAITING:
            flight.asked[member.life] = Ask.NOTHING
            member.mute = False

    def _judge(
        self, event: Offered, member: Member, flight: Round | None
    ) -> tuple[Fate | None, str]:
        """The fate of an offer that may not come, or None when it may."""
        if event.fragment >= len(self.versions):
            return Fate.REJECTED, "unknown fragment"
        if event.round >= self.next_round:
            return Fate.REJECTED, "unknown round"
        if flight and flight.fragment != event.fragment:
            return Fate.REJECTED, "wrong fragment"
        if member.stage is not Stage.LIVE:
            return Fate.REJECTED, "unsynced"
        ledger = self._members.ledger(member.life)
        if event.round <= ledger.answered.get(event.fragment, -1):
            return Fate.REJECTED, "replayed"
        state = flight.asked.get(member.life) if flight else Ask.GONE
        if state not in (Ask.WAITING, Ask.GONE):
            return Fate.REJECTED, "not asked"
        ledger.answered[event.fragment] = event.round
        member.mute = False
        self.closings.answered(member.life)
        if flight is None or not flight.open or state is Ask.GONE:
            return Fate.LATE, "the round is over"
        verdict = policy.judge_offer(
            base=event.base,
            version=self.versions[event.fragment],
            consumed=ledger.consumed.get(event.fragment, -1),
            steps=event.steps,
            tokens=event.tokens,
            max_staleness=self.parameters.max_staleness,
        )
        if verdict.yes:
            return None, verdict.reason
        return (Fate.STALE if verdict.reason == "stale" else Fate.REJECTED), verdict.reason

    def receive(self, event: Received) -> None:
        """All bytes of a push are here: guard, then fold (or keep it, in lockstep)."""
        flight = self.flights.get(event.round)
        if flight is None or flight.asked.get(event.life) is not Ask.SENDING:
            self._emit(act.Discard(life=event.life, round=event.round, fragment=event.fragment))
            return
        push = flight.pushes[event.life]
        if not event.finite:
            self._refuse(flight, event.life, "not finite")
            return
        history = self._norms[flight.fragment].history
        if not policy.judge_norm(event.norm, push.steps, history, self.parameters.norm_guard).yes:
            flight.refused_for_norm += 1
            self._refuse(flight, event.life, "norm")
            return
        push.norm = event.norm
        flight.asked[event.life] = Ask.IN
        if not self.parameters.lockstep:
            self._fold(flight, event.life)

    def fail(self, event: TransferFailed) -> None:
        """The bytes of a push were wrong."""
        flight = self.flights.get(event.round)
        if flight and flight.asked.get(event.life) is Ask.SENDING:
            if event.life in flight.requesters:
                self.closings.disregard(event.life)
            self._refuse(flight, event.life, event.reason)

    def forget(self, life: Life) -> None:
        """A life is over: nobody waits for it. What it had delivered completely still counts."""
        for flight in self.flights.values():
            state = flight.asked.get(life)
            if state is Ask.SENDING:
                self._withdraw(flight, life, Fate.ABANDONED, "the learner is gone")
            if state in (Ask.WAITING, Ask.SENDING):
                flight.asked[life] = Ask.GONE
            flight.requesters.discard(life)
        self.closings.forget(life)

    def _refuse(self, flight: Round, life: Life, reason: str) -> None:
        flight.asked[life] = Ask.NOTHING
        self._withdraw(flight, life, Fate.REJECTED, reason)

    def _withdraw_unfinished(self, flight: Round, fate: Fate, reason: str) -> None:
        """What is still on its way comes too late for this round."""
        for life, state in flight.asked.items():
            if state is Ask.SENDING:
                flight.asked[life] = Ask.NOTHING
                self._withdraw(flight, life, fate, reason)

    def _withdraw(self, flight: Round, life: Life, fate: Fate, reason: str) -> None:
        del flight.pushes[life]
        self._emit(act.Discard(life=life, round=flight.number, fragment=flight.fragment))
        self._tell(life, flight.number, flight.fragment, fate, reason)

    def _fold(self, flight: Round, life: Life) -> None:
        push = flight.pushes[life]
        self._emit(
            act.Fold(
                life=life,
                round=flight.number,
                fragment=flight.fragment,
                tokens=push.tokens,
                steps=push.steps,
            )
        )

    # ---- quorum, grace, close ----

    def settle(self, now_ns: int) -> None:
        """Close every round whose quorum and grace are over; commit again what found no room."""
        held: set[Life] = set()
        for flight in list(self.flights.values()):
            if flight.open:
                held |= self._settle(flight, now_ns)
            elif flight.retry_ns and now_ns >= flight.retry_ns:
                flight.retry_ns = 0
                self._commit(flight)
        for member in self._members:
            member.stay.hold(now_ns, holds=member.life in held)

    def _settle(self, flight: Round, now_ns: int) -> set[Life]:
        """Close a round whose time has come; return for whose sake alone it blocks a due one."""
        waited_for = [life for life in flight.asked if self._waits_for(flight, life, now_ns)]
        if flight.phase is Phase.COLLECTING and waited_for:
            pushes = flight.count(Ask.IN)
            quorum = policy.effective_quorum(self.parameters.wanted, pushes + len(waited_for))
            if pushes >= quorum:
                flight.phase = Phase.GRACE
                flight.quorum = quorum
                self.quorum_ns = policy.moving_average(self.quorum_ns, now_ns - flight.opened_ns)
                flight.grace_until_ns = now_ns + self.grace_ns()
        # once there, a quorum stays: a quiet learner that wakes up does not take it back
        over = flight.phase is Phase.GRACE and now_ns >= flight.grace_until_ns
        closers = [life for life in waited_for if self._closes(life)]
        if over:
            closers = [life for life in closers if life in flight.requesters]
        held: set[Life] = set()
        if over or closers == waited_for:  # all others are done, or it goes on without them
            waited_for = closers
            if closers and self._blocks(flight, now_ns):
                waited_for = [life for life in closers if self._may_hold(life, now_ns)]
                held.update(waited_for)
        if not waited_for:
            quorum_only = f"quorum of {flight.quorum} and grace window over"
            self._close(flight, now_ns, quorum_only if over else "everybody asked has answered")
        return held

    def _blocks(self, flight: Round, now_ns: int) -> bool:
        """Does anybody who trains suffer from this round being open?"""
        due = flight.fragment in self.queue or (bool(self.queue) and not flight.closing)
        trains = due and not self.parameters.lockstep
        return trains and bool(self._members.training(now_ns, self.parameters))

    def _closes(self, life: Life) -> bool:
        member = self._members.get(life)
        return member is not None and member.closing

    def _may_hold(self, life: Life, now_ns: int) -> bool:
        """May a round that is ready otherwise wait for a leaver, though its fragment is due?"""
        member = self._members.get(life)
        return member is not None and not member.stay.spent(now_ns, self.parameters.lease_ns)

    def grace_ns(self) -> int:
        """The grace window of a round that reaches its quorum now."""
        steps = (member.step_ns for member in self._members.in_stage(Stage.LIVE))
        step = policy.fleet_step_ns(steps)
        return policy.grace_ns(self.parameters, step, self.quorum_ns, self.sync_ns)

    def _waits_for(self, flight: Round, life: Life, now_ns: int) -> bool:
        state, member = flight.asked[life], self._members.get(life)
        if member is None or state not in (Ask.WAITING, Ask.SENDING):
            return False
        if state is Ask.WAITING and member.mute and not self.parameters.lockstep:
            return False
        if member.closing:  # it does nothing but answer: one that does not is stuck
            since = max(flight.opened_ns, member.moved_ns)
            return now_ns - since <= self.parameters.lease_ns
        return self._awake(member, now_ns) and not self._overdue(flight, state, member, now_ns)

    def _overdue(self, flight: Round, state: Ask, member: Member, now_ns: int) -> bool:
        """Should it have answered by now? That of bytes on their way is for others to say."""
        late = now_ns - flight.opened_ns > member.patience_ns(self.parameters.lease_ns)
        return late and state is Ask.WAITING and not self.parameters.lockstep

    def _awake(self, member: Member, now_ns: int) -> bool:
        return self.parameters.lockstep or not member.quiet(now_ns, self.parameters.lease_ns)

    def _close(self, flight: Round, now_ns: int, reason: str) -> None:
        self._mind_the_mute(flight, now_ns)
        self._withdraw_unfinished(flight, Fate.LATE, "the round closed while it was on its way")
        flight.closed_ns = now_ns
        self._mind_norms(flight, now_ns)
        # A learner that leaves must hold the global model exactly: its closing round announces it
        # so, even when nobody has anything to give.
        exact_copy = flight.closing and self.parameters.lossy
        if not flight.pushes and not exact_copy:
            self._drop(flight, f"{reason}, and nobody had anything to give")
            return
        if self.parameters.lockstep:  # a fixed order makes the sum reproducible to the bit
            for life in sorted(flight.pushes):
                self._fold(flight, life)
        flight.phase = Phase.MERGING
        self._emit(
            act.Merge(
                round=flight.number, fragment=flight.fragment, closing=flight.closing, reason=reason
            )
        )

    def _mind_the_mute(self, flight: Round, now_ns: int) -> None:
        """Whoever does not answer holds up a round once, and its fragment if it asked for that."""
        for life, state in flight.asked.items():
            member = self._members.get(life)
            if member and state is Ask.WAITING and not self._waits_for(flight, life, now_ns):
                member.mute = True
        self.closings.settled(flight)

    def _mind_norms(self, flight: Round, now_ns: int) -> None:
        asked = [self._members.get(life) for life in flight.asked]
        awake = sum(member is not None and self._awake(member, now_ns) for member in asked)
        if self._norms[flight.fragment].closed(
            pushes=len(flight.pushes), refused=flight.refused_for_norm, awake=awake
        ):
            text = f"fragment {flight.fragment}: all pushes exceed the usual norm; relearning it"
            self._emit(act.Note(text=text))

    def _drop(self, flight: Round, reason: str) -> None:
        for life in sorted(flight.pushes):
            self._tell(life, flight.number, flight.fragment, Fate.ABANDONED, reason)
        del self.flights[flight.number]
        self.abandoned += 1
        self._emit(act.Drop(round=flight.number, fragment=flight.fragment, reason=reason))

    def _ask_again(self, flight: Round) -> None:
        """Who gave nothing hears no fate, and still waits for what its closing round announces."""
        for life in sorted(flight.requesters):
            member = self._members.get(life)
            if member is not None and flight.asked[life] is Ask.NOTHING:
                self.ask_closing(member, (flight.fragment,))

    # ---- merged, committed ----

    def merge_done(self, number: int, ok: bool) -> None:
        """The outer step was computed; a result that is not finite never lands."""
        flight = self.flights[number]
        assert flight.phase is Phase.MERGING
        if not ok:
            for life in sorted(flight.pushes):
                self._tell(life, number, flight.fragment, Fate.REJECTED, "merge not finite")
            flight.pushes.clear()
            self._drop(flight, "the merged fragment was not finite")
            self._ask_again(flight)
            return
        flight.phase = Phase.COMMITTING
        self._commit(flight)

    def _commit(self, flight: Round) -> None:
        pushes = [(life, flight.pushes[life]) for life in sorted(flight.pushes)]
        self._emit(
            act.Commit(
                round=flight.number,
                fragment=flight.fragment,
                version=self.versions[flight.fragment] + 1,
                clock=flight.clock,
                exact=flight.closing,
                contributions=tuple(
                    act.Contribution(
                        life=life,
                        index=self._members.index_of(life.name),
                        base=push.base,
                        steps=push.steps,
                        tokens=push.tokens,
                        norm=push.norm,
                    )
                    for life, push in pushes
                ),
            )
        )

    def commit_failed(self, number: int, reason: str, now_ns: int, *, last: bool) -> None:
        """No room for the new version: nobody hears of it until there is; `last`: give it up."""
        flight = self.flights[number]
        assert flight.phase is Phase.COMMITTING
        if last:
            self._drop(flight, reason)
            return
        if not self.stuck:
            text = f"nothing is announced until there is room: {reason}"
            self._emit(act.Note(text=text, urgent=True))
        self.stuck = reason
        flight.retry_ns = now_ns + policy.COMMIT_RETRY_NS

    def commit_done(self, number: int, now_ns: int) -> None:
        """The new version is durable: only now may anybody hear of it."""
        flight = self.flights.pop(number)
        assert flight.phase is Phase.COMMITTING
        fragment = flight.fragment
        if self.stuck:
            self._emit(act.Note(text="there is room again: going on"))
            self.stuck = ""
        self.versions[fragment] += 1
        self.merged += 1
        self.joined += len(flight.pushes)
        self.sync_ns = policy.moving_average(self.sync_ns, now_ns - flight.closed_ns)
        if flight.pushes:
            norms = ((push.norm, push.steps) for push in flight.pushes.values())
            self._norms[fragment].merged(norms)
        for life in sorted(flight.pushes):
            push = flight.pushes[life]
            self.closings.serve(fragment, life)
            self._members.ledger(life).consume(fragment, push.base)
            member = self._members.get(life)
            if member is not None:
                member.rounds_joined += 1
            self._tell(life, number, fragment, Fate.MERGED, f"version {self.versions[fragment]}")
        self._exact[fragment] = flight.closing
        self.announce(fragment, self._members.in_stage(Stage.LIVE, Stage.TAKING), flight.clock)

    def announce(self, fragment: int, members: list[Member], clock: int) -> None:
        """Tell these members about the current version of a fragment."""
        if members:
            self._emit(
                act.Announce(
                    lives=tuple(member.life for member in members),
                    fragment=fragment,
                    version=self.versions[fragment],
                    clock=clock,
                    exact=self._exact[fragment],
                )
            )

    def wind_down(self, now_ns: int, reason: str) -> None:
        """Open nothing more; finish rounds that have their quorum, abandon the others."""
        self.queue.clear()
        self.closings.clear()
        for flight in list(self.flights.values()):
            if flight.phase is Phase.GRACE:
                self._close(flight, now_ns, reason)
            elif flight.phase is Phase.COLLECTING:
                self._withdraw_unfinished(flight, Fate.ABANDONED, reason)
                self._drop(flight, reason)
            elif flight.retry_ns:
                self._drop(flight, self.stuck)

    def _tell(self, life: Life, number: int, fragment: int, fate: Fate, reason: str) -> None:
        self.fates[fate] += 1
        if fate is Fate.REJECTED:
            self.rejections[reason] += 1
        self._emit(
            act.TellFate(life=life, round=number, fragment=fragment, fate=fate, reason=reason)
        )

    def postpone(self, opened_ns: int) -> None:
        """Answers may have come while nobody read them: no open round counts as older than this."""
        for flight in self.flights.values():
            flight.opened_ns = max(flight.opened_ns, opened_ns)

    def deadlines(self, now_ns: int) -> list[int]:
        """When open grace windows and holds end, and commits are tried again."""
        flights = self.flights.values()
        lease_ns, stays = self.parameters.lease_ns, [member.stay for member in self._members]
        holds = [stay.hold_until_ns(lease_ns) for stay in stays if stay.holding_ns]
        graces = [flight.grace_until_ns for flight in flights if flight.phase is Phase.GRACE]
        ends = [end for end in graces if end > now_ns]  # beyond that, it waits for an asker
        return ends + holds + [flight.retry_ns for flight in flights if flight.retry_ns]

    def pending(self) -> int:
        """Pushes that were let in and have no fate yet."""
        return sum(len(flight.pushes) for flight in self.flights.values())
