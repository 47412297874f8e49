"""Charges a streamed answer's output as it passes; a broken stream gets an error event."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Protocol

from aiohttp import web

from proxy.core.routing.request_flow import RequestFlow, State
from proxy.core.types import PLANNED, FailureKind, MoveCause, Outcome, Unmoved
from proxy.net.server.responses import error_event
from proxy.net.timeouts import Clock
from proxy.net.upstream.response import UpstreamResponse
from proxy.net.upstream.response_check import A_HOLLOW, in_band_error
from proxy.protocol.endpoints import ENDED, ENDED_BY_NAME, OFFLOADABLE, Dialect, endpoint_of
from proxy.protocol.errors import UpstreamFailure
from proxy.protocol.streams.hollow import ends_hollow, is_short_stream
from proxy.protocol.streams.legs import EditingScanner, FirstLeg
from proxy.protocol.streams.sse import Scanner
from proxy.protocol.streams.trail import Trail
from proxy.request.client_response import ClientResponse
from proxy.request.relay import (
    EVENT_TOO_LONG,
    GROW_EVENTS,
    Onward,
    Reading,
    Relay,
    Rooms,
    StreamCutError,
)
from proxy.telemetry import record as telemetry_record
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.requests import RequestTelemetry

MIGRATION_OFF = "migration is off"
NO_TOKEN = "it has no token yet"


class Mover(Protocol):
    """Migrates a stream. `trail`: None if it may not."""

    trail: Trail | None

    @property
    def why_fixed(self) -> Unmoved | None:
        """Why the stream may not, as far as is known now; None where it may."""

    def leave(self, leaves: Callable[[], bool]) -> None:
        """Call this when it is the stream's turn to migrate; it returns whether it leaves then."""

    async def go_on(self, error: StreamCutError, reading: Reading) -> Onward | Unmoved:
        """Another instance's answer that goes on with the stream, or why there is none."""

    def let_go(self) -> None:
        """The stream is over."""


