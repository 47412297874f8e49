"""KV and offload: where is it computed, what is cached, are the predictions right."""

from tests.support.boards.drawing import Board, Panel, Row, quantiles, rate

WHY = "operate/no-offload.md"
HITS = "concepts/hits.md"
EVENTS = "concepts/kv-events.md"
MOVED = "concepts/migration.md"
TIMES = (0.1, 0.5, 0.9)
QUERIES = "rate(cache_proxy_prefix_cache_queries_total[])"
LOCAL = "rate(cache_proxy_prefix_cache_hits_total[])"
EXTERNAL = "rate(cache_proxy_external_prefix_cache_hits_total[])"
PREDICTED = rate("cache_proxy_hit_tokens_total")


def _compared(which: str) -> str:
    counted = rate(f'cache_proxy_compared_hit_tokens_total{{which="{which}"}}')
    return f"{counted} / {rate('cache_proxy_compared_prompt_tokens_total')}"


OFFLOAD = Row(
    "Is offload helping",
    (
        Panel(
            "Offloaded, by reason",
            "Prefill on a peer, KV handed over.",
            "reqps",
            "concepts/offload.md",
            {
                "{{reason}}": rate(
                    'cache_proxy_offload_decisions_total{decision="offload"}', "reason"
                )
            },
            kind="stack",
        ),
        Panel(
            "Colocated, by reason",
            "Prefill where the answer is decoded, and why.",
            "reqps",
            WHY,
            {
                "{{reason}}": rate(
                    'cache_proxy_offload_decisions_total{decision="colocate"}', "reason"
                )
            },
            kind="stack",
        ),
        Panel(
            "Fallbacks by reason, hedges by winner, releases",
            "Offloads that failed before the client's first byte and were computed on the decode"
            " server; late prefill legs that the decode server computed too; KV on a prefill"
            " server that will not be fetched, by result.",
            "reqps",
            WHY,
            {
                "{{reason}}": rate("cache_proxy_offload_fallbacks_total", "reason"),
                "KV never arrived": rate("cache_proxy_offload_kv_misses_total"),
                "hedged, won by {{winner}}": rate("cache_proxy_hedges_total", "winner"),
                "KV {{result}}": rate("cache_proxy_kv_releases_total", "result"),
            },
            kind="stack",
        ),
        Panel(
            "Prefill leg",
            "Seconds on the peer that prefills.",
            "s",
            WHY,
            quantiles("cache_proxy_prefill_leg_seconds"),
            width=6,
        ),
        Panel(
            "KV transfer",
            "Decode leg sent to its first token, after an offload's prefill.",
            "s",
            WHY,
            quantiles("cache_proxy_kv_transfer_seconds"),
            width=6,
        ),
        Panel(
            "KV transfer p90, by pair",
            "A pair that is slower than the others has a slow link.",
            "s",
            WHY,
            {
                "{{prefill}} to {{decode}}": "histogram_quantile(0.9, sum by (le, prefill, decode)"
                " (rate(cache_proxy_kv_transfer_seconds_bucket[])))"
            },
            width=6,
        ),
        Panel(
            "Instances that can prefill for others",
            "By the options, and those whose KV engine is known.",
            "short",
            WHY,
            {
                "may": "sum(cache_proxy_kv_peers_configured)",
                "can": "sum(cache_proxy_kv_peers_known)",
            },
            width=6,
        ),
    ),
)
CACHED = Row(
    "What is cached, and is it used",
    (
        Panel(
            "Hit ratio: reachable, chosen, reported",
            "Of the same prompt tokens: cached on the best instance of the decision and on the"
            " chosen one, as predicted, and as the engine reported. Reachable above chosen: the"
            " price preferred a shorter queue. Reported below chosen: the prediction is too high."
            " Without offloads, migrated streams, failures, and engines that report no"
            " cached_tokens.",
            "percentunit",
            HITS,
            {which: _compared(which) for which in ("reachable", "chosen", "reported")},
            most=1,
        ),
        Panel(
            "Hit ratio as predicted",
            "Share of the prompt tokens that the proxy believed cached where it sent them.",
            "percentunit",
            HITS,
            {"predicted": f"{PREDICTED} / ({PREDICTED} + {rate('cache_proxy_new_tokens_total')})"},
        ),
        Panel(
            "Hit ratio as the engines report",
            "Prompt tokens found in the own cache, brought by a peer or a shared store, and both;"
            " per token looked up. Of engines that do not count what comes from elsewhere, the own"
            " cache alone.",
            "percentunit",
            HITS,
            {
                "local": f"sum({LOCAL}) / sum({QUERIES})",
                "external": f"sum({EXTERNAL}) / sum({QUERIES})",
                "combined": f"(sum({LOCAL}) + (sum({EXTERNAL}) or vector(0))) / sum({QUERIES})",
            },
            most=1,
        ),
        Panel(
            "Combined hit ratio, by instance",
            "Local and external hits per token looked up.",
            "percentunit",
            HITS,
            {
                "{{upstream}}": f"(sum by (upstream) ({LOCAL}) + sum by (upstream) ({EXTERNAL}))"
                f" / sum by (upstream) ({QUERIES})"
            },
            most=1,
        ),
        Panel(
            "Hit ratios since the start of the engines",
            "The same three ratios over all that an engine has served.",
            "percentunit",
            HITS,
            {
                "{{upstream}} local": "cache_proxy_prefix_cache_hit_ratio",
                "{{upstream}} external": "cache_proxy_external_prefix_cache_hit_ratio",
                "{{upstream}} combined": "cache_proxy_combined_prefix_cache_hit_ratio",
            },
            most=1,
        ),
        Panel(
            "KV of sessions",
            "Of running sessions, and of idle ones times their chance to return.",
            "short",
            "concepts/sessions.md",
            {"{{upstream}}": "cache_proxy_live_kv_tokens"},
        ),
    ),
)
PREDICTIONS = Row(
    "Are the predictions right",
    (
        Panel(
            "Prefix error",
            "Engine's cached tokens minus predicted hit tokens, colocated requests.",
            "short",
            HITS,
            quantiles("cache_proxy_prefix_hit_prediction_error_tokens", of=TIMES),
            least=None,
        ),
        Panel(
            "TTFT error",
            "Realised minus predicted.",
            "s",
            "concepts/decisions.md",
            quantiles("cache_proxy_predicted_ttft_error_seconds", of=TIMES),
            least=None,
        ),
        Panel(
            "TTFT, predicted / measured",
            "10th, 50th and 90th percentile of the last answers; queued: other prompts were before"
            " them.",
            "short",
            "concepts/decisions.md",
            {
                "{{route_class}} queued {{queued}} {{quantile}}": "avg by"
                " (route_class, queued, quantile) (cache_proxy_ttft_prediction_ratio)"
            },
        ),
        Panel(
            "Prediction error, relative",
            "Realised minus predicted, per predicted: first tokens, prefill legs, KV transfers.",
            "percentunit",
            "concepts/decisions.md",
            quantiles("cache_proxy_prediction_error_ratio", "what", (0.5, 0.9)),
            least=None,
        ),
        Panel(
            "Learned prefill throughput, tokens/s",
            "Of a prompt of 8,192 tokens without a hit.",
            "short",
            "concepts/decisions.md",
            {"{{upstream}}": "cache_proxy_learned_prefill_tps"},
        ),
        Panel(
            "Shadow policy agrees",
            "What --shadow-policy would have done, against what was done.",
            "reqps",
            "concepts/decisions.md",
            {"{{policy}} {{agrees}}": rate("cache_proxy_shadow_decisions_total", "policy, agrees")},
        ),
    ),
)


