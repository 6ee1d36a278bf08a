"""What a learner is called when nobody gave it a name."""

from __future__ import annotations

import os
import socket
from typing import Final

from diloco_plugin.credentials import NAME_VARIABLE
from diloco_plugin.errors import ConfigError
from diloco_plugin.net.keys import Insecure, LineKeys

#: As many characters as the messages allow.
NAME_LENGTH_MAX: Final = 128


def default_name(keys: LineKeys | Insecure | None = None) -> str:
    """`DILOCO_NAME`; or the name of the key, or host name and process id, which become it then.

    So the ranks of one learner that are started by the first one have its name, and `shard()` and
    `attach()` speak of the same learner. A learner's child processes inherit it.
    """
    own = keys.name if isinstance(keys, LineKeys) else f"{socket.gethostname()}-{os.getpid()}"
    return os.environ.setdefault(NAME_VARIABLE, own)


def check_name(name: str) -> None:
    """Raise `ConfigError` for a name that no syncer would read, or no log could show."""
    if not (1 <= len(name) <= NAME_LENGTH_MAX and name.isprintable()):
        origin = f" (from {NAME_VARIABLE})" if name == os.environ.get(NAME_VARIABLE) else ""
        raise ConfigError(
            f"{name!r}{origin} cannot be the name of a learner: use 1 to {NAME_LENGTH_MAX}"
            " printable characters."
        )
