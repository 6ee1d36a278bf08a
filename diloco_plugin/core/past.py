"""What one life of the syncer leaves to the next: versions, clock, whose progress is in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from . import policy
from .actions import Commit
from .events import Life

#: Lives whose progress is remembered; who was forgotten must take the model again.
LIVES_MAX: Final = 1024


@dataclass(slots=True)
class PastLife:
    """What one life of a learner has given."""

    name: str
    index: int
    #: by fragment, the newest base whose progress was merged: nothing must count twice
    consumed: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Past:
    """All that was committed, folded together. A plain tree: it travels as JSON."""

    versions: list[int]
    #: by fragment, whether its version came out of a closing round: it travels in fp32
    exact: list[bool]
    #: by fragment, (norm, norm per step) of merged rounds, oldest first
    norms: list[list[tuple[float, float]]]
    clock: int = 0
    next_round: int = 0
    #: by incarnation, in the order of their last merge
    lives: dict[str, PastLife] = field(default_factory=dict)

    @classmethod
    def seeded(cls, fragments: int) -> Past:
        """A run whose model was just brought: version 0 everywhere."""
        return cls([0] * fragments, [False] * fragments, [[] for _ in range(fragments)])

    def add(self, commit: Commit) -> None:
        """One more merge is durable."""
        fragment = commit.fragment
        self.versions[fragment] = commit.version
        self.exact[fragment] = commit.exact
        self.clock = max(self.clock, commit.clock)
        self.next_round = max(self.next_round, commit.round + 1)
        usual = middle((push.norm, push.steps) for push in commit.contributions)
        if usual is not None:
            self.norms[fragment] = [*self.norms[fragment], usual][-policy.NORM_HISTORY_MAX :]
        for push in commit.contributions:
            life = self.lives.pop(push.life.incarnation, PastLife(push.life.name, push.index))
            life.consumed[fragment] = max(life.consumed.get(fragment, -1), push.base)
            self.lives[push.life.incarnation] = life
        while len(self.lives) > LIVES_MAX:
            del self.lives[next(iter(self.lives))]

    def known(self) -> Iterable[tuple[Life, PastLife]]:
        """Everybody who gave something, oldest first."""
        return ((Life(past.name, incarnation), past) for incarnation, past in self.lives.items())

    def lately(self, max_staleness: int) -> set[str]:
        """Names of those who gave to one of the newest versions that a push may be based on."""
        return {
            known.name
            for known in self.lives.values()
            if any(
                base + 1 + max_staleness >= self.versions[fragment]
                for fragment, base in known.consumed.items()
            )
        }


def middle(pushes: Iterable[tuple[float, int]]) -> tuple[float, float] | None:
    """The upper median of (norm, norm per step) of a round; None when nothing has moved."""
    usual = sorted((norm, norm / steps) for norm, steps in pushes)
    if not usual or usual[len(usual) // 2][0] <= 0.0:
        return None
    return usual[len(usual) // 2]
