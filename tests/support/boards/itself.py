"""The proxy itself: its processor, memory, connections, and the other replicas."""

from tests.support.boards.drawing import Board, Panel, Row, quantiles, rate

SLOW = "operate/runbook.md#first-tokens-are-slow"
LIMITS = "operate/tuning.md"
ALONE = "operate/runbook.md#a-proxy-is-alone"
COST = Row(
    "What it costs",
    (
        Panel(
            "CPU time per second",
            "1 is one core: the event loop is at its limit; threads (logs) come on top.",
            "percentunit",
            SLOW,
            {
                "{{instance}}": "rate(process_cpu_seconds_total[])"
                " and on (job, instance) cache_proxy_live_leases"
            },
        ),
        Panel(
            "Event loop lag",
            "How late a turn of the event loop is.",
            "s",
            SLOW,
            quantiles("cache_proxy_loop_lag_seconds"),
        ),
        Panel(
            "Time since the start",
            "Falls to zero with a restart, a hot one too.",
            "s",
            "concepts/hot-restart.md",
            {
                "{{instance}}": "(time() - process_start_time_seconds)"
                " and on (job, instance) cache_proxy_live_leases"
            },
        ),
    ),
)
MEMORY = Row(
    "What it holds",
    (
        Panel(
            "Memory",
            "Resident, and the limit that is kept (--max-memory-bytes); no line without a limit.",
            "bytes",
            LIMITS,
            {
                "{{instance}} used": "cache_proxy_memory_used_bytes",
                "{{instance}} limit": "cache_proxy_memory_limit_bytes > 0",
            },
        ),
        Panel(
            "Memory level",
            "0 normal, 1 no keep-alive, 2 no HEAVY request, 3 no request.",
            "short",
            LIMITS,
            {"{{instance}}": "cache_proxy_memory_level"},
            steps=((None, "green"), (1, "yellow"), (2, "red")),
        ),
        Panel(
            "Bodies in memory",
            "Of requests in the queue (--max-queue-bytes), and of all that have no answer yet.",
            "bytes",
            LIMITS,
            {
                "{{instance}} queued": "cache_proxy_queued_bytes",
                "{{instance}} without an answer": "cache_proxy_held_bytes",
            },
        ),
        Panel(
            "Client connections",
            "Open ones, those refused above --max-connections, and TLS handshakes that failed.",
            "short",
            LIMITS,
            {
                "{{instance}} open": "cache_proxy_open_connections",
                "{{instance}} refused per s": "rate(cache_proxy_connections_refused_total[])",
                "TLS handshake {{reason}} per s": rate(
                    "cache_proxy_tls_handshakes_failed_total", "reason"
                ),
            },
        ),
        Panel(
            "Sessions",
            "Sessions with a home.",
            "short",
            "concepts/sessions.md",
            {"{{instance}}": "cache_proxy_sessions"},
        ),
        Panel(
            "Prefix blocks",
            "Blocks in the index of what is cached where.",
            "short",
            "concepts/hits.md",
            {"{{instance}}": "cache_proxy_prefix_blocks"},
        ),
    ),
)
REPLICAS = Row(
    "Replicas (--share)",
    (
        Panel(
            "Sharing with other replicas",
            "State: 0 alone, 1 joining, 2 shared. Lag: until the last own batch came back.",
            "short",
            ALONE,
            {
                "{{instance}} state": "cache_proxy_share_state",
                "{{instance}} other replicas": "cache_proxy_share_replicas",
                "{{instance}} lag, s": "cache_proxy_share_lag_seconds",
            },
        ),
        Panel(
            "Batches by what became of them",
            "torn, form, range: ignored. rows_only: sealed by another key. unheard: too many"
            " others. Resets: the log was emptied, or is another server's.",
            "short",
            ALONE,
            {
                "{{result}}": rate("cache_proxy_share_batches_total", "result"),
                "{{instance}} resets": "increase(cache_proxy_share_resets_total[])",
            },
        ),
        Panel(
            "Tokens of other replicas",
            "As decisions see them beside the own ones.",
            "short",
            ALONE,
            {"{{instance}} {{upstream}}": "cache_proxy_foreign_tokens"},
        ),
    ),
    is_closed=True,
)
BOARD = Board(
    "proxy",
    "cache-proxy-itself",
    "cache-proxy: the proxy itself",
    "Processor, memory, connections, and the other replicas.",
    (COST, MEMORY, REPLICAS),
)
