"""Where attacks happen: a daemon in a process of its own, and two honest learners that train."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import torch
import zmq
from torch import nn

from diloco_plugin.net.address import Address
from diloco_plugin.net.keys import LineKeys, read_visitor_keys
from diloco_plugin.net.options import Role, new_context, new_dealer
from diloco_plugin.status import fetch
from diloco_plugin.tensors.layout import census
from tests.attacks import zmtp
from tests.end_to_end.fleet import Trainee
from tests.end_to_end.forged import Forged
from tests.end_to_end.processes import Daemon
from tests.keyring import Keyring
from tests.waiting import until

#: Every attack comes so many times, and floods are so many times as long.
MIB: Final = 2**20
#: What one attack may leave behind in the daemon's memory: the allocator keeps some of the largest
#: thing that it brought, 64 MiB of frames and what they were decoded to.
BUDGET: Final = 96 * MIB
#: What all of them together may, however often each comes: nothing piles up.
BUDGET_ALL: Final = 96 * MIB
ELEMENTS: Final = 300_000  # two chunks
IDENTITIES: Final = 400
#: Two honest learners make the quorum, so that one liar is not the clock.
FLAGS: Final = ("--sync-every=12", "--fragments=2", "--overlap=1", "--quorum=2", "--lease=6")
HONEST: Final = ("alpha", "beta")


class Pair(nn.Module):
    """Two fragments of two chunks each; trains in no time."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.a = nn.Parameter(torch.randn(ELEMENTS, generator=generator) * 0.1)
        self.b = nn.Parameter(torch.randn(ELEMENTS, generator=generator) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.a[:128].view(8, 16)) @ self.b[:16].view(16, 1)


class Stage:
    """A run under attack."""

    def __init__(self, address: str, pid: int, ring: Keyring | None = None) -> None:
        """`pid`: of the daemon; `ring`: keys of all, in one place; None: plaintext."""
        self.address = address
        self.ring = ring
        self.process = psutil.Process(pid)
        self.specs = census(Pair()).specs
        self.honest: list[Trainee] = []
        #: pushes of attackers that break no rule and were merged
        self.legal = 0
        self._identities = iter(range(IDENTITIES))
        self.ports = [Address.parse(address).port, int(self.status()["bulk_port"])]

    @property
    def curve(self) -> bool:
        return self.ring is not None

    @property
    def server_key(self) -> bytes:
        assert self.ring is not None
        return self.ring.door.own.public

    def trainee(self, name: str, **options: Any) -> Trainee:
        """An honest learner."""
        if self.ring is not None:
            options["keys"] = str(self.ring.syncer.parent / name)
        seed = sum(name.encode())
        return Trainee(Pair(), self.address, name, step_seconds=0.02, data=seed, lr=0.05, **options)

    # ---- looking ----

    def status(self) -> dict[str, Any]:
        """What the daemon says, to the operator."""
        keys = read_visitor_keys(self.ring.syncer, "") if self.ring else None
        return fetch(self.address, 10, keys)

    def rss(self) -> int:
        return int(self.process.memory_info().rss)

    def descriptors(self) -> int:
        return int(self.process.num_fds())

    def go_on(self, pushes: int = 1, seconds: float = 30) -> None:
        """Both honest learners merge so many pushes more."""
        for trainee in self.honest:
            goal = trainee.merged + pushes
            trainee.wait(lambda t=trainee, g=goal: t.merged >= g, seconds, "an honest push merges")

    def honest_rounds(self) -> dict[str, int]:
        """Rounds that each honest learner has joined since it was let in, which was once."""
        joined = {m["name"]: m["rounds_joined"] for m in self.status()["learners"]}
        return {name: joined[name] for name in HONEST}

    def only_legal_pushes_were_merged(self) -> None:
        """Every merged push is one of an honest learner, or breaks no rule; versions agree."""

        def agrees() -> bool:
            known = sum(int(trainee.merged) for trainee in self.honest) + self.legal
            body = self.status()
            assert body["fates"]["merged"] >= known, "a fate that nobody has counted"
            versions = sum(fragment["version"] for fragment in body["fragments"])
            assert versions == body["rounds"]["merged"]
            return bool(body["fates"]["merged"] == known)

        until(agrees, 20, "only legal pushes are merged")

    # ---- attackers ----

    def identity(self) -> tuple[str, LineKeys | None]:
        """A name that nobody has had, and its admitted key."""
        name = name_of(next(self._identities))
        return name, self.ring.line(name) if self.ring is not None else None

    def client(self, **options: Any) -> Forged:
        """A learner that says what it likes, not let in yet."""
        name, keys = self.identity()
        return Forged(self.address, name, self.specs, **({"keys": keys} | options))

    @contextlib.contextmanager
    def member(self) -> Iterator[Forged]:
        """One that was let in and has taken the model."""
        with self.client() as forged:
            forged.join()
            forged.take()
            yield forged

    @contextlib.contextmanager
    def socket(self, role: Role = "control", **options: bytes | int) -> Iterator[Any]:
        """A zmq socket of an admitted key that obeys no limit but libzmq's own."""
        context = new_context()
        address = Address.parse(self.address).with_port(self.ports[role == "bulk"])
        sock = new_dealer(context, role, address, self.identity()[1])
        for option, value in options.items():
            sock.setsockopt(getattr(zmq, option), value)
        try:
            sock.connect(str(address))
            yield sock
        finally:
            context.destroy(linger=0)

    @contextlib.contextmanager
    def raw(self, *parts: bytes, each: int = 1) -> Iterator[list[socket.socket]]:
        """Raw connections to both ports over which these bytes were sent."""
        connections = [zmtp.connect(port, *parts) for port in self.ports for _ in range(each)]
        try:
            yield connections
        finally:
            for connection in connections:
                connection.close()


def name_of(number: int) -> str:
    """What an attacker is called."""
    return f"m{number:03d}"


@contextlib.contextmanager
def staged(folder: Path | None) -> Iterator[Stage]:
    """A daemon in a process of its own, and two honest learners. `folder`: for keys, if any."""
    ring = Keyring(folder) if folder is not None else None
    keys = []
    if ring is not None:
        for name in [*HONEST, "late", *map(name_of, range(IDENTITIES))]:
            ring.learner(name)
        keys = [f"--keys={ring.syncer}"]
    with Daemon(*FLAGS, *keys) as daemon, contextlib.ExitStack() as learners:
        stage = Stage(daemon.address, daemon.pid, ring)
        stage.honest = [learners.enter_context(stage.trainee(name)) for name in HONEST]
        stage.go_on(8)  # what is usual is known
        yield stage
        learners.close()
        assert daemon.code is None, f"the daemon has ended ({daemon.code}): {daemon.err[-4000:]}"
        assert "Traceback" not in daemon.err


@contextlib.contextmanager
def again_and_again(act: Callable[[], Any]) -> Iterator[None]:
    """Do it without end, in a thread of its own, while the block runs."""
    over = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            while not over.is_set():
                act()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(30)
    assert not thread.is_alive(), "an attacker hangs"
    if failures:
        raise failures[0]
