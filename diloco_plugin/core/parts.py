"""What a learner knows about one fragment: its counters, its base, and what is on its way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Part:
    """One fragment at a learner."""

    steps: int = 0
    tokens: int = 0
    #: version of the base, -1: none from this syncer's life
    base: int = -1
    #: newest version that was announced, and the clock of its round
    announced: int = -1
    clock: int = 0
    #: does that version travel without losing a digit, does the one on its way, and did the base?
    announced_exact: bool = True
    incoming_exact: bool = True
    base_exact: bool = True
    #: newest version that was ever announced, whether or not it could be had
    heard: int = -1
    #: oldest version that holds everything this learner gave
    needed: int = -1
    #: what it gave last may be in the next version that it hears of: the link broke in between
    unsure: bool = False
    #: version that is being fetched, or has arrived and waits for the next boundary
    fetching: int | None = None
    arrived: int | None = None
    #: round that asked and has no answer yet
    pull: int | None = None
    #: that round is a closing one: the push travels in fp32
    exact: bool = False
    #: round that got a push from the current base; the same progress is not given twice
    given: int | None = None
    #: newest round that got a push, from whatever base, and has told neither its fate nor, once
    #: merged, the version that holds it: what is applied in between leaves that push valid
    owed: int | None = None
    #: newest round whose fate was told as merged
    merged: int | None = None
    #: pushes whose staging buffer is still in use. They are differenced against the base while they
    #: travel, so the base must not change under them
    sending: int = 0
    #: lockstep: the step of the due point whose snapshot is staged or whose result is awaited
    due: int | None = None
    #: the staged snapshot's (steps, tokens); None: nothing is staged
    staged: tuple[int, int] | None = None
    #: a closing round was asked for, and a closing round has pulled since
    close_asked: bool = False
    close_heard: bool = False

    @property
    def unstaged(self) -> bool:
        """Lockstep: is this fragment due, and its snapshot not taken yet?"""
        return self.due is not None and self.staged is None and self.given is None

    @property
    def wanted(self) -> bool:
        """Is there a newer version than the base, which is not on its way yet?"""
        idle = self.fetching is None and self.arrived is None
        return self.announced > self.base and idle

    @property
    def newest(self) -> bool:
        """Is the base the newest version that is known?"""
        return self.announced <= self.base and self.arrived is None

    @property
    def done(self) -> bool:
        """Is all progress taken, and does the base hold it, to the last digit?"""
        taken = self.steps == 0 and self.owed is None
        # before the syncer has said where it stands nobody knows what is missing here
        return taken and self.heard >= 0 and self.base_exact and self.base >= max(0, self.needed)

    @property
    def taken_or_refused(self) -> bool:
        """Is there no progress that a version which is applied now would undo?"""
        return self.steps == 0 or (self.given is not None and self.given == self.merged)

    @property
    def unfinished(self) -> bool:
        """Would the learner leave something behind here, of which no round has heard?"""
        return self.given is None and (self.steps > 0 or not self.base_exact)

    def hear_pull(self, round_: int, *, closing: bool) -> None:
        """A round asks; the newest one counts."""
        if self.pull is None or round_ > self.pull:
            self.pull, self.exact = round_, closing
        self.close_heard = self.close_heard or closing

    def hear_version(self, version: int, clock: int, *, exact: bool) -> bool:
        """A version is announced. Is it newer than what is known?"""
        if self.owed is not None and self.owed == self.merged:
            self.owed = None  # its version is announced right after its fate
            self.needed = version
        if self.unsure and version > self.base:
            self.unsure, self.needed = False, version
        self.heard = max(self.heard, version)
        newer = version > self.announced
        if newer:
            self.announced, self.clock, self.announced_exact = version, clock, exact
        return newer

    def hear_fate(self, round_: int, fate: str) -> bool:
        """A push has met its fate. Is the progress that it held still to be given?"""
        if fate == "merged":
            self.merged = round_
            return False
        if self.owed == round_:
            self.owed = None
        if self.given != round_:
            return False
        self.given, self.due = None, None
        self.close_asked = self.close_heard = False
        return True

    def give_up(self) -> None:
        """The last progress is refused, and would be the next time: leave with the global value
        instead, as it is now; what was taken from here before is in that.
        """
        self.steps = self.tokens = 0
        self.needed = max(self.needed, self.heard)

    def rebase(self, version: int) -> None:
        """A version was applied: progress counts from here."""
        self.base, self.base_exact = version, self.incoming_exact
        self.steps = self.tokens = 0
        self.arrived = self.given = self.due = None
        self.close_asked = self.close_heard = False

    def let_go(self) -> None:
        """What was between this learner and its syncer is void, but for progress that may be in a
        version of which nothing was heard.
        """
        self.unsure = self.unsure or self.owed is not None or self.needed > self.base
        self.needed = self.heard = -1
        self.pull = self.given = self.owed = self.merged = self.due = None
        self.close_asked = self.close_heard = False


def check(parts: list[Part], *, staging: tuple[int, int], arrivals: tuple[int, int]) -> None:
    """Assert that nothing is counted below 0 and no buffer is lost; (free, all) of each kind."""
    staged = arriving = 0
    for part in parts:
        assert part.steps >= 0
        assert part.tokens >= 0
        assert part.sending >= 0, "a staging buffer was freed twice"
        assert part.arrived is None or part.fetching is None, "fetched and arrived at once"
        staged += (part.staged is not None) + part.sending
        arriving += part.fetching is not None or part.arrived is not None
    assert min(staging) >= 0
    assert min(arrivals) >= 0
    assert staged + staging[0] == staging[1], "a staging buffer is lost"
    # the buffers of what was applied come back with Rebased
    assert arriving + arrivals[0] <= arrivals[1], "an arrival buffer is lost"
