"""Timeouts that cost no timer each: one coarse tick per event loop looks at all of them.

A request has several time limits and nearly never meets one. A timer for each, made and cancelled,
costs more than everything else that the request waits for, so limits are kept in a set which is
looked at every `TICK_S`. They are met up to that much late, never early.

A process that was stopped for a while blames nobody for it: time in which nothing here could run
does not count.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import TracebackType
from typing import Self

TICK_S = 0.05
LOST_S = 1.0
"""A tick that comes later than this was kept from running: stopped, or starved of the processor."""


class _Keeper:
    """The running limits of one event loop; ticks only while there are any."""

    __slots__ = ("_due_s", "_handle", "loop", "running")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.running: set[Limit | Alarm] = set()
        self._handle: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def add(self, limit: Limit | Alarm) -> None:
        self.running.add(limit)
        if self._handle is None:
            self._sleep(self.loop.time())

    def _sleep(self, now_s: float) -> None:
        self._due_s = now_s + TICK_S
        self._handle = self.loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._handle = None
        now_s = self.loop.time()
        lost_s = now_s - self._due_s
        if lost_s > LOST_S:
            for limit in self.running:
                limit.forgive(lost_s)
        for limit in tuple(self.running):
            limit.look(now_s)
        if self.running:
            self._sleep(now_s)


_last: list[_Keeper] = []
"""The keeper of the loop that asked last; a process has one loop, a test run one after another."""


def _keeper_of(loop: asyncio.AbstractEventLoop) -> _Keeper:
    if not _last or _last[0].loop is not loop:
        _last[:] = [_Keeper(loop)]
    return _last[0]


class Alarm:
    """Calls `ring` once, `seconds` from now, unless it is stopped before."""

    __slots__ = ("_keeper", "_ring", "_when_s")

    def __init__(self, seconds: float, ring: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._keeper = _keeper_of(loop)
        self._when_s = loop.time() + seconds
        self._ring = ring
        self._keeper.add(self)

    def stop(self) -> None:
        """It will not ring."""
        self._keeper.running.discard(self)

    def look(self, now_s: float) -> None:
        """Called with every tick."""
        if now_s >= self._when_s:
            self.stop()
            self._ring()

    def forgive(self, lost_s: float) -> None:
        """So much time did not count."""
        self._when_s += lost_s


class Limit:
    """Like `asyncio.timeout`: past the limit the body is cancelled and TimeoutError raised."""

    __slots__ = ("_cancelling", "_expired", "_keeper", "_loop", "_task", "_when_s", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._expired = False
        self._keeper = _keeper_of(self._loop)

    def __enter__(self) -> Self:
        task = asyncio.current_task(self._loop)
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._when_s = self._loop.time() + self.seconds
        self._keeper.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._keeper.running.discard(self)
        if not self._expired:
            return
        is_ours = self._task.uncancel() <= self._cancelling
        if is_ours and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def reschedule(self, when_s: float) -> None:
        """Another end, in the loop's time; one that has passed ends the body at once."""
        self._when_s = when_s
        self._loop.call_soon(self._look_again)

    def _look_again(self) -> None:
        if self in self._keeper.running:
            self.look(self._loop.time())

    def look(self, now_s: float) -> None:
        """Called with every tick."""
        if now_s >= self._when_s:
            self._expire()

    def forgive(self, lost_s: float) -> None:
        """So much time did not count."""
        self._when_s += lost_s

    def _expire(self) -> None:
        if not self._expired:
            self._expired = True
            self._task.cancel()


class IdleLimit(Limit):
    """Runs out when `progress()` has given the same value for `seconds`.

    `beat` is called after each `beat_s` of such silence (0: never).
    """

    __slots__ = ("_beat", "_beat_s", "_due_s", "_last", "_progress")

    def __init__(
        self,
        seconds: float,
        progress: Callable[[], object],
        beat_s: float = 0.0,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(seconds)
        self._progress = progress
        self._last = progress()
        self._beat = beat
        self._beat_s = beat_s or math.inf
        self._due_s = self._loop.time() + self._beat_s

    def look(self, now_s: float) -> None:
        """Called with every tick."""
        seen = self._progress()
        if seen != self._last:
            self._last = seen
            self._when_s = now_s + self.seconds
            self._due_s = now_s + self._beat_s
        elif now_s >= self._when_s:
            self._expire()
        elif now_s >= self._due_s:
            self._due_s = now_s + self._beat_s
            self._beat()

    def shorten(self, seconds: float) -> None:
        """From now on silence may last no longer than this."""
        self.seconds = min(self.seconds, seconds)
        self._when_s = min(self._when_s, self._loop.time() + self.seconds)


class RateLimit(Limit):
    """Also runs out when `progress()` has been below `per_s` on average, a third of it on."""

    __slots__ = ("_per_s", "_progress")

    def __init__(self, seconds: float, progress: Callable[[], float], per_s: float) -> None:
        super().__init__(seconds)
        self._progress = progress
        self._per_s = per_s

    def look(self, now_s: float) -> None:
        """Called with every tick."""
        elapsed_s = now_s - (self._when_s - self.seconds)
        if elapsed_s >= self.seconds / 3 and self._progress() < self._per_s * elapsed_s:
            self._expire()
        super().look(now_s)
