"""Several learners in threads of one process: real sockets, real I/O threads, one model each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import diloco_plugin
from diloco_plugin.learner import Learner
from tests.waiting import until


def run_all(jobs: Sequence[Callable[[], Any]], seconds: float = 60) -> list[Any]:
    """Run jobs side by side; return their results in order, or raise the first error."""
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def work(place: int) -> None:
        try:
            results[place] = jobs[place]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a learner hangs"
    return results


def small_model(seed: int = 0) -> nn.Module:
    """About 200 parameters in 4 tensors."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def batches(seed: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Deterministic regression batches of 16 samples."""
    generator = torch.Generator().manual_seed(1000 + seed)
    xs = [torch.randn(16, 8, generator=generator) for _ in range(count)]
    return [(x, x.sin().sum(1, keepdim=True)) for x in xs]


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """One plain step of a loop that knows nothing about learners."""
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()


def values(model: nn.Module) -> list[torch.Tensor]:
    """A copy of all parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def largest_difference(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """Largest absolute difference between two lists of tensors."""
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def sgd(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    """The plainest inner optimizer."""
    return torch.optim.SGD(model.parameters(), lr=lr)


def train_until(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    done: Callable[[], Any],
    *,
    data: int = 0,
    step_seconds: float = 0.001,
    seconds: float = 30,
) -> int:
    """Steps of about `step_seconds` until `done()` is true; returns how many."""
    deadline = time.monotonic() + seconds
    supply = batches(data, 16)
    steps = 0
    while not done():
        assert time.monotonic() < deadline, f"still not done after {steps} steps"
        train_step(model, optimizer, supply[steps % len(supply)])
        steps += 1
        time.sleep(step_seconds)  # what a step of a real model takes
    return steps


def merged(learner: Learner) -> float:
    """How many pushes of this learner have been merged."""
    return learner.metrics().get("diloco/pushes_merged", 0)


class Trainee:
    """A learner in a thread of its own that trains until it is told to stop, then closes."""

    def __init__(self, model: nn.Module, address: str, name: str, **options: Any) -> None:
        self.model = model
        self.learner: Learner | None = None
        self.steps = 0
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._step_seconds = options.pop("step_seconds", 0.001)
        self._lr = options.pop("lr", 1e-2)
        self._data = options.pop("data", 0)
        self._arguments = (address, name, options)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        address, name, options = self._arguments
        optimizer = sgd(self.model, self._lr)
        supply = batches(self._data, 16)
        try:
            with diloco_plugin.attach(
                self.model, optimizer, address, name=name, **options
            ) as self.learner:
                while not self._stop.is_set() and not self.learner.should_stop:
                    train_step(self.model, optimizer, supply[self.steps % len(supply)])
                    self.steps += 1
                    time.sleep(self._step_seconds)
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Trainee:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    @property
    def merged(self) -> float:
        """Pushes of this learner that were merged so far."""
        return merged(self.learner) if self.learner is not None else 0

    def wait(self, done: Callable[[], Any], seconds: float = 20, message: str = "") -> None:
        """Wait while it trains; its failure ends the wait."""

        def look() -> Any:
            if self.error is not None:
                raise self.error
            return done()

        until(look, seconds, message)

    def finish(self, seconds: float = 40) -> None:
        """Stop training, close, and raise what went wrong."""
        self._stop.set()
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "a learner hangs"
        if self.error is not None:
            raise self.error
