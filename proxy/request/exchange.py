"""The life of one request: read, admit, run (and retry), relay, account.

Whatever happens, and at whichever await, one `finally` closes the lease and writes one record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from aiohttp import web
from multidict import CIMultiDict, istr

from proxy.config.in_force import OptionsInForce
from proxy.core.admission.memory import Level, Watermark
from proxy.core.admission.queue import Priority
from proxy.core.known.fleet_state import FleetState
from proxy.core.kvcache.published_index import Ended
from proxy.core.kvcache.reuse import cached_ratio
from proxy.core.kvcache.trust import Counts
from proxy.core.routing.request_flow import RequestFlow
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import (
    FailureKind,
    MoveCause,
    Outcome,
    Reject,
    RejectReason,
    RequestFacts,
    RouteClass,
)
from proxy.fleet.instances import Instances
from proxy.net.server import cors, responses
from proxy.net.server.connection import StalledClientError
from proxy.net.timeouts import Clock, Limit
from proxy.net.upstream.response import UpstreamResponse
from proxy.protocol.endpoints import ENDPOINTS, OFFLOADABLE, OTHER, RESPONSES, Dialect, endpoint_of
from proxy.protocol.errors import (
    LoopError,
    ProxyError,
    ResponseNotFoundError,
    StoppingError,
    TooHotError,
    UnknownModelError,
    UpstreamFailure,
    UpstreamTimeoutError,
)
from proxy.protocol.headers import route_lines
from proxy.protocol.names.session_names import bounded, of_tenant
from proxy.protocol.names.stored_responses import HEAD_BYTES, may_be_stored, reference, stored_id
from proxy.protocol.offloadable import asks_for_stream
from proxy.protocol.prompt.facts import (
    MODEL_CHARS,
    TokenEstimator,
    most_output_tokens,
)
from proxy.protocol.streams.hollow import broken, is_short
from proxy.request import client_request
from proxy.request.attempts import Attempts, LegOwners
from proxy.request.client_request import Outgoing
from proxy.request.client_response import CLOSE, ClientResponse, is_whole, pass_on
from proxy.request.large_bodies import LargeBodies
from proxy.request.moves import Moves
from proxy.request.relay import Rooms
from proxy.request.stream_accounting import NO_TOKEN, Streaming
from proxy.state.access import Access
from proxy.state.held_for_clients import HeldBodies, Unread
from proxy.state.in_flight import InFlight
from proxy.state.queue import Ticket, WaitingRoom, priority_of
from proxy.telemetry import record as telemetry_record
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.requests import RequestTelemetry

DEFECT = "a defect of the proxy"
"""`error` of a request that ended by an exception that nothing here expects."""
UNREAD = "the client was cut: it did not read, and others needed the room"
FEW_TOKENS = 8
"""A request that allows no more says nothing on the length of answers."""
_SESSION_ID = istr("X-Session-ID")
_GIANT_BYTES = 1 << 19
"""Freed memory is kept for a while after a body of this size: others may follow."""
TOKENIZE_S = 0.2
"""Longest wait for an engine's /tokenize; without it the model's usual share is assumed."""
SHORT_OF_MEMORY = Reject(RejectReason.MEMORY, 5)
"""Seconds in which streams end and free their buffers."""


@dataclass(frozen=True, slots=True)
class RequestOwners:
    """The parts that all requests share."""

    clock: Clock
    options: OptionsInForce
    access: Access
    large_bodies: LargeBodies
    memory: Watermark
    bodies: HeldBodies
    unread: Unread
    estimator: TokenEstimator
    router: Router
    known: FleetState
    waiting: WaitingRoom
    in_flight: InFlight
    instances: Instances
    telemetry: RequestTelemetry
    legs: LegOwners

    @property
    def wants_keepalive(self) -> bool:
        """Whether a client's connection may stay open after its answer."""
        return not self.in_flight.is_leaving and self.memory.level is Level.NORMAL

    def is_too_heavy_now(self, facts: RequestFacts, owner: str, size: int) -> bool:
        """Whether memory is too short for this request: for its body, or as it is HEAVY anywhere.

        `owner`: whose share of the room for bodies its body takes; `size`: of that.
        """
        if self.memory.level < Level.NO_HEAVY:
            return False
        is_heavy = self.known.least_new_tokens(facts) >= self.options.settings.heavy_threshold
        return is_heavy or self.bodies.is_large(owner, size)


