"""One of four engines fails at once, in each of many ways: how many requests it touches.

    python -m bench.faults.black_hole [--seconds 12] [WAY ...]

Eight clients ask one after another; the three others work on each request for a while. A request
is touched where its client has no whole answer. An engine that fails at once is always idle, so
whatever goes by load would send it nearly all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.faults import soak
from tests.support.harness import (
    DONE,
    STREAM_HEAD,
    RawEngine,
    Script,
    ServedProxy,
    apart,
    chat,
    chunk,
    event,
    plain,
    says,
    spend,
    until,
    words,
)

CLIENTS, ENGINES = 8, 4
TURNS = 5
"""Requests of a session."""
FREE = 20
"""Requests of all clients, from the beginning of a fault on, that do not count."""
GAP_S = 0.005
_FINISH = (
    b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":"%b"}],"usage":null}\n\n'
)
_ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
_ERROR = b'{"error":{"message":"no","type":"x","param":null,"code":%d}}'
FINE = "fine, and at length"
GOOD = STREAM_HEAD + chunk(_ROLE + event(FINE) + _FINISH % b"stop") + DONE


def refuses(status: int, words: str = "Refused") -> Script:
    """A client's error, by its status."""
    return says(plain(_ERROR % status, f"{status} {words}"))


def ends(reason: bytes, *, gap_s: float = 0.0) -> Script:
    """A stream of one token and a finish reason; with a gap each event is a piece of its own."""
    events = [_ROLE, event("fine"), _FINISH % reason]

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if gap_s:
            await apart(writer, [STREAM_HEAD, *map(chunk, events), DONE], gap_s)
        else:
            writer.write(STREAM_HEAD + b"".join(map(chunk, events)) + DONE)
            await writer.drain()

    return script


def _html(status: str = "200 OK") -> bytes:
    page = b"<html><body>Welcome</body></html>"
    return plain(page, status).replace(b"application/json", b"Text/HTML")


WAYS: dict[str, Script] = {
    "401": refuses(401),
    "403": refuses(403),
    "404": refuses(404),
    "400": refuses(400),
    "422": refuses(422),
    "html": says(_html()),
    "{}": says(plain(b"{}")),
    "[DONE]": says(STREAM_HEAD + DONE),
    "abort": ends(b"abort", gap_s=GAP_S),
    "error": ends(b"error", gap_s=GAP_S),
    "stop": says(STREAM_HEAD + chunk(_ROLE + _FINISH % b"stop") + DONE),
    "one token": ends(b"stop"),
    "429": refuses(429),
    "empty": says(plain(b"")),
    "abort in one piece": ends(b"abort"),
    "role, [DONE]": says(STREAM_HEAD + chunk(_ROLE) + DONE),
    "404 model": says(
        plain(b'{"error":{"message":"The model `sim-8b` does not exist."}}', "404 Not Found")
    ),
    "400 in a stream": says(STREAM_HEAD + chunk(b"data: %b\n\n" % (_ERROR % 400)) + DONE),
    "no choices": says(plain(b'{"id":"x","object":"chat.completion","choices":[]}')),
    "501": refuses(501),
    "redirect": says(plain(b"", "307 Temporary Redirect", "Location: /login\r\n")),
    "500": refuses(500),
    "204": says(plain(b"", "204 No Content")),
    "202": says(plain(b'{"status":"queued"}', "202 Accepted")),
    "304": says(plain(b"", "304 Not Modified")),
    "detail": says(plain(b'{"detail":"Engine is sleeping"}')),
    "no stream": says(
        plain(b'{"choices":[{"index":0,"message":{"content":"fine"},"finish_reason":"stop"}]}')
    ),
}


