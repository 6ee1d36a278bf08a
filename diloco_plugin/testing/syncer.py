"""A syncer's shell for the simulated world. It checks what must hold after every step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core.events import Life
from diloco_plugin.core.flight import Phase
from diloco_plugin.core.past import Past
from diloco_plugin.core.syncer import RunState, SyncerCore
from diloco_plugin.testing.standstill import Standstill
from diloco_plugin.testing.wire import Progress, Wire

if TYPE_CHECKING:
    from diloco_plugin.testing.learner import Learner
    from diloco_plugin.testing.world import World

TICKS_AT_ONCE_MAX: Final = 100


class Syncer:
    """The shell of a syncer core."""

    def __init__(self, world: World, core: SyncerCore) -> None:
        self.world, self.core, self.alive = world, core, True
        self.routes: dict[Life, Wire] = {}
        #: pushes on their way, by (life, round)
        self.receiving: set[tuple[Life, int]] = set()
        self.folded: dict[int, list[tuple[Life, Progress]]] = {}
        #: progress that is in the global model
        self.merged: set[tuple[Life, Progress]] = world.merged if world.durable else set()
        #: lives that hold the whole model, whether or not we have heard of it
        self.taken: set[Life] = world.taken if world.durable else set()
        #: by (life, fragment), the version that holds what it gave last
        self.given: dict[tuple[Life, int], int] = world.given if world.durable else {}
        self.offers: dict[tuple[Life, int], int] = {}
        self.fates: dict[tuple[Life, int], list[act.Fate]] = {}
        self.announced: dict[int, int] = {}
        self.durable: dict[int, int] = {}
        if world.past is not None:
            self.durable = dict(enumerate(world.past.versions))
            for fragment, version in world.announced.items():
                assert self.durable[fragment] >= version, "an announced version is lost"
            self.announced = world.announced
        #: inner optimizer states on their way
        self.tickets: set[int] = set()
        #: of its control thread
        self.standstill = Standstill(world)
        self._holding: dict[tuple[Life, int], Progress] = {}
        self._deadline_ns = -1
        self._ticks = (0, 0)
        self._plan_tick()

    @property
    def done(self) -> bool:
        """Has it decided everything?"""
        return self.core.state is RunState.STOPPED

    def hear(self, learner: Learner, wire: Wire, epoch: int | None, event: ev.SyncerEvent) -> None:
        """A message of a learner arrives, if it still can."""
        assert isinstance(event, ev.FromLife)
        if not self.alive or wire.silent or not (wire.open or wire.drains):
            return
        if self.standstill.holds(lambda: self.hear(learner, wire, epoch, event)):
            return
        if isinstance(event, ev.Knocked):
            # one that drains out of an older connection takes the route away from the newer one
            self.routes[event.life] = wire
            if event.life.name in self.world.barred:
                event = replace(event, problem=("quarantine", "it broke the protocol"))
        elif self.routes.get(event.life) is not wire or epoch not in (None, self.core.epoch):
            self._send_over(wire, learner, ev.Strange(now_ns=0))
            return
        if isinstance(event, ev.Heard):
            self.send(event.life, ev.SyncerHeard(now_ns=0))
        self.step(event)

    def send(self, life: Life, event: ev.LearnerEvent) -> None:
        """Send a message to a life."""
        wire, learner = self.routes.get(life), self.world.by_life(life)
        if wire is None or wire.silent:
            return
        if learner is None or learner.wire is not wire:
            self.world.at(0, lambda: self._unreachable(life, wire))
            return
        self._send_over(wire, learner, event)

    def _send_over(self, wire: Wire, learner: Learner, event: ev.LearnerEvent) -> None:
        if wire.open and not wire.silent:
            delay = self.world.travel_ns(wire, "down")
            self.world.at(delay, lambda: learner.hear(wire, event))

    def _unreachable(self, life: Life, wire: Wire) -> None:
        """The socket could not deliver: nobody is there any more."""
        if self.routes.get(life) is wire:
            del self.routes[life]
            self.step(ev.Vanished(now_ns=0, life=life))

    def step(self, event: ev.SyncerEvent) -> None:
        """Let the core decide, check it, carry it out."""
        if not self.alive or self.standstill.holds(lambda: self.step(event)):
            return
        event = replace(event, now_ns=self.world.now_ns)
        if not isinstance(event, ev.Ticked):
            self.world.log.append((self.world.now_ns, "syncer", event))
        if isinstance(event, ev.Offered) and not event.nothing:
            key = (event.life, event.round)
            known = self.core.members.get(event.life) is not None
            self.offers[key] = self.offers.get(key, 0) + known
        before = list(self.core.rounds.versions)
        actions = self.world.decide(self.core, event)
        self.core.check()
        assert all(b <= a for b, a in zip(before, self.core.rounds.versions, strict=False))
        for flight in self.core.rounds.flights.values():
            age = self.world.now_ns - flight.opened_ns
            # what is merged may wait for room on the disk, however long
            patience = 4 * self.core.parameters.lease_ns + self.standstill.total_ns
            in_time = age < patience or flight.phase is Phase.COMMITTING
            assert in_time or self.core.parameters.lockstep, "a round never ends"
        self._watch_quorum(actions)
        for action in actions:
            self.world.log.append((self.world.now_ns, "syncer", action))
            self.carry_out(action)
        self._plan_tick()

    def _watch_quorum(self, actions: tuple[act.SyncerAction, ...]) -> None:
        for merge in actions:
            if not isinstance(merge, act.Merge) or self.core.state is RunState.STOPPING:
                continue
            late = sum(
                isinstance(a, act.TellFate)
                and (a.round, a.fate) == (merge.round, act.Fate.LATE)
                and self._moves(a.life)
                for a in actions
            )
            pushes = len(self.core.rounds.flights[merge.round].pushes)
            wanted = min(self.core.parameters.wanted, pushes + late)
            assert pushes >= wanted, "a round closed below its quorum"

    def _moves(self, life: Life) -> bool:
        member, lease = self.core.members.get(life), self.core.parameters.lease_ns
        if member is None or self.world.now_ns - member.moved_ns > lease:
            return False
        # nobody waits for a leaver that has had its share of waiting
        return not (member.closing and member.stay.spent(self.world.now_ns, lease))

    def _plan_tick(self) -> None:
        deadline = self.core.next_deadline_ns()
        if deadline == self._deadline_ns or self.done:
            return
        self._deadline_ns = deadline

        def tick() -> None:
            if self._deadline_ns != deadline or not self.alive or self.standstill.holds(tick):
                return
            moment, count = self._ticks
            self._ticks = (self.world.now_ns, count + 1 if moment == self.world.now_ns else 1)
            assert self._ticks[1] < TICKS_AT_ONCE_MAX, "the syncer spins"
            self._deadline_ns = -1
            self.step(ev.Ticked(now_ns=0))

        self.world.at(deadline - self.world.now_ns, tick)

    def carry_out(self, action: act.SyncerAction) -> None:  # noqa: C901 - a table
        """Do what the core decided."""
        core, world = self.core, self.world
        match action:
            case act.Admit():
                self._forget_transfers(action.life)
                if not action.keep:
                    self.taken.discard(action.life)
                self.send(
                    action.life,
                    ev.Welcomed(now_ns=0, epoch=core.epoch, clock=action.clock, keep=action.keep),
                )
            case act.Refuse():
                self.send(action.life, ev.TurnedAway(now_ns=0, code=action.code, text=action.text))
                if core.members.get(action.life) is None:
                    self.routes.pop(action.life, None)
            case act.AskHello():
                self.send(action.life, ev.Strange(now_ns=0))
            case act.Probe():
                self._probe(action)
            case act.Dismiss():
                if action.tell:
                    self.send(action.life, ev.Lost(now_ns=0, reason=action.reason))
                self._forget_transfers(action.life)
                self.routes.pop(action.life, None)
            case act.RequestSeed():
                self.send(action.life, ev.SeedAsked(now_ns=0))
            case act.Pull():
                for life in action.lives:
                    self.send(
                        life,
                        ev.Pulled(
                            now_ns=0,
                            round=action.round,
                            fragment=action.fragment,
                            closing=action.closing,
                        ),
                    )
            case act.Receive():
                self._receive(action)
            case act.Discard():
                self.receiving.discard((action.life, action.round))
                self._holding.pop((action.life, action.round), None)
            case act.Fold():
                progress = self._holding.pop((action.life, action.round))
                self.folded.setdefault(action.round, []).append((action.life, progress))
            case act.Merge():
                done = ev.MergeDone(
                    now_ns=0, round=action.round, ok=world.random.random() >= world.merge_failures
                )
                world.at(world.work_ns(world.work_ms), lambda: self.step(done))
            case act.Drop():
                self.folded.pop(action.round, None)
            case act.Commit():
                world.at(world.work_ns(world.work_ms), lambda: self._commit(action))
            case act.Announce():
                self._announce(action)
            case act.TellFate():
                self._tell(action)
            case act.CompleteRun():
                for life in action.lives:
                    self.send(life, ev.RunCompleted(now_ns=0, reason=action.reason))
            case act.Stop():
                for life in action.lives:
                    self.send(life, ev.Lost(now_ns=0, reason=action.reason, deliberate=True))
            case _:
                self._carry_out_state(action)

    def _probe(self, probe: act.Probe) -> None:
        wire, learner = self.routes.get(probe.life), self.world.by_life(probe.life)
        if wire is None or learner is None or learner.wire is not wire or wire.silent:
            return
        answer = ev.ProbeAnswered(now_ns=0, life=probe.life, nonce=probe.nonce)
        delay = self.world.travel_ns(wire, "down")
        self.world.at(delay, lambda: learner.send(answer, any_epoch=True))

    def _carry_out_state(self, action: act.SyncerAction) -> None:
        match action:
            case act.RequestState():
                self._ask_for_state(action)
            case act.OfferState():
                self._offer_state(action)
            case act.EndState():
                self.tickets.discard(action.ticket)
            case act.RefuseState():
                self.send(action.joiner, ev.StateRefused(now_ns=0, reason=action.reason))

    def _ask_for_state(self, action: act.RequestState) -> None:
        wire, donor = self.routes.get(action.donor), self.world.by_life(action.donor)
        self.tickets.add(action.ticket)
        if wire is None or donor is None or donor.wire is not wire or wire.silent:
            return
        delay = self.world.travel_ns(wire, "down") + self.world.work_ns(self.world.work_ms)
        self.world.at(delay, lambda: donor.give_state(action.ticket))

    def _offer_state(self, action: act.OfferState) -> None:
        announced = ev.StateAnnounced(
            now_ns=0,
            ticket=action.ticket,
            donor=action.donor.name,
            clock=action.clock,
            size=action.size,
        )
        self.send(action.joiner, announced)

        def arrives() -> None:
            donor, joiner = self.world.by_life(action.donor), self.world.by_life(action.joiner)
            if action.ticket not in self.tickets or not self.alive:
                return
            wires = [self.routes.get(action.donor), self.routes.get(action.joiner)]
            ends = [one.wire if one is not None else None for one in (donor, joiner)]
            if None in ends or wires != ends or any(w is None or w.silent for w in wires):
                lease = self.core.parameters.lease_ns
                failed = ev.StateFailed(
                    now_ns=0, life=action.joiner, ticket=action.ticket, reason="stalled"
                )
                self.world.at(lease, lambda: self.step(failed))
                return
            assert joiner is not None
            joiner.state_arrives(action.ticket)

        self.world.at(self.world.work_ns(2 * self.world.transfer_ms), arrives)

    def _receive(self, action: act.Receive) -> None:
        assert action.life in self.taken, "who never took the model contributes"
        key, wire = (action.life, action.round), self.routes.get(action.life)
        self.receiving.add(key)

        def arrives() -> None:
            learner = self.world.by_life(action.life)
            if key not in self.receiving or not self.alive or wire is None:
                return
            if learner is None or learner.wire is not wire or wire.silent:
                return  # nothing comes: the lease, or a new Hello, ends it
            self.receiving.discard(key)
            progress = learner.hand_over(action.round)
            if progress is None or learner.corrupt > 0:
                learner.corrupt = max(0, learner.corrupt - 1)
                self.step(
                    ev.TransferFailed(
                        now_ns=0,
                        life=action.life,
                        round=action.round,
                        fragment=action.fragment,
                        reason="gone" if progress is None else "corrupt",
                    )
                )
                return
            self._holding[key] = progress
            self.step(
                ev.Received(
                    now_ns=0,
                    life=action.life,
                    round=action.round,
                    fragment=action.fragment,
                    norm=learner.norm,
                    finite=learner.finite,
                )
            )

        self.world.at(self.world.work_ns(self.world.transfer_ms), arrives)

    def _commit(self, action: act.Commit) -> None:
        if not self.alive:
            return
        if self.world.disk_full:
            self.step(ev.CommitFailed(now_ns=0, round=action.round, reason="the disk is full"))
            return
        self.durable[action.fragment] = action.version
        if self.world.past is not None:
            self.world.past.add(action)
        for item in self.folded.pop(action.round, []):
            assert item not in self.merged, f"merged twice: {item}"
            self.merged.add(item)
            self.given[item[0], action.fragment] = action.version
        # It may die in between: durable, and nobody has heard of it.
        if self.world.dies_when_durable:
            self.world.dies_when_durable = False
            self.world.kill_syncer()
        done = ev.CommitDone(now_ns=0, round=action.round)
        self.world.at(self.world.work_ns(0.1), lambda: self.step(done))

    def _announce(self, action: act.Announce) -> None:
        assert action.version <= self.durable.get(action.fragment, 0), "announced, not durable"
        assert action.version >= self.announced.get(action.fragment, 0), "announced backwards"
        self.announced[action.fragment] = action.version
        for life in action.lives:
            self.send(
                life,
                ev.Announced(
                    now_ns=0,
                    fragment=action.fragment,
                    version=action.version,
                    clock=action.clock,
                    exact=action.exact or not self.core.parameters.lossy,
                ),
            )

    def _tell(self, action: act.TellFate) -> None:
        key = (action.life, action.round)
        self.fates.setdefault(key, []).append(action.fate)
        assert len(self.fates[key]) <= self.offers.get(key, 0), "more fates than pushes"
        self.send(
            action.life,
            ev.FateTold(
                now_ns=0,
                round=action.round,
                fragment=action.fragment,
                fate=action.fate.value,
                reason=action.reason,
            ),
        )

    def _forget_transfers(self, life: Life) -> None:
        self.receiving = {key for key in self.receiving if key[0] != life}

    def fetch_seed(self, learner: Learner, wire: Wire) -> None:
        """The seeder serves its model: it is here after a while."""

        def arrives() -> None:
            if learner.wire is wire and not wire.silent and self.routes.get(learner.life) is wire:
                self.taken.add(learner.life)
                if self.world.durable and self.core.state is RunState.SEEDING:
                    self.world.past = Past.seeded(self.world.fragments)
                    self.world.merged.clear()
                    self.given.clear()
                    self.world.announced.clear()
                    self.announced = self.world.announced
                self.step(ev.SeedReceived(now_ns=0, life=learner.life))

        self.world.at(self.world.work_ns(2 * self.world.transfer_ms), arrives)
