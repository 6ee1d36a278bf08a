"""Every error this package raises on purpose.

    DiLoCoError
    ├── ConfigError          a parameter, flag or file is wrong            (exit code 78)
    ├── AddressInUseError    somebody else listens on that address         (exit code 75)
    ├── LayoutError          a model cannot be laid out, or two models differ
    ├── UnsupportedError     this optimizer or strategy cannot be synced, and why
    ├── RefusedError         the syncer said no at the door, ``code`` says which no (exit code 77)
    ├── UnreachableError     no syncer answered in time                (exit code 69)
    └── WireError            bytes from a peer break the protocol (``reason`` is a fate's reason)

The last sentence of a message says what to do.
"""

from __future__ import annotations


class DiLoCoError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1


class ConfigError(DiLoCoError):
    """A parameter, flag or configuration file is wrong."""

    exit_code = 78


class AddressInUseError(DiLoCoError):
    """Somebody else already listens on the address."""

    exit_code = 75


class LayoutError(DiLoCoError):
    """A model cannot be laid out, or differs from the model of the run."""


class UnsupportedError(DiLoCoError):
    """This optimizer, wrapper or strategy cannot be synced; the message says why."""


class RefusedError(DiLoCoError):
    """The syncer refused this learner at the door.

    Attributes:
        code: machine-readable reason, one of the refusal codes of ``core.policy``.
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
