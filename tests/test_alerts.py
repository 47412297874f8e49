"""Each alert fires where its summary says so and not just before; every panel can be drawn."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.exported import with_engines
from tests.support.promql import Scrapes, as_drawn
from tests.test_configs import EXPRESSIONS, alert_expression, alerts

GPU_CELSIUS = "cache_proxy_gpu_temperature_celsius"
METRICS_PAGE = Path(__file__).parents[1] / "docs/reference/metrics.md"
WINDOW_S = 300.0
STEP_S = 15.0
TARGET = {"job": "cache-proxy", "instance": "here"}
RULES = alerts()
Change = tuple[float, float]
"""A series' value at the window's start and at its end."""


def recorded(rows: dict[str, Change], *targets: str) -> Scrapes:
    """Scrapes over a window in which each series goes straight from one value to the other."""
    scrapes = Scrapes()
    for step in range(round(WINDOW_S / STEP_S) + 1):
        part = step * STEP_S / WINDOW_S
        lines = [f"{name} {low + part * (high - low)!r}\n" for name, (low, high) in rows.items()]
        for target in targets or ("here",):
            scrapes.add(step * STEP_S, "".join(lines), **TARGET | {"instance": target})
    return scrapes


def fires(alert: str, rows: dict[str, Change], *targets: str) -> bool:
    return bool(recorded(rows, *targets).value(alert_expression(RULES[alert])))


def steady(name: str, **values: float) -> dict[str, Change]:
    """One series per instance, or of no label, that stays as it is."""
    return {f'cache_proxy_{name}{{upstream="{k}"}}': (v, v) for k, v in values.items()}


def one(name: str, low: float, high: float | None = None) -> dict[str, Change]:
    return {f"cache_proxy_{name}": (low, low if high is None else high)}


def loaded(*tokens: float, requests: float = 5.0, healthy: float = 1.0) -> dict[str, Change]:
    """Instances with so many ongoing tokens and so many requests each; the last one's health."""
    names = [f"i{at}" for at in range(len(tokens))]
    up = dict.fromkeys(names, 1.0) | {names[-1]: healthy}
    rows = steady("ongoing_tokens", **dict(zip(names, tokens, strict=True)))
    rows |= steady("instance_healthy", **up)
    for name in names:
        rows[f'cache_proxy_in_flight{{upstream="{name}",phase="decode"}}'] = (requests, requests)
    return rows


def failing(share: float) -> dict[str, Change]:
    name = 'requests_total{endpoint="chat",route_class="WARM",outcome="%s"}'
    return one(name % "upstream_error", 0, 1000 * share) | one(name % "ok", 0, 1000 * (1 - share))


def offloads(name: str, share: float) -> dict[str, Change]:
    made = one('offload_decisions_total{decision="offload",reason="kv_pull"}', 0, 1000)
    return made | one(name, 0, 1000 * share)


def refused(
    share: float, reason: str = "queue_full", check: str = "decode_blocks"
) -> dict[str, Change]:
    return one("issued_total", 0, 1000) | one(
        f'rejected_total{{reason="{reason}",check="{check}"}}', 0, 1000 * share
    )


def slo(missed: float) -> dict[str, Change]:
    """Streams of which such a share misses a target."""
    name = 'slo_total{ttft="%s",tpot="kept"}'
    late = one(name % "missed", 0, 1000 * missed)
    return late | one(name % "kept", 0, 1000 * (1 - missed))


def lagging(late: float) -> dict[str, Change]:
    """1000 delays, of which so many were over 0.1 s."""
    counts = {"0.1": 1000 - late, "0.25": 1000, "+Inf": 1000}
    name = 'cache_proxy_loop_lag_seconds_bucket{le="%s"}'
    return {name % bound: (0, count) for bound, count in counts.items()}


def heat(
    headroom: float, *, running: float, left: float | None = None, name: str = "a"
) -> dict[str, Change]:
    """An instance with so much headroom, and requests that stay or get fewer."""
    rows = steady("thermal_headroom_celsius", **{name: headroom})
    after = running if left is None else left
    return rows | one(f'thermal_running{{upstream="{name}"}}', running, after)


def steady_growth(name: str, by: float) -> dict[str, Change]:
    return one(f'{name}{{upstream="a"}}', 3, 3 + by)


def policy(reason: str) -> dict[str, Change]:
    return one(f'offload_decisions_total{{decision="colocate",reason="{reason}"}}', 0, 1)


def gpus(name: str, **values: float | Change) -> dict[str, Change]:
    """A gauge of one GPU per instance."""
    changes = {k: v if isinstance(v, tuple) else (v, v) for k, v in values.items()}
    label = 'cache_proxy_%s{upstream="%s",gpu="h:0"}'
    return {label % (name, k): change for k, change in changes.items()}


