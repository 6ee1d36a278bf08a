"""Quorum, clock, grace and guards as plain functions."""

from __future__ import annotations

import random

import pytest

from diloco_plugin.core import policy
from diloco_plugin.core.parameters import PRESETS, SECOND_NS, Parameters

H24 = Parameters()


def test_with_as_many_fragments_as_steps_one_is_due_at_every_step() -> None:
    assert [policy.due_between(t - 1, t, H24, 24) for t in range(24, 48)] == [
        [p] for p in range(24)
    ]


def test_fewer_fragments_are_spread_over_the_steps() -> None:
    parameters = Parameters(sync_every=10, fragments=3)
    assert [policy.due_offset(p, parameters, 3) for p in range(3)] == [0, 3, 6]
    assert policy.due_between(10, 20, parameters, 3) == [1, 2, 0]


def test_nothing_is_due_at_step_zero() -> None:
    assert policy.due_between(0, 5, Parameters(sync_every=10, fragments=2), 2) == [1]
    assert policy.due_between(0, 10, Parameters(sync_every=10, fragments=2), 2) == [1, 0]


@pytest.mark.parametrize("jump", [24, 25, 240, 10**12])
def test_a_jump_of_the_clock_makes_every_fragment_due_once(jump: int) -> None:
    assert sorted(policy.due_between(7, 7 + jump, H24, 24)) == list(range(24))


def test_a_jump_keeps_the_order_in_which_fragments_come_due() -> None:
    assert policy.due_between(5, 5 + 24, H24, 24)[0] == 6


def test_no_step_forward_makes_nothing_due() -> None:
    assert policy.due_between(9, 9, H24, 24) == []


@pytest.mark.parametrize(
    ("quorum", "able", "effective"), [(1, 0, 1), (1, 5, 1), (3, 5, 3), (3, 2, 2)]
)
def test_the_quorum_shrinks_with_those_who_can_still_push(
    quorum: int, able: int, effective: int
) -> None:
    assert policy.effective_quorum(quorum, able) == effective


@pytest.mark.parametrize(
    ("now", "clocks", "quorum", "then"),
    [
        (0, [5, 9, 7], 1, 9),
        (0, [5, 9, 7], 2, 7),
        (0, [5, 9, 7], 3, 5),
        (0, [5, 9, 7], 8, 5),
        (8, [5, 9, 7], 3, 8),
        (8, [], 1, 8),
    ],
)
def test_the_clock_is_the_kth_largest_and_never_goes_back(
    now: int, clocks: list[int], quorum: int, then: int
) -> None:
    assert policy.advance_clock(now, clocks, quorum) == then


def test_the_grace_window_is_what_the_overlap_hides() -> None:
    parameters = Parameters(overlap=2, grace=0.5)
    assert policy.grace_ns(parameters, 100, 30, 20) == 75
    assert policy.grace_ns(parameters, 100, 150, 80) == 0
    assert policy.grace_ns(parameters, 0, 0, 0) == 0
    assert policy.grace_ns(Parameters(overlap=0), 100, 0, 0) == 0


def test_one_very_slow_learner_does_not_stretch_the_window_of_all() -> None:
    assert policy.fleet_step_ns([]) == 0
    assert policy.fleet_step_ns([0, 100]) == 100
    assert policy.fleet_step_ns([100, 100, 9000]) == 100
    assert policy.fleet_step_ns([100, 9000]) == 400


def test_an_average_starts_with_what_is_observed_first() -> None:
    assert policy.moving_average(0, 80) == 80
    assert policy.moving_average(80, 160) == 100


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "fresh"),
        ({"steps": 0}, "no steps"),
        ({"tokens": 0}, "no tokens"),
        ({"base": 6}, "base from the future"),
        ({"consumed": 5}, "consumed base"),
        ({"base": 3}, "fresh"),
        ({"base": 2}, "stale"),
    ],
)
def test_an_offer_is_judged_by_its_base_and_its_work(change: dict[str, int], reason: str) -> None:
    offer = {"base": 5, "version": 5, "consumed": 4, "steps": 3, "tokens": 9, "max_staleness": 2}
    if change.get("base", 5) < 5:
        offer["consumed"] = -1
    verdict = policy.judge_offer(**(offer | change))
    assert (verdict.reason, verdict.yes) == (reason, reason == "fresh")


def _history(*norms: float, steps: int = 24) -> list[tuple[float, float]]:
    return [(norm, norm / steps) for norm in norms]


def test_an_explosion_is_refused() -> None:
    assert not policy.judge_norm(11.0, 24, _history(1.0, 1.0, 1.0), 10.0).yes
    assert policy.judge_norm(9.0, 24, _history(1.0, 1.0, 1.0), 10.0).yes


def test_a_partial_window_is_not_refused() -> None:
    history = _history(1.0, 1.0, 1.0)
    assert policy.judge_norm(0.6, 1, history, 10.0).yes, "large for one step, small as a whole"
    assert policy.judge_norm(12.0, 480, history, 10.0).yes, "large as a whole, small for a step"


def test_a_warm_up_of_the_learning_rate_is_not_refused() -> None:
    history: list[tuple[float, float]] = []
    for round_ in range(40):
        norm = 0.01 + round_
        assert policy.judge_norm(norm, 24, history[-policy.NORM_HISTORY_MAX :], 10.0).yes
        history += _history(norm)
        if round_ == 0:
            history.clear()  # a round in which nothing moved leaves no usual norm


def test_no_norm_is_refused_while_none_is_usual() -> None:
    assert policy.judge_norm(1e9, 1, _history(1.0, 1.0), 10.0).yes


def test_back_off_doubles_and_is_bounded() -> None:
    waits = [policy.backoff_ns(attempt, 1.0) for attempt in range(100)]
    assert waits[:3] == [SECOND_NS // 2, SECOND_NS, 2 * SECOND_NS]
    assert max(waits) == waits[-1] == policy.BACKOFF_MAX_NS
    assert policy.backoff_ns(3, 0.0) == waits[3] // 2


def test_learners_do_not_call_in_step() -> None:
    names = random.Random(0)
    jitters = {policy.jitter(f"{names.getrandbits(128):032x}", 1) for _ in range(50)}
    assert len(jitters) > 45
    assert all(0.0 <= jitter < 1.0 for jitter in jitters)


def test_presets_are_valid() -> None:
    for name, preset in PRESETS.items():
        values = {"learners": 2} | preset if name in ("diloco", "streaming") else preset
        assert Parameters(**values).problem() is None, name


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ({"fragments": 30}, "raise sync_every"),
        ({"overlap": 24}, "overlap=23 or less"),
        ({"quorum": 0}, "at least 1"),
        ({"alpha": 1.0}, "below 1.0"),
        ({"lease": float("inf")}, "positive"),
        ({"codec": "int4"}, "fp32, bf16"),
        ({"lockstep": True}, "--learners"),
    ],
)
def test_a_wrong_parameter_is_refused_with_the_fix(values: dict[str, object], fix: str) -> None:
    problem = Parameters(**values).problem()  # type: ignore[arg-type]
    assert problem is not None
    assert fix in problem
