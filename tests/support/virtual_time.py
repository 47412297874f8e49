"""An asyncio loop whose clock jumps to the next timer: hours of waiting in no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Selector(selectors.DefaultSelector):
    """Never waits; where nothing is ready, the loop's clock jumps by what it was asked to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "nothing is due any more, and the test has not ended"
            self.now_s += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """`jump` is a process that was stopped: time passes while nothing runs."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s

    def jump(self, seconds: float) -> None:
        self._clock.now_s += seconds


def run(coro: Coroutine[Any, Any, Any]) -> Any:
    """The coroutine's result, on such a loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coro)
