"""Snapshots on their way out: who gets a staging buffer, and what is answered to a pull."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from . import actions as act
from .parts import Part


class Staging:
    """Counts the shell's staging buffers: a snapshot holds one until its push is sent."""

    def __init__(self, buffers: int) -> None:
        self.buffers = self.free = buffers

    def resize(self, buffers: int) -> None:
        """The shell has made so many buffers now."""
        self.free += buffers - self.buffers
        self.buffers = buffers

    def stage_due(self, parts: Sequence[Part]) -> Iterator[act.LearnerAction]:
        """Stage due snapshots while there are buffers; the others make the learner wait."""
        waiting = sorted((p.due or 0, i) for i, p in enumerate(parts) if p.unstaged)
        for _, index in waiting[: self.free]:
            yield self._stage(index, parts[index])

    def answer(self, parts: Sequence[Part]) -> Iterator[act.LearnerAction]:
        """Answer every pull, the oldest round first; those without a buffer wait."""
        pulls = sorted((p.pull, i) for i, p in enumerate(parts) if p.pull is not None)
        for number, index in pulls:
            part = parts[index]
            if part.given is not None:
                yield self._decline(index, part, number, "already given")
            elif part.staged is not None:
                yield self._give(index, part, number)
            elif part.steps == 0:
                yield self._decline(index, part, number, "no steps")
            else:
                if self.free == 0 and not part.exact:
                    yield from self._make_room(parts)
                if self.free > 0:
                    yield self._stage(index, part)
                    yield self._give(index, part, number)

    def _make_room(self, parts: Sequence[Part]) -> Iterator[act.LearnerAction]:
        """Lockstep, after a time alone: what is asked for now goes before what comes due later.

        This learner's clock is ahead, so it waits for later rounds than the one that waits for it.
        """
        later = [
            (part.due, index)
            for index, part in enumerate(parts)
            if part.due is not None and part.staged is not None and part.pull is None
        ]
        if later:
            _, index = max(later)
            yield self.unstage(index, parts[index])

    def unstage(self, index: int, part: Part) -> act.LearnerAction:
        """The snapshot will not be pulled any more: its buffer is free."""
        part.staged = None
        self.free += 1
        return act.Unstage(fragment=index)

    def sent(self, part: Part) -> None:
        """A push needs its buffer no longer."""
        part.sending -= 1
        self.free += 1

    def _stage(self, index: int, part: Part) -> act.LearnerAction:
        self.free -= 1
        part.staged = (part.steps, part.tokens)
        return act.Snapshot(fragment=index)

    def _give(self, index: int, part: Part, number: int) -> act.LearnerAction:
        assert part.staged is not None
        steps, tokens = part.staged
        part.staged, part.pull = None, None
        part.given = part.owed = number
        part.sending += 1
        return act.Offer(
            round=number,
            fragment=index,
            base=part.base,
            steps=steps,
            tokens=tokens,
            exact=part.exact,
        )

    def _decline(self, index: int, part: Part, number: int, why: str) -> act.LearnerAction:
        part.pull = None
        return act.Offer(round=number, fragment=index, nothing=why)
