"""What a connection to a syncer is secured with: the `keys` that were given, or DILOCO_KEYS."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from diloco_plugin.net.address import Address
from diloco_plugin.net.keys import (
    INSECURE,
    Insecure,
    LineKeys,
    read_line_keys,
    read_visitor_keys,
)

log = logging.getLogger("diloco.learner")

#: A folder of keys, or "insecure-plaintext".
KEYS_VARIABLE: Final = "DILOCO_KEYS"
NAME_VARIABLE: Final = "DILOCO_NAME"


def key_folder(keys: str | None) -> Path:
    """Where keys are: the given folder, DILOCO_KEYS, or ~/.config/diloco."""
    found = keys or os.environ.get(KEYS_VARIABLE, "")
    return Path("~/.config/diloco" if found in ("", INSECURE) else found).expanduser()


def learner_keys(address: str, keys: str | None, name: str | None) -> LineKeys | Insecure | None:
    """What the learner `name` (default: DILOCO_NAME, else whose key is there) connects with.

    None where there are none: a `Line` then refuses every address but loopback.

    Raises:
        ConfigError: the keys cannot be used; says which and why.
    """
    folder = _chosen(address, keys)
    if not isinstance(folder, Path):
        return folder
    return read_line_keys(folder, name or os.environ.get(NAME_VARIABLE, ""))


def visitor_keys(address: str, keys: str | None) -> LineKeys | Insecure | None:
    """What somebody connects with who only looks: by preference with syncer.key.

    Raises:
        ConfigError: as `learner_keys`.
    """
    folder = _chosen(address, keys)
    if not isinstance(folder, Path):
        return folder
    return read_visitor_keys(folder, os.environ.get(NAME_VARIABLE, ""))


def _chosen(address: str, keys: str | None) -> Path | Insecure | None:
    found = keys or os.environ.get(KEYS_VARIABLE, "")
    if found == INSECURE:
        if not Address.parse(address).is_loopback:
            log.warning(
                "the connection to %s is neither encrypted nor authenticated (%s): whoever is on"
                " the way can read and change the model. Use keys: `diloco keygen`.",
                address,
                INSECURE,
            )
        return INSECURE
    if found:
        return Path(found).expanduser()
    # On loopback a folder that merely exists must not turn a plaintext syncer away.
    usual = key_folder(None)
    return usual if not Address.parse(address).is_loopback and usual.is_dir() else None
