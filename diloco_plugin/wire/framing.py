"""Messages to bytes and back: the one door through which bytes from the network come in.

Every decoder takes any bytes at all and either returns a typed, bounded message or raises
`WireError`; nothing else comes out. All functions are pure and may be called from any thread.
"""

from __future__ import annotations

import collections.abc
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from diloco_plugin.errors import WireError
from diloco_plugin.wire.messages import (
    CONTROL_BYTES_MAX,
    TENSORS_MAX,
    Bulk,
    BulkHello,
    Chunk,
    Gone,
    Message,
    Status,
    Tensor,
    ToLearner,
    ToSyncer,
    Want,
    Welcome,
)

#: Largest header of a bulk message, in bytes. The payload is a frame of its own and not counted.
BULK_BYTES_MAX: Final = 4 * 1024
PARAMETERS_MAX: Final = 64
PARAMETER_TEXT_MAX: Final = 4096
#: Status is a tree for people; deeper than this it is an attack or an accident.
STATUS_DEPTH_MAX: Final = 8

Bytes: TypeAlias = bytes | bytearray | memoryview
T = TypeVar("T")

_BULK: Final = (BulkHello, Want, Chunk, Gone)
_encoder: Final = msgspec.msgpack.Encoder()
_to_syncer: Final = msgspec.msgpack.Decoder[ToSyncer](ToSyncer)
_to_learner: Final = msgspec.msgpack.Decoder[ToLearner](ToLearner)
_bulk: Final = msgspec.msgpack.Decoder[Bulk](Bulk)
_model: Final = msgspec.msgpack.Decoder[tuple[Tensor, ...]](tuple[Tensor, ...])


def encode(message: Message) -> bytes:
    """Returns the bytes of a control message or of a bulk header.

    Raises:
        WireError: "oversize" when the receiver would drop it (libzmq drops the connection without
            telling the sender, so it has to be said here); "invalid" when it cannot be encoded.
    """
    kind = type(message).__name__
    try:
        data = _encoder.encode(message)
    except Exception as error:  # bad surrogates, ints over 64 bits, recursion, foreign types
        raise WireError("invalid", f"{kind} cannot be encoded: {error}.") from error
    limit = BULK_BYTES_MAX if isinstance(message, _BULK) else CONTROL_BYTES_MAX
    if len(data) > limit:
        raise _too_large(kind, f"{len(data):,} bytes (at most {limit:,})")
    return data


def decode_to_syncer(data: Bytes) -> ToSyncer:
    """Returns what a learner says to the syncer. Raises only `WireError`."""
    return _decode(_to_syncer, data, CONTROL_BYTES_MAX)


def encode_model(tensors: tuple[Tensor, ...]) -> msgspec.Raw:
    """Returns what a Hello says about a model.

    Raises:
        WireError: "oversize" or "invalid", as for `encode`.
    """
    if len(tensors) > TENSORS_MAX:
        raise _too_large("Hello", f"{len(tensors):,} tensors (at most {TENSORS_MAX:,})")
    try:
        return msgspec.Raw(_encoder.encode(tensors))
    except Exception as error:
        raise WireError("invalid", f"a model cannot be described: {error}.") from error


def model_length(model: msgspec.Raw) -> int:
    """Returns how many tensors a Hello says that it describes; looks at none of them.

    Raises:
        WireError: "invalid": that is no list, or too long a one.
    """
    head = bytes(memoryview(model)[:5])
    if head and head[0] & 0xF0 == 0x90:
        length = head[0] & 0x0F
    elif head[:1] in (b"\xdc", b"\xdd"):
        length = int.from_bytes(head[1 : 3 if head[0] == 0xDC else 5], "big")
    else:
        raise WireError("invalid", "A model is described by a list of tensors.")
    if length > TENSORS_MAX:
        raise WireError("invalid", f"{length:,} tensors; at most {TENSORS_MAX:,} are allowed.")
    return length


def decode_model(model: msgspec.Raw) -> tuple[Tensor, ...]:
    """Returns the tensors that a Hello describes. Raises only `WireError`."""
    model_length(model)
    return _decode(_model, memoryview(model), CONTROL_BYTES_MAX)