def decoding(before: float, after: float) -> dict[str, Change]:
    return {'cache_proxy_in_flight{upstream="a",phase="decode"}': (before, after)}


def planner(name: str, low: float, high: float | None = None) -> dict[str, Change]:
    return {f"cache_planner_{name}": (low, low if high is None else high)}


SCALER_FAILS = 'scaler_errors_total{scaler="exec",error="failed"}'
TICKS = 'ticks_total{outcome="%s"}'
MISSES, FALLBACKS = "offload_kv_misses_total", 'offload_fallbacks_total{reason="p_late"}'
REFUSED = 'config_reloads_total{result="refused"}'
LOST = "request_log_dropped_total"
CASES: dict[str, tuple[dict[str, Change], dict[str, Change]]] = {
    "CacheProxyNotScraped": ({"up": (1.0, 0.0)}, {"up": (0.0, 1.0)}),
    "CacheProxyNoInstance": (
        steady("instance_healthy", a=0, b=0),
        steady("instance_healthy", a=0, b=1),
    ),
    "CacheProxyInstanceUnhealthy": (
        steady("instance_healthy", a=0, b=1) | steady("breaker_state", a=2, b=0),
        steady("instance_healthy", a=0, b=1) | steady("breaker_state", a=4, b=0),
    ),
    "CacheProxyDiscoveryStale": (
        {'cache_proxy_discovery_age_seconds{source="k8s://a/b"}': (181.0, 181.0)},
        {'cache_proxy_discovery_age_seconds{source="k8s://a/b"}': (179.0, 179.0)},
    ),
    "CacheProxyShareAlone": (one("share_state", 0), one("share_state", 1)),
    "CacheProxyThresholdWithoutEffect": (
        steady("threshold_without_effect", a=1),
        steady("threshold_without_effect", a=0),
    ),
    "CacheProxyPanic": (one("panic", 1), one("panic", 0)),
    "CacheProxyRejecting": (refused(0.11), refused(0.09)),
    "HighRequestRejectionRate": (refused(0.11), refused(0.09)),
    "CacheProxySloBurnsFast": (slo(0.73), slo(0.71)),
    "CacheProxySloBurnsSlowly": (slo(0.31), slo(0.29)),
    "CacheProxyLoadImbalance": (loaded(16_000, 4000), loaded(14_000, 6000)),
    "CacheProxyGpuImbalance": (
        loaded(9, 9, 9) | gpus("gpu_utilization_ratio", i0=0.95, i1=0.4, i2=0.4),
        loaded(9, 9, 9) | gpus("gpu_utilization_ratio", i0=0.95, i1=0.6, i2=0.6),
    ),
    "CacheProxyGpuReadingsOld": (
        steady("thermal_sensor_age_seconds", a=61),
        steady("thermal_sensor_age_seconds", a=59),
    ),
    "CacheProxyGpuSlowed": (gpus("gpu_slowed", a=1.0), gpus("gpu_slowed", a=0.0)),
    "CacheProxyGpuPcieBusy": (
        gpus("gpu_pcie_tx_bytes_per_second", a=20.5e9),
        gpus("gpu_pcie_tx_bytes_per_second", a=19.5e9),
    ),
    "VLLMThermalRunaway": (
        gpus("gpu_temperature_celsius", a=86.0) | decoding(40, 40),
        gpus("gpu_temperature_celsius", a=86.0) | decoding(40, 20),
    ),
    "CacheProxyAccountingDrift": (one("accounting_drift", 0, -1), one("accounting_drift", 0)),
    "CacheProxyPolicyFailed": (policy("policy_failed"), policy("margin")),
    "CacheProxyOffloadImpossible": (
        one("kv_peers_configured", 2) | one("kv_peers_known", 0),
        one("kv_peers_configured", 2) | one("kv_peers_known", 1),
    ),
    "CacheProxyOffloadFallbacks": (offloads(FALLBACKS, 0.06), offloads(FALLBACKS, 0.04)),
    "CacheProxyKvMisses": (offloads(MISSES, 0.06), offloads(MISSES, 0.04)),
    "CacheProxyEngineReportFrozen": (
        steady("engine_report_frozen", a=1),
        steady("engine_report_frozen", a=0),
    ),
    "CacheProxyEngineUsageDoubted": (
        steady("engine_usage_doubted", a=1),
        steady("engine_usage_doubted", a=0),
    ),
    "CacheProxyKvEventsLost": (
        steady("kv_events_live", a=0),
        steady("kv_events_live", a=1),
    ),
    "CacheProxyThermalRunaway": (
        heat(-3.5, running=16),
        heat(-3.5, running=16, left=15) | heat(-2.5, running=16, name="b"),
    ),
    "CacheProxyThermalFlapping": (
        steady_growth("thermal_oscillations_total", 7),
        steady_growth("thermal_oscillations_total", 6),
    ),
    "CacheProxyThermalBlind": (
        one('thermal_state{upstream="a",state="STALE"}', 1),
        one('thermal_state{upstream="a",state="STALE"}', 0),
    ),
    "CacheProxyUpstreamFailures": (failing(0.02), failing(0.005)),
    "CacheProxyLoopLag": (lagging(20), lagging(5)),
    "CacheProxyMemory": (one("memory_level", 0, 1), one("memory_level", 3, 0)),
    "CacheProxyConnections": (
        one("connections_refused_total", 7, 8),
        one("connections_refused_total", 7),
    ),
    "CacheProxyConfigRefused": (one(REFUSED, 1, 2), one(REFUSED, 1)),
    "CacheProxyRequestLogDropped": (one(LOST, 1, 2), one(LOST, 1)),
    "CachePlannerSourceOld": (
        planner('source_age_seconds{source="a"}', 61),
        planner('source_age_seconds{source="a"}', 59),
    ),
    "CachePlannerScalerFails": (planner(SCALER_FAILS, 2, 6), planner(SCALER_FAILS, 2, 5)),
    "CachePlannerOrderNeverCame": (
        planner('absent_replicas{component="combined"}', 1),
        planner('absent_replicas{component="combined"}', 0),
    ),
    "CachePlannerEnginesUnread": (planner("unread_engines", 1), planner("unread_engines", 0)),
    "CachePlannerPluginOff": (
        planner('plugin_state{plugin="a",state="off"}', 1),
        planner('plugin_state{plugin="a",state="off"}', 0)
        | planner('plugin_state{plugin="a",state="failed"}', 1),
    ),
    "CachePlannerBlind": (
        planner(TICKS % "no_data", 3, 63) | planner(TICKS % "unchanged", 9),
        planner(TICKS % "no_data", 3, 63) | planner(TICKS % "unchanged", 9, 10),
    ),
}


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_fires_where_it_should_and_not_before(alert: str) -> None:
    assert alert in CASES, "each alert has a case that fires and one that does not"
    too_much, fine = CASES[alert]
    assert fires(alert, too_much)
    assert not fires(alert, fine)


