"""Closing rounds that finished learners ask for: which are due, and whose wishes count no more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from .events import Life
from .flight import Ask, Round
from .members import Member

#: Closing rounds of a fragment that one life gets. One is enough, if nothing goes wrong.
CLOSINGS_MAX: Final = 4


class Closings:
    """Who asked for a closing round of which fragment, in the order of the first request."""

    def __init__(self) -> None:
        self._asked: dict[int, set[Life]] = {}
        #: names that asked for a round which then waited for them in vain: once is enough
        self._vain: set[str] = set()

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, member: Member, fragments: Iterable[int]) -> None:
        """A finished learner has progress in these fragments, which exist."""
        if member.life.name in self._vain:
            return
        for fragment in fragments:
            if member.closings[fragment] < CLOSINGS_MAX:
                self._asked.setdefault(fragment, set()).add(member.life)

    def due(self, live: set[Life]) -> list[int]:
        """Fragments that somebody who is there has asked for."""
        return [fragment for fragment, lives in self._asked.items() if lives & live]

    def take(self, fragment: int, live: Iterable[Member]) -> set[Life]:
        """A round is opened for these: for each of them it counts."""
        requesters = self._asked.pop(fragment)
        for member in live:
            member.closings[fragment] += member.life in requesters
        return requesters

    def settled(self, flight: Round) -> None:
        """A round has closed: who asked for it and did not answer need not ask again."""
        for life in flight.requesters:
            if flight.asked[life] is Ask.IN:
                self._vain.discard(life.name)
            elif flight.asked[life] is Ask.WAITING:
                self.disregard(life)

    def answered(self, life: Life) -> None:
        """It does answer, if late: it may ask again."""
        self._vain.discard(life.name)

    def disregard(self, life: Life) -> None:
        """It asked in vain."""
        self._vain.add(life.name)
        self.forget(life)

    def forget(self, life: Life) -> None:
        """It wants nothing any more."""
        for fragment in list(self._asked):
            self.serve(fragment, life)

    def serve(self, fragment: int, life: Life) -> None:
        """Its progress in this fragment is merged."""
        waiting = self._asked.get(fragment)
        if waiting is not None:
            waiting.discard(life)
            if not waiting:
                del self._asked[fragment]

    def clear(self) -> None:
        """No round will be opened any more."""
        self._asked.clear()
