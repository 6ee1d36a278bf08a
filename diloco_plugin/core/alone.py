"""What became of the steps that a learner took without a syncer: said once, when it is known."""

from __future__ import annotations

from . import policy


class Alone:
    """The progress that a learner brought back, by fragment, until its fate is known."""

    def __init__(self) -> None:
        self._steps = self._fragments = self._merged = 0
        self._open: set[int] = set()

    def bring(self, steps: int, fragments: list[int]) -> None:
        """A syncer is found: progress of so many steps, in these fragments, will be offered."""
        self._steps, self._merged = steps + (self._steps if self._open else 0), 0
        self._fragments, self._open = len(fragments), set(fragments)

    def settle(self, fragment: int, *, merged: bool) -> str:
        """A push of this fragment was merged, or what it would give was overwritten or refused.

        Returns what to tell, if that was the last one.
        """
        if fragment not in self._open:
            return ""
        self._open.discard(fragment)
        self._merged += merged
        if self._open:
            return ""
        alone = f"{policy.counted(self._steps, 'step')} taken alone"
        if self._merged == self._fragments:
            return f"the {alone} are in the global model"
        return (
            f"of the {alone}, what they did to {self._merged} of"
            f" {policy.counted(self._fragments, 'fragment')} is in the global model; others had"
            " moved the rest on meanwhile"
        )
