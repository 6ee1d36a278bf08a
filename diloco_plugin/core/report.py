"""Looking into a syncer's core: its part of the status body, and its invariants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from . import policy
from .actions import Fate
from .flight import Phase
from .members import Stage
from .parameters import SECOND_NS

#: So much of why somebody was turned away: it may list every tensor of a model.
TEXT_MAX: Final = 600

if TYPE_CHECKING:
    from .syncer import SyncerCore


def status(core: SyncerCore, now_ns: int) -> dict[str, Any]:
    """A plain tree for people and programs (units in the key: `_s` seconds)."""
    rounds = core.rounds
    busy = {flight.fragment: flight.phase.value for flight in rounds.flights.values()}
    return {
        "epoch": core.epoch,
        "state": core.state.value,
        "clock": core.clock,
        "steps": core.steps,
        "uptime_s": (now_ns - core.started_ns) / SECOND_NS,
        "learners": _learners(core, now_ns),
        "awaited": core.awaited(now_ns),
        "fragments": [
            {"index": index, "version": version, "state": busy.get(index, "idle")}
            for index, version in enumerate(rounds.versions)
        ],
        "fates": _fates(core),
        "refused": dict(sorted(core.refused.items())),
        "turned_away": [
            {
                "name": name,
                "times": times,
                "ago_s": (now_ns - last_ns) / SECOND_NS,
                "text": text[:TEXT_MAX],
            }
            for name, (times, last_ns, text) in core.turned_away.items()
        ],
        "rounds": {
            "merged": rounds.merged,
            "abandoned": rounds.abandoned,
            "in_flight": len(rounds.flights),
            "stuck": rounds.stuck or core.room.reason,
            "queued": len(rounds.queue) + len(rounds.closings),
            "grace_s": rounds.grace_ns() / SECOND_NS,
            "quorum_s": rounds.quorum_ns / SECOND_NS,
            "sync_s": rounds.sync_ns / SECOND_NS,
            "joined_mean": rounds.joined / rounds.merged if rounds.merged else 0.0,
        },
    }


def _learners(core: SyncerCore, now_ns: int) -> list[dict[str, Any]]:
    learners = []
    for member in core.members:
        quiet = member.stage is Stage.LIVE and member.quiet(now_ns, core.parameters.lease_ns)
        state = "closing" if member.closing else "quiet" if quiet else member.stage.value
        learners.append(
            {
                "name": member.life.name,
                "index": member.index,
                "state": state,
                "clock": member.clock,
                "lag": core.clock - member.clock if member.stage is Stage.LIVE else 0,
                "step_s": member.step_ns / SECOND_NS,
                "rounds_asked": member.rounds_asked,
                "rounds_joined": member.rounds_joined,
                "lease_s": max(0, member.lease_until_ns - now_ns) / SECOND_NS,
                "tokens": member.tokens,
            }
        )
    return learners


def _fates(core: SyncerCore) -> dict[str, Any]:
    rounds = core.rounds
    fates: dict[str, Any] = {fate.value: rounds.fates[fate] for fate in Fate}
    fates[Fate.REJECTED.value] = dict(sorted(rounds.rejections.items()))
    return fates


def check(core: SyncerCore) -> None:
    """Assert every invariant. Cheap enough for every step of a test."""
    core.handovers.check()
    rounds, seeding = core.rounds, core.state.value == "seeding"
    told = sum(rounds.fates.values())
    assert rounds.offered == told + rounds.pending(), "a push without fate"
    assert sum(rounds.rejections.values()) == rounds.fates[Fate.REJECTED]
    fragments = [flight.fragment for flight in rounds.flights.values()]
    assert len(fragments) == len(set(fragments)), "two rounds of one fragment"
    assert len(rounds.queue) == len(set(rounds.queue)), "a fragment is queued twice"
    for closing in (True, False):
        running = sum(flight.closing == closing for flight in rounds.flights.values())
        assert running <= policy.in_flight_max(rounds.parameters, closing=closing), (
            "too many rounds in flight"
        )
    indices = [member.index for member in core.members]
    assert len(indices) == len(set(indices)), "two learners share an index"
    seeders = len(core.members.in_stage(Stage.SEEDING))
    over = core.state.value in ("stopping", "stopped")
    assert seeders == seeding or over, "one seeder while seeding, else none"
    for flight in rounds.flights.values():
        assert flight.open or flight.pushes or flight.closing, "a round merges nothing"
        assert not flight.retry_ns or flight.phase is Phase.COMMITTING, "retries what is no commit"
