"""The proxies in front of a fleet: what they count, whom they know, and how they are told."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote

import aiohttp
import msgspec

from planner.config.components import Component
from planner.core.observe import Account, Totals
from planner.scalers.base import Failure, Member, ScalerError
from planner.sources.counted import NAMES, Counted
from planner.sources.prometheus import Prometheus
from planner.sources.reading import PROXY_TIMES, SourceError, Wanted, fetch, samples, shown_url

ABSENT_S = 60.0
"""A proxy that cannot be read for so long is counted no more; until then nothing is decided."""


Tokens = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Requests = Annotated[int, msgspec.Meta(ge=0, le=10**9)]


class _Load(msgspec.Struct):
    prefill_tokens: Tokens
    prefill_requests: Requests
    inbound_requests: Requests
    decode_tokens: Tokens
    decode_requests: Requests


class _Health(msgspec.Struct):
    started_at: float


class _Heat(msgspec.Struct):
    is_drained: bool = False


class Row(msgspec.Struct):
    """An instance as `GET /instances` has it; members that are not used are not read."""

    name: str
    url: str
    is_up: bool
    is_draining: bool
    load: _Load
    heat: _Heat
    live_kv_tokens: Tokens = 0.0
    kv_tokens_assumed: Annotated[int, msgspec.Meta(ge=0, le=10**15)] | None = None
    incarnation: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether it gets new requests: it is up, and nobody drains it."""
        return self.is_up and not self.is_draining and not self.heat.is_drained

    @property
    def requests(self) -> int:
        """Requests that it works on."""
        load = self.load
        return load.prefill_requests + load.inbound_requests + load.decode_requests


@dataclass(frozen=True, slots=True)
class Told:
    """What all proxies have counted, what waits in them, and a row per instance and proxy."""

    totals: Totals
    queued: float
    rows: Mapping[str, tuple[Row, ...]]


@dataclass(slots=True)
class _Proxy:
    """What is known of one proxy. `failure`: of the last look, empty where it was read.

    `returns`: how often it was counted again after it was not.
    """

    url: str
    returns: int = 0
    queued: float = 0.0
    rows: Sequence[Row] = ()
    read_s: float | None = None
    started_at: float = 0.0
    failure: str = "not read yet"


