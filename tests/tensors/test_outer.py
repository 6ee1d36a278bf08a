from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco_plugin.errors import ConfigError, LayoutError
from diloco_plugin.tensors.layout import BUFFER, Layout
from diloco_plugin.tensors.outer import OuterOptimizer, check_outer

from . import reference

#: Every torch.optim class that takes a dense gradient of any shape.
GENERAL = [
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD",
]  # fmt: skip
GENERAL = [name for name in GENERAL if hasattr(torch.optim, name)]


def one_fragment() -> tuple[Layout, Tensor]:
    layout = reference.layout_of(
        reference.spec("a", 5, 7), reference.spec("b", 9), reference.spec("c", 4, kind=BUFFER)
    )
    return layout, torch.randn(layout.elements)


def gradients(count: int, elements: int) -> list[Tensor]:
    return [torch.randn(elements) * 1e-2 for _ in range(count)]


def snapshot(outer: OuterOptimizer) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in outer.state(0).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.5), (0.7, 0.9), (1.0, 0.0)])
def test_sgd_follows_the_hand_written_loop(lr: float, momentum: float) -> None:
    layout, theta = one_fragment()
    rounds = gradients(8, layout.elements)
    expected = reference.nesterov(theta, rounds, lr=lr, momentum=momentum)
    outer = OuterOptimizer(layout, [theta], lr=lr, momentum=momentum)
    for gradient, after in zip(rounds, expected, strict=True):
        assert outer.step(0, gradient)
        assert torch.allclose(theta[:44].double(), after[:44], rtol=0.0, atol=1e-6)


def test_heavy_ball_differs_from_nesterov() -> None:
    layout, theta = one_fragment()
    start, (gradient,) = theta.clone(), gradients(1, layout.elements)
    OuterOptimizer(layout, [theta], lr=1.0, momentum=0.5, nesterov=False).step(0, gradient)
    assert torch.allclose(theta, start - gradient)


def test_buffers_take_the_mean_and_no_optimizer() -> None:
    layout, theta = one_fragment()
    expected = theta[44:].clone()
    outer = OuterOptimizer(layout, [theta])
    for gradient in gradients(3, layout.elements):
        expected -= gradient[44:]
        outer.step(0, gradient.clone())
        assert torch.equal(theta[44:], expected)
    assert all(key.startswith(("a/", "b/")) for key in outer.state(0))


def test_a_fragment_of_buffers_only_works() -> None:
    layout = reference.layout_of(reference.spec("c", 4, kind=BUFFER))
    theta = torch.ones(4)
    outer = OuterOptimizer(layout, [theta])
    assert outer.step(0, torch.ones(4))
    assert not theta.any()
    assert outer.state(0) == {}
    outer.load_state(0, {})


@pytest.mark.parametrize("name", GENERAL)
def test_any_torch_optimizer_works_and_equals_itself_on_plain_parameters(name: str) -> None:
    layout, theta = one_fragment()
    rounds = gradients(4, layout.elements)
    options = {"foreach": True}  # other kernels than the ones compared with
    outer = OuterOptimizer(layout, [theta.clone()], optimizer=name, lr=0.01, options=options)
    theta_outer = outer._parts[0].theta
    a, b = (torch.nn.Parameter(t.clone()) for t in (theta[:35].view(5, 7), theta[35:44]))
    settings: dict[str, Any] = {"momentum": 0.5, "nesterov": True} if name == "SGD" else {}
    plain = getattr(torch.optim, name)([a, b], lr=0.01, **settings)
    for gradient in rounds:
        a.grad, b.grad = gradient[:35].view(5, 7).clone(), gradient[35:44].clone()
        plain.step()
        assert outer.step(0, gradient.clone())
    expected = torch.cat([a.detach().flatten(), b.detach()])
    assert torch.allclose(theta_outer[:44], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_an_optimizer_that_refuses_the_model_says_so_at_construction() -> None:
    matrices = reference.layout_of(reference.spec("a", 4, 4))
    theta = torch.randn(16)
    assert OuterOptimizer(matrices, [theta], optimizer="Muon", lr=0.02).step(0, torch.ones(16))
    layout, theta = one_fragment()
    with pytest.raises(ConfigError, match=r"Muon.*refuses this model"):
        OuterOptimizer(layout, [theta], optimizer="Muon", lr=0.02)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_closing_step_leaves_the_state_alone(name: str) -> None:
    layout, theta = one_fragment()
    outer = OuterOptimizer(layout, [theta], optimizer=name)
    first, closing = gradients(2, layout.elements)
    outer.step(0, first)
    before, state = theta.clone(), snapshot(outer)
    assert outer.close(0, closing)
    assert torch.equal(theta, before - closing)
    assert state
    assert same(snapshot(outer), state)


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "NAdam"])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_a_result_that_is_not_finite_never_lands(name: str, warm: bool, value: float) -> None:
    layout, theta = one_fragment()
    theta[0] = -3e38
    outer = OuterOptimizer(layout, [theta], optimizer=name, lr=1.0)
    good = gradients(1, layout.elements)[0]
    if warm:
        assert outer.step(0, good.clone())
    before, state = theta.clone(), snapshot(outer)
    bad = good.clone()
    bad[0] = value
    assert outer.step(0, bad.clone()) is False
    assert torch.equal(theta, before)
    assert same(snapshot(outer), state)
    assert outer.close(0, bad) is False
    assert torch.equal(theta, before)
    assert outer.step(0, good)


