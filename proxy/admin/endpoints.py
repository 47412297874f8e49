"""Handlers of /live, /ready, /health, /metrics, /instances, /sessions, /decisions, /v1/models."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence, Set
from dataclasses import asdict

import orjson
from aiohttp import web
from multidict import CIMultiDict

from proxy import __version__
from proxy.admin.auth import refuse_unasked, small_object
from proxy.config.in_force import OptionsInForce
from proxy.config.values import InstanceSpec
from proxy.core.admission.turns import Turns
from proxy.core.fleet.health import Health, State
from proxy.core.fleet.members import Member
from proxy.core.kvcache.published import PublishedBlocks
from proxy.core.latency.model import CALIBRATION_QUANTILES, Latency, Times
from proxy.core.placement.decision import PlacementView
from proxy.core.placement.stored import as_json
from proxy.core.routing.eligible import NO_INSTANCE_RETRY_S
from proxy.core.thermal.fleet_control import HeatStatus
from proxy.core.thermal.readings import GpuReading
from proxy.fleet.instances import Instances
from proxy.fleet.membership import LOOK_S, OPERATORS, Membership, Verdict
from proxy.net.addresses import ForbiddenAddressError, party
from proxy.net.server import responses
from proxy.net.server.responses import error_response, json_response, unavailable
from proxy.net.timeouts import Clock, Limit
from proxy.net.upstream.client import LIST_BYTES, Upstream, context_lengths, model_cards
from proxy.protocol.errors import (
    DRAIN_RETRY_S,
    ModelAwayError,
    ProxyError,
    UnknownModelError,
    UpstreamFailure,
)
from proxy.protocol.headers import CREDENTIALS
from proxy.protocol.names.session_names import bounded, of_tenant
from proxy.protocol.prompt.facts import MODEL_CHARS
from proxy.state.access import Access
from proxy.state.in_flight import InFlight
from proxy.state.overload import OverloadWatch
from proxy.state.thermal import ThermalControl
from proxy.telemetry.log import printable_json
from proxy.telemetry.metrics import Exposition
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.request_log import MayFail, record_json
from proxy.telemetry.requests import DECISIONS_KEPT, REFUSED_KEPT, not_kept

MODELS_TIMEOUT_S = 2.0
MOST_WAIT_S = 300
"""Longest wait for the end of an instance's drain that one request may ask for."""
KEPT_S, KEPT_LISTS = 1.0, 8
"""How long a list of models is kept, and how many: one for each key that clients have of engines'
own. In that time engines are asked no more often than that."""
STRAGGLER_S = 0.25
"""Wait of the list of models for a further instance, once each known model is in it."""
_IN_A_TURN = 16
"""Instances that are described in one turn of the loop, 2 ms."""
_DIGITS = 9
"""Most digits of a number in a query: `int` refuses one of more than 4300."""
EXPOSITION_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NONE_ANSWERED = "no instance has answered yet"
"""Requests are tried all the same: at the start an instance is taken to be up."""
_log = logging.getLogger(__name__)


