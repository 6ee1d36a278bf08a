"""The state of the inner optimizers, by parameter name: described, checked, taken over.

It knows optimizers and schedulers, no sockets and no threads. What cannot be told by names, plain
tensors and numbers is not given at all, and what does not fit is not taken at all.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from diloco_plugin.errors import WireError
from diloco_plugin.learner.counting import unwrap
from diloco_plugin.learner.schedules import move, positions, schedulers_of
from diloco_plugin.wire import manifest as wire
from diloco_plugin.wire.manifest import Entry, GroupState, Manifest, OptimizerState, ParameterState

#: Options of a param_group that do not decide which state its parameters need.
_FREE_OPTIONS: Final = frozenset(
    {"lr", "initial_lr", "weight_decay", "foreach", "fused", "capturable", "differentiable",
     "maximize", "decoupled_weight_decay"}
)  # fmt: skip
#: Options about where and how a step is computed; a toy on the CPU is stepped without.
_PLACES: Final = frozenset({"lr", "foreach", "fused", "capturable", "differentiable"})
#: State that stands for the weights themselves, and those differ from learner to learner.
_WEIGHTS: Final = frozenset({"z", "master_param", "master_weight", "exp_avg_param"})
_SHARDED: Final = "ZeroRedundancyOptimizer"


class NothingToGive(Exception):
    """This state cannot travel; says why."""


class InnerState:
    """The optimizers and schedulers of one learner. Reads only, but for `apply`."""

    def __init__(
        self, tensors: Mapping[str, Tensor], optimizers: Sequence[Any], scheduler: Any
    ) -> None:
        """`tensors`: what is trained together, by canonical name."""
        self._tensors = tensors
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._optimizers: list[Any] = [unwrap(optimizer) for optimizer in optimizers]
        self._schedulers = schedulers_of(scheduler)
        #: largest stream that may come or go, in bytes
        self.size_max = wire.size_max(sum(tensor.numel() for tensor in tensors.values()))

    @property
    def device(self) -> torch.device | None:
        """A CUDA device that holds some of it, if one does."""
        return next((t.device for t in self._tensors.values() if t.is_cuda), None)

    # ---- to give ----

    def steps_behind(self, told: int) -> int:
        """How many steps the state that is there already has behind it; 0: there is none.

        `told`: what a checkpoint says, where the state itself does not.
        """
        counts = [0]
        for optimizer in self._optimizers:
            state = getattr(optimizer, "state", None) or {}
            entries = [entry for entry in state.values() if isinstance(entry, Mapping) and entry]
            # one of each: they count alike, and a look may wait for a device
            found = next((entry["step"] for entry in entries if "step" in entry), 0)
            counts += [told, int(found)] if entries else []
        return max(counts)

    def describe(self) -> tuple[tuple[OptimizerState, ...], list[Tensor]]:
        """What there is, and the tensors themselves, in the order of `wire.entries_of`.

        Raises:
            NothingToGive: some of it cannot travel, or there is none.
            RuntimeError, KeyError: another thread changes it meanwhile.
        """
        tensors: list[Tensor] = []
        described = tuple(self._describe(optimizer, tensors) for optimizer in self._optimizers)
        numbers = any(
            parameter.numbers
            for optimizer in described
            for group in optimizer.groups
            for parameter in group.parameters
        )
        if not tensors and not numbers and not self._schedulers:
            raise NothingToGive("its optimizer keeps no state")
        return described, tensors

    def _describe(self, optimizer: Any, tensors: list[Tensor]) -> OptimizerState:
        kind = type(optimizer).__name__
        if any(base.__name__ == _SHARDED for base in type(optimizer).__mro__):
            raise NothingToGive(f"{kind} keeps its state in shards")
        if not isinstance(getattr(optimizer, "state", None), Mapping):
            raise NothingToGive(f"{kind} keeps its state elsewhere")
        groups = []
        for group in optimizer.param_groups:
            named = [(self._names.get(id(p)), p) for p in group["params"]]
            parameters = tuple(
                _describe_parameter(kind, name, parameter, optimizer.state[parameter], tensors)
                for name, parameter in named
                if name is not None and optimizer.state.get(parameter)
            )
            groups.append(GroupState(_switches(group), parameters))
        return OptimizerState(kind, tuple(groups))

    def schedule(self) -> tuple[tuple[tuple[float, ...], ...], tuple[wire.Position, ...]]:
        """Learning rates of all groups, and where the schedulers stand, for a manifest.

        Read until two reads agree: another thread may be stepping a scheduler.
        """
        before = None
        for _ in range(100):
            try:
                now = self._rates(), positions(self._schedulers)
            except RuntimeError:  # a dictionary grew meanwhile
                continue
            if now == before:
                return now
            before = now
        raise NothingToGive("its learning rate schedule does not stand still")

    def _rates(self) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(float(group.get("lr", 0.0)) for group in optimizer.param_groups)
            for optimizer in self._optimizers
        )

    # ---- to take ----

    def problem(self, stream: Tensor) -> str:
        """Why the state in this stream (uint8, CPU) cannot be taken; empty if it can."""
        try:
            manifest, starts = wire.read(_bytes_of(stream))
        except WireError as error:
            return f"it is damaged ({error})"[:400]
        return self._misfit(manifest) or _not_finite(manifest, starts, stream)

    def _misfit(self, manifest: Manifest) -> str:
        here = [type(optimizer).__name__ for optimizer in self._optimizers]
        there = [optimizer.kind for optimizer in manifest.optimizers]
        if here != there:
            return f"another optimizer ({_list(there)} there, {_list(here)} here)"
        for own, told in zip(self._optimizers, manifest.optimizers, strict=True):
            if not isinstance(getattr(own, "state", None), Mapping):
                return f"{type(own).__name__} keeps its state elsewhere"
            groups = {id(p): group for group in own.param_groups for p in group["params"]}
            seen: set[str] = set()
            for group in told.groups:
                for parameter in group.parameters:
                    live = self._tensors.get(parameter.name)
                    home = groups.get(id(live))
                    if live is None or home is None or parameter.name in seen:
                        return f"{parameter.name} is not a parameter of this optimizer"
                    seen.add(parameter.name)
                    if (
                        found := _parameter_misfit(live, parameter)
                        or _switched(home, group)
                        or _strange_keys(own, home, live, parameter)
                    ):
                        return f"{parameter.name}: {found}"
        return ""

    def apply(self, stream: Tensor) -> str:
        """Take over the state in a stream in which there is no `problem`: all of it, or none.

        Training thread, before the first step. Returns what else there is to say about it.
        """
        manifest, starts = wire.read(_bytes_of(stream))
        values = _values(manifest, starts, stream)
        made: list[tuple[Any, Tensor, dict[str, Any]]] = []
        for own, told in zip(self._optimizers, manifest.optimizers, strict=True):
            groups = {id(p): group for group in own.param_groups for p in group["params"]}
            for parameter in (p for group in told.groups for p in group.parameters):
                live = self._tensors[parameter.name]
                entry: dict[str, Any] = dict(parameter.numbers)
                for described in parameter.tensors:
                    entry[described.key] = _like(live, groups[id(live)], described, next(values))
                made.append((own, live, entry))
        remark = self._move_schedules(manifest)
        for own in self._optimizers:
            for live in self._tensors.values():
                own.state.pop(live, None)
        for own, live, entry in made:
            own.state[live] = entry
        return remark

    def _move_schedules(self, manifest: Manifest) -> str:
        here = [type(one).__name__ for one in self._schedulers]
        if not here:
            return ""
        groups = [len(optimizer.param_groups) for optimizer in self._optimizers]
        if here != [one.kind for one in manifest.positions] or groups != list(
            map(len, manifest.rates)
        ):
            return "; its learning rate schedule is another one, so this learner's own stays"
        try:
            move(self._schedulers, manifest.positions)
        except Exception as error:  # whatever the user's scheduler raises
            return f"; its learning rate schedule was not taken ({error})"
        for optimizer, rates in zip(self._optimizers, manifest.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
        for one in self._schedulers:
            if hasattr(one, "_last_lr"):
                one._last_lr = [group["lr"] for group in one.optimizer.param_groups]
        return ""


def _describe_parameter(
    kind: str, name: str, parameter: Tensor, state: Mapping[str, Any], tensors: list[Tensor]
) -> ParameterState:
    entries, numbers = [], {}
    for key, value in state.items():
        if not isinstance(key, str) or not 1 <= len(key) <= 64 or key in _WEIGHTS:
            raise NothingToGive(f"{kind} keeps {key!r} in its state")
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            plain = type(value) is Tensor and value.layout is torch.strided
            fits = value.shape == parameter.shape or value.numel() == 1
            if not plain or not fits or dtype not in wire.BYTES_OF:
                raise NothingToGive(f"{kind} keeps {key!r} in another form than a parameter's")
            shape = tuple(value.shape)
            on_cpu = value.device.type == "cpu" and _is_scalar(key, shape, parameter)
            entries.append(Entry(key, dtype, shape, on_cpu))
            tensors.append(value.detach())
        elif isinstance(value, (int, float)):
            numbers[key] = int(value) if isinstance(value, int) else value
        elif value is not None:
            raise NothingToGive(f"{kind} keeps a {type(value).__name__} in its state ({key!r})")
    if len(entries) > 16 or len(numbers) > 16:
        raise NothingToGive(f"{kind} keeps more than 16 tensors for a parameter")
    dtype = str(parameter.dtype).removeprefix("torch.")
    return ParameterState(name, dtype, tuple(entries), numbers)


def _switches(group: Mapping[str, Any]) -> dict[str, bool]:
    """Which options are on (amsgrad, centered, a momentum at all): they decide what is kept."""
    plain = (bool, int, float, type(None))
    return {
        key: bool(value)
        for key, value in group.items()
        if isinstance(value, plain) and key not in _FREE_OPTIONS and len(key) <= 64
    }


def _switched(home: Mapping[str, Any], told: GroupState) -> str:
    own = _switches(home)
    odd = sorted(key for key in own.keys() & told.switches.keys() if own[key] != told.switches[key])
    return f"{odd[0]} is {_on(told.switches[odd[0]])} there, {_on(own[odd[0]])} here" if odd else ""


def _on(switch: bool) -> str:
    return "on" if switch else "off"


def _parameter_misfit(live: Tensor, told: ParameterState) -> str:
    dtype = str(live.dtype).removeprefix("torch.")
    if dtype != told.dtype:
        return f"{told.dtype} there, {dtype} here"
    for entry in told.tensors:
        if entry.shape != tuple(live.shape) and math.prod(entry.shape) != 1:
            return f"{entry.key} has shape {entry.shape}, the parameter {tuple(live.shape)}"
    keys = [entry.key for entry in told.tensors] + list(told.numbers)
    if len(keys) != len(set(keys)) or not _WEIGHTS.isdisjoint(keys):
        return "its state has keys that no optimizer's has"
    return ""


def _strange_keys(
    optimizer: Any, group: Mapping[str, Any], live: Tensor, told: ParameterState
) -> str:
    """What differs from what this optimizer keeps: a first step with one element shows that.

    Only torch's own are tried: others may do anything in a step. Wrong keys would end the first
    real step with a KeyError.
    """
    own: Any = unwrap(optimizer)
    if not type(own).__module__.startswith("torch.optim.") or not (told.tensors or told.numbers):
        return ""
    toy = torch.zeros((1,) * live.dim(), requires_grad=True)
    toy.grad = torch.zeros_like(toy)
    try:
        known = inspect.signature(type(own)).parameters.keys() - _PLACES
        options = {key: group[key] for key in known & group.keys() - {"params"}}
        one = type(own)([toy], **options)
        one.step()
    except Exception:  # an optimizer that does not take a toy is not judged by it
        return ""
    kept = {key for key, value in one.state[toy].items() if value is not None}
    keys = {entry.key for entry in told.tensors} | set(told.numbers)
    return "" if keys == kept else f"{_list(sorted(keys))} there, {_list(sorted(kept))} here"


def _is_scalar(key: str, shape: tuple[int, ...], parameter: Tensor) -> bool:
    return math.prod(shape) == 1 and (key == "step" or shape != tuple(parameter.shape))


def _values(manifest: Manifest, starts: Sequence[int], stream: Tensor) -> Iterator[Tensor]:
    """The tensors of a stream, as views of it."""
    for entry, start in zip(wire.entries_of(manifest.optimizers), starts, strict=True):
        raw = stream[start : start + entry.nbytes]
        yield raw.view(getattr(torch, entry.dtype)).view(entry.shape)


def _not_finite(manifest: Manifest, starts: Sequence[int], stream: Tensor) -> str:
    numbers = [n for o in manifest.optimizers for g in o.groups for p in g.parameters
               for n in p.numbers.values()]  # fmt: skip
    rates = [rate for of_one in manifest.rates for rate in of_one]
    finite = all(map(math.isfinite, numbers + rates)) and all(
        bool(value.isfinite().all()) for value in _values(manifest, starts, stream)
    )
    return "" if finite else "it is not finite"


def _like(live: Tensor, group: Mapping[str, Any], entry: Entry, value: Tensor) -> Tensor:
    """The tensor as this optimizer would have made it: device, memory format, own storage."""
    if not _is_scalar(entry.key, entry.shape, live):
        return torch.empty_like(live.detach(), dtype=value.dtype).copy_(value)
    on_device = bool(group.get("fused") or group.get("capturable")) or not entry.on_cpu
    return value.clone().to(live.device if on_device else "cpu")


def _bytes_of(stream: Tensor) -> memoryview:
    return memoryview(stream.numpy())  # type: ignore[arg-type]


def _list(names: Sequence[str]) -> str:
    return " and ".join(names) or "none"
