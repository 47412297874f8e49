"""Waiting for a condition outside of any event loop: child processes, threads, files."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until_true(condition: Callable[[], Any], what: str = "", limit_s: float = 30.0) -> Any:
    """What the condition gives, once that is true."""
    end_s = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end_s, f"never came true: {what or condition}"
        time.sleep(0.01)  # how often is looked, in the one place that does
    return found
