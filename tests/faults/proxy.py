"""A bad line: a TCP proxy on loopback that delays, throttles, holds, cuts and spoils the bytes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Literal

#: A loopback address of its own: a learner looks for both ports on the host that it was told.
HOST = "127.0.0.2"
PIECE = 1 << 16
Way = Literal["up", "down"]


@dataclass
class Harm:
    """What happens once, to a byte of the bulk connection."""

    kind: Literal["cut", "flip"]
    way: Way
    #: bytes that still pass before it
    left: int


class Proxy:
    """Stands between one learner and its syncer, for both ports. Methods: any thread.

    Attributes:
        address: what the learner is told.
        delay: seconds each way. It may be changed at any time, like `rate`.
        rate: bytes per second each way and port; 0: no limit.
        harmed: harms that have happened.
        passed: bytes that came through.
    """

    def __init__(self, port: int) -> None:
        """`port`: of the syncer's control socket on 127.0.0.1; its bulk port is the next one."""
        self.address = f"tcp://{HOST}:{port}"
        self.delay = 0.0
        self.rate = 0.0
        self.harmed = 0
        self.passed = 0
        self._harm: Harm | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._servers = [self._run(self._serve(port)), self._run(self._serve(port + 1, bulk=True))]

    def hold(self) -> None:
        """A black hole: connections stand, nothing passes."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def heal(self) -> None:
        """A line without faults again."""
        self.delay = self.rate = 0.0
        self._harm = None
        self._loop.call_soon_threadsafe(self._open.set)

    def cut(self) -> None:
        """Reset every connection."""
        self._loop.call_soon_threadsafe(self._abort)

    def harm(self, kind: Literal["cut", "flip"], way: Way, after: int) -> None:
        """Cut the bulk connection, or flip a bit, when so many more bytes of it have passed."""
        self._harm = Harm(kind, way, after)

    def close(self) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the loop's thread ----

    def _run(self, job: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(20)

    def _abort(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, port: int, bulk: bool = False) -> asyncio.Server:
        async def accept(near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            try:
                far, far_out = await asyncio.open_connection("127.0.0.1", port, limit=PIECE)
            except OSError:
                near_out.transport.abort()
                return
            ends = {near_out, far_out}
            self._writers |= ends
            try:
                await asyncio.gather(
                    self._pump(near, far_out, "up", bulk), self._pump(far, near_out, "down", bulk)
                )
            except asyncio.CancelledError:
                return  # the proxy closes
            finally:
                for writer in ends:
                    writer.transport.abort()
                self._writers -= ends

        return await asyncio.start_server(accept, HOST, port, limit=PIECE)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: Way, bulk: bool
    ) -> None:
        """Until one end is gone; what is on its way still arrives, and then the other goes."""
        sink.transport.set_write_buffer_limits(PIECE)
        line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)
        reading = asyncio.ensure_future(self._read(source, line, way, bulk))
        try:
            await self._carry(line, sink)
        except ConnectionError:
            sink.transport.abort()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            sink.close()

    async def _read(
        self,
        source: asyncio.StreamReader,
        line: asyncio.Queue[tuple[float, bytes]],
        way: Way,
        bulk: bool,
    ) -> None:
        free, over = 0.0, False
        while not over:
            try:
                data = await source.read(PIECE)
            except ConnectionError:
                data = b""
            over = not data
            if bulk:
                data, cut = self._damage(data, way)
                over = over or cut
            now = time.monotonic()
            free = max(free, now) + (len(data) / self.rate if self.rate else 0.0)
            if data:
                await line.put((free + self.delay, data))
        await line.put((0.0, b""))

    async def _carry(
        self, line: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter
    ) -> None:
        while True:
            due, data = await line.get()
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await self._open.wait()
            if not data:
                return
            sink.write(data)
            await sink.drain()
            self.passed += len(data)

    def _damage(self, data: bytes, way: Way) -> tuple[bytes, bool]:
        """What is left of it, and whether the line ends here."""
        harm = self._harm
        if harm is None or harm.way != way:
            return data, False
        if harm.left >= len(data):
            harm.left -= len(data)
            return data, False
        self._harm = None
        self.harmed += 1
        at = harm.left
        if harm.kind == "cut":
            return data[:at], True
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], False

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        self._abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
