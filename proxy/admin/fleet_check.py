"""The command `cache-proxy check`: ask every instance once, tell what each is and what is wrong.

It asks by the proxy's own probes, with the same options, so it finds what the proxy would warn of.
No request is sent that an engine computes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from proxy.config.in_force import OptionsInForce, router_config
from proxy.config.options import Settings
from proxy.config.sources import ConfigError
from proxy.core.fleet.health import State
from proxy.core.known.fleet_state import FleetState
from proxy.core.types import FailureKind
from proxy.fleet.discovery.discovery import Discovery
from proxy.fleet.discovery.registry import Around, sources
from proxy.fleet.instances import Instances
from proxy.fleet.membership import OPTIONS, Membership
from proxy.fleet.probes import Job, Probes
from proxy.fleet.sensors import registry
from proxy.net import tls
from proxy.net.peer_documents import read_json
from proxy.net.timeouts import Clock
from proxy.net.upstream.client import LENGTH, LIST_BYTES, Upstream, model_cards
from proxy.net.upstream.pool import ConnectOptions
from proxy.protocol.errors import UpstreamFailure
from proxy.state.access import bearer
from proxy.telemetry.log import printable

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
"""Names of engines by the `owned_by` of their model cards."""
_TEXT_CHARS, _MOST_TOLD = 60, 3
_SCRAPES = 2
"""Reads of the metrics: engines are compared with each other once all have been read."""
_RESTS = {
    State.ASLEEP: "sleeps, so it gets no request",
    State.PAUSED: "is paused, so it gets no request",
}


@dataclass(frozen=True, slots=True)
class Report:
    """The findings: a line per instance, one per problem and per note, then their numbers."""

    instances: tuple[str, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What may be meant so, and is no problem."""

    @property
    def lines(self) -> list[str]:
        """The lines to print."""
        told = f"{_many(len(self.instances), 'instance')}, {_many(len(self.problems), 'problem')}"
        problems = [f"problem: {line}" for line in self.problems]
        return [*self.instances, *problems, *(f"note: {line}" for line in self.notes), told]


async def check(settings: Settings) -> Report:
    """Ask every instance. Raises ConfigError where the proxy would not start with these options."""
    _check_files(settings)
    connect = ConnectOptions(tls.own_for_instances(settings), bearer(settings.instance_api_key))
    known, clock = FleetState(router_config(settings)), Clock()
    instances = Instances(known, clock, connect, lambda: None, lambda _: None)
    log = logging.getLogger("proxy")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)  # whatever the probes would log is in the report
    try:
        options = OptionsInForce(settings)
        members = Membership(instances, options, lambda: None)
        members.want(OPTIONS, settings.instances)
        found = sources(Around(settings, connect.resolver, os.environ))
        discovery = Discovery(found, members, options, clock, lambda _: None)
        await discovery.begin()
        return await _Look(instances, settings).report(discovery.faults)
    finally:
        log.setLevel(level)
        await instances.close()


def _check_files(settings: Settings) -> None:
    """Read the files and packages that options name, as a start of the proxy does."""
    if (lacking := registry.missing(settings.instances)) is not None:
        raise ConfigError(lacking)
    tls.for_clients(settings)
    if settings.thermal is not None:
        from proxy.config.thermal import read_plan  # as in ProxyState

        read_plan(settings.thermal)


