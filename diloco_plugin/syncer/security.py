"""Who may come in, as the daemon sees it: keys, allow-list, self-probe, and what is said about it.

For the daemon's thread, but for what the guard does in its own.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from diloco_plugin.config import SyncerConfig
from diloco_plugin.core.policy import counted
from diloco_plugin.errors import ConfigError, InvariantError
from diloco_plugin.net.guard import Context, Guard
from diloco_plugin.net.keys import (
    INSECURE,
    SYNCER,
    Insecure,
    LineKeys,
    fingerprint,
    new_pair,
    read_allow_list,
    read_door_keys,
)
from diloco_plugin.net.poll import Poll
from diloco_plugin.net.sockets import Door, Line

log = logging.getLogger("diloco.syncer")

PROBE_SECONDS: Final = 5.0
#: After the refusal, how long the connection is watched: it must not become one.
PROBE_LOOK_SECONDS: Final = 0.2
INSECURE_WARNING_SECONDS: Final = 600.0
REFUSED_WARNING_SECONDS: Final = 60.0

_INSECURE: Final = (
    "traffic is neither encrypted nor authenticated (insecure_plaintext): whoever reaches the"
    " syncer can read and change the model. Use keys: `diloco keygen`."
)


class Security:
    """The guard of both doors, if there are keys, and its list."""

    def __init__(
        self, config: SyncerConfig, context: Context, broken: Callable[[BaseException], None]
    ) -> None:
        """Reads the keys and starts the guard, before there is a door.

        Raises:
            ConfigError: the keys cannot be used.
        """
        self._folder = Path(config.keys).expanduser() if config.keys else None
        self._learners: dict[bytes, str] = {}
        #: all that were on the list since the start
        self._known: dict[bytes, str] = {}
        #: what both doors get
        self.guard: Guard | Insecure | None = INSECURE if config.insecure_plaintext else None
        if self._folder is not None:
            keys = read_door_keys(self._folder)
            self._learners, self._known = dict(keys.learners), dict(keys.learners)
            self.guard = Guard(context, keys, broken)
        self._insecure_said = float("-inf")
        self._refused_said = 0
        #: why the list of keys was not read again as asked
        self._unread = ""
        self._refused_at = float("-inf")

    def say(self) -> None:
        """Log who may come in: once, at the start."""
        if isinstance(self.guard, Guard):
            log.log(
                self._level,
                "encrypted; the syncer's key is %s; admitted: %s",
                fingerprint(self.guard.own.public),
                ", ".join(sorted(self._learners.values())) or "nobody yet (`diloco keygen NAME`)",
            )
        self.mind(time.monotonic())

    def belongs(self, key: bytes, name: str) -> bool:
        """May who holds this key speak for this name? In plaintext anybody may. Any thread."""
        return not isinstance(self.guard, Guard) or self.guard.name_of(key) == name

    def who(self, key: bytes, name: str) -> str:
        """What to call the holder of a key that says it is `name`."""
        if not isinstance(self.guard, Guard):
            return name
        return self.guard.name_of(key) or self._barred(fingerprint(key))

    def _barred(self, print_: str) -> str:
        """What to call the holder of a key that is not on the list: never as anybody who is."""
        former = next((n for key, n in self._known.items() if fingerprint(key) == print_), "")
        return f"{former} (key {print_}, taken off the list)" if former else f"key {print_}"

    def objection(self, key: bytes, name: str | None) -> tuple[str, str] | None:
        """Why the holder of this key may not be `name` (None: only look), as (code, text)."""
        if not isinstance(self.guard, Guard):
            return None
        owner = self.guard.name_of(key)
        if owner is None:
            return "key", (
                f"the key {fingerprint(key)} is not admitted any more: have its .pub put into the"
                " syncer's learners.d again, or take another key."
            )
        if name is None:
            return None
        if owner == SYNCER:
            return "identity", (
                "the syncer's own key is for looking only: make one for this learner with `diloco"
                " keygen NAME`."
            )
        if owner != name:
            return "identity", (
                f"this connection has the key of learner {owner!r}, not of {name!r}: use"
                f" name={owner!r}, or the key {name}.key."
            )
        return None

    # ---- before anybody is served ----

    def probe(self, context: Context, doors: tuple[Door, Door]) -> None:
        """See that both doors refuse a key that nobody knows.

        Raises:
            InvariantError: one of them did not, or did not answer.
        """
        if isinstance(self.guard, Guard):
            for door in doors:
                stranger = LineKeys("", new_pair(), self.guard.own.public)
                with contextlib.closing(Line(context, door.near(), "control", stranger)) as line:
                    self._refuses(self.guard, line, fingerprint(stranger.own.public))
            self.guard.forget_refused()

    def _refuses(self, guard: Guard, line: Line, stranger: str) -> None:
        poll = Poll()
        poll.add(line)
        end = time.monotonic() + PROBE_SECONDS
        refused = False
        while time.monotonic() < end:
            poll.wait(0.01)
            if line.connected:
                raise InvariantError(
                    f"a key that nobody knows was let in at {line.address}: this libzmq does not"
                    " keep anybody out. Nobody was served. Report this, with the version of pyzmq."
                )
            if not refused and any(r.fingerprint == stranger for r in guard.refused()):
                refused, end = True, time.monotonic() + PROBE_LOOK_SECONDS
        if not refused:
            raise InvariantError(
                f"the door at {line.address} did not refuse a key that nobody knows within"
                f" {PROBE_SECONDS:g} s. Nobody was served. Start it again; if a firewall keeps this"
                " machine from its own address, bind another one."
            )

    # ---- while it runs ----

    def reload(self) -> frozenset[str]:
        """Read the allow-list again; returns the names whose key is not admitted any more.

        A list that cannot be read changes nothing.
        """
        if not isinstance(self.guard, Guard) or self._folder is None:
            log.info("SIGHUP: there are no keys to read again")
            return frozenset()
        try:
            learners = read_allow_list(self._folder)
        except ConfigError as error:
            self._unread = f"the old list of keys stays, because of the new one: {error}"
            log.error("SIGHUP: %s", self._unread)
            return frozenset()
        self._unread = ""
        before, self._learners = self._learners, learners
        self._known |= learners
        self.guard.admit(learners)
        barred = {name for key, name in before.items() if learners.get(key) != name}
        added = sorted(name for key, name in learners.items() if before.get(key) != name)
        log.log(
            self._level,
            "SIGHUP: %s; new: %s; no more: %s",
            "nobody is admitted" if not learners else f"admitted learners: {len(learners)}",
            ", ".join(added) or "none",
            ", ".join(sorted(barred)) or "none",
        )
        return frozenset(barred)

    @property
    def _level(self) -> int:
        return logging.INFO if self._learners else logging.WARNING

    def mind(self, now: float) -> None:
        """Say again what nobody may overlook. `now`: monotonic seconds."""
        if self.guard == INSECURE and now - self._insecure_said >= INSECURE_WARNING_SECONDS:
            self._insecure_said = now
            log.warning(_INSECURE)
        if not isinstance(self.guard, Guard):
            return
        total, refused = self.guard.refused_total, self.guard.refused()
        # None are left when those that were refused have been admitted since.
        if (
            refused
            and total != self._refused_said
            and now - self._refused_at >= REFUSED_WARNING_SECONDS
        ):
            log.warning(
                "%s refused for keys that are not on the list; the latest: %s, from %s",
                counted(total - self._refused_said, "connection"),
                self._barred(refused[-1].fingerprint),
                refused[-1].address,
            )
            self._refused_said, self._refused_at = total, now

    def status(self) -> dict[str, Any]:
        """Our part of the status body."""
        if not isinstance(self.guard, Guard):
            return {"security": self.guard or "plaintext on loopback"}
        return {
            "security": "keys",
            "key": fingerprint(self.guard.own.public),
            "admitted": sorted(self._learners.values()),
            "refused_keys": [
                {"fingerprint": r.fingerprint, "count": r.count, "address": r.address}
                for r in self.guard.refused()
            ],
        }

    def problems(self) -> list[str]:
        """What is wrong, in words."""
        if self.guard == INSECURE:
            return [_INSECURE]
        if not isinstance(self.guard, Guard):
            return []
        nobody = (
            f"nobody is admitted: {self._folder}/learners.d holds no NAME.pub. Make keys with"
            " `diloco keygen NAME`, bring NAME.pub there and send the syncer SIGHUP."
        )
        problems = [] if self._learners else [nobody]
        if self._unread:
            problems.append(self._unread)
        return problems + [
            f"{self._barred(r.fingerprint)} was refused {counted(r.count, 'time')}, last from"
            f" {r.address}: if it is a"
            " learner's, put its NAME.pub into learners.d and send the syncer SIGHUP."
            for r in self.guard.refused()[-3:]
        ]

    def close(self) -> None:
        """End the guard: from now on nobody comes in."""
        if isinstance(self.guard, Guard):
            self.guard.close()
