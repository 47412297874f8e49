"""The periodic tasks: probes, trials, engine reports, models, loop lag, memory."""

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
"""Times per health interval at which instances are checked for a due probe: an instance whose
state begins to change is probed again at the next one."""
TRIAL_S = 5.0
TRIAL_BYTES = 65536
ENGINE_ID_EVERY = 3
"""The engine's id is asked again at every n-th probe: another id is another process."""
_JSON = b"Content-Type: application/json\r\n"
MEMORY_INTERVAL_S = 0.5
GIVE_BACK_S, CALM_S = 5.0, 2.0
"""Free memory is returned to the kernel at most every GIVE_BACK_S, and not within CALM_S of a giant
prompt. A return takes 0.1 ms, after a burst of giant prompts 10 ms or more.
"""
FIRST_LOOK_S = 10.0
_MEMORY_WORDS = {
    Level.NORMAL: "nothing is refused",
    Level.NO_KEEPALIVE: "connections are closed after each answer",
    Level.NO_HEAVY: "HEAVY requests are refused",
    Level.NOTHING: "all requests are refused",
}
MODELS_EVERY = 15
"""Models are asked again at every n-th probe: adapters change rarely."""
_log = logging.getLogger(__name__)


async def run(state: ProxyState) -> None:
    """Run all periodic tasks until cancelled."""
    settings = state.settings
    tick_s = settings.health_interval / TICKS
    async with asyncio.TaskGroup() as group:
        group.create_task(state.aftermath.run(), name="aftermath")
        group.create_task(_lag(state), name="loop-lag")
        group.create_task(_memory(state), name="memory")
        group.create_task(_every(tick_s, state, probe, _is_probe_due), name="health")
        group.create_task(_every(tick_s, state, trial, _is_trial_due), name="trials")
        group.create_task(_every(settings.scrape_interval, state, scrape), name="scrape")


Job = Callable[[ProxyState, Upstream], Coroutine[Any, Any, None]]
IsDue = Callable[[ProxyState, Upstream], bool]


def _always(state: ProxyState, upstream: Upstream) -> bool:
    del state, upstream
    return True


async def _every(interval_s: float, state: ProxyState, job: Job, is_due: IsDue = _always) -> None:
    """Run a job for each instance for which it is due, at once and after each interval.

    While an instance's job runs it is not started again, and the other instances' jobs go on.
    """
    running: set[Upstream] = set()
    throttle = Throttle()

    async def run_one(upstream: Upstream) -> None:
        try:
            await job(state, upstream)
        except DEFECTS:  # no answer of an instance may end the periodic tasks
            name, now_s = upstream.instance.name, asyncio.get_running_loop().time()
            if throttle.turn(name, now_s) is not None:
                _log.exception("instance %s: a periodic task failed", name)
        finally:
            running.discard(upstream)

    async with asyncio.TaskGroup() as group:
        while True:
            for upstream in state.instances.all():
                if upstream not in running and is_due(state, upstream):
                    running.add(upstream)
                    group.create_task(run_one(upstream))
            await asyncio.sleep(interval_s)


def _is_probe_due(state: ProxyState, upstream: Upstream) -> bool:
    member = state.router.fleet.get(upstream.instance.name)
    return member is not None and member.health.probe_due(state.clock.now_s())


def _is_trial_due(state: ProxyState, upstream: Upstream) -> bool:
    member = state.router.fleet.get(upstream.instance.name)
    return member is not None and member.health.trial_due(state.clock.now_s())


async def look_round(state: ProxyState) -> bool:
    """Probe every instance before serving; returns whether one has answered in time.

    A process that replaces a serving one must know its fleet before it takes over.
    """

    async def look(upstream: Upstream) -> None:
        await probe(state, upstream)
        await scrape(state, upstream)

    with suppress(TimeoutError):
        async with asyncio.timeout(FIRST_LOOK_S):
            while True:
                async with asyncio.TaskGroup() as group:
                    for upstream in state.instances.all():
                        group.create_task(look(upstream))
                if state.instances.is_serving:
                    return True
                await asyncio.sleep(LAG_INTERVAL_S)
    return state.instances.is_serving


