"""The I/O thread of a learner: owns the sockets, carries out what needs no parameters.

The training thread never touches a socket. The two threads share the learner core under one lock,
held for microseconds; buffers change hands through it.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from torch import Tensor

from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core.learner import LearnerCore
from diloco_plugin.errors import ConfigError, WireError
from diloco_plugin.learner.counting import StepCounter
from diloco_plugin.learner.handover import Giving, Taking
from diloco_plugin.learner.innerstate import InnerState
from diloco_plugin.learner.introducing import Introduction, checked
from diloco_plugin.learner.place import Place, read_place
from diloco_plugin.learner.replica import Buffer, Replica
from diloco_plugin.learner.transfers import Transfers
from diloco_plugin.learner.translation import event_of, message_of
from diloco_plugin.net.address import Address
from diloco_plugin.net.diagnosis import key_problem, listens
from diloco_plugin.net.keys import Insecure, LineKeys
from diloco_plugin.net.poll import Poll, Waker
from diloco_plugin.net.sockets import LOOK_SECONDS, Line, new_context
from diloco_plugin.tensors.codec import codec
from diloco_plugin.wire import messages as msg
from diloco_plugin.wire.framing import decode_to_learner, encode

log = logging.getLogger("diloco.learner")

RETRY_SECONDS: Final = 0.002
#: At the end, the milliseconds that a Goodbye gets to leave the process.
FAREWELL_MS: Final = 500
JOIN_SECONDS: Final = 5.0
#: A handshake takes no longer; without a connection by then, libzmq may have given up for good.
REOPEN_SECONDS: Final = 5.0


class Session:
    """One learner's connection to its syncer. All methods are for the training thread."""

    def __init__(
        self,
        address: str,
        security: LineKeys | Insecure | None,
        introduction: Introduction,
        core: LearnerCore,
        inner: InnerState,
        steps: StepCounter,
    ) -> None:
        """Opens sockets and starts the I/O thread.

        Raises:
            ConfigError: the address is wrong or needs keys, or a syncer could not
                read the introduction.
            LayoutError: the introduction is too large.
        """
        self.core = core
        self.lock = threading.Lock()
        #: notified whenever something happened that a waiting training thread may look at
        self.changed = threading.Condition(self.lock)
        self.place: Place | None = None
        #: what ended the I/O thread before its time; nothing is posted any more
        self.error: BaseException | None = None
        #: staged snapshots that were not offered yet, and versions that wait for a boundary
        self.staged: dict[int, Buffer] = {}
        self.arrived: dict[int, Buffer] = {}
        #: a peer's inner optimizer state that waits for a boundary
        self.inherited: Tensor | None = None
        self.giving = Giving(inner, steps, lambda: core.clock)
        self._taking = Taking(inner, self._state_done)
        self._introduction = checked(introduction)
        self._address = Address.parse(address)
        self._security = security
        self._replica: Replica | None = None
        self._transfers: Transfers | None = None
        self._token = b""
        self._bulk: Line | None = None
        self._bulk_seen = 0.0
        self._codecs: dict[int, tuple[int, str]] = {}
        self._deferred: list[act.Fetch] = []
        self._unsettled = 0
        #: in the order of the training thread: an Offer must find the base that its snapshot had
        self._inbox: deque[act.LearnerAction | Callable[[], None]] = deque()
        self._stopping = False
        #: a Hello went out over the connection that stands: the news of it must not bring another
        self._greeted = False
        self._context = new_context()
        try:
            self._control = Line(self._context, self._address, "control", security)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._waker = Waker()
        self._poll = Poll()
        self._poll.add(self._control)
        self._poll.add(self._waker)
        self._thread = threading.Thread(target=self._run, name="diloco-io", daemon=True)
        self._thread.start()
        self._process = os.getpid()
        atexit.register(self._at_exit)

    # ---- training thread ----

    @property
    def chunks_moved(self) -> int:
        """Grows while bytes come or go."""
        return self._transfers.moved if self._transfers is not None else 0

    @property
    def address(self) -> str:
        """Where this learner looks for its syncer."""
        return str(self._address)

    def obstacle(self) -> str:
        """Why a syncer at that address does not speak with us, as a problem; "" if nothing listens
        there.
        """
        if not listens(self._address):
            return ""
        unheard = "" if self._greeted else key_problem(self._address, self._security)
        if unheard:
            return f"key: {unheard}"
        return (
            f"unreachable: something listens at {self._address}, but is no syncer, or hangs: check"
            f" the address (`diloco check {self._address}`); the port is the one that the syncer"
            " was told to bind."
        )

    def post(self, actions: Sequence[act.LearnerAction]) -> None:
        """Hand actions that need no parameters to the I/O thread."""
        if actions and self.error is None:
            self._inbox.extend(actions)
            self._waker.wake()

    def use(self, replica: Replica) -> None:
        """The buffers exist now: fetching may begin."""
        self._replica = replica
        self._inbox.append(self._open_bulk)
        self._waker.wake()

    def free(self, action: act.LearnerAction) -> None:
        """With the lock held: put a buffer that the core counts as free back into its pool.

        Before the lock is let go, or the other thread could be told to take it and find none.
        """
        buffer = None
        if isinstance(action, act.Release):
            buffer = self.arrived.pop(action.fragment, None)
        elif isinstance(action, act.Unstage):
            buffer = self.staged.pop(action.fragment, None)
        elif isinstance(action, act.DropState):
            self.inherited = None
        if buffer is not None:
            assert self._replica is not None
            self._replica.give_back(buffer)

    def applied(self, fragment: int, buffer: Buffer) -> None:
        """A fragment was written into the parameters: its base follows, in the I/O thread."""
        with self.lock:
            self._unsettled += 1
        self._inbox.append(lambda: self._rebase(fragment, buffer))
        self._waker.wake()

    def settled(self) -> None:
        """A boundary is over: a snapshot of the optimizers that was asked for can begin."""
        if self.giving.settled():
            self._waker.wake()

    def settle_bases(self) -> None:
        """Wait until every applied fragment is also the base (a matter of milliseconds)."""
        with self.changed:
            self.changed.wait_for(lambda: not self._unsettled or self.error, JOIN_SECONDS)

    def close(self) -> None:
        """Send what is queued, close the sockets, end the thread. Never hangs."""
        atexit.unregister(self._at_exit)
        self._stopping = True
        self._waker.wake()
        self._thread.join(JOIN_SECONDS)

    def _at_exit(self) -> None:
        """The program ends and nobody closed this learner: rounds must not wait for it."""
        if os.getpid() != self._process:  # a fork has none of our threads
            return
        if self.core.link.connected:
            self.post([act.Leave()])
        self.close()
        self._replica = self._transfers = None

    # ---- I/O thread ----

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
            self._carry_out_inbox()
        except BaseException as error:
            log.exception("the I/O thread of the learner failed; training goes on alone")
            with self.changed:
                self.error = error
                self._inbox.clear()
                if not self.core.link.over:
                    self.core.link.lose(time.monotonic_ns(), deliberate=False)
                self.changed.notify_all()
        finally:
            self._context.destroy(linger=FAREWELL_MS)
            self._waker.close()

    def _turn(self) -> None:
        with self.lock:
            deadline = self.core.next_deadline_ns()
        wait = (deadline - time.monotonic_ns()) / 1e9
        if self._transfers is not None and self._transfers.backlog:
            wait = min(wait, RETRY_SECONDS)
        if self.giving.busy:
            wait = 0.0
        self._poll.wait(min(max(0.0, wait), LOOK_SECONDS))
        self._waker.drain()
        self._carry_out_inbox()
        self._watch_lines()
        for frames in self._control.receive():
            self._take_control(frames[0].buffer)
        if self._bulk is not None and self._transfers is not None:
            for frames in self._bulk.receive():
                self._take_bulk(frames)
            self._transfers.flush()
        self._give()
        if time.monotonic_ns() >= deadline:
            self._step(ev.Ticked(now_ns=time.monotonic_ns()))
            self._mind_bulk()

    def _step(self, event: ev.LearnerEvent) -> None:
        with self.changed:
            before = self.core.link.connected
            actions = self.core.step(event)
            for action in actions:
                self.free(action)
            cut = before and not self.core.link.connected
            self.changed.notify_all()
        for action in actions:
            self._carry_out(action)
        if cut and self._transfers is not None:
            self._transfers.withdraw_all()

    def _carry_out_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if callable(item):
                item()
            else:
                self._carry_out(item)

    def _give(self) -> None:
        answer = self.giving.turn()
        if answer is not None:
            message = msg.StateAnswer(
                epoch=self.core.link.epoch,
                ticket=answer.ticket,
                clock=answer.clock,
                size=answer.size,
                nothing=answer.nothing,
            )
            self._control.send(encode(message))

    def _state_done(self, ticket: int, stream: Tensor | None, problem: str) -> None:
        with self.lock:
            self.inherited = stream
        now = time.monotonic_ns()
        if problem:
            self._step(ev.StateUnusable(now_ns=now, ticket=ticket, reason=problem))
        else:
            self._step(ev.StateArrived(now_ns=now, ticket=ticket))

    def _rebase(self, fragment: int, buffer: Buffer) -> None:
        assert self._replica is not None
        self._replica.rebase(fragment, buffer)
        self._replica.give_back(buffer)
        with self.lock:
            self._unsettled -= 1
        self._step(ev.Rebased(now_ns=time.monotonic_ns(), fragment=fragment))

    def _watch_lines(self) -> None:
        for event in self._control.events():
            now = time.monotonic_ns()
            if event == "connected" and not self._greeted:
                self._step(ev.Connected(now_ns=now))
            elif event == "disconnected":
                self._greeted = False
                self._step(ev.Lost(now_ns=now, reason="the connection broke"))
                if self._transfers is not None:  # nor does anybody know our token any more
                    self._transfers.withdraw_all()
        if self._bulk is None or self._transfers is None:
            return
        for event in self._bulk.events():
            if event == "connected":
                self._transfers.greet()
            elif event == "disconnected":
                self._transfers.cut()

    def _mind_bulk(self) -> None:
        """Where the other side breaks the protocol, libzmq gives up for good and does not say."""
        if self._bulk is None or self.place is None:
            return
        now = time.monotonic()
        if self._bulk.connected or not self.core.link.connected:
            self._bulk_seen = now
        elif now - self._bulk_seen > self.place.parameters.lease:
            self._bulk_seen = now
            self._reopen_bulk()

    def _reopen_bulk(self) -> None:
        if self._bulk is not None:
            self._bulk.reopen()
        if self._transfers is not None:
            self._transfers.cut()

    def _take_bulk(self, frames: list[Any]) -> None:
        assert self._transfers is not None
        try:
            self._transfers.take(frames)
        except WireError as error:
            log.debug("a bulk message of the syncer is ignored (%s): %s", error.reason, error)

    def _take_control(self, data: Any) -> None:
        try:
            message = decode_to_learner(data)
            if isinstance(message, msg.Announce):
                codec(message.codec)
        except (WireError, ConfigError) as error:
            log.debug("a message of the syncer is ignored: %s", error)
            return
        now = time.monotonic_ns()
        match message:
            case msg.Welcome():
                self._welcome(message, now)
            case msg.Probe():
                self._control.send(encode(msg.ProbeAnswer(nonce=message.nonce)))
            case msg.Warn():
                log.warning("%s", message.text)
            case msg.StateRequest():
                self.giving.begin(message.ticket)
            case msg.StateOver():
                self.giving.end(message.ticket)
            case msg.Salvage():
                self._salvage(message)
            case msg.Fate():
                if self._transfers is not None:
                    self._transfers.withdraw(message.round)
                self._step(
                    ev.FateTold(
                        now_ns=now,
                        round=message.round,
                        fragment=message.fragment,
                        fate=message.fate,
                        reason=message.reason,
                    )
                )
            case _:
                if isinstance(message, msg.Announce):
                    self._codecs[message.fragment] = (message.version, message.codec)
                event = event_of(message, now)
                if event is not None:
                    self._step(event)

    def _salvage(self, asked: msg.Salvage) -> None:
        """The syncer has lost versions that may be the base here: let it fetch them."""
        with self.lock:
            held = [f for f, version in asked.fragments if self.core.still_holds(f, version)]
            known = asked.epoch == self.core.link.epoch
        if self._transfers is None or self._bulk is None or not (held and known):
            return
        log.warning("the syncer has lost fragments %s: giving it what is held of them", held)
        bulk = self._address.with_port(asked.bulk_port)
        if bulk != self._bulk.address or not self._bulk.connected:
            self._bulk.reopen(bulk)
            self._transfers.cut()
        self._transfers.welcome(asked.token)

    def _still_holds(self, fragment: int, version: int) -> bool:
        with self.lock:
            return self.core.still_holds(fragment, version)

    def _welcome(self, welcome: msg.Welcome, now: int) -> None:
        welcomed = ev.Welcomed(
            now_ns=now, epoch=welcome.epoch, clock=welcome.clock, keep=welcome.keep
        )
        if welcome.epoch < self.core.link.epoch:  # the core fences it: nothing of it counts
            self._step(welcomed)
            return
        place = read_place(welcome, self._introduction.specs, self.place)
        if isinstance(place, str):
            self._step(ev.TurnedAway(now_ns=now, code="layout", text=place))
            return
        with self.lock:
            self.core.lay_out(place.parameters, len(place.layout.fragments))
            self.place = place
        if not self._introduction.run:
            # A syncer of another run that takes this one's address must not get this training.
            self._introduction = replace(self._introduction, run=place.run)
        self._token = welcome.token
        self.giving.end()
        if self._bulk is None:
            bulk = self._address.with_port(welcome.bulk_port)
            self._bulk = Line(self._context, bulk, "bulk", self._security)
        elif self._bulk.address.port != welcome.bulk_port:
            self._bulk.reopen(self._address.with_port(welcome.bulk_port))
        self._step(welcomed)
        if self._transfers is not None:
            self._transfers.welcome(self._token)

    def _open_bulk(self) -> None:
        assert self._bulk is not None
        assert self._replica is not None
        self._transfers = Transfers(
            self._bulk,
            self._replica,
            self.giving,
            self._taking,
            push_done=lambda f: self._step(ev.PushSent(now_ns=time.monotonic_ns(), fragment=f)),
            fetch_done=self._fetched,
            fetch_gone=lambda f, v: self._step(
                ev.FetchFailed(now_ns=time.monotonic_ns(), fragment=f, version=v)
            ),
            still_holds=self._still_holds,
        )
        self._poll.add(self._bulk)
        self._transfers.welcome(self._token)
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            self._fetch(action)

    def _fetched(self, fragment: int, version: int, buffer: Buffer) -> None:
        with self.lock:
            self.arrived[fragment] = buffer
        self._step(ev.Arrived(now_ns=time.monotonic_ns(), fragment=fragment, version=version))

    # ---- carrying out ----

    def _carry_out(self, action: act.LearnerAction) -> None:  # one line per action
        epoch = self.core.link.epoch
        match action:
            case act.Offer():
                self._offer(action, epoch)
            case act.Fetch():
                self._fetch(action)
            case act.Forfeit():
                if self._transfers is not None:
                    self._transfers.withdraw_all()
            case act.Release():
                self._release(action.fragment)
            case act.Unstage():
                pass  # free() has done it
            case act.FetchState():
                self._taking.begin(action.ticket, action.size)
                if self._transfers is not None:  # else its connection asks when it is there
                    self._transfers.grant_state()
            case act.DropState():
                self._taking.end()
            case act.NoteState():
                log.info("inner state: %s", action.text)
            case act.SayHello():
                self._say_hello(action)
            case act.Reconnect():
                self._control.reopen()
                self._reopen_bulk()
                self._greeted = False
            case act.Note():
                log.warning("%s", action.text)
            case act.ServeSeed():
                assert self._transfers is not None
                self._transfers.serve_seed()
            case _:
                message = message_of(action, epoch)
                assert message is not None, f"{action} is for the training thread"
                self._control.send(encode(message))

    def _say_hello(self, action: act.SayHello) -> None:
        self._greeted = self._control.send(encode(self._introduction.hello(action)))
        if not self._greeted and time.monotonic() - self._control.opened > REOPEN_SECONDS:
            self._control.reopen()  # whoever refused our key once may know it now

    def _offer(self, action: act.Offer, epoch: int) -> None:
        offer = msg.Offer(
            epoch=epoch,
            round=action.round,
            fragment=action.fragment,
            base=max(0, action.base),
            steps=action.steps,
            tokens=action.tokens,
            nothing=action.nothing,
        )
        if action.nothing:
            self._control.send(encode(offer))
            return
        with self.lock:
            buffer = self.staged.pop(action.fragment)
        assert self._transfers is not None
        assert self.place is not None
        codec_name = "fp32" if action.exact else self.place.parameters.codec
        self._transfers.push(action.round, action.fragment, buffer, codec_name)
        if not self.core.link.connected or not self._control.send(encode(offer)):
            self._transfers.withdraw(action.round)

    def _fetch(self, action: act.Fetch) -> None:
        if self._transfers is None or self._replica is None:
            self._deferred.append(action)
            return
        buffer = self._replica.take_arrival()
        assert buffer is not None, "the core counts arrival buffers"
        version, codec_name = self._codecs[action.fragment]
        assert version >= action.version
        self._transfers.fetch(action.fragment, action.version, codec_name, buffer)

    def _release(self, fragment: int) -> None:
        self._deferred = [fetch for fetch in self._deferred if fetch.fragment != fragment]
        if self._transfers is not None:
            self._transfers.release(fragment)
