"""Where a socket listens or connects: `tcp://host:port` or `ipc:///path`, checked before libzmq
sees it (libzmq's own complaint is `Invalid argument`).
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace
from typing import Literal

from diloco_plugin.errors import ConfigError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
# Nothing that libzmq gives a meaning of its own, such as `source;target` or a zone.
_HOST = re.compile(r"\*|[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
_EXAMPLE = "Write it like tcp://127.0.0.1:5555."


@dataclass(frozen=True)
class Address:
    """One address. `host` has no brackets; for ipc it is the path of the socket file.

    Port 0 means any free one. An ipc address has no ports; a port other than 0 becomes the suffix
    of its path, so that `beside` and `with_port` work there as well.
    """

    scheme: Literal["tcp", "ipc"]
    host: str
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads an address. Raises ConfigError with what is wrong with it and how it should be."""
        match = _SCHEME.fullmatch(text)
        if match is None:
            host, port = ("127.0.0.1", text) if text.isdecimal() else (text or "127.0.0.1", "5555")
            like = text if ":" in text else f"{host}:{port}"
            raise ConfigError(f"The address {text!r} has no scheme. Write tcp://{like}.")
        scheme, rest = match[1].lower(), match[2]
        if scheme == "ipc":
            if not rest or rest == "*" or "\0" in rest:
                raise ConfigError(f"The address {text!r} names no file. Write ipc:///path/to/file.")
            return cls("ipc", rest)
        if scheme != "tcp":
            raise ConfigError(f"The address {text!r} must begin with tcp:// or ipc://. {_EXAMPLE}")
        host, port = _split(text, rest)
        return cls("tcp", _check_host(text, host), _check_port(text, port))

    @property
    def is_loopback(self) -> bool:
        """Whether nothing outside this machine can reach it. Names other than localhost are not
        looked up: a name is what somebody else says it is."""
        if self.scheme == "ipc" or self.host.lower() == "localhost":
            return True
        ip = _ip(self.host)
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        return ip is not None and ip.is_loopback

    def with_port(self, port: int) -> Address:
        """Returns the same host with another port."""
        return replace(self, port=port)

    def beside(self) -> Address:
        """Returns the address next to this one, for a second socket: the next port, or any free one
        if this one may have any."""
        if self.scheme == "ipc":
            return self.with_port(self.port + 1)
        return self.with_port(self.port + 1 if 0 < self.port < 65535 else 0)

    def __str__(self) -> str:
        """Returns the form that libzmq takes."""
        if self.scheme == "ipc":
            return f"ipc://{self.host}.{self.port}" if self.port else f"ipc://{self.host}"
        host = self.host
        # libzmq may take ::1 for it and then miss a syncer that listens on 127.0.0.1.
        if host.lower() == "localhost":
            host = "127.0.0.1"
        return f"tcp://{f'[{host}]' if ':' in host else host}:{self.port or '*'}"


def require_keys(address: Address, *, connecting: bool = False) -> None:
    """Raises ConfigError unless the address stays inside this machine, where plaintext is allowed.

    For doors and lines without keys; the text says how to have some.
    """
    if address.is_loopback:
        return
    if connecting:
        raise ConfigError(
            f"Connecting to {address} in plaintext would show the model to the network and take"
            " anybody's word for being the syncer. Give a folder of keys (keys=, --keys or the"
            " environment variable DILOCO_KEYS; `diloco keygen NAME` makes a key), or say"
            " keys='insecure-plaintext' (DILOCO_KEYS=insecure-plaintext) in a network that you"
            " trust."
        )
    raise ConfigError(
        f"Listening on {address} without keys would let anybody in: run `diloco keygen --keys DIR`"
        f" and then `diloco syncer --bind {address} --keys DIR`, or give --insecure-plaintext in a"
        " network that you trust."
    )


def _split(text: str, rest: str) -> tuple[str, str]:
    if rest.startswith("["):
        host, closed, tail = rest[1:].partition("]")
        if not closed or not isinstance(_ip(host), ipaddress.IPv6Address):
            raise ConfigError(
                f"The address {text!r} has no IPv6 address in its brackets. "
                "Write it like tcp://[::1]:5555."
            )
        port = tail[1:] if tail.startswith(":") else ""
    elif rest.count(":") > 1:
        raise ConfigError(
            f"The address {text!r} has too many colons. An IPv6 address needs brackets, "
            "like tcp://[::1]:5555."
        )
    else:
        host, _, port = rest.partition(":")
    if not port:
        raise ConfigError(f"The address {text!r} has no port. {_EXAMPLE}")
    return host, port


def _check_host(text: str, host: str) -> str:
    if ":" in host:
        return host
    if _HOST.fullmatch(host) is None:
        raise ConfigError(f"The address {text!r} has no valid host. {_EXAMPLE}")
    if re.fullmatch(r"[0-9.]+", host) and _ip(host) is None:
        raise ConfigError(f"The address {text!r} has a malformed IPv4 address. {_EXAMPLE}")
    return host


def _check_port(text: str, port: str) -> int:
    if port == "*":
        return 0
    if not (port.isascii() and port.isdigit()) or len(port) > 5 or int(port) > 65535:
        raise ConfigError(
            f"The address {text!r} has no valid port: it must be 1 to 65535, or * for any free "
            f"one. {_EXAMPLE}"
        )
    return int(port)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
