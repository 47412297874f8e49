"""What a tick sees of a real fleet: all sources, asked at once, as one context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from planner.config.components import Component
from planner.core.observe import EngineWindows, Totals, TrafficWindow, Work, traffic_between
from planner.core.types import Capabilities, Context, Engine, Replicas, Traffic
from planner.sources.engines import Engines
from planner.sources.proxy import Proxies, Row, account


@dataclass(slots=True)
class _Known:
    """Names of a component's instances that have been ready, while they are there."""

    proven: set[str] = field(default_factory=set)
    wanted: int = 0
    since_s: float = 0.0
    """When so many were wanted first."""


class Live:
    """The fleet behind proxies. `max_wait_s`: what has not come by then counts as absent."""

    def __init__(
        self,
        proxies: Proxies,
        engines: Engines,
        of: Mapping[Component, Capabilities],
        window_s: float,
        max_wait_s: float,
    ) -> None:
        self._proxies, self._engines = proxies, engines
        self._of, self._max_wait_s = of, max_wait_s
        self._window = TrafficWindow(window_s)
        self._before: tuple[float, Totals] | None = None
        self._windows = {one.name: EngineWindows() for one in of}
        self._known = {one.name: _Known() for one in of}
        self.absent: dict[str, int] = {}
        """Replicas by component that were ordered and never came."""
        self.unread: Mapping[str, str] = {}
        """Why engines that are up were not read at the last look, by name."""
        self.start_ups_s: list[float] = []
        """Seconds from an order to the first ready instance behind it; the last 64."""

    async def look(self, tick: int, now_s: float, expected: Mapping[str, int]) -> Context | None:
        """The context of a tick, `expected`: the last targets; None where nobody tells of it.

        Where no target is known yet, the instances that are there are the first.
        """
        told = await self._proxies.look(now_s)
        if told is None:
            return None
        own = {one.name: {name: told.rows[name] for name in one.own(told.rows)} for one in self._of}
        urls = {
            name: rows[0].url for found in own.values() for name, rows in found.items() if _up(rows)
        }
        work, self.unread = await self._engines.look(urls), self._engines.failures
        traffic, recent = self._window.add(now_s, told.totals), self._recent(now_s, told.totals)
        waiting = told.queued * ((traffic.isl_tokens if traffic else None) or 0.0)
        replicas, engines, capabilities = {}, {}, {}
        for one, of in self._of.items():
            name = one.name
            replicas[name] = self._replicas(name, own[name], now_s, expected.get(name))
            engines[name] = self._seen(now_s, name, own[name], work, waiting)
            capabilities[name] = _measured(of, own[name])
        accept_length = self._accept_length()
        baseline = {name: found.expected for name, found in replicas.items()}
        return Context(
            *(tick, now_s, replicas, capabilities),
            None if traffic is None else replace(traffic, accept_length=accept_length),
            engines,
            baseline=baseline,
            recent=None if recent is None else replace(recent, accept_length=accept_length),
        )

    def _accept_length(self) -> float | None:
        """Tokens per step and stream, of a component that drafts; all have one model."""
        told = (windows.accept_length for windows in self._windows.values())
        return next((length for length in told if length is not None), None)

    def _recent(self, now_s: float, totals: Totals) -> Traffic | None:
        """The traffic since the last reading."""
        before, self._before = self._before, (now_s, totals)
        if before is None or now_s <= before[0]:
            return None
        return traffic_between(before[1], totals, now_s - before[0])

    def _replicas(
        self, name: str, own: Mapping[str, Sequence[Row]], now_s: float, expected: int | None
    ) -> Replicas:
        """One that was ready and is down is lost, not pending: else it would stop the planner."""
        known = self._known[name]
        ready = {member for member, rows in own.items() if all(row.is_ready for row in rows)}
        fresh = ready - known.proven
        known.proven = {member for member in known.proven if member in own} | ready
        leaving = sum(_drains(rows) for rows in own.values())
        wanted = len(own) - leaving if expected is None else expected
        if wanted != known.wanted:
            known.wanted, known.since_s = wanted, now_s
        elif fresh and now_s > known.since_s:
            self.start_ups_s = [*self.start_ups_s[-63:], now_s - known.since_s]
        serving = sum(not _drains(own[member]) for member in known.proven)
        coming = max(0, wanted - serving)
        if coming and now_s - known.since_s > self._max_wait_s:
            self.absent[name], coming = coming, 0
        else:
            self.absent.pop(name, None)
        return Replicas(len(ready), wanted, coming + leaving)

    def _seen(
        self,
        now_s: float,
        name: str,
        own: Mapping[str, Sequence[Row]],
        work: Mapping[str, Work],
        waiting_tokens: float,
    ) -> tuple[Engine, ...]:
        """The instances that serve; what waits in the proxies belongs to all of them evenly."""
        ready = {member: rows for member, rows in own.items() if all(row.is_ready for row in rows)}
        accounts = {member: account(rows) for member, rows in ready.items()}
        each = waiting_tokens / max(1, len(ready))
        return self._windows[name].look(now_s, accounts, work, each)


def _up(rows: Sequence[Row]) -> bool:
    return all(row.is_up for row in rows)


def _drains(rows: Sequence[Row]) -> bool:
    return any(row.is_draining for row in rows)


def _measured(of: Capabilities, own: Mapping[str, Sequence[Row]]) -> Capabilities:
    """What an instance can hold: the median KV cache, as the proxy knows it; each tells its own."""
    known = [
        row.kv_tokens_assumed for rows in own.values() for row in rows if row.kv_tokens_assumed
    ]
    return replace(of, kv_tokens=round(median(known))) if known else of
