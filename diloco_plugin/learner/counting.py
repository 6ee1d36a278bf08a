"""Counting real optimizer steps, and nothing else.

Framework step counters lie: they count steps that AMP skipped and miss optimizers that a model
steps by hand. The step hooks of the optimizer tell whether parameters moved. They are the wrong
place to act, though, since in a model with several optimizers another autograd graph may be alive:
whoever owns the training loop acts later, at a boundary, on what ``StepCounter.take`` says.

torch 2.2 and older strip these hooks once dynamo is imported; the package requires torch >= 2.4.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from diloco_plugin.errors import UnsupportedError

# These wrappers only forward ``step``: after the inner step nothing moves the parameters any more.
# Any other object with an ``optimizer`` attribute (Lookahead, say) may well write after the inner
# step, so it is left as it is.
_FORWARDING_PACKAGES: Final = frozenset(
    {"accelerate", "lightning", "lightning_fabric", "pytorch_lightning"}
)

_REFUSED_MODULES: Final = {
    "accelerate.utils.deepspeed": "DeepSpeed's engine steps, and its fp32 masters undo a merge",
    "deepspeed": "DeepSpeed's engine steps, and its fp32 masters undo a merge",
    "apex.amp": "Apex amp keeps fp32 masters, which undo a merge",
    "apex.contrib.optimizers": "Apex keeps sharded fp32 masters here, which undo a merge",
    "apex.fp16_utils": "Apex's FP16_Optimizer keeps fp32 masters, which undo a merge",
    "colossalai": "ColossalAI's optimizers keep sharded fp32 masters, which undo a merge",
    "megatron": "Megatron's optimizers keep fp32 masters, which undo a merge",
    "torchao.optim.cpu_offload": "it steps a copy of the weights on the CPU, which undoes a merge",
}
_REFUSED_CLASSES: Final = frozenset(
    {
        "BF16_Optimizer",
        "CPUOffloadOptimizer",
        "DeepSpeedOptimizerWrapper",
        "DeepSpeedZeroOptimizer",
        "DeepSpeedZeroOptimizer_Stage3",
        "FP16_Optimizer",
        "FP16_UnfusedOptimizer",
        "Float16OptimizerWithFloat16Params",
    }
)
_MASTER_ATTRIBUTES: Final = (
    "_amp_stash",
    "bit16_groups",
    "fp32_from_float16_groups",
    "fp32_from_fp16_groups",
    "fp32_groups_flat",
    "fp32_groups_flat_partition",
    "fp32_partitioned_groups_flat",
    "master_params",
    "master_weights",
    "param_cuda2cpu_map",
    "param_d2h_map",
    "shard_fp32_from_float16_groups",
    "single_partition_of_fp32_groups",
)

# Who counts the steps of an optimizer: a counter leaked by an earlier fit loses it to the next one.
_owners: WeakKeyDictionary[Optimizer, StepCounter] = WeakKeyDictionary()


class StepCounter:
    """Knows whether any optimizer really moved parameters since the last ``take``.

    The unit is the *stepping batch*: however many optimizers stepped between two boundaries,
    ``take`` says ``True`` once. Steps that AMP skipped do not count, fused optimizers included.
    Lives on the training thread only and never writes a parameter.

    Args:
        optimizers: optimizers of the training loop, as they are or wrapped by Accelerate,
            Lightning or Fabric.
        parameters: the parameters that are synced; recognizes the steps of optimizers that have no
            hooks.
        on_step: called after a real step of the one optimizer, once it is complete. Grad mode is on
            there.

    Raises:
        UnsupportedError: ``on_step`` is given and there is not exactly one optimizer with step
            hooks.
    """

    def __init__(
        self,
        optimizers: Sequence[object],
        parameters: Iterable[Tensor],
        on_step: Callable[[], None] | None = None,
    ) -> None:
        # The references matter: an id is only unique among live objects.
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self._on_step = on_step
        self._handles: dict[Optimizer, list[RemovableHandle]] = {}
        self._global_handle: RemovableHandle | None = None
        self._running: dict[int, list[int]] = {}
        self._moved = False
        self.total_hook_calls = 0
        #: steps that have begun, and how many had at the last boundary: while they are equal, no
        #: step runs, and the state of the optimizers stands still. Other threads may read them.
        self.begun = self.settled = 0
        self.attach(optimizers)

    @property
    def moved(self) -> bool:
        """Whether a real step happened since the last ``take``; reading does not reset."""
        return self._moved

    def take(self) -> bool:
        """Return ``moved`` and start the next stepping batch."""
        moved, self._moved = self._moved, False
        return moved

    def settle(self) -> None:
        """A boundary is over, and no step runs."""
        self.settled = self.begun

    @property
    def sees_all(self) -> bool:
        """Do hooks tell when a step begins, whichever optimizer takes it?"""
        return self._global_handle is None

    def assume(self) -> None:
        """Believe that a real step happened, though no hook said so."""
        self._moved = True

    def attach(self, optimizers: Sequence[object]) -> None:
        """Count these optimizers from now on, in place of those given before.

        Attaching twice, by this counter or by another one, never counts a step twice: the older
        hooks are removed.

        Raises:
            UnsupportedError: see the class.
        """
        self.detach()
        inner = list({id(optimizer): optimizer for optimizer in map(unwrap, optimizers)}.values())
        hooked = [o for o in inner if isinstance(o, Optimizer) and _has_hooks(o)]
        if self._on_step is not None and not len(hooked) == len(inner) == 1:
            names = ", ".join(type(optimizer).__name__ for optimizer in inner) or "none"
            raise UnsupportedError(
                "syncing inside optimizer.step() needs exactly one optimizer with step hooks, got:"
                f" {names}. Pass apply='boundary' to attach(), and call learner.boundary() after"
                " the last optimizer step of a batch."
            )
        for optimizer in hooked:
            owner = _owners.get(optimizer)
            if owner is not None:
                owner._release(optimizer)
            _owners[optimizer] = self
            self._handles[optimizer] = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]
        # With no optimizer at all, the training steps some that nobody handed over.
        if len(hooked) < len(inner) or not inner:
            self._global_handle = register_optimizer_step_post_hook(self._after_any_step)

    def detach(self) -> None:
        """Remove every hook; what was counted stays. Harmless when repeated."""
        for optimizer in list(self._handles):
            self._release(optimizer)
        if self._global_handle is not None:
            self._global_handle.remove()
            self._global_handle = None

    def _release(self, optimizer: Optimizer) -> None:
        for handle in self._handles.pop(optimizer, ()):
            handle.remove()
        self._running.pop(id(optimizer), None)
        if _owners.get(optimizer) is self:
            del _owners[optimizer]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.begun += 1
        if torch.compiler.is_compiling():
            return  # dynamo cannot trace frames
        caller = sys._getframe(1)
        running = self._running.setdefault(id(optimizer), [])
        if running:
            # Either a subclass calls super().step(), whose class is hooked too, or an earlier step
            # raised and never reached its post hook. Only the first is still on the call stack.
            # By id: a reference to a dead frame would keep its callers' activations in memory.
            alive = {id(frame) for frame in _call_stack(caller) if frame.f_code is caller.f_code}
            running[:] = [frame for frame in running if frame in alive]
        running.append(id(caller))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        running = self._running.get(id(optimizer))
        if running:
            running.pop()
        real = not _skipped_by_amp(optimizer)
        # Also from a nested step: should the outer one raise, the parameters have moved all the
        # same.
        self._moved |= real
        if running:
            return
        self.total_hook_calls += 1
        if real and self._on_step is not None:
            self._on_step()

    def _after_any_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._handles:
            return
        if any(id(parameter) in self._parameters for parameter in _parameters_of(optimizer)):
            self.total_hook_calls += 1
            self._moved |= not _skipped_by_amp(optimizer)


def forwards(wrapper: object) -> bool:
    """Is this a wrapper of Accelerate, Lightning or Fabric that only forwards?"""
    return not _packages(wrapper).isdisjoint(_FORWARDING_PACKAGES)


def unwrap(optimizer: object) -> object:
    """Return what Accelerate, Lightning or Fabric wrapped, however often; else itself."""
    while True:
        inner = getattr(optimizer, "optimizer", None)
        if inner is None or not forwards(optimizer):
            return optimizer
        optimizer = inner


def refuse_unsupported(optimizers: Sequence[object]) -> None:
    """Refuse optimizers that keep their own copy of the weights, as far as their looks tell.

    Raises:
        UnsupportedError: the first such optimizer, and the reason.
    """
    for optimizer in optimizers:
        for layer in _layers(optimizer):
            reason = _reason_against(layer)
            if reason is not None:
                raise UnsupportedError(
                    f"{type(layer).__name__} cannot be synced: {reason}. Train with a plain"
                    " PyTorch optimizer (bf16 autocast needs no master weights)."
                )


def parameter_count(optimizer: object) -> int:
    """How many parameters an optimizer holds. Costs one look at each of its groups."""
    groups = getattr(unwrap(optimizer), "param_groups", None) or []
    return sum(len(group["params"]) for group in groups)


def unknown_parameters(optimizers: Sequence[object], known: Iterable[Tensor]) -> list[Tensor]:
    """Return what these optimizers train and is not among the known parameters, each once."""
    seen = {id(parameter) for parameter in known}
    unknown = []
    for optimizer in optimizers:
        for parameter in _parameters_of(unwrap(optimizer)):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                unknown.append(parameter)
    return unknown


def _has_hooks(optimizer: object) -> bool:
    # Not hasattr: an optimizer that skips Optimizer.__init__ has the methods but not the dictionary
    # behind them.
    attributes = getattr(optimizer, "__dict__", {})
    return "_optimizer_step_post_hooks" in attributes and "_optimizer_step_pre_hooks" in attributes


def _packages(obj: object) -> set[str]:
    return {base.__module__.partition(".")[0] for base in type(obj).__mro__}


def _parameters_of(optimizer: object) -> Iterator[Tensor]:
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def _skipped_by_amp(optimizer: Optimizer) -> bool:
    # GradScaler leaves the decision to fused optimizers: it sets this just for the duration of
    # step(). Reading costs the device sync that it does for every other optimizer.
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def _call_stack(frame: FrameType) -> Iterator[FrameType]:
    """The callers of a frame, innermost first."""
    caller = frame.f_back
    while caller is not None:
        yield caller
        caller = caller.f_back


def _layers(optimizer: object) -> Iterator[object]:
    seen: set[int] = set()
    layer: object | None = optimizer
    while layer is not None and id(layer) not in seen:
        seen.add(id(layer))
        yield layer
        layer = getattr(layer, "optimizer", None)


def _reason_against(optimizer: object) -> str | None:
    for base in type(optimizer).__mro__:
        for module, reason in _REFUSED_MODULES.items():
            if base.__module__ == module or base.__module__.startswith(module + "."):
                return reason
        if base.__name__ in _REFUSED_CLASSES:
            return "its own fp32 copy of the weights undoes a merge"
    for name in _MASTER_ATTRIBUTES:
        value = getattr(optimizer, name, None)
        if value is None or value is False or (hasattr(value, "__len__") and len(value) == 0):
            continue
        return f"it keeps its own copy of the weights ({name}), which undoes a merge"
    return None
