"""What is broken is said on stderr and in /health, in the words of docs/operate/runbook.md."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from proxy.config.load import load
from tests.support.admin import call
from tests.support.harness import ANSWER, RawEngine, ServedProxy, chat, plain, says, stalls, until

WITHIN_S = 2.0
"""From the fault to its line: some ten times what it takes here."""
LOOKS = {"health_interval": 0.1, "health_timeout": 0.2}
"""The defaults are 1 s and 1 s."""
MODELS = plain(b'{"data":[{"id":"sim-8b"}]}')
OTHER = plain(b'{"data":[{"id":"other-7b"}]}')
PAGE = Path(__file__).parents[2] / "docs/operate/runbook.md"


def rows() -> list[tuple[str, ...]]:
    """The table of docs/operate/runbook.md: what is broken, stderr, /health, status."""
    block = PAGE.read_text("utf-8").split("<!-- seen -->")[1]
    lines = block.strip().splitlines()[2:]
    cells = [[cell.strip().strip("`") for cell in line.strip("| ").split(" | ")] for line in lines]
    return [tuple(row) for row in cells]


def pattern(said: str) -> re.Pattern[str]:
    """A cell of the table; N is a number, PATH a file."""
    text = re.escape(said).replace("PATH", r"\S+")
    return re.compile(re.sub(r"\bN\b", r"[0-9]+(\\.[0-9]+)?", text))


def texts(value: Any) -> Iterator[str]:
    """Every text in an answer of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from texts(one)


@asynccontextmanager
async def served(
    folder: Path, count: int, **options: Any
) -> AsyncIterator[tuple[ServedProxy, list[RawEngine]]]:
    """A proxy in front of scripted engines a, b, c."""
    engines = [RawEngine(says(ANSWER)) for _ in range(count)]
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        named = [f"{name}={e.address}" for name, e in zip("abc", engines, strict=False)]
        async with ServedProxy(folder / "log", named, **(LOOKS | options)) as proxy:
            await proxy.up()
            yield proxy, engines


Fault = Callable[[Path], AbstractAsyncContextManager[ServedProxy]]


@asynccontextmanager
async def killed(folder: Path) -> AsyncIterator[ServedProxy]:
    async with served(folder, 3) as (proxy, (a, *_)):
        await a.__aexit__()
        yield proxy


@asynccontextmanager
async def hung(folder: Path) -> AsyncIterator[ServedProxy]:
    async with served(folder, 3) as (proxy, (a, *_)):
        a.is_frozen = True
        yield proxy


@asynccontextmanager
async def wrong_port(folder: Path) -> AsyncIterator[ServedProxy]:
    async with RawEngine(says(ANSWER)) as good, RawEngine(says(ANSWER)) as gone:
        await gone.__aexit__()
        instances = [f"a={gone.address}", f"b={good.address}"]
        async with ServedProxy(folder / "log", instances, **LOOKS) as proxy:
            yield proxy


@asynccontextmanager
async def beside(
    folder: Path, *, health: bytes | None = None, other: bytes | None = None, **options: Any
) -> AsyncIterator[ServedProxy]:
    """An engine that answers so to probes, from the start, beside one that works."""
    async with RawEngine(says(ANSWER)) as good, RawEngine(says(ANSWER)) as odd:
        if health is not None:
            odd.gets["/health"] = health
        if other is not None:
            odd.tells(other)
        instances = [f"a={odd.address}", f"b={good.address}"]
        async with ServedProxy(folder / "log", instances, **LOOKS | options) as proxy:
            yield proxy


@asynccontextmanager
async def other_model(folder: Path) -> AsyncIterator[ServedProxy]:
    async with served(folder, 3) as (proxy, (a, *_)):
        member = proxy.router.known.fleet.get("a")
        a.tells(MODELS)
        member.rereads_models = True
        await until(lambda: member.models == {"sim-8b"}, "it serves one model")
        await a.__aexit__()
        await until(lambda: member.health.is_gone, "it is gone")
        a.tells(OTHER)
        await a.__aenter__()
        yield proxy


@asynccontextmanager
async def full(folder: Path) -> AsyncIterator[ServedProxy]:
    async with RawEngine(says(plain(b"{}", "503 Service Unavailable"))) as engine:
        engine.tells(MODELS)
        instances = [f"a={engine.address}"]
        async with ServedProxy(folder / "log", instances, max_queue=0, **LOOKS) as proxy:
            await proxy.up()
            for text in "abc":
                assert (await proxy.post(chat(text))).status == 503
            yield proxy