class HealthPaths:
    """/live, /ready, /health and /metrics, for load balancers and Prometheus.

    `last_reload` returns how the last reload of the options ended, None before the first; `parts`:
    logs that may be unable to write, and what else may fail alone.
    """

    def __init__(
        self,
        instances: Instances,
        in_flight: InFlight,
        exposition: Exposition,
        overload: OverloadWatch,
        parts: Sequence[MayFail],
        last_reload: Callable[[], dict[str, object] | None],
    ) -> None:
        self._instances, self._in_flight, self._exposition = instances, in_flight, exposition
        self._overload, self._parts, self._last_reload = overload, parts, last_reload
        self._start = round(instances.clock.unix(instances.clock.now_s()), 3)

    async def live(self, request: web.Request) -> web.Response:
        """Answer 200 while the process runs."""
        del request
        return json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """Answer 503 while the proxy drains or no instance is up: no new requests should come."""
        del request
        if self._in_flight.is_draining:
            return unavailable({"status": "draining"}, DRAIN_RETRY_S)
        if not self._instances.is_serving:
            return unavailable({"status": self._none_up()}, NO_INSTANCE_RETRY_S)
        return json_response({"status": "ready"})

    async def health(self, request: web.Request) -> web.Response:
        """The state of every instance, and what is wrong; 200 while one serves, else 503."""
        del request
        members, clock = self._instances.known.fleet.members(), self._instances.clock
        now_s, serving = clock.now_s(), self._instances.is_serving
        instances: dict[str, dict[str, object]] = {
            m.instance.name: {
                "is_up": m.health.is_up,
                "state": m.health.state(now_s),
                "since": round(clock.unix(m.health.since_s(now_s)), 3),
                "is_draining": m.is_draining,
                **_last_error(m.health, clock),
                "warnings": list(self._instances.warnings.get(m.instance.name, {}).values()),
            }
            for m in members
        }
        body: dict[str, object] = {
            "status": self._status(members, now_s) if serving else self._none_up(),
            "version": __version__,
            "started_at": self._start,
            "warnings": [{"text": text, "since": round(t, 3)} for text, t in self._warnings()],
        }
        if (last_reload := self._last_reload()) is not None:
            body["config_reload"] = last_reload
        body["instances"] = instances
        return json_response(body) if serving else unavailable(body, NO_INSTANCE_RETRY_S)

    def _status(self, members: Collection[Member], now_s: float) -> str:
        """Whether an instance that should serve does not, or requests are refused or wait long."""
        out = (State.EJECTED, State.PROBING)
        is_out = any(m.health.state(now_s) in out and not m.is_draining for m in members)
        return "degraded" if is_out or self._overload.warning is not None else "ok"

    def _warnings(self) -> list[tuple[str, float]]:
        """Warnings on the proxy as a whole, with their start in unix seconds."""
        unix, last_reload = self._instances.clock.unix, self._last_reload()
        of_load = (self._overload.warning, self._instances.fleet_warning)
        found = [(text, unix(since_s)) for text, since_s in filter(None, of_load)]
        if defects := self._in_flight.defects:
            text = f"requests that a defect of the proxy ended: {defects}; see its log on stderr"
            found.append((text, unix(self._in_flight.first_defect_s)))
        found += [fault for part in self._parts if (fault := part.fault) is not None]
        if last_reload is not None and "error" in last_reload:
            found.append((str(last_reload["error"]), float(str(last_reload["t"]))))
        return found

    def _none_up(self) -> str:
        """Why no instance is known to serve, without what follows from it."""
        if self._instances.known.fleet.usable() and not self._instances.is_serving:
            return _NONE_ANSWERED
        return self._instances.none_up.partition(":")[0]

    async def metrics(self, request: web.Request) -> web.Response:
        """The metrics as Prometheus text."""
        del request
        text = await self._exposition.text()
        return web.Response(body=text, headers={"Content-Type": EXPOSITION_TYPE})


