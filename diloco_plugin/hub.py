"""The Hugging Face Hub: where a run may start from and where it may be published to.

Needs the extra ``hub``. A Hub that is slow or down costs a warning, never a moment of the run.
"""

from __future__ import annotations

import importlib
import logging
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_plugin.errors import ConfigError, UnreachableError

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

_URL = re.compile(r"hf://(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")


def parse(url: str) -> tuple[str, str | None]:
    """Repository and revision of ``hf://org/name[@revision]``.

    Raises:
        ConfigError: it is not of that form.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise ConfigError(f"{url!r} is not a Hub repository: write hf://org/name[@revision].")
    return match["repo"], match["revision"]


def _library() -> Any:
    """huggingface_hub, without its progress bars, which are no good in a daemon's log."""
    try:
        library = importlib.import_module("huggingface_hub")
    except ImportError:
        raise ConfigError(
            "hf:// addresses need huggingface_hub, which is not installed: run"
            " pip install 'diloco-plugin[hub]'."
        ) from None
    importlib.import_module("huggingface_hub.utils").disable_progress_bars()
    return library


def download(
    repo: str, revision: str | None = None, *, token: str | None = None, endpoint: str | None = None
) -> Path:
    """A local folder with the safetensors and JSON files of a repository; cached by the library.

    Raises:
        ConfigError: there is no such repository or revision, or it may not be read.
        UnreachableError: the Hub does not answer and the files are not in the cache.
    """
    library = _library()
    errors = importlib.import_module("huggingface_hub.errors")
    name = repo + (f"@{revision}" if revision else "")
    try:
        folder = library.snapshot_download(
            repo,
            revision=revision,
            allow_patterns=["*.safetensors", "*.json"],
            ignore_patterns=["*/*"],
            token=token,
            endpoint=endpoint,
        )
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"init: the Hub has no repository {repo} that this machine may read. Check the name; a"
            " private or gated one needs HF_TOKEN."
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(
            f"init: {repo} has no revision {revision}. Check what follows @."
        ) from None
    except Exception as error:  # the library lets many kinds through: http, offline mode, cache
        raise UnreachableError(
            f"init: cannot download {name} ({_short(error)}). Check the connection (HF_HUB_OFFLINE,"
            " HF_ENDPOINT), or give --init a local folder."
        ) from error
    return Path(folder)


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


class Publisher:
    """Publishes snapshots of a model from a thread of its own: newest wins, one in flight.

    A snapshot is first written to `folder` (see :func:`modelfile.write_folder`), then uploaded, so
    that a local copy exists whatever the Hub does. A failure is logged once as a warning; the next
    snapshot is tried again.

    Args:
        repo: ``org/name``; made if it does not exist.
        folder: local copy of what was published last.
        every_seconds: how often :meth:`due` says yes; 0 for never.
        endpoint: address of the Hub; default is the library's.
        token: default is the one that the library finds (``HF_TOKEN``, ``hf auth login``).

    Raises:
        ConfigError: huggingface_hub is not installed.
    """

    def __init__(
        self,
        repo: str,
        folder: str | Path,
        every_seconds: float,
        endpoint: str | None = None,
        token: str | None = None,
    ) -> None:
        self._api = _library().HfApi(endpoint=endpoint, token=token)
        self._repo = repo
        self._folder = Path(folder)
        self._every = every_seconds
        self._next: float | None = None
        self._changed = threading.Condition()
        self._pending: tuple[str, Mapping[str, Tensor], str] | None = None
        self._closing = False
        self._published = ""
        # A daemon: a Hub that never answers must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="diloco-publish", daemon=True)
        self._thread.start()

    @property
    def published(self) -> str:
        """Label of the snapshot that was uploaded last; empty before the first."""
        return self._published

    def due(self, now: float) -> bool:
        """Whether it is time for a snapshot, at most once per period; the first call starts it.

        Args:
            now: seconds on any clock that does not go back.
        """
        if self._every <= 0:
            return False
        if self._next is None:
            self._next = now + self._every
        if now < self._next:
            return False
        self._next = now + self._every
        return True

    def offer(self, label: str, tensors: Mapping[str, Tensor], config_json: str = "") -> None:
        """Hands over a snapshot and returns at once; one that still waits is dropped for it.

        Args:
            label: commit message, e.g. ``"outer step 12"``.
            tensors: a copy; it belongs to the publisher from now on.
            config_json: the model's or adapter's config, if a learner sent one.
        """
        with self._changed:
            if self._closing:
                raise RuntimeError("the publisher is closed")
            self._pending = (label, tensors, config_json)
            self._changed.notify_all()

    def close(self, timeout: float) -> bool:
        """Publishes the last offer and ends; False if that took more than `timeout` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            _log.warning(
                "publishing to %s has not ended within %g s and is given up; the model is in %s:"
                " upload it with `hf upload %s %s`",
                self._repo, timeout, self._folder, self._repo, self._folder,
            )  # fmt: skip
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending is not None or self._closing)
                if self._pending is None:
                    return
                snapshot, self._pending = self._pending, None
            self._publish(*snapshot)
            del snapshot  # a whole model, which must not live until the next one comes

    def _publish(self, label: str, tensors: Mapping[str, Tensor], config_json: str) -> None:
        from diloco_plugin.modelfile import write_folder

        began = time.monotonic()
        try:
            write_folder(self._folder, tensors, config_json)
        except Exception as error:  # a full disk must not end the thread
            _log.warning("cannot write %s: %s; not published", self._folder, _short(error))
            return
        try:
            self._api.create_repo(self._repo, exist_ok=True)
            self._api.upload_folder(
                repo_id=self._repo, folder_path=str(self._folder), commit_message=label
            )
        except Exception as error:  # whatever the Hub does, the run goes on
            _log.warning(
                "publishing %r to %s failed (%s); it is in %s; the next one is tried again",
                label, self._repo, _short(error), self._folder,
            )  # fmt: skip
            return
        self._published = label
        _log.info("published %r to %s in %.1f s", label, self._repo, time.monotonic() - began)
