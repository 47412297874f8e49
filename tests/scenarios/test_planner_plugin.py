"""The plugin of the deployment page, as a process: the planner takes what it says."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from planner.config.options import PlannerOptions
from planner.service import made, validate
from tests.support.harness import proxied
from tests.test_layers import ROOT


def script() -> str:
    """The page's only block of Python."""
    (_, block) = (ROOT / "docs/deploy/planner.md").read_text("utf-8").split("```python\n")
    return block.partition("```")[0]


@asynccontextmanager
async def launched(folder: Path, port: int) -> AsyncIterator[None]:
    (folder / "launch.py").write_text(script())
    command = [sys.executable, "launch.py", f"127.0.0.1:{port}"]
    environment = {"PYTHONPATH": str(ROOT)}
    process = await asyncio.to_thread(subprocess.Popen, command, cwd=folder, env=environment)
    try:
        yield
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


async def test_the_pages_plugin_is_taken_at_its_word(tmp_path: Path) -> None:
    port = free_port()
    table = {"name": "launch", "stage": "propose", "address": f"127.0.0.1:{port}"}
    (tmp_path / "launch.txt").write_text("6\n")
    async with proxied(tmp_path, 1) as (proxy, _), launched(tmp_path, port):
        options = PlannerOptions(
            proxies=proxy.server.url,
            state_file=tmp_path / "state.json",
            audit_log=tmp_path / "audit.jsonl",
            tick_max_duration_seconds=300.0,
            plugin=[table | {"deadline_seconds": 25.0}],
        )
        while await validate(options):
            await asyncio.sleep(0.05)
        async with made(options) as (planner, _, _):
            planner.begin()
            await planner.tick()
            (tmp_path / "launch.txt").write_text("soon\n")
            failed = await planner.tick()
            await planner.end()
    line = json.loads((tmp_path / "audit.jsonl").read_text().splitlines()[0])
    assert line["targets"] == {"combined": 6}
    assert "plugin launch: at_least 6 of combined" in line["decision"]["reason"]
    assert failed.decided is not None
    (told,) = failed.decided["plugins"]
    assert told["state"] == "failed"
    assert "unknown: " in told["failure"]
