from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "tensors", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture(autouse=True)
def _one_thread_and_one_seed() -> None:
    settings.load_profile("tensors")
    torch.set_num_threads(1)
    torch.manual_seed(0)
