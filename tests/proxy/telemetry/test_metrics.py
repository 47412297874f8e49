"""What one finished request adds to the counters, and labels that are there from the start."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.core.types import FailureKind, Outcome, RejectReason
from proxy.net.timeouts import Clock
from proxy.telemetry.metrics import Exposition, Metrics
from proxy.telemetry.record import Migration, RequestRecord

STREAM: dict[str, Any] = {
    "route_class": "WARM",
    "outcome": Outcome.OK,
    "t_proxy_recv": 100.0,
    "t_first_token": 101.0,
    "t_done": 103.0,
    "osl_tokens": 5,
    "isl_tokens": 900,
    "prompt_tokens": 1000,
    "hit_tokens": 600,
    "new_tokens": 400,
    "cached_tokens": 512,
    "predicted_ttft_s": 0.8,
}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"cache_proxy_{name}", labels)


def is_between(metrics: Metrics, name: str, low: str, high: str, **labels: str) -> bool:
    """Whether the one observed value is; what can be negative has no sum in the exposition."""
    below, all_ = (value(metrics, f"{name}_bucket", le=le, **labels) for le in (low, high))
    return (below, all_) == (0, 1)


def observe(metrics: Metrics, **changes: Any) -> None:
    metrics.observe(RequestRecord(request_id="r", **(STREAM | changes)), "chat")


def test_a_whole_stream(metrics: Metrics) -> None:
    observe(metrics)
    labels = {"endpoint": "chat", "route_class": "WARM", "outcome": "ok"}
    assert value(metrics, "requests_total", **labels) == 1
    assert value(metrics, "ttft_seconds_sum", route_class="WARM") == 1.0
    assert value(metrics, "tpot_seconds_sum", route_class="WARM") == 0.5
    assert value(metrics, "e2e_seconds_sum", route_class="WARM") == 3.0
    assert value(metrics, "isl_tokens_sum") == 1000, "the engine's count, where there is one"
    assert value(metrics, "osl_tokens_sum") == 5
    assert value(metrics, "hit_tokens_total") == 600
    assert value(metrics, "new_tokens_total") == 400
    assert is_between(metrics, "prefix_hit_prediction_error_tokens", "-128.0", "0.0")
    assert is_between(metrics, "predicted_ttft_error_seconds", "0.1", "0.3")
    assert is_between(metrics, "prediction_error_ratio", "0.1", "0.25", what="ttft")


def test_what_ended_badly_has_no_time_to_its_end(metrics: Metrics) -> None:
    observe(metrics, outcome=Outcome.UPSTREAM_TRUNCATED)
    assert value(metrics, "ttft_seconds_count", route_class="WARM") == 1
    assert value(metrics, "e2e_seconds_count", route_class="WARM") is None


def test_what_was_never_placed_has_no_class(metrics: Metrics) -> None:
    metrics.observe(RequestRecord(request_id="r", outcome=Outcome.REJECTED), "chat")
    labels = {"endpoint": "chat", "route_class": "none", "outcome": Outcome.REJECTED}
    assert value(metrics, "requests_total", **labels) == 1
    assert value(metrics, "hit_tokens_total") == 0


def test_an_offloads_hits_are_not_compared(metrics: Metrics) -> None:
    """Its D's count includes what came over the wire."""
    observe(metrics, prefill_instance="p")
    assert value(metrics, "prefix_hit_prediction_error_tokens_count") == 0


def compared(metrics: Metrics) -> list[float | None]:
    hits = ("reachable", "chosen", "reported")
    each = [value(metrics, "compared_hit_tokens_total", which=which) for which in hits]
    return [value(metrics, "compared_prompt_tokens_total"), *each]


def test_three_hits_are_parts_of_the_same_prompt_tokens(metrics: Metrics) -> None:
    observe(metrics, isl_tokens=500, hit_tokens=300, reachable_hit_tokens=400)
    assert compared(metrics) == [1000, 800, 600, 512]


@pytest.mark.parametrize(
    "left_out",
    [
        {"prefill_instance": "p"},
        {"outcome": Outcome.CLIENT_GONE},
        {"cached_tokens": None},
        {"prompt_tokens": None},
        {"hit_tokens": None},
        {"migrations": [Migration("a", "b", "lost", "moved", 3, 0.1)]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_request_that_lacks_one_of_the_three_is_in_none(
    metrics: Metrics, left_out: dict[str, Any]
) -> None:
    observe(metrics, reachable_hit_tokens=700, **left_out)
    assert compared(metrics) == [0, 0, 0, 0]


def test_the_wait_in_the_queue_is_no_error_of_a_prediction(metrics: Metrics) -> None:
    observe(metrics, t_queued=100.0, t_decided=100.25)
    assert is_between(metrics, "predicted_ttft_error_seconds", "-0.1", "0.0")


def test_closed_labels_begin_at_zero(metrics: Metrics) -> None:
    """A rule on a rate must not begin with "no data"."""
    retries = {value(metrics, "upstream_retries_total", reason=one) for one in FailureKind}
    assert retries == {0.0}
    (family,) = metrics.rejected.collect()
    assert {sample.value for sample in family.samples} == {0.0}
    pairs = {(s.labels["reason"], s.labels["check"]) for s in family.samples}
    assert {reason for reason, _ in pairs} == set(RejectReason)
    checks = {check for reason, check in pairs if reason == "queue_full"}
    assert checks == {reason for reason, check in pairs if reason == check}
    assert ("memory", "none") in pairs


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("red\x1b[31m", "red\\u001b[31m"),
        ('two\r\nlines\\ "quoted"', 'two\\u000d\\u000alines\\ "quoted"'),
        ("turned\u202eround \U0001f600", "turned\\u202eround \U0001f600"),
    ],
)
async def test_what_others_word_is_printable_in_labels(
    metrics: Metrics, model: str, shown: str
) -> None:
    metrics.backlog.read = lambda: {model: 2.0}
    metrics.discovery_refused.labels(model).inc()
    metrics.kv_transfer.labels(model, "d").observe(1.0)
    text = (await Exposition(metrics.registry, Clock(), lambda now_s: None).text()).decode()
    assert all(line.isprintable() for line in text.split("\n"))
    families = text_string_to_metric_families(text)
    found = {s.name: s.labels for family in families for s in family.samples}
    assert found["cache_proxy_backlog_seconds"] == {"model": shown}
    assert found["cache_proxy_discovery_refused_total"] == {"source": shown}
    assert found["cache_proxy_kv_transfer_seconds_count"] == {"prefill": shown, "decode": "d"}
