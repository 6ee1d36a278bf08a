"""The syncer daemon: carries out what `core.syncer` decides, with tensors, store and sockets.

Threads: this one (control socket and core), the bulk thread, the merge thread. They talk through
queues; only this one steps the core, so decisions have one order.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Collection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from torch import Tensor

from diloco_plugin._version import __version__
from diloco_plugin.config import SyncerConfig, parameters_to
from diloco_plugin.core import events as ev
from diloco_plugin.core import policy
from diloco_plugin.core.events import Life
from diloco_plugin.core.syncer import RunState, SyncerCore
from diloco_plugin.errors import AddressInUseError, NoRoomError, WireError
from diloco_plugin.modelfile import load_init
from diloco_plugin.net.address import Address
from diloco_plugin.net.poll import Poll, Waker
from diloco_plugin.net.sockets import Door, new_context
from diloco_plugin.store import Store
from diloco_plugin.syncer.bulk import Bulk
from diloco_plugin.syncer.carrying import Carrier
from diloco_plugin.syncer.control import QUARANTINE, Control, Heard
from diloco_plugin.syncer.intake import KEEPER_CLOSE_SECONDS, Intake
from diloco_plugin.syncer.keeping import Keeper, past_of
from diloco_plugin.syncer.merging import Merging
from diloco_plugin.syncer.output import NOT_WRITTEN, Output
from diloco_plugin.syncer.resuming import (
    compare_starts,
    open_store,
    reconcile,
    restore,
    start_of,
)
from diloco_plugin.syncer.security import Security
from diloco_plugin.syncer.translation import event_of
from diloco_plugin.tape.recording import Recorder
from diloco_plugin.wire import messages as msg
from diloco_plugin.wire.framing import encode
from diloco_plugin.wire.manifest import size_max

log = logging.getLogger("diloco.syncer")

MERGER_CLOSE_SECONDS: Final = 120.0
BULK_CLOSE_SECONDS: Final = 5.0
#: After a RunComplete or GoingAway, the time that libzmq gets to send it.
FAREWELL_SECONDS: Final = 0.2


class Syncer:
    """One life of the syncer of one run. `run()` blocks until the run is over or `stop()` is called
    and all that follows from it (export, publishing) is done.

    Raises:
        AddressInUseError, ConfigError: from the constructor; nothing was started then.
    """

    def __init__(self, config: SyncerConfig, given: Collection[str] | None = None) -> None:
        """Open the state, bind both sockets and load --init. Nobody answers before `run()`.

        Args:
            given: keys of `config` that somebody has set; the others are as they were when the run
                began. None: all.
        """
        store = open_store(config)
        try:
            if store is not None and store.run is not None:
                config = reconcile(config, given, store.run)
                past = past_of(store)
                compare_starts(config, given, store.start, past.clock if past else 0)
            self._set_up(config, store)
        except BaseException:
            if store is not None:
                store.close(clean=False)
            raise

    def _set_up(self, config: SyncerConfig, store: Store | None) -> None:
        self.config = config
        #: an earlier life has left a model
        self.goes_on = store is not None and store.run is not None
        #: of the process, once `run()` has returned
        self.exit_code = 0
        self._output = Output(config)
        self._tape = Recorder(Path(config.tape)) if config.tape else None
        self._decide = self._tape.step if self._tape else SyncerCore.step
        model = restore(store, config) if store is not None else None
        if model is not None and config.init:
            log.info("init=%s is not used: %s holds the run's model", config.init, config.state)
        init = load_init(config.init) if config.init and model is None else None
        now = time.monotonic_ns()
        # Without a store, wall-clock time is what grows from one life to the next.
        self._core = SyncerCore(
            config.parameters,
            epoch=store.epoch if store is not None else time.time_ns() // 1_000_000,
            steps=config.steps,
            seeded=init is not None,
            past=past_of(store) if store is not None else None,
            clean=store.clean if store is not None else False,
            lineage=store.lineage if store is not None else None,
            now_ns=now,
        )
        self._queue: SimpleQueue[ev.SyncerEvent | BaseException] = SimpleQueue()
        self._pending: deque[ev.SyncerEvent] = deque()
        self._waker = Waker()
        self._context = new_context()
        with contextlib.ExitStack() as undo:
            undo.callback(self._context.destroy, linger=0)
            undo.callback(self._waker.close)
            self._security = Security(config, self._context, self._post)
            undo.callback(self._security.close)
            door = Door(self._context, config.bind, "control", self._security.guard)
            bulk_door = self._bulk_door()
            self._security.probe(self._context, (door, bulk_door))
            undo.pop_all()
        self._control = Control(door, self._security)
        self._bulk = Bulk(
            bulk_door, self._security, self._pushes_kept(), config.parameters.lease, self
        )
        self._merging = Merging(self._post, self._bulk.release)
        self._keeper: Keeper | None = None
        if store is not None:
            store.note_start(start_of(config))
            self._keeper = Keeper(store, config.durability, config.interval_seconds(), self._post)
        self._intake = Intake(config, self._merging, self._bulk, self._keeper, init)
        if model is not None and store is not None and store.run is not None:
            self._intake.go_on(store.run, model)
        self._carrier = Carrier(
            config,
            self._core,
            self._control,
            self._bulk,
            self._merging,
            self._intake,
            self._keeper,
            has_model=init is not None or model is not None,
            later=self._pending.append,
        )
        self._strange_bulk: Counter[str] = Counter()
        self._reload_asked = False

    @property
    def address(self) -> str:
        """Where learners find this syncer, e.g. `tcp://127.0.0.1:5555`."""
        return str(self._control.door.address)

    # ---- life ----

    def run(self) -> None:
        """Serve until the run is over; then export and publish."""
        self._bulk.start()
        self._security.say()
        poll = Poll()
        poll.add(self._control.door)
        poll.add(self._waker)
        try:
            while not self._carrier.stopped:
                poll.wait((self._core.next_deadline_ns() - time.monotonic_ns()) / 1e9)
                self._turn()
            self._farewell()
        finally:
            self._close()

    def stop(self, reason: str) -> None:
        """Ask for an orderly stop. Any thread, signal handlers too."""
        self._post(ev.StopAsked(now_ns=time.monotonic_ns(), reason=reason))

    def reload(self) -> None:
        """Ask to read the allow-list again. Any thread, signal handlers too."""
        self._reload_asked = True
        self._waker.wake()

    def _turn(self) -> None:
        self._waker.drain()
        if self._reload_asked:
            self._reload_asked = False
            self._bar(self._security.reload())
        for heard in self._control.hear():
            self._take(heard)
        disgraced, self._control.disgraced = self._control.disgraced, []
        for life in disgraced:
            self._step(ev.Barred(now_ns=time.monotonic_ns(), life=life, reason=QUARANTINE))
        while True:
            try:
                event = self._queue.get_nowait()
            except Empty:
                break
            if isinstance(event, BaseException):
                raise event
            self._step(event)
        if time.monotonic_ns() >= self._core.next_deadline_ns():
            self._step(ev.Ticked(now_ns=time.monotonic_ns()))
        self._security.mind(time.monotonic())
        self._publish_when_due()  # a busy syncer never ticks
        if self._keeper is not None and self._keeper.due:
            keeper, model = self._keeper, self._merging.the_model
            self._merging.submit(lambda: keeper.save(model))

    def _bar(self, names: frozenset[str]) -> None:
        reason = "its key is not admitted any more"
        lives = {*self._control.lives(), *(member.life for member in self._core.members)}
        for life in sorted(life for life in lives if life.name in names):
            self._step(ev.Barred(now_ns=time.monotonic_ns(), life=life, reason=reason))

    def _step(self, event: ev.SyncerEvent) -> None:
        """Step the core and carry out what it wants; failures to send come back as events."""
        self._pending.append(event)
        while self._pending:
            for action in self._decide(self._core, self._pending.popleft()):
                self._carrier.carry_out(action)

    def _post(self, event: ev.SyncerEvent | BaseException) -> None:
        self._queue.put(event)
        self._waker.wake()

    def _farewell(self) -> None:
        """The last word to learners was sent; save, export and publish while it travels."""
        merged = self._merging.close(MERGER_CLOSE_SECONDS)
        if self._keeper is not None and merged:
            keeper, self._keeper = self._keeper, None
            if not keeper.close(self._merging.model, self._core.clock, KEEPER_CLOSE_SECONDS):
                self.exit_code = NOT_WRITTEN
        if not self._carrier.has_model:
            self._output.nothing("no learner has brought a model")
        elif not merged:
            self._output.nothing("the last merge does not end")
            self.exit_code = NOT_WRITTEN
        else:
            tensors = self._merging.the_model.tensors()
            written = self._output.finish(self._core.clock, tensors, self._intake.model_config)
            self.exit_code = self.exit_code or written
        time.sleep(FAREWELL_SECONDS)

    def _close(self) -> None:
        self._bulk.stop(BULK_CLOSE_SECONDS)
        self._merging.close(MERGER_CLOSE_SECONDS)
        if self._keeper is not None:
            self._keeper.abort()
        self._output.close()
        if self._tape is not None:
            self._tape.close()
        self._control.door.close()
        self._security.close()
        self._waker.close()
        self._context.destroy(linger=0)

    def _bulk_door(self) -> Door:
        control = Address.parse(self.config.bind)
        try:
            return Door(self._context, control.beside(), "bulk", self._security.guard)
        except AddressInUseError as error:
            raise AddressInUseError(
                f"{error} (Bulk data uses the port next to that of --bind, {control}.)"
            ) from None

    def _pushes_kept(self) -> int:
        """Lockstep keeps all pushes of a round until its close, to fold them in a fixed order."""
        parameters = self.config.parameters
        if not parameters.lockstep:
            return 0
        rounds = sum(policy.in_flight_max(parameters, closing=closing) for closing in (False, True))
        return parameters.learners * rounds

    def _publish_when_due(self) -> None:
        if self._carrier.has_model and self._output.due(time.monotonic()):
            clock, config, model = (
                self._core.clock,
                self._intake.model_config,
                self._merging.the_model,
            )
            self._merging.submit(lambda: self._output.publish(clock, model.tensors(), config))

    # ---- what comes in over the control socket ----

    def _take(self, heard: Heard) -> None:
        now = time.monotonic_ns()
        route, message = heard.route, heard.message
        if isinstance(message, msg.StatusRequest | msg.PlaceRequest):
            self._inform(heard, now)
            return
        if isinstance(message, msg.Hello):
            self._hello(heard, message, now)
            return
        life = self._control.life_of(heard)
        epoch = getattr(message, "epoch", self._core.epoch)
        if life is None or epoch != self._core.epoch:
            self._control.answer(route, encode(msg.HelloRequired(epoch=self._core.epoch)))
            return
        if isinstance(message, msg.Heartbeat):
            self._carrier.send(life, msg.HeartbeatAnswer(epoch=self._core.epoch))
        if isinstance(message, msg.StateAnswer) and message.size > self._state_max():
            message = msg.StateAnswer(
                epoch=epoch, ticket=message.ticket, nothing=f"too large ({message.size:,} bytes)"
            )
        self._step(event_of(message, life, now))

    def _state_max(self) -> int:
        model = self._merging.model
        return size_max(model.layout.elements) if model is not None else 0

    def _inform(self, heard: Heard, now: int) -> None:
        """Answer somebody who need not be a learner (yet)."""
        objection = self._control.objection(heard)
        if objection is not None:
            code, text = objection
            self._control.answer(heard.route, encode(msg.Refuse(code=code, text=text)))
        elif isinstance(heard.message, msg.PlaceRequest):
            self._carrier.asking = heard.route
            self._step(ev.PlaceAsked(now_ns=now, name=heard.message.name))
        else:
            self._control.answer(heard.route, self._encoded_status())

    def _hello(self, heard: Heard, hello: msg.Hello, now: int) -> None:
        life = self._control.knocking(heard, hello)
        problem = self._control.objection(heard, life) or policy.judge_hello(
            hello.protocol, msg.PROTOCOL, hello.run, self.config.run
        )
        if problem is None and self._core.room.refusal(now) is None:
            nobody = self._core.state is RunState.EMPTY and not len(self._core.members)
            try:
                problem = self._intake.problem(hello, heard.key, nobody=nobody)
            except NoRoomError as error:
                problem = ("room", str(error))
            except WireError as error:
                self._control.strange_model(heard, error)
                return
        before = self._control.life_of(heard)
        if before is not None and before != life:  # one connection, one learner
            self._control.hang_up(before)
            self._step(ev.Vanished(now_ns=now, life=before))
        self._control.bind(life, heard.route)
        self._carrier.greeting = hello
        self._step(
            ev.Knocked(
                now_ns=now,
                life=life,
                fragments=len(self._merging.the_model.layout.fragments)
                if self._merging.model
                else 0,
                epoch=hello.epoch,
                versions=hello.versions,
                data_seed=hello.data_seed,
                wants_state=hello.wants_state,
                problem=problem,
            )
        )

    # ---- what comes in from the bulk and merge threads (Reports) ----

    def push_arrived(self, life: Life, round_: int, fragment: int, slot: Tensor) -> None:
        """Bulk thread: all bytes of a push are here."""
        self._merging.measure(life, round_, fragment, slot)

    def push_failed(self, life: Life, round_: int, fragment: int, reason: str) -> None:
        """Bulk thread: the bytes of a push were wrong, or did not come."""
        now = time.monotonic_ns()
        self._post(
            ev.TransferFailed(now_ns=now, life=life, round=round_, fragment=fragment, reason=reason)
        )

    def seed_arrived(self, life: Life) -> None:
        """Bulk thread: theta is filled."""
        self._merging.complete_seed(life, self._intake.keep_seed)

    def seed_failed(self, life: Life, reason: str) -> None:
        """Bulk thread: a learner's model did not come."""
        self._post(ev.SeedFailed(now_ns=time.monotonic_ns(), life=life, reason=reason))

    def state_failed(self, joiner: Life, ticket: int, reason: str) -> None:
        """Bulk thread: an inner optimizer state does not pass."""
        now = time.monotonic_ns()
        self._post(ev.StateFailed(now_ns=now, life=joiner, ticket=ticket, reason=reason))

    def strange_bytes(self, reason: str, life: Life | None, key: bytes) -> None:
        """Bulk thread: a peer broke the protocol."""
        self._strange_bulk[reason] += 1
        # What was sent twice may have been asked for twice, after a reconnect.
        if life is not None and reason != "duplicate" and self._control.strike(life, key):
            self._post(ev.Barred(now_ns=time.monotonic_ns(), life=life, reason=QUARANTINE))

    def broken(self, error: BaseException) -> None:
        """Any thread: our own bug; the daemon must not go on."""
        self._post(error)

    # ---- looking in ----

    def _encoded_status(self) -> bytes:
        body = self.status()
        try:
            return encode(msg.Status(body=body))
        except WireError as error:  # thousands of learners: say what is wrong at least
            short = {"learners": [], "fragments": [], "problems": [*body["problems"], str(error)]}
            return encode(msg.Status(body=body | short))

    def status(self) -> dict[str, Any]:
        """The status body: what `diloco status --json` prints."""
        body = self._core.status(time.monotonic_ns())
        body |= {
            "run": self.config.run,
            "protocol": msg.PROTOCOL,
            "version": __version__,
            "parameters": parameters_to(self.config.parameters),
            "bulk_port": self._bulk.port,
            "strange_messages": dict(
                sorted((self._control.strange + self._strange_bulk.copy()).items())
            ),
        }
        if self._keeper is not None:
            body["store"] = self._keeper.status()
        if self._merging.model is not None:
            for entry, fragment in zip(
                body["fragments"], self._merging.the_model.layout.fragments, strict=False
            ):
                entry["elements"] = fragment.elements
        body["quarantined"] = self._control.in_quarantine()
        body |= self._security.status()
        body["problems"] = [*self._security.problems(), *policy.diagnose(body)]
        if self._keeper is not None and self._keeper.trouble:
            body["problems"].append(self._keeper.trouble)
        if self._tape is not None and self._tape.trouble:
            body["problems"].append(f"{self._tape.trouble}; the run goes on")
        return body
