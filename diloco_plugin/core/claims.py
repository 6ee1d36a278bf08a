"""Names that are held and claimed: the holder has a moment to say that it is still there."""

from __future__ import annotations

from dataclasses import dataclass

from . import policy
from .events import Knocked, Life


@dataclass(frozen=True, slots=True)
class Claim:
    """Somebody knocks under a name that is held; the holder has until the deadline to object."""

    knock: Knocked
    nonce: int
    deadline_ns: int


class Claims:
    """Open claims, one for each name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Claim] = {}
        self._nonce = 0

    def get(self, name: str) -> Claim | None:
        """The open claim of a name."""
        return self._by_name.get(name)

    def open(self, knock: Knocked, now_ns: int) -> Claim:
        """Claim a name for this life."""
        self._nonce += 1
        claim = Claim(knock, self._nonce, now_ns + policy.PROBE_NS)
        self._by_name[knock.life.name] = claim
        return claim

    def close(self, name: str) -> Claim | None:
        """The claim of this name is decided, one way or the other."""
        return self._by_name.pop(name, None)

    def forget(self, life: Life) -> None:
        """The claimant has gone again."""
        claim = self._by_name.get(life.name)
        if claim is not None and claim.knock.life == life:
            del self._by_name[life.name]

    def names(self) -> list[str]:
        """Claimed names, sorted."""
        return sorted(self._by_name)

    def deadlines(self) -> list[int]:
        """When the open claims are to be decided."""
        return [claim.deadline_ns for claim in self._by_name.values()]

    def postpone(self, until_ns: int) -> None:
        """Answers to probes may have come while nobody read them: decide no claim before this."""
        for name, claim in self._by_name.items():
            deadline = max(claim.deadline_ns, until_ns)
            self._by_name[name] = Claim(claim.knock, claim.nonce, deadline)
