"""The clock, timeouts that share one timer, and calls that may hang.

`Clock` is monotonic for durations and decisions, and anchored once to unix time for the log. The
log's times are corrected by the system clock's drift from the anchor.

A request has several time limits and rarely reaches one. A timer for each of them would cost more
than everything else that the request waits for. So limits are kept in a set that one tick per event
loop checks every `TICK_S`: a limit expires up to that much late, never early. Limits of `FAR_S` and
more, which every stream has, are checked in each `FAR_TICKS`-th tick only.

Time in which the process was stopped does not count against any limit. A callback that fails ends
its own limit's body, and nobody else's.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Generic, Self, TypeVar

from proxy.protocol.errors import DEFECTS

T = TypeVar("T")
DRIFT_S = 0.001
"""Less than this between the system's clock and the anchor is left as it is."""
DRIFT_EVERY_S = 0.1


class Clock:
    """`now_s()` is monotonic; `unix(now_s)` converts it to unix time, as anchored at the start.

    So differences of two times are durations, whatever happens to the system's clock. How far
    that one has moved meanwhile, by a correction or while the machine was suspended, is `drift_s`.
    """

    def __init__(self) -> None:
        self._offset_s = time.time_ns() / 1e9 - time.monotonic()
        self._drift_s, self._drift_due_s = 0.0, -math.inf
        self.now_s: Callable[[], float] = time.monotonic
        """Monotonic seconds."""

    def unix(self, now_s: float) -> float:
        """Unix seconds of a monotonic moment, by the anchor."""
        return self._offset_s + now_s

    def unix_now(self) -> float:
        """Unix seconds now, by the anchor."""
        return self._offset_s + time.monotonic()

    def wall_now(self) -> float:
        """Unix seconds now, by the system's clock: for dates from outside, never for durations."""
        return time.time_ns() / 1e9

    def drift_s(self, unix_s: float) -> float:
        """Seconds to add to an anchored time for the system's; 0 for less than DRIFT_S.

        `unix_s`: now, by the anchor. The clocks are compared once in DRIFT_EVERY_S.
        """
        if unix_s >= self._drift_due_s:
            drift_s = self.wall_now() - self.unix_now()
            self._drift_s = drift_s if abs(drift_s) >= DRIFT_S else 0.0
            self._drift_due_s = unix_s + DRIFT_EVERY_S
        return self._drift_s


TICK_S = 0.05
FAR_S, FAR_TICKS = 10.0, 10
LOST_S = 1.0
"""If a tick is later than this, the process was stopped or got no CPU; all limits are extended."""


