"""What norm a push of a fragment usually has. It keeps history; `policy.judge_norm` decides."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from . import policy
from .past import middle


class Norms:
    """The usual norm of one fragment."""

    def __init__(self) -> None:
        #: (norm, norm per step) of merged rounds
        self.history: deque[tuple[float, float]] = deque(maxlen=policy.NORM_HISTORY_MAX)
        self._rounds_refused = 0

    def merged(self, pushes: Iterable[tuple[float, int]]) -> None:
        """A round was merged from pushes with these (norm, steps)."""
        usual = middle(pushes)
        if usual is not None:
            self.history.append(usual)

    def closed(self, *, pushes: int, refused: int, awake: int) -> bool:
        """A round took no more pushes; True: everybody exceeds the usual norm, which is forgotten.

        Norms that everybody exceeds, round after round, are the new usual ones; not those of a few
        in rounds to which the others have nothing to give. `awake`: how many could have pushed.
        """
        if pushes:
            self._rounds_refused = 0
        elif 2 * refused > awake:
            self._rounds_refused += 1
        if self._rounds_refused < policy.NORM_ROUNDS_REFUSED_MAX:
            return False
        self.history.clear()
        self._rounds_refused = 0
        return True