class FleetPaths:
    """/instances, /sessions and /decisions, for operators.

    `thermal`: what is known of their heat.
    """

    def __init__(
        self,
        instances: Instances,
        options: OptionsInForce,
        members: Membership,
        last: Callable[[int], Sequence[RequestRecord]],
        view_of: Callable[[object], PlacementView | None],
        thermal: ThermalControl,
    ) -> None:
        self._instances, self._known = instances, instances.known
        self._heat, self._gpus = thermal.control, thermal.gpus
        self._in_flight = thermal.in_flight
        self._options, self._members, self._last, self._view_of = options, members, last, view_of

    async def instances(self, request: web.Request) -> web.Response:
        """Every instance with its load, health and last engine report."""
        del request
        described: list[bytes] = []
        for member in self._known.fleet.members():
            name = member.instance.name
            if self._known.fleet.get(name) is not None:  # it may have left meanwhile
                described.append(orjson.dumps(self._describe(name)))
            if len(described) % _IN_A_TURN == 0:
                await asyncio.sleep(0)
        return _json_bytes(b"[" + b",".join(described) + b"]")

    async def instance(self, request: web.Request) -> web.Response:
        """One instance: `status` serving, draining with what is left, or drained, then 404.

        With ?wait=SECONDS the answer comes once it drains no more, at the latest after this time.
        """
        name, wait = request.match_info["name"], request.query.get("wait", "0")
        if not (wait.isdecimal() and len(wait) <= _DIGITS) or int(wait) > MOST_WAIT_S:
            return error_response(400, f"wait: whole seconds, 0 to {MOST_WAIT_S}")
        ended = await self._drain_end(name, int(wait))
        if self._known.fleet.get(name) is not None:
            return json_response(self._describe(name) | self._left(name) | {"wait_ended": ended})
        if (ago_s := self._members.drained_for_s(name)) is not None:
            return json_response({"name": name, "status": "drained", "age_s": round(ago_s, 3)})
        return error_response(404, f"instance: {name} is not known")

    async def _drain_end(self, name: str, limit_s: int) -> str | None:
        """Wait while an instance drains; what ended the wait before that: time or shutdown."""
        if not limit_s:
            return None
        try:
            with Limit(limit_s):
                while self._members.is_draining(name):
                    if self._in_flight.is_leaving:
                        return "shutdown"
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            return "timeout"
        return None

    def _left(self, name: str) -> dict[str, object]:
        """Whether an instance serves or drains, and what a drain waits for."""
        if not self._members.is_draining(name):
            return {"status": "serving"}
        load, now_s = self._known.ledger.own(name), self._instances.clock.now_s()
        streams, upstream = self._in_flight.on(name), self._instances.get(name)
        left = {
            "requests": load.prefill_requests + load.inbound_requests + load.decode_requests,
            "fixed_streams": sum(served.why_fixed is not None for served in streams),
            "pinned_kv_tokens": load.pinned_tokens,
            "unreleased_kv_tokens": self._known.unreleased_kv.on(name, now_s)[1],
            "connections": 0 if upstream is None else upstream.in_use,
        }
        return {"status": "draining", "left": left}

    def _describe(self, name: str) -> dict[str, object]:
        known, now_s = self._known, self._instances.clock.now_s()
        member = known.fleet.get(name)
        assert member is not None
        busy, load = known.busy_by_model(name, now_s), known.ledger.own(name)
        stats = self._instances.reports.get(name)
        return {
            "name": name,
            "url": member.instance.url,
            "sources": self._members.sources(name),
            "bootstrap_url": member.instance.bootstrap_url,
            "is_up": member.health.is_up,
            "state": member.health.state(now_s),
            **_last_error(member.health, self._instances.clock),
            "is_draining": member.is_draining,
            "incarnation": member.incarnation,
            "models": sorted(member.models or ()),
            "max_model_len": dict(sorted(member.lengths.items())),
            "busy": next((state.check for state in busy.values() if state), None),
            "busy_by_model": {m: state.check if state else None for m, state in busy.items()},
            "heat": _heat(self._heat.status(name)),
            "load": {**asdict(load), "ongoing_tokens": load.ongoing_tokens},
            "usage_doubted": known.is_usage_doubted(name),
            "learned_prefill_tps": round(known.latency.prefill_tps(name)),
            "lines": _lines(known.latency, name),
            "residual_ratios": _ratios(known.latency.of(name)),
            "ttft_prediction_ratios": _calibration(known.latency.of(name)),
            "kv_tokens_assumed": member.state.assumed_kv_tokens,
            "live_kv_tokens": round(
                known.sessions.live(member.state.cache).tokens(known.sessions.curve, now_s)
            ),
            "sessions": member.state.cache.sessions,
            "prefix_blocks": member.state.cache.blocks,
            "kv_events": [
                {"rank": rank, "is_believed": known.published.is_believed(name)}
                | _published(blocks, now_s)
                for rank, blocks in known.published.ranks(name).items()
            ],
            "gpus": [_gpu(reading, now_s) for reading in self._gpus.of(name)],
            "engine": asdict(stats) if stats else None,
        }

    async def decisions(self, request: web.Request) -> web.Response:
        """The last ?n= placed and refused requests, newest first; running ones are incomplete."""
        text = request.query.get("n", "50")
        has_digits = text.isdecimal() and len(text) <= _DIGITS
        if not has_digits or not 1 <= int(text) <= DECISIONS_KEPT:
            return error_response(400, f"n: a whole number, 1 to {DECISIONS_KEPT}")
        body = b"[" + b",".join(record_json(record) for record in self._last(int(text))) + b"]"
        return _json_bytes(body)

    async def decision(self, request: web.Request) -> web.Response:
        """One of them by its request's id, with all that its decision was made of."""
        request_id = request.match_info["request_id"]
        kept = self._last(DECISIONS_KEPT + REFUSED_KEPT)
        record = next((record for record in kept if record.request_id == request_id), None)
        if record is None:
            return error_response(404, not_kept(kept))
        view = self._view_of(record.candidates)
        columns = printable_json(orjson.dumps(as_json(view) if view is not None else None))
        return _json_bytes(record_json(record)[:-1] + b',"columns":' + columns + b"}")

    async def add_instance(self, request: web.Request) -> web.Response:
        """Add the instance of {"instance": "[name=]host:port[;bootstrap=PORT]"}.

        A draining instance of this name and address serves again.
        """
        settings = self._options.settings
        body = await small_object(request, settings.body_timeout)
        text = body.get("instance")
        if not isinstance(text, str):
            return error_response(400, 'instance: a string "[name=]host:port[;bootstrap=PORT]"')
        try:
            spec = InstanceSpec.parse(text)
            settings.check_instance(spec)
            verdict = (await self._members.admit(spec, text)).verdict
        except (ValueError, ForbiddenAddressError) as error:
            return error_response(400, f"instance: {error}")
        if verdict is Verdict.REFUSED:
            return error_response(409, f"instance: {spec.name} is there already")
        return json_response(self._describe(spec.name), 201 if verdict is Verdict.NEW else 200)

    async def remove_instance(self, request: web.Request) -> web.Response:
        """Remove an instance at once, or with ?drain=true when its last request is over.

        With &mode=migrate its streams migrate if they can.
        """
        name = request.match_info["name"]
        if self._known.fleet.get(name) is None:
            return error_response(404, f"instance: {name} is not known")
        drain, mode = request.query.get("drain", "false"), request.query.get("mode")
        if drain not in ("true", "false"):
            return error_response(400, "drain: true or false")
        drains = drain == "true"
        if mode not in (None, "migrate") or (mode is not None and not drains):
            return error_response(400, "mode: migrate, and only beside drain=true")
        if mode is not None and not self._options.settings.migration_limit:
            return error_response(400, "mode: migrate needs --migration-limit, 1 to 100")
        if drains:
            self._members.drain(OPERATORS, name)
            if mode is not None:
                asked = self._in_flight.leave_instance(name)
                _log.info("instance %s drains: %d streams migrate", name, asked)
            return json_response(self._describe(name), 202)
        self._members.remove(name)
        return json_response({"removed": name})

    async def end_session(self, request: web.Request) -> web.Response:
        """Forget the home of a session; ?tenant=NAME for a tenant's session."""
        refuse_unasked(request)
        session = of_tenant(bounded(request.match_info["id"]), request.query.get("tenant"))
        known = self._known.conversations.end_session(session or "")
        return json_response({"ended": known}) if known else error_response(404, "no such session")


