"""How a learner stands with its syncer: calling, heartbeats, silence, back-off. No fragments."""

from __future__ import annotations

from enum import Enum
from typing import Final

from . import policy
from .parameters import SECOND_NS

#: How long a Hello may stay without an answer before it is sent again (also grows by back-off).
#: Longer than a probe: who claims the name of a dead learner is in before it asks a second time.
HELLO_ANSWER_NS: Final = 2 * policy.PROBE_NS + SECOND_NS
#: Refusals that asking again cannot change.
FINAL_REFUSALS: Final = frozenset({"protocol", "run", "layout", "ended", "identity"})


class Standing(str, Enum):
    """Where the learner stands."""

    ALONE = "alone"
    GREETING = "greeting"  # Hello is on its way
    TAKING = "taking"  # welcome; does not hold the whole global model yet
    LIVE = "live"
    LEFT = "left"


class Duty(str, Enum):
    """What a tick asks for."""

    NOTHING = "nothing"
    BEAT = "beat"
    CALL = "call"
    DEAD = "dead"


class Link:
    """One learner's relation to its syncer. Times are monotonic nanoseconds."""

    def __init__(self, incarnation: str, now_ns: int) -> None:
        self.standing = Standing.ALONE
        self.epoch = 0
        self.refusal: tuple[str, str] | None = None
        #: the syncer said that it stops
        self.gone_away = False
        self._incarnation = incarnation
        self._lease_ns = 15 * SECOND_NS
        self._heard_ns = self._beat_ns = self._call_ns = self._ticked_ns = now_ns
        self._calls = 0
        #: since when, and for how many steps, this learner trains without a syncer
        self._alone_ns = now_ns
        self.steps_alone = 0
        #: code of the refusal that was told as news
        self._told = ""

    @property
    def connected(self) -> bool:
        """Is there a syncer that knows us?"""
        return self.standing in (Standing.TAKING, Standing.LIVE)

    @property
    def over(self) -> bool:
        """Is there no point in calling (again)?"""
        refused = self.refusal is not None and self.refusal[0] in FINAL_REFUSALS
        return self.standing is Standing.LEFT or refused

    def hear(self, now_ns: int) -> None:
        """The syncer gave a sign of life."""
        self._heard_ns = now_ns

    def found(self, now_ns: int, *, keep: bool) -> str:
        """What to tell who has trained on without a syncer and is welcome now; "" if nobody has.

        `keep`: what it has done counts; else it takes the run's model, if there is one.
        """
        steps, self.steps_alone = self.steps_alone, 0
        if self.connected or not (self.epoch or steps):
            return ""
        again = " again" if self.epoch else ""
        alone = f"{policy.counted(steps, 'step')} taken alone"
        if steps:
            alone += (
                " will be offered to the run"
                if keep
                else " count only if the run has no model yet: this learner takes the run's"
            )
        return f"found the syncer{again} after {(now_ns - self._alone_ns) // SECOND_NS} s; {alone}"

    def welcome(self, now_ns: int, epoch: int, lease_ns: int, *, keep: bool) -> None:
        """The syncer let us in; `keep`: what we hold is of its lineage."""
        self.hear(now_ns)
        self.epoch, self._lease_ns = epoch, lease_ns
        self.standing = Standing.LIVE if keep else Standing.TAKING
        self.refusal, self.gone_away, self._told = None, False, ""
        self._calls, self._beat_ns = 0, now_ns

    def refuse(self, now_ns: int, code: str, text: str) -> None:
        """The syncer turned us away."""
        self._leave(now_ns)
        self.refusal = code, text
        self._call_later(now_ns)

    def refusal_news(self) -> str:
        """What to tell who trains on after a refusal: once, and again when the reason changes."""
        code, text = self.refusal or ("", "")
        if code == self._told:
            return ""
        self._told = code
        so = "training goes on alone" if self.over else "training goes on, and it asks again"
        return f"the syncer refused this learner ({text.rstrip('.')}); {so}"

    def lose(self, now_ns: int, *, deliberate: bool) -> None:
        """Nobody answers any more. Losing a lost syncer once more does not delay the call."""
        if self.standing is not Standing.ALONE:
            self._call_later(now_ns)
        self._leave(now_ns)
        self.gone_away = deliberate or self.gone_away

    def call_soon(self, now_ns: int) -> None:
        """Something listens there: call, but a fleet must not stampede a restarted syncer."""
        wait = SECOND_NS if self.epoch else 0
        self._call_ns = now_ns + int(wait * policy.jitter(self._incarnation, self._calls))

    def tick(self, now_ns: int) -> Duty:
        """What is to be done now?"""
        if now_ns - self._ticked_ns > self._lease_ns // 2:
            # we were asleep ourselves: what the syncer said meanwhile is still to be read
            self._heard_ns = max(self._heard_ns, now_ns - self._lease_ns // 2)
        self._ticked_ns = now_ns
        if self.over:
            return Duty.NOTHING
        if self.connected:
            if now_ns - self._heard_ns >= self._lease_ns:
                return Duty.DEAD
            if now_ns >= self._beat_ns:
                self._beat_ns = now_ns + self._lease_ns // 5
                return Duty.BEAT
            return Duty.NOTHING
        if now_ns < self._call_ns:
            return Duty.NOTHING
        self.standing = Standing.GREETING
        self._call_later(now_ns)
        self._call_ns = max(self._call_ns, now_ns + HELLO_ANSWER_NS)
        return Duty.CALL

    def next_deadline_ns(self, now_ns: int) -> int:
        """When `tick` must be asked again at the latest."""
        if self.over:
            return now_ns + SECOND_NS
        if self.connected:
            return max(now_ns, min(self._beat_ns, self._heard_ns + self._lease_ns))
        return max(now_ns, self._call_ns)

    def _leave(self, now_ns: int) -> None:
        if self.connected:
            self._alone_ns = now_ns
        self.standing = Standing.ALONE

    def _call_later(self, now_ns: int) -> None:
        wait = policy.backoff_ns(self._calls, policy.jitter(self._incarnation, self._calls))
        self._call_ns = now_ns + wait
        self._calls += 1
