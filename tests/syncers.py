"""A real syncer for tests: own sockets on free ports, own thread, stopped and joined at the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from diloco_plugin.config import SyncerConfig, parameters_from
from diloco_plugin.syncer import Syncer
from tests.waiting import until


@contextmanager
def running_syncer(
    *,
    preset: str | None = None,
    bind: str = "tcp://127.0.0.1:*",
    config: Any = None,
    **parameters: Any,
) -> Iterator[Syncer]:
    """A syncer that serves until the block ends. `config`: keyword arguments of SyncerConfig."""
    values = parameters_from(parameters, preset=preset, source="the test")
    syncer = Syncer(SyncerConfig(bind=bind, parameters=values, **(config or {})))
    failures: list[BaseException] = []

    def run() -> None:
        try:
            syncer.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="syncer")
    thread.start()
    try:
        yield syncer
    finally:
        syncer.stop("the test is over")
        thread.join(30)
    assert not thread.is_alive(), "the syncer did not stop"
    if failures:
        raise failures[0]


def wait_until_live(syncer: Syncer, count: int) -> None:
    """So many learners are there, and all are live: rounds ask those that are when they open."""
    until(lambda: [m["state"] for m in syncer.status()["learners"]] == ["live"] * count)


def global_model(syncer: Syncer) -> dict[str, Tensor]:
    """A copy of the global model, as it is now."""
    return {name: t.clone() for name, t in syncer._merging.the_model.tensors().items()}
