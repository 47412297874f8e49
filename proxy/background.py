"""The periodic tasks: health, engine reports, models, loop lag. Each ends with its TaskGroup."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from proxy.errors import UpstreamFailure
from proxy.scrape import parse
from proxy.service import Service
from proxy.upstream import LIST_BYTES, Upstream, model_cards

LAG_INTERVAL_S = 0.25
MODELS_EVERY = 15
"""Models are asked again with every n-th probe: adapters come and go, but rarely."""
_log = logging.getLogger(__name__)


async def run(service: Service) -> None:
    """All periodic work, until cancelled."""
    settings = service.settings
    async with asyncio.TaskGroup() as group:
        group.create_task(_lag(service), name="loop-lag")
        group.create_task(_every(settings.health_interval, service, probe), name="health")
        group.create_task(_every(settings.scrape_interval, service, scrape), name="scrape")


Job = Callable[[Service, Upstream, int], Coroutine[Any, Any, None]]


async def _every(interval_s: float, service: Service, job: Job) -> None:
    """Run a job for each instance at once, then again after the interval."""
    rounds = 0
    while True:
        async with asyncio.TaskGroup() as group:
            for upstream in list(service.upstreams.values()):
                group.create_task(job(service, upstream, rounds))
        rounds += 1
        await asyncio.sleep(interval_s)


async def probe(service: Service, upstream: Upstream, rounds: int) -> None:
    """GET /health; then learn what the decision needs and does not know yet."""
    name = upstream.instance.name
    if service.has_drained(name):
        await service.remove(name)
        return
    try:
        await upstream.get("/health", service.settings.health_timeout)
    except UpstreamFailure as failure:
        service.failed(name, failure)
        return
    service.probed(name)
    try:
        await _learn(service, upstream, rounds)
    except UpstreamFailure as failure:
        _log.debug("instance %s: %s", name, failure)


async def _learn(service: Service, upstream: Upstream, rounds: int) -> None:
    member = service.router.fleet.get(upstream.instance.name)
    if member is None:
        return
    if member.models is None or rounds % MODELS_EVERY == 0:
        limit_s = service.settings.health_timeout
        body = await upstream.get("/v1/models", limit_s, limit=LIST_BYTES)
        names = [str(card["id"]) for card in model_cards(body)]
        service.router.fleet.observe_models(upstream.instance.name, names)
    if service.connector.needs_engine_id:
        await upstream.engine_id()


async def scrape(service: Service, upstream: Upstream, rounds: int) -> None:
    """GET /metrics; an engine without it is judged by our own counters alone."""
    del rounds
    try:
        limit_s = service.settings.health_timeout
        body = await upstream.get("/metrics", limit_s, limit=LIST_BYTES)
    except UpstreamFailure:
        return
    service.observe_stats(upstream.instance.name, parse(body))


async def _lag(service: Service) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        service.metrics.loop_lag.observe(max(0.0, loop.time() - due_s))
