"""Steps that moved parameters are counted, once; nothing else is."""

from __future__ import annotations

import ast
import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diloco_plugin
from diloco_plugin.errors import UnsupportedError
from diloco_plugin.learner.counting import (
    StepCounter,
    refuse_unsupported,
    unknown_parameters,
    unwrap,
)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def backward(model: nn.Module) -> Tensor:
    model.zero_grad()
    loss: Tensor = model(torch.randn(3, 4)).square().mean()
    loss.backward()
    return loss


def overflow(model: nn.Module) -> None:
    gradient = next(model.parameters()).grad
    assert gradient is not None
    gradient.fill_(float("inf"))


def counted(counter: StepCounter, step: Callable[[], object], times: int) -> int:
    total = 0
    for _ in range(times):
        step()
        total += counter.take()
    return total


class CallsSuper(torch.optim.SGD):
    """A subclass whose step is hooked by torch a second time."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class DuckTyped:
    """Like schedule-free's wrapper: no Optimizer, but one inside."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self.param_groups = base.param_groups

    def step(self) -> None:
        self.base.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    ],
)
def test_every_step_counts_once(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = make_model()
    optimizer = make(model.parameters())
    counter = StepCounter([optimizer], model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step() -> None:
        backward(model)
        optimizer.step()
        schedule.step()

    assert counted(counter, step, 5) == 5
    assert counter.total_hook_calls == 5
    assert not counter.take()


def test_reading_moved_does_not_reset_it() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counter = StepCounter([optimizer], model.parameters())
    assert not counter.moved
    optimizer.step()
    assert counter.moved
    assert counter.moved
    assert counter.take()
    assert not counter.moved


def test_super_step_does_not_fire_twice() -> None:
    # The base class is hooked when it is first instantiated: then the step of the subclass nests.
    torch.optim.SGD(make_model().parameters(), lr=0.1)
    model = make_model()
    optimizer = CallsSuper(model.parameters(), lr=0.1)
    calls: list[int] = []
    counter = StepCounter([optimizer], model.parameters(), on_step=lambda: calls.append(1))

    def step() -> None:
        backward(model)
        optimizer.step()

    assert counted(counter, step, 5) == 5
    assert counter.total_hook_calls == 5
    assert len(calls) == 5


def test_a_step_that_raised_does_not_silence_the_next_ones() -> None:
    model = make_model()
    optimizer = CallsSuper(model.parameters(), lr=0.1)
    calls: list[int] = []
    counter = StepCounter([optimizer], model.parameters(), on_step=lambda: calls.append(1))

    def out_of_memory() -> float:
        raise RuntimeError("out of memory")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step(out_of_memory)
    assert not counter.take()
    backward(model)
    optimizer.step()
    assert counter.take()
    assert len(calls) == 1


def test_a_step_that_raised_keeps_nothing_of_its_caller_alive() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counter = StepCounter([optimizer], model.parameters())

    class Activations:
        pass

    def train() -> weakref.ref[Activations]:
        activations = Activations()

        def out_of_memory() -> float:
            raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step(out_of_memory)
        return weakref.ref(activations)

    left = train()
    gc.collect()
    assert left() is None
    assert not counter.moved


def test_lbfgs_with_closure_counts_once_per_step() -> None:
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=8)
    counter = StepCounter([optimizer], model.parameters())
    evaluations = 0

    def closure() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        return backward(model)

    step: Any = optimizer.step
    assert counted(counter, lambda: step(closure), 3) == 3
    assert evaluations > 3
    assert counter.total_hook_calls == 3


@pytest.mark.parametrize("fused", [False, True])
def test_steps_skipped_by_amp_do_not_count(fused: bool) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    counter = StepCounter([optimizer], model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    told, moved = [], []
    for batch in range(6):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(3, 4)).square().mean()).backward()
        if batch in (1, 4):
            overflow(model)
        scaler.step(optimizer)
        scaler.update()
        told.append(counter.take())
        moved.append(
            any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        )
    assert told == moved == [True, False, True, True, False, True]