@dataclass
class Found:
    """What became of the requests. Times are those of the loop, in seconds."""

    asked: int = 0
    touched: list[tuple[int, float]] = field(default_factory=list)
    """Number since the fault began, and seconds since, of each request that was touched."""
    legs: int = 0
    """Requests that reached the engine while it failed."""
    back_s: float | None = None
    """From its recovery to its first answer to a client."""
    state: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Part of the requests behind the first ones that was touched."""
        late = [number for number, _ in self.touched if number > FREE]
        return len(late) / max(1, self.asked - FREE)

    def after(self, seconds: float) -> int:
        """Touched requests that began so long after the fault."""
        return sum(at_s > seconds for _, at_s in self.touched)


class Hole:
    """Four engines behind a proxy, of which the first fails on demand."""

    def __init__(self, work_s: float) -> None:
        self._work_s = work_s
        self._bad: Script | None = None
        self.served = 0
        """Clients' requests that the first engine has served."""
        self.legs = 0

    async def first(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The answer of the first engine."""
        if self._bad is not None:
            self.legs += 1
            await self._bad(reader, writer)
            return
        await self.good(reader, writer)
        self.served += 1

    async def good(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The answer of an engine that works."""
        await spend(self._work_s)  # what a request takes
        writer.write(GOOD)
        await writer.drain()

    def breaks(self, engine: RawEngine, way: str) -> None:
        """The first engine fails from now on."""
        self._bad = WAYS[way]
        if way in ("401", "403"):
            status = way + " Unauthorized"
            engine.gets["/v1/models"] = plain(b'{"error":"Unauthorized"}', status)

    def heals(self, engine: RawEngine) -> None:
        """It works again."""
        self._bad = None
        engine.gets["/v1/models"] = plain(b'{"data":[{"id":"sim-8b"}]}')


async def run(
    folder: Path,
    way: str,
    *,
    seconds: float,
    back_s: float = 15.0,
    work_s: float = 0.05,
    healthy: int = 40,
    say: Callable[[str], None] = lambda _: None,
    are_one: bool = False,
    **options: object,
) -> Found:
    """Requests while one engine fails for so many seconds, then until it serves again."""
    loop, hole, found = asyncio.get_running_loop(), Hole(work_s), Found()
    async with AsyncExitStack() as stack:
        scripts = [hole.first] + [hole.good] * (ENGINES - 1)
        engines = [await stack.enter_async_context(RawEngine(script)) for script in scripts]
        urls = [f"e{i}={engine.address}" for i, engine in enumerate(engines)]
        defaults: dict[str, object] = {"kv_connector": "none", "slow_start": 1.0}
        proxy = ServedProxy(folder / "requests.jsonl", urls, **(defaults | options))
        await stack.enter_async_context(proxy)
        await proxy.up()
        answered = 0
        begun_s: float | None = None
        is_over = asyncio.Event()
        counted = True

        async def client(number: int) -> None:
            nonlocal answered
            turn = 0
            while not is_over.is_set():
                turn += 1
                number_of, at_s = 0, loop.time()
                if begun_s is not None and counted:
                    found.asked += 1
                    number_of = found.asked
                headers = {} if are_one else {"X-Session-ID": f"s{number}-{turn // TURNS}"}
                body = chat(words(40, f"c{number}t{turn}"), max_tokens=16)
                got = await proxy.post(body, headers=headers)
                answered += 1
                is_whole = got.status == 200 and got.text == FINE and b"stop" in got.body
                if number_of and begun_s is not None and not is_whole:
                    found.touched.append((number_of, at_s - begun_s))

        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(client(number))
            await until(lambda: answered >= healthy and hole.served)
            hole.breaks(engines[0], way)
            begun_s = loop.time()
            await spend(seconds)  # how long the fault lasts
            async with proxy.http.get("/health") as response:
                report = await response.json()
            first = report["instances"]["e0"]
            found.state, found.warnings = first["state"], first["warnings"]
            counted = False
            found.legs, served, healed_s = hole.legs, hole.served, loop.time()
            hole.heals(engines[0])
            await until(lambda: hole.served > served, f"{way}: it serves again", back_s + 15)
            found.back_s = loop.time() - healed_s
            is_over.set()
        await proxy.at_rest()
    say(line(way, found))
    return found


def line(way: str, found: Found) -> str:
    """One row of the table."""
    late = sum(number > FREE for number, _ in found.touched)
    return (
        f"| {way} | {found.asked} | {len(found.touched)} | {late} ({found.ratio:.1%}) | "
        f"{found.after(10.0)} | {found.legs} | {found.state} | {found.back_s:.1f} |"
    )


HEAD = (
    "| one of four fails at once | requests | touched | behind the first 20 | after 10 s | "
    "legs to it | state | serves again after, s |\n|---|---|---|---|---|---|---|---|"
)


async def _main(ways: list[str], seconds: float) -> int:
    counts: Counter[str] = Counter()
    say = soak.say
    say(HEAD)
    for way in ways:
        with tempfile.TemporaryDirectory() as folder:
            found = await run(Path(folder), way, seconds=seconds, work_s=0.4, say=say)
        is_good = found.ratio <= 0.02 and not found.after(10.0)
        counts["good" if is_good and (found.back_s or 0) <= 15 else "bad"] += 1
    say(f"{counts['good']} of {len(ways)} ways within the limits")
    return 0 if not counts["bad"] else 1


def main() -> int:
    """Print a row per way; 1 where one is beyond its limits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ways", nargs="*", default=list(WAYS), metavar="WAY")
    parser.add_argument("--seconds", type=float, default=12.0)
    given = parser.parse_args()
    if unknown := [way for way in given.ways if way not in WAYS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(WAYS)}")
    return asyncio.run(_main(given.ways, given.seconds))


if __name__ == "__main__":
    sys.exit(main())
