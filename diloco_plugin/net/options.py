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
from diloco_plugin.net.keys import LineKeys, Pair

Role: TypeAlias = Literal["control", "bulk"]

#: Most frames of a message; more are dropped with the message.
FRAMES_MAX: Final = 4
_VERSION_MIN: Final = (4, 3, 5)
#: What our doors call themselves when libzmq asks the guard about a key.
DOMAIN: Final = b"diloco"

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
    # No heartbeats of libzmq's own: one that is due for a connection that was reset while its queue
    # was full ends the process ("Assertion failed: !_io_error", libzmq #4364). Dead programs are
    # found by leases, dead connections by the kernel, in half a minute.
    zmq.HEARTBEAT_IVL: 0,
    zmq.TCP_KEEPALIVE: 1,  # NATs forget idle connections
    zmq.TCP_KEEPALIVE_IDLE: 15,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.TCP_MAXRT: 30_000,
}

_ROUTER: Final[dict[int, int | bytes]] = {
    zmq.ROUTER_MANDATORY: 1,  # the default drops silently what it cannot deliver
    zmq.ROUTER_HANDOVER: 0,  # otherwise whoever knows an id can take over its replies
    zmq.BACKLOG: 512,
    # In plaintext, too, where nobody asks for it: with a domain libzmq refuses peers of ZMTP 1.0,
    # which have no handshake: an HTTP request is taken for one and kept connected forever.
    zmq.ZAP_DOMAIN: DOMAIN,
}

#: What a door with keys has besides its secret key.
_CURVE_DOOR: Final[dict[int, int | bytes]] = {
    zmq.CURVE_SERVER: 1,
    # Otherwise every key is let in while the guard does not answer.
    zmq.ZAP_ENFORCE_DOMAIN: 1,
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


def new_router(
    context: zmq.Context[Any], role: Role, address: Address, own: Pair | None
) -> zmq.Socket[bytes]:
    """Returns a ROUTER with every option set, not yet bound; encrypted if it has a pair."""
    encryption = {**_CURVE_DOOR, zmq.CURVE_SECRETKEY: own.secret} if own else {}
    return _socket(context.socket(zmq.ROUTER), role, address, {**_ROUTER, **encryption})


def new_dealer(
    context: zmq.Context[Any], role: Role, address: Address, keys: LineKeys | None
) -> zmq.Socket[bytes]:
    """Returns a DEALER with every option set, not yet connected; encrypted if it has keys."""
    encryption: dict[int, int | bytes] = {}
    if keys is not None:
        encryption = {
            zmq.CURVE_SERVERKEY: keys.syncer,  # the only syncer that it will speak to
            zmq.CURVE_PUBLICKEY: keys.own.public,
            zmq.CURVE_SECRETKEY: keys.own.secret,
        }
    return _socket(context.socket(zmq.DEALER), role, address, {**_DEALER, **encryption})


def _socket(
    socket: zmq.Socket[bytes], role: Role, address: Address, more: Mapping[int, int | bytes]
) -> zmq.Socket[bytes]:
    for option, value in {**_EVERYWHERE, **_BY_ROLE[role], **more}.items():
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
