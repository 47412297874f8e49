"""Engines' own prefix cache counters, read before a run and after it.

They are read from the engines: from the target if it is one, else from the instances that a proxy
names. Where these cannot be reached the proxy's counters stand in, which are those of its last
look at each engine. Nothing here ends a run: what cannot be read is a reason in the summary.
"""

import asyncio
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import aiohttp
import msgspec

from replayer.answers import ENGINE_BYTES, MOST_BYTES, MOST_VALUE, body_of

METRICS_TIMEOUT_S = 5.0
MOST_ENGINES = 1024
"""Of a fleet so many are read, or taken from what a proxy counts."""
AT_ONCE = 32
"""Engines that are read at the same time."""
NAME_CHARS = 256
"""Of an engine; a longer name is none."""
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*?)(?:_total)?(?:\{(.*)\})? +(\S+)", re.MULTILINE)
_FROM_PEER = 'source="external_kv_transfer"'
SERIES = {
    "local_queries": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
    "local_hits": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
    "external_queries": ("vllm:external_prefix_cache_queries",),
    "external_hits": ("vllm:external_prefix_cache_hits",),
    "external_in_place": ("vllm:prompt_tokens_by_source",),
    "start_s": ("process_start_time_seconds",),
}
"""Each counter's series, newest name first: while vLLM renames one it exports both.

In tokens, since the engine's start. `external_in_place`: what a connector has brought;
`external_hits` also counts transfers that never came.
"""
OF_ENGINE = frozenset(name for names in SERIES.values() for name in names)
OF_PROXY = {
    "looked_up": "cache_proxy_prefix_cache_queries",
    "local_hits": "cache_proxy_prefix_cache_hits",
    "external_in_place": "cache_proxy_external_prefix_cache_hits",
}
_CONFIG = "vllm:cache_config_info{"
_SIZES = re.compile(r'[{,](num_gpu_blocks|block_size)="(\d{1,18})"')
CONFIG_CHARS = 8192
_UPSTREAM = re.compile(r'upstream="([^"]{0,256})"')

Counters = dict[str, float]
"""One engine's counters, those that it has."""


def engine_counters(exposition: str) -> Counters:
    """Read one engine's counters, summed over its ranks; empty if this is no engine's."""
    sums: dict[str, float] = {}
    for name, labels, value in _samples(exposition, OF_ENGINE):
        if name != "vllm:prompt_tokens_by_source" or _FROM_PEER in labels:
            sums[name] = sums.get(name, 0.0) + value
    found = {
        counter: next((sums[name] for name in names if name in sums), None)
        for counter, names in SERIES.items()
    }
    if found["local_queries"] is None and found["external_queries"] is None:
        return {}
    return {counter: value for counter, value in found.items() if value is not None}


def layout(exposition: str) -> str:
    """Return the size of one engine's KV in words; empty where it does not tell it."""
    info = next((line for line in exposition.splitlines() if line.startswith(_CONFIG)), "")
    found = dict(_SIZES.findall(info[:CONFIG_CHARS]))
    return f"{found['num_gpu_blocks']} blocks of {found['block_size']}" if len(found) > 1 else ""


def proxy_counters(exposition: str) -> dict[str, Counters]:
    """Read the counters that a proxy exports of its instances, by their names."""
    counters = {series: counter for counter, series in OF_PROXY.items()}
    found: dict[str, Counters] = {}
    for name, labels, value in _samples(exposition, counters.keys()):
        upstream = _UPSTREAM.search(labels)
        if upstream and (upstream[1] in found or len(found) < MOST_ENGINES):
            found.setdefault(upstream[1], {})[counters[name]] = value
    return found


def _samples(exposition: str, names: Container[str]) -> Iterable[tuple[str, str, float]]:
    """Yield name (without _total), labels and value of each sample; invalid ones are left out."""
    for name, labels, text in (one.groups("") for one in _LINE.finditer(exposition)):
        if name in names:
            try:
                value = float(text)
            except ValueError:
                continue
            if 0 <= value < MOST_VALUE:
                yield name, labels, value


