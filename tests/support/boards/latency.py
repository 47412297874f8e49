"""Latency and load: how fast are the answers, how many come, what waits."""

from tests.support.boards.drawing import Board, Panel, Row, quantiles, rate
from tests.support.boards.wrong import NOT_OK, REFUSED

SLOW = "operate/runbook.md#first-tokens-are-slow"
LOAD = "operate/tuning.md"
BUSY = "operate/runbook.md#clients-get-503-or-529"
GOODPUT = {
    "TTFT {{ttft}}, TPOT {{tpot}}": "sum by (ttft, tpot) (rate(cache_proxy_slo_total[]))"
    " / scalar(sum(rate(cache_proxy_slo_total[])))"
}


def _by_class(name: str, text: str, part: float) -> Panel:
    metric = f"cache_proxy_{name.lower()}_seconds"
    legend = quantiles(metric, "route_class", (part,))
    return Panel(f"{name} p{100 * part:g}", text, "s", SLOW, legend)


def _now(title: str, text: str, unit: str, expression: str, good: float | None = None) -> Panel:
    steps = () if good is None else ((None, "red"), (good, "green"))
    return Panel(title, text, unit, LOAD, {title: expression}, kind="stat", width=4, steps=steps)


FIRST, EACH = "Receipt to the first chunk with content.", "Per output token after the first."
NOW = Row(
    "Now",
    (
        _now("Requests", "Finished per second.", "reqps", rate("cache_proxy_requests_total")),
        NOT_OK,
        _now("In flight", "Requests that hold a lease.", "short", "sum(cache_proxy_live_leases)"),
        _now(
            "Healthy instances",
            "Instances that may be chosen.",
            "short",
            "sum(cache_proxy_instance_healthy)",
            1,
        ),
        _now("TTFT p90", FIRST, "s", quantiles("cache_proxy_ttft_seconds", of=(0.9,))["p90"]),
        _now("TPOT p90", EACH, "s", quantiles("cache_proxy_tpot_seconds", of=(0.9,))["p90"]),
    ),
)
LATENCY = Row(
    "How fast are the answers",
    (
        Panel(
            "TTFT of all requests",
            FIRST,
            "s",
            SLOW,
            {"{{le}}": "sum by (le) (increase(cache_proxy_ttft_seconds_bucket[]))"},
            kind="heat",
            width=12,
        ),
        Panel(
            "Goodput",
            "Streams that kept --ttft-slo and --tpot-slo, and what the others missed.",
            "percentunit",
            SLOW,
            GOODPUT,
            kind="stack",
            width=12,
            most=1,
        ),
        *(_by_class("TTFT", FIRST, part) for part in (0.5, 0.9, 0.99)),
        *(_by_class("TPOT", EACH, part) for part in (0.5, 0.9, 0.99)),
    ),
)
REQUESTS = Row(
    "How many come, and how long are they",
    (
        Panel(
            "By outcome",
            "Finished per second.",
            "reqps",
            LOAD,
            {"{{outcome}}": rate("cache_proxy_requests_total", "outcome")},
            kind="stack",
        ),
        Panel(
            "By route class",
            "WARM, MEDIUM, HEAVY: by the tokens that are not cached.",
            "reqps",
            "concepts/decisions.md",
            {"{{route_class}}": rate("cache_proxy_requests_total", "route_class")},
            kind="stack",
        ),
        Panel(
            "By endpoint",
            "Finished per second.",
            "reqps",
            LOAD,
            {"{{endpoint}}": rate("cache_proxy_requests_total", "endpoint")},
            kind="stack",
        ),
        Panel(
            "Prompt tokens (ISL)",
            "Per request.",
            "short",
            LOAD,
            quantiles("cache_proxy_isl_tokens"),
        ),
        Panel(
            "Output tokens (OSL)",
            "Per request.",
            "short",
            LOAD,
            quantiles("cache_proxy_osl_tokens"),
        ),
        Panel(
            "End to end",
            "Receipt to the last byte, requests that ended ok.",
            "s",
            SLOW,
            quantiles("cache_proxy_e2e_seconds"),
        ),
    ),
)
WAITING = Row(
    "What waits, what is refused",
    (
        REFUSED,
        Panel(
            "Busy instances, by model and check",
            "Instances past a threshold of a model; *: of all models without own thresholds.",
            "short",
            BUSY,
            {"{{model}} {{check}}": "sum by (model, check) (cache_proxy_instance_busy)"},
        ),
        Panel(
            "Retry-After",
            "What rejected clients are told to wait.",
            "s",
            BUSY,
            quantiles("cache_proxy_retry_after_seconds"),
        ),
        Panel(
            "Requests in the queue",
            "They wait because every instance is busy (--max-queue).",
            "short",
            "concepts/admission.md",
            {"requests": "sum(cache_proxy_queued_requests)"},
        ),
        Panel(
            "Wait in the queue",
            "By how it ended: admitted, refused, or the client gone.",
            "s",
            "concepts/admission.md",
            quantiles("cache_proxy_queue_wait_seconds", "end", (0.5, 0.99)),
        ),
        Panel(
            "Backlog by model",
            "Seconds in which one instance would compute the prompts that wait or are under way,"
            " over all proxies. Divided by the number of instances it is the time until the fleet"
            " has caught up. A KEDA overlay scales by it.",
            "s",
            "deploy/kubernetes.md",
            {"{{model}}": "sum by (model) (cache_proxy_backlog_seconds)"},
        ),
    ),
)
BOARD = Board(
    "overview",
    "cache-proxy-overview",
    "cache-proxy: latency and load",
    "How fast are the answers, how many requests come, what waits and what is refused.",
    (NOW, LATENCY, REQUESTS, WAITING),
)
