"""Takes back from learners what a state directory has lost: a syncer that only asks for bases.

It listens where the syncer did, so learners that train on alone find it by themselves. What they
say is claimed, not known: only bytes with the digest that the run's own records name are taken.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from diloco_plugin.config import SyncerConfig, parameters_from
from diloco_plugin.core import policy
from diloco_plugin.core.events import Life
from diloco_plugin.describing import specs_said
from diloco_plugin.errors import AddressInUseError, WireError
from diloco_plugin.net.address import Address
from diloco_plugin.net.poll import Poll, Waker
from diloco_plugin.net.sockets import Door, Sent, new_context
from diloco_plugin.receiving import take_chunk
from diloco_plugin.store import RunFile, digest_of
from diloco_plugin.syncer.control import Control, Heard
from diloco_plugin.syncer.resuming import specs_of
from diloco_plugin.syncer.security import Security
from diloco_plugin.tensors.codec import codec
from diloco_plugin.tensors.layout import TensorSpec, build_layout, differences
from diloco_plugin.wire import messages as msg
from diloco_plugin.wire.chunks import Receiver, chunk_count
from diloco_plugin.wire.framing import decode_bulk, encode

#: Chunks of 1 MiB that a transfer may have on its way.
WINDOW: Final = 4
#: Learners whose offer is remembered at a time.
HELPERS_MAX: Final = 256
#: Seconds that a transfer may go without a byte.
PATIENCE: Final = 15.0
LOOK_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Wanted:
    """A version that was announced and is lost, and the digest of what learners hold of it."""

    fragment: int
    version: int
    digest: str


@dataclass(slots=True)
class _Helper:
    """A learner that says it holds something."""

    life: Life
    token: bytes
    #: fragments to ask it for; it is asked once for each time that it calls
    claims: set[int] = field(default_factory=set)
    #: fragments of which it has sent other values than were announced
    wrong: set[int] = field(default_factory=set)
    #: name and dtype of tensors that it holds in another dtype, by fragment
    narrow: dict[int, str] = field(default_factory=dict)
    #: its bulk connection, once it has shown its token there
    route: bytes = b""


@dataclass(slots=True)
class _Transfer:
    """One fragment on its way from one learner."""

    wanted: Wanted
    helper: _Helper
    target: Tensor  # flat fp32, exactly as long as the fragment
    receiver: Receiver
    moved: float


class Salvager:
    """Both doors of a syncer, in one thread. Bound once it is made; `gather` answers."""

    def __init__(
        self,
        config: SyncerConfig,
        run: RunFile,
        wanted: Sequence[Wanted],
        say: Callable[[str], None],
    ) -> None:
        """`say` is told, in sentences, who helps and who does not.

        Raises:
            AddressInUseError: somebody listens there; a syncer, most likely.
            ConfigError: the address or the keys cannot be used.
        """
        self._run, self._say = run, say
        self._specs = specs_of(run)
        self._layout = build_layout(self._specs, run.fragments)
        self._buffers = parameters_from(run.parameters, source="run.json").buffers
        self._missing = {item.fragment: item for item in wanted}
        self._found: dict[int, Tensor] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._helpers: dict[Life, _Helper] = {}
        self._failure: list[BaseException] = []
        self._waker = Waker()
        self._context = new_context()
        with contextlib.ExitStack() as undo:
            undo.callback(self._context.destroy, linger=0)
            undo.callback(self._waker.close)
            self._security = Security(config, self._context, self._broken)
            undo.callback(self._security.close)
            door = Door(self._context, config.bind, "control", self._security.guard)
            self._bulk = self._bulk_door(config.bind)
            self._security.probe(self._context, (door, self._bulk))
            undo.pop_all()
        self._control = Control(door, self._security)

    def _bulk_door(self, bind: str) -> Door:
        address = Address.parse(bind)
        try:
            return Door(self._context, address.beside(), "bulk", self._security.guard)
        except AddressInUseError as error:
            raise AddressInUseError(
                f"{error} (Bulk data uses the port next to that of --bind, {address}.)"
            ) from None

    @property
    def address(self) -> str:
        """Where learners have to find it."""
        return str(self._control.door.address)

    def gather(self, seconds: float) -> dict[int, Tensor]:
        """Blocks until all that is wanted is here, or the time is over.

        Returns:
            by fragment, flat fp32 values with the wanted digest.
        """
        self._security.mind(time.monotonic())
        poll = Poll()
        for thing in (self._control.door, self._bulk, self._waker):
            poll.add(thing)
        end = time.monotonic() + seconds
        while self._missing and time.monotonic() < end:
            poll.wait(min(LOOK_SECONDS, max(0.0, end - time.monotonic())))
            self._waker.drain()
            if self._failure:
                raise self._failure[0]
            for heard in self._control.hear():
                self._take_control(heard)
            for route, frames in self._bulk.receive():
                self._take_bulk(route, frames)
            self._give_up_on_the_silent()
            self._ask()
        return dict(self._found)

    def close(self) -> None:
        """Hang up."""
        self._control.door.close()
        self._bulk.close()
        self._security.close()
        self._waker.close()
        self._context.destroy(linger=0)

    def _broken(self, error: BaseException) -> None:
        self._failure.append(error)
        self._waker.wake()

    # ---- control ----

    def _take_control(self, heard: Heard) -> None:
        hello = heard.message
        life = self._control.knocking(heard, hello) if isinstance(hello, msg.Hello) else None
        refusal = self._control.objection(heard, life)
        specs: tuple[TensorSpec, ...] = ()
        if refusal is None and isinstance(hello, msg.Hello):
            try:
                specs = specs_said(hello.tensors, self._buffers)
            except WireError as error:
                self._control.strange_model(heard, error)
                return
            refusal = self._problem(hello, specs)
        if refusal is not None:
            self._refuse(heard, *refusal)
            return
        self._refuse(
            heard,
            "repair",
            f"the syncer of run {self._run.run!r} is being repaired, and comes back",
        )
        if isinstance(hello, msg.Hello) and life is not None:
            self._consider(heard, hello, life, specs)

    def _refuse(self, heard: Heard, code: str, text: str) -> None:
        self._control.answer(heard.route, encode(msg.Refuse(code=code, text=text)))

    def _problem(self, hello: msg.Hello, specs: tuple[TensorSpec, ...]) -> tuple[str, str] | None:
        """What the run's syncer would say too."""
        problem = policy.judge_hello(hello.protocol, msg.PROTOCOL, hello.run, self._run.run)
        if problem is not None:
            return problem
        differs = "; ".join(differences(self._specs, specs))
        return ("layout", policy.another_model(self._run.run, differs)) if differs else None

    def _consider(
        self, heard: Heard, hello: msg.Hello, life: Life, specs: tuple[TensorSpec, ...]
    ) -> None:
        """Has this learner anything that is wanted?"""
        if len(hello.versions) != self._run.fragments:
            return
        claims = {f for f, item in self._missing.items() if hello.versions[f] == item.version}
        helper = self._helpers.pop(life, None) or _Helper(life, secrets.token_bytes(16))
        helper.claims = claims - helper.wrong
        serves = any(transfer.helper is helper for transfer in self._transfers.values())
        if helper.claims or helper.wrong or serves:
            self._remember(helper)
        if not helper.claims:
            return
        dtypes = {spec.name: spec.dtype for spec in specs}
        helper.narrow |= {f: self._narrow(f, dtypes) for f in helper.claims}
        salvage = msg.Salvage(
            epoch=hello.epoch,
            bulk_port=self._bulk.port,
            token=helper.token,
            fragments=tuple((f, self._missing[f].version) for f in sorted(helper.claims)),
        )
        self._control.answer(heard.route, encode(salvage))

    def _remember(self, helper: _Helper) -> None:
        self._helpers[helper.life] = helper
        if len(self._helpers) > HELPERS_MAX:  # the first is the one that has been silent longest
            busy = {transfer.helper.life for transfer in self._transfers.values()}
            idle = next((life for life in self._helpers if life not in busy), helper.life)
            del self._helpers[idle]

    def _narrow(self, fragment: int, dtypes: dict[str, str]) -> str:
        for slot in self._layout.fragments[fragment].slots:
            dtype = dtypes[slot.spec.name]
            if dtype not in ("float32", "float64"):
                return f"it trains {slot.spec.name} in {dtype}"
        return ""

    # ---- bulk ----

    def _take_bulk(self, route: bytes, frames: list[Any]) -> None:
        with contextlib.suppress(WireError):  # it has harmed its own transfer only
            message = decode_bulk(frames[0].buffer)
            key = self._bulk.key_of(frames)
            helper = next((h for h in self._helpers.values() if h.route == route), None)
            if isinstance(message, msg.BulkHello):
                self._greet(route, message.token, key)
            elif helper is None or not self._security.belongs(key, helper.life.name):
                raise WireError("stranger", "a bulk message before a token")
            elif isinstance(message, msg.Chunk):
                self._receive(helper, message, frames)
            elif isinstance(message, msg.Gone):
                transfer = self._transfers.get(message.fragment)
                if transfer is not None and transfer.helper is helper:
                    self._give_up(transfer, "it does not hold it any more")

    def _greet(self, route: bytes, token: bytes, key: bytes) -> None:
        helper = next((h for h in self._helpers.values() if h.token == token), None)
        if helper is None or not self._security.belongs(key, helper.life.name):
            raise WireError("stranger", "an unknown token, or that of another learner")
        if helper.route == route:
            return
        helper.route = route
        for transfer in list(self._transfers.values()):  # what was cut goes on from here
            if transfer.helper is helper:
                transfer.receiver.restart()
                self._grant(transfer)

    def _ask(self) -> None:
        """Ask somebody for each fragment that is missing; one at a time of each learner."""
        busy = {transfer.helper.life for transfer in self._transfers.values()}
        for fragment, wanted in sorted(self._missing.items()):
            if fragment in self._transfers:
                continue
            for helper in self._helpers.values():
                if helper.life in busy or not helper.route or fragment not in helper.claims:
                    continue
                helper.claims.discard(fragment)
                busy.add(helper.life)
                self._begin(wanted, helper)
                break

    def _begin(self, wanted: Wanted, helper: _Helper) -> None:
        elements = self._layout.fragments[wanted.fragment].elements
        receiver = Receiver(chunk_count(elements), WINDOW)
        transfer = _Transfer(wanted, helper, torch.empty(elements), receiver, time.monotonic())
        self._transfers[wanted.fragment] = transfer
        self._grant(transfer)

    def _grant(self, transfer: _Transfer) -> None:
        transfer.moved = time.monotonic()
        wanted = transfer.wanted
        for first, count in transfer.receiver.wants():
            want = msg.Want(
                kind="base", fragment=wanted.fragment, key=wanted.version, first=first, count=count
            )
            if self._bulk.send(transfer.helper.route, encode(want)) is not Sent.OK:
                transfer.helper.route = b""
                self._give_up(transfer, "its connection broke")
                return

    def _receive(self, helper: _Helper, chunk: msg.Chunk, frames: list[Any]) -> None:
        transfer = self._transfers.get(chunk.fragment)
        if transfer is None or transfer.helper is not helper:
            return
        if (chunk.kind, chunk.key) != ("base", transfer.wanted.version):
            return
        try:
            take_chunk(chunk, frames, transfer.receiver, codec("fp32"), transfer.target)
        except WireError as error:
            if error.reason != "duplicate":
                self._give_up(transfer, f"its bytes are {error.reason.replace('_', ' ')}")
            raise
        if transfer.receiver.complete:
            self._judge(transfer)
        else:
            self._grant(transfer)

    def _judge(self, transfer: _Transfer) -> None:
        wanted, helper = transfer.wanted, transfer.helper
        if digest_of(transfer.target) != wanted.digest:
            helper.wrong.add(wanted.fragment)
            why = helper.narrow.get(wanted.fragment) or "other values than were announced"
            self._give_up(transfer, f"it does not hold it to the bit: {why}")
            return
        del self._transfers[wanted.fragment]
        del self._missing[wanted.fragment]
        self._found[wanted.fragment] = transfer.target
        self._say(
            f"Fragment {wanted.fragment}: learner {helper.life.name!r} holds version"
            f" {wanted.version} to the bit."
        )

    def _give_up(self, transfer: _Transfer, reason: str) -> None:
        del self._transfers[transfer.wanted.fragment]
        self._say(
            f"Fragment {transfer.wanted.fragment}: learner {transfer.helper.life.name!r} cannot"
            f" give version {transfer.wanted.version} back: {reason}."
        )

    def _give_up_on_the_silent(self) -> None:
        limit = time.monotonic() - PATIENCE
        for transfer in list(self._transfers.values()):
            if transfer.moved < limit:
                self._give_up(transfer, f"nothing came from it for {PATIENCE:g} s")
