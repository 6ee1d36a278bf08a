"""Where the global model goes: the exported file, and the Hub."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from torch import Tensor

from diloco_plugin.config import SyncerConfig
from diloco_plugin.errors import ConfigError, disk_trouble
from diloco_plugin.hub import Publisher, parse
from diloco_plugin.modelfile import write_model

log = logging.getLogger("diloco.syncer")

CLOSE_SECONDS: Final = 300.0
#: Exit code of a daemon that could not write its model (EX_IOERR).
NOT_WRITTEN: Final = 74


class Output:
    """Export and publishing of one run.

    Raises:
        ConfigError: `export` cannot be written there, or huggingface_hub is not installed. Found at
            the start: at the end it would cost the model.
        NoRoomError, StoreError: the disk is full, or fails; found at the start as well.
    """

    def __init__(self, config: SyncerConfig) -> None:
        self._config = config
        if config.export:
            _probe(Path(config.export))
        self._publisher: Publisher | None = None
        if config.publish:
            repo, _ = parse(config.publish)
            folder = f"{config.export or config.run}.published"
            self._publisher = Publisher(repo, folder, config.every_seconds())

    def due(self, now_seconds: float) -> bool:
        """Is it time to publish?"""
        return self._publisher is not None and self._publisher.due(now_seconds)

    def publish(self, clock: int, tensors: Mapping[str, Tensor], model_config: str) -> None:
        """Hand a copy of the model to the publishing thread; does not wait for it."""
        if self._publisher is not None:
            self._publisher.offer(f"step {clock}", tensors, model_config)

    def finish(self, clock: int, tensors: Mapping[str, Tensor], model_config: str) -> int:
        """Write and publish the model at the end of the run; returns the exit code."""
        self.publish(clock, tensors, model_config)
        if not self._config.export:
            return 0
        metadata = {"format": "pt", "run": self._config.run, "clock": str(clock)}
        try:
            write_model(self._config.export, dict(tensors), metadata, model_config)
        except OSError as error:
            log.error("the global model could not be written to %s: %s", self._config.export, error)
            return NOT_WRITTEN
        log.info("the global model is in %s", self._config.export)
        return 0

    def nothing(self, why: str) -> None:
        """There is no model to write: say so, if one was to be written."""
        if self._config.export or self._publisher:
            log.warning("nothing to export: %s", why)

    def close(self) -> None:
        """Wait for what is being published, within bounds."""
        if self._publisher is not None:
            self._publisher.close(CLOSE_SECONDS)


def _probe(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".diloco-"):
            pass
    except OSError as error:
        what = f"export={str(path)!r} cannot be written"
        raise disk_trouble(error, what) or ConfigError(
            f"{what} ({error}): choose a folder that can be."
        ) from None
