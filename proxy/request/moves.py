"""Migrates a started stream: performs the steps of its flow.

The client's tokens are in the stream's `Trail`. The next instance gets a completion of the prompt
and these tokens, which every vLLM accepts. For a chat its events are rewritten as a chat's
(`LaterLeg`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Final, Protocol

from proxy.core.routing.actions import LegFailure, SendDecode, Step, Then
from proxy.core.routing.request_flow import RequestFlow
from proxy.core.types import PLANNED, FailureKind, MoveCause, Unmoved
from proxy.net.timeouts import Clock
from proxy.net.upstream.response import UpstreamResponse
from proxy.protocol.body import Members
from proxy.protocol.errors import UpstreamFailure
from proxy.protocol.examined import NO_OBJECT
from proxy.protocol.offloadable import COMPLETIONS
from proxy.protocol.streams.legs import LaterLeg
from proxy.protocol.streams.movable import Plan
from proxy.protocol.streams.trail import Resumption, Trail, TrailMemory
from proxy.request.client_request import Outgoing
from proxy.request.relay import Onward, Reading, StreamCutError
from proxy.state.detached import in_group
from proxy.telemetry.metrics import Metrics
from proxy.telemetry.record import Migration, RequestRecord

TEMPLATE_TOKENS: Final = 4096
"""Most tokens of a prompt that its request does not have: those of a chat template. A token of the
rest has a byte of the body at least."""
OUTPUT_TOKENS: Final = 4096
OUTPUT_TOKENS_PER_S: Final = 8192
"""More than these no engine generates of one stream. An engine whose ids are of more would have
others compute what nobody asked for."""
MOVED = "moved"
LEFT = "left"
"""The client has left, or the request's time was up, before another instance had answered."""


class Warm(Enum):
    """The result of a leg that only computed the stream's tokens so far."""

    WARM = "warm"


WARM: Final = Warm.WARM


class Legs(Protocol):
    """The sender of a request's legs: its `Attempts`."""

    @property
    def flow(self) -> RequestFlow:
        """The request's flow."""

    async def decode(self, out: Outgoing, leg: SendDecode) -> UpstreamResponse:
        """Send a leg and wait for its first event; raises UpstreamFailure."""

    def hollow_of(self, answer: UpstreamResponse) -> UpstreamFailure | None:
        """Why an answer is hollow; None if it may be useful."""

    def moved(self, answer: UpstreamResponse) -> None:
        """Note that an instance has begun to continue a stream."""

    def failure(self, failure: UpstreamFailure) -> LegFailure:
        """An instance's failure as the flow hears of it."""

    def performed(self, step: Step[Then]) -> Then:
        """What comes next, once what needs no waiting is done."""


