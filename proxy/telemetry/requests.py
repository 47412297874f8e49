"""Counts and logs each step of a request: metrics, request log, stderr, GET /decisions."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence

from multidict import CIMultiDictProxy

from proxy.core.admission.overload import Overload
from proxy.core.placement.alternatives import PastChecks
from proxy.core.routing.route import Route
from proxy.core.types import FailureKind, Reject
from proxy.telemetry.access_log import AccessLog
from proxy.telemetry.explain import utc
from proxy.telemetry.log import Throttle, more, printable
from proxy.telemetry.metrics import NO_CHECK, Metrics
from proxy.telemetry.record import RequestRecord, note_route
from proxy.telemetry.request_log import RecordLog, RecordSink, RequestLog
from proxy.telemetry.samples import Samples
from proxy.telemetry.tracing.sink import Tracing
from proxy.telemetry.tracing.trace import Trace

DECISIONS_KEPT = 200
"""Records kept for GET /decisions, 3 kB or more each; the request log has all of them."""
REFUSED_KEPT = 50
"""Records of refused requests beside them: however many there are, they displace no placed one."""

DETAIL_CHARS, MODEL_SHOWN, MODELS_SHOWN = 300, 100, 3
_NO_FAULT = frozenset({FailureKind.BUSY, FailureKind.NO_MODEL, FailureKind.TOO_LONG})
"""Kinds that are not logged: instances under load, and clients that ask for what there is not."""
_log = logging.getLogger(__name__)


class RequestTelemetry:
    """Counts and logs the steps of a request, in the metrics and the request log.

    `decisions`: the records of the last placed requests, the newest last. `refused`: those of the
    last refused ones. `logs`: those that get a line for each request.
    `samples`: the last ended ones in plain numbers.
    """

    __slots__ = (
        *(
            "_failures",
            "_now_s",
            "_sinks",
            "decisions",
            "metrics",
            "logs",
            "overload",
            "refused",
            "request_log",
            "samples",
            "tracing",
        ),
    )

    def __init__(
        self,
        metrics: Metrics,
        request_log: RequestLog,
        now_s: Callable[[], float],
        access_log: AccessLog,
        samples: Samples,
    ) -> None:
        self.metrics, self.request_log = metrics, request_log
        self.samples = samples
        logs: tuple[RecordLog, ...] = (request_log, access_log)
        self.logs = tuple([log for log in logs if log.is_on])
        sinks: tuple[RecordSink, ...] = self.logs
        self._sinks = (*sinks, samples) if samples.is_on else sinks
        self.decisions: deque[RequestRecord] = deque(maxlen=DECISIONS_KEPT)
        self.refused: deque[RequestRecord] = deque(maxlen=REFUSED_KEPT)
        self.overload = Overload()
        self.tracing: Tracing | None = None
        self._failures = FailureLog()
        self._now_s = now_s

    def trace_by(self, tracing: Tracing) -> None:
        """Send the spans of requests from now on."""
        self.tracing, self._sinks = tracing, (*self._sinks, tracing)

    def trace_of(self, headers: CIMultiDictProxy[str]) -> Trace | None:
        """The trace of a request; None without tracing."""
        return None if self.tracing is None else self.tracing.begin(headers)

    def rejected(self, record: RequestRecord, reject: Reject) -> None:
        """Count a request refused with a busy answer."""
        self.metrics.rejected.labels(reject.reason, reject.check or NO_CHECK).inc()
        self.metrics.retry_after.observe(reject.retry_after_s)
        if reject.past:
            record.candidates = PastChecks(reject)
        if record.decode_instance is None:  # else it is among those that were placed
            self.refused.append(record)
        self.turned_away(reject)

    def turned_away(self, reject: Reject) -> None:
        """Count a request refused by the proxy or by the last engine asked."""
        self.overload.refused(reject, self._now_s())

    def last(self, count: int) -> Sequence[RequestRecord]:
        """The last placed and refused requests, the newest first; running ones are incomplete."""
        known = sorted(
            [*self.decisions, *self.refused],
            key=lambda record: record.t_decided or record.t_proxy_recv,
        )
        return known[: -count - 1 : -1]

    def placed(self, record: RequestRecord, route: Route) -> None:
        """Count a placed request."""
        note_route(record, route)
        self.policy_failed(route)
        decision = "offload" if route.prefill else "colocate"
        self.metrics.decisions.labels(decision, route.reason).inc()
        self.decisions.append(record)

    def policy_failed(self, route: Route) -> None:
        """Log the exception of the policy when a request was placed, if there was one."""
        if route.mistake is not None:
            self._failures.note_mistake(route.mistake, self._now_s())

    def unknown_model(self, model: str, known: Collection[str]) -> None:
        """A request asks for a model that no instance serves. `known`: those that there are."""
        self._failures.note_unknown(model, known, self._now_s())

    def looped(self) -> None:
        """A request came back that this proxy has sent to an instance."""
        self._failures.note_loop(self._now_s())

    def failed(self, record: RequestRecord, kind: str, detail: str) -> None:
        """A request failed because of an instance, and will not be retried."""
        self._failures.note(record, kind, detail, self._now_s())

    def poisoned(self, record: RequestRecord, detail: str) -> None:
        """Two instances gave a request the same server error, and it will not be retried."""
        self.metrics.poison_requests.inc()
        detail = f"{detail}, of two instances: neither is blamed"
        self._failures.note(record, "poison", detail, self._now_s())

    def over(self, record: RequestRecord, endpoint: str) -> None:
        """The request is over and its record complete. `endpoint`: its metric label."""
        self.metrics.observe(record, endpoint)
        for sink in self._sinks:
            sink.write(record)


def not_kept(kept: Sequence[RequestRecord]) -> str:
    """Why a request is not told of: how far back those go that are, the newest first."""
    if not kept:
        return "request: not known; none was placed or refused yet"
    oldest = utc(kept[-1].t_proxy_recv)
    return f"request: not known among the last {len(kept)}, which go back to {oldest}"


class FailureLog:
    """Throttled lines on requests that an instance failed, and on policies that raised."""

    __slots__ = ("_throttle",)

    def __init__(self) -> None:
        self._throttle = Throttle()

    def note(self, record: RequestRecord, kind: str, detail: str, now_s: float) -> None:
        """Log that a request failed and will not be repeated."""
        if kind in _NO_FAULT:
            return
        name = record.decode_instance or "none"
        suppressed = self._throttle.turn((name, kind), now_s)
        if suppressed is not None:
            said = detail[:DETAIL_CHARS], record.request_id, more(suppressed)
            _log.warning("instance %s: %s: %s (request %s failed%s)", name, kind, *said)

    def note_unknown(self, model: str, known: Collection[str], now_s: float) -> None:
        """Log that requests for a model are refused; whatever models clients invent, one line."""
        suppressed = self._throttle.turn("unknown model", now_s)
        if suppressed is not None:
            there = ", ".join(name[:MODEL_SHOWN] for name in sorted(known)[:MODELS_SHOWN])
            said = printable(model[:MODEL_SHOWN]), printable(there), more(suppressed)
            _log.warning("requests for model '%s' are refused: known here are %s%s", *said)

    def note_loop(self, now_s: float) -> None:
        """Log that requests come back: an instance is no engine."""
        if (suppressed := self._throttle.turn("loop", now_s)) is not None:
            _log.warning(
                "a request came back that was sent to an instance: one of them is a proxy whose"
                " instances lead back here%s",
                more(suppressed),
            )

    def note_mistake(self, mistake: str, now_s: float) -> None:
        """Log that a policy raised and the request was placed by load.

        Once per line of code and interval, since the text may differ between requests.
        """
        suppressed = self._throttle.turn(mistake.rpartition(" (")[2], now_s)
        if suppressed is not None:
            said = mistake + more(suppressed)
            _log.warning("the policy failed; requests are placed by load: %s", said)
