"""The numbers on the learner's side: live tensors, the base they started from, buffers in between.

It knows nothing of rounds, versions or sockets. Only the training thread writes live tensors, only
at boundaries, always in place under ``no_grad``: then autograd notices a write at the wrong time,
which it would not behind its back, and a compiled model sees the new values.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final

import torch
from torch import Tensor

from diloco_plugin.errors import LayoutError, UnsupportedError
from diloco_plugin.learner.counting import unwrap
from diloco_plugin.tensors.layout import BUFFER, Fragment, Layout, views

#: Elements cast at once when the base is rounded to a narrow dtype: large operators, 2 MB scratch.
CAST_BLOCK: Final = 1 << 20
#: The watch for master weights looks at no more elements than this, and needs this many to be sure.
SAMPLE_MAX: Final = 4096
SAMPLE_MIN: Final = 16
#: A merge counts as undone if a step brings the sample this close to where it was before, and as
#: kept if the step moves it less than that; both in jumps of that merge. In between, the next merge
#: decides.
UNDONE_WITHIN: Final = 0.25
KEPT_WITHIN: Final = 0.5

_Run = tuple[torch.dtype, int, int]


class Buffer:
    """A flat fp32 CPU tensor that holds one fragment on its way in or out.

    It belongs to whoever took it, on one thread at a time, until it is given back.

    Attributes:
        flat: as long as the largest fragment; ``flat[:fragment.elements]`` is the fragment.
    """

    __slots__ = ("_events", "_pool", "_runs", "flat")

    def __init__(self, elements: int, pinned: bool, pool: list[Buffer]) -> None:
        # fill_: untouched pages would fault in the middle of training (measured: 3x slower).
        self.flat = torch.empty(elements, dtype=torch.float32, pin_memory=pinned).fill_(0.0)
        self._pool = pool
        self._events: list[torch.cuda.Event] = []
        self._runs: list[_Run] | None = None

    def wait(self) -> None:
        """Return once the device is done with this buffer. Any thread; lets go of the GIL."""
        for event in self._events:
            event.synchronize()
        self._events.clear()

    def _mark(self, tensors: Sequence[Tensor]) -> None:
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)


class Replica:
    """One learner's copy of the model, seen as fragments.

    Holds references to the tensors, never to their storage: a framework may move or cast a
    parameter later. Allocates everything of model size in the constructor: one base, and the
    buffers.

    Args:
        layout: what is synced.
        tensors: the live tensor of every slot, by name.
        staging: buffers for snapshots on their way out (pinned beside CUDA).
        arrivals: buffers for fragments on their way in (pinned beside CUDA).

    Raises:
        LayoutError: a tensor is missing, has another shape, or several of its elements share
            memory.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Mapping[str, Tensor],
        *,
        staging: int = 2,
        arrivals: int = 2,
    ) -> None:
        self.layout = layout
        self._tensors: list[list[Tensor]] = []
        self.rebind(tensors)
        self._keeps_z: bool | None = None
        self._watch = _MasterWeightWatch()
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._lock = threading.Lock()
        pinned = torch.cuda.is_available() and any(t.is_cuda for t in tensors.values())
        largest = max((fragment.elements for fragment in layout.fragments), default=0)
        self._staging: list[Buffer] = []
        self._arrivals: list[Buffer] = []
        for count, pool in ((staging, self._staging), (arrivals, self._arrivals)):
            pool.extend([Buffer(largest, pinned, pool) for _ in range(count)])
        self._base = [torch.empty(fragment.elements).fill_(0.0) for fragment in layout.fragments]
        for fragment in layout.fragments:
            self.capture_base(fragment.index)

    def rebind(self, tensors: Mapping[str, Tensor]) -> None:
        """Use these live tensors from now on: moving a model replaces its buffers. Training thread.

        Raises:
            LayoutError: see the class.
        """
        self._tensors = [
            [_live_tensor(slot.spec.name, slot.spec.shape, tensors) for slot in fragment.slots]
            for fragment in self.layout.fragments
        ]

    def take_staging(self) -> Buffer | None:
        """A free buffer for a snapshot, or None. Any thread."""
        return self._take(self._staging)

    def take_arrival(self) -> Buffer | None:
        """A free buffer for an arriving fragment, or None. Any thread."""
        return self._take(self._arrivals)

    def give_back(self, buffer: Buffer) -> None:
        """Return a buffer to where it was taken from. Any thread.

        Raises:
            ValueError: it has been given back already.
        """
        with self._lock:
            if any(free is buffer for free in buffer._pool):
                raise ValueError(
                    "this buffer was given back twice: two owners would write into it."
                )
            buffer._pool.append(buffer)

    def _take(self, pool: list[Buffer]) -> Buffer | None:
        with self._lock:
            buffer = pool.pop() if pool else None
        if buffer is not None:
            buffer.wait()
            buffer._runs = None
        return buffer

    # The training thread, at a boundary.

    def snapshot(self, fragment_index: int, buffer: Buffer) -> None:
        """Copy the local value of a fragment into a buffer, as fp32. Training thread, boundary."""
        fragment, tensors = self._fragment(fragment_index)
        with torch.no_grad():
            _copy(views(buffer.flat[: fragment.elements], fragment), tensors)
        buffer._mark(tensors)

    def apply(
        self, fragment_index: int, buffer: Buffer, alpha: float, optimizers: Sequence[object] = ()
    ) -> None:
        """Write an arrived fragment: ``local <- alpha*local + (1-alpha)*global``, fp32, then cast.

        Training thread, at a boundary. Alpha 0 overwrites; buffers of the model are always
        overwritten. State of the optimizers stays, but the ``z`` of schedule-free ones moves along
        with its parameter, which they compute from it. ``buffer`` stays the caller's.
        """
        fragment, tensors = self._fragment(fragment_index)
        incoming = views(buffer.flat[: fragment.elements], fragment)
        blended = sum(slot.spec.kind != BUFFER for slot in fragment.slots) if alpha else 0
        self._watch.before_apply(fragment, tensors, optimizers)
        with torch.no_grad():
            companions = self._companions(tensors, optimizers)
            _shift(companions, -1)
            if blended:
                _blend(tensors[:blended], incoming[:blended], alpha)
            _copy(tensors[blended:], incoming[blended:])
            _shift(companions, +1)
        self._watch.after_apply()
        buffer._runs = _runs(fragment, tensors)
        buffer._mark(tensors)

    def overwrite_with_base(self, fragment_index: int, optimizers: Sequence[object] = ()) -> None:
        """Write the base into the live tensors, as at the end of a blended run. Training thread."""
        fragment, tensors = self._fragment(fragment_index)
        with torch.no_grad():
            companions = self._companions(tensors, optimizers)
            _shift(companions, -1)
            torch._foreach_copy_(tensors, views(self._base[fragment_index], fragment))
            _shift(companions, +1)

    def capture_base(self, fragment_index: int) -> None:
        """Make the live tensors, as they are, the base. Training thread, none in flight."""
        fragment, tensors = self._fragment(fragment_index)
        with torch.no_grad():
            torch._foreach_copy_(views(self._base[fragment_index], fragment), tensors)

    def after_step(self) -> None:
        """Look whether the optimizer undid a merge: after a real step, before ``apply``.

        Training thread. Costs nothing once that is settled, usually by the first noticeable merge.

        Raises:
            UnsupportedError: the step took the parameters back to where they were before the merge.
        """
        self._watch.after_step()

    def watch_for_master_weights(self) -> None:
        """Watch again, as from the start: the optimizers are others now. Training thread."""
        self._keeps_z = None
        self._watch = _MasterWeightWatch()

    # The I/O thread.

    def rebase(self, fragment_index: int, buffer: Buffer) -> None:
        """Make an applied fragment the base: exactly what alpha 0 wrote, rounded the same.

        Against the unrounded one, the rounding itself would look like a pseudo-gradient. I/O
        thread.
        """
        fragment, tensors = self._fragment(fragment_index)
        base = self._base[fragment_index]
        for dtype, start, stop in buffer._runs or _runs(fragment, tensors):
            if dtype in (torch.float32, torch.float64):
                base[start:stop].copy_(buffer.flat[start:stop])
                continue
            if dtype not in self._scratch:
                self._scratch[dtype] = torch.empty(CAST_BLOCK, dtype=dtype)
            scratch = self._scratch[dtype]
            for at in range(start, stop, CAST_BLOCK):
                end = min(at + CAST_BLOCK, stop)
                narrow = scratch[: end - at].copy_(buffer.flat[at:end])
                base[at:end].copy_(narrow)

    def difference(
        self, fragment_index: int, buffer: Buffer, start: int, stop: int, out: Tensor
    ) -> None:
        """Write ``[start:stop]`` of the pseudo-gradient ``base - local`` to the head of ``out``.

        ``buffer`` holds the snapshot; ``out`` is flat, fp32, on the CPU and at least that long. One
        operator, allocates nothing. I/O thread.
        """
        buffer.wait()
        base = self._base[fragment_index]
        torch.sub(base[start:stop], buffer.flat[start:stop], out=out[: stop - start])

    def base_slice(self, fragment_index: int, start: int, stop: int) -> Tensor:
        """Elements ``[start:stop]`` of the base, a view that ``rebase`` changes. I/O thread."""
        return self._base[fragment_index][start:stop]

    def _fragment(self, index: int) -> tuple[Fragment, list[Tensor]]:
        return self.layout.fragments[index], self._tensors[index]

    def _companions(
        self, tensors: Sequence[Tensor], optimizers: Sequence[object]
    ) -> list[tuple[Tensor, Tensor]]:
        """Pairs of schedule-free state and its parameter; looks for them until it is clear."""
        if self._keeps_z is False:
            return []
        states = [_state_of(optimizer) for optimizer in optimizers]
        if self._keeps_z is None and states and all(states):
            # State is made in the first step: an empty one says nothing yet.
            self._keeps_z = any(_sequences(state, key) for state in states for key in state)
        return [
            (part, tensor)
            for state in states
            for tensor in tensors
            for part in _sequences(state, tensor)
        ]