def test_the_founding_alert_is_there_as_it_was_written() -> None:
    rule = RULES["HighRequestRejectionRate"]
    founding = (
        "sum(rate(dynamo_tasks_rejected_total[5m])) / "
        "sum(rate(dynamo_tasks_issued_total[5m])) > 0.1"
    )
    ours = founding.replace("dynamo_tasks_", "cache_proxy_")
    assert alert_expression(rule) == ours
    assert "        for: 5m\n" in rule
    assert "          severity: warning\n" in rule
    assert "          summary: High request rejection rate\n" in rule
    assert "          description: More than 10% of requests are being rejected\n" in rule


def test_one_proxy_of_ten_that_refuses_is_seen_by_the_alert_of_each() -> None:
    """Of all ten together a twentieth is refused."""
    scrapes = Scrapes()
    for at_s, share in ((0.0, 0.0), (WINDOW_S, 0.5)):
        for target in range(10):
            rows = refused(share if not target else 0.0)
            text = "".join(f"{name} {high if at_s else 0.0}\n" for name, (_, high) in rows.items())
            scrapes.add(at_s, text, job="cache-proxy", instance=str(target))
    each, all_ = "CacheProxyRejecting", "HighRequestRejectionRate"
    assert list(scrapes.vector(alert_expression(RULES[each]))) == ["instance=0,job=cache-proxy"]
    assert not scrapes.value(alert_expression(RULES[all_]))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (loaded(90_000, 0, requests=1.0), False),
        (loaded(100_000), False),
        (loaded(30_000, 30_000, 30_000, 0, healthy=0.0), False),
        (loaded(30_000, 30_000, 30_000, 5000), False),
        (loaded(60_000, 20_000, 20_000, 20_000), True),
        (loaded(60_000, 20_000, 20_000, 0, healthy=0.0), True),
    ],
    ids=["few requests", "one instance", "one is down", "one is emptier", "fuller", "fuller of up"],
)
def test_imbalance_is_that_of_many_requests_on_healthy_instances(
    rows: dict[str, Change], expected: bool
) -> None:
    assert fires("CacheProxyLoadImbalance", rows) is expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (loaded(9, 9, 9, requests=1.0), False),
        (loaded(9, 9, 9, healthy=0.0), False),
        (loaded(9, 9, 9), True),
    ],
    ids=["few requests", "the idle one is down", "one is idle"],
)
def test_imbalance_of_gpus_is_that_of_healthy_instances_at_work(
    rows: dict[str, Change], expected: bool
) -> None:
    rows |= gpus("gpu_utilization_ratio", i0=0.95, i1=0.9, i2=0.0)
    assert fires("CacheProxyGpuImbalance", rows) is expected


