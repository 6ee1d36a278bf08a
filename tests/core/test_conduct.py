"""How much anybody may say, and when nobody listens any more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diloco_plugin.core.conduct import (
    BURST,
    QUARANTINE_NS,
    RATE,
    SPEAKERS_MAX,
    STRIKES_MAX,
    STRIKES_NS,
    Conduct,
    cost_of,
)
from diloco_plugin.core.parameters import SECOND_NS


@given(st.lists(st.integers(0, SECOND_NS // 10), max_size=200), st.integers(1, 50))
def test_nobody_says_more_than_the_rate_after_a_burst(gaps: list[int], cost: int) -> None:
    conduct, now, said = Conduct(), 0, 0
    for gap in gaps:
        now += gap
        while conduct.allows("a", now, cost):
            said += cost
        assert said <= BURST + RATE * now / SECOND_NS + cost


def test_one_speaker_does_not_use_up_the_allowance_of_another() -> None:
    conduct = Conduct()
    while conduct.allows("loud", 0):
        pass
    assert conduct.allows("quiet", 0)
    assert conduct.allows("loud", SECOND_NS)


def test_five_strikes_in_a_minute_are_a_quarantine_that_ends() -> None:
    conduct = Conduct()
    assert [conduct.strike("a", i) for i in range(STRIKES_MAX)] == [False] * 4 + [True]
    assert conduct.quarantined("a", STRIKES_MAX) > 0
    assert conduct.quarantined("b", STRIKES_MAX) == 0
    assert conduct.in_quarantine(STRIKES_MAX) == 1
    assert conduct.quarantined("a", STRIKES_MAX + QUARANTINE_NS) == 0


def test_rare_accidents_are_forgiven() -> None:
    conduct = Conduct()
    assert not any(conduct.strike("a", i * (STRIKES_NS + 1)) for i in range(50))


def test_a_flood_of_speakers_takes_bounded_memory_and_frees_nobody() -> None:
    conduct = Conduct()
    for _ in range(STRIKES_MAX):
        conduct.strike("bad", 0)
    for speaker in range(3 * SPEAKERS_MAX):
        conduct.allows(speaker, 1)
    assert len(conduct._records) <= SPEAKERS_MAX + 1
    assert conduct.quarantined("bad", 1)


def test_a_message_of_any_length_may_be_said_once_and_long_ones_not_often() -> None:
    longest, conduct = cost_of(4 * 1024 * 1024), Conduct()
    assert cost_of(0) == 1
    assert [conduct.allows("a", i, longest) for i in range(3)] == [True, False, False]
    assert conduct.allows("a", BURST * SECOND_NS // RATE, longest)