@asynccontextmanager
async def overload(folder: Path) -> AsyncIterator[ServedProxy]:
    async with RawEngine(stalls()) as engine:
        engine.tells(MODELS)
        options = LOOKS | {"active_prefill_tokens_threshold": 0, "max_queue": 0}
        async with ServedProxy(folder / "log", [f"a={engine.address}"], **options) as proxy:
            await proxy.up()
            first = asyncio.create_task(proxy.post(chat("first")))
            await until(lambda: engine.posts, "the first one is there")
            assert (await proxy.post(chat("second"))).status == 503
            yield proxy
            first.cancel()
            await asyncio.wait({first})


@asynccontextmanager
async def most_dead(folder: Path) -> AsyncIterator[ServedProxy]:
    async with served(folder, 3) as (proxy, (a, b, _)):
        a.is_frozen = b.is_frozen = True
        yield proxy


@asynccontextmanager
async def all_dead(folder: Path) -> AsyncIterator[ServedProxy]:
    async with served(folder, 3) as (proxy, engines):
        for engine in engines:
            await engine.__aexit__()
        yield proxy


@asynccontextmanager
async def full_disk(folder: Path) -> AsyncIterator[ServedProxy]:
    async with served(folder, 1, request_log="/dev/full") as (proxy, _):
        assert (await proxy.post(chat("x"))).status == 200
        yield proxy


@asynccontextmanager
async def bad_reload(folder: Path) -> AsyncIterator[ServedProxy]:
    path = folder / "proxy.toml"
    path.write_text('instanses = ["gpu-1"]\n')
    source = lambda: load(["--config", str(path)], {}).settings  # noqa: E731
    async with served(folder, 1, source=source) as (proxy, _):
        assert await proxy.server.reloader.reload("SIGHUP") == "refused"
        yield proxy


FAULTS: dict[str, Fault] = {
    "an engine is killed": killed,
    "an engine hangs": hung,
    "a wrong port": wrong_port,
    "a port of another server": partial(beside, health=plain(b"", "404 Not Found")),
    "a wrong model": partial(beside, other=OTHER, model="sim-8b"),
    "an engine comes back with another model": other_model,
    "a wrong key": partial(beside, other=plain(b"", "401 Unauthorized")),
    "every engine is full": full,
    "overload: past a threshold": overload,
    "more than half are dead": most_dead,
    "all are dead": all_dead,
    "the disk of the request log is full": full_disk,
    "a reload is refused": bad_reload,
}


def test_each_row_is_a_fault_that_is_made() -> None:
    assert [row[0] for row in rows()] == list(FAULTS)


@pytest.mark.parametrize(("broken", "line", "told", "status"), rows(), ids=lambda text: text[:32])
async def test_it_is_seen_within_two_seconds(
    broken: str,
    line: str,
    told: str,
    status: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop, seen = asyncio.get_running_loop(), dict[str, Any]()
    async with FAULTS[broken](tmp_path) as proxy:
        broken_s = loop.time()

        async def is_seen() -> bool:
            _, health = await call(proxy, "GET", "/health")
            in_health = any(pattern(told).fullmatch(text) for text in texts(health))
            on_stderr = any(pattern(line).fullmatch(text) for text in caplog.messages)
            seen.update(health=health, in_health=in_health, on_stderr=on_stderr)
            return in_health and on_stderr and health["status"] == status

        try:
            await until(is_seen, f"{broken}: it is said", WITHIN_S)
        except AssertionError:
            raise AssertionError(f"{broken}: {seen}; stderr {caplog.messages}") from None
        sys.stdout.write(f"{broken}: seen after {loop.time() - broken_s:.2f} s\n")


async def test_a_model_that_nobody_serves_is_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One for all that clients invent, and it tells what there is."""
    async with served(tmp_path, 1) as (proxy, _):
        for number in range(3):
            assert (await proxy.post(chat("x", model=f"gpt-{number}"))).status == 404
    said = [message for message in caplog.messages if "requests for model" in message]
    assert said == ["requests for model 'gpt-0' are refused: known here are m, sim-8b"]
