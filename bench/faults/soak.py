"""Load with a fault every ten seconds for as long as asked: what grows, what is lost.

    python -m bench.faults.soak --minutes 30

Engines are simulated, in this process, each behind a fault proxy; the proxy is a process of its
own. A request is lost when it has no answer, or one that ends clean without its end. Refusals and
streams that say that they were cut are counted apart: that is what a fault may do.

    python -m bench.faults.soak --minutes 30 --rate 100 --hostile 0.01

Without faults. Phases take turns: quiet ones; ones in which a share of hostile requests
(`hostile.py`) goes to another proxy on this machine, which others do not use; and ones in which it
comes to this proxy, and one of its engines is hostile too. Those last about `--phase` seconds. The
others may lose nothing, and a refusal is a loss here. The good engines may not be ejected. What the
attack takes of the machine it takes elsewhere too, so the others' TTFT is held against that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import uvloop

from analysis.measures import percentile
from bench.faults.hostile import PROMPT_WORDS
from bench.measuring.looplag import buckets, quantile_bound_s
from bench.measuring.processes import Child
from replayer.simulator.host import SimFleet
from tests.chaos import invariants as inv
from tests.chaos.client import Got, connect, exchange, request
from tests.chaos.command import ROOT, Command, command
from tests.chaos.faultproxy import FaultProxy
from tests.support.harness import chat, spend, until, words

ENGINES = 3
FAULT_S = 10.0
LOOK_S = 2.0
WARM_UP = 0.4
"""Part of the time in which tables fill and allocators settle: no slope is taken of it."""
LONG_MINUTES = 20.0
SLOPE_LONG, SLOPE_SHORT = 0.1, 10.0
"""MiB per minute: of a long run, and of one in which tables are still filling: that finds leaks of
a whole request's size only."""
FD_SLACK = 4
MIB = 1 << 20
WARM_S, CHILD_S = 10.0, 60.0
"""How long connections and tables are warmed up before the first phase; how long a child may take
to say something."""
WINDOWS = 3
"""A quiet phase lasts as long as one window of a hostile one, which has so many."""
SETTLE_S = 2.0
"""So long after hostile requests end, the others' are still counted as sent beside them."""
TTFT_RATIO = 1.1
"""The most that hostile requests may add to the others' p99 of the time to the first byte."""
HOSTILE = "bench.faults.hostile"
LAG = "cache_proxy_loop_lag_seconds"
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


async def watch(proxy: Command, seen: Seen, end_s: float) -> None:
    start_s = time.monotonic()
    while (now_s := time.monotonic()) < end_s:
        seen.looks.append(((now_s - start_s) / 60, proxy.rss_bytes, proxy.fds))
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
                group.create_task(watch(proxy, seen, end_s))
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


@dataclass
class Phase:
    """What became of the requests that were sent in all phases of a kind; TTFT in seconds."""

    ended: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    lag: Counter[str] = field(default_factory=Counter)
    """Samples of the lateness of the proxy's event loop, by the bucket's upper bound in seconds."""

    @property
    def lost(self) -> int:
        return sum(self.ended.values()) - self.ended["whole"]

    def percentile_ms(self, percent: float) -> float:
        return 1e3 * percentile(sorted(self.ttft_s), percent) if self.ttft_s else 0.0

    def add(self, other: Phase) -> None:
        self.ended += other.ended
        self.ttft_s += other.ttft_s
        self.lag += other.lag


async def timed(url: str, number: int, dice: random.Random, phase: Phase) -> None:
    """A request of somebody who means no harm, and when its first byte came."""
    session = f"s{number // 4}"
    body = chat(words(PROMPT_WORDS, f"{session}-"), max_tokens=dice.choice((8, 32, 96)))
    raw = request(orjson.dumps(body), {"X-Session-ID": session})
    began_s = time.monotonic()
    try:
        got = await exchange(url, raw)
    except (OSError, TimeoutError) as error:
        phase.ended[type(error).__name__] += 1
        return
    phase.ended[verdict(got)] += 1
    if got.first_s is not None:
        phase.ttft_s.append(got.first_s - began_s)


