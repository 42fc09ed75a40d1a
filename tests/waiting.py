"""Waiting for what other processes do."""

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], limit_s: float, what: str, every_s: float = 0.1) -> Any:
    """The first true value of `condition`, asked for every `every_s` seconds. Raises AssertionError at the limit."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(every_s)
    raise AssertionError(f"not seen within {limit_s:g} s: {what}")
