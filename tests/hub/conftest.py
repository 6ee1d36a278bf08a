"""A Hub on loopback for every test; nothing here can reach the real one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from fake_hub import FakeHub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    # The library reads its environment once, at import, which other tests may have caused.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    fake = FakeHub()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", fake.endpoint)
    template = f"{fake.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield fake
    fake.close()


@pytest.fixture(autouse=True)
def _logs_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    # A daemon that ran in this process before has taken the log for itself.
    logger = logging.getLogger("diloco_plugin")
    monkeypatch.setattr(logger, "propagate", True)