class _Instance(msgspec.Struct):
    """What is read of an instance that a proxy names."""

    name: Annotated[str, msgspec.Meta(max_length=NAME_CHARS)]
    url: str


@dataclass(slots=True)
class EngineCounters:
    """Both readings of a run, by engine; `unread`: the reason, for each that gave none.

    `layouts`: the size of each engine's KV, of those that tell it.
    `source`: whose /metrics were read, the engines' or the proxy's; None: nobody's.
    """

    source: str | None = None
    before: dict[str, Counters] = field(default_factory=dict)
    after: dict[str, Counters] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)


class CounterReader:
    """Reads the counters of the engines behind one target, twice."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: str,
        headers: Mapping[str, str],
        engines: tuple[str, ...] = (),
    ) -> None:
        """`headers` go to the target alone; `engines`: their addresses, if they are known."""
        self._session, self._target, self._headers = session, target, headers
        self._urls = {url: url for url in engines}
        self.counters = EngineCounters()

    async def read_before(self) -> None:
        """Find out whom to ask, and read the first values."""
        found = self.counters
        text = "" if self._urls else await self._text(self._target, "/metrics")
        if engine_counters(text):
            self._urls = {self._target: self._target}
        elif not self._urls:
            self._urls = await self._instances()
        found.before = await self._of_engines()
        found.source = "engines" if found.before else None
        if not found.before and (of_proxy := proxy_counters(text)):
            found.source, found.before = "proxy", of_proxy

    async def read_after(self) -> None:
        """Read the last values, of those that had first ones."""
        found = self.counters
        if found.source == "engines":
            found.after = await self._of_engines()
        elif found.source == "proxy":
            found.after = proxy_counters(await self._text(self._target, "/metrics"))

    async def _instances(self) -> dict[str, str]:
        """Return the addresses that a proxy names, by instance."""
        try:
            listed = msgspec.json.decode(
                await self._text(self._target, "/instances"), type=list[_Instance]
            )
        except (msgspec.MsgspecError, RecursionError):
            return {}
        return {one.name: one.url for one in listed[:MOST_ENGINES]}

    async def _of_engines(self) -> dict[str, Counters]:
        slots = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as group:
            tasks = {
                name: group.create_task(self._of_engine(name, url, slots))
                for name, url in self._urls.items()
            }
        read = {name: task.result() for name, task in tasks.items()}
        for name in read:
            if not read[name]:
                self.counters.unread.setdefault(name, "no prefix cache counters in its /metrics")
        return {name: counters for name, counters in read.items() if counters}

    async def _of_engine(self, name: str, url: str, slots: asyncio.Semaphore) -> Counters:
        async with slots:
            text = await self._text(url, "/metrics", name)
        if told := layout(text):
            self.counters.layouts[name] = told
        return engine_counters(text)

    async def _text(self, base: str, path: str, name: str | None = None) -> str:
        """Return what a GET answers; empty if it fails, which `unread` notes of `name`."""
        # The run's session decompresses nothing, and vLLM's /metrics compress where they may.
        headers = {"Accept-Encoding": "identity"}
        most = MOST_BYTES if name is None else ENGINE_BYTES
        if base == self._target:
            headers |= self._headers
        try:
            async with (
                asyncio.timeout(METRICS_TIMEOUT_S),
                self._session.get(base + path, headers=headers, allow_redirects=False) as response,
            ):
                body = await body_of(response, most) if response.status == 200 else b""
            if response.status == 200 and len(body) <= most:
                return body.decode(errors="replace")
            told = f"over {most} bytes" if body else str(response.status)
            reason = f"GET {path} answers {told}"
        except TimeoutError:
            reason = f"no answer to GET {path} within {METRICS_TIMEOUT_S:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:  # an address is a peer's word
            reason = f"GET {path}: {type(error).__name__}"
        self.counters.unread[name or base] = reason
        return ""