def test_a_fused_step_that_amp_skipped_does_not_call_on_step() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    calls: list[int] = []
    StepCounter([optimizer], model.parameters(), on_step=lambda: calls.append(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.randn(3, 4)).square().mean()).backward()
    overflow(model)
    scaler.step(optimizer)
    assert calls == []


def test_attaching_twice_over_the_same_optimizer_counts_once() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counter = StepCounter([optimizer, optimizer], model.parameters())
    counter.attach([optimizer])
    optimizer.step()
    assert counter.total_hook_calls == 1


def test_a_counter_leaked_by_an_earlier_fit_is_silenced_by_the_next() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acted: list[str] = []
    leaked = StepCounter([optimizer], model.parameters(), on_step=lambda: acted.append("old"))
    current = StepCounter([optimizer], model.parameters(), on_step=lambda: acted.append("new"))
    optimizer.step()
    assert acted == ["new"]
    assert (leaked.take(), current.take()) == (False, True)
    leaked.detach()
    optimizer.step()
    assert current.take()


def test_detach_leaves_no_hook_behind() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counter = StepCounter([optimizer], model.parameters())
    counter.detach()
    counter.detach()
    optimizer.step()
    assert not counter.moved
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_loading_optimizer_state_keeps_counting() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    counter = StepCounter([optimizer], model.parameters())
    backward(model)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    assert counter.total_hook_calls == 2


def test_several_optimizers_make_one_stepping_batch() -> None:
    first, second = make_model(), make_model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    counter = StepCounter(optimizers, [*first.parameters(), *second.parameters()])

    def batch() -> None:
        for optimizer in optimizers:
            optimizer.step()

    assert counted(counter, batch, 4) == 4
    assert counter.total_hook_calls == 8


def test_acting_inside_the_step_is_refused_with_several_optimizers() -> None:
    model = make_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(UnsupportedError, match=r"exactly one optimizer.*learner\.boundary"):
        StepCounter(optimizers, model.parameters(), on_step=lambda: None)


def test_acting_inside_the_step_is_refused_without_hooks() -> None:
    # The inner step of a wrapper is not its last write.
    model = make_model()
    wrapper = DuckTyped(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UnsupportedError, match="DuckTyped"):
        StepCounter([wrapper], model.parameters(), on_step=lambda: None)


def test_duck_typed_optimizers_are_counted_and_strangers_are_not() -> None:
    model, stranger = make_model(), make_model()
    wrapper = DuckTyped(torch.optim.SGD(model.parameters(), lr=0.1))
    outer = torch.optim.SGD(stranger.parameters(), lr=0.1)
    counter = StepCounter([wrapper], model.parameters())
    outer.step()
    assert not counter.moved
    wrapper.step()
    assert counter.take()
    counter.detach()
    wrapper.step()
    assert not counter.moved


def test_on_step_runs_after_the_parameters_moved_with_grad_mode_on() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = next(model.parameters())
    before = weight.detach().clone()
    seen: list[tuple[bool, bool]] = []
    StepCounter(
        [optimizer],
        model.parameters(),
        on_step=lambda: seen.append((torch.equal(weight, before), torch.is_grad_enabled())),
    )
    backward(model)
    optimizer.step()
    assert seen == [(False, True)]


def test_accelerate_wrappers_are_unwrapped() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    wrapped = accelerate.Accelerator(cpu=True).prepare(inner)
    assert type(wrapped).__name__ == "AcceleratedOptimizer"
    assert unwrap(wrapped) is inner
    counter = StepCounter([wrapped], model.parameters())

    def step() -> None:
        backward(model)
        wrapped.step()

    assert counted(counter, step, 3) == 3
    refuse_unsupported([wrapped])


