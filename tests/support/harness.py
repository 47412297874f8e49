"""A real proxy in front of real sockets: simulated engines, or servers that misbehave by script."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import orjson

from proxy.app import Proxy
from proxy.config.options import Settings
from proxy.core.types import Load
from replayer.simulator.host import SimFleet

T = TypeVar("T")
WAIT_S = 30.0
"""Nothing takes this long, on a machine with much else to do either."""


STILL_LOOKS = 20
"""Of `until`, a tenth of a second at least: nothing tells that nothing happens any more."""


async def until(condition: Callable[[], Any], what: str = "", limit_s: float = WAIT_S) -> Any:
    """What a condition gives, once that is true. The condition may be a coroutine function."""
    try:
        async with asyncio.timeout(limit_s):
            while True:
                found = condition()
                if found := await found if inspect.isawaitable(found) else found:
                    return found
                await asyncio.sleep(0.005)  # how often is looked, in the one place that does
    except TimeoutError:
        raise AssertionError(f"never came true: {what or condition}") from None


async def stands_still(value: Callable[[], Any]) -> Any:
    """The value, once it is the same at so many looks: nobody takes any more bytes."""
    seen, looks = value(), 0

    def is_still() -> bool:
        nonlocal seen, looks
        before, seen = seen, value()
        looks = looks + 1 if seen == before else 0
        return looks == STILL_LOOKS

    await until(is_still, "standing still")
    return seen


async def spend(seconds: float) -> None:
    """Let time pass where it is the input: when something strikes, or how long it lasts."""
    await asyncio.sleep(seconds)  # the one place for that; each call says why


async def stopped(pid: int, seconds: float) -> None:
    """Stop a process and continue it: it sees its clock jump by so much."""
    os.kill(pid, signal.SIGSTOP)
    await spend(seconds)  # what is tested: longer than any limit of the process
    os.kill(pid, signal.SIGCONT)


async def apart(writer: asyncio.StreamWriter, pieces: Iterable[bytes], pause_s: float) -> None:
    """Write pieces one by one, so that each is read by itself: the pause is a part of the input."""
    for piece in pieces:
        if writer.is_closing():
            return
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(pause_s)  # less, and two would be read as one


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Whether an event is set so soon: for what is done now and then until something is over."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            return await event.wait()
    except TimeoutError:
        return event.is_set()


async def let_out() -> None:
    """Let written bytes be read before a reset, which discards what is still queued."""
    await asyncio.sleep(0.02)  # the kernel tells what is acknowledged, not what was read


def at_once(parser: Generator[None, None, T]) -> T:
    """The value of a parser that offers pauses, without any."""
    try:
        while True:
            next(parser)
    except StopIteration as done:
        value: T = done.value
        return value


def words(count: int, seed: str = "w") -> str:
    return " ".join(f"{seed}{i:07d}" for i in range(count))


def chat(text: str, *, stream: bool = True, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "sim-8b", "messages": [{"role": "user", "content": text}]}
    body |= {"max_tokens": max_tokens, "stream": stream, "ignore_eos": True}
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body | more


class ServedProxy:
    """A listening proxy in this loop, its client session, and its request log."""

    def __init__(self, log: Path, instances: list[str], **options: Any) -> None:
        """`options` are those of the command; `source` reads them anew for a reload."""
        source = options.pop("source", None)
        defaults: dict[str, Any] = {
            "port": 0,
            "host": "127.0.0.1",
            "health_interval": 0.05,
            "scrape_interval": 0.1,
            "request_log": str(log),
            "bootstrap_port": None,  # another process of this machine may have the usual one
        }
        self._log = log
        self.settings = Settings(instances=instances, **(defaults | options))
        self.server = Proxy(self.settings, source)
        self._stack = AsyncExitStack()
        self.http: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        await self.server.start()
        self._stack.push_async_callback(self.server.close)
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        periodic = tasks.create_task(self.server.run_background())
        self._stack.callback(periodic.cancel)
        connector = aiohttp.TCPConnector(limit=0)
        self.http = await self._stack.enter_async_context(
            aiohttp.ClientSession(self.server.url, connector=connector)
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    @property
    def router(self) -> Any:
        return self.server.state.router

    @property
    def listener(self) -> Any:
        """aiohttp's server: client connections, and how many requests there were."""
        return self.server._runner.server

    async def up(self) -> None:
        """Wait until every instance's models are known."""
        members = self.router.known.fleet.members
        await until(lambda: all(m.models is not None for m in members()), "models known")

    async def post(self, body: Any, path: str = "/v1/chat/completions", **kwargs: Any) -> Answer:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        headers = {"Content-Type": "application/json"} | kwargs.pop("headers", {})
        async with self.http.post(path, data=data, headers=headers, **kwargs) as response:
            return Answer(response.status, response.headers, await response.read())

    async def records(self, count: int) -> list[dict[str, Any]]:
        """The request log, once it has this many lines."""
        await until(lambda: len(self._lines()) >= count, f"{count} log lines")
        return [orjson.loads(line) for line in self._lines()]

    def _lines(self) -> list[bytes]:
        """The whole lines; the log's thread may be in the middle of another."""
        written = self._log.read_bytes()
        return written[: written.rfind(b"\n") + 1].splitlines()

    async def at_rest(self) -> None:
        """Nothing in flight, every counter at zero, no drift."""
        state = self.server.state
        await until(lambda: state.in_flight.count == 0, "no request in flight")
        await until(lambda: self.router.known.ledger.live == 0, "no lease is open")
        assert self.router.known.ledger.drift() == 0
        for member in self.router.known.fleet.members():
            assert self.router.known.ledger.load(member.instance.name) == Load()

    def connections(self) -> int:
        """Upstream connections that are in use."""
        return sum(u.in_use for u in self.server.state.instances.all())

    def metric(self, name: str, **labels: str) -> float:
        value = self.server.state.metrics.registry.get_sample_value(f"cache_proxy_{name}", labels)
        return value or 0.0

    def rejected(self, reason: str) -> float:
        """Requests refused for a reason, whatever check is behind it."""
        counts = self.server.state.metrics.rejected
        (family,) = counts.collect()
        return sum(s.value for s in family.samples if s.labels.get("reason") == reason)


