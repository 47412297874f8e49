"""Prometheus as the source of traffic: for proxies that cannot each be reached.

One query per tick reads the counters of all proxies; their growth is counted here as it is where
proxies are read directly. What a scrape has missed comes with the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode

import aiohttp
import msgspec

from planner.core.observe import Totals
from planner.sources.counted import NAMES, Counted, Sample
from planner.sources.reading import SourceError, fetch, shown_url

QUERY = '{__name__=~"' + "|".join(NAMES) + '"}'


class _Series(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str]


class _Data(msgspec.Struct):
    result: list[_Series]


class _Answer(msgspec.Struct):
    data: _Data


class Prometheus:
    """Reads the counters of all proxies that a Prometheus scrapes."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token: str | None) -> None:
        self._session, self.url = session, url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._counted = Counted()
        self._queued: dict[str, float] = {}

    async def look(self) -> tuple[Totals, float]:
        """What all proxies have counted, and what waits in them. Raises SourceError."""
        where = f"{self.url}/api/v1/query?{urlencode({'query': QUERY})}"
        try:
            _, raw = await fetch(self._session, "GET", where, headers=self._headers)
            series = msgspec.json.decode(raw, type=_Answer).data.result
            by_proxy = _by_proxy(series)
            if not by_proxy:
                raise SourceError("it has no series of a cache-proxy")
            for gone in self._queued.keys() - by_proxy.keys():
                self._counted.forget(gone)
            self._queued = {
                proxy: self._counted.take(proxy, samples) for proxy, samples in by_proxy.items()
            }
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            text = f"{shown_url(self.url)}: an answer of another form: {str(error)[:200]}"
            raise SourceError(text) from error
        except SourceError as error:
            raise SourceError(f"Prometheus {shown_url(self.url)}: {error}") from error
        queued = sum(self._queued.values())
        return self._counted.totals(queued), queued


def _by_proxy(series: list[_Series]) -> Mapping[str, list[Sample]]:
    """The samples of each scraped target."""
    found: dict[str, list[Sample]] = {}
    for one in series:
        labels = one.metric
        source = f"{labels.get('job', '')} {labels.get('instance', '')}"
        sample = labels.get("__name__", ""), labels, float(one.value[1])
        found.setdefault(source, []).append(sample)
    return found
