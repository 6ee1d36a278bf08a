"""How fast a learner steps, and how often it tells."""

from __future__ import annotations

from typing import Final

from . import policy
from .parameters import SECOND_NS

#: Reports travel at most this often outside lockstep.
REPORT_NS: Final = SECOND_NS // 40
#: A boundary that comes later than this multiple of the usual step followed a pause, not a step.
PAUSE_STEPS: Final = 10


class Pace:
    """Step time of one learner, and its last report. Times are monotonic nanoseconds."""

    def __init__(self, now_ns: int) -> None:
        self.step_ns = 0
        self._boundary_ns: int | None = None
        self._report_ns = now_ns - REPORT_NS
        self._reported = -1

    def step(self, now_ns: int) -> None:
        """A boundary after a step."""
        if self._boundary_ns is not None:
            took = now_ns - self._boundary_ns
            if self.step_ns == 0 or took < PAUSE_STEPS * self.step_ns:
                self.step_ns = policy.moving_average(self.step_ns, took)
        self._boundary_ns = now_ns

    def pause(self) -> None:
        """A boundary without a step: what comes next did not take a step's time."""
        self._boundary_ns = None

    def may_report(self, now_ns: int, clock: int, *, urgent: bool) -> bool:
        """Is it time to tell the clock? `urgent`: at once if it has moved."""
        if (urgent and clock != self._reported) or now_ns - self._report_ns >= REPORT_NS:
            self._report_ns, self._reported = now_ns, clock
            return True
        return False
