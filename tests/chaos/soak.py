"""Load with a fault every ten seconds for as long as asked: what grows, what is lost.

    python -m tests.chaos.soak --minutes 30

Engines are simulated, in this process, each behind a fault proxy; the proxy is a process of its
own. A request is lost when it has no answer, or one that ends clean without its end. Refusals and
streams that say that they were cut are counted apart: that is what a fault may do.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import uvloop

from replayer.simulator.host import SimFleet
from tests.chaos import invariants as inv
from tests.chaos.client import Got, connect, exchange, request
from tests.chaos.command import Command, command
from tests.chaos.faultproxy import FaultProxy
from tests.support.harness import chat, spend, words

ENGINES = 3
FAULT_S = 10.0
LOOK_S = 2.0
PROMPT_WORDS = 150
WARM_UP = 0.4
"""Part of the time in which tables fill and allocators settle: no slope is taken of it."""
LONG_MINUTES = 20.0
SLOPE_LONG, SLOPE_SHORT = 0.1, 10.0
"""MiB per minute: of a long run, and of one in which tables are still filling: that finds leaks of
a whole request's size only."""
FD_SLACK = 4
MIB = 1 << 20
OPTIONS = (
    *("--prefix-cache-bytes", "4MiB", "--max-sessions", "2000", "--health-interval", "0.5"),
    *("--ttft-timeout", "5", "--idle-timeout", "5", "--slow-start", "1"),
    *("--scrape-interval", "0.5", "--log-level", "info"),
)


@dataclass
class Site:
    """What the faults act upon."""

    fleet: SimFleet
    links: list[FaultProxy]
    proxy: Command
    dice: random.Random


@dataclass
class Seen:
    """What became of the requests, and of the process."""

    ended: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    looks: list[tuple[float, int, int]] = field(default_factory=list)
    """Minutes since the start, RSS bytes, file descriptors."""


def verdict(got: Got) -> str:
    """How a request ended, in one word."""
    if not inv.is_honest(got):
        return "lost"
    if got.status == 200:
        return "whole" if got.is_clean else ("cut" if got.errors else "lost")
    return f"refused {got.status}"


async def one(url: str, number: int, dice: random.Random, seen: Seen) -> None:
    """A request with a prompt that nobody else has; one in twenty leaves in the middle."""
    session = f"s{number // 4}"
    body = chat(words(PROMPT_WORDS, f"{session}-"), max_tokens=dice.choice((8, 32, 96)))
    raw = request(orjson.dumps(body), {"X-Session-ID": session})
    try:
        if dice.random() < 0.05:
            connection = await connect(url)
            connection.send(raw)
            await spend(dice.random() * 0.05)
            connection.close(dice.choice(("FIN", "RST")))
            seen.ended["left"] += 1
            return
        seen.ended[verdict(await exchange(url, raw))] += 1
    except (OSError, TimeoutError) as error:
        seen.ended["lost"] += 1
        seen.faults[f"lost by {type(error).__name__}"] += 1


async def kill(site: Site) -> None:
    i = site.dice.randrange(ENGINES)
    await site.fleet.engines[i].kill()
    await site.links[i].accept("refuse")
    await spend(2.0)
    await site.fleet.engines[i].start()
    await site.links[i].accept("serve")


async def cut(site: Site) -> None:
    for link in site.links:
        link.cut(resets=True)


async def stall(site: Site) -> None:
    link = site.dice.choice(site.links)
    link.down.stalls = True
    await spend(3.0)
    link.heal()


