"""Debian's Prometheus on a private port, while a test needs it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from bench.measuring.processes import Child
from tests.support.harness import until

CONFIG = "global: {scrape_interval: 200ms, scrape_timeout: 200ms}\nscrape_configs:\n"
JOB = '  - job_name: %s\n    static_configs: [{targets: ["%s"]}]\n'

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Debian's package prometheus is not installed"
)


@asynccontextmanager
async def prometheus(tmp_path: Path, targets: Mapping[str, str]) -> AsyncIterator[str]:
    """Its address; `targets`: what is scraped, five times a second, by job."""
    config = tmp_path / "prometheus.yml"
    jobs = [JOB % (job, url.removeprefix("http://")) for job, url in targets.items()]
    await asyncio.to_thread(config.write_text, CONFIG + "".join(jobs))
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/tsdb"]
    with Child([*command, "--web.listen-address=127.0.0.1:0"]) as server:
        address = await until(lambda: server.found(r'msg="Listening on" address=(\S+)'))
        url = f"http://{address[1]}"

        async def is_ready() -> bool:
            async with aiohttp.ClientSession() as session:
                async with session.get(f"{url}/-/ready") as answer:
                    return answer.status == 200

        await until(is_ready, "Prometheus answers queries")
        yield url
