"""A learner written by hand: says what it is told to say, true or not, over real sockets."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from diloco_plugin.describing import describe
from diloco_plugin.net.address import Address
from diloco_plugin.net.keys import LineKeys
from diloco_plugin.net.poll import Poll
from diloco_plugin.net.sockets import Line, new_context
from diloco_plugin.tensors.layout import Layout, TensorSpec, build_layout, views
from diloco_plugin.wire import messages as msg
from diloco_plugin.wire.chunks import checksum, chunk_bounds, chunk_count
from diloco_plugin.wire.framing import decode_bulk, decode_to_learner, encode

T = TypeVar("T")
PATIENCE = 10.0


def one_weight(*shape: int) -> tuple[TensorSpec, ...]:
    """The description of a model that is one weight."""
    return (TensorSpec("w", shape, "float32", "weight", ""),)


def many_weights(count: int) -> tuple[TensorSpec, ...]:
    """The description of a model that is so many numbers, with long names."""
    return tuple(TensorSpec(f"{i:0100}", (1,), "float32", "weight") for i in range(count))


class Forged:
    """A hand-written client. Lives in one thread; every wait has a deadline."""

    def __init__(
        self,
        address: str,
        name: str,
        specs: Sequence[TensorSpec],
        *,
        incarnation: str = "",
        keys: LineKeys | None = None,
    ) -> None:
        self.name = name
        self.specs = tuple(specs)
        self.incarnation = incarnation or secrets.token_hex(16)
        self.welcome: msg.Welcome | None = None
        self.base: list[Tensor] = []
        self.versions: list[int] = []
        self.clock = 0
        self._address = Address.parse(address)
        self._context = new_context()
        self._keys = keys
        self.control = Line(self._context, self._address, "control", keys)
        self.bulk: Line | None = None
        self._heard: list[msg.Message] = []
        self._bulk_heard: list[tuple[msg.Message, bytes]] = []
        self._poll = Poll()
        self._poll.add(self.control)

    def __enter__(self) -> Forged:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.welcome is not None and self.control.connected:
            self.control.send(encode(msg.Goodbye(epoch=self.epoch)))
        self.close()

    def close(self) -> None:
        """Hang up; what was sent still leaves."""
        self._context.destroy(linger=500)

    @property
    def epoch(self) -> int:
        assert self.welcome is not None
        return self.welcome.epoch

    @property
    def layout(self) -> Layout:
        assert self.welcome is not None
        return build_layout(self.specs, self.welcome.fragments)

    # ---- saying ----

    def say(self, message: msg.Message) -> None:
        """Say something on the control line, as soon as there is a connection."""
        self.say_bytes(encode(message))

    def say_bytes(self, data: bytes) -> None:
        """Say anything at all on the control line."""
        self._wait(lambda: self.control.send(data), "the control line takes a message")

    def say_bulk(self, *frames: Any) -> None:
        """Say anything at all on the bulk line."""
        bulk = self.bulk
        assert bulk is not None
        self._wait(lambda: bulk.send(*frames), "the bulk line takes a message")

    def hello(self, **changes: Any) -> None:
        """Introduce itself."""
        values: dict[str, Any] = {
            "protocol": msg.PROTOCOL,
            "run": "",
            "name": self.name,
            "incarnation": self.incarnation,
            "tensors": describe(self.specs),
        }
        self.say(msg.Hello(**(values | changes)))

    # ---- hearing ----

    def hear(self, kind: type[T], that: Callable[[T], bool] = lambda _: True) -> T:
        """The next control message of this kind; the others are kept."""

        def look() -> T | None:
            self._heard += [decode_to_learner(f[0].buffer) for f in self.control.receive()]
            for place, message in enumerate(self._heard):
                if isinstance(message, kind) and that(message):
                    del self._heard[place]
                    return message
            return None

        return self._wait(look, f"{self.name} hears {kind.__name__}")

    def hear_bulk(
        self, kind: type[Any] | tuple[type[Any], ...], that: Callable[[Any], bool]
    ) -> tuple[Any, bytes]:
        """The next bulk message of this kind and its payload; the others are kept."""

        def look() -> tuple[Any, bytes] | None:
            assert self.bulk is not None
            for frames in self.bulk.receive():
                payload = frames[1].bytes if len(frames) > 1 else b""
                self._bulk_heard.append((decode_bulk(frames[0].buffer), payload))
            for place, (message, payload) in enumerate(self._bulk_heard):
                if isinstance(message, kind) and that(message):
                    del self._bulk_heard[place]
                    return message, payload
            return None

        return self._wait(look, f"{self.name} hears {kind}")

    def _wait(self, look: Callable[[], T | None], what: str) -> T:
        deadline = time.monotonic() + PATIENCE
        while not (found := look()):
            assert time.monotonic() < deadline, f"never: {what} (heard {self._heard})"
            self._poll.wait(0.005)
        return found

    # ---- whole conversations ----

    def join(self, **changes: Any) -> msg.Welcome:
        """Be let in and open the bulk line; the model is not taken yet."""
        self.hello(**changes)
        self.welcome = self.hear(msg.Welcome)
        self.clock = self.welcome.clock
        bulk = self._address.with_port(self.welcome.bulk_port)
        self.bulk = Line(self._context, bulk, "bulk", self._keys)
        self._poll.add(self.bulk)
        self.say_bulk(encode(msg.BulkHello(token=self.welcome.token)))
        self.base = [torch.zeros(f.elements) for f in self.layout.fragments]
        self.versions = [-1] * len(self.base)
        return self.welcome

    def take(self) -> None:
        """Fetch every fragment and say so: from here on it may push."""
        for fragment in range(len(self.base)):
            self.fetch(fragment)
        self.say(msg.Taken(epoch=self.epoch))

    def fetch(self, fragment: int) -> None:
        """Fetch the newest announced version of a fragment."""
        while True:
            told = self.hear(msg.Announce, lambda a: a.fragment == fragment)
            if self._fetch(fragment, told.version):
                self.versions[fragment] = told.version
                return

    def _fetch(self, fragment: int, version: int) -> bool:
        """False: that version is superseded."""
        elements = self.layout.fragments[fragment].elements
        for index in range(chunk_count(elements)):
            want = msg.Want(kind="fetch", fragment=fragment, key=version, first=index, count=1)
            self.say_bulk(encode(want))
            answer, payload = self.hear_bulk(
                (msg.Chunk, msg.Gone), lambda m: (m.fragment, m.key) == (fragment, version)
            )
            if isinstance(answer, msg.Gone):
                return False
            start, stop = chunk_bounds(index, elements)
            values = torch.frombuffer(bytearray(payload), dtype=torch.float32)
            self.base[fragment][start:stop] = values
        return True

    def seed(self, values: Sequence[Tensor]) -> None:
        """Be the learner that brings the model."""
        self.hear(msg.SeedRequest)
        self.base = [value.clone() for value in values]
        for fragment, value in enumerate(values):
            for index in range(chunk_count(value.numel())):
                self.serve("seed", fragment, 0, value, index)
        for fragment in range(len(values)):
            self.versions[fragment] = self.hear(
                msg.Announce, lambda a, f=fragment: a.fragment == f
            ).version

    def progress(self, clock: int) -> None:
        """Report a clock."""
        self.clock = clock
        self.say(msg.Progress(epoch=self.epoch, clock=clock, step_ns=1_000_000, tokens=clock))

    def pulled(self, *, closing: bool = False) -> msg.Pull:
        """Wait for a pull."""
        return self.hear(msg.Pull, lambda pull: pull.closing == closing)

    def offer(self, pull: msg.Pull, **changes: Any) -> None:
        """Offer a push for a pull."""
        values: dict[str, Any] = {
            "epoch": self.epoch,
            "round": pull.round,
            "fragment": pull.fragment,
            "base": self.versions[pull.fragment],
            "steps": 1,
            "tokens": 1,
        }
        self.say(msg.Offer(**(values | changes)))

    def serve(self, kind: str, fragment: int, key: int, values: Tensor, index: int) -> None:
        """Send one chunk of a push or a seed, once it is wanted."""
        self.wanted(kind, fragment, key, index)
        start, stop = chunk_bounds(index, values.numel())
        data = values[start:stop].numpy().tobytes()
        header = msg.Chunk(kind=kind, fragment=fragment, key=key, index=index, crc=checksum(data))
        self.say_bulk(encode(header), data)

    def wanted(self, kind: str, fragment: int, key: int, index: int) -> None:
        """Wait until a chunk is wanted; one Want may cover several."""

        def covers(want: msg.Want) -> bool:
            here = (want.kind, want.fragment, want.key) == (kind, fragment, key)
            return here and want.first <= index < want.first + want.count

        want, _ = self.hear_bulk(msg.Want, covers)
        self._bulk_heard.append((want, b""))  # it may cover the next chunk too

    def push(self, pull: msg.Pull, values: Tensor, **changes: Any) -> msg.Fate:
        """Offer and send a whole push; returns its fate."""
        self.offer(pull, **changes)
        for index in range(chunk_count(values.numel())):
            self.serve("push", pull.fragment, pull.round, values, index)
        return self.fate(pull)

    def fate(self, pull: msg.Pull) -> msg.Fate:
        """Wait for the fate of a push."""
        return self.hear(msg.Fate, lambda f: (f.round, f.fragment) == (pull.round, pull.fragment))

    def flat(self, tensors: dict[str, Tensor]) -> list[Tensor]:
        """Named tensors as flat fragments."""
        flats = [torch.zeros(f.elements) for f in self.layout.fragments]
        for flat, fragment in zip(flats, self.layout.fragments, strict=True):
            for slot, view in zip(fragment.slots, views(flat, fragment), strict=True):
                view.copy_(tensors[slot.spec.name])
        return flats