def test_the_gradient_is_not_kept() -> None:
    layout, theta = one_fragment()
    outer = OuterOptimizer(layout, [theta])
    memory = torch.ones(layout.elements)
    outer.step(0, memory)
    state = snapshot(outer)
    memory.fill_(math.nan)
    assert same(snapshot(outer), state)
    assert all(p.grad is None for p in outer._parts[0].parameters.values())


def test_fragments_are_stepped_one_by_one() -> None:
    layout = reference.layout_of(*(reference.spec(c, 4) for c in "abc"), fragments=3)
    theta = [torch.zeros(4) for _ in range(3)]
    outer = OuterOptimizer(layout, theta, lr=1.0, momentum=0.0)
    outer.step(1, torch.ones(4))
    assert [float(flat.sum()) for flat in theta] == [0.0, -4.0, 0.0]
    assert outer.state(0) == {}


@pytest.mark.parametrize("name", GENERAL)
def test_training_continues_from_saved_state_as_if_it_had_not_stopped(name: str) -> None:
    layout, theta = one_fragment()
    rounds = gradients(4, layout.elements)
    outer = OuterOptimizer(layout, [theta], optimizer=name, lr=0.01)
    for gradient in rounds[:2]:
        outer.step(0, gradient.clone())
    resumed_theta = theta.clone()
    resumed = OuterOptimizer(layout, [resumed_theta], optimizer=name, lr=0.01)
    resumed.load_state(0, outer.state(0))
    for gradient in rounds[2:]:
        outer.step(0, gradient.clone())
        resumed.step(0, gradient.clone())
    assert torch.equal(theta, resumed_theta)


def test_state_of_something_else_is_refused_and_changes_nothing() -> None:
    layout, theta = one_fragment()
    adam = OuterOptimizer(layout, [theta.clone()], optimizer="Adam")
    outer = OuterOptimizer(layout, [theta])
    gradient = gradients(1, layout.elements)[0]
    adam.step(0, gradient.clone())
    outer.step(0, gradient)
    state = snapshot(outer)
    with pytest.raises(ConfigError, match=r"exp_avg.*momentum_buffer"):
        outer.load_state(0, adam.state(0))
    with pytest.raises(ConfigError, match="momentum_buffer"):
        outer.load_state(0, {"a/momentum_buffer": torch.zeros(7, 5)})
    with pytest.raises(LayoutError, match="'x' does not belong"):
        outer.load_state(0, {"x/momentum_buffer": torch.zeros(3)})
    assert same(snapshot(outer), state)


def test_theta_of_the_wrong_shape_or_dtype_is_refused() -> None:
    layout, theta = one_fragment()
    with pytest.raises(ValueError, match="float32"):
        OuterOptimizer(layout, [theta.double()])
    with pytest.raises(ValueError, match="48 elements"):
        OuterOptimizer(layout, [theta[1:]])
    with pytest.raises(ValueError, match="48 elements"):
        OuterOptimizer(layout, [theta]).step(0, theta[1:])


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        ("sgd", {}, "did you mean SGD"),
        ("AdmW", {}, "did you mean AdamW"),
        ("Optimizer", {}, "no optimizer of torch.optim"),
        ("lr_scheduler", {}, "no optimizer of torch.optim"),
        ("LBFGS", {}, "no closure"),
        ("SparseAdam", {}, "cannot take an outer step"),
        ("Adam", {"beta": [0.9, 0.95]}, "did you mean betas"),
        ("Adam", {"zzz": 1}, "it knows amsgrad"),
        ("Adam", {"momentum": 0.9}, "no option 'momentum'"),
        ("Adam", {"betas": [2.0, 0.95]}, "refuses.*2.0"),
        ("Adam", {"lr": 0.1}, "set outer_lr instead"),
        ("SGD", {"momentum": 0.9}, "set outer_momentum instead"),
        ("SGD", {"nesterov": False}, "set outer_nesterov instead"),
        ("SGD", {"dampening": 0.5}, "refuses.*dampening"),
    ],
)
def test_a_wrong_choice_is_refused_with_the_fix(
    optimizer: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_outer(optimizer, 0.7, 0.5, True, options)


@pytest.mark.parametrize("lr", [math.nan, 1e39])
def test_a_step_that_cannot_be_finite_is_refused(lr: float) -> None:
    with pytest.raises(ConfigError, match="outer_optimizer"):
        check_outer("SGD", lr, 0.5, True)


def test_nesterov_without_momentum_is_plain_sgd() -> None:
    check_outer("SGD", 1.0, 0.0, True)


def test_options_from_a_file_are_accepted() -> None:
    check_outer("AdamW", 0.1, 0.5, True, {"betas": [0.9, 0.95], "weight_decay": 0.0})
    check_outer("RMSprop", 0.1, 0.5, True, {"momentum": 0.9})
