"""The data of all examples: English text that ships with Python, read as bytes."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Final

import torch
from torch import Tensor
from torch.utils.data import Dataset

CONTEXT: Final = 64
#: The text is cut into pieces of this many bytes, and every tenth piece is never trained on.
_PIECE: Final = 4096


def _text() -> bytes:
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def _pieces(data: bytes) -> list[bytes]:
    return [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of `CONTEXT` bytes, `stride` apart, in the form that Hugging Face models take."""

    def __init__(self, data: bytes, stride: int = 1) -> None:
        self.data = data
        self._bytes = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._stride = stride

    def __len__(self) -> int:
        return (len(self.data) - CONTEXT) // self._stride + 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self._stride
        ids = self._bytes[start : start + CONTEXT].long()
        return {"input_ids": ids, "labels": ids}

    def shard(self, num_shards: int, index: int) -> Windows:
        """Every `num_shards`-th piece of the text. This is what `diloco_plugin.shard` asks for."""
        return Windows(b"".join(_pieces(self.data)[index::num_shards]), self._stride)


def training_text() -> Windows:
    """The text that may be trained on."""
    return Windows(b"".join(piece for i, piece in enumerate(_pieces(_text())) if i % 10 != 9))


def held_out_text(share: float = 1.0) -> Windows:
    """Text that nobody trains on; `share` < 1 takes only so many of its windows."""
    return Windows(b"".join(_pieces(_text())[9::10]), stride=round(CONTEXT / share))