def beginning(pieces: Iterable[bytes], size: int) -> bytes:
    """The first `size` bytes of an answer that may be long."""
    head = bytearray()
    for piece in pieces:
        head += piece[: size - len(head)]
        if len(head) >= size:
            break
    return bytes(head)


def _rest_s(clock: Clock, ends_s: float) -> float:
    return ends_s - clock.now_s()


class Exchange:
    """One client's request and everything that becomes of it."""

    __deletable__ = ("out",)  # mypyc's word for what `del` may take away
    __slots__ = (
        "_ends_s",
        "_flow",
        "_has_no_room",
        "_is_legible",
        "_is_short",
        "_is_too_hot",
        "_media",
        "_most_output",
        "_owner",
        "_row",
        "_scope",
        "_sees_all",
        "_session",
        "_stream",
        "_usage",
        "facts",
        "out",
        "owners",
        "path",
        "priority",
        "prompt_bytes",
        "record",
        "request",
        "request_id",
        "route",
    )

    def __init__(self, owners: RequestOwners, request: web.Request) -> None:
        self.owners = owners
        self.request = request
        self.request_id = responses.request_id(request.headers)
        self.path = path = request.raw_path if request.raw_path in ENDPOINTS else request.path
        self._row = endpoint_of(path)
        self._sees_all = False
        now = owners.clock.unix_now()
        self.record = RequestRecord(request_id=self.request_id, endpoint=path, t_proxy_recv=now)
        self._usage: bytes | None = None
        self._most_output: int | None = None
        self.out: Outgoing
        self.facts: RequestFacts
        self.prompt_bytes = 0
        self._media: dict[str, int] = {}
        self._ends_s = 0.0
        self._session = ""
        self.route: Route | None = None
        self._stream: Streaming | None = None
        self._flow: RequestFlow | None = None
        self.priority = Priority.NORMAL
        self._scope: Limit | None = None
        self._is_too_hot = self._has_no_room = False
        self._is_short = self._is_legible = False
        self._owner = ""

    async def run(self) -> web.StreamResponse:
        """Serve the request; raises CancelledError where the client has left, and nothing else."""
        total_s = self.owners.options.settings.total_timeout
        scope = Limit(total_s)
        self._ends_s = self.owners.clock.now_s() + total_s
        is_served = False
        try:
            with scope:
                self._scope = scope
                self.owners.in_flight.enter(scope, self)
                response = await self._serve()
                is_served = True
                return response
        except ProxyError as error:
            return self._refuse(error)
        except TimeoutError:
            return self._end_early(total_s)
        except (asyncio.CancelledError, ConnectionResetError) as gone:
            self._end_left(gone)
            if self.request.transport is not None:
                # Also what is still queued for a client that reads nothing.
                self.request.transport.abort()
            if isinstance(gone, asyncio.CancelledError):
                raise
            # aiohttp takes any other exception for a fault of ours, and logs its traceback.
            raise asyncio.CancelledError from gone
        finally:
            self.owners.in_flight.leave(scope)
            self._scope = None
            if not is_served:  # without effect where what was raised is one of those above
                self._end_by_defect()
            self._finish()
            if self._stream is not None:  # two reference cycles that only the collector would free
                self.owners.in_flight.movable.discard(self._stream)
                self._stream.let_go()
                self._stream = None

    def _end_by_defect(self) -> None:
        """Something else has ended the request, unless its end is known: that is the proxy's."""
        if self.record.outcome is None:
            self.owners.in_flight.note_defect(self.owners.clock.now_s())
            self._end(Outcome.UPSTREAM_ERROR, self.record.status or 500, DEFECT)

    def _end_left(self, gone: BaseException) -> None:
        """The client has left: in time, or once it had the end of its stream."""
        if self._stream is not None and self._stream.left():
            self._end(Outcome.OK, self.record.status, None)
        why = str(gone) if isinstance(gone, StalledClientError) else "the client left"
        if self._stream is not None and self._stream.has_given_way:
            why = UNREAD
        self._end(Outcome.CLIENT_GONE, 499, why)

    async def _serve(self) -> web.StreamResponse:
        owners, settings = self.owners, self.owners.options.settings
        if owners.memory.level is Level.NOTHING:
            owners.telemetry.metrics.issued.inc()
            return self._reject(SHORT_OF_MEMORY)
        grant = owners.access.grant(self.request.headers)
        self.record.tenant = grant.tenant
        self.record.trace = owners.telemetry.trace_of(self.request.headers)
        self.out = await client_request.read(
            self.request,
            responses.engine_id(self.request_id),
            owners.options.body_limits,
            grant,
            owners.large_bodies,
            settings.extra_paths,
        )
        if len(self.out.members.raw) >= _GIANT_BYTES:
            owners.memory.note_giant(owners.clock.now_s())
        self._owner = client_request.owner_of(self.request, grant)
        self._has_no_room = not owners.bodies.take(self, self._owner, len(self.out.members.raw))
        self._note_facts(grant.tenant)
        if self.path not in OFFLOADABLE:
            self._find_holder()
        await self._compare(*self.out.found.prompt.answer)
        admitted = self._admit()
        if isinstance(admitted, Reject):
            admitted = await self._wait(admitted)
        if isinstance(admitted, Reject):
            return self._reject(admitted)
        try:
            answered = await self._attempt(admitted)
        except UpstreamFailure as failure:
            if self._flow is not None and self._flow.is_poison:
                owners.telemetry.poisoned(self.record, failure.detail)
            else:
                owners.telemetry.failed(self.record, failure.kind, failure.detail)
            unix_now_s = owners.clock.wall_now()
            response = responses.refusal(self.path, failure, self._extra_headers(), unix_now_s)
            asked_wrongly = failure.kind in (FailureKind.NO_MODEL, FailureKind.TOO_LONG)
            outcome = Outcome.BAD_REQUEST if asked_wrongly else Outcome.UPSTREAM_ERROR
            self._end(outcome, failure.status, failure.detail)
            return response
        return (
            self._reject(answered) if isinstance(answered, Reject) else await self._relay(*answered)
        )

    def _note_facts(self, tenant: str | None) -> None:
        found, headers = self.out.found, self.request.headers
        self.facts = self.owners.estimator.facts(found.prompt, headers, found.session, tenant)
        told = found.fields.get("session_id") or headers.get(_SESSION_ID)
        self._session = told if isinstance(told, str) else ""
        self.owners.known.refine(self.facts, self.owners.clock.now_s())
        self.prompt_bytes = found.prompt.learnable_bytes
        for kind, _, number in found.prompt.media:
            self._media[kind] = self._media.get(kind, 0) + number
        # What a stored response continues only its engine knows.
        self._sees_all = found.fields.get("previous_response_id") is None
        if self.owners.known.fleet.denies(self.facts.model):
            self._deny_model(self.facts.model)

    def _deny_model(self, model: str) -> None:
        """Refuse a request for a model that no instance has listed; raises UnknownModelError.

        Not on extra paths, where the field may mean anything, nor for a name that is cut.
        """
        fleet = self.owners.known.fleet
        if self._row is OTHER or len(model) >= MODEL_CHARS:
            return
        telemetry_record.note_facts(self.record, self.facts)
        fleet.reread_models()  # it may have been loaded since
        self.owners.telemetry.unknown_model(model, fleet.models())
        raise UnknownModelError.of(model, fleet.models())

    async def _compare(self, answer: str, at: int) -> None:
        """Find out how many tokens of the last answer the prompt repeats.

        Only where KV events tell these tokens, and the model's answers are cut into other tokens
        now and then when they come back.
        """
        if not answer or at >= len(self.facts.ends) or self._has_no_room:
            return
        known, model = self.owners.known, self.facts.model
        doubted = known.published.doubted(self.facts.ends[at], model)
        if doubted is None or (upstream := self.owners.instances.get(doubted[0])) is None:
            return
        with suppress(UpstreamFailure):
            doubted[1].compare(await upstream.token_ids(model, answer, TOKENIZE_S))

    async def _attempt(
        self, route: Route
    ) -> tuple[RequestFlow, Attempts, UpstreamResponse] | Reject:
        """The answer of an instance, and whose it is; raises the last UpstreamFailure.

        If every instance that was asked is busy, the request waits in the queue; if it may not
        wait, the client gets the engine's answer. A prompt too long for all that are there is
        rejected, as it is not for one that is away.
        """
        flow = None
        while True:
            flow, attempts = self._place(route, flow)
            try:
                return flow, attempts, await attempts.run(self.out)
            except UpstreamFailure as failure:
                if not flow.may_wait:
                    raise
                failed = failure.again()
            again = await self._wait_again(flow)
            if isinstance(again, Reject):
                if failed.kind is FailureKind.TOO_LONG:
                    return again
                self.owners.telemetry.turned_away(again)
            if not isinstance(again, Route):
                raise failed.again()
            route = again

    async def _wait_again(self, flow: RequestFlow) -> Route | Reject:
        flow.end(self.owners.clock.now_s())
        admitted = self.owners.waiting.admit(self.facts)
        return await self._wait(admitted) if isinstance(admitted, Reject) else admitted

    def _response_key(self, response_id: str) -> str:
        """A stored response's key: of two tenants neither finds the other's."""
        return of_tenant(bounded(response_id), self.record.tenant) or ""

    def _find_holder(self) -> None:
        """Bind a request about a stored response to the instance that holds it.

        Raises ResponseNotFoundError where that one's process is gone, or where a tenant asks for
        what it has not stored. Without keys the instances are asked as for any other request.
        """
        about = reference(self.path, self.out.found.fields)
        if about is None:
            return
        key, now_s = self._response_key(about.response_id), self.owners.clock.now_s()
        cache = self.owners.known.responses.holder(key, now_s, self.facts.tenant)
        if cache is not None and not cache.is_lost:
            self.facts.holder = cache.name
        elif cache is not None:
            gone = "the instance that held this response is gone, and the response with it"
            raise ResponseNotFoundError(f"{about.param}: {gone}", param=about.param)
        elif self.record.tenant is not None:
            unknown = "no response with this id is known"
            raise ResponseNotFoundError(f"{about.param}: {unknown}", param=about.param)

    def _note_stored(self, answer: UpstreamResponse, instance: str) -> None:
        """Note where the response is stored that an answer begins, or that it is deleted."""
        known, fields = self.owners.known, self.out.found.fields
        if self.request.method == "DELETE":
            if (about := reference(self.path, fields)) is not None and answer.status < 300:
                known.responses.forget(self._response_key(about.response_id))
        elif may_be_stored(self.path, fields):
            head = beginning(answer.body, HEAD_BYTES) if answer.status == 200 else b""
            if (made := stored_id(head, is_stream=answer.is_stream)) is not None:
                cache = known.fleet.states.of(instance).cache
                now_s = self.owners.clock.now_s()
                key = self._response_key(made)
                known.responses.note(key, cache, now_s, self.facts.tenant)

    def _admit(self) -> Route | Reject:
        owners, record, fields = self.owners, self.record, self.out.found.fields
        owners.telemetry.metrics.issued.inc()
        record.stream = asks_for_stream(fields)
        telemetry_record.note_facts(record, self.facts)
        size = len(self.out.members.raw)
        if self._has_no_room or (
            owners.memory.level and owners.is_too_heavy_now(self.facts, self._owner, size)
        ):
            return SHORT_OF_MEMORY
        return owners.waiting.admit(self.facts)

    async def _wait(self, reject: Reject) -> Route | Reject:
        """Every instance is busy: wait in the queue, if it has room and time."""
        record, clock, room = self.record, self.owners.clock, self.owners.waiting
        if reject is SHORT_OF_MEMORY or self.facts.holder is not None:
            # Bound to one instance, it would hold up those that could go elsewhere.
            return reject
        priority = priority_of(self.request.headers, self.out.found.fields)
        ticket = room.enter(self.facts, reject, priority, len(self.out.raw or b""))
        if not isinstance(ticket, Ticket):
            return ticket
        record.t_queued, record.t_decided = clock.unix_now(), None
        admitted = await room.wait(ticket)
        record.t_decided = clock.unix_now()
        return admitted

    def _place(self, route: Route, before: RequestFlow | None) -> tuple[RequestFlow, Attempts]:
        """Start the flow of an admitted request. No await may stand between admission and this.

        `before`: its flow before it waited again.
        """
        self.route = route
        owners, record = self.owners, self.record
        now_s = owners.clock.now_s()
        record.t_decided = owners.clock.unix(now_s)
        record.session_id = self.facts.session_id  # an id that has come back is one
        if before is not None:
            telemetry_record.note_route_again(record, route)
        flow = self._flow = RequestFlow(
            owners.router,
            owners.in_flight.budget,
            self.facts,
            route,
            owners.options.leg_caps,
            now_s,
            # Of an upload it is not known how long its first event should take.
            streams=bool(record.stream) and self.out.found.prompt.bytes > 0,
            before=before,
        )
        attempts = Attempts(owners.legs, record, flow, self._row)
        if before is None:
            owners.telemetry.placed(record, route)
        return flow, attempts

    async def _relay(
        self, flow: RequestFlow, attempts: Attempts, answer: UpstreamResponse
    ) -> web.StreamResponse:
        owners, record = self.owners, self.record
        record.status = answer.status
        if self.path.startswith(RESPONSES):
            self._note_stored(answer, flow.route.decode.name)
        why = attempts.hollow
        if why is not None and answer.status < 400 and not answer.is_stream:
            body = b"".join(answer.body)
            if broken(self._row.dialect, body, is_stream=False) is not None:
                owners.telemetry.failed(record, why.kind, why.detail)
                self._end(Outcome.UPSTREAM_ERROR, answer.status, why.detail)
            attempts.blame(flow.route.decode.name, why)
        # Of an answer that serves nobody it is not known that anything was computed.
        if not answer.is_stream and answer.status < 400 and why is None:
            now_s = owners.clock.now_s()
            if answer.is_over and flow.route.prefill is None and answer.failure is None:
                flow.came_whole(now_s)
            else:
                flow.first_token(now_s, seen=False)
        self._is_legible = answer.status == 200 and not answer.head.is_packed and why is None
        self._most_output = most_output_tokens(self.out.found.fields)
        if is_whole(self.request, answer):
            self._is_short = self._is_short_answer(answer)
            response = ClientResponse(self.request, answer, self._extra_lines())
            self._usage = pass_on(self.request, answer, response)
            return response
        if self._has_no_room:  # it has to end, and its answer came in the same turn of the loop
            answer.close()
            return self._reject(SHORT_OF_MEMORY)
        return await self._pass_on(flow, attempts, answer)

    def _is_short_answer(self, answer: UpstreamResponse) -> bool:
        """Whether a whole answer has next to nothing in it."""
        return self._row.teaches and self._is_legible and is_short(b"".join(answer.body))

    async def _pass_on(
        self, flow: RequestFlow, attempts: Attempts, answer: UpstreamResponse
    ) -> web.StreamResponse:
        """Relay an answer that is not whole yet."""
        owners, record = self.owners, self.record
        self.priority = priority_of(self.request.headers, self.out.found.fields)
        moves = self._moves(attempts) if answer.is_stream else None
        # No other instance will be asked: free the prompt before the stream, not after it.
        del self.out
        owners.bodies.free(self)
        self._stream = Streaming(
            owners.clock, owners.telemetry, record, flow, attempts.blame, moves
        )
        if moves is not None and moves.trail is not None:
            owners.in_flight.movable.add(self._stream)
        heartbeat_s = owners.options.settings.heartbeat_interval
        rooms = Rooms(owners.instances.pending, owners.unread, self._owner)
        lines = self._extra_lines()
        return await self._stream.run(self.request, answer, lines, heartbeat_s, rooms)

    def _moves(self, attempts: Attempts) -> Moves | None:
        """The stream's means to migrate when its instance fails; None: the stream ends."""
        owners, plan = self.owners, self.out.found.plan
        if plan is None:
            return None
        rest_s = partial(_rest_s, owners.clock, self._ends_s)
        moves = Moves(owners.clock, owners.telemetry.metrics, self.record, attempts, rest_s)
        most_tokens = owners.options.settings.migration_max_seq_len
        moves.watch(plan, self.out, owners.in_flight, most_tokens)
        return moves

    def _reject(self, reject: Reject) -> web.Response:
        owners, record = self.owners, self.record
        if record.t_decided is None:
            record.t_decided = owners.clock.unix_now()
        owners.telemetry.rejected(record, reject)
        status = owners.options.settings.overload_status
        says_why, headers = owners.options.shows_route, self._extra_headers()
        response = responses.busy(self.path, reject, status, headers, says_why=says_why)
        self._end(Outcome.REJECTED, response.status, str(reject.reason))
        return response

    def _refuse(self, error: ProxyError) -> web.Response:
        if isinstance(error, LoopError):
            self.owners.telemetry.looped()
        self._end(error.outcome, error.status, error.message)
        return responses.error(self.path, error, self._extra_headers())

    def _end_early(self, total_s: float) -> web.StreamResponse:
        """End a request whose total timeout, or the proxy's drain time, is over.

        Or one that is too hot, or whose body has to give way.
        """
        if self._has_no_room:
            return self._reject(SHORT_OF_MEMORY)
        late = f"not finished in {total_s:g} s (--total-timeout)"
        error: ProxyError = UpstreamTimeoutError(late, code="total_timeout")
        if self.owners.in_flight.is_cutting:
            error = StoppingError("the proxy is stopping (--drain-seconds)")
        elif self._is_too_hot:
            error = TooHotError("the GPUs of its instance are too hot: the request was ended")
        else:
            self.record.limit, self.record.limit_s = "total", total_s
            self.owners.telemetry.failed(self.record, "total_timeout", late)
        if self._stream is None or not self._stream.has_begun:
            return self._refuse(error)
        return self._stream.cut(error.outcome, error.message, error.code or "total_timeout")

    @property
    def output_events(self) -> int:
        """Events of its stream that have passed."""
        return 0 if self._stream is None else self._stream.events

    @property
    def most_output_tokens(self) -> int | None:
        """The most output that it allows; None: no limit is known."""
        return self._most_output

    @property
    def why_fixed(self) -> str | None:
        """The reason known now that it cannot migrate; None if it can."""
        return NO_TOKEN if self._stream is None else self._stream.why_fixed

    def leave_hot(self) -> None:
        """Migrate the stream if it can: its instance is too hot."""
        if self._stream is not None:
            self._stream.leave(MoveCause.HEAT)

    def end_hot(self) -> None:
        """End the request: its instance is too hot, and it cannot migrate."""
        if self._scope is not None:
            self._is_too_hot = True
            self._end_now()

    @property
    def held_bytes(self) -> int:
        """Bytes that are held of it, as long as it has no answer."""
        return len(self.out.members.raw)

    def give_way(self) -> None:
        """End the request, which has no answer yet: its body is the largest of too many."""
        self._has_no_room = True
        self._end_now()

    def _end_now(self) -> None:
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    def _extra_headers(self) -> CIMultiDict[str]:
        """The header fields that the proxy adds to an answer of its own."""
        lines = self._extra_lines().decode().splitlines()
        fields = (line.partition(": ") for line in lines)
        return CIMultiDict([(name, value) for name, _, value in fields])

    def _extra_lines(self) -> bytes:
        """The header lines that the proxy adds to an answer."""
        route, owners = self.route, self.owners
        lines = b"X-Request-Id: %b\r\n" % self.request_id.encode()
        if route is not None and owners.options.shows_route:
            why, tokens = (route.place, route.reason), (route.hit_tokens, route.prompt_tokens)
            lines += route_lines(route.decode.name, route.route_class, *why, *tokens)
        if origins := owners.options.settings.cors_allowed_origins:
            lines += cors.lines(self.request.headers.get("Origin"), origins)
        return lines if owners.wants_keepalive else lines + CLOSE

    def _end(self, outcome: Outcome, status: int | None, error: str | None) -> None:
        telemetry_record.note_end(self.record, outcome, status, error)

    def _finish(self) -> None:
        """Close the lease, complete the record, count it, log it. Never waits."""
        owners, record, flow = self.owners, self.record, self._flow
        owners.bodies.free(self)
        try:
            self._complete()
        finally:
            if flow is not None:
                decode = flow.route.decode.name
                teaches = self._teaches()
                is_believed = teaches and not owners.known.is_usage_doubted(decode)
                if record.outcome is Outcome.OK:
                    self._note_length(flow)
                    ratio = cached_ratio(record.cached_tokens, record.prompt_tokens)
                    tells_hits = is_believed and self._is_one_answer
                    flow.completed(*((ratio, self._counts()) if tells_hits else (None,)))
                output_tokens = self._output_tokens(decode) if is_believed else None
                flow.end(owners.clock.now_s(), output_tokens)
                self._link(flow.route, is_believed=is_believed)
                if teaches:
                    self._learn(decode)
        owners.telemetry.over(record, self._row.label)

    def _note_length(self, flow: RequestFlow) -> None:
        """Compare the whole answer's length with others', where its client has set it no limit."""
        if not self._row.teaches or flow.moves or not self._is_legible:
            return
        stream = self._stream
        short = self._is_short if stream is None else stream.is_short
        if short:
            most = self._most_output
            if most is not None and most <= FEW_TOKENS:
                return
        now_s = self.owners.clock.now_s()
        if why := flow.ended_short(self.path, now_s, is_short=short):
            self.owners.instances.act(flow.route.decode.name, None, why)

    def _link(self, route: Route, *, is_believed: bool) -> None:
        """Link the prompt to its instance's published blocks, so events predict later hits."""
        record, facts, published = self.record, self.facts, self.owners.known.published
        tokens, output, cached = record.prompt_tokens, record.osl_tokens, record.cached_tokens
        is_there = is_believed and record.outcome is Outcome.OK and route.prefill is None
        if is_there and tokens and output and self._is_one_answer:
            claim = route.claim
            if claim is not None and cached is not None and claim.name == route.decode.name:
                published.answered(claim, cached)
            if self._most_output:
                output = min(output, self._most_output)
            told = route.decode.name, facts, route.reserved_s, self._session, facts.estimate
            published.ended(Ended(*told, tokens, output, cached))
        elif route.first_token_s is not None:
            for instance in (route.decode, route.prefill):
                if instance is not None:
                    published.left_unknown(instance.name, facts, tokens or facts.prompt_tokens)

    def _complete(self) -> None:
        """Fill the record's last fields."""
        record, route, clock = self.record, self.route, self.owners.clock
        record.t_done = clock.unix_now()
        if drift_s := clock.drift_s(record.t_done):
            telemetry_record.move_times(record, drift_s)
        if route is not None:
            record.route_class, record.offload_decision_reason = route.route_class, route.reason
            telemetry_record.note_served(record, route.decode.name)
            if route.tried:
                self.owners.telemetry.policy_failed(route)  # when it was placed again
        if record.outcome is None:
            record.outcome = telemetry_record.outcome_of(record.status or 200)
        elif record.outcome is Outcome.CLIENT_GONE:
            disconnects = self.owners.telemetry.metrics.disconnects
            disconnects.labels(telemetry_record.phase(record)).inc()
        stream, dialect = self._stream, self._row.dialect
        if self._row.teaches or dialect is Dialect.OPENAI:  # not where a stored answer is read
            told = (self._usage, b"") if stream is None else stream.usage(dialect)
            telemetry_record.note_usage(record, told[0], dialect, told[1])

    def _teaches(self) -> bool:
        """Whether the answer is whole, and its usage one engine's own, of the prompt that came."""
        has_moved = self._flow is not None and self._flow.moves > 0
        is_ok = self.record.outcome is Outcome.OK and not has_moved
        return is_ok and self._row.teaches and self._sees_all

    @property
    def _is_one_answer(self) -> bool:
        """Whether its prompt was read from the cache once: not for several answers, for instance.

        Of paths that are never offloaded each request is.
        """
        return self.facts.offloadable or not self._row.offloadable

    def _counts(self) -> Counts | None:
        """The prompt's and the answer's tokens as the engine counted them, where it tells."""
        record = self.record
        prompt, cached = record.prompt_tokens, record.cached_tokens
        if not prompt:
            return None
        return prompt, None if cached is None else min(cached, prompt), record.osl_tokens or 0

    def _output_tokens(self, decode: str) -> int | None:
        """Output tokens of a stream, where the engine's count agrees with its events."""
        stream = self._stream if self.record.stream else None
        if stream is None:
            return None
        told, believed = self.record.osl_tokens, self.owners.known.output_tokens.believed
        return believed(decode, told, stream.events, self._most_output)

    def _learn(self, decode: str) -> None:
        """Learn bytes per token, and whether an offload's KV arrived on D."""
        record, owners = self.record, self.owners
        if record.prompt_tokens is None:
            return
        model, ratios = self.facts.model, owners.known.bytes_per_token
        if self._media:
            if not owners.known.is_usage_doubted(decode):
                ratios.learn_media(model, self._media, self.prompt_bytes, record.prompt_tokens)
        elif ratios.learn(model, decode, self.prompt_bytes, record.prompt_tokens):
            owners.instances.usage_judged(decode, model)
        came_over = record.cached_tokens is None or record.cached_tokens * 2 > record.prompt_tokens
        counts_moved = owners.options.connector.counts_moved
        if record.route_class == RouteClass.HEAVY_P2P and counts_moved and not came_over:
            owners.telemetry.metrics.kv_misses.inc()
            if (p := owners.instances.get(record.prefill_instance or "")) is not None:
                p.forget_engine_id()
