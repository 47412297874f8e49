"""The legs of one request, run until an instance answers: performs the actions of its flow.

`core.routing.request_flow` decides which leg comes next, which instance is blamed and when to give
up. Here its actions become requests to instances, log lines and counters, and their results become
its events.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Iterable
from dataclasses import replace

from proxy.core.connectors.base import Edits
from proxy.core.fleet.retries import busy_s
from proxy.core.routing.request_flow import (
    Action,
    FellBack,
    GiveUp,
    HedgeEnded,
    InstanceFailed,
    LegFailure,
    LegLimit,
    Pause,
    RequestFlow,
    Retried,
    RetryRefused,
    SendDecode,
    SendHedge,
    SendPrefill,
)
from proxy.core.types import FailureKind, Fallback
from proxy.net.upstream.client import OnSent
from proxy.net.upstream.response import UpstreamResponse
from proxy.protocol.errors import UpstreamFailure
from proxy.protocol.headers import with_request_id
from proxy.request.client_request import Outgoing
from proxy.request.kv_release import DecodeHalf
from proxy.request.legs import FirstEventLimit, decode_leg
from proxy.request.offload import PrefillRace
from proxy.state.proxy_state import ProxyState
from proxy.telemetry.record import RequestRecord


class Attempts:
    """Performs the actions of one request's flow."""

    __slots__ = ("_flow", "_half", "_record", "_state")

    def __init__(self, state: ProxyState, record: RequestRecord, flow: RequestFlow) -> None:
        self._state, self._record, self._flow = state, record, flow
        self._half: DecodeHalf | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the client has left and D's leg goes on: the lease ends with that leg."""
        return self._half is not None and self._half.is_kept

    async def run(self, out: Outgoing) -> UpstreamResponse:
        """An instance's answer whose first event is good; raises the last UpstreamFailure."""
        flow, edits = self._flow, None
        actions = flow.begin(self._state.clock.now_s())
        while True:
            leg = actions[-1]
            try:
                if isinstance(leg, SendPrefill):
                    race = PrefillRace(self._state, self._record, flow, self)
                    actions, got = await race.run(out, leg)
                    if isinstance(got, UpstreamResponse):
                        return got
                    edits = got
                    continue
                assert isinstance(leg, SendDecode)
                answer = await self.decode(out, leg, edits)
            except UpstreamFailure as failure:
                edits = None
                actions = await self._after(failure)
                if isinstance(actions[-1], GiveUp):
                    raise
            else:
                self.tell(flow.decode_answered())
                return answer

    async def _after(self, failure: UpstreamFailure) -> list[Action]:
        """What comes after a failed decode leg, pauses included."""
        flow, clock = self._flow, self._state.clock
        actions = flow.decode_failed(self.failure(failure), clock.now_s(), random.random())
        self.tell(actions)
        while isinstance(pause := actions[-1], Pause):
            await asyncio.sleep(pause.seconds)
            actions = flow.pause_over(clock.now_s(), random.random())
            self.tell(actions)
        return actions

    async def decode(
        self, out: Outgoing, leg: SendDecode | SendHedge, edits: Edits | None = None
    ) -> UpstreamResponse:
        """Ask D, and wait for its first event; raises UpstreamFailure."""
        state, record, name = self._state, self._record, leg.instance.name
        fetch_from = leg.fetch_from if isinstance(leg, SendDecode) else None
        source = state.instances.get(fetch_from.name) if fetch_from else None
        if isinstance(leg, SendHedge) or leg.is_repeat:
            own_id = f"{record.request_id}-{uuid.uuid4().hex[:6]}"
            out = replace(out, headers=with_request_id(out.headers, own_id))
        elif edits is not None and edits.request_id is not None:
            out = replace(out, headers=with_request_id(out.headers, edits.request_id))
        patience = FirstEventLimit(leg.limit.seconds, leg.limit.cap_s, self._flow.has_other)
        record.t_decode_sent = state.clock.unix_now()
        record.decode_instance = name
        try:
            if edits is None or not state.connector.pins:
                return await decode_leg(
                    out, state.instances.upstream(name), edits, source, patience
                )

            async def fetching(on_sent: OnSent) -> UpstreamResponse:
                d = state.instances.upstream(name)
                return await decode_leg(out, d, edits, source, patience, on_sent)

            self._half = DecodeHalf(state, self._flow, edits)
            return await self._half.run(fetching)
        except UpstreamFailure as failure:
            if failure.limit_s is not None:
                self.note_limit(leg.limit, failure.limit_s)
            raise

    def note_limit(self, limit: LegLimit, seconds: float) -> None:
        """A leg met its time limit."""
        self._record.limit, self._record.limit_s = limit.option, seconds

    def failure(self, failure: UpstreamFailure) -> LegFailure:
        """An instance's failure as the flow hears of it."""
        wait_s = 0.0
        if failure.kind is FailureKind.BUSY:
            wait_s = busy_s(failure.headers.get("Retry-After"), self._state.clock.unix_now())
        return LegFailure(failure.kind, str(failure), wait_s)

    def blame(self, name: str, failure: UpstreamFailure) -> None:
        """An instance failed after its answer had begun."""
        now_s = self._state.clock.now_s()
        self.tell(self._flow.failed(name, self.failure(failure), now_s))

    def tell(self, actions: Iterable[Action]) -> None:
        """Counters, the record and the log, for what the flow has decided."""
        metrics, record = self._state.metrics, self._record
        for action in actions:
            if isinstance(action, InstanceFailed):
                self._state.instances.act(action.name, action.change, action.detail)
            elif isinstance(action, FellBack):
                self._tell_fallback(action)
            elif isinstance(action, HedgeEnded):
                record.hedge = action.winner
                metrics.hedges.labels(action.winner).inc()
            elif isinstance(action, Retried):
                record.retries = self._flow.retries
                metrics.retries.labels(action.kind).inc()
            elif isinstance(action, RetryRefused):
                metrics.retries_refused.inc()

    def _tell_fallback(self, action: FellBack) -> None:
        """What P said of itself may be wrong, unless it was only late."""
        state, why = self._state, action.why
        p = state.instances.get(action.prefill.name) if action.prefill else None
        if p is not None and why is not Fallback.P_LATE:
            p.forget_engine_id()
        if why is Fallback.KV_PARAMS:
            state.metrics.releases.labels("stranded").inc()
        state.metrics.fallbacks.labels(why).inc()
        self._record.fallback = why
