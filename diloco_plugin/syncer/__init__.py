"""The syncer: the daemon that owns the global model."""

from __future__ import annotations

import json
import logging
import signal
import time
from types import FrameType

from diloco_plugin.config import SyncerConfig
from diloco_plugin.syncer.daemon import Syncer

__all__ = ["Syncer", "serve"]

log = logging.getLogger("diloco.syncer")


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


def serve(config: SyncerConfig) -> int:
    """Run the daemon in this thread until the run is over or a signal comes; return the exit code.

    SIGTERM or SIGINT stops in order: rounds with a quorum are finished, the model is exported. A
    second one ends the process at once.

    Raises:
        DiLoCoError: it could not start; nothing was changed.
    """
    from diloco_plugin.advice import advice

    _set_up_logging(config)
    syncer = Syncer(config)
    log.info("run %r: learners join at %s", config.run, syncer.address)
    for sentence in advice(config):
        log.warning("%s", sentence)

    def stop(number: int, _: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        syncer.stop(f"received {signal.Signals(number).name}")

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    syncer.run()
    return syncer.exit_code
