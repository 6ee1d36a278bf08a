"""What the files say: the run, a merge, a manifest, a life; and where each of them lies.

    LOCK                                held while a process uses the folder
    epoch.json                          Life: the newest life of the syncer
    run.json                            RunFile: what is trained
    manifest/000000456.json             Manifest: the newest version of every fragment at one time
    journal/000456.log                  Entry*: the merges after manifest 456, in order
    frag/0007/v000000123.safetensors    one version of one fragment, with its Entry
    evidence/                           damaged files that a repair replaced

The JSON files are sealed: they hold a body and its BLAKE2b-256, and are taken to the byte or not
at all.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import torch
from torch import Tensor

from diloco_plugin.errors import ConfigError, DamagedError

FORMAT: Final = 1
JOURNAL_KIND: Final = "journal"
#: The tensor of a fragment that learners hold; the others are the outer optimizer's.
THETA: Final = "theta"
LOCK: Final = "LOCK"
EPOCH_FILE: Final = "epoch.json"
RUN_FILE: Final = "run.json"

_NAME: Final = {
    "manifest": re.compile(r"(\d{9})\.json"),
    "journal": re.compile(r"(\d{6})\.log"),
    "frag": re.compile(r"(\d{4})"),
    "version": re.compile(r"v(\d{9})\.safetensors"),
}
T = TypeVar("T", bound=msgspec.Struct)


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class RunFile(_Strict, frozen=True, kw_only=True):
    """What is trained. Nothing in it changes by training.

    Attributes:
        tensors: (name, shape, dtype, kind, alias_of) of every tensor that takes part.
        version: of the package that wrote it.
    """

    format: int = FORMAT
    run: str
    parameters: dict[str, Any]
    tensors: tuple[tuple[str, tuple[int, ...], str, str, str], ...]
    fragments: int
    fingerprint: str
    model_config: str = ""
    version: str = ""


class Contribution(_Strict, frozen=True, kw_only=True):
    """One push that went into a merge."""

    name: str
    incarnation: str
    index: int = 0
    base: int
    steps: int
    tokens: int
    norm: float


class MergeRecord(_Strict, frozen=True, kw_only=True):
    """How a version of a fragment came to be, and what it is to the bit.

    Attributes:
        exact: learners hold theta itself, not a rounded form of it.
        base_digest: `digest_of` the fp32 values as learners hold them.
        digest: over this record (without it) and all tensors, hex; the store fills it in.
    """

    epoch: int
    round: int
    fragment: int
    version: int
    clock: int
    exact: bool
    contributions: tuple[Contribution, ...]
    base_digest: str
    digest: str = ""


class Entry(_Strict, frozen=True, kw_only=True):
    """A record and the digest of the version that it followed ("" for the first)."""

    record: MergeRecord
    after: str


class Manifest(_Strict, frozen=True, kw_only=True):
    """Everything at one time; what came later is in the journal of the same number."""

    format: int = FORMAT
    number: int
    entries: tuple[Entry, ...]
    past: Any


class Life(_Strict, frozen=True, kw_only=True):
    """The newest life of the syncer.

    Attributes:
        lineage: the oldest epoch whose announced versions are all durable.
        clean: it was closed with everything written.
        started: a run had been started.
        start: what only that start was told, by key of the syncer's configuration.
        run: a copy of what is in run.json, against its loss.
    """

    format: int = FORMAT
    epoch: int
    lineage: int
    durability: str
    clean: bool = False
    started: bool = False
    start: dict[str, Any] = {}
    run: RunFile | None = None


class _Sealed(_Strict, frozen=True, kw_only=True):
    digest: str
    body: msgspec.Raw


class _Format(msgspec.Struct):
    format: int


def seal(body: msgspec.Struct) -> bytes:
    """The bytes of a sealed file."""
    return _seal(msgspec.json.encode(body))


def read_sealed(path: Path, kind: type[T]) -> T:
    """What was sealed in the file at `path`.

    Raises:
        DamagedError: it is missing, or not to the byte what was written.
        ConfigError: a newer version of the package wrote it.
        OSError: it cannot be read.
    """
    try:
        data = path.read_bytes()
        sealed = msgspec.json.decode(data, type=_Sealed)
        body = bytes(sealed.body)
        if _seal(body) != data:
            raise damaged(path, "its digest is wrong")
        written = msgspec.json.decode(body, type=_Format).format
        if written > FORMAT:
            raise ConfigError(
                f"{path} has format {written}; this version of diloco-plugin reads up to {FORMAT}."
                " Update diloco-plugin."
            )
        return msgspec.json.decode(body, type=kind)
    except FileNotFoundError:
        raise damaged(path, "it is missing") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise damaged(path, "it is not what was written there") from error


def damaged(path: Path, what: str) -> DamagedError:
    """The error for a file of a state directory that is not as it was written."""
    if path.name in (EPOCH_FILE, RUN_FILE):
        root = path.parent
    else:
        root = path.parents[2 if path.suffix == ".safetensors" else 1]
    return DamagedError(
        f"{path} is damaged: {what}. Nothing was changed."
        f" `diloco repair --state {root}` shows what can be done."
    )


def encode_entry(entry: Entry) -> bytes:
    """The payload of a journal record, and the metadata of a fragment's file."""
    return msgspec.json.encode(entry)


def decode_entry(data: bytes | str, path: Path) -> Entry:
    """The entry in `data`, which was found in `path`.

    Raises:
        DamagedError: it is none.
    """
    try:
        return msgspec.json.decode(data, type=Entry)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise damaged(path, "a record of a merge is not what was written") from error


def digest_of(tensor: Tensor) -> str:
    """BLAKE2b-256, hex, of the raw bytes of a contiguous CPU tensor."""
    digest = hashlib.blake2b(digest_size=32)
    digest.update(_raw(tensor))
    return digest.hexdigest()


def digest_record(record: MergeRecord, tensors: Mapping[str, Tensor]) -> str:
    """BLAKE2b-256, hex, of the record without its digest and of all tensors by name."""
    plain = msgspec.structs.replace(record, digest="")
    digest = hashlib.blake2b(msgspec.json.encode(plain), digest_size=32)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(msgspec.json.encode((name, str(tensor.dtype), tuple(tensor.shape))))
        digest.update(_raw(tensor))
    return digest.hexdigest()


def manifest_path(root: Path, number: int) -> Path:
    """Where a manifest lies."""
    return root / "manifest" / f"{number:09}.json"


def journal_path(root: Path, number: int) -> Path:
    """Where the journal after a manifest lies."""
    return root / "journal" / f"{number:06}.log"


def fragment_path(root: Path, fragment: int, version: int) -> Path:
    """Where a version of a fragment lies."""
    return root / "frag" / f"{fragment:04}" / f"v{version:09}.safetensors"


def numbers(root: Path, folder: str) -> list[int]:
    """The numbers of the manifests, journals or fragments ("frag") that are there, in order."""
    return _numbers(root / folder, _NAME[folder])


def versions(root: Path, fragment: int) -> list[int]:
    """The versions of a fragment that have a file, in order."""
    return _numbers(fragment_path(root, fragment, 0).parent, _NAME["version"])


def _numbers(folder: Path, name: re.Pattern[str]) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(
        int(found[1]) for entry in folder.iterdir() if (found := name.fullmatch(entry.name))
    )


def _seal(body: bytes) -> bytes:
    digest = hashlib.blake2b(body, digest_size=32).hexdigest()
    return msgspec.json.encode(_Sealed(digest=digest, body=msgspec.Raw(body)))


def _raw(tensor: Tensor) -> memoryview:
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError("only contiguous CPU tensors have bytes to write.")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
