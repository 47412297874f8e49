"""What is wrong: the board to open first."""

from tests.support.boards.drawing import Board, Panel, Row, quantiles, rate

HEALTH = {
    "0": ("healthy", "green"),
    "1": ("suspect", "yellow"),
    "2": ("ejected", "red"),
    "3": ("probing", "orange"),
    "4": ("asleep", "blue"),
    "5": ("paused", "purple"),
}
"""States of an instance, as `cache_proxy_breaker_state` counts them."""
BAD = ((None, "green"), (1, "red"))
REFUSED = Panel(
    "Refused, by reason and check",
    "Requests answered 503 or 529; a check is the threshold that made the instances busy.",
    "reqps",
    "operate/runbook.md#clients-get-503-or-529",
    {"{{reason}} {{check}}": rate("cache_proxy_rejected_total", "reason, check")},
    kind="stack",
)
NOT_OK = Panel(
    "Not ok",
    "Share of finished requests with another outcome than ok.",
    "percentunit",
    "operate/runbook.md",
    {
        "not ok": '1 - (sum(rate(cache_proxy_requests_total{outcome="ok"}[])) or vector(0))'
        " / sum(rate(cache_proxy_requests_total[]))"
    },
    kind="stat",
    width=4,
    steps=((None, "green"), (0.01, "red")),
)
NOW = Row(
    "Now",
    (
        NOT_OK,
        Panel(
            "Refused",
            "Share of the requests that reached admission and were refused as busy.",
            "percentunit",
            "operate/runbook.md#clients-get-503-or-529",
            {
                "refused": "sum(rate(cache_proxy_rejected_total[]))"
                " / sum(rate(cache_proxy_issued_total[]))"
            },
            kind="stat",
            width=4,
            steps=((None, "green"), (0.1, "red")),
        ),
        Panel(
            "Instances out of service",
            "Instances that no request is sent to: ejected, asleep or paused.",
            "short",
            "operate/runbook.md",
            {
                "out": "count(cache_proxy_instance_healthy) - sum(cache_proxy_instance_healthy)",
            },
            kind="stat",
            width=4,
            steps=BAD,
        ),
        Panel(
            "Requests that wait",
            "All instances are busy and the requests are in the queue (--max-queue).",
            "short",
            "concepts/admission.md",
            {"wait": "sum(cache_proxy_queued_requests)"},
            kind="stat",
            width=4,
        ),
        Panel(
            "Panic",
            "1: more than half of the instances fail, so ejected ones are used too.",
            "short",
            "operate/runbook.md",
            {"panic": "max(cache_proxy_panic)"},
            kind="stat",
            width=4,
            steps=BAD,
        ),
        Panel(
            "Accounting drift",
            "Load counters minus the sum over live leases; anything but 0 is a defect.",
            "short",
            "operate/runbook.md",
            {"drift": "sum(cache_proxy_accounting_drift)"},
            kind="stat",
            width=4,
            least=None,
            steps=((None, "red"), (0, "green"), (1, "red")),
        ),
    ),
)
INSTANCES = Row(
    "Which instance",
    (
        Panel(
            "State of each instance",
            "As the proxy judges it; a frozen or doubted report is in the next panel.",
            "short",
            "concepts/health.md",
            {"{{upstream}}": "max by (upstream) (cache_proxy_breaker_state)"},
            kind="timeline",
            width=16,
            words=HEALTH,
        ),
        Panel(
            "What an instance says is not believed",
            "1 while its /metrics stay the same although it works, its usage disagrees with the"
            " others, a threshold has no effect, or its KV events say more than it reports.",
            "short",
            "operate/runbook.md#broken-and-where-it-is-seen",
            {
                "{{upstream}} frozen": "cache_proxy_engine_report_frozen",
                "{{upstream}} usage doubted": "cache_proxy_engine_usage_doubted",
                "{{upstream}} threshold without effect": "cache_proxy_threshold_without_effect",
                "{{upstream}} KV events not believed": "1 - cache_proxy_kv_events_believed",
            },
        ),
    ),
)
REQUESTS = Row(
    "Which requests",
    (
        Panel(
            "Finished, by outcome",
            "Outcomes other than ok are in the request log with their cause.",
            "reqps",
            "operate/reading-the-log.md",
            {"{{outcome}}": rate("cache_proxy_requests_total", "outcome")},
            kind="stack",
        ),
        REFUSED,
        Panel(
            "Retries, by reason",
            "Sent again to another instance, before the client had a byte.",
            "reqps",
            "concepts/failures.md",
            {
                "{{reason}}": rate("cache_proxy_upstream_retries_total", "reason"),
                "stale connection": rate("cache_proxy_upstream_replays_total"),
                "refused by the budget": rate("cache_proxy_retry_budget_refused_total"),
                "failed wherever they ran": rate("cache_proxy_poison_requests_total"),
            },
            kind="stack",
        ),
        Panel(
            "Clients that left early, by phase",
            "The connection closed before the answer was whole.",
            "reqps",
            "concepts/failures.md",
            {"{{phase}}": rate("cache_proxy_client_disconnects_total", "phase")},
            kind="stack",
        ),
        Panel(
            "Malformed requests, by reason",
            "Refused at the connection; none of them was forwarded.",
            "reqps",
            "concepts/clients.md",
            {"{{reason}}": rate("cache_proxy_client_errors_total", "reason")},
            kind="stack",
        ),
        Panel(
            "Denied, by who asked",
            "No key, no admin token, or a wrong one.",
            "reqps",
            "operate/security.md",
            {"{{who}}": rate("cache_proxy_denied_total", "who")},
        ),
    ),
)
AROUND = Row(
    "Around the proxy",
    (
        Panel(
            "Configuration reloads, by result",
            "SIGHUP, or a changed --config file; /health has what was refused.",
            "short",
            "operate/runbook.md",
            {"{{result}}": "sum by (result) (increase(cache_proxy_config_reloads_total[]))"},
            width=6,
        ),
        Panel(
            "Log lines and traces dropped",
            "Lines: queue or disk full. Requests without spans: the collector does not take them.",
            "short",
            "operate/reading-the-log.md",
            {
                "lines": rate("cache_proxy_request_log_dropped_total"),
                "requests without spans": rate("cache_proxy_traces_dropped_total"),
            },
            width=6,
        ),
        Panel(
            "Event loop lag",
            "Past 50 ms everything waits; the board of the proxy has CPU and memory.",
            "s",
            "operate/runbook.md#first-tokens-are-slow",
            quantiles("cache_proxy_loop_lag_seconds", of=(0.5, 0.99)),
            width=6,
        ),
        Panel(
            "Discovery: age, addresses refused",
            "With --discover: time since each source last told its instances, and addresses that"
            " it tells and the proxy does not use.",
            "short",
            "operate/runbook.md#engines-are-not-found",
            {
                "{{source}} age, s": "max by (source) (cache_proxy_discovery_age_seconds)",
                "{{source}} refused": "sum by (source)"
                " (increase(cache_proxy_discovery_refused_total[]))",
            },
            width=6,
        ),
    ),
)
BOARD = Board(
    "wrong",
    "cache-proxy-wrong",
    "cache-proxy: what is wrong",
    "Open this first: what fails, where, and which page says what to do.",
    (NOW, INSTANCES, REQUESTS, AROUND),
)
