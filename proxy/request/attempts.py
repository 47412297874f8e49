"""The legs of one request, run until an instance answers: performs the steps of its flow.

`core.routing.request_flow` decides which leg comes next, which instance is blamed and when to give
up. Here its steps become requests to instances, log lines and counters, and their results become
its events.

The legs of an offload are detached from the request. When the client leaves, P's connection is
half-closed, and the KV of a later answer is released. D's leg continues until D has begun.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus

from proxy.config.in_force import OptionsInForce
from proxy.core.connectors.base import Edits
from proxy.core.fleet.health import HOLLOW_KINDS
from proxy.core.fleet.retries import busy_s
from proxy.core.routing.actions import (
    AwaitHedge,
    Effect,
    FellBack,
    GiveUp,
    HangUpPrefill,
    HedgeEnded,
    InstanceFailed,
    KeepDecode,
    KvUnreleased,
    LeftKv,
    Leg,
    LegFailure,
    LegLimit,
    Pause,
    ReleaseKv,
    ReleaseResult,
    Retried,
    RetryRefused,
    SendDecode,
    SendHedge,
    SendPrefill,
    Step,
    Then,
)
from proxy.core.routing.request_flow import RequestFlow, State
from proxy.core.types import FailureKind, Fallback
from proxy.fleet.instances import Instances
from proxy.net.server.responses import engine_id
from proxy.net.timeouts import Clock, Limit
from proxy.net.upstream.client import Upstream
from proxy.net.upstream.response import UpstreamResponse
from proxy.net.upstream.response_check import (
    TOO_LONG_STATUSES,
    hollow,
    is_refusal,
    look_for_length,
)
from proxy.protocol.endpoints import Endpoint
from proxy.protocol.errors import UpstreamFailure
from proxy.protocol.headers import credentials, with_request_id
from proxy.protocol.streams.movable import Plan
from proxy.request.client_request import Outgoing
from proxy.request.kv_release import KvReleases
from proxy.request.legs import (
    FirstEventLimit,
    Unusable,
    decode_leg,
    fallback_of,
    prefill_leg,
)
from proxy.state.detached import DetachedLeg, DetachedTasks, in_group
from proxy.telemetry.metrics import Metrics
from proxy.telemetry.record import RequestRecord, note_attempt, note_failure
from proxy.telemetry.tracing.trace import DECODE, HEDGE, PREFILL, WARM, LegSpan

REFUSAL_S = 2.0
"""Longest wait for the end of a client's error whose words may send the request elsewhere."""


@dataclass(frozen=True, slots=True)
class LegOwners:
    """The parts that the legs of all requests share."""

    clock: Clock
    options: OptionsInForce
    instances: Instances
    detached: DetachedTasks
    releases: KvReleases
    metrics: Metrics


class PrefillFailed:
    """P's leg gave no KV that D can fetch; `failure`: what speaks against P itself.

    `edits`: what names the KV that P may hold all the same, where `left` is NAMED.
    """

    __slots__ = ("edits", "failure", "left", "why")

    def __init__(
        self,
        why: Fallback,
        failure: LegFailure | None = None,
        left: LeftKv = LeftKv.NONE,
        edits: Edits | None = None,
    ) -> None:
        self.why, self.failure, self.left, self.edits = why, failure, left, edits


def _left_by_cut(replies: list[UpstreamResponse]) -> LeftKv:
    """KV that a cut answer left on P; P sends its head when the KV is computed."""
    is_answered = bool(replies) and replies[-1].status == HTTPStatus.OK
    return LeftKv.UNNAMED if is_answered else LeftKv.NONE


def _sent(
    replies: list[UpstreamResponse], note: Callable[[], object], reply: UpstreamResponse
) -> None:
    """Keep the answer to a leg that was sent, and note that it was."""
    replies.append(reply)
    note()


async def _look_for_length(answer: UpstreamResponse) -> None:
    """Raise UpstreamFailure if a longer context might serve what this answer refuses.

    An answer that does not come to its end in time is passed on.
    """
    is_answer = False
    try:
        with suppress(TimeoutError), Limit(REFUSAL_S):
            await look_for_length(answer)
        is_answer = True
    finally:
        if not is_answer:
            answer.close()


