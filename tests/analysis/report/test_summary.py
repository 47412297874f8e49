"""The summary counts every request once and hides none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.runs import failed, row, run, skipped


def test_requests_are_counted_by_outcome():
    summary = run(row("a"), failed("b", "rejected"), failed("c"), skipped("d"))
    assert summary["requests"] == {
        "sent": 3,
        "ok": 1,
        "rejected": 1,
        "failed": 1,
        "skipped": 1,
        "by_outcome": {"ok": 1, "rejected": 1, "timeout": 1, "skipped": 1},
    }
    assert summary["ttft_s"]["count"] == 1
    assert summary["ttft_s_failures_as_inf"]["count"] == 4
    assert summary["ttft_s_failures_as_inf"]["p50"] == "inf"


@given(st.lists(st.floats(0.1, 50), min_size=1, max_size=40), st.integers(0, 40))
def test_failing_more_requests_never_makes_the_censored_percentiles_better(waits, losses):
    rows = [row(str(n), first_token_s=wait) for n, wait in enumerate(waits)]
    worse = [failed(one["request_id"]) if n < losses else one for n, one in enumerate(rows)]
    before, after = (run(*some)["ttft_s_failures_as_inf"] for some in (rows, worse))
    for name in ("p50", "p90", "p99"):
        assert after[name] == "inf" or after[name] >= before[name]


def test_refusals_and_retries_are_counted():
    rows = [
        row("a", attempts=1, refusals=0, retry_waits_s=[]),
        row("b", attempts=3, refusals=2, retry_waits_s=[1.0, 2.0]),
        failed("c", "rejected", status=503, attempts=2, refusals=2, retry_waits_s=[1.0]),
        failed("d", "http_error", status=503, attempts=1, refusals=1, retry_waits_s=[]),
        failed("e", status=None, attempts=2, refusals=1, retry_waits_s=[1.0]),
        skipped("f"),
    ]
    refusals = run(*rows, time_scale=2.0)["refusals"]
    waited = refusals.pop("waited_s")
    assert (waited["count"], waited["max"]) == (3, 6.0)
    assert refusals == {
        "answers": 6, "requests": 4, "retries": 4, "ok_after_retry": 1, "given_up": 2,
    }  # fmt: skip
    assert run(row("a"))["refusals"]["answers"] == 0


def test_goodput_is_of_what_was_sent():
    summary = run(row("a"), row("b", first_token_s=2.5), failed("c"), slo_s={"ttft": 2.0})
    assert summary["goodput"]["ratio_of_sent"] == pytest.approx(1 / 3)
    assert summary["goodput"]["requests_per_s"] == pytest.approx(1 / 3)
    assert run(row("a"))["goodput"]["ratio_of_sent"] is None


def test_the_cache_is_stated_as_ideal_predicted_engine_and_external():
    local = row("a", hit_tokens=30, isl_tokens=110)
    moved = row("b", hit_tokens=10, isl_tokens=90, prefill_instance="p", cached_tokens=90)
    assert run(local, moved)["cache"] == {
        "ideal_hit_ratio": 0.5,
        "predicted_hit_ratio": 0.2,
        "engine_hit_ratio": 0.65,
        "local_hit_ratio": 0.25,
        "external_hit_ratio": 0.4,
    }
    assert run(row("a"))["cache"]["external_hit_ratio"] is None


def test_classes_and_reasons_come_from_rows():
    summary = run(
        row("a"), row("b", route_class="HEAVY_P2P", offload_decision_reason="p_idle_d_busy")
    )
    assert list(summary["by_route_class"]) == ["HEAVY_P2P", "WARM"]
    assert summary["by_route_class"]["WARM"]["requests"] == 1
    assert summary["offload_decision_reasons"] == {"p_idle_d_busy": 1}


@pytest.mark.parametrize(
    ("rows", "facts", "said"),
    [
        ([row("a", sent_s=0.9)], {}, "schedule lag p99 0.900 s"),
        ([row("a")], {"interrupted": True}, "interrupted after 1 of 4 requests"),
        ([row("a", completion_tokens=None)], {}, "1 answers without usage"),
        ([row("a", completion_tokens=2)], {}, "1 answers whose length is not the"),
        ([row("a", prompt_tokens=174)], {}, "the server counts 1.74 tokens"),
        ([row("a")], {"proxy_log_missing": 2}, "2 requests are not in the proxy's log"),
        ([row("a")], {"proxy_log_problem": "it is gone"}, "it is gone"),
    ],
)
def test_what_weakens_a_run_is_said(rows, facts, said):
    assert any(said in line for line in run(*rows, **facts)["degraded"])
    assert run(row("a"))["degraded"] == []


def test_an_empty_run_has_a_summary():
    summary = run()
    assert summary["requests"]["sent"] == 0
    assert summary["throughput"]["requests_per_s"] is None


def test_a_faster_target_is_reported_in_its_own_time():
    rows = [row("a", sent_s=0.5), row("b", first_token_s=0.5)]
    real, scaled = run(*rows), run(*rows, time_scale=6.0, slo_s={"ttft": 2.5, "tpot": 9.0})
    assert scaled["time_scale"] == 6.0
    for tag in ("ttft_s", "ttft_s_failures_as_inf", "tpot_s", "e2e_s", "itl_s"):
        assert scaled[tag]["max"] == (real[tag]["max"] and real[tag]["max"] * 6)
    assert scaled["by_route_class"]["WARM"]["ttft_s"]["p50"] == 3.0
    assert scaled["duration_s"] == 18.0
    assert scaled["client"]["duration_s"] == real["client"]["duration_s"] == 3.0
    assert scaled["throughput"]["requests_per_s"] == pytest.approx(2 / 18)
    assert scaled["schedule_lag_s"] == real["schedule_lag_s"]
    assert scaled["goodput"]["ratio_of_sent"] == 0.0
    assert run(*rows, slo_s={"ttft": 2.5, "tpot": 9.0})["goodput"]["ratio_of_sent"] == 1.0


def test_errors_are_counted_by_what_was_said():
    other = failed("c", "http_error", status=404, error="the model `nope`\ndoes not exist")
    rows = [row("a"), failed("b", error="no end"), other, other | {"request_id": "d"}, skipped("e")]
    summary = run(*rows)
    assert summary["errors"] == [
        {
            "outcome": "http_error",
            "status": 404,
            "message": "the model `nope` does not exist",
            "count": 2,
        },
        {"outcome": "timeout", "status": None, "message": "no end", "count": 1},
    ]
    assert summary["errors_not_listed"] == 0


def test_errors_without_end_are_cut():
    rows = [failed(str(n), error=f"{n} {'x' * 999}") for n in range(13)]
    summary = run(*rows)
    assert {len(one["message"]) for one in summary["errors"]} == {160}
    assert (len(summary["errors"]), summary["errors_not_listed"]) == (10, 3)


def test_tokens_per_event_and_policies_come_from_rows():
    summary = run(row("a", chunks=2, policy="never"), row("b", chunks=1), row("c", policy="never"))
    assert summary["tokens_per_event"] == 2.0
    assert summary["offload_policies"] == ["never"]
    assert run(row("a"))["tokens_per_event"] is None