@dataclass
class Alternation:
    """Phases in turn; the first is quiet. `now` is the phase, or window, a request is sent in.

    Windows are equally long, so that a machine that stands still now and then disturbs as large a
    share of the quiet ones as of the others.
    """

    proxy: Command
    here: Sequence[Child]
    """Who is hostile to this proxy: clients, and one of its engines."""
    elsewhere: Sequence[Child]
    """The same of another proxy, with an engine of its own."""
    quiet_windows: list[Phase] = field(default_factory=list)
    elsewhere_windows: list[Phase] = field(default_factory=list)
    hostile_windows: list[Phase] = field(default_factory=list)
    unused: Phase = field(default_factory=Phase)

    def __post_init__(self) -> None:
        self.now = self.unused

    def kinds(self) -> dict[str, Phase]:
        """All phases of each kind together."""
        kinds = {
            "quiet": self.quiet_windows,
            "hostile elsewhere": self.elsewhere_windows,
            "hostile": self.hostile_windows,
        }
        return {name: together(windows) for name, windows in kinds.items()}

    async def run(self, minutes: float, phase_s: float) -> None:
        """Warm up, then switch for so long; each kind of phase has its whole share of it."""
        await spend(min(WARM_S, phase_s))
        phases, whole_s = 2 + 1 / WINDOWS, minutes * 60
        rounds = max(1, round(whole_s / (phases * phase_s + 2 * SETTLE_S)))
        length_s = (whole_s / rounds - 2 * SETTLE_S) / phases
        for _ in range(rounds):
            await self._window(self.quiet_windows, length_s / WINDOWS)
            await self._hostile(self.elsewhere, self.elsewhere_windows, length_s)
            self.now = self.unused
            await spend(SETTLE_S)
            await self._hostile(self.here, self.hostile_windows, length_s)
            await spend(SETTLE_S)

    async def _hostile(self, who: Sequence[Child], among: list[Phase], length_s: float) -> None:
        _tell(who, b"on")
        for _ in range(WINDOWS):
            await self._window(among, length_s / WINDOWS)
        _tell(who, b"off")

    async def _window(self, among: list[Phase], length_s: float) -> None:
        phase = self.now = Phase()
        among.append(phase)
        before = await self._lag()
        await spend(length_s)
        phase.lag = await self._lag() - before

    async def _lag(self) -> Counter[str]:
        return Counter(buckets(await self.proxy.exposition(), LAG))


def _tell(children: Iterable[Child], word: bytes) -> None:
    for told in children:
        assert told.stdin is not None
        told.stdin.write(word + b"\n")
        told.stdin.flush()


def together(phases: Iterable[Phase]) -> Phase:
    """One phase of several."""
    whole = Phase()
    for phase in phases:
        whole.add(phase)
    return whole


def child(*args: str) -> Child:
    """A process of `hostile.py`; it ends with its stdin."""
    command = [sys.executable, "-m", HOSTILE, *args]
    return Child(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=None)


async def line_of(running: Child) -> str:
    """The line that a child prints."""
    said: str = (await until(lambda: running.found(r"(.+)\n"), "a line", CHILD_S))[1]
    return said


