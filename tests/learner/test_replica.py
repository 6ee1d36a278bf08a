"""The numbers of a learner: what leaves it, what arrives, and what they are measured against."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco_plugin.errors import LayoutError, UnsupportedError
from diloco_plugin.learner.replica import CAST_BLOCK, Buffer, Replica
from diloco_plugin.tensors.layout import TensorSpec, build_layout, census


def replica_of(model: nn.Module, fragments: int = 1, **options: int) -> Replica:
    found = census(model)
    return Replica(build_layout(found.specs, fragments), found.tensors, **options)


def replica_of_tensors(tensors: Mapping[str, Tensor], kind: str = "weight") -> Replica:
    specs = [
        TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), kind)
        for name, t in tensors.items()
    ]
    return Replica(build_layout(specs, 1), tensors)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def filled(buffer: Buffer | None, values: Tensor) -> Buffer:
    assert buffer is not None
    buffer.flat[: len(values)].copy_(values)
    return buffer


def local_values(replica: Replica, fragment: int = 0) -> Tensor:
    buffer = replica.take_staging()
    assert buffer is not None
    replica.snapshot(fragment, buffer)
    values = buffer.flat[: replica.layout.fragments[fragment].elements].clone()
    replica.give_back(buffer)
    return values


def pseudo_gradient(replica: Replica, fragment: int = 0) -> Tensor:
    buffer = replica.take_staging()
    assert buffer is not None
    replica.snapshot(fragment, buffer)
    elements = replica.layout.fragments[fragment].elements
    out = torch.full((elements,), float("nan"))
    replica.difference(fragment, buffer, 0, elements, out)
    replica.give_back(buffer)
    return out


def merge(replica: Replica, values: Tensor, alpha: float = 0.0, optimizers: Any = ()) -> None:
    buffer = filled(replica.take_arrival(), values)
    replica.apply(0, buffer, alpha, optimizers)
    replica.rebase(0, buffer)
    replica.give_back(buffer)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    model(torch.randn(16, 8, dtype=dtype)).square().mean().backward()
    optimizer.step()


# Buffers.


def test_buffers_are_lent_one_at_a_time() -> None:
    replica = replica_of(make_model(), staging=1, arrivals=2)
    staging = replica.take_staging()
    assert staging is not None
    assert replica.take_staging() is None
    arrivals = [replica.take_arrival(), replica.take_arrival()]
    assert replica.take_arrival() is None
    replica.give_back(staging)
    assert replica.take_staging() is staging
    assert arrivals[0] is not arrivals[1]


def test_giving_a_buffer_back_twice_raises() -> None:
    replica = replica_of(make_model())
    buffer = replica.take_staging()
    assert buffer is not None
    replica.give_back(buffer)
    with pytest.raises(ValueError, match="twice"):
        replica.give_back(buffer)


def test_a_buffer_fits_the_largest_fragment() -> None:
    replica = replica_of(make_model(), fragments=3)
    buffer = replica.take_arrival()
    assert buffer is not None
    assert buffer.flat.numel() == max(f.elements for f in replica.layout.fragments)


def test_two_threads_never_get_the_same_buffer() -> None:
    replica = replica_of(make_model(), staging=2)
    taken: list[int] = []
    clashes: list[int] = []

    def borrow() -> None:
        for _ in range(2000):
            buffer = replica.take_staging()
            if buffer is None:
                continue
            if id(buffer) in taken:
                clashes.append(1)
            taken.append(id(buffer))
            taken.remove(id(buffer))
            replica.give_back(buffer)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=borrow) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert clashes == []


# Out: snapshot and pseudo-gradient.


def test_the_pseudo_gradient_is_base_minus_local() -> None:
    model = make_model()
    replica = replica_of(model)
    before = local_values(replica)
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    after = local_values(replica)
    assert not torch.equal(before, after)
    assert torch.equal(pseudo_gradient(replica), before - after)


def test_a_difference_of_a_part_fills_the_head_of_the_output_only() -> None:
    model = make_model()
    replica = replica_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(1.0)
    buffer = replica.take_staging()
    assert buffer is not None
    replica.snapshot(0, buffer)
    out = torch.zeros(10)
    where = out.data_ptr()
    replica.difference(0, buffer, 20, 27, out)
    assert torch.allclose(out, torch.tensor([1.0] * 7 + [0.0] * 3))
    assert out.data_ptr() == where


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_an_untrained_learner_has_no_pseudo_gradient(dtype: torch.dtype) -> None:
    model = make_model().to(dtype)
    replica = replica_of(model)
    assert torch.count_nonzero(pseudo_gradient(replica)) == 0
    merge(replica, torch.randn(replica.layout.elements))
    assert torch.count_nonzero(pseudo_gradient(replica)) == 0


def test_rounding_to_bf16_never_looks_like_a_pseudo_gradient() -> None:
    # Several cast blocks, an odd rest, and neighbors of another dtype.
    tensors = {
        "a": nn.Parameter(torch.zeros(5)),
        "b": nn.Parameter(torch.zeros(2 * CAST_BLOCK + 3, dtype=torch.bfloat16)),
        "c": nn.Parameter(torch.zeros(7, dtype=torch.bfloat16)),
        "d": nn.Parameter(torch.zeros(3, dtype=torch.float16)),
        "e": nn.Parameter(torch.zeros(3, dtype=torch.float64)),
    }
    replica = replica_of_tensors(tensors)
    values = torch.randn(replica.layout.elements)
    merge(replica, values)
    assert torch.equal(tensors["b"].detach(), values[5 : 8 + 2 * CAST_BLOCK].bfloat16())
    assert torch.count_nonzero(pseudo_gradient(replica)) == 0


# In: apply and rebase.


def test_alpha_zero_overwrites_to_the_bit() -> None:
    model = make_model()
    replica = replica_of(model)
    values = torch.randn(replica.layout.elements)
    merge(replica, values)
    assert torch.equal(local_values(replica), values)
    assert torch.equal(replica.base_slice(0, 3, 9), values[3:9])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_alpha_blends_in_fp32_and_then_casts(dtype: torch.dtype) -> None:
    model = make_model().to(dtype)
    replica = replica_of(model)
    local, values = local_values(replica), torch.randn(replica.layout.elements)
    merge(replica, values, alpha=0.25)
    expected = torch.lerp(local, values, 0.75).to(dtype).float()
    assert torch.equal(local_values(replica), expected)
    assert torch.allclose(expected, 0.25 * local + 0.75 * values, atol=0.02)
    # The base is the global value, not the blend: what was kept is still this learner's progress.
    assert torch.equal(replica.base_slice(0, 0, len(values)), values.to(dtype).float())


def test_alpha_never_changes_the_arrived_values() -> None:
    model = make_model()
    replica = replica_of(model)
    values = torch.randn(replica.layout.elements)
    buffer = filled(replica.take_arrival(), values)
    replica.apply(0, buffer, 0.5)
    assert torch.equal(buffer.flat[: len(values)], values)


def test_buffers_of_the_model_are_overwritten_whatever_alpha_is() -> None:
    model = nn.BatchNorm1d(6)
    replica = replica_of(model)
    fragment = replica.layout.fragments[0]
    merge(replica, torch.full((fragment.elements,), 4.0), alpha=0.5)
    assert model.running_mean is not None
    assert model.running_var is not None
    assert torch.equal(model.running_mean, torch.full((6,), 4.0))
    assert torch.equal(model.running_var, torch.full((6,), 4.0))
    assert torch.equal(model.weight.detach(), torch.full((6,), 2.5))


def test_only_the_given_fragment_changes() -> None:
    model = make_model()
    replica = replica_of(model, fragments=2)
    other = local_values(replica, 1)
    merge(replica, torch.randn(replica.layout.fragments[0].elements))
    assert torch.equal(local_values(replica, 1), other)
    assert torch.equal(replica.base_slice(1, 0, len(other)), other)


def test_every_kind_of_plain_tensor_is_written_in_place() -> None:
    tensors = {
        "channels_last": nn.Parameter(
            torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
        ),
        "scalar": nn.Parameter(torch.tensor(0.5)),
        "transposed": nn.Parameter(torch.randn(5, 7).t()),
        "wide": nn.Parameter(torch.randn(3, dtype=torch.float64)),
    }
    strides = {name: t.stride() for name, t in tensors.items()}
    replica = replica_of_tensors(tensors)
    for alpha in (0.0, 0.5):
        local, values = local_values(replica), torch.randn(replica.layout.elements)
        merge(replica, values, alpha=alpha)
        expected = alpha * local + (1 - alpha) * values
        assert torch.allclose(local_values(replica), expected, atol=1e-6)
    for slot in replica.layout.fragments[0].slots:
        part = local_values(replica)[slot.start : slot.stop].view(slot.spec.shape)
        assert torch.equal(tensors[slot.spec.name].detach().float(), part)
    assert {name: t.stride() for name, t in tensors.items()} == strides


def test_an_expanded_tensor_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"expanded.*clone"):
        replica_of_tensors({"w": torch.zeros(1).expand(4)})


def test_a_model_that_does_not_fit_the_layout_is_refused() -> None:
    layout = replica_of(make_model()).layout
    with pytest.raises(LayoutError, match="not in this model"):
        Replica(layout, {})
    with pytest.raises(LayoutError, match=r"has shape \(1,\)"):
        Replica(layout, {s.spec.name: torch.zeros(1) for s in layout.fragments[0].slots})


def test_a_parameter_that_was_cast_after_attaching_is_still_synced() -> None:
    model = make_model()
    replica = replica_of(model)
    model.to(torch.bfloat16)
    values = torch.randn(replica.layout.elements)
    merge(replica, values)
    assert next(model.parameters()).dtype is torch.bfloat16
    assert torch.equal(local_values(replica), values.bfloat16().float())
    assert torch.count_nonzero(pseudo_gradient(replica)) == 0


def test_rebase_rounds_as_apply_did_even_if_the_model_was_cast_in_between() -> None:
    model = make_model()
    replica = replica_of(model)
    values = torch.randn(replica.layout.elements)
    buffer = filled(replica.take_arrival(), values)
    replica.apply(0, buffer, 0.0)
    model.to(torch.bfloat16)
    replica.rebase(0, buffer)
    assert torch.equal(replica.base_slice(0, 0, len(values)), values)


def test_rebind_follows_buffers_that_a_cast_replaced() -> None:
    model = nn.BatchNorm1d(3)
    replica = replica_of(model)
    model.to(torch.float64)
    replica.rebind(census(model).tensors)
    merge(replica, torch.full((replica.layout.elements,), 2.0))
    assert model.running_mean is not None
    assert torch.equal(model.running_mean, torch.full((3,), 2.0, dtype=torch.float64))


def test_the_base_can_be_captured_and_written_back() -> None:
    model = make_model()
    replica = replica_of(model)
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.5))
    replica.capture_base(0)
    captured = local_values(replica)
    assert torch.count_nonzero(pseudo_gradient(replica)) == 0
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.5))
    replica.overwrite_with_base(0)
    assert torch.equal(local_values(replica), captured)


def test_a_merge_between_forward_and_backward_raises() -> None:
    model = make_model()
    replica = replica_of(model)
    loss = model(torch.randn(3, 8)).square().mean()
    merge(replica, torch.randn(replica.layout.elements))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_merge_works_with_grad_mode_on_and_leaves_no_graph() -> None:
    model = make_model()
    replica = replica_of(model)
    for alpha in (0.0, 0.5):
        with torch.enable_grad():
            merge(replica, torch.randn(replica.layout.elements), alpha=alpha)
    assert all(p.is_leaf and p.requires_grad for p in model.parameters())
    assert not pseudo_gradient(replica).requires_grad


# Optimizers that have their own idea of the weights.


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: the parameter is computed from z and x; most versions do without x."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                z.sub_(p.grad, alpha=group["lr"])
                p.lerp_(z, 0.5)


class ScheduleFreeReference(ScheduleFree):
    """The version with x, as in the paper."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                x = self.state[p].setdefault("x", p.detach().clone())
                z.sub_(p.grad, alpha=group["lr"])
                x.lerp_(z, 0.5)
                p.copy_(x.lerp(z, 0.1))


