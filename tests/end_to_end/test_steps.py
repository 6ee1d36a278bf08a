"""H counts real optimizer steps, whatever the loop around them does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import diloco_plugin
from diloco_plugin.learner import Learner
from tests.end_to_end.fleet import batches, small_model
from tests.syncers import running_syncer


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def accumulate(model: nn.Module, learner: Learner) -> int:
    """7 micro-batches, a step after each third and at the ragged end: 3 steps."""
    optimizer = learner._optimizers[0]
    for place, batch in enumerate(batches(0, 7), start=1):
        loss(model, batch).backward()
        if place % 3 == 0 or place == 7:
            optimizer.step()
            optimizer.zero_grad()
    return 3


def amp(model: nn.Module, learner: Learner) -> int:
    """6 scaled steps, two of which overflow and are skipped."""
    optimizer = learner._optimizers[0]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for place, batch in enumerate(batches(0, 6)):
        optimizer.zero_grad()
        scaler.scale(loss(model, batch)).backward()
        if place in (1, 4):
            next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
    return 4


def closures(model: nn.Module, learner: Learner) -> int:
    """LBFGS evaluates its closure many times in one step."""
    optimizer = learner._optimizers[0]
    for batch in batches(0, 5):

        def closure(batch: tuple[torch.Tensor, torch.Tensor] = batch) -> torch.Tensor:
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            return value

        optimizer.step(closure)
    return 5


def two_optimizers(model: nn.Module, learner: Learner) -> int:
    """Both step in every batch: the stepping batch is what counts."""
    for batch in batches(0, 4):
        for optimizer in learner._optimizers:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
        learner.boundary()
    learner.boundary()  # nothing stepped: nothing counts
    return 4


def one(kind: str) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        if kind == "lbfgs":
            return [torch.optim.LBFGS(model.parameters(), max_iter=4)]
        if kind == "two":
            first, second = model[0].parameters(), model[2].parameters()  # type: ignore[index]
            return [torch.optim.SGD(first, lr=0.01), torch.optim.Adam(second, lr=0.01)]
        return [torch.optim.AdamW(model.parameters(), lr=0.01, fused=kind == "fused")]

    return make


@pytest.mark.parametrize(
    ("kind", "loop"),
    [
        ("plain", accumulate), ("plain", amp), ("fused", amp), ("lbfgs", closures),
        ("two", two_optimizers),
    ],
    ids=["accumulation", "amp", "amp fused", "lbfgs", "two optimizers"],
)  # fmt: skip
def test_only_real_steps_count(kind: str, loop: Callable[[nn.Module, Learner], int]) -> None:
    model = small_model()
    with running_syncer() as syncer:
        optimizers = one(kind)(model)
        learner = diloco_plugin.attach(model, optimizers, syncer.address, name="a")
        expected = loop(model, learner)
        assert learner.state_dict()["steps"] == expected
        learner.close()


def test_tokens_are_counted_in_forward_of_training_only() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with running_syncer() as syncer:
        learner = diloco_plugin.attach(model, optimizer, syncer.address, name="a")
        for batch in batches(0, 3):
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
            with torch.no_grad():
                model(batch[0])
        assert learner.metrics()["diloco/tokens"] == 3 * 16
        learner.close()
