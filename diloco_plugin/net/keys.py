"""Keys in files: who the syncer is, who a learner is, and whom the syncer lets in.

A folder of keys holds `syncer.key` (secret, on the syncer's machine only), `syncer.pub`
(everywhere), `learners.d/NAME.pub` (on the syncer's machine: the allow-list) and `NAME.key`
(secret, on the learner's machine). A file is one line of 40 Z85 characters, and comments that begin
with #.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

import zmq
from zmq.utils import z85

from diloco_plugin.errors import ConfigError

#: In the place of keys: neither encrypted nor authenticated, and the user says so.
INSECURE: Final = "insecure-plaintext"
Insecure: TypeAlias = Literal["insecure-plaintext"]

#: The name of the syncer's own key: nobody who trains may have it.
SYNCER: Final = "syncer"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
#: No file of keys is longer, in bytes.
_FILE_BYTES_MAX: Final = 4096
_KEY_CHARACTERS: Final = 40


@dataclass(frozen=True, slots=True)
class Pair:
    """A CURVE key pair, in Z85: 40 characters each."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class DoorKeys:
    """What a syncer needs: its own pair, and who may come in, as public key -> name."""

    own: Pair
    learners: Mapping[bytes, str]


@dataclass(frozen=True, slots=True)
class LineKeys:
    """What a connection to a syncer needs: whose pair this is, and the syncer's public key."""

    name: str
    own: Pair
    syncer: bytes


def fingerprint(public: bytes) -> str:
    """What people compare: the first 16 hex digits of the SHA-256 of a public key."""
    return hashlib.sha256(public).hexdigest()[:16]


def check_key_name(name: str) -> None:
    """Raises ConfigError for a name that cannot be that of a learner's key."""
    if name.casefold() == SYNCER:
        raise ConfigError(f"the name {name!r} is the syncer's own: choose another one.")
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{name!r} cannot be the name of a key: use 1 to 64 letters, digits, '.', '_' or '-',"
            " not beginning with '.' or '-'."
        )


def new_pair() -> Pair:
    """Returns a fresh key pair. Raises ConfigError if this libzmq cannot encrypt."""
    _require_curve()
    while True:
        pair = Pair(*zmq.curve_keypair())
        # '#' is a digit of Z85, but begins a comment in our files.
        if not pair.public.startswith(b"#") and not pair.secret.startswith(b"#"):
            return pair


# ---- making ----


def make_syncer_keys(folder: Path) -> bytes:
    """Makes syncer.key, syncer.pub and learners.d there; returns the public key.

    Raises:
        ConfigError: one of the keys is there already, or the folder cannot be written.
    """
    pair = new_pair()
    with _writing(folder):
        (folder / "learners.d").mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_pair(pair, folder / "syncer.key", folder / "syncer.pub", "of the syncer")
    return pair.public


def make_learner_keys(folder: Path, name: str) -> bytes:
    """Makes NAME.key and learners.d/NAME.pub there; returns the public key.

    Raises:
        ConfigError: the name is no name, one of the keys is there already, or the folder cannot be
            written.
    """
    check_key_name(name)
    pair = new_pair()
    with _writing(folder):
        (folder / "learners.d").mkdir(mode=0o700, parents=True, exist_ok=True)
        public = folder / "learners.d" / f"{name}.pub"
        _write_pair(pair, folder / f"{name}.key", public, f"of learner {name}")
    return pair.public


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write keys to {folder}: {error.strerror}. Choose another folder with --keys."
        ) from None


def _write_pair(pair: Pair, secret: Path, public: Path, whose: str) -> None:
    for path in (secret, public):
        if path.exists():
            raise ConfigError(
                f"{path} exists already and is never overwritten: nothing was changed. Remove it"
                " yourself if a new key is what you want."
            )
    _write(secret, f"# secret key {whose}: never copy it to anybody else\n", pair.secret, 0o600)
    _write(public, f"# public key {whose}, {fingerprint(pair.public)}\n", pair.public, 0o644)


