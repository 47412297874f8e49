"""Which time limit a leg has now, by its option's name: the core's formulas over this process."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.routing import time_limits
from proxy.core.routing.route import Route
from proxy.state.proxy_state import Service
from proxy.telemetry.record import RequestRecord

LEAST_S = 1.0
"""What a repeated attempt may wait when the first ones have used up the time."""


@dataclass(slots=True)
class Wait:
    """`seconds`, and up to `cap_s` where nobody else could be asked. `option` says whose cap."""

    option: str
    seconds: float
    cap_s: float


def for_first_event(
    service: Service, record: RequestRecord, route: Route, *, offloaded: bool
) -> Wait:
    """The decode leg's limit. An answer in one piece comes when it is whole: that has the cap."""
    settings, latency = service.settings, service.router.latency
    cap_s = settings.ttft_timeout
    if record.retries and record.t_decided is not None:
        cap_s = max(min(LEAST_S, cap_s), cap_s - (service.clock.unix_now() - record.t_decided))
    if not record.stream:
        return Wait("ttft", cap_s, cap_s)
    if offloaded:
        now_s, most_s = service.clock.now_s(), min(settings.transfer_timeout, cap_s)
        seconds = time_limits.transfer_limit_s(latency, route, now_s, most_s)
        return Wait("transfer", seconds, seconds)
    return Wait("ttft", time_limits.first_token_limit_s(latency, route, cap_s), cap_s)


def for_prefill(service: Service, route: Route) -> Wait:
    """The prefill leg's limit."""
    settings = service.settings
    seconds = time_limits.prefill_limit_s(
        service.router.latency, route, settings.ttft_timeout, settings.prefill_timeout
    )
    return Wait("prefill", seconds, seconds)


def for_silence(service: Service, route: Route) -> float:
    """How long an answer that has begun may be silent, seconds."""
    router, now_s = service.router, service.clock.now_s()
    cap_s = service.settings.idle_timeout
    name = route.decode.name
    if router.fleet.get(name) is None:
        return cap_s
    return time_limits.idle_limit_s(router.latency, route, router.ledger.load(name), now_s, cap_s)
