"""How a chunk that has come is checked and put where it belongs: the same on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diloco_plugin.errors import WireError
from diloco_plugin.tensors.codec import Codec
from diloco_plugin.wire.chunks import Receiver, check_payload, chunk_bounds
from diloco_plugin.wire.messages import Chunk


def take_chunk(
    chunk: Chunk, frames: Sequence[Any], receiver: Receiver, kind: Codec, target: Tensor
) -> None:
    """Decode the payload of a chunk into `target`, the flat fp32 fragment, and count it.

    Raises:
        WireError: it is not what was asked for, or not as it was sent; nothing has changed.
    """
    if len(frames) != 2:
        raise WireError("truncated", f"a chunk in {len(frames)} frames instead of 2")
    start, stop = chunk_bounds(chunk.index, target.numel())
    payload = frames[1].buffer
    check_payload(payload, kind.nbytes(stop - start), chunk.crc)
    receiver.receive(chunk.index)
    kind.decode(torch.frombuffer(payload, dtype=torch.uint8), target[start:stop])
