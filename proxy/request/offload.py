"""The prefill leg of an offload, hedged by D where P is late.

Both attempts run as tasks of one group, so that nothing outlives the request: the one that loses,
or is left when the request is cancelled, is cancelled and awaited before this returns. The first to
be ready wins; an answer that nobody takes is closed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from proxy.core.connectors.base import Edits
from proxy.core.routing.route import Route
from proxy.core.types import FailureKind, Fallback, RequestFacts
from proxy.net.upstream.response import UpstreamResponse
from proxy.protocol.errors import UpstreamFailure
from proxy.request.client_request import Outgoing
from proxy.request.kv_release import PrefillHalf, release
from proxy.request.legs import fallback_of, for_prefill, prefill_leg
from proxy.state.proxy_state import ProxyState
from proxy.telemetry.record import RequestRecord

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Local(Generic[A]):
    """D's attempt, and who wants to know what.

    `start`: whether it may begin now; `alone`: P has failed meanwhile, D goes on; `failed`: D has,
    P goes on; `close` gives back an answer that is not wanted, `unclaimed` P's KV that nobody will
    fetch, because the race was cancelled.
    """

    start: Callable[[], bool]
    run: Callable[[], Coroutine[Any, Any, A]]
    alone: Callable[[Fallback], None]
    failed: Callable[[UpstreamFailure], None]
    close: Callable[[A], None]
    unclaimed: Callable[[Edits], None]


Peer = Callable[[], Coroutine[Any, Any, Edits | Fallback]]


async def race(peer: Peer, local: Local[A], late_s: float) -> Edits | Fallback | A:
    """P's result, or D's answer; raises UpstreamFailure when P failed first and D then.

    P has `late_s` for itself. When both are ready at once P wins: its KV would stay pinned.
    """
    attempts = _Attempts(peer, local)
    try:
        return await attempts.run(late_s)
    except asyncio.CancelledError:
        for edits in attempts.handed:
            local.unclaimed(edits)
        raise
    finally:
        for unused in attempts.answers:
            local.close(unused)


class _Attempts(Generic[A]):
    """Both attempts, and what has come of them so far."""

    def __init__(self, peer: Peer, local: Local[A]) -> None:
        self._peer, self._local = peer, local
        self.handed: list[Edits] = []
        self.answers: list[A] = []
        self._failures: list[UpstreamFailure] = []

    async def run(self, late_s: float) -> Edits | Fallback | A:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(self._from_peer())
            await asyncio.wait({first}, timeout=late_s)
            if first.done() or not self._local.start():
                return await first
            second = group.create_task(self._from_local())
            result = await self._decided(first, second)
        if result is not None:
            self._failures.clear()  # an error holds the frames that hold this
            return result
        if self._failures:
            raise self._failures.pop()
        return self.answers.pop()

    async def _from_peer(self) -> Edits | Fallback:
        result = await self._peer()
        if isinstance(result, Edits):
            self.handed.append(result)
        return result

    async def _from_local(self) -> None:
        try:
            self.answers.append(await self._local.run())
        except UpstreamFailure as failure:
            self._failures.append(failure)

    async def _decided(
        self, first: asyncio.Task[Edits | Fallback], second: asyncio.Task[None]
    ) -> Edits | Fallback | None:
        """P's result where that counts; None where D's does."""
        await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            if self._failures:
                self._local.failed(self._failures.pop())
                return await first
            first.cancel()
            return None
        result = first.result()
        if isinstance(result, Fallback):
            self._local.alone(result)
            await second
            return None
        second.cancel()
        return result


@dataclass(frozen=True, slots=True)
class Offloading:
    """One request's prefill leg; `decode` asks D to compute by itself, under an id of its own.

    `blame` hears which instance failed how, `fall_back` why the offload ended.
    """

    service: ProxyState
    record: RequestRecord
    out: Outgoing
    facts: RequestFacts
    route: Route
    decode: Callable[[], Coroutine[Any, Any, UpstreamResponse]]
    blame: Callable[[str, UpstreamFailure], None]
    fall_back: Callable[[Route, Fallback], None]

    async def run(self, name: str) -> Edits | UpstreamResponse | None:
        """What D needs to fetch P's KV, or D's own answer; None: colocate now.

        Raises UpstreamFailure when P had failed and D, which was computing already, has as well.
        """
        service, route = self.service, self.route
        start_s = service.clock.now_s()
        self.record.t_prefill_sent = service.clock.unix(start_s)
        # Of an answer in one piece nobody sees how far it is: its end would have to win.
        due_s = service.router.hedges.due_s(route) if self.record.stream else math.inf
        if math.isinf(due_s):
            result: Edits | Fallback | UpstreamResponse = await self._leg(name)
        else:
            local = Local(
                self._start, self.decode, self._alone, self._failed, close, self._unclaimed
            )
            result = await race(lambda: self._leg(name), local, max(0.0, due_s - start_s))
        if isinstance(result, UpstreamResponse):
            self._won("local")
            if route.prefill is not None:
                self.fall_back(route, Fallback.P_LATE)
            return result
        if isinstance(result, Fallback):
            if result is Fallback.KV_PARAMS:
                service.metrics.releases.labels("stranded").inc()
            self.fall_back(route, result)
            return None
        if route.hedge is not None:
            self._won("peer")
        end_s = service.clock.now_s()
        self.record.t_prefill_done = service.clock.unix(end_s)
        service.metrics.prefill_leg.observe(end_s - start_s)
        service.router.watch.answered(name)
        service.router.prefill_done(route, self.facts, end_s, result.cached_ratio)
        return result

    async def _leg(self, name: str) -> Edits | Fallback:
        service, leg_id = self.service, f"{self.record.request_id}-p"
        wait = for_prefill(service, self.route)
        try:
            p = service.upstream(name)
            leg = await PrefillHalf(service, self.route).run(
                lambda on_sent: prefill_leg(
                    self.out, p, service.connector, leg_id, wait.seconds, on_sent
                )
            )
            if leg is Fallback.P_TIMEOUT:
                self.record.limit, self.record.limit_s = wait.option, wait.seconds
                late = f"no prefill in {wait.seconds:.3g} s"
                self.blame(name, UpstreamFailure(FailureKind.TIMEOUT, late))
            return leg
        except UpstreamFailure as failure:
            self.blame(name, failure)
            return fallback_of(failure)

    def _start(self) -> bool:
        service = self.service
        return service.router.hedges.start(self.route, self.facts, service.clock.now_s())

    def _alone(self, why: Fallback) -> None:
        self.fall_back(self.route, why)

    def _failed(self, failure: UpstreamFailure) -> None:
        self._won("none")
        self.blame(self.route.decode.name, failure)
        self.service.router.hedges.drop(self.route, self.service.clock.now_s())

    def _unclaimed(self, edits: Edits) -> None:
        release(self.service, self.route, self.route.prefill, edits)

    def _won(self, winner: str) -> None:
        self.record.hedge = winner
        self.service.metrics.hedges.labels(winner).inc()


def close(reply: UpstreamResponse) -> None:
    """Give back an answer that nobody reads."""
    reply.close()
