"""The outer optimizer: any ``torch.optim`` class, on flat fp32 fragments of the global model."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from diloco_plugin.errors import ConfigError, LayoutError
from diloco_plugin.tensors.blocks import square_sum
from diloco_plugin.tensors.layout import Fragment, Layout, views

#: Keyword arguments of SGD that have a parameter of their own (lr has it for all).
_OWN: Final = {"lr": "outer_lr", "momentum": "outer_momentum", "nesterov": "outer_nesterov"}
#: Offsets in scratch memory are multiples of this many bytes, enough for every dtype.
_ALIGN: Final = 64


class _Build(Protocol):
    def __call__(self, params: list[nn.Parameter]) -> torch.optim.Optimizer: ...


def check_outer(
    optimizer: str,
    lr: float,
    momentum: float,
    nesterov: bool,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Checks the choice of an outer optimizer by taking one step with it on a toy parameter.

    Raises:
        ConfigError: an unknown name or option, a value that the optimizer refuses, or an optimizer
            that needs a closure or sparse gradients.
    """
    build = _builder(optimizer, lr, momentum, nesterov, options or {})
    toy = nn.Parameter(torch.zeros(2, 2))
    toy.grad = torch.ones(2, 2)
    try:
        build([toy]).step()
    except Exception as error:
        raise ConfigError(
            f"outer_optimizer={optimizer!r} cannot take an outer step ({error}): it gets one dense"
            f" gradient and no closure, so use SGD, Adam or another optimizer that needs no more."
        ) from error
    if not bool(torch.isfinite(toy).all()):
        raise ConfigError(
            f"outer_optimizer={optimizer!r} with lr={lr}, momentum={momentum} and options {options}"
            f" gives values that are not finite after one step: use smaller ones."
        )


