"""Slow and obvious versions, in float64, of what the room computes fast; and builders."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from diloco_plugin.tensors.layout import BUFFER, EMBEDDING, WEIGHT, Fragment, Layout, TensorSpec
from diloco_plugin.tensors.layout import build_layout as _build_layout

Push = tuple[Tensor, float]


def unit(x: Tensor) -> Tensor:
    norm = x.norm()
    return x / norm if norm > 0 else torch.zeros_like(x)


def direct(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean."""
    total = sum(weights)
    mean = torch.zeros_like(deltas[0])
    for delta, weight in zip(deltas, weights, strict=True):
        mean += delta * (weight / total)
    return mean


def rda(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The paper's formula, word by word."""
    radius = sum(w * float(d.norm()) for d, w in zip(deltas, weights, strict=True)) / sum(weights)
    return radius * unit(direct([unit(d) for d in deltas], weights))


def merged(fragment: Fragment, pushes: Sequence[Push], method: str) -> Tensor:
    """A whole round in float64, slot by slot."""
    weights = [weight for _, weight in pushes]
    parts = []
    for slot in fragment.slots:
        deltas = [delta[slot.start : slot.stop].double() for delta, _ in pushes]
        radial = method == "rda" and slot.spec.kind == WEIGHT
        parts.append((rda if radial else direct)(deltas, weights))
    return torch.cat(parts)


def nesterov(
    theta: Tensor, gradients: Sequence[Tensor], *, lr: float, momentum: float
) -> list[Tensor]:
    """theta after each round of SGD with Nesterov momentum, in float64."""
    theta, buf = theta.double(), torch.zeros_like(theta, dtype=torch.float64)
    seen = []
    for g in gradients:
        buf = momentum * buf + g.double()
        theta = theta - lr * (g.double() + momentum * buf)
        seen.append(theta)
    return seen


def norm(x: Tensor) -> float:
    return math.sqrt(math.fsum(v * v for v in x.double().tolist()))


def relative_error(found: Tensor, expected: Tensor) -> float:
    scale = float(expected.norm())
    return float((found.double() - expected).norm()) / (scale or 1.0)


def spec(name: str, *shape: int, kind: str = WEIGHT, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, shape, dtype, kind)


def layout_of(*specs: TensorSpec, fragments: int = 1) -> Layout:
    return _build_layout(specs, fragments)


def mixed_fragment() -> Fragment:
    """Two weights, an embedding between them, and a buffer at the end: 83 elements."""
    return layout_of(
        spec("a", 5, 7),
        spec("b", 4, 6, kind=EMBEDDING),
        spec("c", 20),
        spec("d", 4, kind=BUFFER),
    ).fragments[0]
