"""An append-only file of records, each of which can be checked by itself and against its chain.

A file is a header and then records. The header holds what kind of file it is and a random nonce
that enters every checksum, so bytes of another file, or of a file inside a record, never pass for a
record of this one. Integers are little-endian; checksums are CRC-32.

    file    = magic(8) kind(16, zero-padded ASCII) nonce(8) checksum(4) record*
    record  = magic(4) sequence(8) length(4) previous(4) checksum(4) payload(length)

``sequence`` counts from 0; ``previous`` is the checksum of the record before (of the header, for
the first). A record's checksum is over its fields from ``sequence`` on and its payload.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from diloco_plugin.errors import StoreError

PAYLOAD_BYTES_MAX: Final = 16 * 1024 * 1024
KIND_BYTES_MAX: Final = 16
_FILE: Final = struct.Struct("<8s16s8s")
_CHECK: Final = struct.Struct("<I")
_FIELDS: Final = struct.Struct("<QII")
_FILE_MAGIC: Final = b"DiLoCoR1"
_MAGIC: Final = b"\xd1rec"
FILE_BYTES: Final = _FILE.size + _CHECK.size
RECORD_BYTES: Final = len(_MAGIC) + _FIELDS.size + _CHECK.size

End = Literal["clean", "torn", "damaged"]


@dataclass(frozen=True, slots=True)
class Scan:
    """What a file holds.

    Attributes:
        payloads: those of the valid records up to the first bytes that are not one, in order.
        end: "clean": nothing follows them. "torn": bytes follow that are no record, as a crash in
            an append leaves them. "damaged": a record follows those bytes, or the header is wrong:
            no crash does that.
        valid_bytes: where the last valid record ends.
        reason: a sentence, empty when the end is clean.
    """

    payloads: tuple[bytes, ...]
    end: End
    valid_bytes: int
    reason: str
    _header: int = 0
    _previous: int = 0


def read_records(path: Path, kind: str) -> Scan:
    """Everything in the file at `path` that is exactly what was appended. Any bytes may be there.

    Raises:
        OSError: the file cannot be read.
    """
    data = path.read_bytes()
    start = _FILE.pack(_FILE_MAGIC, _kind_bytes(kind), b"")[:-8]
    if len(data) < FILE_BYTES and data[: len(start)] == start[: len(data)]:
        return Scan((), "torn", 0, f"{path} ends inside its header.")
    if not data.startswith(start) or _u32(data, _FILE.size) != zlib.crc32(data[: _FILE.size]):
        return Scan((), "damaged", 0, f"{path} has no valid header of a {kind} file.")
    header = previous = _u32(data, _FILE.size)
    payloads: list[bytes] = []
    at = FILE_BYTES
    while (record := _record(data, at, header)) is not None:
        sequence, before, previous_next, payload = record
        if (sequence, before) != (len(payloads), previous):
            reason = f"{path}: record {sequence} at byte {at} does not follow the one before it."
            return Scan(tuple(payloads), "damaged", at, reason, header, previous)
        payloads.append(payload)
        previous = previous_next
        at += RECORD_BYTES + len(payload)
    end, reason = _end(data, at, header, path)
    return Scan(tuple(payloads), end, at, reason, header, previous)


def salvage_records(path: Path, kind: str) -> tuple[bytes, ...]:
    """The payloads of all records that are valid by themselves, also after damaged bytes.

    Raises:
        OSError: the file cannot be read.
    """
    data = path.read_bytes()
    start = _FILE.pack(_FILE_MAGIC, _kind_bytes(kind), b"")[:-8]
    if not data.startswith(start) or len(data) < FILE_BYTES:
        return ()
    header = _u32(data, _FILE.size)
    found: list[bytes] = []
    at = data.find(_MAGIC, FILE_BYTES)
    while at >= 0:
        record = _record(data, at, header)
        if record:
            found.append(record[3])
        at = data.find(_MAGIC, at + (RECORD_BYTES + len(record[3]) if record else 1))
    return tuple(found)


class RecordFile:
    """A file of records that is open for appending. One thread at a time.

    Attributes:
        size: bytes of the file up to the end of its last whole record.
    """

    def __init__(self, path: Path, fd: int, scan: Scan) -> None:
        self.path = path
        self.size = scan.valid_bytes
        self._fd = fd
        self._sequence = len(scan.payloads)
        self._header = scan._header
        self._previous = scan._previous
        self._usable = True

    @classmethod
    def create(cls, path: Path, *, kind: str) -> RecordFile:
        """A new file with a header. Neither it nor its folder is synced.

        Raises:
            FileExistsError: there is one already.
            OSError: it cannot be written; nothing is left of it.
        """
        header = _FILE.pack(_FILE_MAGIC, _kind_bytes(kind), os.urandom(8))
        checksum = zlib.crc32(header)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        try:
            _write(fd, header + _CHECK.pack(checksum))
        except OSError:
            os.close(fd)
            os.unlink(path)
            raise
        return cls(path, fd, Scan((), "clean", FILE_BYTES, "", checksum, checksum))

    @classmethod
    def reopen(cls, path: Path, scan: Scan) -> RecordFile:
        """The file of which `scan` was read, to append to. What is torn at its end is cut off.

        Raises:
            ValueError: it is damaged, or not even its header is whole.
            OSError: it cannot be opened or cut.
        """
        if scan.end == "damaged" or not scan.valid_bytes:
            raise ValueError(f"cannot append: {scan.reason}")
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            if scan.end == "torn":
                os.ftruncate(fd, scan.valid_bytes)
        except OSError:
            os.close(fd)
            raise
        return cls(path, fd, scan)

    def append(self, payload: bytes) -> None:
        """Writes one record; it is durable after the next `sync`.

        Raises:
            ValueError: the payload is longer than PAYLOAD_BYTES_MAX.
            OSError: it could not be written; the file is as before and may be appended to again.
            StoreError: that, and it could not be put back either; the file cannot be used again.
        """
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise ValueError(
                f"{self.path.name}: a record of {len(payload):,} bytes is too long:"
                f" at most {PAYLOAD_BYTES_MAX:,} bytes."
            )
        if not self._usable:
            raise StoreError(f"{self.path} failed before. Start again.")
        fields = _FIELDS.pack(self._sequence, len(payload), self._previous)
        checksum = zlib.crc32(payload, zlib.crc32(fields, self._header))
        record = b"".join((_MAGIC, fields, _CHECK.pack(checksum), payload))
        try:
            _write(self._fd, record)
        except OSError as error:
            self._cut(error)
            raise
        self.size += len(record)
        self._sequence += 1
        self._previous = checksum

    def sync(self) -> None:
        """Everything appended is durable on return (if the file's folder is).

        Raises:
            OSError: it may not be, and another sync would not tell: do not go on.
        """
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Closes the file without a sync. May be called twice."""
        self._usable = False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _cut(self, cause: OSError) -> None:
        try:
            os.ftruncate(self._fd, self.size)
        except OSError as error:
            self._usable = False
            raise StoreError(
                f"{self.path}: an append failed ({cause}) and could not be undone ({error})."
                " Start again when the disk works."
            ) from error


def _record(data: bytes, at: int, header: int) -> tuple[int, int, int, bytes] | None:
    """(sequence, previous, checksum, payload) of the valid record at byte `at`, if there is one."""
    fields = at + len(_MAGIC)
    body = at + RECORD_BYTES
    if body > len(data) or data[at:fields] != _MAGIC:
        return None
    sequence, length, previous = _FIELDS.unpack_from(data, fields)
    if length > PAYLOAD_BYTES_MAX or body + length > len(data):
        return None
    payload = data[body : body + length]
    checksum = _u32(data, body - _CHECK.size)
    head = zlib.crc32(data[fields : body - _CHECK.size], header)
    return (
        (sequence, previous, checksum, payload) if zlib.crc32(payload, head) == checksum else None
    )


def _end(data: bytes, at: int, header: int, path: Path) -> tuple[End, str]:
    if at == len(data):
        return "clean", ""
    found = data.find(_MAGIC, at + 1)
    while found >= 0:
        if _record(data, found, header) is not None:
            return "damaged", f"{path}: bytes {at} to {found} are no record, but one follows them."
        found = data.find(_MAGIC, found + 1)
    return "torn", f"{path}: the last {len(data) - at} bytes, from byte {at} on, are no record."


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _u32(data: bytes, at: int) -> int:
    value: int = _CHECK.unpack_from(data, at)[0]
    return value


def _kind_bytes(kind: str) -> bytes:
    encoded = kind.encode("ascii")
    if not 0 < len(encoded) <= KIND_BYTES_MAX or b"\0" in encoded:
        raise ValueError(f"kind={kind!r} is not 1 to {KIND_BYTES_MAX} ASCII characters.")
    return encoded.ljust(KIND_BYTES_MAX, b"\0")
