"""How long a learner waits at the two ends of training, and what it says when that was in vain."""

from __future__ import annotations

import logging
import time
from typing import Final

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

log = logging.getLogger("diloco.learner")

#: A learner that still waits to be let in says once, after this time, what for.
NEWS_SECONDS: Final = 10.0


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


class Joining:
    """The wait for the global model: when it is in vain, and what is said meanwhile."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._patience, self._news = Patience(timeout), Patience(NEWS_SECONDS)
        self._said = False

    def over(self, moved: int) -> bool:
        """Has nothing come for the whole time?"""
        return self._patience.over(moved)

    def mind(self, moved: int, session: Session, core: LearnerCore) -> None:
        """Say why it takes so long, once."""
        if not self._said and self._news.over(moved):
            self._said = True
            log.warning(
                "not in the run yet, and waiting for it, %.0f s in all (connect_timeout): %s",
                self._timeout,
                error_of(why_not_joined(session, core)),
            )


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
    return (
        f"the syncer gave no answer for {seconds:.0f} s (it is waited for as long as close_timeout"
        " says)"
    )