async def probe(state: ProxyState, upstream: Upstream) -> None:
    """GET /health; then read models and engine id, if they are unknown or due."""
    name, settings = upstream.instance.name, state.settings
    if state.instances.has_drained(name):
        _log.info("instance %s is removed: its last request is over", name)
        await state.instances.remove(name)
        return
    if (member := state.router.fleet.get(name)) is not None:
        u = random.random()
        member.health.probing(state.clock.now_s(), settings.health_interval, u)
    try:
        await upstream.get("/health", settings.health_timeout)
    except UpstreamFailure as failure:
        state.instances.probe_failed(name, failure)
        return
    state.instances.probe_answered(name)
    try:
        with Limit(settings.health_timeout):
            await _learn(state, upstream)
    except (UpstreamFailure, TimeoutError) as failure:
        _log.debug("instance %s: %s", name, failure)
    if upstream.has_new_engine:
        upstream.has_new_engine = False
        state.instances.engine_changed(name)


async def _learn(state: ProxyState, upstream: Upstream) -> None:
    name, timeout_s = upstream.instance.name, state.settings.health_timeout
    member = state.router.fleet.get(name)
    if member is None:
        return
    if member.models is None or member.health.probes % MODELS_EVERY == 0:
        body = await upstream.get("/v1/models", timeout_s, limit=LIST_BYTES)
        names = [str(card["id"]) for card in model_cards(body)]
        state.router.fleet.observe_models(name, names)
    if state.connector.needs_engine_id:
        if member.health.probes % ENGINE_ID_EVERY == 0:
            await upstream.look_up_engine_id()
        await upstream.engine_id()


async def trial(state: ProxyState, upstream: Upstream) -> None:
    """Ask an instance with an open breaker for one token, so that no client has to try it.

    Any answer but a server error passes: an engine with a key of its own refuses ours.
    """
    name, failure = upstream.instance.name, None
    member = state.router.fleet.get(name)
    models = sorted((member.models if member else None) or {state.settings.model or ""})
    body = orjson.dumps({"model": models[0], "prompt": "1", "max_tokens": 1})
    try:
        with Limit(TRIAL_S):
            reply = await upstream.send("POST", "/v1/completions", _JSON + state.ways.auth, body)
            try:
                await look_at(reply)
                await reply.read(TRIAL_BYTES)
            finally:
                reply.close()
    except TimeoutError:
        failure = UpstreamFailure(FailureKind.TIMEOUT, f"no token in {TRIAL_S:g} s")
    except UpstreamFailure as error:
        # Another object: the error itself holds the frame that holds it.
        failure = error.again() if error.kind in FAULT_KINDS else None
    state.instances.trial_ended(name, failure)


async def scrape(state: ProxyState, upstream: Upstream) -> None:
    """GET /metrics; for an engine without it the proxy's own counters are all that is known."""
    try:
        limit_s = state.settings.health_timeout
        body = await upstream.get("/metrics", limit_s, limit=LIST_BYTES)
    except UpstreamFailure:
        return
    name, gate = upstream.instance.name, state.router.gate
    was_frozen = gate.is_frozen(name)
    state.instances.observe_report(name, parse(body), xxhash.xxh3_64_intdigest(body))
    if gate.is_frozen(name) and not was_frozen:
        _log.warning(
            "instance %s: its /metrics stay the same while it works, so they are ignored", name
        )


async def _lag(state: ProxyState) -> None:
    """Measure the event loop's lag."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        state.metrics.loop_lag.observe(max(0.0, loop.time() - due_s))


async def _memory(state: ProxyState) -> None:
    """Measure the memory, and return to the kernel what a burst or a giant prompt has left free.

    Memory is not returned while such prompts keep coming and there is room: each would get the
    pages of the one before it again, one page fault at a time.
    """
    watermark, clock = state.memory, state.clock
    gave_s = -GIVE_BACK_S
    while True:
        before = watermark.level
        level = watermark.observe(await asyncio.to_thread(resident_bytes))
        now_s = clock.now_s()
        is_calm = now_s - watermark.giant_s >= CALM_S
        if (is_calm or level is not Level.NORMAL) and now_s - gave_s >= GIVE_BACK_S:
            gave_s = now_s
            await asyncio.to_thread(give_back)
            level = watermark.observe(await asyncio.to_thread(resident_bytes))
        if level is not before:
            used, limit = watermark.used_bytes >> 20, (watermark.limit_bytes or 0) >> 20
            _log.warning("memory: %d of %d MiB: %s", used, limit, _MEMORY_WORDS[level])
        await asyncio.sleep(MEMORY_INTERVAL_S)