class _Look:
    """One look at all instances."""

    def __init__(self, instances: Instances, settings: Settings) -> None:
        self._instances, self._settings = instances, settings
        self._options = OptionsInForce(settings)
        self._probes = Probes(instances, self._options)
        self._faults: dict[str, str] = {}
        """Why an instance cannot be reached."""
        self._engines: dict[str, str] = {}
        self._models: dict[str, str] = {}
        self._served: dict[str, tuple[str, ...]] = {}
        """The ids of an instance's models, in its order."""

    async def report(self, faults: Mapping[str, str]) -> Report:
        """Ask all instances at the same time, twice where that is needed, and tell the findings.

        `faults`: why a source of `--discover` tells no instance.
        """
        upstreams = list(self._instances.all())
        await _each(upstreams, self._reach)
        reached = [u for u in upstreams if u.instance.name not in self._faults]
        await _each(reached, self._probes.probe)
        await self._instances.compare_cards()
        for _ in range(_SCRAPES):
            await _each(reached, self._probes.scrape)
        await _each(reached, self._ask_what_it_is)
        return Report(
            tuple(self._line(u) for u in upstreams),
            (
                *(f"{source}: {text}" for source, text in faults.items()),
                *(f"{u.instance.name}: {text}" for u in upstreams for text in self._problems(u)),
            ),
            self._notes(),
        )

    async def _reach(self, upstream: Upstream) -> None:
        try:
            await upstream.get("/health", self._settings.health_timeout)
        except UpstreamFailure as failure:
            self._faults[upstream.instance.name] = _why(failure, upstream.instance.url)

    async def _ask_what_it_is(self, upstream: Upstream) -> None:
        """Read the engine's version, and its models as its list has them."""
        name, limit_s = upstream.instance.name, self._settings.health_timeout
        version, engine = "", ""
        with suppress(UpstreamFailure, ValueError):
            told = read_json(await upstream.get("/version", limit_s))
            version = _text(told.get("version")) if isinstance(told, dict) else ""
        with suppress(UpstreamFailure):
            cards = model_cards(await upstream.get("/v1/models", limit_s, limit=LIST_BYTES)) or []
            self._models[name] = _some([*map(_model, cards)])
            self._served[name] = tuple([_text(card.get("id")) for card in cards])
            owner = _text(cards[0].get("owned_by")) if cards else ""
            engine = ENGINES.get(owner.lower(), owner)
        self._engines[name] = " ".join(filter(None, (engine, version))) or "engine not known"

    def _line(self, upstream: Upstream) -> str:
        name = upstream.instance.name
        if name in self._faults:
            return f"{name}: not reachable"
        report = self._instances.reports.get(name)
        size = report.kv_total_tokens if report is not None else None
        parts = [
            self._engines[name],
            f"model {self._models.get(name) or 'not known'}",
            f"KV cache {f'{size} tokens' if size else 'of unknown size'}",
            self._rest(name) or "awake",
            self._kv_transfer(upstream),
            self._key(upstream),
        ]
        return f"{name}: {'; '.join(filter(None, parts))}"

    def _rest(self, name: str) -> str:
        member = self._instances.known.fleet.get(name)
        rest = member.health.rest if member is not None else None
        return "" if rest is None else _RESTS[rest]

    def _kv_transfer(self, upstream: Upstream) -> str:
        """What is known of the KV connector: only Mooncake's can be asked from outside."""
        connector = self._settings.kv_connector
        if not self._options.connector.needs_engine_id:
            return "" if connector == "none" else f"KV connector {connector}, which cannot be asked"
        url, port = upstream.instance.bootstrap_url, self._settings.bootstrap_port
        if upstream.known_engine_id() is not None:
            return f"{connector} found at {url}, so it takes offloaded prefills"
        if url is not None:
            return f"{connector} not found at {url}"
        if others := self._instances.neighbours(upstream.instance.name):
            shared = f"{connector} not looked for, as it shares its host with {_some(others)}"
            return (
                f"{shared}: name its port with ;bootstrap=PORT, else it takes no offloaded prefill"
            )
        where = "" if port is None else f" at port {port}"
        return f"no {connector} found{where}, so it takes no offloaded prefill"

    def _key(self, upstream: Upstream) -> str:
        if self._settings.instance_api_key is None:
            return ""
        is_taken = self._models.get(upstream.instance.name) and not upstream.refuses_key
        return "key accepted" if is_taken else "key not accepted"

    def _problems(self, upstream: Upstream) -> list[str]:
        name = upstream.instance.name
        if name in self._faults:
            return [self._faults[name]]
        warnings = self._instances.warnings.get(name, {}).values()
        return [text for text in (self._rest(name), *warnings) if text]

    def _notes(self) -> tuple[str, ...]:
        """Which instances serve which models, where they differ and `--model` does not say."""
        alike: dict[frozenset[str], list[str]] = {}
        for name in [u.instance.name for u in self._instances.all()]:
            if name in self._served:
                alike.setdefault(frozenset(self._served[name]), []).append(name)
        if self._settings.model is not None or len(alike) < 2:
            return ()
        told = [
            f"{_some(names)} serve{'s' * (len(names) == 1)} {_some(self._served[names[0]])}"
            for names in list(alike.values())[:_MOST_TOLD]
        ]
        more = "; ..." * (len(alike) > _MOST_TOLD)
        return (f"{'; '.join(told)}{more}: a request goes to those that serve its model",)


async def _each(upstreams: list[Upstream], job: Job) -> None:
    async with asyncio.TaskGroup() as group:
        for upstream in upstreams:
            group.create_task(job(upstream))


def _why(failure: UpstreamFailure, url: str) -> str:
    if failure.kind is FailureKind.CONNECT:
        return f"nothing listens at {url}"
    hint = " (--health-timeout)" if failure.kind is FailureKind.TIMEOUT else ""
    return f"{failure.detail}{hint}"


def _many(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'s' * (count != 1)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_TOLD]) + ", ..." * (len(names) > _MOST_TOLD)


def _model(card: Mapping[str, object]) -> str:
    length = card.get(LENGTH)
    tokens = f" ({length} tokens)" if type(length) is int else ""
    return f"{_text(card.get('id'))}{tokens}"


def _text(told: object) -> str:
    """A text of an engine as it may be printed on a terminal: one short line."""
    return printable(told[:_TEXT_CHARS]) if isinstance(told, str) else ""
