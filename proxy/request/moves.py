"""Migrates a started stream: performs the steps of its flow.

The client's tokens are in the stream's `Trail`. The next instance gets a completion of the prompt
and these tokens, which every vLLM accepts. For a chat its events are rewritten as a chat's
(`LaterLeg`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from enum import Enum
from functools import partial
from typing import Final, Protocol

from proxy.core.routing.actions import LegFailure, SendDecode, Step, Then
from proxy.core.routing.request_flow import RequestFlow
from proxy.core.types import PLANNED, FailureKind, MoveCause, Unmoved
from proxy.net.timeouts import Clock, Limit
from proxy.net.upstream.response import UpstreamResponse
from proxy.protocol.body import Members
from proxy.protocol.errors import UpstreamFailure
from proxy.protocol.examined import NO_OBJECT
from proxy.protocol.offloadable import COMPLETIONS
from proxy.protocol.streams.legs import LaterLeg
from proxy.protocol.streams.movable import Plan
from proxy.protocol.streams.trail import Resumption, Trail
from proxy.request.client_request import Outgoing
from proxy.request.relay import Onward, Reading, StreamCutError
from proxy.state.detached import in_group
from proxy.state.in_flight import InFlight
from proxy.state.move_turns import MoveTurns
from proxy.telemetry.metrics import Metrics
from proxy.telemetry.record import Migration, RequestRecord

TEMPLATE_TOKENS: Final = 4096
"""Most tokens of a prompt that its request does not have: those of a chat template. A token of the
rest has a byte of the body at least."""
OUTPUT_TOKENS: Final = 4096
OUTPUT_TOKENS_PER_S: Final = 8192
"""More than these no engine generates of one stream. An engine whose ids are of more would have
others compute what nobody asked for."""
TURN_S = 300.0
"""Longest wait of a lost stream for its turn (`MoveTurns`): as long as for a first event."""
MOVED = "moved"
LEFT = "left"
"""The client has left, or the request's time was up, before another instance had answered."""


class Warm(Enum):
    """The result of a leg that only computed the stream's tokens so far."""

    WARM = "warm"


