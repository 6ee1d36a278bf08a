"""What comes out of sockets, threads and merges equals what comes out of a few plain lines."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import diloco_plugin
from tests.end_to_end.fleet import (
    batches,
    largest_difference,
    run_all,
    small_model,
    train_step,
    values,
)
from tests.syncers import running_syncer

ROUNDS = 5


def inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def learn(address: str, name: str, seed: int, steps: int, data: int) -> list[Tensor]:
    model = small_model(seed)
    with diloco_plugin.attach(model, optimizer := inner(model), address, name=name):
        for batch in batches(data, steps):
            train_step(model, optimizer, batch)
    return values(model)


def nesterov(
    theta: list[Tensor],
    buffers: list[Tensor | None],
    gradients: Sequence[Tensor],
    lr: float,
    mu: float,
) -> None:
    """The outer step, written out: `buf = mu*buf + g; theta -= lr*(g + mu*buf)`."""
    for i, gradient in enumerate(gradients):
        old = buffers[i]
        buffers[i] = buf = gradient.clone() if old is None else mu * old + gradient
        theta[i] -= lr * (gradient + mu * buf)


def test_one_learner_with_plain_outer_steps_trains_as_if_it_were_alone() -> None:
    with running_syncer(
        lockstep=True, learners=1, sync_every=5, fragments=2, overlap=0, merge="direct",
        outer_lr=1.0, outer_momentum=0.0,
    ) as syncer:  # fmt: skip
        learned = learn(syncer.address, "only", 0, 50, 0)
        merged = syncer.status()["rounds"]["merged"]
        assert merged == 20 + 1  # ten of each fragment, and what fragment 1 had left at the end
    alone = small_model(0)
    optimizer = inner(alone)
    for batch in batches(0, 50):
        train_step(alone, optimizer, batch)
    assert largest_difference(learned, values(alone)) < 1e-6


def classic_diloco(learners: int, every: int, lr: float, mu: float) -> list[Tensor]:
    """DiLoCo (arXiv 2311.08105, algorithm 1): all fragments at once, everybody waits."""
    theta = values(small_model(0))
    buffers: list[Tensor | None] = [None] * len(theta)
    models = [small_model(0) for _ in range(learners)]
    optimizers = [inner(model) for model in models]
    data = [batches(m, ROUNDS * every) for m in range(learners)]
    for round_ in range(ROUNDS):
        for m, model in enumerate(models):
            for batch in data[m][round_ * every : (round_ + 1) * every]:
                train_step(model, optimizers[m], batch)
        ends = [values(model) for model in models]
        mean = [sum(t - end[i] for end in ends) / learners for i, t in enumerate(theta)]
        nesterov(theta, buffers, mean, lr, mu)
        for model in models:
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), theta, strict=True):
                    parameter.copy_(value)
    return theta


def test_the_diloco_preset_equals_classic_diloco() -> None:
    every = 7
    with running_syncer(preset="diloco", learners=2, sync_every=every) as syncer:
        jobs = [
            lambda m=m: learn(syncer.address, f"learner-{m}", 0, ROUNDS * every, m)
            for m in range(2)
        ]
        first, second = run_all(jobs)
    expected = classic_diloco(2, every, lr=0.7, mu=0.9)
    assert largest_difference(first, second) == 0.0
    assert largest_difference(first, expected) < 1e-6


def streaming_diloco(
    learners: int,
    every: int,
    groups: Sequence[Sequence[int]],
    overlap: int,
    alpha: float,
    steps: int,
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Streaming DiLoCo (arXiv 2501.18512, algorithm 2): fragments, overlap, blending."""
    theta = values(small_model(0))
    buffers: list[Tensor | None] = [None] * len(theta)
    anchors = [t.clone() for t in theta]
    models = [small_model(0) for _ in range(learners)]
    optimizers = [inner(model) for model in models]
    data = [batches(m, steps) for m in range(learners)]
    landing: list[tuple[int, Sequence[int], list[list[Tensor]]]] = []
    for step in range(1, steps + 1):
        for m, model in enumerate(models):
            train_step(model, optimizers[m], data[m][step - 1])
        for p, group in enumerate(groups):
            if step % every == p * every // len(groups):
                taken = [[values(model)[i] for i in group] for model in models]
                landing.append((step + overlap, group, taken))
        for _, group, taken in [entry for entry in landing if entry[0] == step]:
            for place, i in enumerate(group):
                mean = sum(anchors[i] - snapshot[place] for snapshot in taken) / learners
                one, buffer = [theta[i]], [buffers[i]]
                nesterov(one, buffer, [mean], 0.7, 0.9)
                theta[i], buffers[i] = one[0], buffer[0]
                anchors[i] = theta[i].clone()
                for model in models:
                    with torch.no_grad():
                        parameter = list(model.parameters())[i]
                        parameter.copy_(alpha * parameter + (1 - alpha) * theta[i])
        landing = [entry for entry in landing if entry[0] > step]
    return theta, [values(model) for model in models]


