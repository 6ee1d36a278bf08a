"""Several learners in threads of one process: real sockets, real I/O threads, one model each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


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
