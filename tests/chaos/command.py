"""The proxy as a process of its own: for signals, file descriptors, memory, and load.

    async with command(folder, [engine.url], "--drain-seconds", "1") as proxy:
        proxy.send_signal(signal.SIGTERM)

Invariants are read from outside: its `/metrics`, its log, its request log, `/proc`.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson

from proxy.state.uploads import WAIT_S
from tests.chaos import invariants as inv
from tests.chaos.client import Got, exchange, request
from tests.chaos.invariants import holds
from tests.chaos.rig import CANARIES, ENGINE_SECRET, MAX_RETRIES, PROMPT_SECRET, SECRETS
from tests.support.harness import chat, until
from tests.support.proxy_process import START_S, ProxyProcess

ROOT = Path(__file__).parents[2]


class Command(ProxyProcess):
    """A running `cache-proxy`, which logs its requests."""

    def __init__(self, folder: Path, *options: str, shell: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(*options, shell=shell, output=folder / "stderr", cwd=ROOT)
        self.folder = folder
        self.answers: list[Got] = []
        self.may_log: tuple[str, ...] = ()
        """Words of lines that the row expects at ERROR."""

    @property
    def records(self) -> list[dict[str, Any]]:
        """Its request log; a line that is being written is left out."""
        path = self.folder / "requests.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
        return [orjson.loads(line) for line in lines]

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> Got:
        return await exchange(self.url, request(None, headers or {}, path, "GET"))

    async def ask(self, text: str = "hello", **fields: Any) -> Got:
        """A request with secrets in it, and its answer."""
        body = orjson.dumps(chat(f"{text} {PROMPT_SECRET}", **fields))
        got = await exchange(self.url, request(body, CANARIES))
        self.answers.append(got)
        return got

    async def exposition(self) -> str:
        return (await self.get("/metrics")).body.decode()

    async def metric(self, name: str) -> float:
        """A metric, summed over its labels."""
        found = inv.samples(await self.exposition())
        return sum(value for sample, _, value in found if sample == name)

    async def up(self, count: int) -> None:
        """Wait until so many instances were seen."""

        async def are_seen() -> bool:
            return (await self.get("/health")).body.count(b'"is_up":true') >= count

        async def models_are_known() -> bool:
            return b'"id"' in (await self.get("/v1/models")).body

        await until(are_seen, f"{count} instances are up", START_S)
        await until(models_are_known, "models are known", START_S)

    @property
    def rss_bytes(self) -> int:
        return self._status("VmRSS") << 10

    @property
    def fds(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def _status(self, name: str) -> int:
        text = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
        assert found is not None
        return int(found[1])

    async def check(self) -> None:
        """What can be seen of I1, I2, I4, I5, I7 and I10 from outside, while it runs."""
        has_log = (self.folder / "requests.jsonl").is_file()

        async def is_at_rest() -> bool:
            if inv.not_zero(await self.exposition()):
                return False
            return not has_log or await self._agrees()

        with contextlib.suppress(AssertionError):
            await until(is_at_rest, limit_s=2 * WAIT_S)  # a client that left may wait so
        text = await self.exposition()
        left = inv.not_zero(text)
        holds("I1", not left, f"counters are not at zero: {left}")
        if has_log:
            # What ends now is in the log at once; the metrics' text may be a second old.
            with contextlib.suppress(AssertionError):
                await until(self._agrees)
            log, metrics = inv.logged(self.records), inv.outcomes(await self.exposition())
            holds("I2", log == metrics, f"log and metrics disagree: {log}, {metrics}")
            worst = max((r["retries"] for r in self.records), default=0)
            holds("I10", worst <= MAX_RETRIES, f"{worst} retries of one request")
        leaked = inv.hits([*SECRETS, ENGINE_SECRET], self.log, text, repr(self.records))
        holds("I7", not leaked, f"secrets in the outputs: {leaked}")

    async def _agrees(self) -> bool:
        return inv.logged(self.records) == inv.outcomes(await self.exposition())

    def check_after(self) -> None:
        """The rest, which needs no running process."""
        for got in self.answers:
            holds("I4", inv.is_honest(got), f"a false clean end: {got.body[-200:]!r}")
            holds("I4", inv.says_when(got), f"a 503 without Retry-After: {got.body[-200:]!r}")
        errors = [line for line in self.log.splitlines() if " ERROR " in line]
        errors = [line for line in errors if not any(word in line for word in self.may_log)]
        holds("I5", not errors, f"errors in the log: {errors[:2]}")
        bad = inv.bad_lines(self.log.splitlines())
        holds("I5", not bad, f"in the log: {bad[:2]}")


@asynccontextmanager
async def command(
    folder: Path,
    instances: Sequence[str],
    *options: str,
    shell: str = "",
    request_log: str | None = None,
    checks: bool = True,
) -> AsyncIterator[Command]:
    """Start it, wait until it listens, stop it by pid. `shell`: commands before, such as ulimit."""
    log = str(folder / "requests.jsonl") if request_log is None else request_log
    words = ["--instances", ",".join(instances)] if instances else []
    words += ["--kv-connector", "none"] if "--kv-connector" not in options else []
    words += ["--request-log", log, *options]
    with Command(folder, *words, shell=shell) as running:
        try:
            await running.listens()
            yield running
            if checks and running.is_alive:
                await running.check()
        finally:
            running.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await running.ended()
    if checks:
        running.check_after()