class OuterOptimizer:
    """Applies merged pseudo-gradients to the global model, in place.

    With the default, SGD with Nesterov momentum as in the paper and its lineage, per fragment::

        buf = momentum * buf + g
        theta -= lr * (g + momentum * buf)

    Weights and embeddings go through the optimizer, buffers take ``theta -= g``. State is fp32 and
    is kept per tensor, so optimizers that look at shapes work as well. Not thread-safe.

    Args:
        theta: one flat fp32 tensor for each fragment, owned by the caller, changed in place here.
        optimizer: name of a class of ``torch.optim``.
        momentum: for SGD only, as is ``nesterov``, which means nothing without momentum.
        options: further keyword arguments of the class.

    Raises:
        ConfigError: as ``check_outer``, or the optimizer refuses this model's tensors.
        ValueError: ``theta`` does not fit ``layout``.
    """

    def __init__(
        self,
        layout: Layout,
        theta: Sequence[Tensor],
        *,
        optimizer: str = "SGD",
        lr: float = 0.7,
        momentum: float = 0.5,
        nesterov: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_outer(optimizer, lr, momentum, nesterov, options)
        build = _builder(optimizer, lr, momentum, nesterov, options or {})
        self._name = optimizer
        self._parts: list[_Part] = []
        for fragment, flat in zip(layout.fragments, theta, strict=True):
            if flat.dtype != torch.float32 or not flat.is_contiguous():
                raise ValueError(f"fragment {fragment.index}: theta must be contiguous float32.")
            shaped = views(flat, fragment)
            parameters = {
                slot.spec.name: nn.Parameter(view)
                for slot, view in zip(fragment.slots, shaped, strict=True)
                if slot.stop <= fragment.optimized
            }
            self._parts.append(
                _Part(fragment, flat, parameters, self._make(build, parameters), build)
            )
        self._scratch = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def step(self, index: int, gradient: Tensor) -> bool:
        """One outer step of fragment ``index`` along its flat fp32 ``gradient``.

        Returns:
            False when the gradient or the result is not finite; then nothing has changed.
        """
        part = self._parts[index]
        optimized = part.fragment.optimized
        shaped = views(gradient, part.fragment)
        if not math.isfinite(square_sum(gradient)):
            return False
        undo = self._remember(part)
        try:
            for parameter, grad in zip(part.parameters.values(), shaped, strict=False):
                parameter.grad = grad
            if part.optimizer is not None:
                part.optimizer.step()
            part.theta[optimized:].sub_(gradient[optimized:])
            done = part.is_finite()
        except BaseException:
            undo.run()
            raise
        finally:
            for parameter in part.parameters.values():
                parameter.grad = None
        if not done:
            undo.run()
        return done

    @torch.no_grad()
    def close(self, index: int, gradient: Tensor) -> bool:
        """The step of a closing round: ``theta -= gradient``, lr 1, and the state is left alone.

        Returns:
            False when the gradient or the result is not finite; then nothing has changed.
        """
        part = self._parts[index]
        views(gradient, part.fragment)
        if not math.isfinite(square_sum(gradient)):
            return False
        (before,) = self._copies([part.theta])
        part.theta.sub_(gradient)
        if math.isfinite(square_sum(part.theta)):
            return True
        part.theta.copy_(before)
        return False

    def state(self, index: int) -> dict[str, Tensor]:
        """The optimizer's live tensors of one fragment, as ``{"tensor name/key": value}``."""
        part = self._parts[index]
        return {
            f"{name}/{key}": value
            for name, parameter in part.parameters.items()
            for key, value in part.state_of(parameter).items()
            if isinstance(value, Tensor)
        }

    def load_state(self, index: int, state: Mapping[str, Tensor]) -> None:
        """Takes back, by copy, what ``state`` gave; nothing changes when it raises.

        Raises:
            LayoutError: a tensor that this fragment does not have.
            ConfigError: state of another optimizer.
        """
        part = self._parts[index]
        loaded: dict[str, dict[str, Tensor]] = {}
        for path, value in state.items():
            name, _, key = path.rpartition("/")
            if name not in part.parameters:
                raise LayoutError(
                    f"outer state of {name!r} does not belong to fragment {index}: it was saved for"
                    f" another model or number of fragments; use those, or start without it."
                )
            loaded.setdefault(name, {})[key] = value.clone()
        for name, values in loaded.items():
            expected = part.expected_state(name)
            if {key: value.shape for key, value in values.items()} != expected:
                raise ConfigError(
                    f"the saved outer state of {name} has {sorted(values)}, {self._name} keeps"
                    f" {sorted(expected)} of its own shapes: continue with the outer optimizer that"
                    f" saved it, or start without it."
                )
        if part.optimizer is not None:
            fresh = part.build(list(part.parameters.values()))
            part.optimizer.state.clear()
            part.optimizer.state.update(fresh.state)
            for name, values in loaded.items():
                part.optimizer.state[part.parameters[name]] = values

    def _make(
        self, build: _Build, parameters: Mapping[str, nn.Parameter]
    ) -> torch.optim.Optimizer | None:
        if not parameters:
            return None  # buffers only
        try:
            return build(list(parameters.values()))
        except Exception as error:
            raise ConfigError(
                f"outer_optimizer={self._name!r} refuses this model ({error}): use SGD or Adam."
            ) from error

    def _remember(self, part: _Part) -> _Undo:
        entries = part.optimizer.state if part.optimizer is not None else {}
        live = [part.theta]
        live += [v for entry in entries.values() for v in entry.values() if isinstance(v, Tensor)]
        before = {parameter: dict(entry) for parameter, entry in entries.items()}
        return _Undo(part, live, self._copies(live), before)

    def _copies(self, live: Sequence[Tensor]) -> list[Tensor]:
        """Copies into scratch memory, valid until the next call."""
        # Kept between steps: the page faults of fresh memory cost as much as ten copies.
        sizes = [-(-t.numel() * t.element_size() // _ALIGN) * _ALIGN for t in live]
        if sum(sizes) > self._scratch.numel():
            self._scratch = torch.empty(sum(sizes), dtype=torch.uint8)
        copies: list[Tensor] = []
        at = 0
        for tensor, size in zip(live, sizes, strict=True):
            place = self._scratch[at : at + tensor.numel() * tensor.element_size()]
            copies.append(place.view(tensor.dtype).view(tensor.shape).copy_(tensor))
            at += size
        return copies


@dataclass(frozen=True, slots=True)
class _Part:
    """One fragment: its values, and parameters that share storage with them."""

    fragment: Fragment
    theta: Tensor
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer | None
    build: _Build

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        if self.optimizer is None:
            return {}
        found: dict[str, Any] = self.optimizer.state.get(parameter, {})
        return found

    def is_finite(self) -> bool:
        # State as well: an infinite second moment would freeze its tensor for good, silently.
        states = (v for p in self.parameters.values() for v in self.state_of(p).values())
        floats = (v for v in states if isinstance(v, Tensor) and v.is_floating_point())
        return all(math.isfinite(square_sum(v.reshape(-1))) for v in (self.theta, *floats))

    def expected_state(self, name: str) -> dict[str, torch.Size]:
        """Which tensors of which shape the optimizer keeps for a parameter, found by one step."""
        toy = nn.Parameter(torch.zeros_like(self.parameters[name]))
        toy.grad = torch.zeros_like(toy)
        probe = self.build([toy])
        probe.step()
        return {k: v.shape for k, v in probe.state[toy].items() if isinstance(v, Tensor)}


@dataclass(frozen=True, slots=True)
class _Undo:
    """What one fragment was before a step."""

    part: _Part
    live: list[Tensor]
    copies: list[Tensor]
    entries: dict[Tensor, dict[str, Any]]

    def run(self) -> None:
        for tensor, copy in zip(self.live, self.copies, strict=True):
            tensor.copy_(copy)
        if self.part.optimizer is not None:
            self.part.optimizer.state.clear()
            self.part.optimizer.state.update(self.entries)


def _builder(
    optimizer: str, lr: float, momentum: float, nesterov: bool, options: Mapping[str, Any]
) -> _Build:
    """A function that makes the optimizer, after its name and options were found to exist.

    Raises:
        ConfigError: they do not, or the optimizer refuses their values.
    """
    kind = _find(optimizer)
    own = _OWN if kind is torch.optim.SGD else {"lr": _OWN["lr"]}
    accepted = inspect.signature(kind).parameters.keys() - {"params"} - own.keys()
    for key in options:
        if key in own:
            raise ConfigError(f"outer_options has {key!r}: set {own[key]} instead.")
        if key not in accepted:
            near = difflib.get_close_matches(key, sorted(accepted), n=1, cutoff=0.5)
            hint = (
                f"did you mean {near[0]}?" if near else f"it knows {', '.join(sorted(accepted))}."
            )
            raise ConfigError(f"outer_options: {optimizer} has no option {key!r}; {hint}")
    settings: dict[str, Any] = {"lr": lr, **options}
    if kind is torch.optim.SGD:
        # Nesterov without momentum is plain SGD, but torch refuses to be told so.
        settings |= {"momentum": momentum, "nesterov": nesterov and momentum > 0}

    def build(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return kind(params, **settings)

    try:
        build([nn.Parameter(torch.zeros(2, 2))])
    except Exception as error:
        raise ConfigError(
            f"outer_optimizer={optimizer!r} refuses {settings} ({error}): correct that value."
        ) from error
    return build


def _find(name: str) -> type[torch.optim.Optimizer]:
    known = {
        key: value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    }
    if name not in known:
        lower = {key.lower(): key for key in known}
        near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"outer_optimizer={name!r} is no optimizer of torch.optim: did you mean {lower[near]}?"
        )
    return known[name]