class Answer:
    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def text(self) -> str:
        """What the model said, from a stream's chunks."""
        events = [e for e in self.body.split(b"\n\n") if e.startswith(b"data: {")]
        choices = [c for e in events for c in orjson.loads(e[6:]).get("choices", ())]
        return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


def addresses(fleet: SimFleet) -> list[str]:
    return [f"{e.url};bootstrap={e.bootstrap_url}" for e in fleet.engines]


@asynccontextmanager
async def proxied(
    tmp_path: Path, engines: int = 2, *, sim: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[ServedProxy, SimFleet]]:
    """A proxy in front of simulated engines, ready."""
    fast = {"speed": 50.0, "tick": 0.0}
    async with SimFleet(engines, **(fast | (sim or {}))) as fleet:
        async with ServedProxy(tmp_path / "log.jsonl", addresses(fleet), **options) as proxy:
            await proxy.up()
            yield proxy, fleet


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class RawEngine:
    """A server that answers its n-th POST by the n-th script over the raw connection.

    The last script repeats. A GET is answered from `gets`, with 404 where that has nothing. It is
    its own bootstrap server (`/query`).
    """

    def __init__(
        self,
        *scripts: Script,
        models: Iterable[str] = ("sim-8b", "m"),
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._host = host
        self.port = port
        self.scripts = list(scripts) or [says(ANSWER)]
        self.posts: list[bytes] = []
        self.heads: list[bytes] = []
        """Of all requests, probes as well."""
        self.busy = 0
        """Posts that are being answered."""
        self.connections: set[asyncio.StreamWriter] = set()
        self.is_frozen = False
        """Like a stopped process: takes connections and bytes, answers nothing, no probe."""
        cards = orjson.dumps({"data": [{"id": model} for model in models]})
        self.gets: dict[str, bytes | Script] = {
            "/health": plain(b""),
            "/v1/models": plain(cards),
            "/metrics": plain(b""),
            "/query": plain(b'{"0":{"engine_id":"e-1","worker_addr":{}}}'),
        }
        self._other = plain(b"{}", "404 Not Found")
        self._server: asyncio.Server

    @property
    def post_heads(self) -> list[bytes]:
        """Of the posts, in their order."""
        return [head for head in self.heads if not head.startswith(b"GET")]

    def tells(self, answer: bytes) -> None:
        """Answer so to any GET but of its health."""
        self.gets, self._other = {"/health": self.gets["/health"]}, answer

    async def __aenter__(self) -> Self:
        where = (self._host, self.port)
        self._server = await asyncio.start_server(self._serve, *where, limit=1 << 26)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for writer in list(self.connections):
            writer.transport.abort()
        await until(lambda: not self.connections, "every connection has ended")

    @property
    def address(self) -> str:
        return f"http://{self._host}:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if self.is_frozen:
                    await reader.read()
                    return
                self.heads.append(head)
                if head.startswith(b"GET"):
                    script = self.gets.get(head.split()[1].decode(), self._other)
                    await (says(script) if isinstance(script, bytes) else script)(reader, writer)
                else:
                    await self._post(head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.connections.discard(writer)
            writer.close()

    async def _post(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        length = re.search(rb"\ncontent-length: *(\d+)", head, re.IGNORECASE)
        body = await reader.readexactly(int(length[1]) if length else 0)
        self.posts.append(body)
        self.busy += 1
        try:
            await self.scripts[min(len(self.posts), len(self.scripts)) - 1](reader, writer)
        finally:
            self.busy -= 1


def plain(body: bytes, status: str = "200 OK", extra: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{extra}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def event(content: str) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % content.encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def says(data: bytes, *, close: bool = False) -> Script:
    """Send these bytes; keep the connection, or close it."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        if close:
            raise ConnectionError

    return script


def resets(after: bytes = b"") -> Script:
    """Send these bytes, then RST."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if after:
            writer.write(after)
            await writer.drain()
            await let_out()
        writer.transport.abort()
        raise ConnectionError

    return script


def stalls(after: bytes = b"") -> Script:
    """Send these bytes, then nothing until the peer closes."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(after)
        await writer.drain()
        await reader.read()
        raise ConnectionError

    return script


ANSWER = STREAM_HEAD + chunk(event("fine")) + DONE
"""A whole good stream."""
GOOD = says(ANSWER)