def test_lightning_wrappers_are_unwrapped() -> None:
    module = pytest.importorskip("lightning.pytorch.core.optimizer")
    inner = torch.optim.SGD(make_model().parameters(), lr=0.1)
    assert unwrap(module.LightningOptimizer(inner)) is inner


def test_fabric_wrappers_are_unwrapped() -> None:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    _, wrapped = fabric.setup(model, inner)
    assert wrapped is not inner
    assert unwrap(wrapped) is inner


def test_lookahead_is_not_unwrapped() -> None:
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer.param_groups, {})
            self.optimizer = optimizer

    outer = Lookahead(torch.optim.SGD(make_model().parameters(), lr=0.1))
    assert unwrap(outer) is outer


def test_a_compiled_step_is_counted() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counter = StepCounter([optimizer], model.parameters())
    compiled = torch.compile(optimizer.step, backend="eager")

    def step() -> None:
        backward(model)
        compiled()

    assert counted(counter, step, 4) == 4


class FP16_Optimizer:
    pass


class HoldsMasters(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.fp32_from_fp16_groups = [[torch.zeros(1)]]


class InDeepSpeed(torch.optim.SGD):
    __module__ = "deepspeed.runtime.zero.stage_1_and_2"


class MasterSwitch(torch.optim.SGD):
    master_weights = False


def test_optimizers_with_master_weights_are_refused_with_the_reason() -> None:
    parameters = list(make_model().parameters())
    with pytest.raises(UnsupportedError, match=r"FP16_Optimizer.*copy of the weights"):
        refuse_unsupported([FP16_Optimizer()])
    with pytest.raises(UnsupportedError, match="fp32_from_fp16_groups"):
        refuse_unsupported([HoldsMasters(parameters)])
    with pytest.raises(UnsupportedError, match=r"InDeepSpeed.*DeepSpeed's engine"):
        refuse_unsupported([InDeepSpeed(parameters, lr=0.1)])


def test_a_refused_optimizer_is_found_inside_a_wrapper() -> None:
    class Wrapper:
        optimizer = FP16_Optimizer()

    with pytest.raises(UnsupportedError, match="FP16_Optimizer"):
        refuse_unsupported([Wrapper()])


def test_accelerates_deepspeed_wrapper_is_refused() -> None:
    module = pytest.importorskip("accelerate.utils.deepspeed")
    inner = torch.optim.SGD(make_model().parameters(), lr=0.1)
    wrapper = module.DeepSpeedOptimizerWrapper.__new__(module.DeepSpeedOptimizerWrapper)
    wrapper.optimizer = inner
    with pytest.raises(UnsupportedError, match="DeepSpeed"):
        refuse_unsupported([wrapper])


def test_ordinary_optimizers_are_not_refused() -> None:
    parameters = list(make_model().parameters())
    refuse_unsupported(
        [
            torch.optim.SGD(parameters, lr=0.1),
            torch.optim.AdamW(parameters, fused=True),
            torch.optim.LBFGS(parameters),
            MasterSwitch(parameters, lr=0.1),
            DuckTyped(torch.optim.SGD(parameters, lr=0.1)),
        ]
    )


def test_a_parameter_that_enters_the_optimizer_later_is_reported() -> None:
    model = make_model()
    known = list(model[0].parameters())
    optimizer = torch.optim.SGD(known, lr=0.1)
    assert unknown_parameters([optimizer], known) == []
    late = list(model[2].parameters())
    optimizer.add_param_group({"params": late})
    found = unknown_parameters([optimizer, optimizer], known)
    assert [id(p) for p in found] == [id(p) for p in late]


def test_nobody_writes_behind_autograds_back() -> None:
    # Writing through .data gives silently wrong gradients where a plain write raises.
    package = Path(diloco_plugin.__file__).parent
    integrations = package.parent / "integrations"
    offenders = [
        f"{path}:{node.lineno}"
        for root in (package / "learner", package / "tensors", integrations)
        for path in sorted(root.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "data"
    ]
    assert offenders == []
