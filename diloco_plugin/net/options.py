"""Every socket option that this package sets, in one table.

libzmq's defaults assume a trusted network and unlimited memory; each value below says why it is not
the default. Figures in bytes, messages or milliseconds as libzmq has them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import zmq

from diloco_plugin.errors import ConfigError
from diloco_plugin.net.address import Address

Role: TypeAlias = Literal["control", "bulk"]

#: Most frames of a message; more are dropped with the message.
FRAMES_MAX: Final = 4
_VERSION_MIN: Final = (4, 3, 5)

_BY_ROLE: Final[dict[Role, dict[int, int]]] = {
    "control": {
        # Checked on the announced size, before memory is taken: 9 bytes could ask for 8 GiB.
        # A description of the model has to fit.
        zmq.MAXMSGSIZE: 4 * 1024 * 1024,
        zmq.SNDHWM: 256,
        zmq.RCVHWM: 256,
    },
    "bulk": {
        zmq.MAXMSGSIZE: 1024 * 1024 + 4 * 1024,  # one chunk and a header
        # In messages, per peer: 8 chunks of 1 MiB bound what a slow peer can pile up.
        zmq.SNDHWM: 8,
        zmq.RCVHWM: 8,
    },
}

_EVERYWHERE: Final[dict[int, int]] = {
    zmq.LINGER: 0,  # the default hangs the exit of a process whose peer is dead
    zmq.HANDSHAKE_IVL: 5_000,  # a peer that connects and says nothing
    # Finds dead connections, not dead programs: libzmq's own thread answers.
    zmq.HEARTBEAT_IVL: 5_000,
    zmq.HEARTBEAT_TIMEOUT: 20_000,
    zmq.HEARTBEAT_TTL: 40_000,  # must stay under 60 s: it wraps at 65.5 s
    zmq.TCP_KEEPALIVE: 1,  # NATs forget idle connections
    zmq.TCP_KEEPALIVE_IDLE: 60,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 6,
    zmq.TCP_MAXRT: 60_000,
}

_ROUTER: Final[dict[int, int | bytes]] = {
    zmq.ROUTER_MANDATORY: 1,  # the default drops silently what it cannot deliver
    zmq.ROUTER_HANDOVER: 0,  # otherwise whoever knows an id can take over its replies
    zmq.BACKLOG: 512,
    # Not for authentication (there is no handler yet). With a domain libzmq refuses peers of ZMTP
    # 1.0, which have no handshake: an HTTP request is taken for one and kept connected forever.
    zmq.ZAP_DOMAIN: b"diloco",
}

_DEALER: Final[dict[int, int]] = {
    zmq.IMMEDIATE: 1,  # never queue into a connection that does not exist
    zmq.CONNECT_TIMEOUT: 5_000,
    zmq.SNDHWM: 0,  # so that no room to send means no connection (`Line`)
    zmq.RECONNECT_IVL: 1_000,
    zmq.RECONNECT_IVL_MAX: 10_000,
}


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Returns a context for one owner, who ends it with `context.destroy(linger=0)`.

    Raises:
        ConfigError: the libzmq that is installed is too old to face a network.
    """
    if zmq.zmq_version_info() < _VERSION_MIN:
        raise ConfigError(
            f"libzmq {zmq.zmq_version()} is too old: 4.3.5 is needed. Run pip install -U pyzmq."
        )
    return zmq.Context(io_threads=1)


def new_socket(
    context: zmq.Context[Any], kind: Literal["ROUTER", "DEALER"], role: Role, address: Address
) -> zmq.Socket[bytes]:
    """Returns a socket with every option set, not yet bound or connected."""
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER if kind == "ROUTER" else zmq.DEALER)
    per_kind: Mapping[int, int | bytes] = _ROUTER if kind == "ROUTER" else _DEALER
    for option, value in {**_EVERYWHERE, **_BY_ROLE[role], **per_kind}.items():
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.IPV6, int(not _is_ipv4(address.host)))
    return socket


def _is_ipv4(host: str) -> bool:
    # A v4 address through a v6 socket works, but not on a kernel without IPv6.
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return host.lower() == "localhost"
    return True