async def beside_hostile(args: argparse.Namespace, folder: Path) -> list[str]:
    """Hostile requests in every second phase; prints one table, gives what is out of bounds."""
    seen = Seen()
    async with contextlib.AsyncExitStack() as stack:
        engines = [stack.enter_context(child("engine")) for _ in range(ENGINES)]
        addresses = [await line_of(engine) for engine in engines]
        proxy = await stack.enter_async_context(command(folder, addresses, *OPTIONS, checks=False))
        await proxy.up(ENGINES)
        rate = args.rate * args.hostile
        attacker = stack.enter_context(child("attack", proxy.url, str(rate)))
        elsewhere = await stack.enter_async_context(another(folder, rate))
        turns = Alternation(proxy, [attacker, engines[0]], elsewhere)
        fds = await rest(proxy)
        begun_s, ticks = time.monotonic(), cpu_ticks()
        async with asyncio.TaskGroup() as group:
            switching = group.create_task(turns.run(args.minutes, args.phase))
            watching = group.create_task(watch(proxy, seen, math.inf))
            await calm_load(proxy.url, args, turns, switching)
            watching.cancel()
        minutes, was = (time.monotonic() - begun_s) / 60, machine(ticks)
        assert attacker.stdin is not None
        attacker.stdin.close()
        classes = orjson.loads(await line_of(attacker))
        left = await rest(proxy) - fds
        broken = await broken_invariants(proxy)
    say(was)
    table(turns, classes)
    liar = addresses[0].removeprefix("http://")
    ejected = [line for line in proxy.log.splitlines() if " is ejected" in line]
    liars = [line for line in ejected if f"instance {liar} " in line]
    say(f"ejections of the hostile engine, as is right: {len(liars)}")
    ejected = [line for line in ejected if line not in liars]
    found = judge_phases(turns, classes, ejected) + judge_process(seen, minutes, left)
    return found + broken


@asynccontextmanager
async def another(folder: Path, rate: float) -> AsyncIterator[list[Child]]:
    """Another proxy that can be attacked, of its own engine: its attacker, and the engine."""
    beside = folder / "elsewhere"
    beside.mkdir()
    async with contextlib.AsyncExitStack() as stack:
        engine = stack.enter_context(child("engine"))
        address = await line_of(engine)
        proxy = await stack.enter_async_context(command(beside, [address], *OPTIONS, checks=False))
        await proxy.up(1)
        attacker = stack.enter_context(child("attack", proxy.url, str(rate)))
        yield [attacker, engine]


async def broken_invariants(proxy: Command) -> list[str]:
    """What does not hold of the process when all is over, one line each at most."""
    found = []
    try:
        await proxy.check()
    except AssertionError as error:
        found.append(str(error)[:200])
    try:
        proxy.check_after()
    except AssertionError as error:
        found.append(str(error)[:200])
    return found


async def calm_load(
    url: str, args: argparse.Namespace, turns: Alternation, until_done: asyncio.Task[None]
) -> None:
    """Requests at a steady rate until the phases are over; ends when each is answered."""
    dice, number, begun_s = random.Random(args.seed), 0, time.monotonic()
    async with asyncio.TaskGroup() as group:
        while not until_done.done():
            while number < (time.monotonic() - begun_s) * args.rate:
                group.create_task(timed(url, number, dice, turns.now))
                number += 1
            await spend(0.005)


def p99_ms(windows: Sequence[Phase]) -> float:
    """The TTFT p99 of the median window."""
    return percentile(sorted(window.percentile_ms(99) for window in windows), 50)


def machine(before: Sequence[int]) -> str:
    """How busy the machine was since then, and how much of its time others had (stolen), Linux."""
    spent = [now - then for now, then in zip(cpu_ticks(), before, strict=True)]
    whole, idle, stolen = max(1, sum(spent)), spent[3] + spent[4], spent[7]
    return f"machine: {100 - 100 * idle // whole} % busy, {100 * stolen / whole:.1f} % stolen"


def cpu_ticks() -> list[int]:
    """The first eight fields of /proc/stat: user, nice, system, idle, iowait, irqs, steal."""
    first = Path("/proc/stat").read_text().partition("\n")[0].split()
    return [int(ticks) for ticks in first[1:9]]


def table(turns: Alternation, classes: dict[str, dict[str, int]]) -> None:
    """What the others felt by kind of phase, and what became of the hostile requests."""
    say(f"{'phases':<28}{'requests':>10}{'lost':>6}{'TTFT p50':>11}{'p99':>11}{'loop lag p99':>16}")
    for name, phase in turns.kinds().items():
        p50, p99 = phase.percentile_ms(50), phase.percentile_ms(99)
        total, lag_s = sum(phase.ended.values()), quantile_bound_s([phase.lag], 0.99)
        lag = "-" if lag_s is None else f"<= {1e3 * lag_s:g} ms"
        say(f"{name:<28}{total:>10}{phase.lost:>6}{p50:>8.1f} ms{p99:>8.1f} ms{lag:>16}")
    for name, ends in classes.items():
        said = ", ".join(f"{end} x {count}" for end, count in sorted(ends.items()))
        say(f"  {name:<26}{sum(ends.values()):>10}  {said}")


