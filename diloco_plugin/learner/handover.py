"""The inner optimizer state on its way out of a learner and into one, in the I/O thread.

A snapshot is taken between two steps, while training goes on: the state changes in optimizer.step()
only, and a counter tells when one has begun. If one has while the copy was made, the copy is void.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from diloco_plugin.errors import WireError
from diloco_plugin.learner.counting import StepCounter
from diloco_plugin.learner.innerstate import InnerState, NothingToGive
from diloco_plugin.wire import manifest as wire
from diloco_plugin.wire.chunks import Receiver, check_payload, checksum
from diloco_plugin.wire.framing import encode
from diloco_plugin.wire.manifest import Manifest, OptimizerState
from diloco_plugin.wire.messages import Chunk, Gone, Want

#: Copies that a step may spoil before a donor gives up.
TRIES_MAX: Final = 5
#: Bytes copied at a time; in between, the I/O thread looks after everything else.
SLICE_BYTES: Final = 32 * 1024 * 1024
#: Chunks of 1 MiB that a joiner may have on their way.
WINDOW: Final = 2


@dataclass(frozen=True, slots=True)
class Answer:
    """What a donor says to a ticket."""

    ticket: int
    clock: int = 0
    size: int = 0
    nothing: str = ""


@dataclass(slots=True)
class Copying:
    """A snapshot that is being made, of the state after `begun` steps."""

    begun: int
    clock: int
    optimizers: tuple[OptimizerState, ...]
    #: (target, source), and how many bytes
    left: deque[tuple[Tensor, Tensor, int]]


class Giving:
    """A donor's half: one ticket at a time."""

    def __init__(self, inner: InnerState, steps: StepCounter, clock: Callable[[], int]) -> None:
        """`clock`: of the learner, as of its last boundary."""
        #: the stream in which the training thread's kernels run
        self._stream: Any = None
        self._inner = inner
        self._steps = steps
        self._clock = clock
        self._ticket: int | None = None
        self._tries = 0
        self._spoiled = -1
        self._copying: Copying | None = None
        self._flat: Tensor | None = None
        self._tail: bytes | None = None

    def settled(self) -> bool:
        """Training thread: a boundary is over. Returns whether that is news for the I/O thread."""
        waits = self._waits
        if waits and self._inner.device is not None:
            self._stream = torch.cuda.current_stream(self._inner.device)
        return waits

    @property
    def _waits(self) -> bool:
        return self._ticket is not None and self._tail is None

    @property
    def busy(self) -> bool:
        """Is there a copy to be gone on with, or to be begun, at once?"""
        return self._copying is not None or (self._waits and self._still())

    def begin(self, ticket: int) -> None:
        """Make a snapshot for this ticket; `turn` does, bit by bit."""
        self.end()
        self._ticket, self._tries, self._spoiled = ticket, 0, -1

    def end(self, ticket: int | None = None) -> None:
        """Forget the snapshot (of this ticket)."""
        if ticket is None or ticket == self._ticket:
            self._ticket = self._copying = self._flat = self._tail = None

    def turn(self) -> Answer | None:
        """Copy a little more. Returns the answer once there is one."""
        if not self.busy:
            return None
        assert self._ticket is not None
        try:
            if not self._steps.sees_all:
                raise NothingToGive("its optimizer does not tell when it steps")
            if not self._steps.begun:
                raise NothingToGive("it has not stepped yet")
            if self._copying is None:
                self._tries += 1
                self._copying = self._start()
            self._copy(self._copying)
            if self._steps.begun != self._copying.begun:
                raise _Void
            return self._finish(self._copying)
        except (_Void, RuntimeError, KeyError) as error:
            self._spoiled, self._copying = self._steps.settled, None
            if self._tries < TRIES_MAX:
                return None
            short = isinstance(error, _Void)
            return self._nothing("its steps are too short for a snapshot" if short else str(error))
        except (NothingToGive, WireError) as error:
            return self._nothing(str(error))

    def _still(self) -> bool:
        known = self._stream is not None or self._inner.device is None
        return known and self._steps.settled == self._steps.begun != self._spoiled

    def _start(self) -> Copying:
        begun, clock = self._steps.begun, self._clock()
        optimizers, sources = self._inner.describe()
        entries = wire.entries_of(optimizers)
        starts, end = wire.places(entries)
        if end > self._inner.size_max:
            raise NothingToGive(f"its state is too large ({end:,} bytes)")
        if self._flat is None or self._flat.numel() != end:
            pinned = self._inner.device is not None
            self._flat = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
        jobs = []
        for entry, start, source in zip(entries, starts, sources, strict=True):
            raw = self._flat[start : start + entry.nbytes]
            target = raw.view(getattr(torch, entry.dtype)).view(entry.shape)
            jobs.append((target, source, entry.nbytes))
        return Copying(begun, clock, optimizers, deque(jobs))

    def _copy(self, copying: Copying) -> None:
        budget = SLICE_BYTES
        # Behind what training has queued so far, and before what it queues later: in its stream.
        stream = torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()
        with stream:
            while copying.left and budget > 0:
                target, source, nbytes = copying.left.popleft()
                target.copy_(source, non_blocking=True)
                budget -= nbytes

    def _finish(self, copying: Copying) -> Answer | None:
        if copying.left:
            return None
        assert self._ticket is not None
        assert self._flat is not None
        rates, positions = self._inner.schedule()
        if self._steps.begun != copying.begun:
            raise _Void
        if self._stream is not None:
            self._stream.synchronize()
        self._tail = wire.tail_of(Manifest(copying.optimizers, rates, positions))
        self._copying = None
        size = self._flat.numel() + len(self._tail)
        return Answer(self._ticket, copying.clock, size)

    def _nothing(self, reason: str) -> Answer:
        assert self._ticket is not None
        answer = Answer(self._ticket, nothing=reason[:400])
        self.end()
        return answer

    def chunks(self, want: Want) -> list[tuple[Any, ...]]:
        """The messages that answer a want.

        Raises:
            WireError: there is no such chunk.
        """
        if want.key != self._ticket or self._tail is None or self._flat is None:
            return [(encode(Gone(kind="state", fragment=0, key=want.key)),)]
        flat: memoryview = memoryview(self._flat.numpy())  # type: ignore[arg-type]
        answers: list[tuple[Any, ...]] = []
        for index in range(want.first, want.first + want.count):
            start, stop = wire.chunk_range(index, flat.nbytes + len(self._tail))
            data: Any = flat[start:stop]
            if stop > flat.nbytes:
                begin = max(0, start - flat.nbytes)
                data = bytes(data) + self._tail[begin : stop - flat.nbytes]
            header = Chunk(kind="state", fragment=0, key=want.key, index=index, crc=checksum(data))
            answers.append((encode(header), data))
        return answers