def _counted(name: str) -> str:
    return f"increase(cache_proxy_kv_event_{name}_total[])"


def _flow(name: str) -> str:
    return f"rate(cache_proxy_kv_event_{name}_total[])"


KV_EVENTS = Row(
    "KV events (--kv-events)",
    (
        Panel(
            "KV events arrive, caches known",
            "1 while an engine's events arrive, and while all of its cached blocks are known.",
            "short",
            EVENTS,
            {
                "{{upstream}} {{rank}} come": "cache_proxy_kv_events_live",
                "{{upstream}} {{rank}} known": "cache_proxy_kv_events_whole",
            },
        ),
        Panel(
            "Age and lag of KV events",
            "Since the last batch, and from a batch's making to its arrival (two clocks).",
            "s",
            EVENTS,
            {
                "{{upstream}} {{rank}} age": "cache_proxy_kv_events_age_seconds",
                "{{upstream}} {{rank}} lag": "cache_proxy_kv_events_lag_seconds",
            },
            least=None,
        ),
        Panel(
            "Cached blocks by KV events",
            "Blocks in each engine's prefix cache.",
            "short",
            EVENTS,
            {"{{upstream}} {{rank}}": "cache_proxy_kv_event_blocks"},
        ),
        Panel(
            "Blocks stored and evicted per second",
            "By the engines' KV events.",
            "short",
            EVENTS,
            {
                "{{upstream}} {{rank}} stored": _flow("stored_blocks"),
                "{{upstream}} {{rank}} evicted": _flow("removed_blocks"),
            },
        ),
        Panel(
            "KV event batches per second",
            "Taken in, unreadable, and events that say nothing of the prefix cache.",
            "short",
            EVENTS,
            {
                "{{upstream}} {{rank}} batches": _flow("batches"),
                "{{upstream}} {{rank}} unreadable": _flow("malformed"),
                "{{upstream}} {{rank}} skipped": _flow("skipped"),
            },
        ),
        Panel(
            "KV events missed",
            "Gaps in the sequence numbers, gaps that no replay closed, and restarts of engines.",
            "short",
            EVENTS,
            {
                "{{upstream}} {{rank}} gaps": _counted("gaps"),
                "{{upstream}} {{rank}} lost": _counted("lost_gaps"),
                "{{upstream}} {{rank}} restarts": _counted("restarts"),
            },
        ),
    ),
    is_closed=True,
)
MIGRATION = Row(
    "Migration (--migration-limit, heat)",
    (
        Panel(
            "Streams that migrated, by cause",
            "They went on at another instance.",
            "reqps",
            MOVED,
            {"{{reason}}": rate('cache_proxy_migrations_total{outcome="moved"}', "reason")},
            kind="stack",
        ),
        Panel(
            "Streams that did not migrate, by reason",
            "They ended with an error event.",
            "reqps",
            MOVED,
            {"{{outcome}}": rate('cache_proxy_migrations_total{outcome!="moved"}', "outcome")},
            kind="stack",
        ),
        Panel(
            "From a stream's loss to another instance's first event",
            "From the loss or the eviction on.",
            "s",
            MOVED,
            {
                f"{legend}, evicted {{{{evicted}}}}": expression
                for legend, expression in (
                    (key.split()[-1], value)
                    for key, value in quantiles("cache_proxy_migration_seconds", "evicted").items()
                )
            },
        ),
    ),
    is_closed=True,
)
BOARD = Board(
    "offload",
    "cache-proxy-offload",
    "cache-proxy: KV and offload",
    "Is offload helping, what is cached, are the predictions right.",
    (OFFLOAD, CACHED, PREDICTIONS, KV_EVENTS, MIGRATION),
)
