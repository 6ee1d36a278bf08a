"""Passes over flat fp32 tensors, block by block, so that what one pass reads is still in the cache.

All functions work in place and allocate at most one block. None of them is a public interface.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

#: Elements of a block: 256 KiB of fp32 stays in L2 (measured best of 16K to 1M).
BLOCK: Final = 65_536

#: Scales inside these bounds act the same in fp32 as in fp64. Beyond them fp32 would flush or
#: overflow.
_SCALE_MIN: Final = 1e-30
_SCALE_MAX: Final = 1e30
#: The same for a block's sum of squares: below it, squares may have underflowed.
_SQUARES_MIN: Final = 1e-25
_SQUARES_MAX: Final = 1e38


def _blocks(elements: int) -> Iterator[slice]:
    return (slice(at, min(at + BLOCK, elements)) for at in range(0, elements, BLOCK))


def square_sum(flat: Tensor) -> float:
    """The sum of squares of a 1-D floating-point tensor, as a float64.

    Not finite exactly when an element is not: squares of finite fp32 values fit into float64.
    Summed by blocks, because one long fp32 sum is off by 9e-5 over 4M elements, and this is by
    4e-7.
    """
    total = 0.0
    for at in _blocks(flat.numel()):
        block = flat[at]
        squares = float(torch.dot(block, block))
        # Written so that NaN takes the slow way too.
        if not _SQUARES_MIN < squares < _SQUARES_MAX:
            wide = block.double()
            squares = float(torch.dot(wide, wide))
        total += squares
    return total


def add_scaled(into: Tensor, delta: Tensor, scale: float) -> None:
    """``into += scale * delta`` for 1-D fp32 tensors and any finite scale."""
    if _SCALE_MIN < abs(scale) < _SCALE_MAX:
        into.add_(delta, alpha=scale)
        return
    for at in _blocks(into.numel()):
        into[at].add_(delta[at].double().mul_(scale))


def multiply(into: Tensor, scale: float) -> None:
    """``into *= scale`` for a 1-D fp32 tensor and any finite scale."""
    if _SCALE_MIN < abs(scale) < _SCALE_MAX:
        into.mul_(scale)
        return
    for at in _blocks(into.numel()):
        into[at].copy_(into[at].double().mul_(scale))