WARM: Final = Warm.WARM
Computed = Callable[[], Coroutine[None, None, Warm | UpstreamFailure]]


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
        "_clock",
        "_come",
        "_flow",
        "_leaves",
        "_metrics",
        "_record",
        "_rest_s",
        "_turns",
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
        self._turns: MoveTurns | None = None
        self._come: asyncio.Future[None] | None = None
        """Waits for the stream's turn."""
        self._leaves: Callable[[], bool] | None = None
        self._why: Unmoved | None = None
        self.trail: Trail | None = None

    def watch(
        self, plan: Plan | Unmoved, out: Outgoing, in_flight: InFlight, most_tokens: int | None
    ) -> Trail | None:
        """Keep the stream's tokens from now on; None if it may not migrate. `out`: its request."""
        if isinstance(plan, Unmoved):
            self._why = plan
            return None
        trail = Trail(plan, in_flight.trails, most_tokens, self._record.tenant or "")
        trail.most_prompt = len(out.members.raw) + TEMPLATE_TOKENS
        trail.most_output = partial(_most_output, self._clock, self._clock.now_s())
        trail.keep(out.headers)
        self.trail, self._turns = trail, in_flight.turns
        return trail

    @property
    def why_fixed(self) -> Unmoved | None:
        """The reason known now that the stream cannot migrate; None if it can."""
        if self.trail is None:
            return self._why or Unmoved.NO_IDS
        return self.trail.why_fixed()

    def let_go(self) -> None:
        """The stream is over: give its memory back, and its turn."""
        self._leaves = None
        self._leave_turn()
        if self.trail is not None:
            self.trail.let_go()

    def leave(self, leaves: Callable[[], bool]) -> None:
        """Call this when it is the stream's turn to migrate; it returns whether it leaves then."""
        if self._turns is not None:
            self._leaves = leaves
            self._turns.enter(self)

    @property
    def body_bytes(self) -> int:
        """Bytes of the body that another instance would get now."""
        return 0 if self.trail is None else self.trail.held_bytes

    def begin(self) -> None:
        """It is the stream's turn to migrate."""
        leaves, self._leaves = self._leaves, None
        if self._come is not None:
            if not self._come.done():
                self._come.set_result(None)
        elif leaves is None or not leaves():
            self._leave_turn()

    def _leave_turn(self) -> None:
        if self._turns is not None:
            self._turns.leave(self)

    async def _has_turn(self, *, is_next: bool = False) -> bool:
        """Wait for the stream's turn; False where it does not come. `is_next`: before others."""
        turns = self._turns
        if turns is None or turns.has(self):
            return True
        self._come = asyncio.get_running_loop().create_future()
        turns.enter(self, is_next=is_next)
        try:
            with Limit(TURN_S):
                await self._come
            return True
        except TimeoutError:
            turns.leave(self)
            return False
        finally:
            self._come = None

    async def go_on(self, error: StreamCutError, reading: Reading) -> Onward | Unmoved:
        """Another instance's answer that goes on with the stream, or why there is none.

        `reading`: of the answer that is to be left, where the `error` is that it is.
        """
        start_s, name = self._clock.now_s(), self._flow.route.decode.name
        at = self._why or Unmoved.NO_IDS if self.trail is None else self.trail.point()
        ended, tokens = LEFT, 0 if isinstance(at, Unmoved) else at[1]
        self._note_lost(error)
        try:
            if isinstance(at, Unmoved):
                found: Onward | Unmoved = at
            elif not await self._has_turn(is_next=error.cause in PLANNED):
                found = Unmoved.TIME
            else:
                assert self.trail is not None
                found = await self._go_on(error, self.trail, reading)
            ended = MOVED if isinstance(found, Onward) else str(found)
            tokens = self.trail.tokens if self.trail is not None and ended == MOVED else tokens
        finally:
            self._leave_turn()
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

    def _note_lost(self, error: StreamCutError) -> None:
        """End the leg whose instance has lost the stream."""
        trace = self._record.trace
        if trace is not None and error.cause not in PLANNED:
            trace.stop(self._clock.unix_now(), error.cause)

    async def _go_on(
        self, error: StreamCutError, trail: Trail, reading: Reading
    ) -> Onward | Unmoved:
        at = trail.resumption()
        if isinstance(at, Unmoved):
            return at
        attempts, flow = self._attempts, self._flow
        failure = None if error.failure is None else attempts.failure(error.failure)
        given = at.tokens, self._rest_s(), self._clock.now_s()
        if error.cause in PLANNED:
            send = flow.move_asked(*given)
        else:
            send = attempts.performed(flow.stream_lost(*given, failure))
        while isinstance(send, SendDecode):
            answer = await self._sent(send, trail, at, reading)
            if isinstance(answer, UpstreamResponse):
                attempts.moved(answer)
                trail.resume(at)
                return Onward(answer, LaterLeg(trail))
            now_s = self._clock.now_s()
            now = trail.resumption()
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

    async def _sent(
        self, send: SendDecode, trail: Trail, at: Resumption, reading: Reading
    ) -> UpstreamResponse | UpstreamFailure | Warm | None:
        """What has become of a leg; None where nobody can be blamed for it."""
        if not await self._has_turn(is_next=True):
            return None
        if send.warms:
            return await self._warm(partial(self._computed, trail, at, send), reading)
        return await self._ask(trail.request_body(at), send)

    async def _warm(self, computed: Computed, reading: Reading) -> Warm | UpstreamFailure | None:
        """Compute the stream's tokens on an instance while its old one continues."""
        gone: list[OSError] = []
        task = await in_group(partial(self._warming, computed, reading, gone))
        if gone:
            raise gone.pop()
        return None if task.cancelled() else task.result()

    async def _warming(
        self,
        computed: Computed,
        reading: Reading,
        gone: list[OSError],
        group: asyncio.TaskGroup,
    ) -> asyncio.Task[Warm | UpstreamFailure]:
        """The task that asks, over by now or cancelled; `gone` gets why the client has left."""
        task = group.create_task(computed())
        try:
            await reading.until(task)
        except OSError as error:  # in a group it would be one of several
            gone.append(error)
        task.cancel()
        return task

    async def _computed(
        self, trail: Trail, at: Resumption, send: SendDecode
    ) -> Warm | UpstreamFailure:
        answer = await self._ask(trail.request_body(at), send)
        self._leave_turn()  # the stream may run on for long, while its client does not read
        if not isinstance(answer, UpstreamResponse):
            return answer
        answer.close()  # what it has computed stays in its cache
        return WARM

    async def _ask(self, body: bytes, send: SendDecode) -> UpstreamResponse | UpstreamFailure:
        """An instance's stream, or how it failed.

        One that refuses the request is at fault where another one takes it.
        """
        record = self._record
        headers = b"" if self.trail is None else self.trail.headers
        out = Outgoing("POST", COMPLETIONS, headers, Members(body), NO_OBJECT)
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


def _most_output(clock: Clock, began_s: float) -> float:
    """The most tokens that a stream's engine can have generated by now."""
    return OUTPUT_TOKENS + OUTPUT_TOKENS_PER_S * (clock.now_s() - began_s)
