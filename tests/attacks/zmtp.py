"""ZMTP written by hand, so that it can be written wrongly (RFC 23, and 13 for version 1.0)."""

from __future__ import annotations

import socket
import struct

LONG, COMMAND, MORE = 2, 4, 1


def greeting(mechanism: bytes = b"NULL", minor: int = 1) -> bytes:
    """The 64 bytes with which ZMTP 3 begins."""
    signature = b"\xff" + bytes(8) + b"\x7f"
    return signature + bytes([3, minor]) + mechanism.ljust(20, b"\0") + bytes(32)


def frame(body: bytes, flags: int = 0) -> bytes:
    """One frame."""
    if len(body) > 255:
        return bytes([flags | LONG]) + struct.pack(">Q", len(body)) + body
    return bytes([flags, len(body)]) + body


def header(size: int, flags: int = 0) -> bytes:
    """The beginning of a long frame that announces so many bytes, and nothing more."""
    return bytes([flags | LONG]) + struct.pack(">Q", size)


def ready(kind: bytes = b"DEALER", identity: bytes = b"") -> bytes:
    """The NULL mechanism's only command."""
    body = b"\x05READY"
    for name, value in ((b"Socket-Type", kind), (b"Identity", identity)):
        body += bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
    return frame(body, COMMAND)


def connect(port: int, *parts: bytes) -> socket.socket:
    """A connection over which these bytes were sent, as far as the other side took them."""
    raw = socket.create_connection(("127.0.0.1", port), timeout=5)
    say(raw, *parts)
    return raw


def say(raw: socket.socket, *parts: bytes) -> bool:
    """Send; False: the other side has hung up, or takes no more."""
    try:
        for part in parts:
            raw.sendall(part)
    except OSError:
        return False
    return True


def hung_up(raw: socket.socket) -> bool:
    """Has the other side closed the connection? What it said before is read and forgotten."""
    raw.setblocking(False)
    try:
        while raw.recv(65536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