class Moves:
    """Moves of one stream. `rest_s` returns what is left of the request's time."""

    __slots__ = (
        "_attempts",
        "_began_s",
        "_clock",
        "_flow",
        "_headers",
        "_metrics",
        "_record",
        "_rest_s",
        "_why",
        "trail",
    )

    def __init__(
        self,
        clock: Clock,
        metrics: Metrics,
        record: RequestRecord,
        attempts: Legs,
        rest_s: Callable[[], float],
    ) -> None:
        self._clock, self._metrics = clock, metrics
        self._record, self._attempts, self._flow = record, attempts, attempts.flow
        self._rest_s = rest_s
        self._headers, self._began_s = b"", 0.0
        self._why: Unmoved | None = None
        self.trail: Trail | None = None

    def watch(
        self, plan: Plan | Unmoved, out: Outgoing, memory: TrailMemory, most_tokens: int | None
    ) -> Trail | None:
        """Keep the stream's tokens from now on; None if it may not migrate. `out`: its request."""
        if isinstance(plan, Unmoved):
            self._why = plan
            return None
        self._headers, self._began_s = out.headers, self._clock.now_s()
        self.trail = Trail(plan, memory, most_tokens, self._record.tenant or "")
        self.trail.most_prompt = len(out.members.raw) + TEMPLATE_TOKENS
        return self.trail

    @property
    def why_fixed(self) -> Unmoved | None:
        """The reason known now that the stream cannot migrate; None if it can."""
        if self.trail is None:
            return self._why or Unmoved.NO_IDS
        return self.trail.why_fixed()

    def let_go(self) -> None:
        """The stream is over: give its memory back."""
        if self.trail is not None:
            self.trail.let_go()

    async def go_on(self, error: StreamCutError, reading: Reading) -> Onward | Unmoved:
        """Another instance's answer that goes on with the stream, or why there is none.

        `reading`: of the answer that is to be left, where the `error` is that it is.
        """
        start_s, name = self._clock.now_s(), self._flow.route.decode.name
        at: Resumption | Unmoved = self._why or Unmoved.NO_IDS
        if self.trail is not None:
            at = self._resumption(self.trail, start_s)
        ended, tokens = LEFT, at.tokens if isinstance(at, Resumption) else 0
        try:
            if isinstance(at, Unmoved):
                found: Onward | Unmoved = at
            else:
                assert self.trail is not None
                found = await self._go_on(error, self.trail, at, reading)
            ended = MOVED if isinstance(found, Onward) else str(found)
            tokens = self.trail.tokens if self.trail is not None and ended == MOVED else tokens
        finally:
            seconds = self._clock.now_s() - start_s
            self._metrics.migrations.labels(error.cause, ended).inc()
            if ended == MOVED:
                was_evicted = "true" if error.cause is MoveCause.HEAT else "false"
                self._metrics.migration_time.labels(was_evicted).observe(seconds)
            to = self._flow.route.decode.name if ended == MOVED else None
            row = Migration(name, to, str(error.cause), ended, tokens, round(seconds, 6))
            if ended != MOVED:
                self._record.decode_instance = name
            self._record.migrations = [*(self._record.migrations or ()), row]
        return found

    def _resumption(self, trail: Trail, now_s: float) -> Resumption | Unmoved:
        at = trail.resumption()
        most = OUTPUT_TOKENS + OUTPUT_TOKENS_PER_S * (now_s - self._began_s)
        return Unmoved.NO_IDS if isinstance(at, Resumption) and at.tokens > most else at

    async def _go_on(
        self, error: StreamCutError, trail: Trail, at: Resumption, reading: Reading
    ) -> Onward | Unmoved:
        attempts, flow = self._attempts, self._flow
        failure = None if error.failure is None else attempts.failure(error.failure)
        given = at.tokens, self._rest_s(), self._clock.now_s()
        if error.cause in PLANNED:
            send = flow.move_asked(*given)
        else:
            send = attempts.performed(flow.stream_lost(*given, failure))
        while isinstance(send, SendDecode):
            body = trail.request_body(at)
            answer = await (
                self._warm(body, send, reading) if send.warms else self._ask(body, send)
            )
            if isinstance(answer, UpstreamResponse):
                attempts.moved(answer)
                trail.resume(at)
                return Onward(answer, LaterLeg(trail))
            now_s = self._clock.now_s()
            now = self._resumption(trail, now_s)
            if reading.is_over or isinstance(now, Unmoved):
                why = now if isinstance(now, Unmoved) else Unmoved.FINISHED
                send = flow.move_needless(why, at.tokens, now_s)
                break
            at = now
            failed = answer if isinstance(answer, UpstreamFailure) else None
            if (lost := reading.lost) is not None or answer is WARM:
                failed = None if lost is None else lost.failure
                blamed = None if failed is None else attempts.failure(failed)
                again = flow.move_again(at.tokens, now_s, blamed, is_lost=lost is not None)
                send = attempts.performed(again)
            else:
                blamed = None if failed is None else attempts.failure(failed)
                step = flow.move_failed(blamed, at.tokens, self._rest_s(), now_s)
                send = attempts.performed(step)
        return send.why

    async def _warm(
        self, body: bytes, send: SendDecode, reading: Reading
    ) -> Warm | UpstreamFailure | None:
        """Compute the stream's tokens on an instance while its old one continues."""
        gone: list[OSError] = []
        task = await in_group(partial(self._warming, body, send, reading, gone))
        if gone:
            raise gone.pop()
        return None if task.cancelled() else task.result()

    async def _warming(
        self,
        body: bytes,
        send: SendDecode,
        reading: Reading,
        gone: list[OSError],
        group: asyncio.TaskGroup,
    ) -> asyncio.Task[Warm | UpstreamFailure]:
        """The task that asks, over by now or cancelled; `gone` gets why the client has left."""
        task = group.create_task(self._computed(body, send))
        try:
            await reading.until(task)
        except OSError as error:  # in a group it would be one of several
            gone.append(error)
        task.cancel()
        return task

    async def _computed(self, body: bytes, send: SendDecode) -> Warm | UpstreamFailure:
        answer = await self._ask(body, send)
        if not isinstance(answer, UpstreamResponse):
            return answer
        answer.close()  # what it has computed stays in its cache
        return WARM

    async def _ask(self, body: bytes, send: SendDecode) -> UpstreamResponse | UpstreamFailure:
        """An instance's stream, or how it failed.

        One that refuses the request is at fault where another one takes it.
        """
        record = self._record
        out = Outgoing("POST", COMPLETIONS, self._headers, Members(body), NO_OBJECT)
        sent, limit, limit_s = record.t_decode_sent, record.limit, record.limit_s
        try:
            answer = await self._attempts.decode(out, send)
        except UpstreamFailure as failure:
            return failure
        finally:
            record.t_decode_sent, record.limit, record.limit_s = sent, limit, limit_s
        if (why := self._attempts.hollow_of(answer)) is None and answer.is_stream:
            return answer
        answer.close()
        status = answer.status
        return why or UpstreamFailure(FailureKind.HOLLOW, "it is not a stream", status=status)
