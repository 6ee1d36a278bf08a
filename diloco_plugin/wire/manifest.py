"""What an inner optimizer state consists of, as it travels from one learner to another.

The stream of a ticket is: every tensor in the manifest's order, raw and little-endian, each at a
multiple of 8 bytes; then the manifest (msgpack); then its length (8 bytes, little-endian). Sizes
follow from shapes and dtypes and are never told. It comes from a learner that may lie: whatever is
decoded here is typed and bounded, and fits the bytes that came with it exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, Final

import msgspec

from diloco_plugin.errors import WireError
from diloco_plugin.wire.chunks import CHUNK_ELEMENTS
from diloco_plugin.wire.messages import TENSORS_MAX, Count, LongName

#: Bytes of a chunk of this stream.
CHUNK_BYTES: Final = 4 * CHUNK_ELEMENTS
#: Largest manifest, in bytes; also how many bytes a stream may have beyond its share of the model.
MANIFEST_BYTES_MAX: Final = 64 * 1024 * 1024
#: A stream may be this many times as large as the model in fp32.
MODELS_MAX: Final = 16
#: Scheduler positions are trees of numbers; deeper than this they are an attack or an accident.
DEPTH_MAX: Final = 6

BYTES_OF: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4,
                   "int16": 2, "int8": 1, "uint8": 1, "bool": 1}  # fmt: skip
_ALIGN: Final = 8

Key = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One tensor of a parameter's state."""

    key: Key
    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=16)]
    #: a scalar that lives on the CPU although its parameter may not
    on_cpu: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor itself.

        Raises:
            WireError: "invalid": an unknown dtype.
        """
        if self.dtype not in BYTES_OF:
            raise WireError("invalid", f"dtype {self.dtype!r} cannot be in an optimizer's state.")
        return math.prod(self.shape) * BYTES_OF[self.dtype]


class ParameterState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The state of one parameter, by its canonical name."""

    name: LongName
    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    tensors: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=16)]
    numbers: Annotated[dict[Key, int | float], msgspec.Meta(max_length=16)]


class GroupState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One param_group: what decides which state it needs, and its parameters."""

    switches: Annotated[dict[Key, bool], msgspec.Meta(max_length=64)]
    parameters: Annotated[tuple[ParameterState, ...], msgspec.Meta(max_length=TENSORS_MAX)]


class OptimizerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One optimizer, by the name of its class."""

    kind: LongName
    groups: Annotated[tuple[GroupState, ...], msgspec.Meta(max_length=TENSORS_MAX)]


class Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where a learning rate scheduler stands: the numbers of its state_dict, as a tree."""

    kind: LongName
    numbers: dict[str, Any]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Everything but the tensors."""

    optimizers: Annotated[tuple[OptimizerState, ...], msgspec.Meta(max_length=64)]
    #: learning rates of all groups, by optimizer
    rates: Annotated[tuple[tuple[float, ...], ...], msgspec.Meta(max_length=64)]
    positions: Annotated[tuple[Position, ...], msgspec.Meta(max_length=64)]


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Manifest)


def size_max(model_elements: int) -> int:
    """Most bytes that the stream of a model of so many elements may have."""
    return MODELS_MAX * 4 * model_elements + MANIFEST_BYTES_MAX


def chunks_of(size: int) -> int:
    """How many chunks carry a stream of `size` bytes."""
    return -(-size // CHUNK_BYTES)


def chunk_range(index: int, size: int) -> tuple[int, int]:
    """The bytes [start, stop) of chunk `index`.

    Raises:
        WireError: "out_of_range" if there is no such chunk.
    """
    if not 0 <= index < chunks_of(size):
        raise WireError("out_of_range", f"Chunk {index} of {chunks_of(size)} was asked for.")
    return index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, size)


def entries_of(optimizers: Iterable[OptimizerState]) -> list[Entry]:
    """All tensors, in the order in which they travel."""
    return [
        entry
        for optimizer in optimizers
        for group in optimizer.groups
        for parameter in group.parameters
        for entry in parameter.tensors
    ]


def places(entries: Iterable[Entry]) -> tuple[list[int], int]:
    """Where each tensor begins, and where all end.

    Raises:
        WireError: "invalid": an unknown dtype.
    """
    starts, at = [], 0
    for entry in entries:
        starts.append(at)
        at += entry.nbytes + -entry.nbytes % _ALIGN
    return starts, at


def tail_of(manifest: Manifest) -> bytes:
    """What follows the tensors.

    Raises:
        WireError: "oversize", or "invalid" when it cannot be encoded.
    """
    try:
        data = _encoder.encode(manifest)
    except Exception as error:  # an int of more than 64 bits, a name with surrogates
        raise WireError("invalid", f"A manifest cannot be encoded: {error}.") from error
    if len(data) > MANIFEST_BYTES_MAX - _ALIGN:
        raise WireError("oversize", f"A manifest of {len(data):,} bytes.")
    return data + len(data).to_bytes(_ALIGN, "little")


def read(stream: memoryview) -> tuple[Manifest, list[int]]:
    """The manifest of a whole stream, and where its tensors begin.

    Raises:
        WireError: it is none, or does not fit its bytes.
    """
    length = int.from_bytes(stream[-_ALIGN:], "little")
    begin = stream.nbytes - _ALIGN - length
    if not 0 < length <= MANIFEST_BYTES_MAX or begin < 0:
        raise WireError("invalid", f"A manifest of {length:,} bytes in {stream.nbytes:,}.")
    try:
        manifest = _decoder.decode(stream[begin : begin + length])
    except Exception as error:  # as in framing: whatever bytes provoke is the peer's fault
        raise WireError("invalid", f"{error} (manifest of {length:,} bytes).") from None
    for position in manifest.positions:
        _check_numbers(position.numbers, DEPTH_MAX)
    starts, end = places(entries_of(manifest.optimizers))
    if end != begin:
        raise WireError("wrong_size", f"Tensors up to byte {end:,}, the manifest at {begin:,}.")
    return manifest, starts


def _check_numbers(tree: object, depth: int) -> None:
    if isinstance(tree, (int, float)):
        return
    if depth == 0:
        raise WireError("invalid", f"A scheduler's position deeper than {DEPTH_MAX} levels.")
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        children = list(tree.values())
    elif isinstance(tree, list):
        children = tree
    else:
        raise WireError("invalid", f"A scheduler's position with a {type(tree).__name__} in it.")
    for child in children:
        _check_numbers(child, depth - 1)