class Masters(torch.optim.Optimizer):
    """Steps an fp32 copy and writes it over the parameters, as Apex, Megatron and DeepSpeed do."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})
        self.copies = {p: p.detach().float().clone() for p in self.param_groups[0]["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p, copy in self.copies.items():
            copy.sub_(p.grad.float(), alpha=self.param_groups[0]["lr"])
            p.copy_(copy)


class HomeMade(torch.optim.SGD):
    """Not torch's own class, so it is looked at."""


class HomeMadeAdam(torch.optim.AdamW):
    """The same for the optimizer that people use."""


@pytest.mark.parametrize("kind", [ScheduleFree, ScheduleFreeReference])
def test_schedule_free_keeps_a_merge(kind: type[ScheduleFree]) -> None:
    model = make_model()
    optimizer = kind(model.parameters())
    replica = replica_of(model)
    train_step(model, optimizer)
    values = torch.randn(replica.layout.elements)
    gaps = [optimizer.state[p]["z"] - p.detach() for p in model.parameters()]
    merge(replica, values, optimizers=[optimizer])
    for p, gap in zip(model.parameters(), gaps, strict=True):
        assert torch.allclose(optimizer.state[p]["z"] - p.detach(), gap, atol=1e-6)
    train_step(model, optimizer)
    replica.after_step()
    assert float((local_values(replica) - values).norm() / values.norm()) < 0.05


