"""Addresses of the form ``tcp://host:port``: taken apart, and refused with the fix."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.%\w]+\]|[^:/\s\[\]]+):(?P<port>\d{1,5})")


def host_and_port(address: str) -> tuple[str, int] | None:
    """Host (without brackets) and port of a ``tcp://`` address, or None if it is not one."""
    match = _ADDRESS.fullmatch(address)
    return (match["host"].strip("[]"), int(match["port"])) if match else None


def address_problem(address: str, *, listening: bool = False) -> str | None:
    """What is wrong with an address, as the second half of a sentence, or None."""
    example = "use e.g. 'tcp://127.0.0.1:5555'"
    if address.startswith("ipc://") and len(address) > len("ipc://"):
        return None
    found = host_and_port(address)
    if found is None:
        bare = "://" not in address and host_and_port(f"tcp://{address}") is not None
        fix = f"use 'tcp://{address}'" if bare else example
        return f"is not an address of the form tcp://host:port: {fix}."
    host, port = found
    if port > 65535 or (port == 0 and not listening):
        return f"has port {port}, which is not from 1 to 65535: {example}."
    if not listening and host in ("0.0.0.0", "*", "::"):  # noqa: S104 (compared, not bound)
        return (
            "is where a syncer listens, not where it can be reached: use the name or the IP"
            " address of its machine."
        )
    return None


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address."""
    found = host_and_port(address)
    return found is None or found[0] in ("localhost", "::1") or found[0].startswith("127.")
