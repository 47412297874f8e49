"""Our own counters read as prometheus_client's do."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from proxy.telemetry.instruments import Spreads

NAME, TEXT, LABELS, BUCKETS = "error_ratio", "Errors", ("what",), (-0.5, 0, 0.5)


def test_a_histogram_with_buckets_below_zero_has_a_count_and_no_sum() -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    reference = Histogram(NAME, TEXT, LABELS, buckets=BUCKETS, registry=theirs)
    spreads = Spreads(NAME, TEXT, LABELS, BUCKETS)
    ours.register(spreads)
    for value in (-1.0, -0.5, 0.2, 9.0):
        reference.labels("ttft").observe(value)
        spreads.labels("ttft").observe(value)
    shown = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
    assert generate_latest(ours).splitlines() == shown
    assert ours.get_sample_value(f"{NAME}_count", {"what": "ttft"}) == 4


def test_what_names_something_that_is_gone_is_dropped() -> None:
    spreads = Spreads("transfer_seconds", "", ("prefill", "decode"), (1,))
    for pair in (("a", "b"), ("b", "a"), ("a", "c")):
        spreads.labels(*pair).observe(0.5)
    spreads.forget("b")
    (family,) = spreads.collect()
    assert {(s.labels["prefill"], s.labels["decode"]) for s in family.samples} == {("a", "c")}
