"""Drives one engine model in scaled real time: the only clock of a simulated engine.

One task per engine sleeps until the model's next event. While a batch decodes it also wakes once
per tick, so several tokens may reach a stream in one write, as with a real server under load.
Handlers wait on a `LiveJob`; there is no timer per request or token.
"""

import asyncio
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime

from replayer.engine.engine import Engine
from replayer.engine.kvcache import SharedStore
from replayer.engine.types import (
    Event,
    Finished,
    FirstToken,
    Job,
    Pull,
    PullServed,
    PullWanted,
    SimRequest,
    Unpinned,
)
from replayer.simulator.options import SimOptions

OnEvent = Callable[[Event], None]


class LiveJob:
    """A request in the engine, with the means for its HTTP handler to wait for tokens."""

    __slots__ = ("_seen_tokens", "_streams", "_waiter", "request")

    def __init__(self, request: SimRequest, *, streams: bool) -> None:
        self.request = request
        self._streams = streams
        self._seen_tokens = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def news(self) -> bool:
        """Whether the request has new tokens for its stream, or has ended."""
        if self.request.finish_reason is not None:
            return True
        return self._streams and self.request.output_tokens > self._seen_tokens

    async def changed(self) -> None:
        """Wait for new tokens or the end, and mark them as seen."""
        if not self.news:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._seen_tokens = self.request.output_tokens

    def notify(self) -> None:
        """Wake the handler if it waits and there are new tokens or an end."""
        waiter = self._waiter
        if waiter is not None and self.news:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)


class EngineDriver:
    """One engine model and its clock; `on_event` is called with every event in order."""

    def __init__(
        self, options: SimOptions, on_event: OnEvent, store: SharedStore | None = None
    ) -> None:
        self.options = options
        self.engine = Engine(options.engine(), store=store)
        self._on_event = on_event
        self.on_step: Callable[[], None] = lambda: None
        """Called when the engine has advanced."""
        self._lives: dict[SimRequest, LiveJob] = {}
        self._served: dict[Pull, asyncio.Future[bool]] = {}
        self._start_s = time.monotonic()
        self._start_unix_s = datetime.now(tz=UTC).timestamp()
        self._wake = asyncio.Event()
        self._stopping = False

    def now_s(self) -> float:
        """Engine time: real seconds since the start, times the speed."""
        return (time.monotonic() - self._start_s) * self.options.speed

    def unix_s(self, engine_s: float) -> float:
        """Unix time of an engine time, relative to the driver's start."""
        return self._start_unix_s + engine_s / self.options.speed

    def submit(self, job: Job, *, streams: bool) -> LiveJob:
        """Hand a request to the engine."""
        live = LiveJob(self.engine.submit(job, self.now_s()), streams=streams)
        self._lives[live.request] = live
        self._wake.set()
        return live

    def abort(self, live: LiveJob) -> None:
        """End a request whose client has left; no effect on a finished one."""
        self.engine.abort(live.request, self.now_s())
        self._wake.set()

    async def serve_pull(self, pull: Pull) -> bool:
        """Send KV to another engine; returns True once it has arrived, False if refused."""
        served: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._served[pull] = served
        self.engine.pull(pull, self.now_s())
        self._wake.set()
        try:
            return await served
        finally:
            self._served.pop(pull, None)

    def pull_done(self, request: SimRequest, *, ok: bool) -> None:
        """Tell the engine whether the transfer of a decode leg's KV succeeded."""
        self.engine.pull_done(request, self.now_s(), ok=ok)
        self._wake.set()

    def stop(self) -> None:
        """End the driving task, all requests and all pulls, as vLLM does on SIGTERM."""
        self._stopping = True
        for live in list(self._lives.values()):
            self.engine.abort(live.request, self.now_s())
        self._step()
        for served in self._served.values():
            served.cancel()
        self._wake.set()

    async def run(self) -> None:
        """Drive the engine until `stop`."""
        loop = asyncio.get_running_loop()
        while not self._stopping:
            self._step()
            self._wake.clear()
            delay_s = self._delay_s()
            timer = None if delay_s == math.inf else loop.call_later(delay_s, self._wake.set)
            await self._wake.wait()
            if timer is not None:
                timer.cancel()

    def _delay_s(self) -> float:
        """Real seconds to sleep: to the next event, at most a tick while a batch runs."""
        engine, now_s = self.engine, self.now_s()
        due_s = engine.next_event_s()
        if self._lives and engine.running:
            tick_s = self.options.tick * self.options.speed
            due_s = min(due_s, max(engine.next_step_s(), now_s + tick_s))
        return max(0.0, due_s - now_s) / self.options.speed

    def _step(self) -> None:
        for event in self.engine.advance(self.now_s()):
            self._dispatch(event)
        self.on_step()
        for live in self._lives.values():
            live.notify()

    def _dispatch(self, event: Event) -> None:
        match event:
            case Finished():
                live = self._lives.pop(event.request, None)
                if live is not None:
                    live.notify()
            case PullServed():
                served = self._served.pop(event.pull, None)
                if served is not None and not served.done():
                    served.set_result(event.ok)
            case FirstToken() | PullWanted() | Unpinned():
                pass
        self._on_event(event)
