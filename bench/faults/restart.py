"""Hot restarts under load: who is refused, reset or cut while one process replaces another.

    python -m bench.faults.restart --times 20 --rate 100

Half of the requests come on connections of their own, half on connections that are kept: busy ones,
and slow ones that stay idle through a whole restart. A client here is the worst that HTTP allows:
on a kept connection it sends whenever the last answer did not say `Connection: close`, without a
look at whether the connection still lives, and it repeats nothing. Streams run through all of it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import uvloop

from bench.measuring.processes import is_running
from tests.chaos.client import Connection, Got, connect, request
from tests.chaos.command import Command, command
from tests.support.harness import (
    ANSWER,
    DONE,
    STREAM_HEAD,
    RawEngine,
    apart,
    chat,
    chunk,
    event,
    is_set_within,
    until,
)
from tests.support.proxy_process import START_S

BUSY, SLOW = 10, 20
"""Kept connections: those that take turns with half of the load, and those that are mostly idle."""
SLOW_S = 4.0
"""How long one of the latter says nothing."""
STREAMS = 50
PAUSE_S = 0.5
"""As many requests as come in this time are served between two restarts."""
"""Between two restarts."""
BODY = orjson.dumps(chat("x"))
LONG = orjson.dumps(chat("a long one"))


@dataclass
class Seen:
    """What became of the requests."""

    ended: Counter[str] = field(default_factory=Counter)
    reused: int = 0
    """Requests on a connection that had served one before."""
    streams: Counter[str] = field(default_factory=Counter)
    """The same of the streams that run through all of it."""
    pids: list[int] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """All but those that were served whole."""
        return sum(c.total() - c["whole"] for c in (self.ended, self.streams))

    def __str__(self) -> str:
        ended, streams = self.ended, self.streams
        other = self.ended.total() - sum(ended[name] for name in ("whole", "refused", "reset"))
        return (
            f"{len(self.pids) - 1} restarts, {ended.total()} requests, {self.reused} of them on "
            f"kept connections: {ended['refused']} refused, {ended['reset']} reset, {other} cut or "
            f"otherwise; {streams['whole']} of {streams.total()} streams whole"
        )


def verdict(got: Got) -> str:
    """Whether an answer is one, in a word."""
    is_whole = got.is_clean and (got.is_done or not got.is_stream)
    return "whole" if got.status == 200 and is_whole else f"cut {got.status}"


class Engine(RawEngine):
    """Answers at once, but the long ones, which stream until told to end."""

    def __init__(self) -> None:
        super().__init__(self._say)
        self.may_end = asyncio.Event()

    async def _say(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.posts[-1].find(b"a long one") < 0:
            writer.write(ANSWER)
            return
        del reader
        writer.write(STREAM_HEAD)
        more = itertools.repeat(chunk(event("more ")))
        await apart(writer, itertools.takewhile(lambda _: not self.may_end.is_set(), more), 0.2)
        writer.write(DONE)


class Kept:
    """A connection that is used again for as long as its answers allow it."""

    def __init__(self, url: str, seen: Seen) -> None:
        self._url, self._seen = url, seen
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()

    async def ask(self) -> None:
        """One request, one answer, counted."""
        async with self._turn:
            is_kept = self._connection is not None
            self._seen.reused += is_kept
            self._connection = await ask(self._url, self._seen.ended, self._connection)

    def close(self) -> None:
        """Done."""
        if self._connection is not None:
            self._connection.close()


async def ask(
    url: str, ended: Counter[str], connection: Connection | None = None
) -> Connection | None:
    """One request, counted; the connection, if it may be used again."""
    if connection is None:
        try:
            connection = await connect(url)
        except OSError:
            ended["refused"] += 1
            return None
    try:
        connection.send(request(BODY, {}))
        got = await connection.get()
    except OSError as error:
        ended["no answer" if isinstance(error, TimeoutError) else "reset"] += 1
        connection.close()
        return None
    ended[verdict(got)] += 1
    if got.is_clean and got.headers.get("connection") != "close":
        return connection
    connection.close()
    return None


async def hold(url: str, ended: Counter[str]) -> None:
    """One stream, however long it takes, counted."""
    connection = await connect(url)
    connection.send(request(LONG, {}))
    try:
        ended[verdict(await connection._get(is_head=False))] += 1
    except ConnectionError:
        ended["reset"] += 1
    finally:
        connection.close()


class Load:
    """Requests at a rate, until told to end."""

    def __init__(self, url: str, rate: float, seen: Seen) -> None:
        self._url, self._rate, self._seen = url, rate, seen
        self._busy = [Kept(url, seen) for _ in range(BUSY)]
        self._slow = [Kept(url, seen) for _ in range(SLOW)]
        self._is_over = asyncio.Event()

    def end(self) -> None:
        """No more requests; `run` returns when the last is answered."""
        self._is_over.set()

    async def run(self) -> None:
        """All of it, at fixed moments: an answer that is late delays no other request."""
        async with asyncio.TaskGroup() as group:
            for i, kept in enumerate(self._slow):
                group.create_task(self._now_and_then(kept, SLOW_S * (0.5 + i / SLOW)))
            loop, number = asyncio.get_running_loop(), 0
            start_s = loop.time()
            over, rate = self._is_over, self._rate
            while not await is_set_within(over, start_s + number / rate - loop.time()):
                number += 1
                kept = self._busy[number // 2 % BUSY]
                group.create_task(kept.ask() if number % 2 else self._fresh())
        for kept in self._busy + self._slow:
            kept.close()

    async def _fresh(self) -> None:
        if connection := await ask(self._url, self._seen.ended):
            connection.close()

    async def _now_and_then(self, kept: Kept, pause_s: float) -> None:
        await kept.ask()
        while not await is_set_within(self._is_over, pause_s):
            await kept.ask()


def pid_of(folder: Path) -> int:
    """Who the main process is, by its `--pid-file`."""
    return int((folder / "pid").read_text())


@asynccontextmanager
async def replaceable(
    folder: Path, instances: Sequence[str], *options: str, shell: str = ""
) -> AsyncIterator[Command]:
    """The command, and whichever processes come after it, all stopped when it is left."""
    words = ("--pid-file", str(folder / "pid"), *options)
    async with command(folder, instances, *words, shell=shell, checks=False) as proxy:
        try:
            await until((folder / "pid").exists, "the pid file is written")
            yield proxy
        finally:
            if (folder / "pid").exists() and (last := pid_of(folder)) != proxy.pid:
                os.kill(last, signal.SIGTERM)
                await until(lambda: not is_running(last), "the last process ends")


async def replace(folder: Path, seen: Seen) -> None:
    """One restart, until the new process has taken over."""
    old = pid_of(folder)
    os.kill(old, signal.SIGUSR2)
    is_done = lambda: pid_of(folder) != old or not is_running(old)  # noqa: E731
    await until(is_done, "another process", START_S)
    seen.pids.append(pid_of(folder))


async def run(folder: Path, times: int, rate: float, streams: int = STREAMS) -> Seen:
    """Restart so often under this load; what became of it."""
    seen = Seen()
    async with Engine() as engine, replaceable(folder, [engine.address]) as proxy:
        await proxy.up(1)
        seen.pids.append(pid_of(folder))
        load = Load(proxy.url, rate, seen)
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(hold(proxy.url, seen.streams))
            await until(lambda: engine.busy == streams, "all stream")
            loading = group.create_task(load.run())
            for number in range(times + 1):
                # Under load between two restarts, and after the last.
                enough = seen.ended.total() + int(PAUSE_S * rate)
                await until(lambda: seen.ended.total() >= enough, "some are served")  # noqa: B023
                if number < times:
                    await replace(folder, seen)
            load.end()
            await loading
            engine.may_end.set()
        left = seen.pids[:-1]
        await until(lambda: not any(map(is_running, left)), "the replaced end by themselves")
    return seen


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 1 when one request was not served whole."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.restart", description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="restarts (default: 20)")
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second (100)")
    parser.add_argument("--streams", type=int, default=STREAMS, help="through all of it (50)")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="restart-") as folder:
        seen = uvloop.run(run(Path(folder), args.times, args.rate, args.streams))
        log = (Path(folder) / "stderr").read_text().splitlines()
    odd = [line for line in log if " INFO " not in line]
    took_s = time.monotonic() - start_s
    sys.stdout.write(
        f"{seen}; {took_s:.0f} s\nlines in the log beside the expected ones: {len(odd)}\n"
    )
    return 1 if seen.lost else 0


if __name__ == "__main__":
    sys.exit(main())
