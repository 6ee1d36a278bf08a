"""Who is there: leases, incarnations, indices. It knows nothing about rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from .events import Life
from .parameters import SECOND_NS, Parameters
from .past import LIVES_MAX, Past

#: A learner that has not stepped for so many of its own steps, and a lease, is quiet: nobody waits.
QUIET_STEPS: Final = 8
#: Due rounds may be blocked by one that leaves for one part in so many of its stay, and of a lease.
HOLD_SHARE: Final = 25
HOLD_BURST: Final = 8
#: Names whose stays are remembered.
STAYS_MAX: Final = 4096
#: Learners at once; a run of more than this many jobs is an accident.
MEMBERS_MAX: Final = 1024
#: How long an index waits for the learner that asked for it to shard its data before it joins.
RESERVE_NS: Final = 600 * SECOND_NS
RESERVED_MAX: Final = 1024


class Stage(str, Enum):
    """Where a learner stands between the door and the rounds."""

    WAITING = "waiting"  # for the seed
    SEEDING = "seeding"  # its model becomes the global one
    TAKING = "taking"  # the global model is on its way to it
    LIVE = "live"  # may contribute


@dataclass(slots=True)
class Ledger:
    """What one life holds and has given; it outlives the lease, for the life may come back."""

    #: it took the model of this epoch, or brought it: what it holds is of our lineage
    kin: bool = False
    #: by fragment, the newest round that it has answered with a push
    answered: dict[int, int] = field(default_factory=dict)
    #: by fragment, the newest base whose progress was merged: nothing must count twice
    consumed: dict[int, int] = field(default_factory=dict)

    def consume(self, fragment: int, base: int) -> None:
        """Progress from this base was merged."""
        self.consumed[fragment] = max(self.consumed.get(fragment, -1), base)


@dataclass(slots=True)
class Stay:
    """How long a name, whatever its lives, may still block due rounds when it leaves."""

    since_ns: int
    #: since when a due round is blocked for its sake alone (0: none is), and how long others were
    holding_ns: int = 0
    held_ns: int = 0

    def hold(self, now_ns: int, *, holds: bool) -> None:
        """Is a due round blocked for its sake alone?"""
        if holds and not self.holding_ns:
            self.holding_ns = now_ns
        elif self.holding_ns and not holds:
            self.held_ns += now_ns - self.holding_ns
            self.holding_ns = 0

    def slept(self, gap_ns: int) -> None:
        """The syncer was asleep for so long: nobody was held up by this name."""
        self.since_ns += gap_ns
        if self.holding_ns:
            self.holding_ns += gap_ns

    def hold_until_ns(self, lease_ns: int) -> int:
        """When a hold must end that is under way: the lease / HOLD_BURST, and its share, are used.

        The `t` of `held + (t - holding) = lease / HOLD_BURST + (t - since) / HOLD_SHARE`.
        """
        burst = lease_ns // HOLD_BURST
        end = HOLD_SHARE * (self.holding_ns - self.held_ns + burst) - self.since_ns
        return -(-end // (HOLD_SHARE - 1))

    def spent(self, now_ns: int, lease_ns: int) -> bool:
        """Has it had all the patience that it may ask for?"""
        held = self.held_ns + (now_ns - self.holding_ns if self.holding_ns else 0)
        return HOLD_SHARE * (held - lease_ns // HOLD_BURST) >= now_ns - self.since_ns


@dataclass(slots=True)
class Member:
    """What the syncer knows about one life of a learner."""

    life: Life
    index: int
    #: order of arrival; the first one that waits seeds the run
    order: int
    stay: Stay
    lease_until_ns: int
    #: last sign that training moves, or that it is being kept from moving by us
    moved_ns: int
    #: when its clock was told last; a clock can only run so fast
    clocked_ns: int
    stage: Stage
    clock: int
    #: newest clock of the run that it was told because its own had fallen behind
    carried: int = 0
    step_ns: int = 0
    tokens: int = 0
    data_seed: int | None = None
    #: asked for closing rounds; its clock stands still
    closing: bool = False
    #: the last round that waited for its answer waited in vain
    mute: bool = False
    #: by fragment, closing rounds that were opened for it
    closings: Counter[int] = field(default_factory=Counter)
    rounds_asked: int = 0
    rounds_joined: int = 0

    def close(self, now_ns: int) -> None:
        """It has finished. Whatever it did not answer before, it is here now."""
        if not self.closing:
            self.closing, self.mute, self.moved_ns = True, False, now_ns

    def quiet(self, now_ns: int, lease_ns: int) -> bool:
        """Connected, but not training (validation, a debugger, a stuck data loader)."""
        return not self.closing and now_ns - self.moved_ns > self.patience_ns(lease_ns)

    def patience_ns(self, lease_ns: int) -> int:
        """How long it may take over a step, or over the answer that it gives between two."""
        return max(lease_ns, QUIET_STEPS * self.step_ns)


class Members:
    """The learners that hold a lease, by life and by name; iteration is sorted by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Member] = {}
        #: names keep their index while nobody else needs it: a returning learner finds its data
        self._index_of: dict[str, int] = {}
        #: names that asked for their index before they joined, and until when it is kept for them
        self._reserved: dict[str, int] = {}
        self._arrivals = 0
        #: oldest first; beyond LIVES_MAX departed lives, the oldest must take the model again
        self._ledgers: dict[Life, Ledger] = {}
        #: by name, the one that joined last at the end
        self._stays: dict[str, Stay] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter([self._by_name[name] for name in sorted(self._by_name)])

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, life: Life) -> Member | None:
        """The member of exactly this life."""
        member = self._by_name.get(life.name)
        return member if member is not None and member.life == life else None

    def holder(self, name: str) -> Member | None:
        """Whoever holds this name now."""
        return self._by_name.get(name)

    def add(self, life: Life, now_ns: int, lease_ns: int, clock: int, seed: int | None) -> Member:
        """Let a life in; its name must be free."""
        assert life.name not in self._by_name, f"{life} would replace a living member"
        self._arrivals += 1
        member = Member(
            life=life,
            index=self._take_index(life.name, now_ns),
            order=self._arrivals,
            stay=self._stays.pop(life.name, Stay(now_ns)),
            lease_until_ns=now_ns + lease_ns,
            moved_ns=now_ns,
            clocked_ns=now_ns,
            stage=Stage.WAITING,
            clock=clock,
            data_seed=seed,
        )
        self._by_name[life.name] = member
        self._stays[life.name] = member.stay
        if len(self._stays) > STAYS_MAX:
            del self._stays[next(iter(self._stays))]
        self._reserved.pop(life.name, None)
        self._ledgers[life] = self._ledgers.pop(life, Ledger())
        return member

    def remove(self, life: Life) -> None:
        """Forget a life; its name keeps its index while no newcomer takes it."""
        member = self._by_name.pop(life.name)
        assert member.life == life
        self._ledgers[life] = self._ledgers.pop(life)
        departed = [known for known in self._ledgers if self.get(known) is None]
        for forgotten in departed[: max(0, len(departed) - LIVES_MAX)]:
            del self._ledgers[forgotten]

    def reserve(self, name: str, now_ns: int) -> int:
        """The index that this name has, or will have when it joins soon enough."""
        holder = self._by_name.get(name)
        if holder is not None:
            return holder.index
        index = self._take_index(name, now_ns)
        self._reserved[name] = now_ns + RESERVE_NS
        while len(self._reserved) > RESERVED_MAX:  # the oldest: dictionaries keep their order
            del self._reserved[next(iter(self._reserved))]
        return index

    def index_of(self, name: str) -> int:
        """The index that this name has, or had last."""
        return self._index_of.get(name, 0)

    def remember(self, past: Past) -> None:
        """Those who gave something to an earlier life of the syncer may come back to this one."""
        for life, known in past.known():
            self._ledgers[life] = Ledger(kin=True, consumed=dict(known.consumed))
            for other in [n for n, i in self._index_of.items() if i == known.index]:
                del self._index_of[other]
            self._index_of[life.name] = known.index

    def kin(self, life: Life) -> bool:
        """Is it on record that this life holds our model, and what it has given?"""
        return self.ledger(life).kin

    def ledger(self, life: Life) -> Ledger:
        """The record of a life that is or was a member."""
        return self._ledgers.get(life, Ledger())

    def in_stage(self, *stages: Stage) -> list[Member]:
        """Members in any of these stages, sorted by name."""
        return [member for member in self if member.stage in stages]

    def training(self, now_ns: int, parameters: Parameters) -> list[Member]:
        """Live members whose clocks count: nobody waits for the others, lockstep aside."""
        return [
            member
            for member in self.in_stage(Stage.LIVE)
            if not member.closing
            and (parameters.lockstep or not member.quiet(now_ns, parameters.lease_ns))
        ]

    def twin_of(self, member: Member) -> Member | None:
        """Another member that draws its data in the same order."""
        if member.data_seed is None:
            return None
        twins = (m for m in self if m is not member and m.data_seed == member.data_seed)
        return next(twins, None)

    def _take_index(self, name: str, now_ns: int) -> int:
        taken = {member.index for member in self._by_name.values()}
        for other, until_ns in list(self._reserved.items()):
            if until_ns <= now_ns:
                del self._reserved[other]
            elif other != name:
                taken.add(self._index_of[other])
        index = self._index_of.get(name)
        if index is None or index in taken:
            index = next(i for i in range(len(taken) + 1) if i not in taken)
        for other in [n for n, i in self._index_of.items() if i == index and n != name]:
            del self._index_of[other]
        self._index_of[name] = index
        return index