def test_the_founding_alert_on_heat_is_there_with_our_names() -> None:
    """Its two sides had no label in common, so as it was written it would never have fired."""
    rule = RULES["VLLMThermalRunaway"]
    founding = (
        'max_over_time(DCGM_FI_DEV_GPU_TEMP{pod=~"vllm-.*"}[2m]) > 85 and '
        "deriv(vllm:num_requests_running[2m]) >= 0"
    )
    ours = founding.replace('DCGM_FI_DEV_GPU_TEMP{pod=~"vllm-.*"}', GPU_CELSIUS)
    ours = ours.replace("vllm:num_requests_running", 'cache_proxy_in_flight{phase="decode"}')
    assert alert_expression(rule) == ours.replace("and", "and on (job, instance, upstream)")
    assert "        for: 30s\n" in rule
    assert "          severity: page\n" in rule
    assert not fires("VLLMThermalRunaway", gpus("gpu_temperature_celsius", a=84.0) | decoding(1, 2))


def test_every_expression_can_be_evaluated() -> None:
    """Those of docs/reference/metrics.md too; over scrapes of all that is exported."""
    scrapes = Scrapes()
    names = [
        name + "{" + ",".join(f'{label}="1"' for label in sorted(labels)) + "}"
        for name, labels in with_engines().items()
    ]
    for at_s in (0.0, WINDOW_S):
        scrapes.add(at_s, "".join(f"{name} {at_s}\n" for name in names), **TARGET)
    blocks = re.findall(
        r"^```\n(.*?)^```", METRICS_PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) > 2, "the page has examples"
    for expression in (*EXPRESSIONS, *blocks):
        assert scrapes.value(as_drawn(expression)) is not None, expression


TWO = recorded({'m_total{a="x",b="1"}': (0, 30), 'm_total{a="x",b="2"}': (0, 60), "n": (2, 4)})


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("sum(increase(m_total[5m]))", {"": 90.0}),
        ("sum by (b) (rate(m_total[5m]))", {"b=1": 0.1, "b=2": 0.2}),
        ('rate(m_total{b=~"2|3"}[5m]) * 10', {"a=x,b=2,instance=here,job=cache-proxy": 2.0}),
        (
            'sum(rate(m_total{b!="2"}[5m])) / sum(rate(m_total[5m])) > 0.3',
            {"": pytest.approx(1 / 3)},
        ),
        ("sum(m_total) - 2 * 10 - 5", {"": 65.0}),
        ("sum(m_total) > 89 and sum(n) == 4 or vector(7)", {"": 90.0}),
        ("sum(m_total) > 90 or vector(7)", {"": 7.0}),
        ("max without (b, job, instance) (m_total) / scalar(sum(n))", {"a=x": 15.0}),
        ("m_total and on (a, b) m_total > 50", {"a=x,b=2,instance=here,job=cache-proxy": 60.0}),
        ("sum(absent(q))", {"": 1.0}),
        ("sum(absent(n))", {}),
        ("sum(avg_over_time(n[5m]))", {"": 3.0}),
        ("sum(deriv(n[5m])) * 300", {"": pytest.approx(2.0)}),
    ],
)
def test_what_evaluates_them_agrees_with_prometheus(
    expression: str, value: dict[str, float]
) -> None:
    assert TWO.vector(expression) == value


@given(st.lists(st.integers(0, 100), min_size=1, max_size=20), st.integers(1, 20))
def test_a_counter_that_begins_again_has_grown_by_what_was_counted(
    steps: list[int], restart: int
) -> None:
    """An engine's restart loses at most what was counted since the last scrape before it."""
    scrapes, value, grown = Scrapes(), 0, 0
    scrapes.add(0.0, "m_total 0\n")
    for at, step in enumerate(steps, 1):
        value = step if at == restart and step < value else value + step
        grown += step
        scrapes.add(float(at), f"m_total {value}\n")
    assert scrapes.vector("increase(m_total[1h])") == {"": grown}


def test_the_test_of_an_alert_reads_all_of_its_expression() -> None:
    with pytest.raises(AssertionError, match="left over"):
        TWO.value("m_total m_total")
    with pytest.raises(AssertionError, match=re.escape("delta of")):
        TWO.value("delta(m_total)")
