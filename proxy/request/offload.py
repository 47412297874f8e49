"""The prefill leg of an offload, hedged by D where P is late.

Both attempts run as tasks of one group, so that nothing outlives the request: the one that loses,
or is left when the request is cancelled, is cancelled and awaited before this returns. The first to
be ready wins. If both are ready P wins, since P's KV would otherwise stay pinned. An answer that
nobody takes is closed.
"""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

from proxy.core.connectors.base import Edits
from proxy.core.routing.request_flow import (
    Action,
    LegFailure,
    LegLimit,
    RequestFlow,
    SendHedge,
    SendPrefill,
    State,
)
from proxy.core.types import FailureKind, Fallback
from proxy.net.upstream.response import UpstreamResponse
from proxy.protocol.errors import UpstreamFailure
from proxy.request.client_request import Outgoing
from proxy.request.kv_release import PrefillHalf, release
from proxy.request.legs import fallback_of, prefill_leg
from proxy.state.proxy_state import ProxyState
from proxy.telemetry.record import RequestRecord


class Legs(Protocol):
    """What a prefill leg needs of the request's other attempts."""

    async def decode(self, out: Outgoing, leg: SendHedge, /) -> UpstreamResponse:
        """Ask D to compute by itself; raises UpstreamFailure."""

    def failure(self, failure: UpstreamFailure, /) -> LegFailure:
        """An instance's failure as the flow hears of it."""

    def note_limit(self, limit: LegLimit, seconds: float, /) -> None:
        """A leg met its time limit."""

    def tell(self, actions: list[Action], /) -> None:
        """Counters, the record and the log, for what the flow has decided."""


class PrefillFailed:
    """P's leg gave no KV; `failure`: what speaks against P itself."""

    __slots__ = ("failure", "why")

    def __init__(self, why: Fallback, failure: LegFailure | None = None) -> None:
        self.why, self.failure = why, failure


Prefilled = tuple[list[Action], Edits | UpstreamResponse | None]
"""What the flow wants next; and what D needs to fetch P's KV, or D's own answer."""


class PrefillRace:
    """One request's prefill leg, and D's own attempt beside it."""

    __slots__ = ("_answers", "_failures", "_flow", "_legs", "_record", "_state", "handed")

    def __init__(
        self, state: ProxyState, record: RequestRecord, flow: RequestFlow, legs: Legs
    ) -> None:
        self._state, self._record, self._flow, self._legs = state, record, flow, legs
        self.handed: list[Edits] = []
        self._answers: list[UpstreamResponse] = []
        self._failures: list[UpstreamFailure] = []

    async def run(self, out: Outgoing, leg: SendPrefill) -> Prefilled:
        """P's result or D's answer; raises UpstreamFailure when P has failed and D then as well."""
        start_s = self._state.clock.now_s()
        self._record.t_prefill_sent = self._state.clock.unix(start_s)
        if math.isinf(leg.hedge_at_s):
            return self._prefilled(await self.prefill(out, leg), start_s)
        p = leg.instance
        try:
            return await self._race(out, leg, start_s)
        except asyncio.CancelledError as gone:
            for edits in self.handed:
                release(self._state, self._flow.route, p, edits)
            # The group's frame holds the error that passed through it; if the error held that
            # frame as well, only the collector would end them.
            gone.__traceback__ = None
            raise
        finally:
            for unused in self._answers:
                unused.close()

    async def _race(self, out: Outgoing, leg: SendPrefill, start_s: float) -> Prefilled:
        async with asyncio.TaskGroup() as group:
            prefill = group.create_task(self.prefill(out, leg))
            await asyncio.wait({prefill}, timeout=max(0.0, leg.hedge_at_s - start_s))
            late = [] if prefill.done() else self._flow.prefill_late(self._state.clock.now_s())
            if not late:
                return self._prefilled(await prefill, start_s)
            assert isinstance(late[-1], SendHedge)
            hedge = group.create_task(self._hedge(out, late[-1]))
            result = await self._first(prefill, hedge, start_s)
        if result is not None:
            self._failures.clear()  # an error holds the frames that hold this
            return result
        if self._failures:
            raise self._failures.pop()
        if self._flow.state is State.HEDGED:
            self._legs.tell(self._flow.hedge_answered(self._state.clock.now_s()))
        else:
            self._legs.tell(self._flow.decode_answered())
        return [], self._answers.pop()

    async def _first(
        self,
        prefill: asyncio.Task[Edits | PrefillFailed],
        hedge: asyncio.Task[None],
        start_s: float,
    ) -> Prefilled | None:
        """P's result where that counts; None where D's does."""
        await asyncio.wait({prefill, hedge}, return_when=asyncio.FIRST_COMPLETED)
        if not prefill.done():
            if self._failures:
                failure = self._legs.failure(self._failures.pop())
                self._legs.tell(self._flow.hedge_failed(failure, self._state.clock.now_s()))
                return self._prefilled(await prefill, start_s)
            prefill.cancel()
            return None
        result = prefill.result()
        if isinstance(result, Edits):
            hedge.cancel()
            return self._prefilled(result, start_s)
        self._prefilled(result, start_s)
        await hedge
        return None

    def _prefilled(self, result: Edits | PrefillFailed, start_s: float) -> Prefilled:
        """P's leg is over: tell the flow."""
        state, record = self._state, self._record
        now_s = state.clock.now_s()
        if isinstance(result, PrefillFailed):
            actions = self._flow.prefill_failed(result.why, now_s, result.failure)
            self._legs.tell(actions)
            return actions, None
        record.t_prefill_done = state.clock.unix(now_s)
        state.metrics.prefill_leg.observe(now_s - start_s)
        actions = self._flow.prefill_answered(now_s, result.cached_ratio)
        self._legs.tell(actions)
        return actions, result

    async def _hedge(self, out: Outgoing, leg: SendHedge) -> None:
        try:
            self._answers.append(await self._legs.decode(out, leg))
        except UpstreamFailure as failure:
            self._failures.append(failure)

    async def prefill(self, out: Outgoing, leg: SendPrefill) -> Edits | PrefillFailed:
        """P's leg, alone."""
        state, limit = self._state, leg.limit
        leg_id = f"{self._record.request_id}-p"
        try:
            p = state.instances.upstream(leg.instance.name)
            half = PrefillHalf(state, self._flow.route)
            result = await half.run(
                lambda on_sent: prefill_leg(out, p, state.connector, leg_id, limit.seconds, on_sent)
            )
        except UpstreamFailure as failure:
            return PrefillFailed(fallback_of(failure), self._legs.failure(failure))
        if isinstance(result, Edits):
            self.handed.append(result)
            return result
        if result is not Fallback.P_TIMEOUT:
            return PrefillFailed(result)
        self._legs.note_limit(limit, limit.seconds)
        late = f"no prefill in {limit.seconds:.3g} s"
        return PrefillFailed(result, LegFailure(FailureKind.TIMEOUT, late))
