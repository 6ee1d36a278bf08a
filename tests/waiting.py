"""Waiting in tests: on conditions, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(predicate: Callable[[], T], seconds: float = 10, message: str = "") -> T:
    """Returns the first true value of `predicate`, polled every 5 ms.

    Raises AssertionError after `seconds`, with `message` and the last value.
    """
    deadline = time.monotonic() + seconds
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            what = message or getattr(predicate, "__qualname__", "condition")
            raise AssertionError(f"{what}: still {value!r} after {seconds:g} s")
        time.sleep(0.005)