class _MasterWeightWatch:
    """Finds out, on a sample, whether the optimizer undoes merges from a copy of the weights.

    Such an optimizer takes the sample back to where it was before the merge, give or take one step.
    That a plain step does so is next to impossible in many dimensions, but in a toy problem, one
    step with lr = 1 / curvature does: hence torch's own optimizers, which keep no copy, are not
    looked at.
    """

    def __init__(self) -> None:
        self._settled = False
        self._tensor: Tensor | None = None
        self._before = self._merged = torch.empty(0)

    def before_apply(
        self, fragment: Fragment, tensors: Sequence[Tensor], optimizers: Sequence[object]
    ) -> None:
        if self._settled:
            return
        self._settled = bool(optimizers) and all(map(_keeps_no_copy, optimizers))
        weights = [
            t for slot, t in zip(fragment.slots, tensors, strict=True) if slot.spec.kind != BUFFER
        ]
        self._tensor = max(weights, key=Tensor.numel, default=None)
        if self._settled or self._tensor is None or self._tensor.numel() < SAMPLE_MIN:
            self._tensor = None
            return
        self._before = _sample(self._tensor)

    def after_apply(self) -> None:
        if self._tensor is not None:
            self._merged = _sample(self._tensor)

    def after_step(self) -> None:
        if self._tensor is None:
            return
        tensor, self._tensor = self._tensor, None
        before, merged, now = (t.cpu() for t in (self._before, self._merged, _sample(tensor)))
        jump = float(torch.dist(merged, before))
        if not jump > torch.finfo(tensor.dtype).eps * float(before.norm()):
            return  # lost in rounding (or not finite): says nothing
        if float(torch.dist(now, before)) <= UNDONE_WITHIN * jump:
            raise UnsupportedError(
                "this optimizer holds its own copy of the weights: its step took the parameters"
                " back to where they were before a merge, so nothing comes in from other learners."
                " Train with an optimizer without master weights (bf16 autocast needs none)."
            )
        self._settled = float(torch.dist(now, merged)) < KEPT_WITHIN * jump


