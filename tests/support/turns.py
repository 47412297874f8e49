"""How long the proxy keeps the event loop's thread, turn by turn.

Timed is every entry of the loop into the proxy's code: a step of a task, bytes that arrive, a
timer. Counted is what the thread computed, not what passed: a neighbour on the machine is no fault
of the proxy; and less what the collector took, for the heap it looks through is the tests'. On a
virtual machine the clock of a thread runs on while the host gives its CPU to others: of a turn that
looks too long, what all CPUs of the machine lost meanwhile is taken off, and in up to 5 ms before:
an upper bound of what the thread lost, and nothing on a machine of its own.
Calls that wait instead of computing are found by blockbuster.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from proxy.net import timeouts
from proxy.net.server import connection as server_connection
from proxy.net.server import listener
from proxy.net.upstream import connection as upstream_connection
from proxy.net.upstream import pool
from proxy.protocol.streams import sse
from proxy.state import queue

TURN_S = 0.02
"""The longest that may be, on a machine as fast as the one where `_WORK_S` was measured."""
_WORK_S = 0.008
_STAT = os.open("/proc/stat", os.O_RDONLY) if Path("/proc/stat").exists() else None
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_STOLEN_LOOK_S = 0.005
"""How old a look at the stolen time may be when a turn begins: a look takes some 30 us."""
_CALLBACKS = (
    (server_connection.ClientConnection, "data_received"),
    (listener.PendingConnection, "connection_made"),
    (server_connection.ClientConnection, "connection_lost"),
    (server_connection.HeaderTimeouts, "_look"),
    (sse.FastPath, "buffer_updated"),
    (upstream_connection.UpstreamConnection, "eof_received"),
    (upstream_connection.UpstreamConnection, "connection_lost"),
    (timeouts._Keeper, "_tick"),
    (queue.WaitingRoom, "_look"),
    (pool.Pool, "_close_old"),
)


def slowness() -> float:
    """How many times longer than there some work takes here and now, at least 1."""
    took_s = []
    for _ in range(9):
        began_s, total = time.thread_time(), 0
        for i in range(200_000):
            total += i * i % 7
        took_s.append(time.thread_time() - began_s)
    return max(1.0, sorted(took_s)[4] / _WORK_S)


def stolen_s() -> float:
    """Seconds that the host gave to others, of all CPUs of this machine; 0 where nothing tells."""
    return 0.0 if _STAT is None else int(os.pread(_STAT, 256, 0).split()[8]) * _TICK_S


class Turns:
    """The longest turn of each place, in seconds of its thread; a test may raise the bound."""

    def __init__(self) -> None:
        self.longest_s: dict[str, float] = {}
        self.bound_s = TURN_S
        self.slowness = 1.0
        """How much slower the machine was when turns over the bound were looked at."""
        self._is_running = False
        self._collecting_s = self._gc_began_s = 0.0
        self._stolen_s, self._stolen_at_s = 0.0, -_STOLEN_LOOK_S

    def too_long(self) -> str:
        """Turns over the bound of a machine as slow as this one is now, in words; "" for none."""
        found = {name: s for name, s in self.longest_s.items() if s >= self.bound_s}
        if found:
            self.slowness = slowness()
            allowed_s = self.bound_s * self.slowness
            found = {name: s for name, s in found.items() if s >= allowed_s}
        return ", ".join(f"{name} computed {s:.3f} s" for name, s in found.items())

    @property
    def computed_s(self) -> float:
        """What this thread has computed so far, the collector's part left out."""
        return time.thread_time() - self._collecting_s

    def collected(self, phase: str, info: dict[str, int]) -> None:
        """The collector begins or ends, in whatever thread."""
        del info
        if phase == "start":
            self._gc_began_s = time.thread_time()
        else:
            self._collecting_s += time.thread_time() - self._gc_began_s

    def begin(self) -> float | None:
        """A turn begins; None for a part of one."""
        if self._is_running:
            return None
        self._is_running = True
        if (now_s := time.monotonic()) - self._stolen_at_s > _STOLEN_LOOK_S:
            self._stolen_s, self._stolen_at_s = stolen_s(), now_s
        return self.computed_s

    def end(self, began_s: float | None, name: str) -> None:
        """It is over."""
        if began_s is None:
            return
        self._is_running = False
        took_s = self.computed_s - began_s
        if took_s >= self.bound_s:
            took_s -= stolen_s() - self._stolen_s
        self.longest_s[name] = max(took_s, self.longest_s.get(name, 0.0))


turns = Turns()
"""Of this process."""


class _Timed(Coroutine[Any, Any, Any]):
    """A task's coroutine, whose every step is a turn."""

    def __init__(self, coro: Coroutine[Any, Any, Any]) -> None:
        self._coro = coro
        self._name = getattr(coro, "__qualname__", "?")

    def send(self, value: Any) -> Any:
        began_s = turns.begin()
        try:
            return self._coro.send(value)
        finally:
            turns.end(began_s, self._name)

    def throw(self, *error: Any) -> Any:
        began_s = turns.begin()
        try:
            return self._coro.throw(*error)
        finally:
            del error  # else a cycle: it goes through this frame
            turns.end(began_s, self._name)

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coro.__await__()


def _task(
    loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **more: Any
) -> asyncio.Task[Any]:
    code = getattr(coro, "cr_code", None)
    is_ours = code is not None and "/proxy/" in code.co_filename
    return asyncio.Task(_Timed(coro) if is_ours else coro, loop=loop, **more)


def new_loop() -> asyncio.AbstractEventLoop:
    """The loop that the command runs on; its tasks are timed."""
    loop = uvloop.new_event_loop()
    loop.set_task_factory(_task)  # type: ignore[arg-type]  # typeshed knows no keywords of it
    return loop


@contextmanager
def timed(patch: pytest.MonkeyPatch) -> Iterator[Turns]:
    """Also its callbacks, while the block runs."""
    for owner, name in _CALLBACKS:
        patch.setattr(owner, name, _timed(f"{owner.__module__}.{name}", getattr(owner, name)))
    turns.longest_s.clear()
    turns.bound_s, turns.slowness = TURN_S, 1.0
    gc.callbacks.append(turns.collected)
    try:
        yield turns
    finally:
        gc.callbacks.remove(turns.collected)


def _timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def turn(*args: Any) -> Any:
        began_s = turns.begin()
        try:
            return call(*args)
        finally:
            turns.end(began_s, name)

    return turn
