"""How a fragment is cut into chunks, and who may send which of them when.

Transfers are driven by the receiver: it issues credit (`Want`) for a few chunks at a time, and a
sender never sends what was not asked for. So memory and what is in flight stay bounded by the side
that pays for them, and a lost connection costs one window.
"""

from __future__ import annotations

import zlib
from typing import Final, TypeAlias

from diloco_plugin.errors import WireError

#: Elements of a chunk: 1 MiB of fp32, and a multiple of every quantization block.
CHUNK_ELEMENTS: Final = 262_144
#: Most chunks that one `Want` may name.
RUN_MAX: Final = 64

Bytes: TypeAlias = bytes | bytearray | memoryview


def chunk_count(elements: int) -> int:
    """Returns how many chunks carry `elements` elements; 0 for none."""
    return -(-elements // CHUNK_ELEMENTS)


def chunk_bounds(index: int, elements: int) -> tuple[int, int]:
    """Returns the range of elements [start, stop) of chunk `index`; only the last may be short.

    Raises:
        WireError: "out_of_range" if there is no such chunk (the index may come from a peer).
    """
    if not 0 <= index < chunk_count(elements):
        raise WireError("out_of_range", f"Chunk {index} of {chunk_count(elements)} was asked for.")
    start = index * CHUNK_ELEMENTS
    return start, min(start + CHUNK_ELEMENTS, elements)


class Receiver:
    """Keeps the credit of one transfer: what to ask for next, and whether all has come.

    Pure: no clock, no I/O. Belongs to one thread. Costs one byte a chunk.

    Args:
        chunks: how many chunks make the transfer whole; 0 is complete at once.
        window: most chunks asked for and not yet received, at least 1.
    """

    def __init__(self, chunks: int, window: int) -> None:
        if chunks < 0 or window < 1:
            raise ValueError(f"chunks={chunks} must be >= 0 and window={window} must be >= 1")
        self.chunks = chunks
        self.window = window
        self.received = 0
        self._have = bytearray(chunks)
        self._outstanding: set[int] = set()
        # Every missing chunk that is not outstanding lies at or behind the cursor.
        self._cursor = 0

    @property
    def complete(self) -> bool:
        """Whether every chunk has been received."""
        return self.received == self.chunks

    @property
    def outstanding(self) -> int:
        """How many chunks were asked for and have not come yet."""
        return len(self._outstanding)

    def wants(self) -> list[tuple[int, int]]:
        """Returns the credit to issue now, as runs (first, count), and counts it as issued."""
        runs: list[tuple[int, int]] = []
        while self._cursor < self.chunks and len(self._outstanding) < self.window:
            index = self._cursor
            self._cursor += 1
            if self._have[index]:
                continue
            self._outstanding.add(index)
            if runs and sum(runs[-1]) == index and runs[-1][1] < RUN_MAX:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((index, 1))
        return runs

    def receive(self, index: int) -> None:
        """Counts a chunk that has come and whose payload is good.

        Raises:
            WireError: "duplicate" if it had come already, "unwanted" if it was never asked for, or
                not since `restart`. The state is unchanged then.
        """
        if index in self._outstanding:
            self._outstanding.remove(index)
            self._have[index] = 1
            self.received += 1
        elif 0 <= index < self.chunks and self._have[index]:
            raise WireError("duplicate", f"Chunk {index} came twice.")
        else:
            raise WireError("unwanted", f"Chunk {index} of {self.chunks} was not asked for.")

    def restart(self) -> None:
        """Takes back all credit: the connection is gone. What was received stays received."""
        self._outstanding.clear()
        self._cursor = 0


def checksum(payload: Bytes) -> int:
    """Returns zlib.crc32 of a payload. Releases the GIL for all but the smallest."""
    return zlib.crc32(payload)


def check_payload(payload: Bytes, nbytes: int, crc: int) -> None:
    """Checks a payload against the size that the layout says and the checksum that came with it.

    Raises:
        WireError: "wrong_size" or "corrupt".
    """
    size = memoryview(payload).nbytes
    if size != nbytes:
        raise WireError("wrong_size", f"A chunk of {size:,} bytes; the layout says {nbytes:,}.")
    if zlib.crc32(payload) != crc:
        raise WireError("corrupt", f"A chunk of {size:,} bytes does not match its checksum.")
