"""The two requests that one client's request can turn into: the prefill leg and the decode leg.

The prefill leg never fails the request: its result is an `Edits` for the decode leg, or a reason
to colocate. The decode leg gives an answer whose first event is good, or raises UpstreamFailure.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from proxy.core.connectors.base import KV_PARAMS, Connector, Edits, Transfer, may_hold_kv
from proxy.core.connectors.params import wrong_params
from proxy.core.kvcache.reuse import usage_ratio
from proxy.core.routing.actions import ANSWER, LeftKv, LegLimit
from proxy.core.routing.time_limits import look_again_s
from proxy.core.types import FailureKind, Fallback
from proxy.net.peer_documents import read_json
from proxy.net.timeouts import Limit
from proxy.net.upstream.client import ANSWER_BYTES, OnSent, Upstream
from proxy.net.upstream.response import HOLD_BYTES, UpstreamResponse
from proxy.net.upstream.response_check import is_plainly_good, look_at
from proxy.protocol.endpoints import ENDED, endpoint_of
from proxy.protocol.errors import UpstreamFailure
from proxy.protocol.headers import with_request_id
from proxy.protocol.streams.movable import Plan
from proxy.protocol.streams.sse import CARRY_BYTES
from proxy.request.client_request import Outgoing
from proxy.telemetry.log import Throttle, more

_log = logging.getLogger(__name__)
_FALLBACKS = {
    FailureKind.CONNECT: Fallback.P_REFUSED,
    FailureKind.UNREACHABLE: Fallback.P_REFUSED,
    FailureKind.TIMEOUT: Fallback.P_TIMEOUT,
}


FIRST_EVENT_BYTES = 1 << 20
"""The first event of a stream that may migrate has its prompt's token ids: 150,000 of them fit. A
stream that is lost within a longer one ends."""


class Unusable:
    """P's answer, a 200, of which D can make no use, although P may hold the prompt's KV.

    `edits`: the fields by which that KV can be released; None where only P could name it.
    """

    __slots__ = ("edits", "why")

    def __init__(self, why: Fallback, edits: Edits | None) -> None:
        self.why, self.edits = why, edits

    @property
    def left(self) -> LeftKv:
        """KV that P may hold."""
        return LeftKv.UNNAMED if self.edits is None else LeftKv.NAMED


async def prefill_leg(
    out: Outgoing,
    p: Upstream,
    connector: Connector,
    request_id: str,
    timeout_s: float,
    on_sent: OnSent | None = None,
) -> Edits | Fallback | Unusable:
    """Let P compute the prompt and keep its KV; gives what D needs to fetch it.

    `timeout_s` is `--prefill-timeout`: queue and computation on P.
    """
    try:
        with Limit(timeout_s) as scope, p.watch(scope):
            return await _prefill(out, p, connector, request_id, on_sent)
    except TimeoutError:
        return Fallback.P_GONE if p.is_down else Fallback.P_TIMEOUT


async def _prefill(
    out: Outgoing,
    p: Upstream,
    connector: Connector,
    request_id: str,
    on_sent: OnSent | None,
) -> Edits | Fallback | Unusable:
    try:
        engine_id = await p.engine_id() if connector.needs_engine_id else None
    except UpstreamFailure:
        engine_id = None
    if connector.needs_engine_id and engine_id is None:
        return Fallback.ENGINE_ID_UNKNOWN
    transfer = Transfer(f"xfer-{uuid.uuid4().hex}", p.instance, engine_id, request_id)
    try:
        body = await out.with_edits(connector.prepare(transfer, out.found.fields))
    except ValueError:  # of more fields than are looked at, none is edited
        return Fallback.P_ERROR
    headers = p.keyed(with_request_id(out.headers, request_id))
    reply = await p.send(out.method, out.path, headers, body, on_sent)
    try:
        # An answer that streams although it was told not to is of no use.
        answer = b"" if reply.is_stream else await reply.read(ANSWER_BYTES + 1)
    finally:
        reply.close()
    if reply.status != 200:
        await look_at(reply)  # raises where that says something of P
        return Fallback.P_ERROR
    told = _object(answer)
    result = Fallback.P_ERROR if told is None else _used(connector, transfer, told, p.throttle)
    if isinstance(result, Edits) or not (told is None or may_hold_kv(told)):
        return result
    # Where P contradicts what is known of it, the proxy's own name for the KV may be wrong too.
    is_known = result is not Fallback.KV_PARAMS
    return Unusable(result, connector.named_by_proxy(transfer) if is_known else None)


def _object(answer: bytes) -> dict[str, Any] | None:
    """The object of P's answer, empty for other JSON; None if it is too long or no JSON."""
    if len(answer) > ANSWER_BYTES:
        return None
    try:
        parsed = read_json(answer)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else {}


