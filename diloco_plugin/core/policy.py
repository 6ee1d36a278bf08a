"""Quorum, clock, grace, guards and advice: plain functions that return a decision and its reason.

Swapping a policy means passing another function; nothing here keeps state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .parameters import SECOND_NS, Parameters

#: Rounds of a fragment that must have been merged before its norms are trusted as usual.
NORM_HISTORY_MIN: Final = 3
NORM_HISTORY_MAX: Final = 16
#: After so many rounds in which every push was refused for its norm, the usual norm has changed.
NORM_ROUNDS_REFUSED_MAX: Final = 3
#: A slow learner may stretch the grace window to this multiple of the fastest learner's step.
STEP_CAP: Final = 4
#: How long the holder of a claimed name has to answer.
PROBE_NS: Final = 2 * SECOND_NS
#: How long to wait until a commit that found no room is tried again.
COMMIT_RETRY_NS: Final = 2 * SECOND_NS
BACKOFF_MIN_NS: Final = SECOND_NS // 2
BACKOFF_MAX_NS: Final = 10 * SECOND_NS
#: No training steps faster than this; a clock that claims more is wrong, and everybody follows it.
STEP_MIN_NS: Final = 1000


@dataclass(frozen=True, slots=True)
class Decision:
    """A yes or no, and why."""

    yes: bool
    reason: str


def due_offset(fragment: int, parameters: Parameters, fragments: int) -> int:
    """Step within every H steps at which a fragment is due: `floor(p*H/P)` (paper, section 2)."""
    return fragment * parameters.sync_every // fragments


def due_between(after: int, upto: int, parameters: Parameters, fragments: int) -> list[int]:
    """Fragments whose due points lie in `(after, upto]`, in the order in which they come due.

    A jump of more than H steps makes every fragment due once, not several times.
    """
    every = parameters.sync_every
    first = max(after + 1, upto - every + 1, 1)
    points = []
    for fragment in range(fragments):
        offset = due_offset(fragment, parameters, fragments)
        step = first + (offset - first) % every
        if step <= upto:
            points.append((step, fragment))
    return [fragment for _, fragment in sorted(points)]


def effective_quorum(quorum: int, able: int) -> int:
    """K_eff: dead and idle learners block no round (`able` counts those who can still push)."""
    return max(1, min(quorum, able))


def advance_clock(now: int, clocks: Sequence[int], quorum: int) -> int:
    """t: the K_eff-th largest of the live learners' clocks, never backwards."""
    if not clocks:
        return now
    kth = sorted(clocks, reverse=True)[effective_quorum(quorum, len(clocks)) - 1]
    return max(now, kth)