class Attempts:
    """Performs the steps of one request's flow. `row`: of its path."""

    __slots__ = (
        "_edits",
        "_flow",
        "_held",
        "_key",
        "_may_move",
        "_owners",
        "_record",
        "_row",
        "hollow",
    )

    def __init__(
        self, owners: LegOwners, record: RequestRecord, flow: RequestFlow, row: Endpoint
    ) -> None:
        self._owners, self._record, self._flow, self._row = owners, record, flow, row
        self.hollow: UpstreamFailure | None = None
        """Why the answer that is passed on is hollow; None if it is not."""
        self._may_move = False
        self._held: UpstreamResponse | None = None
        """A hollow answer, while another instance is asked whose fault it is."""
        self._key = b""
        """Header lines with the client's own key, if P was asked with it."""
        self._edits: Edits | None = None
        """Edits for D to fetch the KV that P holds; None without any."""

    async def run(self, out: Outgoing) -> UpstreamResponse:
        """An instance's answer whose first event is good; raises the last UpstreamFailure."""
        leg = self._flow.begin(self._owners.clock.now_s())
        self._may_move = isinstance(out.found.plan, Plan)
        try:
            while True:
                try:
                    found = await self._leg(out, leg)
                except UpstreamFailure as failure:
                    failed = failure.again()
                else:
                    if isinstance(found, UpstreamResponse):
                        return found
                    leg = found
                    continue
                again = await self._after(failed)
                if not isinstance(again, SendDecode):
                    break
                leg = again
            if self._held is None:
                raise failed.again()
            held, self._held = self._held, None
            self._answered(held, self.hollow_of(held))
            return held
        finally:
            if self._held is not None:
                self._held.close()

    async def _leg(self, out: Outgoing, leg: Leg) -> SendDecode | UpstreamResponse:
        """An answer that is to be passed on, or the next leg; raises UpstreamFailure.

        One that is hollow is held where another instance may tell whose fault that is.
        """
        if isinstance(leg, SendPrefill):
            return await PrefillRace(self, out, leg).run()
        answer = await self.decode(out, leg)
        why = self.hollow_of(answer)
        if why is None or not self._asks_about(why):
            self._answered(answer, why)
            return answer
        if self._held is not None:
            self._held.close()
        self._held = answer
        self._stop_legs(why.kind)
        raise why.again()

    def hollow_of(self, answer: UpstreamResponse) -> UpstreamFailure | None:
        """Why an answer is hollow; None if it may be useful."""
        return self._hollow_of(answer, streams=self._record.stream)

    def _hollow_of(
        self, answer: UpstreamResponse, *, streams: bool | None
    ) -> UpstreamFailure | None:
        has_key = bool(self._owners.instances.connect_options.auth)
        may_move = self._may_move
        return hollow(self._row, answer, has_key=has_key, may_move=may_move, streams=streams)

    def _asks_about(self, why: UpstreamFailure) -> bool:
        return self._flow.asks_about(self.failure(why), self._owners.clock.now_s())

    async def _after(self, failure: UpstreamFailure) -> SendDecode | GiveUp:
        """What comes after a failed decode leg and its pauses."""
        flow, clock = self._flow, self._owners.clock
        note_failure(self._record, self._record.decode_instance, str(failure))
        if failure.kind is FailureKind.REDIRECT:
            refusal = UpstreamFailure(FailureKind.HOLLOW, failure.detail, status=failure.status)
            failure = refusal if self._asks_about(refusal) else failure
        failed = self.failure(failure)
        then = self.performed(flow.decode_failed(failed, clock.now_s(), random.random()))
        while isinstance(then, Pause):
            await asyncio.sleep(then.seconds)
            then = self.performed(flow.pause_over(clock.now_s(), random.random()))
        return then

    async def decode(self, out: Outgoing, leg: SendDecode | SendHedge) -> UpstreamResponse:
        """Send D's leg and wait for its first event; raises UpstreamFailure."""
        owners, record, name = self._owners, self._record, leg.instance.name
        source = leg.fetch_from if isinstance(leg, SendDecode) else None
        edits = self._edits if source is not None else None
        if isinstance(leg, SendHedge) or leg.is_repeat:
            out = replace(out, headers=with_request_id(out.headers, engine_id(record.request_id)))
        elif edits is not None and edits.request_id is not None:
            out = replace(out, headers=with_request_id(out.headers, edits.request_id))
        limit = FirstEventLimit(leg.limit, self._flow.has_other)
        record.t_decode_sent = began_s = owners.clock.unix_now()
        record.decode_instance = name
        out, span = self._traced(out, leg, began_s)
        try:
            if edits is None or source is None:
                answer = await decode_leg(out, owners.instances.upstream(name), None, None, limit)
            else:
                answer = await self._decode_with(out, name, edits, source.name, limit)
            if answer.status in TOO_LONG_STATUSES and self._flow.has_longer:
                await _look_for_length(answer)
            if span is not None and span.kind == WARM:
                span.end(owners.clock.unix_now())
            return answer
        except UpstreamFailure as failure:
            self._end_leg(span, failure.kind)
            if failure.limit_s is not None:
                self.note_limit(failure.limit, failure.limit_s)
            raise

    def _traced(
        self, out: Outgoing, leg: SendPrefill | SendDecode | SendHedge, now_s: float
    ) -> tuple[Outgoing, LegSpan | None]:
        """A leg's request with its span as the parent of the instance's, where it is traced."""
        trace = self._record.trace
        if trace is None:
            return out, None
        kind, source = DECODE, None
        if isinstance(leg, SendPrefill):
            kind = PREFILL
        elif isinstance(leg, SendHedge):
            kind = HEDGE
        else:
            kind = WARM if leg.warms else DECODE
            source = leg.fetch_from.name if leg.fetch_from is not None else None
        span = trace.begin(kind, leg.instance, source, now_s)
        return replace(out, headers=out.headers + trace.lines(span)), span

    def _end_leg(self, span: LegSpan | None, result: str | None) -> None:
        if span is not None:
            span.end(self._owners.clock.unix_now(), result)

    def _stop_legs(self, result: str) -> None:
        if self._record.trace is not None:
            self._record.trace.stop(self._owners.clock.unix_now(), result)

    def _note_answer(self) -> None:
        if self._record.trace is not None:
            self._record.trace.answered(self._owners.clock.unix_now())

    async def _decode_with(
        self, out: Outgoing, name: str, edits: Edits, source: str, limit: FirstEventLimit
    ) -> UpstreamResponse:
        """Send D's leg with the KV of P, `source`."""
        owners = self._owners
        p = owners.instances.get(source)
        if not owners.options.connector.pins:
            return await decode_leg(out, owners.instances.upstream(name), edits, p, limit)
        return await owners.detached.keep(self._fetching(out, name, edits, p, limit))

    def _fetching(
        self, out: Outgoing, name: str, edits: Edits, p: Upstream | None, limit: FirstEventLimit
    ) -> DetachedLeg[UpstreamResponse]:
        """D's leg that fetches P's KV; it may outlive the request."""
        replies: list[UpstreamResponse] = []
        d = self._owners.instances.upstream(name)
        on_sent = partial(_sent, replies, self._flow.decode_sent)
        return DetachedLeg(
            partial(decode_leg, out, d, edits, p, limit, on_sent),
            partial(self._decode_left, replies),
            self._unwanted_decode,
        )

    def _decode_left(self, replies: Sequence[UpstreamResponse]) -> bool:
        """Whether D's leg goes on without its client."""
        return isinstance(self._flow.decode_left(), KeepDecode) and replies[-1].be_the_last()

    def _unwanted_decode(self, reply: UpstreamResponse | None) -> None:
        if reply is not None:
            reply.close()
        now_s, has_begun = self._owners.clock.now_s(), reply is not None
        self.perform(self._flow.left_decode_over(now_s, has_begun=has_begun))

    async def prefill(self, out: Outgoing, leg: SendPrefill) -> Edits | PrefillFailed:
        """Send the prefill leg to P; it may outlive the request."""
        self._key = credentials(out.headers)
        replies: list[UpstreamResponse] = []
        out, span = self._traced(out, leg, self._owners.clock.unix_now())
        try:
            result = await self._owners.detached.keep(self._prefilling(out, leg, replies))
        except UpstreamFailure as failure:
            self._end_leg(span, failure.kind)
            left = _left_by_cut(replies)
            return PrefillFailed(fallback_of(failure), self.failure(failure), left)
        if isinstance(result, Edits):
            self._end_leg(span, None)
            return result
        self._end_leg(span, result.why if isinstance(result, Unusable) else result)
        return self._prefill_failed(result, leg.limit, replies)

    def _prefilling(
        self, out: Outgoing, leg: SendPrefill, replies: list[UpstreamResponse]
    ) -> DetachedLeg[Edits | Fallback | Unusable]:
        """The prefill leg; `replies` gets P's answer."""
        owners = self._owners
        p, leg_id = leg.instance.name, f"{engine_id(self._record.request_id)}-p"
        given = owners.options.connector, leg_id, leg.limit.seconds
        on_sent = partial(_sent, replies, self._flow.prefill_sent)
        return DetachedLeg(
            partial(prefill_leg, out, owners.instances.upstream(p), *given, on_sent),
            partial(self._prefill_left, replies),
            partial(self._unwanted_prefill, replies),
        )

    def _prefill_left(self, replies: Sequence[UpstreamResponse]) -> bool:
        """Whether P's leg goes on without its client."""
        return isinstance(self._flow.prefill_left(), HangUpPrefill) and replies[-1].hang_up()

    def _unwanted_prefill(
        self,
        replies: list[UpstreamResponse],
        result: Edits | Fallback | Unusable | None,
    ) -> None:
        self.prefill_unwanted(result, _left_by_cut(replies))

    def _prefill_failed(
        self, result: Fallback | Unusable, limit: LegLimit, replies: list[UpstreamResponse]
    ) -> PrefillFailed:
        """P's leg has ended without KV for D, within its limit or at it; `replies`: its answers."""
        why = self._hollow_of(replies[-1], streams=None) if replies else None
        hollow = None if why is None else self.failure(why)
        if isinstance(result, Unusable):
            return PrefillFailed(result.why, hollow, result.left, result.edits)
        if result is not Fallback.P_TIMEOUT:
            return PrefillFailed(result, hollow)
        self.note_limit(limit.option, limit.seconds)
        late = f"no prefill in {limit.seconds:.3g} s"
        left = _left_by_cut(replies)
        return PrefillFailed(result, LegFailure(FailureKind.TIMEOUT, late), left)

    def prefill_late(self) -> SendHedge | None:
        """P has not answered in time: D's leg, where D begins as well."""
        return self._flow.prefill_late(self._owners.clock.now_s())

    def prefill_unwanted(
        self, result: Edits | Fallback | Unusable | None, cut: LeftKv = LeftKv.NONE
    ) -> None:
        """P's leg is over, and the request no longer waits for it; `cut`: its KV without result."""
        left = cut if result is None else LeftKv.NONE
        if isinstance(result, Unusable):
            self._edits, left = result.edits, result.left
        elif isinstance(result, Edits):
            self._edits, left = result, LeftKv.NAMED
        now_s = self._owners.clock.now_s()
        self.perform(self._flow.left_prefill_over(now_s, left))

    def prefilled(self, result: Edits | PrefillFailed, start_s: float) -> SendDecode | AwaitHedge:
        """P's leg, begun at `start_s`, is over; returns what comes next."""
        owners, now_s = self._owners, self._owners.clock.now_s()
        if isinstance(result, PrefillFailed):
            self._edits = result.edits
            said = [result.why, *([result.failure.detail] if result.failure else [])]
            note_failure(self._record, self._record.prefill_instance, ": ".join(said))
            failed, left = result.failure, result.left
            return self.performed(self._flow.prefill_failed(result.why, now_s, failed, left))
        self._edits = result
        self._record.t_prefill_done = owners.clock.unix(now_s)
        owners.metrics.prefill_leg.observe(now_s - start_s)
        return self.performed(self._flow.prefill_answered(now_s, result.cached_ratio))

    def prefill_begins(self) -> float:
        """Note when P's leg begins; returns that time, monotonic seconds."""
        clock = self._owners.clock
        now_s = clock.now_s()
        self._record.t_prefill_sent = clock.unix(now_s)
        return now_s

    def hedge_failed(self, failure: UpstreamFailure) -> None:
        """D's own attempt has failed; P goes on."""
        note_failure(self._record, self._record.decode_instance, str(failure))
        now_s = self._owners.clock.now_s()
        self.perform(self._flow.hedge_failed(self.failure(failure), now_s))

    def d_answered(self, answer: UpstreamResponse) -> None:
        """D's own attempt, hedge or fall-back, has its first event."""
        why = self.hollow_of(answer)
        if self._flow.state is State.HEDGED:
            self._note_answer()
            self.hollow, now_s = why, self._owners.clock.now_s()
            self.perform(self._flow.hedge_answered(now_s, is_served=why is None))
        else:
            self._answered(answer, why)

    def _answered(self, answer: UpstreamResponse, why: UpstreamFailure | None) -> None:
        """Pass an answer on; `why`: the reason that it is hollow."""
        self._note_answer()
        self.hollow, now_s = why, self._owners.clock.now_s()
        if why is not None and why.kind is FailureKind.KEY_REFUSED:
            self.perform(self._flow.failed(self._flow.route.decode.name, self.failure(why), now_s))
        self.perform(self._flow.decode_answered(now_s, is_served=why is None))

    @property
    def flow(self) -> RequestFlow:
        """The request's flow."""
        return self._flow

    def moved(self, answer: UpstreamResponse) -> None:
        """Note that an instance has begun to continue a stream."""
        self._answered(answer, None)

    def note_limit(self, option: str, seconds: float) -> None:
        """A leg met its time limit, that of an option."""
        self._record.limit, self._record.limit_s = option, seconds

    def failure(self, failure: UpstreamFailure) -> LegFailure:
        """An instance's failure as the flow hears of it."""
        wait_s = 0.0
        if failure.kind is FailureKind.BUSY:
            now_s = self._owners.clock.wall_now()
            wait_s = float(busy_s(failure.headers.get("Retry-After"), now_s))
        text = failure.detail if failure.kind in HOLLOW_KINDS else str(failure)
        return LegFailure(failure.kind, text, wait_s, failure.status)

    def blame(self, name: str, failure: UpstreamFailure) -> None:
        """An instance failed after its answer had begun."""
        now_s = self._owners.clock.now_s()
        self.perform(self._flow.failed(name, self.failure(failure), now_s, has_begun=True))

    def performed(self, step: Step[Then]) -> Then:
        """What comes next, once the step's effects are done."""
        self.perform(step.effects)
        return step.next

    def perform(self, effects: Iterable[Effect]) -> None:
        """Do what needs no waiting: releases of KV, counters, the record and the log."""
        owners = self._owners
        for effect in effects:
            if isinstance(effect, InstanceFailed):
                owners.instances.act(effect.name, effect.change, effect.detail)
            elif isinstance(effect, FellBack):
                self._fell_back(effect)
            elif isinstance(effect, ReleaseKv):
                if self._edits is not None:
                    owners.releases.release(effect.ask, self._edits, self._key, self._release_over)
            else:
                self._count(effect)

    def _count(self, effect: Effect) -> None:
        metrics, record = self._owners.metrics, self._record
        if isinstance(effect, HedgeEnded):
            record.hedge = effect.winner
            metrics.hedges.labels(effect.winner).inc()
        elif isinstance(effect, KvUnreleased):
            metrics.releases.labels(effect.result).inc()
        elif isinstance(effect, Retried):
            record.retries = self._flow.retries
            note_attempt(record, self._flow.route)
            metrics.retries.labels(effect.kind).inc()
        elif isinstance(effect, RetryRefused):
            metrics.retries_refused.inc()

    def _release_over(self, result: ReleaseResult) -> None:
        self._owners.metrics.releases.labels(result).inc()
        self._flow.release_over(result, self._owners.clock.now_s())

    def _fell_back(self, effect: FellBack) -> None:
        """The offload has ended: P's engine id is asked again, unless P was only late."""
        owners, why = self._owners, effect.why
        p = owners.instances.get(effect.prefill.name) if effect.prefill else None
        if p is not None and why is not Fallback.P_LATE:
            p.forget_engine_id()
        owners.metrics.fallbacks.labels(why).inc()
        self._record.fallback = why


