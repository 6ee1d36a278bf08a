"""How long a learner waits at the two ends of training, and what it says when that was in vain."""

from __future__ import annotations

import time

from diloco_plugin.core.learner import LearnerCore
from diloco_plugin.core.link import Standing
from diloco_plugin.errors import (
    ConfigError,
    DiLoCoError,
    LayoutError,
    RefusedError,
    UnreachableError,
)
from diloco_plugin.learner.session import Session


class Patience:
    """Time that may pass without anything moving."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since = time.monotonic()
        self._moved = 0

    def over(self, moved: int) -> bool:
        """Has it run out? `moved` grows while anything moves."""
        if moved != self._moved:
            self._moved, self._since = moved, time.monotonic()
        return time.monotonic() >= self._since + self._seconds


def problem_of(error: BaseException) -> str:
    """A problem as text that can be shared with the other ranks; `error_of` turns it back."""
    if isinstance(error, ConfigError):
        return f"config: {error}"
    if isinstance(error, LayoutError):
        return f"model: {error}"
    return f"failed: {type(error).__name__}: {error}"


def error_of(problem: str) -> DiLoCoError:
    """The error of a problem, which is a code (one of ours, or of a refusal) and a text."""
    code, _, text = problem.partition(": ")
    match code:
        case "config":
            return ConfigError(text)
        case "model":
            return LayoutError(text)
        case "unreachable":
            return UnreachableError(text)
        case "failed":
            return DiLoCoError(f"the I/O thread of the learner failed ({text})")
        case _:
            return RefusedError(code, text)


def why_not_joined(session: Session, core: LearnerCore) -> str:
    """Time is over, and the learner does not hold the global model: why, as a problem."""
    where = session.address
    if core.link.standing is Standing.TAKING:
        return (
            f"unreachable: the syncer at {where} let this learner in, but the model does not"
            " arrive: it waits for the learner that brings the model, or the line is dead (raise"
            " connect_timeout)."
        )
    return session.obstacle() or (
        f"unreachable: no syncer answered at {where} in time: start it (`diloco syncer --bind"
        f" {where}`), look with `diloco check {where}`, or train alone until it appears with"
        " require_syncer=False."
    )


def why_not_closed(session: Session, core: LearnerCore, seconds: float) -> str:
    """A learner has left without having given its last progress: why."""
    if session.error is not None:
        return f"its I/O thread had failed ({session.error})"
    if core.complete is not None and not core.link.connected:
        return f"the run had ended ({core.complete.rstrip('.')})"
    if core.link.gone_away:
        return "the syncer has stopped"
    if core.link.refusal is not None:
        return f"the syncer refused this learner ({core.link.refusal[1].rstrip('.')})"
    return f"the syncer gave no answer for {seconds:.0f} s"
