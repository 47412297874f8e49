"""What one request costs the shell, without the kernel: `make bench-shell`.

The whole process but its sockets: a client's connection and an instance's are the real protocol
objects over transports that hand bytes on at once. Printed are CPU time per request (the best of
several runs: everything else on the machine only adds to it) and the calls that Python makes for
one, which do not vary. Both an answer in one piece and a stream of one event; and the CPU time per
event of a longer stream, without and with `--migration-limit`, for which engines tell token ids:
without the kernel too, and with it, on sockets whose other ends a thread of its own holds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import orjson
import uvloop
from rich.console import Console

from bench.cost.tables import Grid, number
from bench.measuring import bodies
from proxy import described
from proxy.app import Proxy
from proxy.config.options import Settings
from proxy.config.values import InstanceSpec
from proxy.net.server.connection import ClientConnection
from proxy.net.upstream.connection import UpstreamConnection as Upstream

INSTANCES = 8
RUNS, REQUESTS = 7, 1000
USAGE = b'{"prompt_tokens":500,"total_tokens":508,"completion_tokens":8}'
MESSAGE = b'[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"stop"}]'
WHOLE = b'{"id":"x","object":"chat.completion","choices":%b,"usage":%b}' % (MESSAGE, USAGE)
EVENT = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
EVENTS = EVENT + b'data: {"id":"x","choices":[],"usage":' + USAGE + b"}\n\ndata: [DONE]\n\n"
BODIES = {"plain": "2k_plain8", "stream": "2k_stream1", "events": "2k_stream1"}
LONG_EVENTS, LONG_REQUESTS = 1000, 20
ANSWERS = {
    "plain": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    % (len(WHOLE), WHOLE),
    "stream": b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(EVENTS), EVENTS),
}


def _event(ids: str, prompt_ids: str = "") -> bytes:
    """A chunk of an event of a chat, as vLLM writes it."""
    event = (
        'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":'
        '1790000000,"model":"bench","choices":[{"index":0,"delta":{"content":" word"},"logprobs":'
        f'null,"finish_reason":null,"token_ids":{ids}}}]{prompt_ids}}}\n\n'
    ).encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


def _long_answer(*, has_ids: bool) -> list[bytes]:
    """A stream in as many pieces as it has events."""
    head = ANSWERS["stream"].partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    first = _event("null", ',"prompt_token_ids":[1,2,3]' if has_ids else "")
    middle = [_event("[12345]" if has_ids else "null")] * LONG_EVENTS
    return [head + first, *middle, b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"]


_SOCKET = socket.socket(socket.AF_UNIX)
"""One that takes no TCP options."""


class Wire(asyncio.Transport):
    """A connection whose other end is a function."""

    def __init__(self, told: Callable[[Any], None]) -> None:
        super().__init__({"socket": _SOCKET})
        self._told = told

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Hand it on."""
        self._told(bytes(data))

    def get_write_buffer_size(self) -> int:
        """Everything is taken at once."""
        return 0

    def is_closing(self) -> bool:
        """Never."""
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is no buffer."""

    def pause_reading(self) -> None:
        """Nothing comes unasked."""

    def resume_reading(self) -> None:
        """Nothing comes unasked."""

    def abort(self) -> None:
        """Nothing is open."""

    def close(self) -> None:
        """Nothing is open."""


class Rig:
    """One client's connection to a proxy whose instances answer at once."""

    def __init__(self, server: Proxy, kind: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._answer = ANSWERS.get(kind, b"")
        self._pieces: list[bytes] = []
        """Of a long stream: what is said in so many reads."""
        raw = orjson.dumps(bodies.body(BODIES[kind], 0))
        self._request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: proxy\r\nX-Session-ID: bench-%d\r\n"
            b"Content-Type: application/json\r\nContent-Length: "
        )
        self._rest = b"%d\r\n\r\n" % len(raw) + raw
        self._ended: asyncio.Future[None] = self._loop.create_future()
        made = server._runner.server
        assert made is not None
        connection = made()
        assert isinstance(connection, ClientConnection)
        self._client = connection
        connection.connection_made(Wire(self._took))
        for upstream in server.state.instances.all():
            pool = upstream._pool
            mine = Upstream(self._loop, pool._rest, pool._lost)
            mine.connection_made(Wire(lambda _, one=mine: self._asked(one)))  # type: ignore[misc]
            pool._open.add(mine)
            pool._rest(mine)

    def _asked(self, upstream: Upstream) -> None:
        self._loop.call_soon(self._say, upstream)

    def _say(self, upstream: Upstream) -> None:
        for piece in self._pieces or (self._answer,):
            size = len(piece)
            upstream.get_buffer(size)[:size] = piece
            upstream.buffer_updated(size)

    def _took(self, data: bytes) -> None:
        if self._pieces:
            if data.endswith(b"0\r\n\r\n"):
                self._ended.set_result(None)
            return
        if not (data.startswith(b"HTTP/1.1 200 ") and data.endswith(self._answer[-8:])):
            raise AssertionError(f"not the answer: {data[:200]!r}")
        self._ended.set_result(None)

    async def request(self, number: int) -> None:
        """One request, to its end."""
        self._ended = self._loop.create_future()
        self._client.data_received(self._request % (number % 32) + self._rest)
        await self._ended
        await asyncio.sleep(0)  # the connection's task comes to rest


