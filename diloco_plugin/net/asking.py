"""One question, one answer: for those who do not stay connected."""

from __future__ import annotations

import time

from diloco_plugin.net.address import Address
from diloco_plugin.net.diagnosis import why_unanswered
from diloco_plugin.net.keys import Insecure, LineKeys
from diloco_plugin.net.options import new_context
from diloco_plugin.net.poll import Poll
from diloco_plugin.net.sockets import Line


def ask(
    address: Address | str,
    request: bytes,
    timeout_seconds: float,
    keys: LineKeys | Insecure | None = None,
) -> bytes:
    """Sends one control message and returns the answer. Blocks; any thread.

    The request may be sent again after a lost connection, so it must be harmless to repeat.

    Raises:
        UnreachableError: no answer in time; says how far it got.
        RefusedError: the two sides' keys do not match.
        ConfigError: the address is wrong.
    """
    deadline = time.monotonic() + timeout_seconds
    context = new_context()
    try:
        line = Line(context, address, "control", keys)
        poll = Poll()
        poll.add(line)
        sent = False
        while True:
            events = line.events()
            if "connected" in events or not sent:
                sent = line.send(request)
            for frames in line.receive():
                return frames[0].bytes
            left = deadline - time.monotonic()
            if left <= 0:
                raise why_unanswered(line.address, timeout_seconds, sent, keys)
            poll.wait(min(left, 0.25))
    finally:
        context.destroy(linger=0)
