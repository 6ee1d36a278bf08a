"""How much anybody may say, and what follows when somebody breaks the protocol.

A speaker is whoever can be told apart: the holder of a key, a life, or else a connection.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from .parameters import SECOND_NS

#: Messages a second, and at once after a quiet time. A learner sends some tens.
RATE: Final = 500
BURST: Final = 4000
#: A message costs one for every so many bytes begun: a Hello may describe a model of 100,000
#: tensors, and takes a second to look at then.
BYTES_PER_COST: Final = 512
#: So many broken messages within the window are no accident, and nobody listens for a while.
STRIKES_MAX: Final = 5
STRIKES_NS: Final = 60 * SECOND_NS
QUARANTINE_NS: Final = 30 * SECOND_NS
#: Speakers that are remembered; beyond it, those that were heard least recently are forgotten.
SPEAKERS_MAX: Final = 4096


def cost_of(nbytes: int) -> int:
    """What a message of this length costs: no more than anybody has after a quiet time."""
    return min(BURST, 1 + nbytes // BYTES_PER_COST)


@dataclass(slots=True)
class _Record:
    #: short messages that may still be said, in nanoseconds of the rate
    allowance: int
    heard_ns: int
    strikes: int = 0
    struck_ns: int = 0
    quarantined_until_ns: int = 0


class Conduct:
    """What is on record about every speaker."""

    def __init__(self) -> None:
        #: least recently heard first
        self._records: dict[Hashable, _Record] = {}

    def allows(self, speaker: Hashable, now_ns: int, cost: int = 1) -> bool:
        """May this speaker say one more thing now? Each costs some of its allowance."""
        record = self._of(speaker, now_ns)
        price = cost * SECOND_NS // RATE
        if record.allowance < price:
            return False
        record.allowance -= price
        return True

    def strike(self, speaker: Hashable, now_ns: int) -> bool:
        """It broke the protocol. True: it is in quarantine from now on."""
        record = self._of(speaker, now_ns)
        if now_ns < record.quarantined_until_ns:
            return False
        if now_ns - record.struck_ns > STRIKES_NS:
            record.strikes = 0
        record.strikes, record.struck_ns = record.strikes + 1, now_ns
        if record.strikes < STRIKES_MAX:
            return False
        record.strikes, record.quarantined_until_ns = 0, now_ns + QUARANTINE_NS
        return True

    def quarantined(self, speaker: Hashable, now_ns: int) -> int:
        """Nanoseconds for which nobody listens to this speaker; 0: it may speak."""
        record = self._records.get(speaker)
        return max(0, record.quarantined_until_ns - now_ns) if record is not None else 0

    def in_quarantine(self, now_ns: int) -> int:
        """How many are not listened to now."""
        return sum(now_ns < record.quarantined_until_ns for record in self._records.values())

    def _of(self, speaker: Hashable, now_ns: int) -> _Record:
        most = BURST * SECOND_NS // RATE
        record = self._records.pop(speaker, None) or _Record(most, now_ns)
        record.allowance = min(most, record.allowance + max(0, now_ns - record.heard_ns))
        record.heard_ns = max(record.heard_ns, now_ns)
        self._records[speaker] = record
        if len(self._records) > SPEAKERS_MAX:
            free = (s for s, r in self._records.items() if now_ns >= r.quarantined_until_ns)
            del self._records[next(free, next(iter(self._records)))]
        return record
