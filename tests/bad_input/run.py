"""Sends every case to a real proxy in front of a simulated engine, and says what came of it.

Between the two a wire is tapped: what reached the engine is known from its own bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replayer.simulator.host import SimFleet
from tests.bad_input.cases import CANARY, Case
from tests.support.harness import ServedProxy

HANG_S = 30.0
AT_ONCE = 128
SENTINEL = b"GET /live HTTP/1.1\r\nHost: proxy\r\nConnection: close\r\n\r\n"
PROBES = (b"GET /health ", b"GET /metrics ", b"GET /v1/models ", b"GET /kv_event_sources ")
OPTIONS: dict[str, Any] = {"kv_connector": "none"}
SHORT = {"header_timeout": 2.0, "body_timeout": 6.0}
"""For cases to be refused: some come to no end."""
LONG = {"header_timeout": 60.0, "body_timeout": 180.0}
"""For others: they may be slow where the machine is."""


@dataclass(slots=True)
class Outcome:
    """What one case led to; `fault` is empty when that is what it should lead to."""

    case: Case
    statuses: list[int] = field(default_factory=list)
    fault: str = ""

    def __str__(self) -> str:
        case = self.case
        return f"{case.name} ({case.variant}): {self.fault}; {self.statuses}; {case.bytes[:300]!r}"


@dataclass(slots=True)
class Run:
    """All outcomes, what reached the engine for cases to be refused, and what was logged.

    `streams`: of each connection to the engine all that the proxy sent.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    seen: list[bytes] = field(default_factory=list)
    leaked: list[bytes] = field(default_factory=list)
    streams: list[bytearray] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def faults(self) -> list[str]:
        """Everything that is not as it should be, in words."""
        found = [str(outcome) for outcome in self.outcomes if outcome.fault]
        found += [f"reached the engine: {data[:300]!r}" for data in self.leaked]
        return found + [f"logged: {line[:2000]}" for line in self.log]

    def count(self, expect: str) -> tuple[int, int]:
        """How many cases with this expectation met it, of how many."""
        of = [outcome for outcome in self.outcomes if outcome.case.expect == expect]
        return sum(not outcome.fault for outcome in of), len(of)


class Tap:
    """A wire to the engine; `seen` are the pieces that went there, the proxy's probes left out.

    `streams`: all that went there, by connection.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self.seen: list[bytes] = []
        self.streams: list[bytearray] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of the proxy's."""
        there, out = await asyncio.open_connection(*self._address)
        self.streams.append(bytearray())
        with suppress(ConnectionError):
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(reader, out, self.streams[-1]))
                group.create_task(self._pass(there, writer, None))

    async def _pass(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        stream: bytearray | None,
    ) -> None:
        with suppress(ConnectionError):
            while data := await source.read(1 << 16):
                if stream is not None:
                    stream += data
                    if not data.startswith(PROBES):
                        self.seen.append(data)
                sink.write(data)
                await sink.drain()
        sink.close()


class _Listener(logging.Handler):
    """Keeps what must not be logged: tracebacks, and whatever holds the canary."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = logging.Formatter().format(record)
        if record.exc_info or CANARY in text:
            self.kept.append(text)


@asynccontextmanager
async def rig(
    log: Path, options: dict[str, Any], engine: str | None = None
) -> AsyncIterator[tuple[ServedProxy, Tap]]:
    """A proxy, a tapped wire, and behind it the engine at this URL, or else a simulated one."""
    async with SimFleet(0 if engine else 1, speed=50.0, tick=0.0) as fleet:
        host, _, port = (engine or fleet.engines[0].url).removeprefix("http://").partition(":")
        tap = Tap(host, int(port))
        server = await asyncio.start_server(tap.serve, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            async with ServedProxy(log, [address], **options) as proxy:
                await proxy.up()
                yield proxy, tap


async def run(cases: Iterable[Case], directory: Path, engine: str | None = None) -> Run:
    """Send all of them, many at once; those to be refused to a proxy of their own."""
    result, listener = Run(), _Listener()
    logging.getLogger().addHandler(listener)
    chosen = list(cases)[::-1]  # those that wait for a time limit are among the last: first
    refuse = [case for case in chosen if case.expect == "refuse"]
    others = [case for case in chosen if case.expect != "refuse"]
    try:
        await _run(refuse, rig(directory / "refuse", OPTIONS | SHORT, engine), result)
        result.leaked, result.seen = result.seen, []
        await _run(others, rig(directory / "others", OPTIONS | LONG, engine), result)
    finally:
        logging.getLogger().removeHandler(listener)
    result.log = listener.kept
    return result


async def _run(
    cases: list[Case], made: AbstractAsyncContextManager[tuple[ServedProxy, Tap]], result: Run
) -> None:
    gate = asyncio.Semaphore(AT_ONCE)
    async with made as (proxy, tap):
        port = int(proxy.server.url.rpartition(":")[2])
        result.outcomes += await asyncio.gather(*(_one(c, port, gate) for c in cases))
        await proxy.at_rest()
        result.seen = tap.seen
        result.streams += tap.streams


async def _one(case: Case, port: int, gate: asyncio.Semaphore) -> Outcome:
    async with gate:
        outcome = Outcome(case)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.timeout(HANG_S):
                await _talk(case, reader, writer, outcome)
        except TimeoutError:
            outcome.fault = f"hangs for {HANG_S:g} s"
        finally:
            writer.close()
        outcome.fault = outcome.fault or _fault(case, outcome.statuses)
        return outcome


async def _talk(
    case: Case, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, outcome: Outcome
) -> None:
    with suppress(ConnectionError, RuntimeError):  # uvloop: closed meanwhile
        for index, segment in enumerate(case.segments):
            if index:
                # Each is read by itself; bytes that come one by one are too many to wait for.
                await asyncio.sleep(0 if len(segment) == 1 else 0.002)
            writer.write(segment)
    wanted = {"two_replies": 2}.get(case.expect, 1)
    with suppress(ConnectionError, RuntimeError, asyncio.IncompleteReadError):
        while len(outcome.statuses) < wanted:
            await _reply(reader, outcome)
        if case.expect != "refuse":
            writer.write(SENTINEL)
            while True:
                await _reply(reader, outcome)


async def _reply(reader: asyncio.StreamReader, outcome: Outcome) -> None:
    """Read one reply; raises IncompleteReadError at the end of the connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100 "):
        return
    length = next(
        (
            int(line.partition(b":")[2])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length:")
        ),
        None,
    )
    body = await (reader.read() if length is None else reader.readexactly(length))
    outcome.statuses.append(int(head.split(b" ")[1]))
    if CANARY.encode() in head + body:
        outcome.fault = "a header comes back"


def _fault(case: Case, statuses: list[int]) -> str:
    """What is wrong with the statuses of the replies, the sentinel's among them."""
    if any(status >= 500 for status in statuses):
        return "a reply of 500 and more"
    if case.expect == "refuse":
        return "" if all(400 <= status < 500 for status in statuses) else "taken"
    # A connection that was closed behind its replies has answered no sentinel.
    # One that closes while its client still sends may take the reply along.
    count = {"two_replies": 2}.get(case.expect, 1)
    least = 0 if case.expect == "one_reply" else count
    if not least <= len(statuses) <= count + 1:
        return f"{len(statuses)} replies"
    if case.expect != "one_reply" and set(statuses) != {200}:
        return "not served"
    return ""