class Proxies:
    """All proxies of a fleet: the source of traffic, and the `Fleet` of a scaler."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        urls: Sequence[str],
        token: str | None,
        components: Sequence[Component],
        prometheus: Prometheus | None = None,
    ) -> None:
        self._session, self._components = session, {one.name: one for one in components}
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._proxies = [_Proxy(url.rstrip("/")) for url in urls]
        self._counted_so_far, self._prometheus = Counted(), prometheus
        self._prometheus_read_s: float | None = None
        self._prometheus_failure = ""
        self._now_s, self._first_s = 0.0, math.inf

    def ages_s(self, now_s: float) -> dict[str, float | None]:
        """Seconds since each proxy was read; None for never."""
        read = {shown_url(p.url): p.read_s for p in self._proxies}
        if self._prometheus is not None:
            read[shown_url(self._prometheus.url)] = self._prometheus_read_s
        return {url: None if at_s is None else now_s - at_s for url, at_s in read.items()}

    def failures(self) -> list[str]:
        """Why proxies were not read at the last look."""
        found = [one.failure for one in self._proxies]
        return [failure for failure in (*found, self._prometheus_failure) if failure]

    async def look(self, now_s: float) -> Told | None:
        """Read all; None where one of them that still counts does not answer."""
        self._now_s, self._first_s = now_s, min(now_s, self._first_s)
        async with asyncio.TaskGroup() as tasks:
            for one in self._proxies:
                tasks.create_task(self._read(one, now_s))
        counted = self._counted()
        if not counted or any(one.failure for one in counted):
            return None
        rows: dict[str, tuple[Row, ...]] = {}
        for row in (row for one in counted for row in one.rows):
            rows[row.name] = (*rows.get(row.name, ()), row)
        if self._prometheus is not None:
            return await self._told_by_prometheus(rows)
        queued = sum(one.queued for one in counted)
        return Told(self._counted_so_far.totals(queued), queued, rows)

    async def _told_by_prometheus(self, rows: Mapping[str, tuple[Row, ...]]) -> Told | None:
        assert self._prometheus is not None
        try:
            totals, queued = await self._prometheus.look()
        except SourceError as error:
            self._prometheus_failure = str(error)
            return None
        self._prometheus_failure, self._prometheus_read_s = "", self._now_s
        return Told(totals, queued, rows)

    def _counted(self) -> list[_Proxy]:
        """The proxies that count: those read a short time ago, and at the start all."""
        least_s = self._now_s - ABSENT_S
        seen = ((one, self._first_s if one.read_s is None else one.read_s) for one in self._proxies)
        return [one for one, read_s in seen if read_s > least_s]

    async def _read(self, one: _Proxy, now_s: float) -> None:
        try:
            _, exposition = await fetch(
                self._session, "GET", f"{one.url}/metrics", headers=self._headers
            )
            _, document = await fetch(
                self._session, "GET", f"{one.url}/instances", headers=self._headers
            )
            _, health = await fetch(
                self._session,
                "GET",
                f"{one.url}/health",
                headers=self._headers,
                wanted=Wanted((200, 503)),
            )
            rows = msgspec.json.decode(document, type=list[Row])
            started_at = msgspec.json.decode(health, type=_Health).started_at
            told = await samples(exposition, NAMES, PROXY_TIMES)
            queued = self._counted_so_far.take(one.url, told)
        except SourceError as error:
            one.failure = _named(one.url, error)
            return
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            one.failure = f"{shown_url(one.url)}: an answer of another form: {str(error)[:200]}"
            return
        one.returns += one.read_s is not None and now_s - one.read_s >= ABSENT_S
        one.queued, one.rows = queued, rows
        one.read_s, one.failure, one.started_at = now_s, "", started_at

    # What follows is the contract of `Fleet`.

    def members(self, component: str) -> list[Member]:
        """A component's instances at the last look, in the order of their names."""
        rows: dict[str, list[Row]] = {}
        counted = self._counted()
        for row in (row for one in counted for row in one.rows):
            rows.setdefault(row.name, []).append(row)
        own = sorted(self._components[component].own(rows))
        return [_member(name, rows[name], len(counted)) for name in own]

    async def drain(self, name: str) -> None:
        """Have every proxy drain an instance, or none while one is away: it may still send there.

        Raises ScalerError.
        """
        counted = self._counted()
        for one in self._proxies:
            if one not in counted:
                text = f"{name} cannot be drained: {one.failure}"
                raise ScalerError(Failure.UNREACHABLE, text)
        await self._tell(
            "DELETE", f"/instances/{quote(name, safe='')}?drain=true", None, (202, 404)
        )

    async def has_left(self, name: str) -> bool:
        """Whether no proxy knows an instance any more; one that is away knows whom it knew."""
        return all(
            one.read_s is not None and all(row.name != name for row in one.rows)
            for one in self._proxies
        )

    async def add(self, name: str, url: str) -> None:
        """Have every proxy that counts know an instance. Raises ScalerError."""
        address = url.removeprefix("http://")
        await self._tell("POST", "/instances", {"instance": f"{name}={address}"}, (200, 201, 409))

    def generation(self) -> str:
        """The starts of all proxies that have been read; one that was away may know others."""
        return ",".join(f"{one.started_at}+{one.returns}" for one in self._proxies)

    async def _tell(self, method: str, path: str, body: object, allowed: tuple[int, ...]) -> None:
        for one in self._counted():
            try:
                await fetch(
                    self._session,
                    method,
                    f"{one.url}{path}",
                    headers=self._headers,
                    body=body,
                    wanted=Wanted(allowed),
                )
            except SourceError as error:
                raise ScalerError(Failure.UNREACHABLE, str(error)) from error


def _named(url: str, error: SourceError) -> str:
    text, shown = str(error), shown_url(url)
    return text if shown in text else f"{shown}: {text}"


def _member(name: str, rows: Sequence[Row], proxies: int) -> Member:
    """An instance as all proxies know it: each has its own requests there."""
    held = sum(row.load.prefill_tokens + row.load.decode_tokens for row in rows)
    return Member(
        name,
        rows[0].url,
        is_ready=all(row.is_ready for row in rows),
        is_draining=any(row.is_draining for row in rows),
        requests=sum(row.requests for row in rows),
        held_tokens=round(held + sum(row.live_kv_tokens for row in rows)),
        is_everywhere=len(rows) == proxies,
    )


def account(rows: Sequence[Row]) -> Account:
    """The tokens of an instance that all proxies count."""
    loads = [row.load for row in rows]
    return Account(
        sum(load.prefill_tokens for load in loads),
        sum(load.decode_requests for load in loads),
        sum(load.decode_tokens for load in loads),
    )
