"""How a learner that has finished gives its last progress and gets hold of the global model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .parts import Part

#: A learner that has finished takes this many versions of each fragment, on average, before it is
#: content with those that hold its own progress.
CHASES: Final = 3


class Closing:
    """What is decided from the end of training on. Before that it asks for nothing."""

    def __init__(self) -> None:
        #: training is over
        self.begun = False
        #: versions applied since then
        self.chased = 0
        #: the local values are off the global model: overwrite them before leaving
        self.restore = False

    def ignores(self, part: Part, parts: Sequence[Part]) -> bool:
        """Others go on merging: their versions must not keep a learner for ever."""
        if not self.begun or not part.done:
            return False
        return not part.announced_exact or self.chased > CHASES * len(parts)

    def holds_all(self, parts: Sequence[Part]) -> bool:
        """Is all progress taken, and every version held that was announced and counts here?"""
        return all(p.done and (p.newest or self.ignores(p, parts)) for p in parts)

    def begin(self, parts: Sequence[Part]) -> tuple[int, ...]:
        """The fragments to ask closing rounds for, each once; no due point counts any more."""
        left = []
        for index, part in enumerate(parts):
            part.due = None
            if part.unfinished and not part.close_asked:
                part.close_asked = True
                left.append(index)
        return tuple(left)

    def unheard(self, parts: Sequence[Part]) -> tuple[int, ...]:
        """Closing rounds that were asked for, and of which no pull has been seen since."""
        return tuple(
            index
            for index, part in enumerate(parts)
            if part.unfinished and part.close_asked and not part.close_heard
        )
