"""The options in force, and the values that the request path derives from them."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.config.options import Settings
from proxy.config.values import EventsAt
from proxy.core.connectors import CONNECTORS
from proxy.core.connectors.base import Connector
from proxy.core.routing.actions import LegCaps
from proxy.core.types import RouterConfig, Thresholds


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits on a client's body: bytes, and seconds until it is complete.

    `plans_moves`: streams may migrate; such a stream is asked for token ids.
    """

    bytes: int
    seconds: float
    plans_moves: bool = False


class OptionsInForce:
    """The options that hold now; a reload replaces all of them at once.

    `shows_route`: whether X-Cache-Proxy-* headers are sent; with cache salts they are not, since
    they would tell a tenant about other tenants' prompts. `events_at`: where KV events are, None
    where engines tell themselves.
    """

    __slots__ = ("body_limits", "connector", "events_at", "leg_caps", "settings", "shows_route")

    settings: Settings
    connector: Connector
    events_at: EventsAt | None
    leg_caps: LegCaps
    body_limits: BodyLimits
    shows_route: bool

    def __init__(self, settings: Settings) -> None:
        self.use(settings)

    def use(self, settings: Settings) -> None:
        """Replace the options."""
        self.settings = settings
        self.connector = CONNECTORS[settings.kv_connector]
        self.leg_caps = LegCaps(
            settings.ttft_timeout,
            settings.prefill_timeout,
            settings.transfer_timeout,
            settings.idle_timeout,
            settings.migration_limit,
            settings.answer_timeout or settings.total_timeout,
        )
        moves = settings.migration_limit > 0
        self.body_limits = BodyLimits(settings.max_body_bytes, settings.body_timeout, moves)
        told = settings.kv_events in ("auto", "off")
        self.events_at = None if told else EventsAt.parse(settings.kv_events)
        self.shows_route = settings.response_headers and settings.cache_salt_secret is None


INDEX_PART, SESSIONS_PART, SESSION_BYTES = 8, 16, 1024
"""Of a memory limit each of the two indexes of KV has so much at most, and the sessions: what they
have does not end by refusing requests."""


def router_config(settings: Settings, limit_bytes: int | None = None) -> RouterConfig:
    """RouterConfig of the options. `limit_bytes`: the process's memory limit."""
    index_bytes, sessions = int(settings.prefix_cache_bytes), settings.max_sessions
    if limit_bytes is not None:
        index_bytes = min(index_bytes, limit_bytes // INDEX_PART)
        sessions = min(sessions, max(1, limit_bytes // SESSIONS_PART // SESSION_BYTES))
    return RouterConfig(
        prefill_throughput=settings.prefill_throughput,
        warm_threshold=settings.warm_threshold,
        heavy_threshold=settings.heavy_threshold,
        placement=settings.placement,
        offload_policy=settings.offload_policy,
        shadow_policy=settings.shadow_policy,
        offload_non_cached_tokens=settings.offload_non_cached_tokens,
        kv_connector=settings.kv_connector,
        kv_transfer_time_s=settings.kv_transfer_time,
        ttft_slo_s=settings.ttft_slo,
        tpot_slo_s=settings.tpot_slo,
        late=settings.late,
        prefill_timeout_s=settings.prefill_timeout,
        kv_pin_timeout_s=settings.kv_pin_timeout,
        hedge=settings.hedge,
        session_ttl_s=settings.session_ttl,
        max_sessions=sessions,
        prefix_cache_bytes=index_bytes,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        slow_start_s=settings.slow_start,
        thresholds=Thresholds(
            settings.active_decode_blocks_threshold,
            settings.active_prefill_tokens_threshold,
            settings.active_prefill_tokens_threshold_frac,
        ),
    )
