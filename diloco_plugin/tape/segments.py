"""The files of a tape: NNNNNN.tape, in the order of their numbers.

A segment is a file of records (`store.records`): first a header with the complete state of the
core, then steps, many to a record. So each segment can be replayed by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from diloco_plugin._version import __version__
from diloco_plugin.errors import DamagedError
from diloco_plugin.store.records import Scan, read_records
from diloco_plugin.tape.codec import Step, decode_steps

T = TypeVar("T")

KIND: Final = "tape"
_NAME: Final = re.compile(r"(\d{6,12})\.tape")


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a segment begins with: `state` is the core's before the event `events_before` + 1."""

    epoch: int
    events_before: int
    state: Any
    version: str = __version__


class _Maker(msgspec.Struct, frozen=True):
    """What is read of the header of any version."""

    version: str


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of a tape, read."""

    path: Path
    scan: Scan

    @property
    def empty(self) -> bool:
        """Was it cut off before its header was written?"""
        return not self.scan.payloads

    @property
    def foreign(self) -> bool:
        """Is it neither called like a tape nor does it begin like one?"""
        return number_of(self.path) is None and self.empty and self.scan.end == "damaged"

    def version(self) -> str:
        """The version of the package that made it. Raises DamagedError."""
        return self._header(_Maker).version

    def header(self) -> Header:
        """Raises DamagedError: it is none, of this version at least."""
        return self._header(Header)

    def steps(self) -> Iterator[Step]:
        """Every step, in order; what is wrong comes after what is right. Raises DamagedError."""
        for payload in self.scan.payloads[1:]:
            yield from decode_steps(payload)
        if self.scan.end == "damaged":
            raise DamagedError(self.scan.reason)

    def _header(self, kind: type[T]) -> T:
        if self.empty:
            raise DamagedError(self.scan.reason or f"{self.path} has no header.")
        try:
            return msgspec.msgpack.decode(self.scan.payloads[0], type=kind)
        except Exception as error:  # also RecursionError and UnicodeDecodeError
            raise DamagedError(f"the header of {self.path} is none: {error}.") from None


def number_of(path: Path) -> int | None:
    """The number of a segment, None for any other file."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def segment_paths(directory: Path) -> list[Path]:
    """The segments in a directory, oldest first. Raises OSError."""
    numbered = ((number_of(path), path) for path in directory.iterdir())
    return [path for _, path in sorted((n, path) for n, path in numbered if n is not None)]


def read_segment(path: Path) -> Segment:
    """Reads one file; what is wrong with it is raised when it is looked at. Raises OSError."""
    return Segment(path, read_records(path, KIND))
