"""What a learner is called when nobody gave it a name."""

from __future__ import annotations

import os
import socket
from typing import Final

#: Set it to give a learner its name from outside; a learner's child processes inherit it.
NAME_VARIABLE: Final = "DILOCO_NAME"


def default_name() -> str:
    """`DILOCO_NAME`, or host name and process id, which then become `DILOCO_NAME`.

    So the ranks of one learner that are started by the first one have its name, and `shard()` and
    `attach()` speak of the same learner.
    """
    return os.environ.setdefault(NAME_VARIABLE, f"{socket.gethostname()}-{os.getpid()}")