@pytest.mark.parametrize("overlap", [1, 3])
def test_the_streaming_preset_equals_streaming_diloco(overlap: int) -> None:
    every, steps = 6, 6 * ROUNDS + 3 + overlap
    seen: dict[int, list[Tensor]] = {}

    def job(m: int, address: str) -> list[Tensor]:
        model = small_model(0)
        optimizer = inner(model)
        learner = diloco_plugin.attach(model, optimizer, address, name=f"learner-{m}")
        for batch in batches(m, steps):
            train_step(model, optimizer, batch)
        seen[m] = values(model)
        learner.close()
        return values(model)

    with running_syncer(
        preset="streaming", learners=2, sync_every=every, fragments=2, overlap=overlap
    ) as syncer:
        run_all([lambda m=m: job(m, syncer.address) for m in range(2)])
        elements = [fragment["elements"] for fragment in syncer.status()["fragments"]]
    sizes = [parameter.numel() for parameter in small_model(0).parameters()]
    groups: list[list[int]] = [[], []]
    for i in sorted(range(4), key=lambda i: -sizes[i]):  # the balanced packing, by size
        groups[min((sum(sizes[j] for j in group), p) for p, group in enumerate(groups))[1]].append(
            i
        )
    assert [sum(sizes[i] for i in group) for group in groups] == elements
    _, expected = streaming_diloco(2, every, groups, overlap, 0.5, steps)
    for m in range(2):
        assert largest_difference(seen[m], expected[m]) < 1e-6


def unit(x: Tensor) -> Tensor:
    return x / x.norm() if float(x.norm()) > 0 else torch.zeros_like(x)


def rda(deltas: Sequence[Tensor]) -> Tensor:
    """Radial-directional averaging with equal weights."""
    return (
        sum(d.norm() for d in deltas)
        / len(deltas)
        * unit(sum(unit(d) for d in deltas) / len(deltas))
    )


@pytest.mark.parametrize("merge", ["rda", "direct"])
def test_five_merges_with_momentum_equal_the_formula(merge: str) -> None:
    """Constant gradients make every pseudo-gradient known in advance."""
    every, lr = 4, 0.05
    pulls = [[torch.randn(t.shape, generator=torch.Generator().manual_seed(9 * m + i)) for i, t in
              enumerate(values(small_model(0)))] for m in range(3)]  # fmt: skip

    def job(m: int, address: str) -> list[Tensor]:
        model = small_model(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        with diloco_plugin.attach(model, optimizer, address, name=f"learner-{m}"):
            for _ in range(every * ROUNDS):
                for parameter, pull in zip(model.parameters(), pulls[m], strict=True):
                    parameter.grad = pull.clone()
                optimizer.step()
        return values(model)

    with running_syncer(
        lockstep=True, learners=3, sync_every=every, fragments=1, overlap=0, merge=merge,
        outer_lr=0.7, outer_momentum=0.5,
    ) as syncer:  # fmt: skip
        learned = run_all([lambda m=m: job(m, syncer.address) for m in range(3)])[0]
    theta = values(small_model(0))
    buffers: list[Tensor | None] = [None] * len(theta)
    for _ in range(ROUNDS):
        deltas = [[every * lr * pull for pull in pulls[m]] for m in range(3)]
        tensors = list(zip(*deltas, strict=True))
        merged = [rda(d) if merge == "rda" else sum(d) / 3 for d in tensors]
        nesterov(theta, buffers, merged, 0.7, 0.5)
    assert largest_difference(learned, theta) < 2e-6