class ModelsPath:
    """/v1/models and the models below it, for clients."""

    def __init__(self, instances: Instances, access: Access) -> None:
        self._instances, self._access = instances, access
        self._kept = KeptCards(instances.clock.now_s)
        self._listed: tuple[dict[str, bytes], bytes] = {}, b'{"object":"list","data":[]}'
        """The last cards as one body: answers that are not read yet share its memory."""

    async def models(self, request: web.Request) -> web.Response:
        """All models of the instances in use and of those that rest, each once."""
        try:
            cards = await self._cards(request)
        except ProxyError as error:
            return responses.error(request.path, error, CIMultiDict())
        if cards != self._listed[0]:
            joined = b'{"object":"list","data":[%b]}' % b",".join(cards.values())
            self._listed = cards, joined
        return _json_bytes(self._listed[1])

    async def model(self, request: web.Request) -> web.Response:
        """The card of one model, whose name may have slashes in it."""
        name, fleet = request.match_info["id"], self._instances.known.fleet
        try:
            cards = await self._cards(request)
            if (card := cards.get(name)) is not None:
                return _json_bytes(card)
            if fleet.serves(name):
                raise ModelAwayError("no instance that serves the model answers now")
            raise UnknownModelError.of(name[:MODEL_CHARS], {*cards, *fleet.models()})
        except ProxyError as error:
            return responses.error(request.path, error, CIMultiDict())

    async def _cards(self, request: web.Request) -> dict[str, bytes]:
        """Each model's card, that of the longest context; raises ProxyError without a known key."""
        grant = self._access.grant(request.headers)
        auth = b"" if grant.hidden >= CREDENTIALS else _auth(request)
        by_name, listed = self._instances.by_name, self._instances.known.fleet.listed()
        upstreams = [by_name[m.instance.name] for m in listed if m.instance.name in by_name]
        key = auth, tuple(upstreams), self._instances.known.fleet.model_changes
        owner = party(request.remote or "")
        return await self._kept.get(key, lambda: self._asked(upstreams, auth, listed), owner)

    async def _asked(
        self, upstreams: Collection[Upstream], auth: bytes, listed: Collection[Member]
    ) -> dict[str, bytes]:
        known = [member.models for member in listed]
        expected = None if None in known else set().union(*(models or () for models in known))
        answers = await _ask_all(upstreams, auth, expected)
        found: dict[str, bytes] = {}
        longest: dict[str, int] = {}
        for upstream in upstreams:
            told = answers.get(upstream, [])
            lengths = context_lengths(told)
            for card in told:
                model = str(card["id"])
                if model not in found or lengths.get(model, 0) > longest[model]:
                    found[model], longest[model] = _written(card), lengths.get(model, 0)
        return found