async def measure(
    kind: str, instances: tuple[InstanceSpec, ...], log: Path | None
) -> tuple[float, Counter[str]]:
    """CPU seconds per request of this thread, and the calls of one."""
    server = Proxy(
        Settings(
            instances=instances,
            prefill_throughput=20000.0,
            host="127.0.0.1",
            port=0,
            health_interval=3600.0,
            request_log=log,
        )
    )
    await server.start()
    try:
        for name in server.state.instances.by_name:
            server.state.router.known.events.answered(name)
        rig = Rig(server, kind)
        best_s = float("inf")
        gc.disable()
        for _ in range(RUNS):
            start_s = time.thread_time()
            for number_ in range(REQUESTS):
                await rig.request(number_)
            best_s = min(best_s, (time.thread_time() - start_s) / REQUESTS)
            gc.collect()
        calls = await _counted(rig)
    finally:
        gc.enable()
        await server.close()
    return best_s, calls


async def per_event(instances: tuple[InstanceSpec, ...], limit: int) -> float:
    """CPU seconds of this thread per event of a long stream."""
    server = Proxy(
        Settings(
            instances=instances,
            host="127.0.0.1",
            port=0,
            health_interval=3600.0,
            migration_limit=limit,
        )
    )
    await server.start()
    try:
        for name in server.state.instances.by_name:
            server.state.router.known.events.answered(name)
        rig = Rig(server, "events")
        rig._pieces = _long_answer(has_ids=limit > 0)
        best_s = float("inf")
        for _ in range(RUNS):
            start_s = time.thread_time()
            for number_ in range(LONG_REQUESTS):
                await rig.request(number_)
            best_s = min(best_s, (time.thread_time() - start_s) / LONG_REQUESTS / LONG_EVENTS)
    finally:
        await server.close()
    return best_s


class Peer:
    """The client and the instance of one stream at a time, on real sockets, in a thread."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]

    def stream(self, proxy_port: int) -> None:
        """A whole stream: each piece is sent once the client has the one before it."""
        raw = orjson.dumps(bodies.body(BODIES["events"], 0))
        with socket.create_connection(("127.0.0.1", proxy_port)) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: proxy\r\nContent-Type: "
                b"application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(raw), raw)
            )
            upstream, _ = self._listening.accept()
            with upstream:
                upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while not upstream.recv(1 << 20).endswith(b"}"):
                    pass
                for piece in self._pieces:
                    upstream.sendall(piece)
                    if not client.recv(1 << 16):
                        raise AssertionError("the stream was cut")

    def close(self) -> None:
        """Nobody listens any more."""
        self._listening.close()


async def per_event_on_sockets(limit: int) -> float:
    """CPU seconds of this thread per event of a long stream, the kernel's part included."""
    peer = Peer(_long_answer(has_ids=limit > 0))
    spec = InstanceSpec("i", f"http://127.0.0.1:{peer.port}", None)
    server = Proxy(
        Settings(
            instances=(spec,),
            host="127.0.0.1",
            port=0,
            health_interval=3600.0,
            migration_limit=limit,
        )
    )
    await server.start()
    try:
        server.state.router.known.events.answered("i")
        port = int(server.url.rpartition(":")[2])
        best_s = float("inf")
        for _ in range(RUNS):
            start_s = time.thread_time()
            await asyncio.to_thread(peer.stream, port)
            best_s = min(best_s, (time.thread_time() - start_s) / LONG_EVENTS)
    finally:
        await server.close()
        peer.close()
    return best_s


async def _counted(rig: Rig) -> Counter[str]:
    calls: Counter[str] = Counter()

    def seen(frame: FrameType, event: str, arg: Any) -> None:
        del arg
        if event == "call":
            calls[f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"] += 1

    sys.setprofile(seen)
    try:
        await rig.request(0)
    finally:
        sys.setprofile(None)
    mine = [name for name in calls if name.startswith(__name__)]
    for name in mine:
        del calls[name]
    return calls


def main() -> int:
    """The table; with `--calls` every function that one request enters."""
    parser = argparse.ArgumentParser(prog="python -m bench.shell", description=__doc__)
    parser.add_argument("--calls", action="store_true", help="name the functions entered")
    parser.add_argument("--request-log", type=Path, help="write one (by another thread)")
    args = parser.parse_args()
    console = Console()
    specs = tuple(
        InstanceSpec(f"i{i}", f"http://127.0.0.1:{i + 1}", None) for i in range(INSTANCES)
    )
    rows: list[list[str]] = []
    listed: dict[str, Counter[str]] = {}
    for kind in ANSWERS:
        seconds, listed[kind] = uvloop.run(measure(kind, specs, args.request_log))
        rows.append([kind, number(1e6 * seconds), str(listed[kind].total())])
    title = f"One request, {INSTANCES} instances, cache-proxy {described()}"
    console.print(Grid(title, ["answer", "CPU µs", "Python calls"], rows).rich())
    events = []
    for limit in (0, 1):
        bare_s = uvloop.run(per_event(specs, limit))
        whole_s = uvloop.run(per_event_on_sockets(limit))
        events.append([str(limit), number(1e6 * bare_s), number(1e6 * whole_s)])
    title = f"One event of a stream of {LONG_EVENTS}: CPU µs"
    heads = ["--migration-limit", "without the kernel", "with it"]
    console.print(Grid(title, heads, events).rich())
    for kind, calls in listed.items() if args.calls else ():
        console.print(
            kind, orjson.dumps(dict(calls.most_common()), option=orjson.OPT_INDENT_2).decode()
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
