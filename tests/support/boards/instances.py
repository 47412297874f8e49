"""Instances: which one is hot, full or slow, by the proxy's counters and by the engines' own."""

from tests.support.boards.drawing import Board, Panel, Row
from tests.support.boards.wrong import HEALTH

LOAD = "operate/tuning.md"
FULL = "concepts/admission.md"
GPUS = "operate/gpu-sensors.md"
VLLM = "deploy/vllm.md"


def _spread(measure: str, of: str) -> str:
    return f"{measure}({of}) / avg({of})"


HEALTHY = "sum by (upstream) (cache_proxy_ongoing_tokens and cache_proxy_instance_healthy == 1)"
WORKING = "avg by (upstream) (cache_proxy_gpu_utilization_ratio)"
TABLE = Row(
    "Every instance",
    (
        Panel(
            "Instances now",
            "A row per instance, over all proxies that are picked.",
            "short",
            "concepts/health.md",
            {
                "state": "max by (upstream) (cache_proxy_breaker_state)",
                "in flight": "sum by (upstream) (cache_proxy_in_flight)",
                "ongoing tokens": "sum by (upstream) (cache_proxy_ongoing_tokens)",
                "prefill tokens": "sum by (upstream) (cache_proxy_ongoing_prefill_tokens)",
                "decode tokens": "sum by (upstream) (cache_proxy_ongoing_decode_tokens)",
                "inbound tokens": "sum by (upstream) (cache_proxy_ongoing_inbound_tokens)",
                "KV in use": "max by (upstream) (cache_proxy_kv_cache_usage_ratio)",
                "KV cache, tokens": "max by (upstream) (cache_proxy_kv_cache_assumed_tokens)",
                "prefill, tokens/s": "avg by (upstream) (cache_proxy_learned_prefill_tps)",
                "hit ratio": "max by (upstream) (cache_proxy_combined_prefix_cache_hit_ratio)",
            },
            kind="table",
            width=24,
            least=None,
            words=HEALTH,
        ),
        Panel(
            "State",
            "As the proxy judges it.",
            "short",
            "concepts/health.md",
            {"{{upstream}}": "max by (upstream) (cache_proxy_breaker_state)"},
            kind="timeline",
            width=24,
            words=HEALTH,
        ),
        Panel(
            "May be chosen",
            "1 while requests are sent to it.",
            "short",
            "concepts/health.md",
            {"{{upstream}}": "cache_proxy_instance_healthy"},
            width=12,
        ),
        Panel(
            "Imbalance of ongoing tokens",
            "Tokens on the fullest and the emptiest healthy instance per mean of all; 1 is even.",
            "short",
            LOAD,
            {"fullest": _spread("max", HEALTHY), "emptiest": _spread("min", HEALTHY)},
            width=12,
        ),
    ),
)
TOKENS = Row(
    "Tokens by the proxy's own counters",
    (
        Panel(
            "Ongoing",
            "Prefill, inbound and decode tokens together.",
            "short",
            LOAD,
            {"{{upstream}}": "cache_proxy_ongoing_tokens"},
        ),
        Panel(
            "Prefill",
            "New tokens whose first token is not out; a threshold is compared with those per"
            " data-parallel rank.",
            "short",
            LOAD,
            {
                "{{upstream}}": "cache_proxy_ongoing_prefill_tokens",
                "{{upstream}} per rank": "cache_proxy_ongoing_prefill_tokens"
                " / cache_proxy_engine_ranks",
                "threshold {{model}}": 'cache_proxy_busy_threshold{check=~"prefill_tokens'
                '|prefill_frac"}',
            },
        ),
        Panel(
            "Decode",
            "Context of running streams, and the size of the KV cache.",
            "short",
            LOAD,
            {
                "{{upstream}}": "cache_proxy_ongoing_decode_tokens",
                "{{upstream}} KV cache": "cache_proxy_kv_cache_size_tokens",
                "KV cache of {{upstream}} as assumed": "cache_proxy_kv_cache_assumed_tokens",
            },
        ),
        Panel(
            "Inbound",
            "KV on its way to the instance.",
            "short",
            LOAD,
            {"{{upstream}}": "cache_proxy_ongoing_inbound_tokens"},
            width=6,
        ),
        Panel(
            "Pinned",
            "KV held for a peer that has not pulled it yet.",
            "short",
            LOAD,
            {"{{upstream}}": "cache_proxy_pinned_tokens"},
            width=6,
        ),
        Panel(
            "Requests by phase",
            "Of all instances that are picked.",
            "short",
            LOAD,
            {"{{phase}}": "sum by (phase) (cache_proxy_in_flight)"},
            kind="stack",
            width=6,
        ),
        Panel(
            "KV cache in use",
            "As the engine reports (fullest rank), what a threshold is compared with, and the"
            " thresholds.",
            "percentunit",
            FULL,
            {
                "{{upstream}}": "cache_proxy_kv_cache_usage_ratio",
                "{{upstream}} as compared": "max by (upstream) (cache_proxy_kv_blocks_ratio)",
                "threshold {{model}}": 'cache_proxy_busy_threshold{check="decode_blocks"}',
            },
            width=6,
        ),
    ),
)


