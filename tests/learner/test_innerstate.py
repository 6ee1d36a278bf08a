"""The state of an optimizer, taken between two steps and given to another one like it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs

from diloco_plugin.errors import WireError
from diloco_plugin.learner import handover
from diloco_plugin.learner.counting import StepCounter
from diloco_plugin.learner.handover import Answer, Giving, Taking
from diloco_plugin.learner.innerstate import InnerState, NothingToGive
from diloco_plugin.wire import manifest as wire
from diloco_plugin.wire.chunks import checksum
from diloco_plugin.wire.framing import decode_bulk, encode
from diloco_plugin.wire.messages import Chunk, Gone, Want
from tests.end_to_end.fleet import batches, small_model, train_step

Make = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "capturable off, foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
}


class Trained:
    """A model with an optimizer that has stepped, and what gives and takes its state."""

    def __init__(
        self, make: Make = OPTIMIZERS["AdamW"], steps: int = 0, schedule: Any = None, seed: int = 0
    ) -> None:
        self.model = small_model(seed)
        self.optimizer = make(self.model.parameters())
        self.scheduler = schedule(self.optimizer) if schedule else None
        self.names = dict(self.model.named_parameters())
        self.counter = StepCounter([self.optimizer], self.names.values())
        self.inner = InnerState(self.names, [self.optimizer], self.scheduler)
        self.giving = Giving(self.inner, self.counter, lambda: self.counter.begun)
        self.train(steps)

    def train(self, steps: int) -> None:
        for batch in batches(3, steps):
            train_step(self.model, self.optimizer, batch)
            if self.scheduler is not None:
                self.scheduler.step()
            self.counter.settle()

    def answer(self) -> Answer:
        self.giving.begin(7)
        while True:
            answer = self.giving.turn()
            if answer is not None:
                return answer
            assert self.giving.busy, "it waits for a boundary"

    def stream(self) -> Tensor:
        answer = self.answer()
        assert not answer.nothing
        data = b"".join(
            bytes(frames[1])
            for index in range(wire.chunks_of(answer.size))
            for frames in self.giving.chunks(want(index))
        )
        assert len(data) == answer.size
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def states(self) -> dict[str, dict[str, Any]]:
        return {name: dict(self.optimizer.state[p]) for name, p in self.names.items()}


def want(index: int, ticket: int = 7) -> Want:
    return Want(kind="state", fragment=0, key=ticket, first=index, count=1)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    return bool(one == other) or (one is None and other is None)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@settings(max_examples=5, deadline=None)
@given(steps=st.integers(1, 5))
def test_the_next_step_after_taking_is_the_donors_to_the_bit(kind: str, steps: int) -> None:
    donor, joiner = Trained(OPTIMIZERS[kind], steps), Trained(OPTIMIZERS[kind], seed=1)
    with torch.no_grad():
        for name, parameter in joiner.names.items():
            parameter.copy_(donor.names[name])
    stream = donor.stream()
    assert joiner.inner.problem(stream) == ""
    assert joiner.inner.apply(stream) == ""
    assert same(donor.states(), joiner.states())
    donor.train(2)
    joiner.train(2)
    assert same(donor.states(), joiner.states())
    assert all(torch.equal(donor.names[n], p) for n, p in joiner.names.items())


def test_parameters_in_other_groups_and_another_order_find_their_state() -> None:
    donor = Trained(steps=3)
    joiner = Trained(
        lambda p: torch.optim.AdamW(
            [{"params": [one]} for one in reversed(list(p))], lr=1e-2, weight_decay=0.3
        )
    )
    stream = donor.stream()
    assert joiner.inner.problem(stream) == ""
    joiner.inner.apply(stream)
    assert same(donor.states(), joiner.states())


def test_what_is_taken_is_a_copy() -> None:
    donor, joiner = Trained(steps=1), Trained()
    stream = donor.stream()
    joiner.inner.apply(stream)
    before = copy.deepcopy(joiner.states())
    stream.zero_()
    donor.train(1)
    assert same(before, joiner.states())


MISFITS: list[tuple[Make, Make, str]] = [
    (OPTIMIZERS["AdamW"], OPTIMIZERS["momentum"], "another optimizer (AdamW there, SGD here)"),
    (
        lambda p: torch.optim.Adam(p),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        "amsgrad is off there, on here",
    ),
    (
        lambda p: torch.optim.RMSprop(p),
        lambda p: torch.optim.RMSprop(p, momentum=0.9),
        "momentum is off there, on here",
    ),
    (
        lambda p: torch.optim.AdamW(p),
        lambda p: torch.optim.AdamW(list(p)[1:]),
        "0.weight is not a parameter of this optimizer",
    ),
]


@pytest.mark.parametrize(("there", "here", "reason"), MISFITS)
def test_what_does_not_fit_is_not_taken_and_the_reason_says_what(
    there: Make, here: Make, reason: str
) -> None:
    joiner = Trained(here)
    assert reason in joiner.inner.problem(Trained(there, 2).stream())
    assert not joiner.optimizer.state


def test_a_parameter_in_another_dtype_does_not_fit() -> None:
    donor, joiner = Trained(steps=1), Trained()
    joiner.model.to(torch.bfloat16)
    assert "0.weight: float32 there, bfloat16 here" in joiner.inner.problem(donor.stream())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_state_that_is_not_finite_is_not_taken(bad: float) -> None:
    donor = Trained(steps=1)
    donor.optimizer.state[donor.names["2.weight"]]["exp_avg_sq"].view(-1)[3] = bad
    assert Trained().inner.problem(donor.stream()) == "it is not finite"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_bytes_do_harm(data: st.DataObject) -> None:
    """Flipped, cut or made up: a reason, or a state of the right form; never an exception."""
    stream = bytearray(Trained(steps=1).stream().numpy().tobytes())
    for _ in range(data.draw(st.integers(1, 4))):
        # mostly in the manifest, which is the last third
        place = data.draw(st.integers(max(0, len(stream) - 1200), len(stream) - 1))
        stream[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, 20))
    stream = stream[: len(stream) - cut] if data.draw(st.booleans()) else stream
    joiner = Trained()
    raw = torch.frombuffer(stream, dtype=torch.uint8)
    if joiner.inner.problem(raw) == "":
        joiner.inner.apply(raw)
        assert all(state["exp_avg"].isfinite().all() for state in joiner.states().values() if state)


class Odd(torch.optim.SGD):
    """Keeps `value` beside each parameter."""

    value: Any = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["odd"] = self.value


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.zeros(3), "another form than a parameter's"),
        (torch.zeros(16, 8).to_sparse(), "another form than a parameter's"),
        ({"a": 1}, "Odd keeps a dict in its state ('odd')"),
        ("text", "Odd keeps a str in its state ('odd')"),
    ],
)
def test_what_cannot_travel_is_not_given(value: Any, reason: str) -> None:
    donor = Trained(lambda p: Odd(p, lr=0.1), 1)
    Odd.value = value
    donor.train(1)
    assert reason in donor.answer().nothing


def test_an_optimizer_without_state_or_with_shards_or_weights_gives_nothing() -> None:
    assert Trained(lambda p: torch.optim.SGD(p, lr=0.1), 1).answer().nothing == (
        "its optimizer keeps no state"
    )

    class ZeroRedundancyOptimizer(torch.optim.AdamW):
        pass

    assert "in shards" in Trained(lambda p: ZeroRedundancyOptimizer(p), 1).answer().nothing
    free = Trained(steps=1)
    for state in free.optimizer.state.values():
        state["z"] = torch.zeros(())
    assert "keeps 'z' in its state" in free.answer().nothing
    assert Trained().answer().nothing == "it has not stepped yet"


# ---- a snapshot beside training ----


def test_a_step_that_begins_while_the_state_is_copied_makes_the_copy_void(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handover, "SLICE_BYTES", 1)  # a tensor at a time
    donor = Trained(steps=3)
    donor.giving.begin(7)
    assert donor.giving.turn() is None
    donor.train(1)
    assert donor.giving.turn() is None, "void"
    assert not donor.giving.busy, "not again before the next boundary"
    donor.train(1)
    expected = copy.deepcopy(donor.states())
    answer = None
    while answer is None:
        assert donor.giving.busy
        answer = donor.giving.turn()
    assert answer.clock == 5
    donor.train(2)  # what was copied stays as it was
    data = b"".join(bytes(f[1]) for f in donor.giving.chunks(want(0)))
    joiner = Trained()
    joiner.inner.apply(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    assert same(joiner.states(), expected)


def test_while_a_step_runs_no_copy_begins() -> None:
    donor = Trained(steps=1)
    donor.counter.begun += 1  # the pre-hook of a step that has not come back
    donor.giving.begin(7)
    assert not donor.giving.busy
    assert donor.giving.settled(), "a boundary is worth a wake-up"


def test_steps_that_are_too_short_for_a_snapshot_are_the_reason_after_five_tries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handover, "SLICE_BYTES", 1)
    donor = Trained(steps=1)
    donor.giving.begin(7)
    answers = []
    for _ in range(handover.TRIES_MAX):
        donor.giving.turn()
        donor.train(1)
        answers.append(donor.giving.turn())
        donor.train(1)
    assert answers[:-1] == [None] * (handover.TRIES_MAX - 1)
    assert answers[-1] == Answer(7, nothing="its steps are too short for a snapshot")
    assert donor.giving._flat is None


def test_only_the_ticket_is_served_and_its_memory_is_freed_at_the_end() -> None:
    donor = Trained(steps=1)
    donor.stream()
    for other in (want(0, 8), want(0, 0)):
        assert decode_bulk(donor.giving.chunks(other)[0][0]) == Gone(
            kind="state", fragment=0, key=other.key
        )
    with pytest.raises(WireError):
        donor.giving.chunks(want(1))
    donor.giving.end(6)  # another one's
    assert donor.giving._flat is not None
    donor.giving.end(7)
    assert donor.giving._flat is None


# ---- taking ----


def test_chunks_that_break_the_rules_end_the_transfer() -> None:
    donor = Trained(steps=1)
    size = donor.answer().size
    header, payload = donor.giving.chunks(want(0))[0]
    chunk = decode_bulk(header)
    assert isinstance(chunk, Chunk)

    class Frame:
        def __init__(self, data: bytes) -> None:
            self.buffer = memoryview(data)

    def chunk_of(**changes: Any) -> Chunk:
        fields = {f: getattr(chunk, f) for f in chunk.__struct_fields__}
        return Chunk(**(fields | changes))

    good = bytes(payload)
    for name, bad, data in [
        ("corrupt", chunk, good[:-1] + b"x"),
        ("wrong size", chunk_of(crc=checksum(good[:9])), good[:9]),
        ("out of range", chunk_of(index=5), good),
    ]:
        ended: list[Any] = []
        taking = Taking(Trained().inner, lambda *told, ended=ended: ended.append(told))
        taking.begin(7, size)
        assert taking.wants() == [encode(want(0))]
        assert not taking.receive(chunk_of(key=8), [Frame(header), Frame(good)])
        with pytest.raises(WireError):
            taking.receive(bad, [Frame(header), Frame(data)])
        assert ended == [(7, None, f"its bytes are {name}")]
        assert taking._stream is None


def test_a_size_that_no_state_of_this_model_has_is_refused_before_memory_is_taken() -> None:
    ended: list[Any] = []
    inner = Trained().inner
    taking = Taking(inner, lambda *told: ended.append(told))
    taking.begin(7, inner.size_max + 1)
    assert "cannot be the state" in ended[0][2]
    assert taking.wants() == []


# ---- schedules ----

SCHEDULES: dict[str, Any] = {
    "StepLR": lambda o: lrs.StepLR(o, 2, 0.5),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, max_lr=1.0, total_steps=50),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 40),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=3), lrs.CosineAnnealingLR(o, 40)], [3]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_scheduler_goes_on_where_the_donors_stands(kind: str) -> None:
    donor = Trained(OPTIMIZERS["momentum"], 5, SCHEDULES[kind])
    joiner = Trained(OPTIMIZERS["momentum"], 0, SCHEDULES[kind])
    assert joiner.inner.apply(donor.stream()) == ""
    for _ in range(6):
        assert [g["lr"] for g in joiner.optimizer.param_groups] == [
            g["lr"] for g in donor.optimizer.param_groups
        ]
        assert joiner.scheduler.last_epoch == donor.scheduler.last_epoch
        assert joiner.scheduler.get_last_lr() == donor.scheduler.get_last_lr()
        donor.train(1)
        joiner.train(1)


def test_a_scheduler_of_another_class_stays_and_it_is_said() -> None:
    donor = Trained(steps=5, schedule=SCHEDULES["StepLR"])
    joiner = Trained(schedule=SCHEDULES["CosineAnnealingLR"])
    lr = joiner.optimizer.param_groups[0]["lr"]
    assert "this learner's own stays" in joiner.inner.apply(donor.stream())
    assert joiner.optimizer.param_groups[0]["lr"] == lr
    assert joiner.scheduler.last_epoch == 0
    assert same(donor.states(), joiner.states())


def test_without_a_scheduler_the_learning_rate_is_the_joiners_own() -> None:
    donor = Trained(steps=5, schedule=SCHEDULES["StepLR"])
    joiner = Trained(lambda p: torch.optim.AdamW(p, lr=0.123))
    assert joiner.inner.apply(donor.stream()) == ""
    assert joiner.optimizer.param_groups[0]["lr"] == 0.123


def test_a_scheduler_that_refuses_stays_where_it_was() -> None:
    class Picky(lrs.StepLR):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            if state["last_epoch"] > 3:
                raise ValueError("not so far")
            super().load_state_dict(state)

    make = lambda o: Picky(o, 2, 0.5)  # noqa: E731
    joiner = Trained(schedule=make)
    assert "not so far" in joiner.inner.apply(Trained(steps=5, schedule=make).stream())
    assert joiner.scheduler.last_epoch == 0


def test_how_many_steps_an_optimizer_has_behind_it() -> None:
    assert Trained().inner.steps_behind(500) == 0
    assert Trained(steps=3).inner.steps_behind(0) == 3
    assert Trained(OPTIMIZERS["momentum"], 3).inner.steps_behind(500) == 500


def test_a_state_that_changes_while_it_is_described_is_looked_at_again() -> None:
    donor = Trained(steps=1)
    looks = iter([RuntimeError("dictionary changed size"), KeyError("exp_avg")])
    describe = donor.inner.describe

    def disturbed() -> Any:
        error = next(looks, None)
        if error is not None:
            raise error
        return describe()

    donor.inner.describe = disturbed  # type: ignore[method-assign]
    donor.giving.begin(7)
    assert donor.giving.turn() is None
    donor.train(1)
    assert donor.giving.turn() is None
    donor.train(1)
    answer = donor.giving.turn()
    assert answer is not None
    assert not answer.nothing


def test_a_model_without_parameters_of_this_optimizer_gives_its_reason() -> None:
    lone = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(lone.parameters())
    with pytest.raises(NothingToGive, match="keeps no state"):
        InnerState({}, [optimizer], None).describe()
