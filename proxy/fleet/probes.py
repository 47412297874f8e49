"""Periodic requests to each instance: health, trials, engine reports, models, engine ids."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import orjson
import xxhash

from proxy.config.in_force import OptionsInForce
from proxy.core.fleet.health import FAULT_KINDS, HOLLOW_KINDS, UNDECIDED_KINDS, State
from proxy.core.fleet.short import WHY
from proxy.core.types import FailureKind
from proxy.fleet.engine_metrics import parse
from proxy.fleet.instances import Instances
from proxy.net.peer_documents import in_turns
from proxy.net.timeouts import Limit
from proxy.net.upstream.client import (
    LIST_BYTES,
    MOST_CARDS,
    Upstream,
    context_lengths,
    flag_in,
    model_cards,
)
from proxy.net.upstream.response_check import KEY_STATUSES, hollow, is_refusal, look_at
from proxy.protocol.endpoints import endpoint_of
from proxy.protocol.errors import DEFECTS, UpstreamFailure
from proxy.protocol.offloadable import COMPLETIONS
from proxy.protocol.streams.hollow import is_short
from proxy.telemetry.log import Throttle

TICKS = 4
"""Checks per health interval for a due probe: an instance whose state begins to change is probed
again at the next check."""
TRIAL_TICK_S = 0.5
"""Checks for a due trial, at most so far apart: rare probes must not keep an instance out."""
TRIAL_S = 5.0
TRIAL_BYTES = 65536
STREAM_TOKENS = 4
LENGTH_TOKENS = 32
"""Of a trial of an instance whose answers end at once."""
_CHAT = "/v1/chat/completions"
"""Of a trial that is a stream."""
ENGINE_ID_EVERY = 3
"""The engine's id is read at every n-th probe: another id means another process."""
MODELS_EVERY = 15
"""Models are read at every n-th probe: adapters change rarely. Also at the next one after an
instance has denied a model."""
SCRAPES_PER_CONNECTION = 5
"""Behind one address may be several engines, one per connection: that shows only in a new one."""
SILENT_SCRAPES = 3
"""Reads of its metrics between which an engine with requests gave no answer: it may be paused."""
CLOSE = b"Connection: close\r\n"
FIRST_PROBES = 3
"""Probes at the beginning at each of which an instance's bootstrap server is looked for."""
FIRST_LOOK_S = 10.0
FIRST_LOOK_EVERY_S = 0.25
_REST_PATHS = (
    (State.ASLEEP, "/is_sleeping", "is_sleeping"),
    (State.PAUSED, "/is_paused", "is_paused"),
)
"""Routes of an engine that tell whether it can serve now, and the member of their answer."""
_REFUSALS = frozenset({FailureKind.REDIRECT, FailureKind.NO_MODEL})
"""Failures of a trial that say something of the instance only if its peers do not fail so."""
_JSON = b"Content-Type: application/json\r\n"
_log = logging.getLogger(__name__)
Job = Callable[[Upstream], Coroutine[Any, Any, None]]
IsDue = Callable[[Upstream], bool]


def _always(upstream: Upstream) -> bool:
    del upstream
    return True


