"""The life of one request: read, admit, run (and run again elsewhere), relay, account.

Whatever happens, and at whichever await, one `finally` closes the lease and writes one record.
"""

from __future__ import annotations

import asyncio

from aiohttp import web
from multidict import CIMultiDict

from proxy.core.admission.memory import Level
from proxy.core.kvcache.reuse import cached_ratio
from proxy.core.routing.request_flow import RequestFlow
from proxy.core.routing.route import Route
from proxy.core.types import (
    FailureKind,
    Outcome,
    Reject,
    RejectReason,
    RequestFacts,
    RouteClass,
)
from proxy.net.server import responses
from proxy.net.timeouts import Limit
from proxy.net.upstream.response import UpstreamResponse
from proxy.protocol.endpoints import ENDPOINTS, endpoint_of
from proxy.protocol.errors import ProxyError, StoppingError, UpstreamFailure, UpstreamTimeoutError
from proxy.protocol.headers import route_lines
from proxy.request import client_request
from proxy.request.attempts import Attempts
from proxy.request.client_request import Outgoing
from proxy.request.client_response import CLOSE, ClientResponse, is_whole, pass_on
from proxy.request.relay import StalledClientError
from proxy.request.stream_accounting import Streaming
from proxy.state import queue
from proxy.state.proxy_state import ProxyState
from proxy.telemetry import record as telemetry_record
from proxy.telemetry.record import RequestRecord

_GIANT_BYTES = 1 << 19
"""From here on a body's texts take about a millisecond and more."""
SHORT_OF_MEMORY = Reject(RejectReason.MEMORY, 5)
"""Streams end meanwhile, and their buffers with them."""


