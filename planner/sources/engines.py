"""The engines' own counters: what an iteration computes, and how long it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

import aiohttp

from planner.core.observe import Work
from planner.sources.reading import SourceError, Wanted, fetch, samples
from replayer.answers import ENGINE_BYTES

STEPS = "vllm:iteration_tokens_total_count"
SOURCES, PROMPTS = "vllm:prompt_tokens_by_source_total", "vllm:prompt_tokens_total"
GAPS = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
"""The same figure by its name of today, and by the one before vLLM 0.11."""
DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
NAMES = (
    *(STEPS, SOURCES, PROMPTS, DRAFTS, ACCEPTED),
    *(f"{gap}_{part}" for gap in GAPS for part in ("count", "sum")),
)
EXPOSITION = Wanted(most_bytes=ENGINE_BYTES)
AT_ONCE = 32
"""Engines that are read at the same time."""


class Engines:
    """Reads the `/metrics` of every engine; of one that does not answer nothing is known."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.failures: dict[str, str] = {}
        """Why engines were not read at the last look, by name."""

    async def look(self, urls: Mapping[str, str]) -> dict[str, Work]:
        """The counters of the engines at these addresses, by their names."""
        found: dict[str, Work] = {}
        self.failures = {}
        slots = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            for name, url in urls.items():
                tasks.create_task(self._read(name, url, slots, found))
        return found

    async def _read(
        self, name: str, url: str, slots: asyncio.Semaphore, found: dict[str, Work]
    ) -> None:
        async with slots:
            try:
                where = f"{url}/metrics"
                _, exposition = await fetch(self._session, "GET", where, wanted=EXPOSITION)
                found[name] = work(await samples(exposition, NAMES))
            except SourceError as error:
                self.failures[name] = str(error)


def work(told: Iterable[tuple[str, Mapping[str, str], float]]) -> Work:
    """The counters of all ranks of an engine together."""
    sums: dict[str, float] = {}
    for name, labels, value in told:
        if name != SOURCES or labels.get("source") == "local_compute":
            sums[name] = sums.get(name, 0.0) + value
    gap = next((gap for gap in GAPS if f"{gap}_count" in sums), GAPS[0])
    return Work(
        sums.get(STEPS, 0.0),
        sums.get(SOURCES, sums.get(PROMPTS, 0.0)),
        sums.get(f"{gap}_count", 0.0),
        sums.get(f"{gap}_sum", 0.0),
        sums.get(DRAFTS, 0.0),
        sums.get(ACCEPTED, 0.0),
    )
