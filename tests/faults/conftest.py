from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.nursery import Nursery


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Where syncers start at once."""
    nursery = Nursery(tmp_path_factory.mktemp("logs"))
    yield nursery
    nursery.close()
