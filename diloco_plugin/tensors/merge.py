"""Merging the pseudo-gradients of one round, as they arrive, in the memory of one fragment."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from diloco_plugin.tensors.blocks import add_scaled, multiply, square_sum
from diloco_plugin.tensors.layout import WEIGHT, Fragment

#: A mean of unit vectors shorter than this is fp32 rounding: learners cancel out, there is no
#: direction.
DIRECTION_MIN: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Measure:
    """Size of one pseudo-gradient: L2 norms of each slot and of all, and whether all is finite."""

    norms: tuple[float, ...]
    total: float
    finite: bool


def measure(delta: Tensor, fragment: Fragment) -> Measure:
    """Measures a flat fp32 pseudo-gradient in one pass.

    Exact to about 4e-7, also for values whose squares leave fp32 (1e30, 1e-30). NaN and infinity
    anywhere show as ``finite=False``.

    Raises:
        ValueError: ``delta`` is not flat fp32 of the fragment's size.
    """
    _check(delta, fragment)
    squares = [square_sum(delta[slot.start : slot.stop]) for slot in fragment.slots]
    total = sum(squares)
    return Measure(tuple(map(math.sqrt, squares)), math.sqrt(total), math.isfinite(total))


def weight(tokens: int, steps: int) -> float:
    """The weight of a push: ``tokens * (tokens / steps)``, quantity by quality (paper section 3.2).

    Raises:
        ValueError: no step or no token; such a push must not count.
    """
    if steps < 1 or tokens < 1:
        raise ValueError(
            f"a push of {tokens} tokens in {steps} steps has no weight: use 1 or more."
        )
    return tokens * (tokens / steps)


class RoundMerge:
    """The merge of one fragment in one round. Not thread-safe.

    Radial-directional averaging (RDA, paper section 3.2 and appendix D.2), per tensor::

        g = (sum w|d| / sum w) * unit(sum w unit(d) / sum w)        unit(x) = x / |x|, unit(0) = 0

    Why: pseudo-gradients are nearly orthogonal, so a plain mean of M is shorter by sqrt(M), and the
    outer learning rate would depend on M. Here it is computed on arrival: ``S += (w/n) d; R += w n;
    W += w`` with ``n = |d|``, and at close ``g = (R/W) S/|S|``. Direct merging is ``g = sum w d /
    sum w``; embeddings and buffers are always merged directly.

    The result does not depend on the order of arrival beyond fp32 rounding; fold in a fixed order
    where it must be the same to the bit. A push cannot be taken back: fold complete and accepted
    ones only.

    Args:
        method: "rda", or "direct" for every slot, as in closing rounds.
        into: flat fp32 accumulator to use (cleared here, owned until the round is over); allocated
            when None.
    """

    def __init__(self, fragment: Fragment, method: str, into: Tensor | None = None) -> None:
        if method not in ("rda", "direct"):
            raise ValueError(f"merge method {method!r} is unknown: use rda or direct.")
        if into is None:
            into = torch.empty(fragment.elements, dtype=torch.float32)
        _check(into, fragment)
        self.pushes = 0
        self.weight = 0.0
        self._fragment = fragment
        self._sum: Tensor | None = into.zero_()
        self._unit = 1.0
        # Neighbors that are averaged share one pass; each slot under RDA has its own.
        self._direct: list[tuple[int, int]] = []
        self._radial: list[tuple[int, int, int]] = []
        self._radii = [0.0] * len(fragment.slots)
        for place, slot in enumerate(fragment.slots):
            if method == "rda" and slot.spec.kind == WEIGHT:
                self._radial.append((place, slot.start, slot.stop))
            elif self._direct and self._direct[-1][1] == slot.start:
                self._direct[-1] = (self._direct[-1][0], slot.stop)
            else:
                self._direct.append((slot.start, slot.stop))

    def fold(self, delta: Tensor, weight: float, measure: Measure) -> None:
        """Adds one push: flat fp32 ``delta`` with its ``measure``. ``delta`` is not kept.

        Raises:
            ValueError: a delta that is not finite, no positive weight, or the round is closed.
        """
        _check(delta, self._fragment)
        if not measure.finite or len(measure.norms) != len(self._radii):
            raise ValueError(f"only a measured and finite push may be folded, got {measure}.")
        if not 0.0 < weight < math.inf:
            raise ValueError(f"weight {weight} must be positive and finite.")
        into = self._open()
        # Weights are tokens squared. Relative to the first one they stay near 1, far from fp32's
        # limits.
        self._unit = self._unit if self.pushes else weight
        share = weight / self._unit
        for start, stop in self._direct:
            add_scaled(into[start:stop], delta[start:stop], share)
        for place, start, stop in self._radial:
            norm = measure.norms[place]
            if norm > 0.0:
                add_scaled(into[start:stop], delta[start:stop], share / norm)
                self._radii[place] += share * norm
        self.pushes += 1
        self.weight += weight

    def gradient(self) -> Tensor:
        """Closes the round and returns the merged pseudo-gradient, flat fp32, in the accumulator.

        Raises:
            ValueError: nothing was folded, or the round is closed already.
        """
        if not self.pushes:
            raise ValueError("a round without pushes has no gradient: skip the outer step.")
        merged, self._sum = self._open(), None
        total = self.weight / self._unit
        for start, stop in self._direct:
            multiply(merged[start:stop], 1.0 / total)
        for place, start, stop in self._radial:
            part = merged[start:stop]
            length = math.sqrt(square_sum(part))
            if length <= DIRECTION_MIN * total:
                part.zero_()
            else:
                multiply(part, self._radii[place] / total / length)
        return merged

    def _open(self) -> Tensor:
        if self._sum is None:
            raise ValueError("this round is closed: begin another one.")
        return self._sum


def _check(flat: Tensor, fragment: Fragment) -> None:
    if flat.shape != (fragment.elements,) or flat.dtype != torch.float32:
        raise ValueError(
            f"fragment {fragment.index} is flat float32 with {fragment.elements} elements,"
            f" got {flat.dtype} with shape {tuple(flat.shape)}."
        )