class Exchange:
    """One client's request and everything that becomes of it."""

    __slots__ = (
        "_attempts",
        "_flow",
        "_stream",
        "_usage",
        "facts",
        "out",
        "path",
        "prompt_bytes",
        "record",
        "request",
        "request_id",
        "route",
        "state",
    )

    def __init__(self, state: ProxyState, request: web.Request) -> None:
        self.state = state
        self.request = request
        self.request_id = client_request.request_id(request.headers)
        self.path = path = request.raw_path if request.raw_path in ENDPOINTS else request.path
        now = state.clock.unix_now()
        self.record = RequestRecord(request_id=self.request_id, endpoint=path, t_proxy_recv=now)
        self._usage: bytes | None = None
        self.out: Outgoing
        self.facts: RequestFacts
        self.prompt_bytes = 0
        self.route: Route | None = None
        self._stream: Streaming | None = None
        self._flow: RequestFlow | None = None
        self._attempts: Attempts | None = None

    async def run(self) -> web.StreamResponse:
        """Serve the request; only a client that left makes this raise."""
        total_s = self.state.settings.total_timeout
        scope = Limit(total_s)
        try:
            with scope:
                self.state.in_flight.enter(scope)
                return await self._serve()
        except ProxyError as error:
            return self._refuse(error)
        except TimeoutError:
            return self._end_early(total_s)
        except (asyncio.CancelledError, ConnectionResetError) as gone:
            stalled = isinstance(gone, StalledClientError)
            self._end(Outcome.CLIENT_GONE, 499, str(gone) if stalled else "the client left")
            if self.request.transport is not None:
                # Also what is still queued for a client that reads nothing.
                self.request.transport.abort()
            if isinstance(gone, asyncio.CancelledError):
                raise
            # aiohttp takes any other exception for a fault of ours, and logs its traceback.
            raise asyncio.CancelledError from gone
        finally:
            self.state.in_flight.leave(scope)
            self._finish()
            if self._stream is not None:  # two cycles that only the collector would end
                self._stream.let_go()
                self._stream = None

    async def _serve(self) -> web.StreamResponse:
        settings = self.state.settings
        if self.state.memory.level is Level.NOTHING:
            return self._reject(SHORT_OF_MEMORY)
        limits = client_request.BodyLimits(settings.max_body_bytes, settings.body_timeout)
        grant = self.state.grant(self.request.headers)
        self.record.tenant = grant.tenant
        self.out = await client_request.read(self.request, self.request_id, limits, grant)
        if len(self.out.raw or b"") < _GIANT_BYTES:
            self.facts, self.prompt_bytes = self._look()
        else:  # in a thread, so that no stream waits for all of it
            self.state.memory.note_giant(self.state.clock.now_s())
            self.facts, self.prompt_bytes = await asyncio.to_thread(self._look)
        admitted = self._admit()
        if isinstance(admitted, Reject):
            admitted = await self._wait(admitted)
        if isinstance(admitted, Reject):
            return self._reject(admitted)
        flow, attempts = self._place(admitted)
        try:
            answer = await attempts.run(self.out)
        except UpstreamFailure as failure:
            self._say(failure.kind, failure.detail)
            now_s = self.state.clock.unix_now()
            response = responses.refusal(failure, self._extra_headers(), now_s)
            asked_wrongly = failure.kind is FailureKind.NO_MODEL
            outcome = Outcome.BAD_REQUEST if asked_wrongly else Outcome.UPSTREAM_ERROR
            self._end(outcome, failure.status, failure.detail)
            return response
        return await self._relay(flow, attempts, answer)

    def _look(self) -> tuple[RequestFacts, int]:
        parsed, tenant = self.out.parsed, self.record.tenant
        return self.state.estimator.facts(self.path, self.request.headers, parsed, tenant)

    def _admit(self) -> Route | Reject:
        state, record, parsed = self.state, self.record, self.out.parsed
        state.metrics.issued.inc()
        record.stream = bool(parsed.get("stream"))
        telemetry_record.note_facts(record, self.facts)
        if state.memory.level and state.is_too_heavy_now(self.facts):
            return SHORT_OF_MEMORY
        return state.waiting.admit(self.facts)

    async def _wait(self, reject: Reject) -> Route | Reject:
        """Everybody is busy: wait for a turn, where there is room and time for it."""
        record, headers = self.record, self.request.headers
        if reject is SHORT_OF_MEMORY:
            return reject
        priority = queue.priority_of(headers, self.out.parsed)
        room, size = self.state.waiting, len(self.out.raw or b"")
        ticket = room.enter(self.facts, reject, priority, size)
        if isinstance(ticket, queue.Ticket):
            record.t_queued = self.state.clock.unix_now()
            admitted = await room.wait(ticket)
        else:
            admitted = ticket
        record.t_decided = self.state.clock.unix_now()
        return admitted

    def _place(self, route: Route) -> tuple[RequestFlow, Attempts]:
        """An instance has been found: nothing may wait between the admission and this."""
        self.route = route
        state, record = self.state, self.record
        now_s = state.clock.now_s()
        record.t_decided = state.clock.unix(now_s)
        flow = self._flow = RequestFlow(
            state.router,
            state.in_flight.budget,
            self.facts,
            route,
            state.leg_caps,
            now_s,
            streams=bool(record.stream),
        )
        attempts = self._attempts = Attempts(state, record, flow)
        telemetry_record.note_route(record, route)
        if route.mistake is not None:
            state.failures.note_mistake(route.mistake, now_s)
        decision = "offload" if route.prefill else "colocate"
        state.metrics.decisions.labels(decision, route.reason).inc()
        state.decisions.append(record)
        return flow, attempts

    async def _relay(
        self, flow: RequestFlow, attempts: Attempts, answer: UpstreamResponse
    ) -> web.StreamResponse:
        self.record.status = answer.status
        if not answer.is_stream:
            now_s = self.state.clock.now_s()
            if answer.is_over and flow.route.prefill is None and answer.failure is None:
                flow.came_whole(now_s)
            else:
                flow.first_token(now_s, seen=False)
        if is_whole(self.request, answer):
            response = ClientResponse(self.request, answer, self._extra_lines())
            self._usage = pass_on(self.request, answer, response)
            return response
        # Nobody is asked again: the prompt need not stay for as long as the stream.
        del self.out
        self._stream = Streaming(self.state, self.record, flow, attempts.blame)
        return await self._stream.run(self.request, answer, self._extra_lines())

    def _say(self, kind: str, detail: str) -> None:
        state = self.state
        state.failures.note(self.record, kind, detail, state.clock.now_s())

    def _reject(self, reject: Reject) -> web.Response:
        metrics, status = self.state.metrics, self.state.settings.overload_status
        metrics.rejected.labels(reject.reason).inc()
        metrics.retry_after.observe(reject.retry_after_s)
        response = responses.busy(reject, status, self._extra_headers())
        self._end(Outcome.REJECTED, response.status, str(reject.reason))
        return response

    def _refuse(self, error: ProxyError) -> web.Response:
        self._end(error.outcome, error.status, error.message)
        return responses.error(error, self._extra_headers())

    def _end_early(self, total_s: float) -> web.StreamResponse:
        """The time is up: the request's own, or the proxy's."""
        late = f"not finished in {total_s:g} s (--total-timeout)"
        error: ProxyError = UpstreamTimeoutError(late, code="total_timeout")
        if self.state.in_flight.is_cutting:
            error = StoppingError("the proxy is stopping (--drain-seconds)")
        else:
            self._say("total_timeout", late)
        if self._stream is None or not self._stream.has_begun:
            return self._refuse(error)
        return self._stream.cut(error.outcome, error.message, error.code or "total_timeout")

    def _extra_headers(self) -> CIMultiDict[str]:
        headers = CIMultiDict({"X-Request-Id": self.request_id})
        if not self.state.wants_keepalive:
            headers["Connection"] = "close"
        if self.route is not None and self.state.shows_route:
            headers["X-Cache-Proxy-Instance"] = self.route.decode.name
            headers["X-Cache-Proxy-Route"] = self.route.route_class
            headers["X-Cache-Proxy-Reason"] = self.route.reason
        return headers

    def _extra_lines(self) -> bytes:
        """The same as lines, for an answer that is passed on."""
        route, state = self.route, self.state
        lines = b"X-Request-Id: %b\r\n" % self.request_id.encode()
        if route is not None and state.shows_route:
            lines += route_lines(route.decode.name, route.route_class, route.reason)
        return lines if state.wants_keepalive else lines + CLOSE

    def _end(self, outcome: Outcome, status: int | None, error: str | None) -> None:
        telemetry_record.note_end(self.record, outcome, status, error)

    def _finish(self) -> None:
        """Close the lease, complete the record, count it, log it. Never waits."""
        state, record, flow = self.state, self.record, self._flow
        try:
            self._complete()
        finally:
            if flow is not None and not (self._attempts is not None and self._attempts.is_kept):
                if record.outcome is Outcome.OK:
                    flow.completed(cached_ratio(record.cached_tokens, record.prompt_tokens))
                whole = record.stream and record.outcome is Outcome.OK
                flow.end(state.clock.now_s(), record.osl_tokens if whole else None)
        self._learn()
        state.metrics.observe(record, endpoint_of(self.path).label)
        state.request_log.write(record)

    def _complete(self) -> None:
        """The record's last fields."""
        record, route = self.record, self.route
        record.t_done = self.state.clock.unix_now()
        if route is not None:
            record.route_class, record.offload_decision_reason = route.route_class, route.reason
            if route.tried and route.mistake is not None:  # placed again, by a policy that failed
                self.state.failures.note_mistake(route.mistake, self.state.clock.now_s())
        if record.outcome is None:
            record.outcome = telemetry_record.outcome_of(record.status or 200)
        elif record.outcome is Outcome.CLIENT_GONE:
            self.state.metrics.disconnects.labels(telemetry_record.phase(record)).inc()
        telemetry_record.note_usage(record, self._stream.usage if self._stream else self._usage)

    def _learn(self) -> None:
        """Bytes per token, and whether an offload's KV really arrived on D."""
        record, state = self.record, self.state
        if record.prompt_tokens is None:
            return
        state.estimator.learn(self.facts.model, self.prompt_bytes, record.prompt_tokens)
        came_over = record.cached_tokens is None or record.cached_tokens * 2 > record.prompt_tokens
        is_told = record.route_class == RouteClass.HEAVY_P2P and state.connector.counts_moved
        if is_told and not came_over:
            state.metrics.kv_misses.inc()
            if (p := state.instances.get(record.prefill_instance or "")) is not None:
                p.forget_engine_id()