class Streaming:
    """Accounts for one streamed answer. `blame` is called with an instance's name and failure."""

    __slots__ = (
        "_awaits_token",
        "_blame",
        "_charged_events",
        "_clock",
        "_flow",
        "_goes_to_its_end",
        "_instance",
        "_is_stream",
        "_leg",
        "_moves",
        "_record",
        "_relay",
        "_route",
        "_scanner",
        "_telemetry",
    )

    def __init__(
        self,
        clock: Clock,
        telemetry: RequestTelemetry,
        record: RequestRecord,
        flow: RequestFlow,
        blame: Callable[[str, UpstreamFailure], None],
        moves: Mover | None = None,
    ) -> None:
        """`moves`: of a stream that may migrate."""
        self._clock, self._telemetry = clock, telemetry
        self._record, self._flow, self._route = record, flow, flow.route
        self._blame = blame
        self._instance = flow.route.decode.name
        """The instance whose answer is passed on, also while the stream's route is already
        another."""
        self._moves = moves
        self._goes_to_its_end = False
        trail = moves.trail if moves is not None else None
        self._leg = None if trail is None else FirstLeg(trail)
        self._scanner = Scanner() if self._leg is None else EditingScanner(self._leg)
        self._relay: Relay | None = None
        self._awaits_token = self._is_stream = False
        self._charged_events = 0

    @property
    def has_begun(self) -> bool:
        """Whether the client has the head of this answer: no other one can be given."""
        return self._relay is not None and self._relay.has_begun

    def usage(self, dialect: Dialect) -> tuple[bytes | None, bytes]:
        """See `usage_member`; beside it the first event, where Anthropic's API has a part of it."""
        scanner = self._scanner
        if not self._is_stream or dialect not in ENDED_BY_NAME:
            return scanner.usage(), b""
        if dialect is Dialect.RESPONSES:
            return scanner.usage(b'{"response":{'), b""
        return scanner.usage(), scanner.first_data

    @property
    def is_short(self) -> bool:
        """Whether next to nothing has passed, for a whole answer."""
        return is_short_stream(self._scanner)

    @property
    def events(self) -> int:
        """Events that have passed."""
        return self._scanner.events

    async def run(
        self,
        request: web.Request,
        answer: UpstreamResponse,
        extra: bytes,
        heartbeat_s: float,
        rooms: Rooms,
    ) -> ClientResponse:
        """Pass the answer on, to its end or to where it breaks. `extra`: header lines of ours."""
        relay, self._instance = None, self._route.decode.name
        self._is_stream = answer.is_stream
        try:
            response = ClientResponse(request, answer, extra)
            relay = self._relay = Relay(
                request, answer, response, self._scanner, self._on_mark, self._leg
            )
            relay.count(rooms, self._instance)
            while not await self._ended(relay, heartbeat_s):
                pass
            return response
        finally:
            (relay or answer).close()

    async def _ended(self, relay: Relay, heartbeat_s: float) -> bool:
        """Pass on an instance's answer; False where the stream goes on behind it."""
        idle_s = self._flow.silence_limit_s(self._clock.now_s())
        try:
            await relay.run(idle_s, heartbeat_s)
        except StreamCutError as error:
            # Without its frames, which hold this: only the collector would end them.
            cut = error.with_traceback(None)
        else:
            self._note_engine_error()
            return True
        return not await self._goes_on(relay, cut, Reading(relay, idle_s, heartbeat_s))

    async def _goes_on(self, relay: Relay, error: StreamCutError, reading: Reading) -> bool:
        """Whether there is more of the stream: of another instance, or of this one after all."""
        moves = self._moves
        if moves is None or self._goes_to_its_end or error.code == EVENT_TOO_LONG:
            self._lost(error)
            return False
        relay.stop()
        if error.cause in PLANNED:
            found = await moves.go_on(error, reading)
        else:
            with relay.beats(reading.beat_s):
                found = await moves.go_on(error, reading)
        if isinstance(found, Onward):
            self._charged_events = self._scanner.events
            self._awaits_token = True
            self._instance = self._route.decode.name
            relay.follow(found.answer, found.leg)
            relay.instance = self._instance
            return True
        if reading.is_over:
            self._note_engine_error()
            return False
        error = reading.lost or error
        if error.cause in PLANNED:
            relay.stay()
            return True
        if relay.let_pass():
            self._goes_to_its_end = True
            return True
        self._lost(error)
        return False

    @property
    def instance(self) -> str:
        """The name of the instance whose answer is passed on."""
        return self._instance

    def leave(self, cause: MoveCause = MoveCause.DRAIN) -> None:
        """Migrate the stream if it can, when it is its turn."""
        relay, moves = self._relay, self._moves
        if relay is not None and moves is not None and self._flow.state is State.STREAMING:
            moves.leave(partial(relay.leave, cause))

    @property
    def why_fixed(self) -> str | None:
        """The reason known now that the stream cannot migrate; None if it can."""
        if self._moves is None:
            return MIGRATION_OFF
        if (why := self._moves.why_fixed) is not None:
            return str(why)
        return None if self._flow.state is State.STREAMING else NO_TOKEN

    def left(self) -> bool:
        """The client has left; whether it had the stream's end before, which was all it wanted."""
        relay = self._relay
        if relay is None or not relay.is_taken:
            return False
        self._note_engine_error()
        return True

    @property
    def has_given_way(self) -> bool:
        """Whether its client was cut, as it did not read what others needed the room of."""
        return self._relay is not None and self._relay.response.has_given_way

    def let_go(self) -> None:
        """The request is over."""
        self._relay = None
        if self._moves is not None:
            self._moves.let_go()

    def cut(self, outcome: Outcome, detail: str, code: str) -> ClientResponse:
        """Say in the stream, which has begun, what happened, and close without a clean end."""
        relay, record = self._relay, self._record
        assert relay is not None
        telemetry_record.note_end(record, outcome, record.status, detail)
        event = error_event(
            record.endpoint,
            message=detail,
            type_=str(outcome),
            code=code,
            request_id=record.request_id,
            events=self._scanner.events,
        )
        relay.cut(event)
        return relay.response

    def _on_mark(self) -> int:
        """A piece passes: note the first token, charge what came since the last time."""
        record, scanner, route = self._record, self._scanner, self._route
        if not record.stream or not self._is_stream:
            return sys.maxsize  # an answer in one piece: accounted for when it came
        if record.t_first_token is None:
            if not scanner.has_content:
                return 0
            self._awaits_token = False
            now_s = self._clock.now_s()
            record.t_first_token = self._clock.unix(now_s)
            if self._flow.state is State.ANSWERED:  # nobody goes on with one that has failed
                self._flow.first_token(now_s)
            self._observe_transfer()
        elif self._awaits_token:
            if scanner.events > self._charged_events:
                self._awaits_token = False
                self._flow.first_token(self._clock.now_s())
        elif scanner.events - self._charged_events >= GROW_EVENTS:
            route.lease.grow(scanner.events - self._charged_events)
            self._charged_events = scanner.events
        return self._charged_events + GROW_EVENTS

    def _observe_transfer(self) -> None:
        record, route = self._record, self._route
        sent, first = record.t_decode_sent, record.t_first_token
        if route.prefill is not None and sent is not None and first is not None:
            transfer = self._telemetry.metrics.kv_transfer
            transfer.labels(route.prefill.name, route.decode.name).observe(first - sent)

    def _lost(self, error: StreamCutError) -> None:
        """The instance failed within its answer: tell the client, and blame the instance."""
        outcome = Outcome.UPSTREAM_TRUNCATED
        if error.limit_s is not None:
            outcome = Outcome.UPSTREAM_TIMEOUT
            self._record.limit, self._record.limit_s = "idle", error.limit_s
        self.cut(outcome, error.detail, error.code)
        self._telemetry.failed(self._record, error.code, error.detail + self._unsaved())
        if error.failure is not None:
            self._blame(self._instance, error.failure)

    def _unsaved(self) -> str:
        """The effect that `--migration-limit` would have had on a lost stream, for the log."""
        record, now_s = self._record, self._clock.now_s()
        rows = record.migrations
        if rows and rows[-1].ended == Unmoved.LIMIT:
            is_saved = self._flow.has_beside(now_s)
            return "; a larger --migration-limit would have let it migrate" * is_saved
        is_off = self._moves is None and record.stream and record.endpoint in OFFLOADABLE
        if is_off and record.t_first_token is not None and self._flow.has_beside(now_s):
            return "; with --migration-limit 1 it could have migrated"
        return ""

    def _note_engine_error(self) -> None:
        """A stream that ended well for HTTP may have ended with an error of the engine."""
        if not self._is_stream:
            return
        event = self._scanner.error()
        if event is None:
            self._note_hollow()
        else:
            failure = in_band_error(event)
            record = self._record
            telemetry_record.note_end(record, Outcome.UPSTREAM_ERROR, record.status, failure.detail)
            if failure.status is not None and failure.status >= 500:
                self._telemetry.failed(record, failure.kind, failure.detail)
                self._blame(self._instance, failure)

    def _note_hollow(self) -> None:
        """Check a stream that ended well for HTTP: it may be hollow."""
        record, scanner = self._record, self._scanner
        dialect = endpoint_of(record.endpoint).dialect
        if dialect not in ENDED:
            return
        why = ends_hollow(dialect, scanner.last_events, has_content=scanner.has_content)
        if why is not None:
            failure = UpstreamFailure(FailureKind.HOLLOW, f"{A_HOLLOW}{why}")
            telemetry_record.note_end(record, Outcome.UPSTREAM_ERROR, record.status, failure.detail)
            self._telemetry.failed(record, failure.kind, failure.detail)
            self._blame(self._instance, failure)
