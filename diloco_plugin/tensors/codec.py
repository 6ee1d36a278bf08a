"""How a flat fp32 tensor travels: encoded into bytes and back, into buffers that the caller owns.

A codec sees whole chunks (262,144 elements; the last one may be shorter), so a block-wise format,
scales first and codes after them, is just another entry here: block sizes that divide a chunk never
straddle two.
"""

from __future__ import annotations

import difflib
from typing import Final, Protocol

import torch
from torch import Tensor

from diloco_plugin.errors import ConfigError


class Codec(Protocol):
    """One format. ``src`` and ``out`` are 1-D, contiguous, on the CPU, and do not overlap."""

    @property
    def name(self) -> str:
        """Its name on the wire and in the configuration."""

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back every bit."""

    def nbytes(self, elements: int) -> int:
        """Encoded size in bytes of that many elements."""

    def encode(self, src: Tensor, out: Tensor) -> None:
        """Writes fp32 ``src`` into uint8 ``out`` of exactly ``nbytes(src.numel())`` bytes.

        Raises:
            ValueError: a wrong dtype or size.
        """

    def decode(self, src: Tensor, out: Tensor) -> None:
        """Reads uint8 ``src`` into fp32 ``out``: the other way round.

        Raises:
            ValueError: a wrong dtype or size.
        """


class _Cast:
    """Element by element, as ``dtype``. What it cannot hold becomes infinity; NaN stays NaN."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.lossless = dtype is torch.float32
        self._dtype = dtype

    def nbytes(self, elements: int) -> int:
        return elements * self._dtype.itemsize

    def encode(self, src: Tensor, out: Tensor) -> None:
        self._view(out, src).copy_(src)

    def decode(self, src: Tensor, out: Tensor) -> None:
        out.copy_(self._view(src, out))

    def _view(self, encoded: Tensor, plain: Tensor) -> Tensor:
        expected = self.nbytes(plain.numel())
        if plain.dtype != torch.float32 or encoded.dtype != torch.uint8:
            raise ValueError(
                f"{self.name} is between float32 and uint8, not {plain.dtype}, {encoded.dtype}."
            )
        if plain.dim() != 1 or encoded.shape != (expected,):
            raise ValueError(
                f"{self.name}: {tuple(plain.shape)} elements take ({expected},) bytes,"
                f" the buffer has {tuple(encoded.shape)}."
            )
        if encoded.storage_offset() % self._dtype.itemsize:
            raise ValueError(
                f"{self.name}: the bytes begin at offset {encoded.storage_offset()} of their"
                f" storage, not at a multiple of {self._dtype.itemsize}."
            )
        return encoded.view(self._dtype)


_CODECS: Final[dict[str, Codec]] = {
    "fp32": _Cast("fp32", torch.float32),
    "bf16": _Cast("bf16", torch.bfloat16),
}


def codec(name: str) -> Codec:
    """The codec of that name.

    Raises:
        ConfigError: there is none.
    """
    found = _CODECS.get(name)
    if found is None:
        near = difflib.get_close_matches(name.lower(), _CODECS, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"codec={name!r} is unknown (there are {', '.join(_CODECS)}): did you mean {near}?"
        )
    return found