class Probes:
    """Probes every instance's health, and reads its reports, models and engine id."""

    def __init__(self, instances: Instances, options: OptionsInForce) -> None:
        self._instances, self._options = instances, options
        self._fleet, self._clock = instances.known.fleet, instances.clock

    async def run(self) -> None:
        """Run all periodic tasks until cancelled; intervals are those at the start."""
        settings = self._options.settings
        tick_s = settings.health_interval / TICKS
        async with asyncio.TaskGroup() as group:
            instances, trial_s = self._instances, min(tick_s, TRIAL_TICK_S)
            for name, every_s, job, is_due, wanted in (
                ("health", tick_s, self.probe, self._is_probe_due, instances.probe_wanted),
                ("trials", trial_s, self.trial, self._is_trial_due, instances.trial_wanted),
            ):
                group.create_task(self._every(every_s, job, is_due, wanted), name=name)
            group.create_task(self._every(settings.scrape_interval, self.scrape), name="scrape")
            group.create_task(self._compare(tick_s), name="model cards")

    async def _every(
        self,
        interval_s: float,
        job: Job,
        is_due: IsDue = _always,
        wanted: asyncio.Event | None = None,
    ) -> None:
        """Run a job for each instance for which it is due, at once and after each interval.

        Setting `wanted` ends the interval early.

        While an instance's job runs it is not started again; other instances' jobs go on. One that
        has drained is not asked any more.
        """
        running: set[Upstream] = set()
        throttle = Throttle()

        async def run_one(upstream: Upstream) -> None:
            try:
                await job(upstream)
            except (*DEFECTS, RuntimeError):  # no answer of an instance may end the periodic tasks
                name, now_s = upstream.instance.name, asyncio.get_running_loop().time()
                if throttle.turn(name, now_s) is not None:
                    _log.exception("instance %s: a periodic task failed", name)
            finally:
                running.discard(upstream)

        async with asyncio.TaskGroup() as group:
            while True:
                for upstream in self._instances.all():
                    is_over = self._instances.has_drained(upstream.instance.name)
                    if upstream not in running and not is_over and is_due(upstream):
                        running.add(upstream)
                        group.create_task(run_one(upstream))
                if wanted is None:
                    await asyncio.sleep(interval_s)
                    continue
                with suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await wanted.wait()
                wanted.clear()

    async def _compare(self, pause_s: float) -> None:
        """Compare the model cards where some have changed, with a pause from one time to the next.

        Cards of many instances that change together, as at the start, are compared together.
        """
        while True:
            await self._instances.cards_changed.wait()
            await self._instances.compare_cards()
            await asyncio.sleep(pause_s)

    def _is_probe_due(self, upstream: Upstream) -> bool:
        member = self._fleet.get(upstream.instance.name)
        return member is not None and member.health.probe_due(self._clock.now_s())

    def _is_trial_due(self, upstream: Upstream) -> bool:
        member = self._fleet.get(upstream.instance.name)
        return member is not None and member.health.trial_due(self._clock.now_s())

    async def look_round(self) -> bool:
        """Probe every instance before serving; True once one has answered, False on timeout.

        A process that replaces a serving one must know its fleet before it takes over.
        """

        async def look(upstream: Upstream) -> None:
            await self.probe(upstream)
            await self.scrape(upstream)

        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_S):
                while True:
                    async with asyncio.TaskGroup() as group:
                        for upstream in self._instances.all():
                            group.create_task(look(upstream))
                    if self._instances.is_serving:
                        return True
                    await asyncio.sleep(FIRST_LOOK_EVERY_S)
        return self._instances.is_serving

    async def probe(self, upstream: Upstream) -> None:
        """GET /health; then read models and engine id, if they are unknown or due."""
        name, settings = upstream.instance.name, self._options.settings
        begun_s = self._clock.now_s()
        if (member := self._fleet.get(name)) is not None:
            member.health.probing(begun_s, settings.health_interval, random.random())
        try:
            await upstream.get("/health", settings.health_timeout)
        except UpstreamFailure as failure:
            self._instances.probe_failed(name, failure, self._clock.now_s() - begun_s)
            return
        self._instances.probe_answered(name)
        await self._learn_models(upstream)
        if self._options.connector.needs_engine_id:
            await self._learn_engine_id(upstream)
        if upstream.has_new_engine:
            upstream.has_new_engine = False
            self._instances.engine_changed(name)

    async def _learn_models(self, upstream: Upstream) -> None:
        """Read the instance's models, if they are due."""
        name, timeout_s = upstream.instance.name, self._options.settings.health_timeout
        member = self._fleet.get(name)
        if member is None:
            return
        is_due = member.health.probes % MODELS_EVERY == 0
        if member.models is not None and not (member.rereads_models or is_due):
            return
        try:
            body = await upstream.get("/v1/models", timeout_s, limit=LIST_BYTES)
        except UpstreamFailure as failure:
            if failure.status in KEY_STATUSES and self._instances.connect_options.auth:
                self._key_refused(upstream, f"status {failure.status} to the proxy's own key")
            elif member.models is None:
                self._instances.warn(
                    name, "models", f"its models could not be read: {failure.detail}"
                )
            return
        upstream.refuses_key = False
        wanted = self._options.settings.model
        # A list of 1,000 adapters takes 5 ms, and any client can have it read at each probe.
        before, upstream.models_read, now = upstream.models_read, 0, hash((body, wanted))
        if member.models is not None and before == now:
            upstream.models_read = now
            self._fleet.models_again(name)
            self._instances.warn(name, "models", None)
            return
        if (cards := model_cards(body)) is None:
            most = f"{MOST_CARDS} models, {LIST_BYTES} bytes, and what is parsed in 5 ms"
            told = f"its /v1/models is no list of models, or a longer one than {most}"
            self._instances.warn(name, "models", told)
            return
        models = {str(card["id"]): card.get("parent") for card in cards}
        bases = {m: p for m, p in models.items() if isinstance(p, str) and p and p != m}
        self._instances.observe_cards(name, cards)
        self._instances.known.observe_models(name, models, bases, context_lengths(cards))
        self._instances.warn(name, "models", None)
        self._instances.note_models(name, models, wanted)
        upstream.models_read = now  # of a list that could be read: the warning of another stays

    def _key_refused(self, upstream: Upstream, why: str) -> None:
        """Note that it refuses the proxy's own key at /v1/models: a trial decides.

        Only once, as it may serve all the same; it is asked again at each probe.
        """
        name, member = upstream.instance.name, self._fleet.get(upstream.instance.name)
        self._instances.warn(name, "models", f"its models could not be read: {why}")
        if member is not None:
            member.rereads_models = True
        if not upstream.refuses_key:
            upstream.refuses_key = True
            now_s = self._instances.clock.now_s()
            self._instances.known.events.key_refused(name, why, now_s)
            self._instances.trial_wanted.set()

    async def _learn_engine_id(self, upstream: Upstream) -> None:
        """Read the id of the instance's KV engine, if it is due or unknown."""
        name, settings = upstream.instance.name, self._options.settings
        member = self._fleet.get(name)
        if member is None:
            return
        probes = member.health.probes
        try:
            with Limit(settings.health_timeout):
                if upstream.instance.bootstrap_url is None:
                    if probes <= FIRST_PROBES or probes % MODELS_EVERY == 0:
                        await self._find_bootstrap(upstream)
                    return
                if probes % ENGINE_ID_EVERY == 0:
                    await upstream.look_up_engine_id()
                await upstream.engine_id()
        except UpstreamFailure as failure:
            _log.debug("instance %s: %s", name, failure)
        except TimeoutError:
            if upstream.instance.bootstrap_url is not None:
                upstream.bootstrap_fault = f"no answer in {settings.health_timeout:g} s"
        finally:
            member.is_kv_known = upstream.known_engine_id() is not None
        url = upstream.instance.bootstrap_url
        fault = None if member.is_kv_known or url is None else upstream.bootstrap_fault
        text = f"its bootstrap server {url} gives no engine id ({fault}): no offload to it succeeds"
        self._instances.warn(name, "bootstrap", text if fault else None)

    async def _find_bootstrap(self, upstream: Upstream) -> None:
        """Look for a Mooncake bootstrap server at the usual port, and use it where one answers.

        Only where the instance is alone on its host: else it could be another engine's. Raises
        UpstreamFailure.
        """
        name, port = upstream.instance.name, self._options.settings.bootstrap_port
        if port is None or not self._instances.is_alone_on_its_host(name):
            return
        host = urlsplit(upstream.instance.url).netloc.rpartition(":")[0]
        url = f"http://{host}:{port}"
        found = await upstream.try_bootstrap(url)
        others = {u.known_engine_id() for u in self._instances.all()}
        if found is not None and found not in others:
            self._instances.use_bootstrap(upstream, url)
            await upstream.look_up_engine_id()

    async def _learn_rest(self, upstream: Upstream, *, is_asleep: bool | None) -> None:
        """Note whether the engine sleeps or is paused; `is_asleep`: as its metrics say.

        In vLLM's development mode, in which alone it can be paused, it has routes that tell both.
        They are right where the metrics are not: these say awake once the weights are back, while
        the KV cache is not. A missing route is not requested again from the same process. An engine
        whose metrics do not tell is only asked after a while without answers.
        """
        name, limit_s = upstream.instance.name, self._options.settings.health_timeout
        member = self._fleet.get(name)
        if member is None:
            return
        health, load = member.health, self._instances.known.ledger.load(name)
        is_silent = load.prefill_requests > 0 and health.answers == upstream.answers_before
        upstream.answers_before = health.answers
        upstream.silent_scrapes = upstream.silent_scrapes + 1 if is_silent else 0
        may_ask = is_asleep is not None or upstream.silent_scrapes >= SILENT_SCRAPES
        known, told = health.rest, {State.ASLEEP: bool(is_asleep)}
        for state, path, flag in _REST_PATHS if not is_asleep else ():
            incarnation, is_there = upstream.routes.get(path, (None, may_ask))
            if not (is_there if incarnation == member.incarnation else may_ask):
                continue
            try:
                is_so = flag_in(await upstream.get(path, limit_s), flag)
                upstream.routes[path] = member.incarnation, is_so is not None
            except UpstreamFailure as failure:
                if failure.status is not None and failure.status < 500:
                    upstream.routes[path] = member.incarnation, False
                is_so = known is state and failure.status is None
            told[state] = told.get(state, False) or is_so is True
        rest = next((state for state, is_so in told.items() if is_so), None)
        self._instances.rests(name, rest)

    async def _look_for_twin(self, upstream: Upstream, start_s: float | None) -> None:
        """Warn where an instance named before this one is the same engine.

        Engines give no id of their own. The ids of their KV connectors are compared if both are
        known, else port, version and start. The start is known to 10 ms, in which a script may
        start all engines of a host, each at its own port.
        """
        name, reports = upstream.instance.name, self._instances.reports
        own, limit_s = upstream.known_engine_id(), self._options.settings.health_timeout
        text = None
        for other in list(self._instances.all()):  # they may change while two are asked
            if other is upstream:
                break
            theirs, report = other.known_engine_id(), reports.get(other.instance.name)
            ports = {urlsplit(u.instance.url).port for u in (upstream, other)}
            is_alike = report is not None and report.start_s == start_s and len(ports) == 1
            if None not in (own, theirs):
                is_same = own == theirs
            elif start_s is None or not is_alike:
                is_same = False
            elif text_was := self._instances.warnings.get(name, {}).get("twin"):
                text = text_was
                break
            else:
                versions = [await u.get("/version", limit_s) for u in (upstream, other)]
                is_same = versions[0] == versions[1]
            if is_same:
                text = f"is the same engine as {other.instance.name}: give each engine one name"
                break
        self._instances.warn(name, "twin", text)

    async def trial(self, upstream: Upstream) -> None:
        """Send a short request to an instance that is in doubt or whose breaker is open.

        So no client has to try it. It is a stream where answers have broken off within.

        What a peer answers as well tells nothing, and passes: its model is for other requests, or
        an engine with a key of its own refuses the proxy's.
        """
        name = upstream.instance.name
        member = self._fleet.get(name)
        models = sorted((member.models if member else None) or {self._options.settings.model or ""})
        peer = self._peer_of(name, models[0])
        if member is not None:
            member.health.trial_begins(self._clock.now_s())
            if peer is None and member.health.is_only_hollow:
                return  # nobody could tell whose fault it is
        streams = member is not None and member.health.broken.cuts > 0
        path = ""
        if member is not None and member.health.is_only_short:
            path, streams = member.health.short.path, member.health.short.streams
        tried = partial(self._tried, model=models[0], path=path)
        failure, is_blind = await tried(upstream, streams=streams), False
        if member is not None and path and failure is not None and failure.kind in UNDECIDED_KINDS:
            # What takes its time does not end at once.
            member.health.short.passed(self._clock.now_s())
        if failure is not None and failure.kind in HOLLOW_KINDS:
            theirs = None
            if peer is not None:
                theirs = await tried(peer, streams=streams and bool(path))
            is_blind = peer is None or (theirs is not None and theirs.status == failure.status)
            if theirs is not None and theirs.kind not in HOLLOW_KINDS:
                detail = f"{failure.detail}, and its peer failed as well: {theirs.detail}"
                failure = UpstreamFailure(FailureKind.TIMEOUT, detail)  # decides nothing
        self._instances.trial_ended(
            name, None if is_blind else failure, is_blind=is_blind and not path
        )

    def _peer_of(self, name: str, model: str) -> Upstream | None:
        """Another instance that serves the model, one that nothing is wrong with where possible."""
        peers = [m for m in self._fleet.believed(model) if m.instance.name != name]
        peers.sort(key=lambda m: (m.health.is_suspect, not m.health.is_up, -m.health.answers))
        return self._instances.get(peers[0].instance.name) if peers else None

    async def _tried(
        self, upstream: Upstream, model: str, path: str = "", *, streams: bool = False
    ) -> UpstreamFailure | None:
        """How a short request failed on an instance, or what its answer is; None: it served.

        One token in one piece, or a stream of a few, to its end. `path`: where answers with next
        to nothing in them came from, so that more is asked for.
        """
        if path:
            return await self._tried_at_length(upstream, model, path, streams=streams)
        more = {"max_tokens": STREAM_TOKENS, "stream": True} if streams else {"max_tokens": 1}
        body = orjson.dumps({"model": model, "prompt": "1"} | more)
        return await self._asked(upstream, COMPLETIONS, body, streams=streams)

    async def _tried_at_length(
        self, upstream: Upstream, model: str, path: str, *, streams: bool
    ) -> UpstreamFailure | None:
        """The same of an answer of several tokens, which its model may not end before."""
        request: dict[str, object] = {"model": model, "max_tokens": LENGTH_TOKENS}
        request |= {"ignore_eos": True, "stream": streams}
        if path == _CHAT:
            request["messages"] = [{"role": "user", "content": "1"}]
        else:
            path, request["prompt"] = COMPLETIONS, "1"
        body = orjson.dumps(request)
        failure = await self._asked(upstream, path, body, streams=streams, is_long=True)
        return None if failure is not None and is_refusal(failure) else failure

    async def _asked(
        self, upstream: Upstream, path: str, body: bytes, *, streams: bool, is_long: bool = False
    ) -> UpstreamFailure | None:
        auth = self._instances.connect_options.auth
        try:
            with Limit(TRIAL_S):
                reply = await upstream.send("POST", path, _JSON + auth, body)
                try:
                    await look_at(reply)
                    answer = await reply.read(TRIAL_BYTES)
                    if streams and reply.is_stream and b"[DONE]" not in answer:
                        raise UpstreamFailure(FailureKind.RESET, "its stream ended before its end")
                    row = endpoint_of(path)
                    why = hollow(row, reply, has_key=bool(auth), streams=streams or None)
                    if why is None and is_long and is_short(answer):
                        return UpstreamFailure(FailureKind.HOLLOW, WHY, status=reply.status)
                    return why
                finally:
                    reply.close()
        except TimeoutError:
            return UpstreamFailure(FailureKind.TIMEOUT, f"no token in {TRIAL_S:g} s")
        except UpstreamFailure as error:
            if error.kind in _REFUSALS:
                return UpstreamFailure(FailureKind.HOLLOW, error.detail, status=error.status)
            # A copy without traceback: the error's frame refers to the error, a reference cycle.
            return error.again() if error.kind in FAULT_KINDS else None

    async def scrape(self, upstream: Upstream) -> None:
        """Read GET /metrics; without it the proxy's own counters are used alone."""
        self._instances.note_addresses(upstream.instance.name)
        upstream.scrapes += 1
        is_last = upstream.scrapes % SCRAPES_PER_CONNECTION == 0
        try:
            limit_s, ends = self._options.settings.health_timeout, CLOSE if is_last else b""
            body = await upstream.get("/metrics", limit_s, limit=LIST_BYTES, more=ends)
        except UpstreamFailure as failure:
            self._instances.note_kv_size(upstream.instance.name)
            if failure.status is not None:
                await self._learn_rest(upstream, is_asleep=None)
            return
        name, gate = upstream.instance.name, self._instances.known.gate
        was_frozen = gate.is_frozen(name)
        stats = await in_turns(parse(body))
        self._instances.observe_report(name, stats, xxhash.xxh3_64_intdigest(body))
        await self._learn_rest(upstream, is_asleep=stats.is_asleep)
        with suppress(UpstreamFailure):
            await self._look_for_twin(upstream, stats.start_s)
        if gate.is_frozen(name) and not was_frozen:
            _log.warning(
                "instance %s: its /metrics do not change although it serves, so they are ignored",
                name,
            )
        self._instances.note_kv_size(name)