def _p90(name: str) -> str:
    return f"histogram_quantile(0.9, sum by (le, instance) (rate(vllm:{name}_bucket[])))"


ENGINES = Row(
    "What the engines say (vllm:*, where Prometheus scrapes them)",
    (
        Panel(
            "Requests in the batch and waiting",
            "The engine's own queue; compare it with the proxy's counters.",
            "short",
            VLLM,
            {
                "{{instance}} running": "vllm:num_requests_running",
                "{{instance}} waiting": "vllm:num_requests_waiting",
            },
        ),
        Panel(
            "KV cache in use",
            "By the engine; preemptions begin when it is full.",
            "percentunit",
            VLLM,
            {"{{instance}}": "vllm:kv_cache_usage_perc"},
            most=1,
        ),
        Panel(
            "Preemptions per second",
            "Requests that lost their KV to others.",
            "short",
            VLLM,
            {"{{instance}}": "rate(vllm:num_preemptions_total[])"},
        ),
        Panel(
            "TTFT p90 within the engine",
            "Without the proxy's queue and the network.",
            "s",
            VLLM,
            {"{{instance}}": _p90("time_to_first_token_seconds")},
        ),
        Panel(
            "Wait in the engine's queue p90",
            "Arrival to first scheduling.",
            "s",
            VLLM,
            {"{{instance}}": _p90("request_queue_time_seconds")},
        ),
        Panel(
            "Tokens generated per second",
            "Of each engine.",
            "short",
            VLLM,
            {"{{instance}}": "rate(vllm:generation_tokens_total[])"},
        ),
    ),
    is_closed=True,
)


def _gpu(title: str, text: str, unit: str, name: str, most: float | None = None) -> Panel:
    queries = {"{{upstream}} {{gpu}}": f"cache_proxy_gpu_{name}"}
    return Panel(title, text, unit, GPUS, queries, most=most)


CARDS = Row(
    "GPUs (where sensors are named)",
    (
        Panel(
            "Temperature",
            "Chips, and their memory where it is told.",
            "celsius",
            GPUS,
            {
                "{{upstream}} {{gpu}}": "cache_proxy_gpu_temperature_celsius",
                "{{upstream}} {{gpu}} memory": "cache_proxy_gpu_memory_temperature_celsius",
            },
            least=None,
        ),
        _gpu("Power", "Power draw of each GPU.", "watt", "power_watts"),
        _gpu(
            "GPU utilisation",
            "Part of the time in which a GPU worked.",
            "percentunit",
            "utilization_ratio",
            1,
        ),
        Panel(
            "Imbalance of GPU utilisation",
            "Instances whose GPUs work most and least, per mean of all; 1 is even.",
            "short",
            GPUS,
            {"most": _spread("max", WORKING), "least": _spread("min", WORKING)},
        ),
        _gpu("GPU memory used", "Weights, KV cache and all else.", "bytes", "memory_used_bytes"),
        _gpu(
            "Sent over PCIe",
            "By each GPU, where DCGM's profiling counters are exported.",
            "Bps",
            "pcie_tx_bytes_per_second",
        ),
    ),
    is_closed=True,
)
BOARD = Board(
    "instances",
    "cache-proxy-instances",
    "cache-proxy: instances",
    "Which instance is hot, full or slow.",
    (TABLE, TOKENS, ENGINES, CARDS),
)
