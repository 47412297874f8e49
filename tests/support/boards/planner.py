"""Planner: how many replicas are there and wanted, from which prediction, and why."""

from tests.support.boards.drawing import Board, Panel, Row, rate

PAGE = "operate/runbook.md#the-planner"


def _panel(
    title: str, text: str, queries: dict[str, str], unit: str = "short", width: int = 6
) -> Panel:
    return Panel(title, text, unit, PAGE, queries, width=width)


REPLICAS = Row(
    "How many replicas",
    (
        _panel(
            "Replicas",
            "Wanted, ready, the lower bound, and what a shared budget grants.",
            {
                f"{{{{instance}}}} {{{{component}}}} {word}": f"cache_planner_{name}_replicas"
                for word, name in (
                    ("wanted", "target"),
                    ("ready", "ready"),
                    ("lower bound", "lower_bound"),
                    ("granted of a shared budget", "granted"),
                )
            },
            width=12,
        ),
        _panel(
            "On the way, and never come",
            "Ordered and not ready yet; ordered and never come.",
            {
                "{{instance}} {{component}} pending": "cache_planner_pending_replicas",
                "{{instance}} {{component}} absent": "cache_planner_absent_replicas",
            },
        ),
        _panel(
            "GPU hours per hour",
            "What the fleet costs.",
            {"GPUs paid for": "rate(cache_planner_gpu_hours_total[]) * 3600"},
        ),
    ),
)
LOAD = Row(
    "How much load, and how much is expected",
    (
        _panel(
            "Requests per window",
            "Observed, and predicted for the next window.",
            {
                "observed": 'cache_planner_observed{figure="requests"}',
                "predicted": 'cache_planner_predicted{figure="requests"}',
            },
            width=8,
        ),
        _panel(
            "Prompt and answer tokens",
            "Per request, observed and predicted.",
            {
                "{{figure}} observed": 'cache_planner_observed{figure=~"isl_tokens|osl_tokens"}',
                "{{figure}} predicted": 'cache_planner_predicted{figure=~"isl_tokens|osl_tokens"}',
            },
            width=8,
        ),
        _panel(
            "Capacity of one replica",
            "Requests per second that one replica carries.",
            {"{{instance}} {{component}}": "cache_planner_capacity_requests_per_second"},
            "reqps",
            4,
        ),
        _panel(
            "Needed replicas, strategy reserve",
            "By part of the need.",
            {"{{instance}} {{component}} {{part}}": "cache_planner_need_replicas"},
            width=4,
        ),
        _panel(
            "TTFT of a request now",
            "Estimated for an average request.",
            {"{{upstream}}": "cache_planner_estimated_ttft_seconds"},
            "s",
            12,
        ),
        _panel(
            "Time per token now",
            "Estimated for an average request.",
            {"{{upstream}}": "cache_planner_estimated_itl_seconds"},
            "s",
            12,
        ),
    ),
)
WHY = Row(
    "What was decided, and does it work",
    (
        _panel(
            "Load scaling",
            "The decision of the last tick.",
            {"{{decision}}": "max by (decision) (cache_planner_load_decision) > 0"},
        ),
        _panel(
            "Throughput scaling",
            "The decision of the last tick.",
            {"{{decision}}": "max by (decision) (cache_planner_throughput_decision) > 0"},
        ),
        _panel(
            "Ticks by outcome",
            "A tick that fails changes nothing.",
            {"{{outcome}}": rate("cache_planner_ticks_total", "outcome")},
            "ops",
        ),
        _panel(
            "Scaler errors",
            "Orders that were not taken.",
            {"{{scaler}} {{error}}": rate("cache_planner_scaler_errors_total", "scaler, error")},
            "ops",
        ),
        _panel(
            "Tick p99",
            "Seconds that a tick takes.",
            {
                "p99": "histogram_quantile(0.99, sum by (le)"
                " (rate(cache_planner_tick_seconds_bucket[])))"
            },
            "s",
        ),
        _panel(
            "Age of sources",
            "Time since each source last answered.",
            {"{{source}}": "cache_planner_source_age_seconds"},
            "s",
        ),
        _panel(
            "From order to ready",
            "Learned from the orders so far.",
            {"p{{quantile}}": "cache_planner_start_up_seconds"},
            "s",
        ),
        _panel(
            "Advisory, and engines that are not read",
            "1: nothing is carried out.",
            {
                "advisory": "cache_planner_advisory",
                "engines not read": "cache_planner_unread_engines",
            },
        ),
        _panel(
            "Plugins",
            "The state of each plugin.",
            {"{{plugin}}: {{state}}": "cache_planner_plugin_state > 0"},
            width=24,
        ),
    ),
)
BOARD = Board(
    "planner",
    "cache-planner",
    "cache-proxy: planner",
    "Replicas, predictions and decisions of cache-planner.",
    (REPLICAS, LOAD, WHY),
    variables=(),
    events=(),
)
