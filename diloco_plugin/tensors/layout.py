"""Where every tensor lives: fragments of whole tensors, balanced in size, alike at every learner.

This module is the room's door to ``specs`` and ``census`` too.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from diloco_plugin.errors import LayoutError
from diloco_plugin.tensors.census import Census, canonical_name, census
from diloco_plugin.tensors.specs import (
    BUFFER,
    EMBEDDING,
    KINDS,
    WEIGHT,
    TensorSpec,
    check_specs,
    differences,
    dtype_class,
)

__all__ = [
    "BUFFER",
    "EMBEDDING",
    "KINDS",
    "WEIGHT",
    "Census",
    "Fragment",
    "Layout",
    "Slot",
    "TensorSpec",
    "build_layout",
    "canonical_name",
    "census",
    "check_specs",
    "differences",
    "dtype_class",
    "taking_part",
    "views",
]


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor in its flat fragment: elements ``[start:stop]``."""

    spec: TensorSpec
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Fragment:
    """A fixed set of whole tensors that is merged at once, as one flat tensor.

    Attributes:
        slots: gapless, in flat order: weights and embeddings by name, then buffers by name.
        elements: length of the flat tensor.
        optimized: ``[0:optimized]`` goes through the outer optimizer; the rest are buffers.
    """

    index: int
    slots: tuple[Slot, ...]
    elements: int
    optimized: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All fragments. Two models may share a run exactly when their fingerprints are equal."""

    fragments: tuple[Fragment, ...]
    fingerprint: str
    elements: int


def taking_part(specs: Iterable[TensorSpec], buffers: str) -> tuple[TensorSpec, ...]:
    """Those of a model's tensors that take part in a run with this ``buffers``: merge or local."""
    return tuple(spec for spec in specs if buffers == "merge" or spec.kind != BUFFER)


def build_layout(specs: Iterable[TensorSpec], fragments: int) -> Layout:
    """Distributes whole tensors over at most ``fragments`` fragments of about equal size.

    Largest tensor first into the lightest fragment: the paper's balanced tensor fragmentation,
    which is greedy number partitioning (LPT), so the largest fragment is at most 4/3 of the best
    possible. Ties go by name, then by fragment index, so the order of ``specs`` does not matter.
    Aliases and tensors without elements take no place. There are never more fragments than tensors.

    Raises:
        LayoutError: the description makes no sense (``check_specs``), or ``fragments`` is below 1.
    """
    ordered = tuple(sorted(specs, key=lambda spec: spec.name))
    check_specs(ordered)
    if fragments < 1:
        raise LayoutError(f"fragments={fragments} is too small: use at least 1.")
    placed = [spec for spec in ordered if not spec.alias_of and spec.numel]
    count = min(fragments, len(placed))
    bins: list[list[TensorSpec]] = [[] for _ in range(count)]
    loads = [(0, index) for index in range(count)]
    for spec in sorted(placed, key=lambda spec: (-spec.numel, spec.name)):
        load, index = loads[0]
        bins[index].append(spec)
        heapq.heapreplace(loads, (load + spec.numel, index))
    packed = tuple(_fragment(index, members) for index, members in enumerate(bins))
    elements = sum(fragment.elements for fragment in packed)
    return Layout(packed, _fingerprint(ordered, count), elements)


def views(flat: Tensor, fragment: Fragment) -> list[Tensor]:
    """One shaped view for each slot of ``fragment``, sharing storage with ``flat``.

    Raises:
        ValueError: ``flat`` is not 1-D with ``fragment.elements`` elements.
    """
    if flat.shape != (fragment.elements,):
        raise ValueError(
            f"fragment {fragment.index} is flat with {fragment.elements} elements,"
            f" got shape {tuple(flat.shape)}."
        )
    return [flat[slot.start : slot.stop].view(slot.spec.shape) for slot in fragment.slots]


def _fragment(index: int, members: Sequence[TensorSpec]) -> Fragment:
    slots: list[Slot] = []
    at = optimized = 0
    for spec in sorted(members, key=lambda spec: (spec.kind == BUFFER, spec.name)):
        slots.append(Slot(spec, at, at + spec.numel))
        at += spec.numel
        if spec.kind != BUFFER:
            optimized = at
    return Fragment(index, tuple(slots), at, optimized)


def _fingerprint(ordered: Sequence[TensorSpec], count: int) -> str:
    """SHA-256, hex, of everything that both sides of an exchange must agree on."""
    description = [
        [spec.name, spec.shape, dtype_class(spec.dtype), spec.kind, spec.alias_of]
        for spec in ordered
    ]
    text = json.dumps(["diloco layout 1", count, description], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