class _Keeper:
    """The running limits of one event loop; ticks only while there are any."""

    __slots__ = ("_due_s", "_ticks", "far", "loop", "near", "timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.near: set[Limit | Alarm] = set()
        self.far: set[Limit | Alarm] = set()
        self.timer: asyncio.TimerHandle | None = None
        """Runs while there are limits; `sleep` starts it with the first."""
        self._due_s = 0.0
        self._ticks = 0

    def sleep(self, now_s: float) -> None:
        self._due_s = now_s + TICK_S
        self.timer = self.loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        now_s = self.loop.time()
        lost_s = now_s - self._due_s
        if lost_s > LOST_S:
            for limit in (*self.near, *self.far):
                limit.forgive(lost_s)
        self.sleep(now_s)  # first, so that no callback's fault ends the tick
        self._ticks += 1
        limits = tuple(self.near)
        if self._ticks >= FAR_TICKS:
            self._ticks = 0
            limits += tuple(self.far)
        self._look_at(iter(limits), now_s)
        if not (self.near or self.far) and self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _look_at(self, limits: Iterator[Limit | Alarm], now_s: float) -> None:
        """Look at each; where one's callback fails, that one ends, and the others have their turn.

        The loop logs the fault, as that of any callback.
        """
        for limit in limits:
            is_looked_at = False
            try:
                limit.look(now_s)
                is_looked_at = True
            finally:
                if not is_looked_at:
                    self.loop.call_soon(self._look_at_rest, limits, now_s)
                    limit.break_off()

    def _look_at_rest(self, limits: Iterator[Limit | Alarm], now_s: float) -> None:
        """Look at those of them that have not ended meanwhile."""
        rest = [limit for limit in limits if limit in self.near or limit in self.far]
        self._look_at(iter(rest), now_s)


_last: list[_Keeper] = []
"""The keeper of the loop that asked last: a process has one loop, a test run one after another."""


def _keeper_of(loop: asyncio.AbstractEventLoop) -> _Keeper:
    if not _last or _last[0].loop is not loop:
        _last[:] = [_Keeper(loop)]
    return _last[0]


class Alarm:
    """Calls `ring` once after `seconds`, unless stopped before."""

    __slots__ = ("_keeper", "_ring", "_when_s")

    def __init__(self, seconds: float, ring: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._keeper = _keeper_of(loop)
        now_s = loop.time()
        self._when_s = now_s + seconds
        self._ring = ring
        self._keeper.near.add(self)
        if self._keeper.timer is None:
            self._keeper.sleep(now_s)

    def stop(self) -> None:
        """Cancel the alarm."""
        self._keeper.near.discard(self)

    def break_off(self) -> None:
        """Called when `look` failed."""
        self.stop()

    def look(self, now_s: float) -> None:
        """Called at every tick."""
        if now_s >= self._when_s:
            self.stop()
            self._ring()

    def forgive(self, lost_s: float) -> None:
        """Extend by time in which the process could not run."""
        self._when_s += lost_s


class Limit:
    """Like `asyncio.timeout`: at the limit the body is cancelled and TimeoutError raised."""

    __slots__ = (
        "_cancelling",
        "_expired",
        "_keeper",
        "_loop",
        "_running",
        "_task",
        "_when_s",
        "seconds",
    )

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._loop = loop = asyncio.get_running_loop()
        self._expired = False
        # `_keeper_of` inlined: every request makes two limits.
        self._keeper = keeper = _last[0] if _last and _last[0].loop is loop else _keeper_of(loop)
        self._running = keeper.far if seconds >= FAR_S else keeper.near

    def __enter__(self) -> Self:
        loop, keeper = self._loop, self._keeper
        task = asyncio.current_task(loop)
        assert task is not None
        self._task: asyncio.Task[object] | None = task
        self._cancelling = task.cancelling()
        now_s = loop.time()
        self._when_s = now_s + self.seconds
        self._running.add(self)
        if keeper.timer is None:
            keeper.sleep(now_s)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._running.discard(self)
        # A task keeps the error that ended it, whose frames refer to their limits: a reference
        # cycle, which would stay until the garbage collector runs.
        task, self._task = self._task, None
        if not self._expired or task is None:
            return
        is_ours = task.uncancel() <= self._cancelling
        if is_ours and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def reschedule(self, when_s: float) -> None:
        """Set another end, in the loop's time; a past one ends the body at once."""
        self._when_s = when_s
        self._loop.call_soon(self._look_again)

    def _look_again(self) -> None:
        if self in self._running:
            self.look(self._loop.time())

    def look(self, now_s: float) -> None:
        """Called at every tick."""
        if now_s >= self._when_s:
            self._expire()

    def break_off(self) -> None:
        """Called when `look` failed: the body ends as at its limit, and nothing is looked at."""
        self._running.discard(self)
        self._expire()

    def forgive(self, lost_s: float) -> None:
        """Extend by time in which the process could not run."""
        self._when_s += lost_s

    def _expire(self) -> None:
        if not self._expired and self._task is not None:
            self._expired = True
            self._task.cancel()


class IdleLimit(Limit):
    """Expires when `progress()` has returned the same value for `seconds`.

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
        if self._beat_s < FAR_S:
            self._running = self._keeper.near

    def look(self, now_s: float) -> None:
        """Called at every tick."""
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

    def change(self, seconds: float) -> None:
        """Set the longest silence, from now on."""
        self.seconds = seconds
        self._when_s = self._loop.time() + seconds
        if self.seconds < FAR_S and self in self._running:
            self._running.discard(self)
            self._running = self._keeper.near
            self._running.add(self)


class RateLimit(Limit):
    """Also expires if, after a third of its time, `progress()` is below `per_s` on average."""

    __slots__ = ("_per_s", "_progress")

    def __init__(self, seconds: float, progress: Callable[[], float], per_s: float) -> None:
        super().__init__(seconds)
        self._progress = progress
        self._per_s = per_s

    def look(self, now_s: float) -> None:
        """Called at every tick."""
        elapsed_s = now_s - (self._when_s - self.seconds)
        if elapsed_s >= self.seconds / 3 and self._progress() < self._per_s * elapsed_s:
            self._expire()
        super().look(now_s)


_FAILURES: tuple[type[Exception], ...] = (OSError, *DEFECTS)


class MayHang(Generic[T]):
    """Calls that may hang for ever, `most` at once, each in a thread that no exit waits for.

    A call that hangs cannot be ended. In a pool of threads it would hold up the others.
    """

    def __init__(self, name: str, most: int = 1) -> None:
        self._name, self._most = name, most
        self._running: set[asyncio.Future[T]] = set()

    def begin(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """What a call returns, or its OSError or defect; OSError where too many have not ended."""
        if len(self._running) >= self._most:
            raise OSError("no answer: earlier calls have not come back")
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        given = (call, done)
        thread = threading.Thread(target=self._run, args=given, name=self._name, daemon=True)
        self._running.add(done)
        try:
            thread.start()
        except RuntimeError as error:  # there are too many threads
            self._running.discard(done)
            raise OSError(str(error)) from error
        return done

    async def run(self, call: Callable[[], T], limit_s: float) -> T:
        """The same, awaited; OSError as well where the call does not end within the limit."""
        done = self.begin(call)
        try:
            with Limit(limit_s):
                return await done
        except TimeoutError:
            if not done.cancelled():
                raise
        raise OSError(f"no answer in {limit_s:g} s")

    def _run(self, call: Callable[[], T], done: asyncio.Future[T]) -> None:
        results: list[T] = []
        failure: Exception | None = None
        try:
            results.append(call())
        except _FAILURES as error:
            failure = error.with_traceback(None)
        self._running.discard(done)  # before the result is there: the thread lives on for a moment
        with suppress(RuntimeError):  # the loop is closed: the process ends
            done.get_loop().call_soon_threadsafe(_settle, done, results, failure)


def _settle(done: asyncio.Future[T], results: list[T], failure: Exception | None) -> None:
    if done.cancelled():
        return
    if failure is None:
        done.set_result(results[0])
    else:
        done.set_exception(failure)
        done.exception()  # perhaps nobody waits for it any more
