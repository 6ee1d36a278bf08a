"""How a model is described in a Hello, and what is read there: the same on both sides."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Raw

from diloco_plugin.tensors.layout import TensorSpec, taking_part
from diloco_plugin.wire.framing import decode_model, encode_model
from diloco_plugin.wire.messages import Tensor


def describe(specs: Iterable[TensorSpec]) -> Raw:
    """What a Hello says about a model of these tensors.

    Raises:
        WireError: "oversize": more than a message holds; "invalid": it cannot be encoded.
    """
    return encode_model(tuple(Tensor(s.name, s.shape, s.dtype, s.kind, s.alias_of) for s in specs))


def specs_said(model: Raw, buffers: str) -> tuple[TensorSpec, ...]:
    """The tensors that take part, of the model that a Hello describes. Raises only `WireError`."""
    specs = (TensorSpec(t.name, t.shape, t.dtype, t.kind, t.alias_of) for t in decode_model(model))
    return taking_part(specs, buffers)
