"""Every error this package raises on purpose.

    DiLoCoError
    ├── ConfigError          a parameter, flag or file is wrong            (exit code 78)
    ├── AddressInUseError    somebody else listens on that address         (exit code 75)
    ├── StateLockedError     another syncer uses that state directory      (exit code 75)
    ├── DamagedError         the state on disk is damaged, nothing touched (exit code 4)
    ├── StoreError           the disk failed: what is durable is unsure    (exit code 74)
    ├── NoRoomError          the disk is full: nothing was changed         (exit code 74)
    ├── InvariantError       what must hold does not: nothing was served    (exit code 70)
    ├── LayoutError          a model cannot be laid out, or two models differ
    ├── UnsupportedError     this optimizer or strategy cannot be synced, and why
    ├── RefusedError         the syncer said no, or keys differ; ``code`` says which (exit code 77)
    ├── UnreachableError     no syncer answered in time                (exit code 69)
    └── WireError            bytes from a peer break the protocol (``reason`` is a fate's reason)

The last sentence of a message says what to do.
"""

from __future__ import annotations

import errno
from typing import Final

#: No room, and a disk that fails or takes no writes: these may pass.
FULL: Final = (errno.ENOSPC, errno.EDQUOT)
FAILING: Final = (errno.EIO, errno.EROFS)


class DiLoCoError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1


class ConfigError(DiLoCoError):
    """A parameter, flag or configuration file is wrong."""

    exit_code = 78


class AddressInUseError(DiLoCoError):
    """Somebody else already listens on the address."""

    exit_code = 75


class StateLockedError(DiLoCoError):
    """Another process uses the state directory."""

    exit_code = 75


class DamagedError(DiLoCoError):
    """What is on disk is not what was written there. Nothing was changed."""

    exit_code = 4


class StoreError(DiLoCoError):
    """A write or sync failed: what is on disk is unsure, so the process must not go on."""

    exit_code = 74


class NoRoomError(DiLoCoError):
    """The disk is full. Everything is as before: try again when there is room."""

    exit_code = 74


class InvariantError(DiLoCoError):
    """Something that must hold does not, so that going on would break a promise."""

    exit_code = 70


class LayoutError(DiLoCoError):
    """A model cannot be laid out, or differs from the model of the run."""


class UnsupportedError(DiLoCoError):
    """This optimizer, wrapper or strategy cannot be synced; the message says why."""


class RefusedError(DiLoCoError):
    """The syncer refused this learner at the door, or they do not accept each other's keys.

    Attributes:
        code: machine-readable reason, e.g. ``"name"``, ``"layout"`` or ``"key"``.
    """

    exit_code = 77

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class UnreachableError(DiLoCoError):
    """No syncer answered within the allowed time."""

    exit_code = 69


class WireError(DiLoCoError):
    """Bytes from a peer break the protocol.

    Attributes:
        reason: one short word for counters, e.g. ``"garbage"``, ``"oversize"``, ``"truncated"``.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def disk_trouble(error: OSError, what: str) -> DiLoCoError | None:
    """What to raise where `what` could not be made at a start and the disk is to blame; else None:
    then the path is wrong.
    """
    if error.errno in FULL:
        return NoRoomError(f"{what}: the disk is full ({error}). Make room and start again.")
    if error.errno in FAILING:
        return StoreError(f"{what}: the disk fails ({error}). Start again when it works.")
    return None
