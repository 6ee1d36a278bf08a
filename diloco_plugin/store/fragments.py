"""The files of fragments: one version each, never changed once they have their name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from diloco_plugin.store import files
from diloco_plugin.store.formats import (
    Entry,
    damaged,
    decode_entry,
    digest_record,
    encode_entry,
)

_KEY: Final = "diloco"
_LENGTH_BYTES: Final = 8


class _Header(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name="__metadata__")


def write_fragment(path: Path, entry: Entry, tensors: Mapping[str, Tensor]) -> None:
    """The file at `path` holds the tensors and their entry, durably.

    Raises:
        OSError, SafetensorError: it could not be written; a temporary file may be left.
        StoreError: it may or may not be durable.
    """
    files.make_folder(path.parent)
    metadata = {_KEY: encode_entry(entry).decode()}
    safetensors.torch.save_file(dict(tensors), files.temporary(path), metadata=metadata)
    files.sync_temporary(path)
    files.publish(path)


def read_entry(path: Path) -> Entry:
    """The entry in the file at `path`; its tensors are not looked at.

    Raises:
        DamagedError: it is missing, or has no entry.
        OSError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = file.read(min(length, os.fstat(file.fileno()).st_size))
    except FileNotFoundError:
        raise damaged(path, "it is missing") from None
    return _entry(header, path)


def read_fragment(path: Path) -> tuple[Entry, dict[str, Tensor]]:
    """Everything in the file at `path`, verified. Takes twice its size in memory for a moment.

    Raises:
        DamagedError: it is missing, or its tensors and record are not what was written.
        OSError: it cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise damaged(path, "it is missing") from None
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    entry = _entry(data[_LENGTH_BYTES : _LENGTH_BYTES + length], path)
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise damaged(path, "it is no whole safetensors file") from error
    digest = digest_record(entry.record, tensors)
    if digest != entry.record.digest:
        raise damaged(path, f"digest {entry.record.digest} was expected, it has {digest}")
    return entry, tensors


def _entry(header: bytes, path: Path) -> Entry:
    try:
        metadata = msgspec.json.decode(header, type=_Header).metadata
        text = metadata[_KEY]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError) as error:
        raise damaged(path, "its header is not what was written") from error
    return decode_entry(text, path)