class _Void(Exception):
    """A step has begun while its state was copied."""


class Taking:
    """A joiner's half: one ticket at a time."""

    def __init__(self, inner: InnerState, done: Callable[[int, Tensor | None, str], None]) -> None:
        """`done(ticket, stream, problem)`: all of it is here, or will not be."""
        self._inner = inner
        self._done = done
        self._ticket = 0
        self._stream: Tensor | None = None
        self._receiver = Receiver(0, WINDOW)

    def begin(self, ticket: int, size: int) -> None:
        """Let a peer's state come; `wants` says what to ask for."""
        self.end()
        if not 8 < size <= self._inner.size_max:
            self._done(
                ticket, None, f"{size:,} bytes cannot be the state of this model's optimizer"
            )
            return
        self._ticket = ticket
        self._stream = torch.empty(size, dtype=torch.uint8)
        self._receiver = Receiver(wire.chunks_of(size), WINDOW)

    def end(self) -> None:
        """Stop, and forget what has come."""
        self._ticket, self._stream = 0, None

    def restart(self) -> None:
        """The connection is a new one: what was asked for was lost with the old one."""
        self._receiver.restart()

    def wants(self) -> list[bytes]:
        """What to ask for now."""
        if self._stream is None:
            return []
        return [
            encode(Want(kind="state", fragment=0, key=self._ticket, first=first, count=count))
            for first, count in self._receiver.wants()
        ]

    def receive(self, chunk: Chunk, frames: list[Any]) -> bool:
        """A chunk has come. Returns whether it is one of ours.

        Raises:
            WireError: it breaks the rules, and ends the transfer (if it is not just a repetition).
        """
        if self._stream is None or chunk.key != self._ticket:
            return False
        try:
            if len(frames) != 2:
                raise WireError("truncated", f"a chunk in {len(frames)} frames instead of 2")
            start, stop = wire.chunk_range(chunk.index, self._stream.numel())
            payload = frames[1].buffer
            check_payload(payload, stop - start, chunk.crc)
            self._receiver.receive(chunk.index)
        except WireError as error:
            if error.reason != "duplicate":
                self._finish(f"its bytes are {error.reason.replace('_', ' ')}")
            raise
        self._stream[start:stop].copy_(torch.frombuffer(payload, dtype=torch.uint8))
        if self._receiver.complete:
            self._finish(self._inner.problem(self._stream))
        return True

    def gone(self, ticket: int) -> None:
        """It is not to be had any more: another offer, or a refusal, is on its way."""
        if ticket == self._ticket:
            self.end()

    def _finish(self, problem: str) -> None:
        ticket, stream = self._ticket, self._stream
        self.end()
        self._done(ticket, None if problem else stream, problem)
