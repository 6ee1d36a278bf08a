"""The syncer: the daemon that owns the global model."""

from __future__ import annotations

import ctypes
import json
import logging
import signal
import sys
import time
from collections.abc import Collection
from types import FrameType
from typing import Final

from diloco_plugin.config import SyncerConfig
from diloco_plugin.syncer.daemon import Syncer

__all__ = ["Syncer", "serve"]

log = logging.getLogger("diloco.syncer")

#: Names of glibc's malloc.h.
M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _set_up_logging(config: SyncerConfig) -> None:
    handler = logging.StreamHandler()
    if config.log_format == "json":
        handler.setFormatter(_JsonLines())
    else:
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
        )
    logger = logging.getLogger("diloco")
    logger.handlers = [handler]
    logger.setLevel(config.log_level.upper())
    logger.propagate = False


def _return_memory() -> None:
    """Let glibc give fragments back to the system as soon as they are free.

    By default it keeps what was freed, in an arena for each thread: half to one and a half
    models more with a 30 M model and 8 learners (`make bench`). Chunks stay below the threshold.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 2 * 2**20)
        mallopt(M_TRIM_THRESHOLD, 2**20)


def serve(config: SyncerConfig, given: Collection[str] | None = None) -> int:
    """Run the daemon in this thread until the run is over or a signal comes; return the exit code.

    SIGTERM or SIGINT stops in order: rounds with a quorum are finished, the model is exported. A
    second one ends the process at once. SIGHUP reads the allow-list of keys again.

    Args:
        given: keys that somebody has set, for a run that goes on; see `Syncer`.

    Raises:
        DiLoCoError: it could not start; nothing was changed.
    """
    from diloco_plugin.advice import advice

    _set_up_logging(config)
    _return_memory()
    syncer = Syncer(config, given)
    config = syncer.config
    log.info("run %r: learners join at %s", config.run, syncer.address)
    for sentence in advice(config, goes_on=syncer.goes_on):
        log.warning("%s", sentence)

    def stop(number: int, _: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        syncer.stop(f"received {signal.Signals(number).name}")

    if config.keys:
        signal.signal(signal.SIGHUP, lambda *_: syncer.reload())
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    syncer.run()
    return syncer.exit_code