def _used(
    connector: Connector, transfer: Transfer, told: dict[str, Any], throttle: Throttle
) -> Edits | Fallback:
    """The edits for D from P's answer, or the reason for none."""
    p = transfer.prefill
    wrong = wrong_params(told.get(KV_PARAMS), p, transfer.engine_id, transfer.transfer_id)
    if wrong is not None:
        unsaid = throttle.turn(KV_PARAMS, asyncio.get_running_loop().time())
        if unsaid is not None:
            said = p.name, wrong, more(unsaid)
            _log.warning("instance %s: its kv_transfer_params are not used: %s%s", *said)
        return Fallback.KV_PARAMS
    result = connector.after_prefill(transfer, told)
    if isinstance(result, Fallback):
        return result
    return replace(result, cached_ratio=usage_ratio(told.get("usage")))


def fallback_of(failure: UpstreamFailure) -> Fallback:
    """Why an offload ended when its prefill leg failed in this way."""
    return _FALLBACKS.get(failure.kind, Fallback.P_ERROR)


class FirstEventLimit(Limit):
    """Limit on the first event: `seconds`, or `cap_s` while no other instance would be asked."""

    __slots__ = ("_has_other", "_is_final", "_leg", "cap_s", "silence_s")

    def __init__(
        self, leg: LegLimit, has_other: Callable[[float], bool] = lambda now_s: True
    ) -> None:
        super().__init__(leg.seconds)
        self._leg = leg
        self.cap_s = leg.cap_s
        self.silence_s = leg.silence_s
        self._has_other = has_other
        self._is_final = False

    def reschedule(self, when_s: float) -> None:
        """Set another end, in the loop's time; then no other instance is considered."""
        self._is_final = True
        super().reschedule(when_s)

    def look(self, now_s: float) -> None:
        """Called with every tick."""
        is_scaled = self.seconds < self.cap_s and not self._is_final
        if is_scaled and now_s >= self._when_s and not self._has_other(now_s):
            # From now on, as a busy loop may look much later than it should.
            later_s = look_again_s(self.seconds + now_s - self._when_s, self.cap_s)
            self._when_s += later_s - self.seconds
            self.seconds = later_s
        super().look(now_s)

    def failure(self) -> UpstreamFailure:
        """The failure of a leg that met this limit; names the whole time, not what was left."""
        leg, is_final = self._leg, self.seconds >= self.cap_s
        limit_s = leg.whole_s if is_final else self.seconds
        kind = FailureKind.TIMEOUT if is_final else FailureKind.LATE
        what = "answer" if leg.option == ANSWER else "first event"
        late = f"no {what} in {limit_s:.4g} s"
        return UpstreamFailure(kind, late, limit_s=limit_s, limit=leg.option)


async def decode_leg(
    out: Outgoing,
    d: Upstream,
    edits: Edits | None,
    source: Upstream | None,
    limit: FirstEventLimit,
    on_sent: OnSent | None = None,
) -> UpstreamResponse:
    """Send D's leg and wait for the first event; raises UpstreamFailure.

    An answer in one piece that has begun is held to the limit on silence.
    `source` is the P that D fetches from. When it or D goes down, the wait ends at once: a frozen
    process answers nobody, and a Mooncake D would wait for a dead P for minutes.
    """
    body = out.raw if edits is None else await out.with_edits(edits)
    try:
        with limit:
            # Not `watch`: a generator apiece is a noticeable part of a request.
            d.watchers.add(limit)
            if source is not None:
                source.watchers.add(limit)
            try:
                return await _decode(out, d, body, on_sent, limit.silence_s)
            finally:
                d.watchers.discard(limit)
                if source is not None:
                    source.watchers.discard(limit)
    except TimeoutError as error:
        if d.is_down:
            raise UpstreamFailure(FailureKind.WENT_DOWN, "it answers no probe") from error
        if source is not None and source.is_down:
            raise UpstreamFailure(FailureKind.PEER_GONE, "the peer answers no probe") from error
        raise limit.failure() from error


async def _decode(
    out: Outgoing, d: Upstream, body: bytes | None, on_sent: OnSent | None, silence_s: float
) -> UpstreamResponse:
    reply = await d.send(out.method, out.path, d.keyed(out.headers), body, on_sent)
    most_bytes = FIRST_EVENT_BYTES if isinstance(out.found.plan, Plan) else CARRY_BYTES
    is_good = False
    try:
        if not is_plainly_good(reply):
            needs_event = endpoint_of(out.path.partition("?")[0]).dialect in ENDED
            await look_at(reply, most_bytes, needs_event=needs_event)
        elif reply.status == 200:
            # Held back up to HOLD_BYTES: an answer that breaks off before can be had elsewhere.
            while not reply.is_over and reply.held_bytes <= HOLD_BYTES:
                if not await _more(reply, silence_s):
                    break
            if reply.failure is not None:
                raise reply.failure.again()
        is_good = True
    finally:
        if not is_good:
            reply.close()
    return reply


async def _more(reply: UpstreamResponse, silence_s: float) -> bool:
    """Wait for more of an answer; false at its end. Once it has begun, it may not fall silent."""
    if not reply.held_bytes or silence_s == math.inf:
        return await reply.more()
    try:
        with Limit(silence_s):
            return await reply.more()
    except TimeoutError as error:
        late = f"silent for {silence_s:.4g} s within its answer"
        kind = FailureKind.TIMEOUT
        raise UpstreamFailure(kind, late, limit_s=silence_s, limit="idle") from error
