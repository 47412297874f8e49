"""Tracing: what is sampled, what the queue keeps, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from proxy.telemetry.record import RequestRecord
from proxy.telemetry.tracing import sink
from proxy.telemetry.tracing.sink import BATCH_RECORDS, QUEUE_RECORDS, Sends, Tracing
from proxy.telemetry.tracing.trace import Trace

NO_HEADERS = CIMultiDictProxy[str](CIMultiDict())


def ended(*, is_sampled: bool = True) -> RequestRecord:
    trace = Trace("1" * 32, None, "", is_sampled=is_sampled)
    return RequestRecord(request_id="r", trace=trace)


class Sent:
    """Takes what it is sent, once it may."""

    def __init__(self, *, waits: bool = False) -> None:
        self.sizes: list[int] = []
        self.begun, self.may = threading.Event(), threading.Event()
        if not waits:
            self.may.set()

    def __call__(self, records: Sequence[RequestRecord]) -> str | None:
        self.begun.set()
        self.may.wait()
        self.sizes.append(len(records))
        return None


@contextmanager
def tracing(send: Sends, drops: list[int] | None = None, ratio: float = 1.0) -> Iterator[Tracing]:
    made = Tracing(send, ratio, lambda: drops.append(1) if drops is not None else None, lambda: 0.0)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(
    ("ratio", "low", "high"), [(0.0, 0, 0), (0.5, 350, 650), (1.0, 1000, 1000)]
)
def test_the_ratio_is_of_new_traces(ratio: float, low: int, high: int) -> None:
    with tracing(Sent(), ratio=ratio) as made:
        traces = [made.begin(NO_HEADERS) for _ in range(1000)]
    assert low <= sum(trace.is_sampled for trace in traces) <= high
    assert len({trace.trace_id for trace in traces}) == 1000


def test_only_what_is_sampled_is_sent() -> None:
    sent = Sent()
    with tracing(sent) as made:
        made.write(ended(is_sampled=False))
        made.write(RequestRecord(request_id="r"))
        made.write(ended())
    assert sent.sizes == [1]


def test_batches_are_bounded_and_the_last_ones_are_sent_at_the_end() -> None:
    sent = Sent()
    with tracing(sent) as made:
        for _ in range(2 * BATCH_RECORDS + 3):
            made.write(ended())
    assert sum(sent.sizes) == 2 * BATCH_RECORDS + 3
    assert max(sent.sizes) <= BATCH_RECORDS


def test_past_a_full_queue_requests_are_dropped_and_counted() -> None:
    sent, drops = Sent(waits=True), list[int]()
    with tracing(sent, drops) as made:
        made.write(ended())
        assert sent.begun.wait(30)
        for _ in range(QUEUE_RECORDS + 7):
            made.write(ended())
        assert len(drops) == 7
        sent.may.set()
    assert sum(sent.sizes) == QUEUE_RECORDS + 1


def test_the_end_does_not_wait_for_a_collector_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "CLOSE_S", 0.1)
    sent = Sent(waits=True)
    with tracing(sent) as made:
        made.write(ended())
    assert sent.sizes == []
    sent.may.set()


def test_the_end_waits_less_for_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "CLOSE_S", 3600.0)
    sent, dropped = Sent(waits=True), threading.Event()

    def send(records: Sequence[RequestRecord]) -> str | None:
        return sent(records) if dropped.is_set() else "gone"

    made = Tracing(send, 1.0, dropped.set, lambda: 0.0)
    made.write(ended())
    assert dropped.wait(30)
    made.write(ended())
    made.close()
    assert sent.sizes == []
    sent.may.set()


def test_what_the_collector_does_not_take_is_counted_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drops: list[int] = []
    with tracing(lambda records: "no room", drops) as made:
        for _ in range(2 * BATCH_RECORDS):
            made.write(ended())
    assert len(drops) == 2 * BATCH_RECORDS
    assert caplog.messages == ["traces: spans are dropped: no room"]