class _Round:
    """One round of questions to the engines; `cards`: None until it is over, and if it failed.

    `waiters`: who waits for it to begin. `asker`: the one of them who asks, once it has begun.
    """

    __slots__ = ("asker", "cards", "is_over", "until_s", "waiters")

    def __init__(self) -> None:
        self.cards: dict[str, bytes] | None = None
        self.until_s = 0.0
        self.asker: _Waiter | None = None
        self.is_over = asyncio.Event()
        self.waiters: dict[_Waiter, None] = {}


class _Waiter:
    """One who waits for a round, in the line of its owner; `begins`: whether it asks for all.

    The round under its key is in `_due` meanwhile. With a round of its own, each would hold the
    other, and its cards would stay in memory until garbage is collected, which is rare.
    """

    __slots__ = ("begins", "key", "owner")

    def __init__(self, owner: str, key: Hashable) -> None:
        self.owner, self.key = owner, key
        self.begins: asyncio.Future[bool] = asyncio.get_running_loop().create_future()


class KeptCards:
    """Cards as engines told them a moment ago: they are asked once for all who want them.

    Any client can make up keys. So rounds of questions have a rate, and addresses take turns. A
    round begins with the first turn of anybody who waits for it.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._rounds: dict[Hashable, _Round] = {}
        self._due: dict[Hashable, _Round] = {}
        """Rounds that wait for a turn."""
        self._turns: Turns[_Waiter] = Turns()
        self._begun_s: deque[float] = deque(maxlen=KEPT_LISTS)
        self._timer: asyncio.TimerHandle | None = None

    async def get(
        self, key: Hashable, ask: Callable[[], Awaitable[dict[str, bytes]]], owner: str = ""
    ) -> dict[str, bytes]:
        """The cards under a key: those of KEPT_S ago at most, or what `ask` returns."""
        while True:
            known = self._known(key) or self._due.setdefault(key, _Round())
            if known.asker is None and await self._turn(key, known, owner):
                return await self._ask(key, known, ask)
            if known.cards is None:
                await known.is_over.wait()
            if known.cards is not None:
                return known.cards

    def _known(self, key: Hashable) -> _Round | None:
        """The round under a key that is not too old, or that waits for a turn."""
        known = self._rounds.get(key)
        return self._due.get(key) if known is None or self._is_old(known) else known

    async def _ask(
        self, key: Hashable, mine: _Round, ask: Callable[[], Awaitable[dict[str, bytes]]]
    ) -> dict[str, bytes]:
        del self._due[key]
        self._make_room(key)
        self._rounds[key] = mine
        try:
            mine.cards = await ask()
            mine.until_s = self._now_s() + KEPT_S
        finally:
            if mine.cards is None and self._rounds.get(key) is mine:
                del self._rounds[key]
            mine.is_over.set()
        return mine.cards

    async def _turn(self, key: Hashable, due: _Round, owner: str) -> bool:
        """Wait until a round begins; returns whether the caller is to ask for all."""
        waiter = _Waiter(owner, key)
        due.waiters[waiter] = None
        self._turns.add(owner, waiter)
        try:
            self._let_in()
            return await waiter.begins
        except asyncio.CancelledError:
            if due.asker is waiter or (due.asker is None and due.waiters.keys() == {waiter}):
                # Whoever waits beside it makes a round of its own.
                del self._due[key]
                due.is_over.set()
            raise
        finally:
            self._turns.remove(owner, waiter)
            due.waiters.pop(waiter, None)

    def _let_in(self) -> None:
        """Let as many rounds begin as may, and look again when the next one may."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_s, begun_s = self._now_s(), self._begun_s
        while self._turns:
            rest_s = begun_s[0] + KEPT_S - now_s if len(begun_s) == KEPT_LISTS else 0.0
            if rest_s > 0:
                self._timer = asyncio.get_running_loop().call_later(rest_s, self._let_in)
                return
            waiter = self._turns.next()
            if not waiter.begins.done():
                begun_s.append(now_s)
                self._begin(waiter)

    def _begin(self, asker: _Waiter) -> None:
        """One asks for all who wait for the same round; the others need no turn of theirs."""
        due = self._due[asker.key]
        due.asker = asker
        for waiter in due.waiters:
            self._turns.remove(waiter.owner, waiter)
            if not waiter.begins.done():
                waiter.begins.set_result(waiter is asker)
        due.waiters.clear()

    def _is_old(self, known: _Round) -> bool:
        return known.cards is not None and self._now_s() >= known.until_s

    def _make_room(self, key: Hashable) -> None:
        gone = [one for one, known in self._rounds.items() if one == key or self._is_old(known)]
        for one in (*gone, *[one for one in self._rounds if one not in gone][: 1 - KEPT_LISTS]):
            del self._rounds[one]