def _live_tensor(name: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise LayoutError(f"{name} is in the layout but not in this model: attach the same model.")
    if tuple(tensor.shape) != shape:
        raise LayoutError(
            f"{name} has shape {tuple(tensor.shape)}, the layout says {shape}:"
            " attach the same model."
        )
    if any(size > 1 and step == 0 for size, step in zip(shape, tensor.stride(), strict=True)):
        raise LayoutError(
            f"{name} is expanded: several elements share one place in memory, so it cannot be"
            " written. Give it its own memory with .clone()."
        )
    return tensor


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        # Off CUDA this flag changes nothing we may rely on; on CUDA the buffer's events say when.
        cuda = any(tensor.is_cuda for pair in (targets, sources) for tensor in pair)
        torch._foreach_copy_(list(targets), list(sources), non_blocking=cuda)


def _blend(tensors: Sequence[Tensor], incoming: Sequence[Tensor], alpha: float) -> None:
    if all(tensor.dtype is torch.float32 and tensor.device.type == "cpu" for tensor in tensors):
        torch._foreach_lerp_(list(tensors), list(incoming), 1.0 - alpha)
        return
    for tensor, value in zip(tensors, incoming, strict=True):
        target = value.to(tensor.device, non_blocking=tensor.is_cuda)
        tensor.copy_(torch.lerp(tensor.float(), target, 1.0 - alpha))


def _shift(companions: Sequence[tuple[Tensor, Tensor]], sign: int) -> None:
    """With -1 before a write and with +1 after it: moves each by what was written."""
    for z, tensor in companions:
        z.add_(tensor, alpha=sign)


def _state_of(optimizer: object) -> Mapping[object, object]:
    state = getattr(unwrap(optimizer), "state", None)
    return state if isinstance(state, Mapping) else {}


def _sequences(state: Mapping[object, object], key: object) -> list[Tensor]:
    """The sequences that a schedule-free optimizer computes the parameter from: z, sometimes x."""
    # get, not []: the state of an optimizer is a defaultdict.
    entry = state.get(key)
    if not isinstance(entry, Mapping) or "z" not in entry or not isinstance(key, Tensor):
        return []
    parts = [entry["z"], entry.get("x")]
    return [part for part in parts if isinstance(part, Tensor) and part.shape == key.shape]


def _runs(fragment: Fragment, tensors: Sequence[Tensor]) -> list[_Run]:
    """The longest stretches of a fragment whose live tensors have the same dtype."""
    runs = []
    placed = zip(fragment.slots, tensors, strict=True)
    for dtype, members in groupby(placed, key=lambda pair: pair[1].dtype):
        slots = [slot for slot, _ in members]
        runs.append((dtype, slots[0].start, slots[-1].stop))
    return runs


def _keeps_no_copy(optimizer: object) -> bool:
    return type(unwrap(optimizer)).__module__.startswith("torch.optim.")


def _sample(tensor: Tensor) -> Tensor:
    """A flat fp32 copy of at most ``SAMPLE_MAX`` elements, on the tensor's device."""
    part = tensor.detach()
    while part.numel() > SAMPLE_MAX:
        row = part[0].numel()
        part = part[0] if row >= SAMPLE_MAX else part[: SAMPLE_MAX // row]
    return part.to(torch.float32, copy=True).reshape(-1)