class PrefillRace:
    """The prefill leg of an offload, hedged by D where P is late.

    Both attempts run as tasks of one group, so nothing outlives the request. The loser, or the one
    left when the request is cancelled, is cancelled and awaited. The first to be ready wins. If
    both are ready P wins, since P's KV would otherwise stay pinned. An answer that nobody takes is
    closed.
    """

    __slots__ = ("_answers", "_attempts", "_failures", "_handed", "_leg", "_out", "_start_s")

    def __init__(self, attempts: Attempts, out: Outgoing, leg: SendPrefill) -> None:
        self._attempts, self._out, self._leg = attempts, out, leg
        self._handed: list[Edits] = []
        self._answers: list[UpstreamResponse] = []
        self._failures: list[UpstreamFailure] = []
        self._start_s = 0.0

    async def run(self) -> SendDecode | UpstreamResponse:
        """D's answer, or the next leg after P's; raises UpstreamFailure where both failed."""
        self._start_s = self._attempts.prefill_begins()
        if math.isinf(self._leg.hedge_at_s):
            return self._prefilled(await self._prefill())
        try:
            return await self._raced()
        except asyncio.CancelledError as gone:
            for edits in self._handed:
                self._attempts.prefill_unwanted(edits)
            # The group's frame holds the error that passed through it; if the error held that
            # frame as well, only the collector would end them.
            gone.__traceback__ = None
            raise
        finally:
            for unused in self._answers:
                unused.close()

    async def _raced(self) -> SendDecode | UpstreamResponse:
        leg = await in_group(self._race)
        if leg is not None:
            self._failures.clear()  # an error holds the frames that hold this
            return leg
        if self._failures:
            raise self._failures.pop()
        self._attempts.d_answered(self._answers[-1])
        return self._answers.pop()

    async def _race(self, group: asyncio.TaskGroup) -> SendDecode | None:
        """The next leg where P's result counts; None where D's does."""
        prefill = group.create_task(self._prefill())
        late_s = max(0.0, self._leg.hedge_at_s - self._start_s)
        await asyncio.wait({prefill}, timeout=late_s)
        beside = None if prefill.done() else self._attempts.prefill_late()
        if beside is None:
            return self._prefilled(await prefill)
        return await self._first(prefill, group.create_task(self._hedge(beside)))

    async def _first(
        self, prefill: asyncio.Task[Edits | PrefillFailed], hedge: asyncio.Task[None]
    ) -> SendDecode | None:
        """The next leg where P's result counts; None where D's does."""
        await asyncio.wait({prefill, hedge}, return_when=asyncio.FIRST_COMPLETED)
        if not prefill.done():
            if self._failures:
                self._attempts.hedge_failed(self._failures.pop())
                return self._prefilled(await prefill)
            prefill.cancel()
            return None
        leg = self._attempts.prefilled(prefill.result(), self._start_s)
        if isinstance(leg, AwaitHedge):
            await hedge
            return None
        hedge.cancel()
        return leg

    def _prefilled(self, result: Edits | PrefillFailed) -> SendDecode:
        """The next leg after P's, where no hedge computes beside it."""
        leg = self._attempts.prefilled(result, self._start_s)
        assert isinstance(leg, SendDecode)
        return leg

    async def _prefill(self) -> Edits | PrefillFailed:
        result = await self._attempts.prefill(self._out, self._leg)
        if isinstance(result, Edits):
            self._handed.append(result)
        return result

    async def _hedge(self, leg: SendHedge) -> None:
        try:
            answer = await self._attempts.decode(self._out, leg)
            why = self._attempts.hollow_of(answer)
            if why is None or is_refusal(why):
                self._answers.append(answer)
            else:  # it is there at once, and would win
                answer.close()
                self._failures.append(why)
        except UpstreamFailure as failure:
            self._failures.append(failure)