def decode_to_learner(data: Bytes) -> ToLearner:
    """Returns what the syncer says to a learner. Raises only `WireError`."""
    message = _decode(_to_learner, data, CONTROL_BYTES_MAX)
    if isinstance(message, Welcome):
        _check_parameters(message.parameters)
    elif isinstance(message, Status):
        _check_tree(message.body, STATUS_DEPTH_MAX)
    return message


def decode_bulk(data: Bytes) -> Bulk:
    """Returns the header of a bulk message. Raises only `WireError`."""
    return _decode(_bulk, data, BULK_BYTES_MAX)


def _too_large(kind: str, size: str) -> WireError:
    advice = {
        "Hello": "Synchronize fewer tensors: freeze those that need no training, or train an "
        "adapter (LoRA); buffers='local' leaves the buffers at home.",
        "Welcome": "Shorten the run's parameters.",
        "Status": "Ask for less: the run has too many learners or fragments for one answer.",
    }
    todo = advice.get(kind, "Send less in one message.")
    return WireError("oversize", f"{kind} is too large to send: {size}. {todo}")


def _decode(decoder: msgspec.msgpack.Decoder[T], data: Bytes, limit: int) -> T:
    size = memoryview(data).nbytes
    if size > limit:
        raise WireError("oversize", f"A message of {size:,} bytes; at most {limit:,} are allowed.")
    try:
        return decoder.decode(data)
    # Not only msgspec's own errors: deep nesting is a RecursionError, bad text a
    # UnicodeDecodeError, and whatever else bytes may provoke is the peer's fault, not ours.
    except Exception as error:
        raise WireError(_reason(error), f"{error} ({size:,} bytes).") from None


def _reason(error: Exception) -> str:
    text = str(error)
    if isinstance(error, msgspec.ValidationError):
        if "unknown field" in text or (text.startswith("Invalid value") and "$.type" in text):
            return "unknown"
        # A scalar or a list where a message should be (JSON, pickles and zips begin like that).
        at_the_root = text.startswith("Expected `object`") and " - at " not in text
        return "garbage" if at_the_root else "invalid"
    if isinstance(error, msgspec.DecodeError) and "truncated" in text:
        return "truncated"
    return "garbage"


def _check_parameters(parameters: dict[str, Any]) -> None:
    """Allows at most 64 scalars, short strings, and flat tables of those: nothing deeper."""
    count = 0
    for name, value in parameters.items():
        table: dict[Any, Any] = value if isinstance(value, dict) else {name: value}
        count += len(table)
        for key, item in table.items():
            _check_scalar(key, item)
        if len(name) > PARAMETER_TEXT_MAX:
            raise WireError("invalid", "A parameter's name is too long.")
    if count > PARAMETERS_MAX or len(parameters) > PARAMETERS_MAX:
        raise WireError("invalid", f"{count} parameters; at most {PARAMETERS_MAX} are allowed.")


def _check_scalar(key: object, item: object) -> None:
    if not isinstance(key, str) or len(key) > PARAMETER_TEXT_MAX:
        raise WireError("invalid", "A parameter's name must be a short string.")
    if item is not None and not isinstance(item, (bool, int, float, str)):
        raise WireError("invalid", f"Parameter {key!r} is a {type(item).__name__}: not a scalar.")
    if isinstance(item, str) and len(item) > PARAMETER_TEXT_MAX:
        raise WireError("invalid", f"Parameter {key!r} is longer than {PARAMETER_TEXT_MAX}.")


def _check_tree(tree: object, depth: int) -> None:
    """Allows what JSON allows, `depth` levels of it."""
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return
    if depth == 0:
        raise WireError("invalid", f"A status deeper than {STATUS_DEPTH_MAX} levels.")
    children: collections.abc.Iterable[object]
    if isinstance(tree, dict):
        if not all(isinstance(key, str) for key in tree):
            raise WireError("invalid", "A status with a key that is not a string.")
        children = tree.values()
    elif isinstance(tree, list):
        children = tree
    else:
        raise WireError("invalid", f"A status with a {type(tree).__name__} in it.")
    for child in children:
        _check_tree(child, depth - 1)
