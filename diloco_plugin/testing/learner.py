"""A learner's shell for the simulated world: a training loop, buffers and a connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core.events import Life
from diloco_plugin.core.handover import Wish
from diloco_plugin.core.learner import LearnerCore
from diloco_plugin.core.link import Standing
from diloco_plugin.testing.standstill import Standstill
from diloco_plugin.testing.wire import MS, Progress, Wire

if TYPE_CHECKING:
    from diloco_plugin.testing.world import World

TOKENS: Final = 100


class Learner:
    """One life of a learner."""

    def __init__(
        self,
        world: World,
        name: str,
        step_ms: float,
        steps: int | None,
        data_seed: int | None,
        norm: float,
        wants_state: bool,
    ) -> None:
        self.world, self.step_ms, self.max_steps = world, step_ms, steps
        self.data_seed, self.norm, self.finite = data_seed, norm, True
        self.life = Life(name, f"{world.random.getrandbits(128):032x}")
        self.staging = self.arrivals = 2
        if world.parameters.lockstep:
            self.staging = self.arrivals = max(2, world.parameters.overlap + 1)
        self.core = LearnerCore(
            incarnation=self.life.incarnation,
            staging=self.staging,
            arrivals=self.arrivals,
            now_ns=world.now_ns,
            wish=Wish(wanted=wants_state, own=0),
        )
        #: how it came by its inner optimizer state; empty while that is open
        self.inner = "" if wants_state else "fresh"
        self.wire: Wire | None = None
        self.reachable = self.alive = True
        #: training stands still (validation, a debugger)
        self.paused = False
        #: transfers that will arrive broken
        self.corrupt = 0
        self.left = False
        self.waits = 0
        self._joining = True
        self._finish_by_ns: int | None = None
        self._bases = [-1] * world.fragments
        self._lineage = [0] * world.fragments
        self._staged: dict[int, Progress] = {}
        self._on_offer: dict[int, Progress] = {}
        self._fetching: dict[int, int] = {}
        self._arrived: set[int] = set()
        self._rebasing: dict[int, int] = {}
        self._state_fetched = self._state_here = 0
        self._deadline_ns = -1
        #: of the whole process (suspended, swapped out)
        self.standstill = Standstill(world)
        #: the connection before this one, while something of it may still arrive
        self._before: Wire | None = None

    # ---- the training thread ----

    def turn(self) -> None:
        """One turn of the training loop."""
        if not self.alive or self.standstill.holds(self.turn):
            return
        now, delay = self.world.now_ns, self.world.poll_ns
        if self.core.complete is not None or self.core.steps == self.max_steps:
            self.finish()
        if self._finish_by_ns is not None:
            if self.core.link.standing is Standing.LEFT or now >= self._finish_by_ns:
                self._go()
                return
            self.step(ev.FinishAsked(now_ns=now))
        elif self._joining and not self.core.joined:
            self.step(ev.Paused(now_ns=now))
        elif self.core.must_wait():
            assert self.world.parameters.lockstep, "a learner waits for another"
            self.waits += 1
            self.step(ev.Paused(now_ns=now))
        else:
            assert self.inner or not self._joining, "it trains before its state is decided"
            self._joining = False
            delay = self.world.work_ns(self.step_ms)
            self.world.at(delay, self._steps)
            return
        self.world.at(delay, self.turn)

    def _steps(self) -> None:
        if not self.alive or self.standstill.holds(self._steps):
            return
        if self.paused:
            self.world.at(self.world.poll_ns, self._steps)
            return
        self.step(ev.Stepped(now_ns=self.world.now_ns, tokens=TOKENS))
        self.turn()

    @property
    def finishing(self) -> bool:
        """Is training over here?"""
        return self._finish_by_ns is not None

    def finish(self) -> None:
        """Training is over here: close and leave."""
        if self._finish_by_ns is None:
            patience = self.world.parameters.close_timeout
            self._finish_by_ns = self.world.now_ns + int(patience * 1000 * MS)

    def _go(self) -> None:
        self.left = self.core.link.standing is Standing.LEFT
        if self.left:
            assert not self._on_offer, "it left with a push on offer"
            given = self.world.syncer.given
            assert all(
                base >= given.get((self.life, fragment), 0)
                for fragment, base in enumerate(self._bases)
            ), "it left without the global model, or without what it gave to it"
        # the goodbye is on its way already
        self.world.at(100 * MS, self.die)
        self.alive = False

    # ---- the connection ----

    def connect(self) -> None:
        """Open a connection, if the network and the syncer let us."""
        if self._hang_up():
            self._before = None  # the socket was closed: nobody reads what it held
        if self.alive and self.reachable and self.world.syncer.alive:
            self.wire = Wire()
            self.step(ev.Connected(now_ns=self.world.now_ns))
        self._plan_tick()

    def cut(self, *, silent: bool) -> None:
        """The network is gone; `silent`: nobody notices before the network is there again."""
        self.reachable = False
        if silent and self.wire is not None:
            self.wire.silent = True
        else:
            self.broken("the connection broke")

    def mend(self) -> None:
        """The network is there again: what was cut shows now, and a new connection is made."""
        self.reachable = True
        if self.wire is None or self.wire.silent:
            self.broken("the connection broke")
            self.connect()

    def broken(self, reason: str) -> None:
        """The connection is gone, and this is noticed here."""
        if self._hang_up():
            self.step(ev.Lost(now_ns=self.world.now_ns, reason=reason))

    def _hang_up(self) -> bool:
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.open, wire.drains = False, self.world.random.random() < 0.5
            self._before = wire
        return wire is not None

    def die(self) -> None:
        """The process ends."""
        self.alive = False
        self._hang_up()
        for label, learner in list(self.world.learners.items()):
            if learner is self:
                del self.world.learners[label]

    def send(self, event: ev.SyncerEvent, *, any_epoch: bool = False) -> None:
        """Send a message to the syncer, if there is a connection."""
        wire, syncer, epoch = self.wire, self.world.syncer, self.core.link.epoch
        if wire is None:
            return
        said = None if any_epoch else epoch
        delay = self.world.travel_ns(wire, "up")
        self.world.at(delay, lambda: syncer.hear(self, wire, said, event))

    def hear(self, wire: Wire, event: ev.LearnerEvent) -> None:
        """A message of the syncer arrives."""
        if not self.alive or wire.silent or self.standstill.holds(lambda: self.hear(wire, event)):
            return
        if wire is self.wire:
            self._before = None
        elif wire is not self._before or not wire.drains:
            return  # what drains out of an older connection comes before all of the newer one
        if isinstance(event, ev.Welcomed):
            self.core.lay_out(self.world.parameters, self.world.fragments)
        if isinstance(event, ev.FateTold):
            self._withdraw(event.round)
        self.step(event)

    # ---- carrying out ----

    def step(self, event: ev.LearnerEvent) -> None:
        """Let the core decide, check it, carry it out."""
        event = replace(event, now_ns=self.world.now_ns)
        actions = self.core.step(event)
        self.core.check()
        for action in actions:
            self._carry_out(action)
        assert len(self._staged) + len(self._on_offer) <= self.staging
        held = len(self._fetching) + len(self._arrived) + len(self._rebasing)
        assert held <= self.arrivals, "more arrival buffers than there are"
        self._plan_tick()

    def _plan_tick(self) -> None:
        deadline = self.core.next_deadline_ns()
        if deadline == self._deadline_ns or not self.alive:
            return
        self._deadline_ns = deadline

        def tick() -> None:
            if self._deadline_ns == deadline and self.alive and not self.standstill.holds(tick):
                self._deadline_ns = -1
                self.step(ev.Ticked(now_ns=0))

        self.world.at(deadline - self.world.now_ns, tick)

    def _carry_out(self, action: act.LearnerAction) -> None:  # noqa: C901 - a table
        now, life = 0, self.life
        match action:
            case act.Apply():
                self._apply(action)
            case act.Snapshot():
                assert action.fragment not in self._staged
                self._staged[action.fragment] = self._progress(action.fragment)
            case act.CaptureBase():
                self._bases = [0] * len(self._bases)
                self._lineage = [lineage + 1 for lineage in self._lineage]
            case act.Offer():
                self._offer(action)
            case act.Unstage():
                del self._staged[action.fragment]
            case act.Forfeit():
                for number in list(self._on_offer):
                    self._withdraw(number)
            case act.Fetch():
                self._fetch(action)
            case act.Release():
                self._fetching.pop(action.fragment, None)
                self._arrived.discard(action.fragment)
            case act.ServeSeed():
                if self.wire is not None:
                    self.world.syncer.fetch_seed(self, self.wire)
            case act.SayHello():
                self._hello(action)
            case act.Reconnect():
                self.connect()
            case act.Beat():
                self.send(ev.Heard(now_ns=now, life=life))
            case act.Report():
                self.send(
                    ev.Progressed(
                        now_ns=now,
                        life=life,
                        clock=action.clock,
                        step_ns=action.step_ns,
                        tokens=action.tokens,
                    )
                )
            case act.SayTaken():
                if self.core.link.epoch == self.world.syncer.core.epoch:
                    self.world.syncer.taken.add(life)
                self.send(ev.TookModel(now_ns=now, life=life))
            case act.AskClose():
                self.send(ev.CloseAsked(now_ns=now, life=life, fragments=action.fragments))
            case act.Leave():
                self.send(ev.Left(now_ns=now, life=life))
            case _:
                self._carry_out_state(action)

    def _carry_out_state(self, action: act.LearnerAction) -> None:
        match action:
            case act.ApplyState():
                assert action.ticket == self._state_here
                assert self.core.steps == 0, "a peer's state replaces its own"
                self.inner = action.source
            case act.FetchState():
                self._state_fetched, self._state_here = action.ticket, 0
            case act.DropState():
                self._state_fetched = self._state_here = 0
            case act.NoteState():
                self.inner = action.text
            case act.SayState():
                self._say_state(action)

    def _progress(self, fragment: int) -> Progress:
        return Progress(fragment, self.core.parts[fragment].base, self._lineage[fragment])

    def _apply(self, action: act.Apply) -> None:
        fragment = action.fragment
        self._arrived.remove(fragment)
        self._rebasing[fragment] = action.version
        self._lineage[fragment] += 1

        def rebase() -> None:
            busy = [p for p in self._on_offer.values() if p.fragment == fragment]
            assert all(p.lineage == self._lineage[fragment] for p in busy), (
                "the base changes under a push that is differenced against it"
            )
            self._bases[fragment] = self._rebasing.pop(fragment)
            self.step(ev.Rebased(now_ns=0, fragment=fragment))

        self.world.at(self.world.work_ns(0.5), self._while_alive(rebase))

    def _while_alive(self, do: Callable[[], None]) -> Callable[[], None]:
        return lambda: do() if self.alive else None

    def _offer(self, action: act.Offer) -> None:
        if not action.nothing:
            progress = self._staged.pop(action.fragment)
            assert progress.base == action.base
            self._on_offer[action.round] = progress
        self.send(
            ev.Offered(
                now_ns=0,
                life=self.life,
                round=action.round,
                fragment=action.fragment,
                base=action.base,
                steps=action.steps,
                tokens=action.tokens,
                nothing=action.nothing,
            )
        )
        if self.wire is None and not action.nothing:
            self._withdraw(action.round)

    def hand_over(self, number: int) -> Progress | None:
        """The syncer has fetched all bytes of a push, if it is still on offer."""
        progress = self._on_offer.get(number)
        self._withdraw(number)
        return progress

    def _withdraw(self, number: int) -> None:
        progress = self._on_offer.pop(number, None)
        if progress is not None:
            self.step(ev.PushSent(now_ns=0, fragment=progress.fragment))

    def _fetch(self, action: act.Fetch) -> None:
        fragment, version, wire = action.fragment, action.version, self.wire
        assert fragment not in self._fetching
        assert fragment not in self._arrived
        self._fetching[fragment] = version

        def arrives() -> None:
            syncer = self.world.syncer
            if self._fetching.get(fragment) != version or wire is not self.wire or wire is None:
                return
            if wire.silent or syncer.routes.get(self.life) is not wire:
                return  # nothing comes: the lease, or a new Hello, ends it
            del self._fetching[fragment]
            if syncer.core.rounds.versions[fragment] > version:
                self.step(ev.FetchFailed(now_ns=0, fragment=fragment, version=version))
            else:
                self._arrived.add(fragment)
                self.step(ev.Arrived(now_ns=0, fragment=fragment, version=version))

        self.world.at(self.world.work_ns(self.world.transfer_ms), self._while_alive(arrives))

    def give_state(self, ticket: int) -> None:
        """The syncer asks for a snapshot of the inner optimizer state."""
        nothing = "" if self.finite else "it is not finite"
        offered = ev.StateOffered(
            now_ns=0, life=self.life, ticket=ticket, clock=self.core.clock, size=1, nothing=nothing
        )
        if self.alive:
            self.send(offered)

    def state_arrives(self, ticket: int) -> None:
        """All bytes of a peer's state are here, if they were still wanted."""
        if self.alive and ticket == self._state_fetched:
            self._state_fetched, self._state_here = 0, ticket
            fits = self.corrupt == 0
            self.corrupt = max(0, self.corrupt - 1)
            if fits:
                self.step(ev.StateArrived(now_ns=0, ticket=ticket))
            else:
                self._state_here = 0
                self.step(ev.StateUnusable(now_ns=0, ticket=ticket, reason="corrupt"))

    def _say_state(self, action: act.SayState) -> None:
        if action.problem:
            self.send(
                ev.StateFailed(
                    now_ns=0, life=self.life, ticket=action.ticket, reason=action.problem
                )
            )
        else:
            self.send(ev.StateTaken(now_ns=0, life=self.life, ticket=action.ticket))

    def _hello(self, action: act.SayHello) -> None:
        self.send(
            ev.Knocked(
                now_ns=0,
                life=self.life,
                fragments=self.world.fragments,
                epoch=action.epoch,
                versions=action.versions,
                data_seed=self.data_seed,
                wants_state=action.wants_state,
            ),
            any_epoch=True,
        )