def test_schedule_free_is_recognized_after_a_merge_before_the_first_step() -> None:
    model = make_model()
    optimizer = ScheduleFree(model.parameters())
    replica = replica_of(model)
    merge(replica, torch.randn(replica.layout.elements), optimizers=[optimizer])
    assert not optimizer.state
    train_step(model, optimizer)
    before = [optimizer.state[p]["z"].clone() for p in model.parameters()]
    merge(replica, torch.randn(replica.layout.elements), optimizers=[optimizer])
    after = [optimizer.state[p]["z"] for p in model.parameters()]
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_other_optimizers_keep_their_state_as_it_is() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    replica = replica_of(model)
    train_step(model, optimizer)
    before = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    merge(replica, torch.randn(replica.layout.elements), optimizers=[optimizer])
    assert set(optimizer.state) == set(before)
    for p, state in before.items():
        assert all(torch.equal(optimizer.state[p][k], v) for k, v in state.items())


def merges_and_steps(
    make: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    *,
    dtype: torch.dtype = torch.float32,
    jump: float = 0.1,
    merges: int = 3,
    alpha: float = 0.0,
) -> None:
    model = make_model().to(dtype)
    optimizer = make(model.parameters())
    replica = replica_of(model)
    for _ in range(merges):
        for _ in range(2):
            train_step(model, optimizer)
            replica.after_step()
        local = local_values(replica)
        merge(replica, local + jump * torch.randn(len(local)), alpha, [optimizer])
    train_step(model, optimizer)
    replica.after_step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_an_optimizer_with_master_weights_is_refused_after_a_merge(
    dtype: torch.dtype, alpha: float
) -> None:
    with pytest.raises(UnsupportedError, match=r"its own copy of the weights.*Train with"):
        merges_and_steps(Masters, dtype=dtype, merges=1, alpha=alpha)


