"""The periodic tasks: health, engine reports, models, loop lag. Each ends with its TaskGroup."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import orjson
import xxhash

from proxy.core.admission.memory import Level
from proxy.core.fleet.health import FAULT_KINDS
from proxy.core.types import FailureKind
from proxy.fleet.engine_metrics import parse
from proxy.net.timeouts import Limit
from proxy.net.upstream.client import LIST_BYTES, Upstream, model_cards
from proxy.net.upstream.response_check import look_at
from proxy.process.memory import give_back, resident_bytes
from proxy.protocol.errors import DEFECTS, UpstreamFailure
from proxy.state.proxy_state import ProxyState
from proxy.telemetry.log import Throttle

LAG_INTERVAL_S = 0.25
TICKS = 4
"""Looks in an interval at who is due: what begins to change is probed again at the next."""
TRIAL_S = 5.0
TRIAL_BYTES = 65536
ENGINE_ID_EVERY = 3
"""With so many probes the engine's id is asked again: a new one is another process."""
_JSON = b"Content-Type: application/json\r\n"
MEMORY_INTERVAL_S = 0.5
GIVE_BACK_S, CALM_S = 5.0, 2.0
"""So long between two returns of free memory to the kernel, and from a giant prompt to the next.

They take 0.1 ms; behind a burst of such prompts ten and more, if not all in one go.
"""
FIRST_LOOK_S = 10.0
_MEMORY_WORDS = {
    Level.NORMAL: "nothing is refused",
    Level.NO_KEEPALIVE: "connections are closed after each answer",
    Level.NO_HEAVY: "HEAVY requests are refused",
    Level.NOTHING: "all requests are refused",
}
MODELS_EVERY = 15
"""Models are asked again with every n-th probe: adapters come and go, but rarely."""
_log = logging.getLogger(__name__)


async def run(service: ProxyState) -> None:
    """All periodic work, until cancelled."""
    settings = service.settings
    tick_s = settings.health_interval / TICKS
    async with asyncio.TaskGroup() as group:
        group.create_task(service.aftermath.run(), name="aftermath")
        group.create_task(_lag(service), name="loop-lag")
        group.create_task(_memory(service), name="memory")
        group.create_task(_every(tick_s, service, probe, _is_probe_due), name="health")
        group.create_task(_every(tick_s, service, trial, _is_trial_due), name="trials")
        group.create_task(_every(settings.scrape_interval, service, scrape), name="scrape")


Job = Callable[[ProxyState, Upstream], Coroutine[Any, Any, None]]
IsDue = Callable[[ProxyState, Upstream], bool]


def _always(service: ProxyState, upstream: Upstream) -> bool:
    del service, upstream
    return True


async def _every(interval_s: float, service: ProxyState, job: Job, is_due: IsDue = _always) -> None:
    """Run a job for each instance that it is due for, at once and after each interval.

    An instance that is slow to answer holds up nobody else's: it is left out while its job runs.
    """
    running: set[Upstream] = set()
    throttle = Throttle()

    async def run_one(upstream: Upstream) -> None:
        try:
            await job(service, upstream)
        except DEFECTS:  # whatever an instance says, it ends neither the looks nor the proxy
            name, now_s = upstream.instance.name, asyncio.get_running_loop().time()
            if throttle.turn(name, now_s) is not None:
                _log.exception("instance %s: a look at it failed", name)
        finally:
            running.discard(upstream)

    async with asyncio.TaskGroup() as group:
        while True:
            for upstream in service.upstreams.values():
                if upstream not in running and is_due(service, upstream):
                    running.add(upstream)
                    group.create_task(run_one(upstream))
            await asyncio.sleep(interval_s)


def _is_probe_due(service: ProxyState, upstream: Upstream) -> bool:
    member = service.router.fleet.get(upstream.instance.name)
    return member is not None and member.health.probe_due(service.clock.now_s())


def _is_trial_due(service: ProxyState, upstream: Upstream) -> bool:
    member = service.router.fleet.get(upstream.instance.name)
    return member is not None and member.health.trial_due(service.clock.now_s())


async def look_round(service: ProxyState) -> bool:
    """Look at every instance before serving; whether one has answered, in time.

    Who replaces a process that serves must not know less of its fleet than where it is.
    """

    async def look(upstream: Upstream) -> None:
        await probe(service, upstream)
        await scrape(service, upstream)

    with suppress(TimeoutError):
        async with asyncio.timeout(FIRST_LOOK_S):
            while True:
                async with asyncio.TaskGroup() as group:
                    for upstream in service.upstreams.values():
                        group.create_task(look(upstream))
                if service.is_serving:
                    return True
                await asyncio.sleep(LAG_INTERVAL_S)
    return service.is_serving