async def garbage(site: Site) -> None:
    link = site.dice.choice(site.links)
    link.down.change = lambda data: data[: len(data) // 2] + b"\x00garbage"
    await spend(1.0)
    link.heal()


async def drip(site: Site) -> None:
    link = site.dice.choice(site.links)
    link.down.slice_bytes, link.down.gap_s = 16, 0.001
    await spend(3.0)
    link.heal()


async def stalled_clients(site: Site) -> None:
    held = [await connect(site.proxy.url, receive_bytes=4096) for _ in range(40)]
    body = request(orjson.dumps(chat("x", max_tokens=5000)), {})
    for connection in held:
        connection.send(body)
    await spend(2.0)
    for connection in held:
        connection.close("RST")


async def scrapes(site: Site) -> None:
    await asyncio.gather(*(site.proxy.get("/metrics") for _ in range(50)))


FAULTS: dict[str, Callable[[Site], Awaitable[None]]] = {
    "kill": kill,
    "cut": cut,
    "stall": stall,
    "garbage": garbage,
    "drip": drip,
    "stalled clients": stalled_clients,
    "scrape storm": scrapes,
}


async def load(site: Site, seen: Seen, rate: float, end_s: float) -> None:
    """Requests at a steady rate, whether or not the last ones have ended."""
    number, start_s = 0, time.monotonic()
    async with asyncio.TaskGroup() as group:
        while (now_s := time.monotonic()) < end_s:
            while number < (now_s - start_s) * rate:
                group.create_task(one(site.proxy.url, number, site.dice, seen))
                number += 1
            await spend(0.01)


async def trouble(site: Site, seen: Seen, end_s: float) -> None:
    """A fault every ten seconds; each kind comes before any comes again."""
    while True:
        kinds = list(FAULTS)
        site.dice.shuffle(kinds)
        for kind in kinds:
            await spend(FAULT_S)
            if time.monotonic() > end_s - FAULT_S / 2:
                return
            seen.faults[kind] += 1
            await FAULTS[kind](site)


async def watch(site: Site, seen: Seen, end_s: float) -> None:
    start_s = time.monotonic()
    while (now_s := time.monotonic()) < end_s:
        seen.looks.append(((now_s - start_s) / 60, site.proxy.rss_bytes, site.proxy.fds))
        await spend(LOOK_S)


def slope(looks: Sequence[tuple[float, float]]) -> float:
    """Least squares: y per unit of x."""
    mean_x = sum(x for x, _ in looks) / len(looks)
    mean_y = sum(y for _, y in looks) / len(looks)
    spread = sum((x - mean_x) ** 2 for x, _ in looks)
    return sum((x - mean_x) * (y - mean_y) for x, y in looks) / spread if spread else 0.0


async def soak(minutes: float, rate: float, seed: int, folder: Path, *, is_calm: bool) -> list[str]:
    """Run it, without faults where it `is_calm`; prints figures, gives what is out of bounds."""
    seen = Seen()
    async with SimFleet(ENGINES, speed=2.0) as fleet:
        links = [FaultProxy(engine.url) for engine in fleet.engines]
        for link in links:
            await link.__aenter__()
        addresses = [link.address for link in links]
        async with command(folder, addresses, *OPTIONS) as proxy:
            await proxy.up(ENGINES)
            site = Site(fleet, links, proxy, random.Random(seed))
            fds = await rest(proxy)
            end_s = time.monotonic() + minutes * 60
            async with asyncio.TaskGroup() as group:
                group.create_task(load(site, seen, rate, end_s))
                if not is_calm:
                    group.create_task(trouble(site, seen, end_s))
                group.create_task(watch(site, seen, end_s))
            left = await rest(proxy) - fds
            await proxy.check()
            problems = judge(seen, minutes, left)
            drops = await proxy.metric("request_log_dropped_total")
        proxy.check_after()
        for link in links:
            await link.__aexit__()
    if drops:
        problems.append(f"{drops:.0f} log lines dropped")
    return problems


async def rest(proxy: Command) -> int:
    """File descriptors once idle connections are closed."""
    await spend(5.0)
    return proxy.fds


def judge(seen: Seen, minutes: float, left: int) -> list[str]:
    """Print what was seen; what is out of bounds."""
    after = [(at, rss / MIB) for at, rss, _ in seen.looks if at >= minutes * WARM_UP]
    grows = slope(after)
    bound = SLOPE_LONG if minutes >= LONG_MINUTES else SLOPE_SHORT
    total = sum(seen.ended.values())
    say(f"soak: {minutes:g} min, {total} requests, {seen.ended['lost']} lost; {dict(seen.ended)}")
    say(f"faults: {dict(seen.faults)}")
    marks = [seen.looks[(len(seen.looks) - 1) * i // 4] for i in range(5)]
    say("RSS by quarter, MiB: " + ", ".join(f"{rss / MIB:.1f}" for _, rss, _ in marks))
    size = -(-len(seen.looks) // 4)
    quarters = [seen.looks[at : at + size] for at in range(0, len(seen.looks), size)]
    most = ", ".join(str(max(fds for *_, fds in quarter)) for quarter in quarters)
    say(f"most file descriptors in each quarter: {most}")
    say(
        f"RSS {after[0][1]:.1f} -> {after[-1][1]:.1f} MiB, slope {grows:+.2f} MiB/min (bound "
        f"{bound:g}); fds at rest {left:+d}"
    )
    problems = []
    if seen.ended["lost"]:
        problems.append(f"{seen.ended['lost']} requests lost")
    if grows > bound:
        problems.append(f"RSS grows by {grows:.2f} MiB/min")
    if left > FD_SLACK:
        problems.append(f"{left} file descriptors are left")
    if seen.ended["whole"] < 0.8 * total:
        problems.append("too few requests were served whole")
    return problems


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Exit status 1 when something is out of bounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=60.0, help="requests per second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calm", action="store_true", help="no faults, to compare with")
    args = parser.parse_args()
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # of engines that are killed
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    run = soak(args.minutes, args.rate, args.seed, folder, is_calm=args.calm)
    problems = uvloop.run(run)
    for problem in problems:
        say(f"out of bounds: {problem}")
    if not problems:
        shutil.rmtree(folder)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
