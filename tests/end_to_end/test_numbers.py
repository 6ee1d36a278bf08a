"""What is merged, and what is left alone."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

import diloco_plugin
from diloco_plugin.syncer import Syncer
from tests.end_to_end.fleet import batches, largest_difference, run_all, small_model, train_step
from tests.syncers import global_model, running_syncer, wait_until_live
from tests.waiting import until

LOCKSTEP_ONE: dict[str, Any] = {
    "lockstep": True, "learners": 1, "sync_every": 1, "fragments": 1, "overlap": 0,
    "merge": "direct", "outer_lr": 1.0, "outer_momentum": 0.0,
}  # fmt: skip


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)


def constant_steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    """Steps whose gradient is one everywhere: progress is `-lr * steps` in every element."""
    for _ in range(count):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()


class Zoo(nn.Module):
    """One of each: frozen, normalized, tied, trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.frozen(self.embed(ids))))
        return logits


def test_frozen_stays_tied_travels_once_and_batchnorm_statistics_merge() -> None:
    torch.manual_seed(0)
    zoos = [Zoo(), Zoo()]
    frozen = [zoo.frozen.weight.clone() for zoo in zoos]
    barrier = threading.Barrier(2)

    def job(m: int, syncer: Syncer) -> None:
        zoo, ids = zoos[m], torch.arange(10).repeat(3)
        optimizer = sgd(zoo)
        with diloco_plugin.attach(zoo, optimizer, syncer.address, name=f"l{m}"):
            for _ in range(3 + m):  # unequal: counters of batches differ
                optimizer.zero_grad()
                nn.functional.cross_entropy(zoo(ids), ids).backward()
                optimizer.step()
            barrier.wait(10)

    with running_syncer(sync_every=1000, fragments=2) as syncer:
        run_all([lambda m=m: job(m, syncer) for m in range(2)])
        final = global_model(syncer)
    assert sorted(final) == [
        "embed.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.weight",
    ]  # fmt: skip
    for m, zoo in enumerate(zoos):
        assert torch.equal(zoo.frozen.weight, frozen[m])
        assert zoo.head.weight is zoo.embed.weight
        assert int(zoo.norm.num_batches_tracked) == 3 + m
    means = [zoo.norm.running_mean for zoo in zoos]
    assert float(final["norm.running_mean"].abs().max()) > 0
    # the last one to leave holds the global statistics, which lie between what both had seen
    assert any(torch.equal(final["norm.running_mean"], mean) for mean in means)


def test_buffers_stay_at_home_when_the_run_says_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with running_syncer(buffers="local") as syncer:
        diloco_plugin.attach(model, sgd(model), syncer.address, name="a").close()
        assert not any("running" in name for name in global_model(syncer))


def test_an_untrained_bf16_learner_has_nothing_to_give() -> None:
    """The base is the value as cast; against the uncast one, rounding would look like work."""
    exact = small_model(1)
    rounded = small_model(2).to(torch.bfloat16)
    with running_syncer(sync_every=4, fragments=1, overlap=1) as syncer:
        first = diloco_plugin.attach(exact, sgd(exact), syncer.address, name="exact")
        until(lambda: syncer.status()["state"] == "running")
        before = global_model(syncer)
        second = diloco_plugin.attach(rounded, sgd(rounded, 0.0), syncer.address, name="rounded")
        constant_steps(rounded, second._optimizers[0], 40)
        second.close()
        after = global_model(syncer)
        assert syncer.status()["rounds"]["merged"] >= 1
        first.abandon()
    assert all(torch.equal(before[name], after[name]) for name in before)
    cast = [t.to(torch.bfloat16) for t in before.values()]
    assert any(not torch.equal(t.float(), before[n]) for t, n in zip(cast, before, strict=True))


def test_updates_too_small_for_bf16_accumulate_in_the_global_model() -> None:
    """Near 1.0 bf16 moves in steps of 2**-8; each round here is worth an eighth of one."""
    whole, half = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        whole.weight.fill_(1.0)
    step = 2.0**-10

    def job(model: nn.Module, lr: float, name: str, address: str) -> None:
        optimizer = sgd(model, lr)
        with diloco_plugin.attach(model, optimizer, address, name=name):
            constant_steps(model, optimizer, 8)

    with running_syncer(**LOCKSTEP_ONE | {"learners": 2}) as syncer:
        lead = diloco_plugin.attach(whole, sgd(whole, step), syncer.address, name="whole")
        follow = threading.Thread(target=job, args=(half, 0.0, "half", syncer.address))
        follow.start()
        wait_until_live(syncer, 2)
        constant_steps(whole, lead._optimizers[0], 8)
        lead.close()
        follow.join(20)
        final = global_model(syncer)["weight"]
    assert largest_difference([final], [torch.full((4, 4), 1.0 - 8 * step / 2)]) < 1e-6
    assert torch.equal(half.weight.detach(), final.to(torch.bfloat16))


def test_bf16_on_the_wire_is_rounded_and_closing_is_exact() -> None:
    model = small_model(1)
    with running_syncer(codec="bf16", sync_every=4, fragments=2) as syncer:
        optimizer = sgd(model)
        with diloco_plugin.attach(model, optimizer, syncer.address, name="a"):
            for batch in batches(0, 30):
                train_step(model, optimizer, batch)
        final = global_model(syncer)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), final[name])
        if name.endswith("weight"):
            assert not torch.equal(parameter.detach(), parameter.detach().bfloat16().float())