def fleet_step_ns(steps_ns: Iterable[int]) -> int:
    """The step time that the grace window counts in: the upper median of the learners' step times.

    Half of the fleet at least can hide the window behind its own steps. One very slow learner among
    two would stretch every window to its own pace, so the value is capped at STEP_CAP steps of the
    fastest.
    """
    known = sorted(step for step in steps_ns if step > 0)
    if not known:
        return 0
    return min(known[len(known) // 2], STEP_CAP * known[0])


def grace_ns(parameters: Parameters, step_ns: int, quorum_ns: int, sync_ns: int) -> int:
    """Grace window: `gamma * max(0, tau*step - (quorum_time + sync_time))` (paper, Eq. 3)."""
    slack = parameters.overlap * step_ns - quorum_ns - sync_ns
    return int(parameters.grace * max(0, slack))


def regather_ns(parameters: Parameters) -> int:
    """How long merges wait after a restart for learners that may have trained on: until they have
    missed an answer and called again, but well within the patience of those who close.
    """
    called = parameters.lease_ns // 5 + BACKOFF_MAX_NS
    return min(called, int(parameters.close_timeout * SECOND_NS / 2))


def moving_average(average: int, value: int) -> int:
    """Exponential moving average, weight 1/4; 0 means that nothing was observed yet."""
    return value if average == 0 else average + (value - average) // 4


def in_flight_max(parameters: Parameters, *, closing: bool) -> int:
    """Rounds that may run at once: max(1, tau); closing rounds have no training to hide behind."""
    return max(4, parameters.overlap) if closing else max(1, parameters.overlap)


def judge_offer(  # one line per reason: a table, not a tangle
    *, base: int, version: int, consumed: int, steps: int, tokens: int, max_staleness: int
) -> Decision:
    """May this push come? Reasons are fates' reasons; "stale" is a fate of its own."""
    if steps < 1:
        return Decision(False, "no steps")
    if tokens < 1:
        return Decision(False, "no tokens")
    if base > version:
        return Decision(False, "base from the future")
    if base <= consumed:
        return Decision(False, "consumed base")
    if version - base > max_staleness:
        return Decision(False, "stale")
    return Decision(True, "fresh")


def judge_norm(
    norm: float, steps: int, history: Sequence[tuple[float, float]], limit: float
) -> Decision:
    """Is a push's norm within `limit` times the usual one of its fragment?

    `history` holds (norm, norm per step) of merged rounds. A push is refused only when both are
    beyond the limit: a partial window is small in the first measure and large in the second, an
    explosion is large in both.
    """
    if norm == 0.0 or len(history) < NORM_HISTORY_MIN:
        return Decision(True, "usual norm unknown")
    usual = median([whole for whole, _ in history])
    usual_per_step = median([per_step for _, per_step in history])
    if norm > limit * usual and norm / steps > limit * usual_per_step:
        return Decision(False, "norm")
    return Decision(True, "usual norm")


def judge_hello(protocol: int, our_protocol: int, run: str, our_run: str) -> tuple[str, str] | None:
    """The refusal (code, text) of a learner that speaks otherwise or wants another run, or None.

    A learner that names no run takes the one it finds.
    """
    if protocol != our_protocol:
        older = "the learner's" if protocol < our_protocol else "the syncer's"
        return "protocol", (
            f"this learner speaks protocol {protocol}, the syncer {our_protocol}:"
            f" upgrade {older} diloco-plugin."
        )
    if run and run != our_run:
        return "run", (
            f"this syncer serves run {our_run!r}, not {run!r}: use the address of that run's"
            " syncer, or leave the run's name away."
        )
    return None


def another_model(run: str, difference: str) -> str:
    """What to tell a learner whose model is not the run's."""
    return (
        f"this model is not the one that run {run!r} trains: {difference}."
        " Use the same model, or another syncer"
    )


def caution_about_twin(name: str, data_seed: int | None) -> str:
    """What a learner's user should read when another one draws its data in the same order."""
    return (
        f"learner {name!r} draws its data with the same seed ({data_seed}): if the data are the"
        " same too, averaging two equal runs teaches nothing; set another data seed or use"
        " diloco_plugin.shard()."
    )


def older_life(epoch: int, known: int) -> str:
    """What to say where a learner meets a syncer that is older than the one it knows."""
    return (
        f"this syncer's life (epoch {epoch}) is older than the one that the learner knows"
        f" ({known}): two syncers run, or this machine's clock was set back. Stop the older one, or"
        " set the clock and start it again."
    )


def caution_about_place(index: int, count: int) -> str:
    """What a learner's user should read whose number is beyond those that were expected."""
    return (
        f"this learner is number {index + 1} of {count} expected: with shard() it has the same part"
        f" of the data as number {index % count + 1}. Start the syncer again with --learners"
        f" {index + 1} (and --override, where it goes on from --state), then the learners."
    )


def counted(count: int, noun: str) -> str:
    """How many there are of what, e.g. "1 learner" or "2 learners"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def median(values: Sequence[float]) -> float:
    """Upper median."""
    return sorted(values)[len(values) // 2]


def backoff_ns(attempt: int, jitter: float) -> int:
    """How long to wait before asking again: 0.5 s to 10 s, times 0.5 to 1 (`jitter` in 0..1)."""
    wait = min(BACKOFF_MAX_NS, BACKOFF_MIN_NS << min(attempt, 16))
    return int(wait * (0.5 + 0.5 * jitter))


def jitter(incarnation: str, attempt: int) -> float:
    """A number in 0..1 that differs between learners and attempts and needs no random source."""
    return (int(incarnation[:8] or "0", 16) * 2654435761 * (attempt + 1)) % 2**32 / 2**32


def diagnose(status: dict[str, Any]) -> list[str]:
    """What is wrong with a run, in words, from its status body. Empty when nothing is."""
    problems = []
    parameters, rounds, learners = status["parameters"], status["rounds"], status["learners"]
    live = [learner for learner in learners if learner["state"] == "live"]
    empty = status["state"] in ("empty", "seeding")
    if empty and not rounds.get("stuck"):
        problems.append(
            "no model yet: the first learner that joins brings it (or start with --init)."
        )
    elif status.get("awaited"):
        names = ", ".join(status["awaited"])
        problems.append(
            f"merges wait a little for those that are not back since the restart: {names}"
        )
    elif not learners and status["state"] == "running":
        problems.append("no learner is live: start one, or look at why they left.")
    expected = parameters["learners"]
    if expected and len(live) < expected and status["state"] == "running":
        verb = "is" if len(live) == 1 else "are"
        problems.append(f"{len(live)} of {counted(expected, 'expected learner')} {verb} live.")
    if 0 < len(live) < parameters["quorum"] and status["state"] == "running":
        problems.append(
            f"{counted(len(live), 'learner')} live, which is less than the quorum"
            f" ({parameters['quorum']}): a round closes with all that are there."
        )
    joined = rounds["joined_mean"]
    if len(live) > 1 and rounds["merged"] >= 10 and joined < 0.6 * len(live):
        problems.append(
            f"{joined:.1f} of {len(live)} learners join a round: raise --quorum"
            f" (now {parameters['quorum']}) or --overlap (now {parameters['overlap']})."
        )
    if rounds.get("stuck"):
        what = (
            "the first model cannot be saved" if empty else "nothing is announced for want of room"
        )
        problems.append(f"{what}: {rounds['stuck']}")
    quiet = [learner["name"] for learner in learners if learner["state"] == "quiet"]
    if quiet:
        problems.append(f"{', '.join(quiet)}: connected, but no training step for a while.")
    for reason, count in sorted(status["fates"]["rejected"].items()):
        if reason in ("not finite", "norm", "corrupt", "wrong size"):
            problems.append(
                f"refused pushes ({reason}): {count}. Look at the loss of the learners."
            )
    problems += [
        f"learner {one['name']!r} was turned away ({counted(one['times'], 'time')}, last"
        f" {one['ago_s']:.0f} s ago): {one['text']}"
        for one in status["turned_away"]
    ]
    return problems
