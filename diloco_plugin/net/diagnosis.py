"""Why nobody answers: libzmq does not say, so a plain TCP socket goes and looks.

Not a socket monitor: those blocked libzmq's I/O thread for good about once in a hundred joins.
"""

from __future__ import annotations

import socket as stdlib_socket
import time
from typing import Final

from diloco_plugin.errors import DiLoCoError, RefusedError, UnreachableError
from diloco_plugin.net.address import Address
from diloco_plugin.net.keys import Insecure, LineKeys, fingerprint

PROBE_SECONDS: Final = 1.0
#: The first half of a greeting of ZMTP 3.1; the other side then sends all of its own.
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01"
_GREETING_BYTES: Final = 64
_MECHANISM: Final = slice(12, 32)


def listens(address: Address) -> bool:
    """Does anything at all accept connections there? Blocks for a second at most; any thread."""
    try:
        _connect(address).close()
    except (OSError, UnicodeError):
        return False
    return True


def mechanism(address: Address) -> str:
    """How what listens there wants to be spoken to: "NULL" (plaintext), "CURVE", or "" if it is
    no ZeroMQ or nothing is there. Blocks for seconds at most; any thread.
    """
    heard = b""
    deadline = time.monotonic() + 2 * PROBE_SECONDS
    try:
        with _connect(address) as probe:
            probe.sendall(_GREETING)
            while len(heard) < _GREETING_BYTES and time.monotonic() < deadline:
                more = probe.recv(_GREETING_BYTES - len(heard))
                if not more or not (heard + more).startswith(b"\xff"):
                    return ""
                heard += more
    except OSError:
        return ""
    return heard[_MECHANISM].rstrip(b"\0").decode("ascii", "replace")


def key_problem(address: Address, keys: LineKeys | Insecure | None) -> str:
    """Why the handshake with what listens there fails, or "" if keys are not the reason.

    To be asked only when there is no connection although something listens. Blocks for seconds.
    """
    spoken = mechanism(address)
    if isinstance(keys, LineKeys) and spoken == "NULL":
        return (
            f"the syncer at {address} speaks plaintext, but keys are given here, and nothing is"
            " sent to a syncer that cannot prove who it is: start it with --keys, or give no keys"
            " here (insecure-plaintext where it is on another machine)."
        )
    if not isinstance(keys, LineKeys) and spoken == "CURVE":
        return (
            f"the syncer at {address} lets in known keys only, and none is given here: make one"
            " with `diloco keygen NAME`, bring NAME.pub to the syncer, and give the folder with"
            " keys= or --keys (or the environment variable DILOCO_KEYS)."
        )
    if isinstance(keys, LineKeys) and spoken == "CURVE":
        return (
            f"the syncer at {address} and this machine do not accept each other's keys. Here: key"
            f" {fingerprint(keys.own.public)} of {keys.name!r}, for a syncer with the key"
            f" {fingerprint(keys.syncer)}. In order of likelihood: {keys.name}.pub is not in the"
            " syncer's learners.d, or was not loaded since (send the syncer SIGHUP); it holds"
            " another key there (`diloco status` on the syncer's machine shows the keys that were"
            " refused); or syncer.pub here is another syncer's (its log shows its own)."
        )
    return ""


def unresolved(address: Address) -> str:
    """Why the host of an address cannot be found by its name; "" when it can."""
    if address.scheme != "tcp":
        return ""
    try:
        stdlib_socket.getaddrinfo(address.host, address.port)
    except (OSError, UnicodeError) as error:  # a label that is empty or too long is the latter
        why = getattr(error, "strerror", None) or error
        return (
            f"this machine knows no host {address.host!r} ({why}): check the spelling, or give its"
            " IP address."
        )
    return ""


def why_unanswered(
    address: Address, seconds: float, sent: bool, keys: LineKeys | Insecure | None
) -> DiLoCoError:
    """Why a question got no answer in time; `sent`: there was a connection."""
    where = f"{address} did not answer within {seconds:g} s"
    if sent:
        return UnreachableError(
            f"{where}, although TCP connected and ZeroMQ is spoken there: the syncer is busy or "
            "stuck, or the port is not its control port. Try again, then look at its log."
        )
    if problem := unresolved(address):
        return UnreachableError(problem)
    if not listens(address):
        return UnreachableError(
            f"{where}: TCP did not connect. In order of likelihood: no syncer runs there (start "
            "it), a firewall is in between (or the SSH tunnel is down), or the port is wrong."
        )
    problem = key_problem(address, keys)
    if problem:
        return RefusedError("key", problem)
    return UnreachableError(
        f"{where}: TCP connected, but what listens there is no syncer. Check the port "
        "(the control port is the one that the syncer was told to bind)."
    )


def _connect(address: Address) -> stdlib_socket.socket:
    if address.scheme == "tcp":
        host = "127.0.0.1" if address.host == "localhost" else address.host
        return stdlib_socket.create_connection((host, address.port), PROBE_SECONDS)
    probe = stdlib_socket.socket(stdlib_socket.AF_UNIX)
    try:
        probe.settimeout(PROBE_SECONDS)
        probe.connect(str(address).removeprefix("ipc://"))
    except OSError:
        probe.close()
        raise
    return probe
