"""A file of records gives back exactly what was appended, in order, or says that it cannot."""

from __future__ import annotations

import errno
import os
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_plugin.errors import StoreError
from diloco_plugin.store.records import (
    FILE_BYTES,
    PAYLOAD_BYTES_MAX,
    RECORD_BYTES,
    RecordFile,
    Scan,
    read_records,
)

PAYLOADS = st.lists(st.binary(max_size=40), max_size=6)


def written(path: Path, payloads: list[bytes]) -> bytes:
    file = RecordFile.create(path, kind="test")
    for payload in payloads:
        file.append(payload)
    file.sync()
    assert file.size == path.stat().st_size
    file.close()
    return path.read_bytes()


def scanned(path: Path, data: bytes) -> Scan:
    path.write_bytes(data)
    return read_records(path, "test")


@given(PAYLOADS, PAYLOADS)
@settings(max_examples=60, deadline=None)
def test_what_is_appended_is_read_also_over_two_lives(
    first: list[bytes], second: list[bytes]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        written(path, first)
        file = RecordFile.reopen(path, read_records(path, "test"))
        for payload in second:
            file.append(payload)
        file.close()
        scan = read_records(path, "test")
        assert (scan.payloads, scan.end) == (tuple(first + second), "clean")
        assert scan.valid_bytes == path.stat().st_size


@given(PAYLOADS)
@settings(max_examples=30, deadline=None)
def test_a_file_cut_at_any_byte_is_torn_and_holds_a_prefix(payloads: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        data = written(path, payloads)
        ends = [FILE_BYTES]
        for payload in payloads:
            ends.append(ends[-1] + RECORD_BYTES + len(payload))
        for cut in range(len(data)):
            scan = scanned(path, data[:cut])
            whole = sum(end <= cut for end in ends) - 1
            assert scan.payloads == tuple(payloads[: max(0, whole)])
            assert scan.end == ("clean" if cut in ends else "torn")
            assert scan.valid_bytes == (ends[whole] if whole >= 0 else 0)


def test_no_flipped_bit_gives_a_record_that_was_not_appended(tmp_path: Path) -> None:
    payloads = [bytes([index]) * index for index in range(5)]
    data = written(tmp_path / "log", payloads)
    last = len(data) - RECORD_BYTES - len(payloads[-1])
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        scan = scanned(tmp_path / "copy", bytes(changed))
        assert scan.payloads == tuple(payloads[: len(scan.payloads)])
        assert len(scan.payloads) < len(payloads)
        assert scan.end == ("torn" if bit // 8 >= last else "damaged"), bit


def test_a_lost_doubled_or_swapped_record_is_damage(tmp_path: Path) -> None:
    data = written(tmp_path / "log", [b"aa", b"bb", b"cc"])
    head, size = data[:FILE_BYTES], RECORD_BYTES + 2
    a, b, c = (data[FILE_BYTES + i * size : FILE_BYTES + (i + 1) * size] for i in range(3))
    for order, kept in (((a, c), 1), ((a, a, b, c), 1), ((b, a, c), 0), ((a, b, c, c), 3)):
        scan = scanned(tmp_path / "copy", head + b"".join(order))
        assert (scan.end, len(scan.payloads)) == ("damaged", kept)


def test_records_of_another_file_are_none_of_this_one(tmp_path: Path) -> None:
    inner = written(tmp_path / "inner", [b"mine"])
    data = written(tmp_path / "log", [b"x", inner])
    assert scanned(tmp_path / "copy", data[:-1]).end == "torn"
    assert scanned(tmp_path / "copy", data + inner[FILE_BYTES:]).end == "torn"


def test_noise_and_files_of_another_kind_are_damaged(tmp_path: Path) -> None:
    rng = random.Random(1)
    for _ in range(200):
        scan = scanned(tmp_path / "noise", rng.randbytes(rng.randrange(1, 200)))
        assert (scan.payloads, scan.end, scan.valid_bytes) == ((), "damaged", 0)
    written(tmp_path / "log", [b"a"])
    assert read_records(tmp_path / "log", "tape").end == "damaged"
    with pytest.raises(ValueError, match="cannot append"):
        RecordFile.reopen(tmp_path / "noise", scan)


def test_appending_after_a_torn_end_cuts_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(written(path, [b"a", b"b"])[:-1])
    file = RecordFile.reopen(path, read_records(path, "test"))
    file.append(b"c")
    file.close()
    scan = read_records(path, "test")
    assert (scan.payloads, scan.end) == ((b"a", b"c"), "clean")


def test_a_payload_that_no_reader_would_take_is_refused(tmp_path: Path) -> None:
    file = RecordFile.create(tmp_path / "log", kind="test")
    with pytest.raises(ValueError, match="at most 16,777,216 bytes"):
        file.append(bytes(PAYLOAD_BYTES_MAX + 1))
    file.append(bytes(PAYLOAD_BYTES_MAX))
    file.close()
    assert read_records(tmp_path / "log", "test").end == "clean"


def test_a_failed_append_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "log", os.write
    file = RecordFile.create(path, kind="test")
    file.append(b"a")

    def full(fd: int, data: bytes) -> int:
        if len(data) > 5:
            return write(fd, bytes(data[:5]))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        file.append(b"b" * 6)
    monkeypatch.undo()
    assert read_records(path, "test").end == "clean"
    file.append(b"c")
    assert read_records(path, "test").payloads == (b"a", b"c")
    monkeypatch.setattr(os, "write", full)
    monkeypatch.delattr(os, "ftruncate")
    monkeypatch.setattr(os, "ftruncate", lambda fd, size: full(fd, b""), raising=False)
    with pytest.raises(StoreError, match="could not be undone"):
        file.append(b"d")
    with pytest.raises(StoreError, match="failed before"):
        file.append(b"e")
    file.close()