def judge_phases(
    turns: Alternation, classes: dict[str, dict[str, int]], ejected: list[str]
) -> list[str]:
    """What hostile requests did to the others."""
    kinds = turns.kinds()
    quiet, elsewhere, hostile = kinds.values()
    lost, hostile_ms = sum(phase.lost for phase in kinds.values()), hostile.percentile_ms(99)
    to_quiet, ratio = (hostile_ms / max(p.percentile_ms(99), 1e-3) for p in (quiet, elsewhere))
    say(
        f"TTFT p99 beside hostile requests, to hostile elsewhere: x {ratio:.2f}, to quiet: x "
        f"{to_quiet:.2f}; lost: {lost}; ejections of good engines: {len(ejected)}"
    )
    windows = turns.quiet_windows, turns.elsewhere_windows, turns.hostile_windows
    say("  p99 of the median window, ms: " + ", ".join(f"{p99_ms(kind):.1f}" for kind in windows))
    problems = [f"{lost} requests lost: {[p.ended for p in kinds.values()]}"] if lost else []
    if ratio > TTFT_RATIO:
        problems.append(f"TTFT p99 x {ratio:.2f} beside hostile requests")
    if ejected:
        problems.append(f"{len(ejected)} ejections, the first: {ejected[0]}")
    if unused := [name for name, ends in classes.items() if not ends]:
        problems.append(f"classes that were never sent: {unused}")
    return problems


async def rest(proxy: Command) -> int:
    """File descriptors once idle connections are closed."""
    await spend(5.0)
    return proxy.fds


def judge(seen: Seen, minutes: float, left: int) -> list[str]:
    """Print what was seen; what is out of bounds."""
    total = sum(seen.ended.values())
    say(f"soak: {minutes:g} min, {total} requests, {seen.ended['lost']} lost; {dict(seen.ended)}")
    say(f"faults: {dict(seen.faults)}")
    problems = judge_process(seen, minutes, left)
    if seen.ended["lost"]:
        problems.append(f"{seen.ended['lost']} requests lost")
    if seen.ended["whole"] < 0.8 * total:
        problems.append("too few requests were served whole")
    return problems


def judge_process(seen: Seen, minutes: float, left: int) -> list[str]:
    """Print what the process took of memory and descriptors; what is out of bounds."""
    after = [(at, rss / MIB) for at, rss, _ in seen.looks if at >= minutes * WARM_UP]
    grows = slope(after)
    bound = SLOPE_LONG if minutes >= LONG_MINUTES else SLOPE_SHORT
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
    if grows > bound:
        problems.append(f"RSS grows by {grows:.2f} MiB/min")
    if left > FD_SLACK:
        problems.append(f"{left} file descriptors are left")
    return problems


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def share(text: str) -> float:
    """A share of the requests; raises ValueError."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be from 0 to 1")
    return value


def main() -> int:
    """Exit status 1 when something is out of bounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=60.0, help="requests per second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calm", action="store_true", help="no faults, to compare with")
    parser.add_argument("--hostile", type=share, default=0.0, metavar="SHARE")
    parser.add_argument("--phase", type=float, default=60.0, help="seconds of a hostile phase")
    args = parser.parse_args()
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # of engines that are killed
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    if args.hostile:
        problems = uvloop.run(beside_hostile(args, folder))
    else:
        run = soak(args.minutes, args.rate, args.seed, folder, is_calm=args.calm)
        problems = uvloop.run(run)
    for problem in problems:
        say(f"out of bounds: {problem}")
    if not problems:
        shutil.rmtree(folder)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
