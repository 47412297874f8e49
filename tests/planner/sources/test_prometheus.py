"""Traffic from a Prometheus that scrapes the proxies: by its form, and by a real one."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote_plus

import aiohttp
import orjson
import pytest

from planner.sources.counted import HITS, ISSUED, LOOKED_UP, Counted, Sample
from planner.sources.prometheus import QUERY, Prometheus
from planner.sources.reading import SourceError
from tests.support.harness import RawEngine, chat, plain, proxied, until, words
from tests.support.prometheus_server import needs_prometheus, prometheus


def answer(*series: tuple[str, str, float]) -> bytes:
    result = [
        {"metric": {"__name__": name, "instance": proxy, "job": "p"}, "value": [1.5, str(value)]}
        for name, proxy, value in series
    ]
    return plain(orjson.dumps({"status": "success", "data": {"result": result}}))


@pytest.mark.long
async def test_growth_is_summed_over_proxies_and_a_restart_counts_from_zero() -> None:
    issued, waits = "cache_proxy_issued_total", "cache_proxy_queued_requests"
    async with RawEngine() as fake, aiohttp.ClientSession() as session:
        source = Prometheus(session, fake.address, "a-token")

        async def told(*series: tuple[str, str, float]) -> tuple[float, float]:
            fake._other = answer(*series)
            totals, queued = await source.look()
            return totals.offered, queued

        assert await told((issued, "a", 100), (issued, "b", 50)) == (0.0, 0.0)
        assert await told((issued, "a", 110), (issued, "b", 55), (waits, "a", 3)) == (18.0, 3.0)
        assert await told((issued, "a", 4), (issued, "b", 55)) == (19.0, 0.0)
        assert await told((issued, "b", 60)) == (24.0, 0.0), "a is gone"
        assert await told((issued, "a", 900), (issued, "b", 60)) == (24.0, 0.0), "and is new"
        no_figures = ((waits, "a", float("nan")), (waits, "b", float("inf")))
        assert await told((issued, "a", 901), (issued, "b", 60), *no_figures) == (25.0, 0.0)
        (head, *_) = fake.heads
        assert b"Authorization: Bearer a-token" in head
        assert QUERY in unquote_plus(head.decode())


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (answer(), "no series of a cache-proxy"),
        (answer(("cache_proxy_queued_requests", "a", 1)), "is it a cache-proxy"),
        (plain(b"{}"), "of another form"),
        (plain(b"[" * 50_000), "of another form"),
        (plain(orjson.dumps({"data": {"result": [{"metric": {}, "value": [1, "x"]}]}})), "form"),
        (plain(b"", "503 Away"), "status 503"),
    ],
)
async def test_another_answer_is_a_line(body: bytes, why: str) -> None:
    async with RawEngine() as fake, aiohttp.ClientSession() as session:
        fake._other = body
        with pytest.raises(SourceError, match=why) as caught:
            await Prometheus(session, fake.address, None).look()
        assert "\n" not in str(caught.value)
        assert fake.address in str(caught.value)


@pytest.mark.long
@needs_prometheus
async def test_a_real_prometheus_tells_what_was_offered(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        async with (
            prometheus(tmp_path, {"cache-proxy": proxy.server.url}) as address,
            aiohttp.ClientSession() as session,
        ):
            source = Prometheus(session, address, None)

            async def is_scraped() -> bool:
                try:
                    await source.look()
                except SourceError:
                    return False
                return True

            await until(is_scraped, "the first scrape")
            for n in range(3):
                await proxy.post(chat(words(50, f"s{n}")))

            async def has_grown() -> bool:
                totals, _ = await source.look()
                return totals.offered == 3

            assert await until(has_grown, "what was offered is there")


@pytest.mark.parametrize("lie", [1e17, 5_000.0, 1_000.0])
async def test_what_one_engine_finds_in_its_cache_counts_for_few(lie: float) -> None:
    counted, names = Counted(), ("a", "b", "c", "d", "liar")

    def told(times: float) -> list[Sample]:
        looked = [(LOOKED_UP, {"upstream": name}, 1000.0 * times) for name in names[:4]]
        found = [(HITS[0], {"upstream": name}, 400.0 * times) for name in names[:4]]
        own = {"upstream": "liar"}
        more = [(LOOKED_UP, own, lie * times / 2), (HITS[0], own, lie * times)]
        return [(ISSUED, {}, 1.0), *looked, *found, *more]

    for times in (0.0, 1.0, 2.0):
        counted.take("p", told(times))
    totals = counted.totals(0.0)
    ratio = totals.cached_tokens / totals.looked_up_tokens
    assert 0.4 <= ratio <= (4 * 0.4 + 2.0) / 6.0 + 1e-9
