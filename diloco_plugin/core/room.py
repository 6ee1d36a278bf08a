"""A disk without room for the first model: how long until somebody may bring it again."""

from __future__ import annotations

from typing import Final

from .parameters import SECOND_NS

PAUSE_MIN_NS: Final = 5 * SECOND_NS
PAUSE_MAX_NS: Final = 300 * SECOND_NS


class Room:
    """May the first model be brought? Times are monotonic nanoseconds."""

    def __init__(self) -> None:
        #: why it could not be saved; "" if it could, or nobody has tried
        self.reason = ""
        self._until_ns = 0
        self._pause_ns = 0

    def lack(self, now_ns: int, reason: str) -> bool:
        """It could not: nobody need try for a while, longer each time. True: the reason is new."""
        news = reason != self.reason
        self._pause_ns = min(max(PAUSE_MIN_NS, 2 * self._pause_ns), PAUSE_MAX_NS)
        self.reason, self._until_ns = reason, now_ns + self._pause_ns
        return news

    def refusal(self, now_ns: int) -> tuple[str, str] | None:
        """Why nobody who would have to bring the model is let in now."""
        if not self.reason or now_ns >= self._until_ns:
            return None
        return "room", f"the syncer cannot save the first model: {self.reason}"
