"""Heat: how near is the limit, what is shed, what a sequence costs in watts."""

from tests.support.boards.drawing import Board, Panel, Row

HOT = "operate/gpu-heat.md"
LAWS = "concepts/thermal.md"
POWER = "sum by (upstream) (cache_proxy_gpu_power_watts)"
STREAMS = 'sum by (upstream) (cache_proxy_in_flight{phase="decode"})'
NEAR = Row(
    "How near is the limit",
    (
        Panel(
            "Headroom below the target",
            "Degrees that are left, by the hottest GPU and where it leads. Not hardware validated.",
            "celsius",
            HOT,
            {"{{upstream}}": "cache_proxy_thermal_headroom_celsius"},
            least=None,
        ),
        Panel(
            "State of thermal control",
            "Instances in each state.",
            "short",
            LAWS,
            {"{{state}}": "sum by (state) (cache_proxy_thermal_state)"},
            kind="stack",
        ),
        Panel(
            "Age of the readings, slowed GPUs",
            "Age of the oldest reading of an instance's GPUs; 1 while a GPU slows itself down for"
            " its heat.",
            "s",
            "operate/gpu-sensors.md",
            {
                "{{upstream}}": "cache_proxy_thermal_sensor_age_seconds",
                "{{upstream}} {{gpu}} slowed": "cache_proxy_gpu_slowed",
            },
        ),
    ),
)
SHED = Row(
    "What is shed",
    (
        Panel(
            "Requests in flight and their cap",
            "No line where there is no cap.",
            "short",
            LAWS,
            {
                "{{upstream}} running": "cache_proxy_thermal_running",
                "{{upstream}} cap": "cache_proxy_thermal_cap",
            },
        ),
        Panel(
            "Evictions, by policy and outcome",
            "moved: migrated; aborted: ended with an error event; skipped: waited for.",
            "short",
            LAWS,
            {
                "{{policy}} {{outcome}}": "sum by (policy, outcome)"
                " (increase(cache_proxy_thermal_evictions_total[]))"
            },
        ),
        Panel(
            "Changes of limits, and turns of the cap",
            "Flapping: more than six turns in ten minutes.",
            "short",
            HOT,
            {
                "{{action}} {{reason}}": "sum by (action, reason)"
                " (increase(cache_proxy_thermal_actions_total[]))",
                "{{upstream}} turns": "increase(cache_proxy_thermal_oscillations_total[])",
            },
        ),
    ),
)
WATTS = Row(
    "What a sequence costs",
    (
        Panel(
            "Watts per running sequence",
            "Power of an instance's GPUs per request that decodes there.",
            "watt",
            LAWS,
            {"{{upstream}}": f"{POWER} / ({STREAMS} > 0)"},
            width=12,
        ),
        Panel(
            "Watts of one more sequence",
            "As learned; 3.2 before anything is.",
            "watt",
            LAWS,
            {"{{upstream}}": "cache_proxy_thermal_watts_per_seq"},
            width=12,
        ),
    ),
)
BOARD = Board(
    "heat",
    "cache-proxy-heat",
    "cache-proxy: heat",
    "How near the GPUs are to their limit, and what is shed for it.",
    (NEAR, SHED, WATTS),
)
