"""One request's failures before its first byte: who is blamed, and where it runs again."""

from __future__ import annotations

import asyncio
import random

from proxy.core.fleet.retries import (
    Next,
    after_failure,
    backoff_s,
    busy_s,
    fallback_reason,
    is_innocent,
    may_repeat,
)
from proxy.core.routing.route import Route
from proxy.core.types import FailureKind, Fallback, Reject, RequestFacts
from proxy.protocol.errors import UpstreamFailure
from proxy.state.proxy_state import ProxyState
from proxy.telemetry.record import RequestRecord


class Retrying:
    """Made for a request with its first failure, or its offload; `ended` when it has its answer."""

    __slots__ = ("_blamed", "_facts", "_is_running", "_record", "_service")

    def __init__(self, service: ProxyState, record: RequestRecord, facts: RequestFacts) -> None:
        self._service, self._record, self._facts = service, record, facts
        self._blamed: set[str] = set()
        self._is_running = False

    def ended(self) -> None:
        """The repetition that runs, if one does, has an answer or has failed."""
        if self._is_running:
            self._is_running = False
            self._service.budget.give_back()

    def blame(self, name: str, failure: UpstreamFailure) -> None:
        """An instance failed; it counts against it once, however often this request tries."""
        service = self._service
        if failure.kind is FailureKind.BUSY:
            wait_s = busy_s(failure.headers.get("Retry-After"), service.clock.unix_now())
            service.router.gate.mark_busy(name, service.clock.now_s() + wait_s)
        elif name not in self._blamed:
            self._blamed.add(name)
            service.watcher.failed(name, failure)

    def fall_back(self, route: Route, why: Fallback) -> None:
        """The offload is over: D computes by itself."""
        service = self._service
        p = service.upstreams.get(route.prefill.name) if route.prefill else None
        if p is not None and why is not Fallback.P_LATE:
            p.forget_engine_id()
        service.router.fall_back(route, self._facts, why, service.clock.now_s())
        service.metrics.fallbacks.labels(why).inc()
        self._record.fallback = why

    async def around(self, route: Route, failure: UpstreamFailure, *, offloaded: bool) -> bool:
        """Prepare the next attempt; false when there is none. `offloaded`: D waited for KV."""
        self.ended()
        kind, retries = failure.kind, self._record.retries
        if not (offloaded and is_innocent(kind)):
            self.blame(route.decode.name, failure)
        step = after_failure(kind, offloaded=offloaded, retries=retries)
        if offloaded:
            self.fall_back(route, fallback_reason(kind))
        if step is Next.GIVE_UP:
            return False
        if step is Next.OTHER_INSTANCE and not await self._again(route, kind, retries):
            return False
        self._record.retries += 1
        self._service.metrics.retries.labels(kind).inc()
        return True

    async def _again(self, route: Route, kind: FailureKind, retries: int) -> bool:
        """On another instance at once, later with a pause; on the same one for want of another."""
        router, clock = self._service.router, self._service.clock
        if kind is FailureKind.NO_MODEL and not router.watch.lacks_model(
            route.decode.name, self._facts.model
        ):
            return False
        if retries:
            await asyncio.sleep(backoff_s(retries, random.random()))
        free = router.elsewhere(route, self._facts, clock.now_s())
        if not isinstance(free, Reject):
            is_free = retries == 0 and all(router.fleet.is_spotless(c.instance.name) for c in free)
            if not self._take(is_free=is_free):
                return False
            router.retry(route, self._facts, clock.now_s(), free)
            return True
        name = route.decode.name
        is_there = router.fleet.is_used(name) and name not in router.fleet.open()
        if not (may_repeat(kind, retries) and is_there and self._take(is_free=False)):
            return False
        await asyncio.sleep(backoff_s(retries, random.random()))
        return True

    def _take(self, *, is_free: bool) -> bool:
        service = self._service
        self._is_running = service.budget.take(service.in_flight, is_free=is_free)
        if not self._is_running:
            service.metrics.retries_refused.inc()
        return self._is_running