async def _ask_all(
    upstreams: Collection[Upstream], auth: bytes, expected: Set[str] | None
) -> Mapping[Upstream, list[dict[str, object]]]:
    """The cards of all instances that answer, side by side.

    Whoever hangs is not waited for once others have told all that is `expected`; None: not known.
    """
    answers: dict[Upstream, list[dict[str, object]]] = {}
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(_ask(u, auth, answers), name="models") for u in upstreams]
        waits = set(asked)
        rest_s: float | None = None
        told, read = set[object](), set[Upstream]()
        while waits:
            done, waits = await asyncio.wait(
                waits, timeout=rest_s, return_when=asyncio.FIRST_COMPLETED
            )
            told.update(card["id"] for u in answers.keys() - read for card in answers[u])
            read |= answers.keys()
            is_told = expected is not None and told >= expected
            rest_s = STRAGGLER_S if is_told else None
            if not done:
                break
        for task in waits:
            task.cancel()
    return answers


async def _ask(
    upstream: Upstream, auth: bytes, answers: dict[Upstream, list[dict[str, object]]]
) -> None:
    """Add one instance's reported models, if any."""
    try:
        body = await upstream.get("/v1/models", MODELS_TIMEOUT_S, auth, LIST_BYTES)
    except UpstreamFailure:
        return
    answers[upstream] = model_cards(body) or []