def _write(path: Path, comment: str, key: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as file:
        file.write(comment.encode() + key + b"\n")


# ---- reading ----


def read_door_keys(folder: Path) -> DoorKeys:
    """The keys of a syncer.

    Raises:
        ConfigError: a file is missing, malformed or readable by others; says which and the fix.
    """
    return DoorKeys(_read_own_pair(folder), read_allow_list(folder))


def _read_own_pair(folder: Path) -> Pair:
    """The syncer's own key; errors as `read_door_keys`."""
    _require_curve()
    pair = _read_pair(folder / "syncer.key", f"make it with `diloco keygen --keys {folder}`")
    public = _read_syncer_pub(folder)
    if public != pair.public:
        raise ConfigError(
            f"{folder}/syncer.pub does not belong to {folder}/syncer.key: put the pair there that"
            " was made together."
        )
    return pair


def read_allow_list(folder: Path) -> dict[bytes, str]:
    """Who may come in, as public key -> name: one file NAME.pub for each in learners.d.

    Raises:
        ConfigError: the folder is not there (nobody is meant by an empty one) or cannot be read, a
            file is malformed, or two names have the same key.
    """
    learners: dict[bytes, str] = {}
    try:
        paths = sorted((folder / "learners.d").iterdir())
    except OSError as error:
        raise ConfigError(
            f"cannot read {folder}/learners.d: {error.strerror}. Bring the folder back; an empty"
            " one admits nobody."
        ) from None
    for path in paths:
        if path.suffix != ".pub" or path.name.startswith("."):
            continue
        check_key_name(path.stem)
        key = _read_key(path, secret=False, fix="remove it, or copy it again")
        if key in learners:
            raise ConfigError(
                f"{path} holds the key of {learners[key]!r} as well: a key belongs to one name."
                " Remove one of the two files."
            )
        learners[key] = path.stem
    return learners


def read_line_keys(folder: Path, name: str) -> LineKeys:
    """The keys of the learner `name`, or (empty) of the only one that has a key there.

    Raises:
        ConfigError: a file is missing, malformed or readable by others, or there are several.
    """
    names = _names(folder)
    if not name:
        if len(names) > 1:
            raise ConfigError(
                f"{folder} holds the keys of several learners ({', '.join(names)}): say with name="
                " or --name (or the environment variable DILOCO_NAME) which of them this one is."
            )
        if not names:
            raise ConfigError(
                f"{folder} holds no learner's key (NAME.key): make one with"
                f" `diloco keygen NAME --keys {folder}`."
            )
        name = names[0]
    check_key_name(name)
    there = f"; there are {', '.join(f'{n}.key' for n in names)}" if names else ""
    fix = f"make it with `diloco keygen {name} --keys {folder}`{there}"
    return LineKeys(name, _read_pair(folder / f"{name}.key", fix), _read_syncer_pub(folder))


def read_visitor_keys(folder: Path, name: str) -> LineKeys:
    """The keys of somebody who only looks: the syncer's own, which is always let in, or those of
    any learner, `name`'s first.

    Raises:
        ConfigError: there is none, or it cannot be used.
    """
    if (folder / "syncer.key").exists():
        own = _read_own_pair(folder)
        return LineKeys(SYNCER, own, own.public)
    names = _names(folder)
    return read_line_keys(folder, name if name in names else names[0] if names else "")


def _names(folder: Path) -> list[str]:
    """Whose secret keys there are, the syncer's aside."""
    if not folder.is_dir():
        raise ConfigError(
            f"the folder of keys {folder} does not exist: `diloco keygen` makes one, or correct"
            " the path."
        )
    return sorted(
        p.stem for p in folder.glob("*.key") if _NAME.fullmatch(p.stem) and p.stem != SYNCER
    )


def _read_pair(path: Path, fix: str) -> Pair:
    secret = _read_key(path, secret=True, fix=fix)
    return Pair(zmq.curve_public(secret), secret)


def _read_syncer_pub(folder: Path) -> bytes:
    fix = "copy it from the syncer's machine"
    return _read_key(folder / "syncer.pub", secret=False, fix=fix)


def _read_key(path: Path, *, secret: bool, fix: str) -> bytes:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror}; {fix}.") from None
    if secret and mode & 0o077:
        raise ConfigError(
            f"{path} is a secret key that others on this machine may read (mode {mode:03o}): run"
            f" `chmod 600 {path}`, and make a new one if somebody may have read it."
        )
    return _parse(path, content, fix)


def _parse(path: Path, content: bytes, fix: str) -> bytes:
    lines = [line.strip() for line in content.splitlines()]
    keys = [line for line in lines if line and not line.startswith(b"#")]
    if len(content) > _FILE_BYTES_MAX or len(keys) != 1:
        raise ConfigError(
            f"{path} is no file of a key: it holds {len(keys)} lines that are no comments, and must"
            f" hold one of {_KEY_CHARACTERS} characters; {fix}."
        )
    if len(keys[0]) != _KEY_CHARACTERS:
        raise ConfigError(
            f"the key in {path} has {len(keys[0])} characters instead of {_KEY_CHARACTERS}; {fix}."
        )
    try:
        z85.decode(keys[0])
    except (KeyError, struct.error):
        raise ConfigError(f"the key in {path} has characters that no key has; {fix}.") from None
    return keys[0]


def _require_curve() -> None:
    if not zmq.has("curve"):
        raise ConfigError(
            "this libzmq was built without encryption (CURVE): install pyzmq's own wheel"
            " (pip install --force-reinstall --only-binary :all: pyzmq)."
        )
