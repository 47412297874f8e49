"""Tracing: begins traces, and hands the records of sampled requests to a thread that sends spans.

While the queue is full, or the collector does not take them, spans are dropped and counted, and
requests are served as usual.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from random import getrandbits

from multidict import CIMultiDictProxy

from proxy.protocol.names.trace_parent import TRACEPARENT, TRACESTATE, parent_of, state_of
from proxy.telemetry.log import Throttle, more
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.request_log import RecordSink
from proxy.telemetry.tracing.trace import ID_BITS, TRACE_BITS, Trace

QUEUE_RECORDS = 2_500
"""As many as the request log keeps for a slow disk."""
BATCH_RECORDS = 64
"""Requests whose spans are sent at once: some 400 spans, 100 kB."""
LOOK_S = 0.5
CLOSE_S = 5.0
"""Longest wait at exit for a collector that is slow."""
FAILING_CLOSE_S = 0.5
"""The same for one that has not taken the last spans."""
Sends = Callable[[Sequence[RequestRecord]], str | None]
"""Sends the spans of some requests; returns why the collector has not taken them."""
_log = logging.getLogger(__name__)


class Tracing(RecordSink):
    """Traces of all requests, by a thread of its own. `ratio`: the part of new traces sampled.

    `on_drop` is called for each request whose spans were dropped.
    """

    def __init__(
        self,
        send: Sends,
        ratio: float,
        on_drop: Callable[[], None],
        now_s: Callable[[], float],
    ) -> None:
        self._send, self.ratio, self._on_drop, self._now_s = send, ratio, on_drop, now_s
        self._queue: deque[RequestRecord] = deque()
        self._closing = threading.Event()
        self._is_failing, self._throttle = False, Throttle()
        self._sender = threading.Thread(target=self._run, name="tracing", daemon=True)
        self._sender.start()

    def begin(self, headers: CIMultiDictProxy[str]) -> Trace:
        """The trace of a request: its client's, or a new one."""
        given = headers.getall(TRACEPARENT, ())
        parent = parent_of(given) if given else None
        if parent is not None:
            trace_id, parent_id, is_sampled = parent
            state = state_of(headers.getall(TRACESTATE, ()))
            return Trace(trace_id, parent_id, state, is_sampled=is_sampled)
        number = getrandbits(TRACE_BITS) or 1
        # As OpenTelemetry's samplers by ratio: an instance's own comes to the same result.
        is_sampled = number % (1 << ID_BITS) < self.ratio * (1 << ID_BITS)
        return Trace(f"{number:032x}", None, "", is_sampled=is_sampled)

    def write(self, record: RequestRecord) -> None:
        """Queue one record, if its trace is sampled."""
        trace = record.trace
        if trace is None or not trace.is_sampled:
            return
        if len(self._queue) < QUEUE_RECORDS:
            self._queue.append(record)
        else:
            self._on_drop()

    def close(self) -> None:
        """Send what is queued and end the thread; waits `CLOSE_S` at most."""
        self._closing.set()
        self._sender.join(FAILING_CLOSE_S if self._is_failing else CLOSE_S)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(LOOK_S)
            while self._queue:
                size = min(len(self._queue), BATCH_RECORDS)
                batch = [self._queue.popleft() for _ in range(size)]
                self._note(self._send(batch), size)

    def _note(self, fault: str | None, size: int) -> None:
        """Count what was dropped, and say once what is wrong, and when it is over."""
        if fault is None:
            if self._is_failing:
                self._is_failing = False
                _log.warning("traces: the collector takes spans again")
            return
        self._is_failing = True
        for _ in range(size):
            self._on_drop()
        if (suppressed := self._throttle.turn("traces", self._now_s())) is not None:
            _log.error("traces: spans are dropped: %s%s", fault, more(suppressed))