def _written(card: Mapping[str, object]) -> bytes:
    """A card as JSON, as a copy: what orjson returns may hold 4 KiB, and cards are kept."""
    return bytes(memoryview(orjson.dumps(card)))


def _auth(request: web.Request) -> bytes:
    """The client's Authorization as a header line, for engines that require a key."""
    given = [value for name, value in request.raw_headers if name.lower() == b"authorization"]
    return b"Authorization: %b\r\n" % given[0] if given else b""


def _json_bytes(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json", charset="utf-8")


def _last_error(health: Health, clock: Clock) -> dict[str, object]:
    at_s = health.last_error_s
    at = None if at_s is None else round(clock.unix(at_s), 3)
    return {"last_error": health.last_error, "last_error_at": at}


def _heat(status: HeatStatus) -> dict[str, object]:
    """Limits of an instance by thermal control or an operator's order."""
    return {
        "state": status.state,
        "headroom_celsius": status.headroom_celsius,
        **asdict(status.limits),
    }


def _published(blocks: PublishedBlocks, now_s: float) -> dict[str, object]:
    """One rank's prefix cache as its KV events tell it."""
    heard_s = blocks.heard_s
    return {
        "is_live": blocks.is_live,
        "is_whole": blocks.is_whole,
        "fault": blocks.fault,
        "blocks": blocks.copies,
        "block_tokens": blocks.block_tokens or None,
        "batches": blocks.batches,
        "gaps": blocks.gaps,
        "lost_gaps": blocks.lost_gaps,
        "restarts": blocks.restarts,
        "age_s": None if heard_s is None else round(now_s - heard_s, 3),
        "lag_s": None if blocks.lag_s is None else round(blocks.lag_s, 3),
    }


def _gpu(reading: GpuReading, now_s: float) -> dict[str, object]:
    """The last reading of one GPU, with its age in place of its time."""
    shown = asdict(reading)
    return shown | {"age_s": round(now_s - shown.pop("at_s"), 3)}


def _calibration(times: Times) -> dict[str, dict[str, dict[str, float | int | None]]]:
    """Predicted over measured TTFT, by route class and by whether other prompts were before it."""
    found: dict[str, dict[str, dict[str, float | int | None]]] = {}
    for (route_class, queued), ratios in sorted(times.calibration.by.items()):
        quantiles = {f"p{round(100 * q)}": ratios.quantile(q) for q in CALIBRATION_QUANTILES}
        found.setdefault(route_class, {})["queued" if queued else "alone"] = {
            "answers": len(ratios),
            **quantiles,
        }
    return found


def _lines(latency: Latency, name: str) -> dict[str, object]:
    """Coefficients of the lines by which an instance's times are predicted, and its step budget."""
    times = latency.of(name)
    lines = {
        "prefill": (times.prefill.p, times.prefill.q),
        "step": (times.step.p, times.step.q),
        "way": latency.way(),
    }
    named: dict[str, object] = {line: {"p": p, "q": q} for line, (p, q) in lines.items()}
    return named | {"max_num_batched_tokens": times.budget}


def _ratios(times: Times) -> dict[str, dict[str, float | None]]:
    """Measured over predicted time: of prefills alone, of prefills with queue, of decode steps."""
    lines = (
        ("prefill", times.prefill.residuals),
        ("queue_and_prefill", times.ready),
        ("step", times.step.residuals),
    )
    return {
        name: {"p50": residuals.quantile(0.5), "p95": residuals.quantile(0.95)}
        for name, residuals in lines
    }