def test_master_weights_are_noticed_when_the_first_merge_was_too_small_to_tell() -> None:
    model = make_model()
    optimizer = Masters(model.parameters())
    replica = replica_of(model)
    train_step(model, optimizer)
    merge(replica, local_values(replica), optimizers=[optimizer])
    train_step(model, optimizer)
    replica.after_step()
    merge(replica, torch.randn(replica.layout.elements), optimizers=[optimizer])
    train_step(model, optimizer)
    with pytest.raises(UnsupportedError):
        replica.after_step()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: HomeMade(p, lr=0.1),
        lambda p: HomeMade(p, lr=10.0),
        lambda p: HomeMade(p, lr=0.5, momentum=0.9),
        lambda p: HomeMadeAdam(p, lr=1e-3),
        lambda p: HomeMadeAdam(p, lr=0.5),
        lambda p: HomeMade(p, lr=0.0),
        ScheduleFree,
        ScheduleFreeReference,
    ],
)
@pytest.mark.parametrize("jump", [1e-6, 1e-3, 0.1, 3.0])
def test_plain_optimizers_are_not_mistaken_for_it(
    make: Callable[[Iterable[Tensor]], torch.optim.Optimizer], jump: float
) -> None:
    merges_and_steps(make, jump=jump)


def test_torchs_own_optimizers_are_trusted_even_if_a_step_goes_straight_back() -> None:
    # One step of lr = 1 / curvature on a quadratic lands exactly where it was before the merge.
    weight = nn.Parameter(torch.ones(64))
    replica = replica_of_tensors({"w": weight})
    optimizer = torch.optim.SGD([weight], lr=1.0)
    merge(replica, torch.zeros(64), optimizers=[optimizer])
    loss: Tensor = 0.5 * (weight - 1.0).square().sum()
    loss.backward()
    optimizer.step()
    assert torch.equal(weight.detach(), torch.ones(64))
    replica.after_step()


def test_watching_again_judges_the_next_optimizer_afresh() -> None:
    model = make_model()
    replica = replica_of(model)
    trusted = torch.optim.SGD(model.parameters())
    merge(replica, torch.randn(replica.layout.elements), optimizers=[trusted])
    replica.watch_for_master_weights()
    optimizer = Masters(model.parameters())
    merge(replica, torch.randn(replica.layout.elements), optimizers=[optimizer])
    train_step(model, optimizer)
    with pytest.raises(UnsupportedError):
        replica.after_step()
