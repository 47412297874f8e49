"""RouterConfig, the core's part of the options."""

from __future__ import annotations

from dataclasses import dataclass, field

from proxy.core.types import Thresholds


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Names and units are those of the command line."""

    prefill_throughput: float
    warm_threshold: int = 1500
    heavy_threshold: int = 8192
    placement: str = "affinity"
    offload_policy: str = "cost"
    offload_non_cached_tokens: int = 512
    shadow_policy: str | None = None
    kv_connector: str = "mooncake"
    kv_transfer_time_s: float = 0.5
    tpot_slo_s: float = 0.05
    prefill_timeout_s: float = 120.0
    kv_pin_timeout_s: float = 480.0
    hedge: bool = True
    session_ttl_s: float = 3600.0
    max_sessions: int = 100_000
    prefix_cache_bytes: int = 256 << 20
    max_num_batched_tokens: int = 8192
    slow_start_s: float = 30.0
    thresholds: Thresholds = field(default_factory=Thresholds)