async def probe(service: ProxyState, upstream: Upstream) -> None:
    """GET /health; then learn what the decision needs and does not know yet."""
    name, settings = upstream.instance.name, service.settings
    if service.has_drained(name):
        _log.info("instance %s is removed: its last request is over", name)
        await service.remove(name)
        return
    if (member := service.router.fleet.get(name)) is not None:
        u = random.random()
        member.health.probing(service.clock.now_s(), settings.health_interval, u)
    try:
        await upstream.get("/health", settings.health_timeout)
    except UpstreamFailure as failure:
        service.watcher.probe_failed(name, failure)
        return
    service.watcher.probe_answered(name)
    try:
        with Limit(settings.health_timeout):
            await _learn(service, upstream)
    except (UpstreamFailure, TimeoutError) as failure:
        _log.debug("instance %s: %s", name, failure)
    if upstream.has_new_engine:
        upstream.has_new_engine = False
        service.watcher.engine_changed(name)


async def _learn(service: ProxyState, upstream: Upstream) -> None:
    name, timeout_s = upstream.instance.name, service.settings.health_timeout
    member = service.router.fleet.get(name)
    if member is None:
        return
    if member.models is None or member.health.probes % MODELS_EVERY == 0:
        body = await upstream.get("/v1/models", timeout_s, limit=LIST_BYTES)
        names = [str(card["id"]) for card in model_cards(body)]
        service.router.fleet.observe_models(name, names)
    if service.connector.needs_engine_id:
        if member.health.probes % ENGINE_ID_EVERY == 0:
            await upstream.look_up_engine_id()
        await upstream.engine_id()


async def trial(service: ProxyState, upstream: Upstream) -> None:
    """One token, asked of an instance whose breaker is open: no client need try it.

    Any answer but a server error will do: engines with a key of their own refuse ours.
    """
    name, failure = upstream.instance.name, None
    member = service.router.fleet.get(name)
    models = sorted((member.models if member else None) or {service.settings.model or ""})
    body = orjson.dumps({"model": models[0], "prompt": "1", "max_tokens": 1})
    try:
        with Limit(TRIAL_S):
            reply = await upstream.send("POST", "/v1/completions", _JSON + service.ways.auth, body)
            try:
                await look_at(reply)
                await reply.read(TRIAL_BYTES)
            finally:
                reply.close()
    except TimeoutError:
        failure = UpstreamFailure(FailureKind.TIMEOUT, f"no token in {TRIAL_S:g} s")
    except UpstreamFailure as error:
        failure = error if error.kind in FAULT_KINDS else None
    service.watcher.trial_ended(name, failure)


async def scrape(service: ProxyState, upstream: Upstream) -> None:
    """GET /metrics; an engine without it is judged by our own counters alone."""
    try:
        limit_s = service.settings.health_timeout
        body = await upstream.get("/metrics", limit_s, limit=LIST_BYTES)
    except UpstreamFailure:
        return
    name, gate = upstream.instance.name, service.router.gate
    was_frozen = gate.is_frozen(name)
    service.observe_stats(name, parse(body), xxhash.xxh3_64_intdigest(body))
    if gate.is_frozen(name) and not was_frozen:
        _log.warning("instance %s: its /metrics stay the same while it works: not believed", name)


async def _lag(service: ProxyState) -> None:
    """Of the loop; and a line about what a policy raised, which costs no request anything here."""
    loop, told = asyncio.get_running_loop(), None
    while True:
        due_s = loop.time() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        service.metrics.loop_lag.observe(max(0.0, loop.time() - due_s))
        if (mistake := service.router.mistake) != told:
            told = mistake
            _log.warning("the policy failed, requests are placed by load: %s", mistake)


async def _memory(service: ProxyState) -> None:
    """Measure now and then; give back what a burst or a giant prompt has left, first of all.

    Not while such prompts keep coming and there is room: each would have to get again
    what the one before it had, page by page.
    """
    state, loop = service.memory, asyncio.get_running_loop()
    gave_s = giant_s = -GIVE_BACK_S
    giants = service.giants
    while True:
        before = state.level
        level = state.observe(await asyncio.to_thread(resident_bytes))
        if service.giants != giants:
            giants, giant_s = service.giants, loop.time()
        is_calm = loop.time() - giant_s >= CALM_S
        if (is_calm or level is not Level.NORMAL) and loop.time() - gave_s >= GIVE_BACK_S:
            gave_s = loop.time()
            await asyncio.to_thread(give_back)
            level = state.observe(await asyncio.to_thread(resident_bytes))
        if level is not before:
            used, limit = state.used_bytes >> 20, (state.limit_bytes or 0) >> 20
            _log.warning("memory: %d of %d MiB: %s", used, limit, _MEMORY_WORDS[level])
        await asyncio.sleep(MEMORY_INTERVAL_S)
