"""Busy thresholds as a client and an operator see them, in front of scripted engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.chaos.scripted import Scripted
from tests.support.admin import call
from tests.support.harness import ServedProxy, chat, plain, until


@asynccontextmanager
async def served(folder: Path, *engines: Scripted, **options: Any) -> AsyncIterator[ServedProxy]:
    """A proxy without a queue in front of these engines, under the names e0, e1, ..."""
    addresses = [f"e{at}={engine.url}" for at, engine in enumerate(engines)]
    options = {"max_queue": 0, "scrape_interval": 0.02, "health_interval": 0.02} | options
    async with ServedProxy(folder / "log.jsonl", addresses, **options) as proxy:
        await proxy.up()
        yield proxy


def report(*used_by_rank: float, tokens: int = 100_000) -> bytes:
    """An engine's /metrics: the KV usage of each data-parallel rank and the size of its cache."""
    text = "".join(
        f'vllm:kv_cache_usage_perc{{engine="{rank}"}} {used}\n'
        f'vllm:cache_config_info{{engine="{rank}",kv_cache_size_tokens="{tokens}"}} 1\n'
        for rank, used in enumerate(used_by_rank)
    )
    return plain(text.encode())


async def test_an_instance_is_busy_only_while_all_its_ranks_are(tmp_path: Path) -> None:
    async with Scripted() as engine:
        engine.gets["/metrics"] = report(0.95, 0.2)
        async with served(tmp_path, engine, active_decode_blocks_threshold=0.85) as proxy:

            async def status_at(*used_by_rank: float) -> int:
                """The status of a request once the engine has reported this."""
                engine.gets["/metrics"] = report(*used_by_rank)

                async def is_read() -> bool:
                    (instance,) = (await call(proxy, "GET", "/instances"))[1]
                    stats = instance["engine"]
                    return stats is not None and stats["kv_used_by_rank"] == [*used_by_rank]

                await until(is_read, "the report is read")
                return (await proxy.post(chat("x", stream=False))).status

            assert await status_at(0.95, 0.2) == 200
            assert await status_at(0.95, 0.86) == 503
            assert await status_at(0.2, 0.95) == 200
            assert proxy.metric("kv_cache_usage_ratio", upstream="e0") == 0.95, "the fullest rank"
