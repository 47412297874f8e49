"""Load held: streams and idle connections for as long as asked; what was lost, and the loop's lag.

    python -m bench.held --minutes 10

Idle clients ask for /live now and then, as a load balancer does, and must get their answer on the
connection that they opened.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.measuring import build, upstream
from bench.measuring.build import BenchError
from bench.measuring.looplag import quantile_bound_s, read_lag
from bench.measuring.peers import PEERS, Running, Site
from bench.measuring.processes import HOST, Cpus, children, pinned, pss_bytes
from bench.measuring.scenarios import Load
from bench.measuring.window import Bench, faults, result_of

PACE_US = 50_000
STREAM_EVENTS = 400
"""A stream of twenty seconds."""
ASK_S = 50.0
"""Between two requests of an idle client: below the proxy's keep-alive of 75 s."""
LAG_S = 0.02
WORK = Path(".cache/bench")
_LIVE = b"GET /live HTTP/1.1\r\nHost: bench\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Held:
    """What came of it. `lag_p99_s`: the bucket's upper bound. `lost`: of the idle connections."""

    events: int
    faults: tuple[str, ...]
    asked: int
    lost: int
    lag_p99_s: float | None
    pss_bytes: int

    @property
    def is_good(self) -> bool:
        """Nothing was lost, and the loop was never late."""
        on_time = self.lag_p99_s is not None and self.lag_p99_s <= LAG_S
        return not self.faults and not self.lost and on_time


def hold(bench: Bench, site: Site, streams: int, idle: int, seconds: float) -> Held:
    """Run both kinds of clients against a proxy of its own."""
    ours = PEERS["ours"]
    command = f"{ours.command} --max-connections {2 * (streams + idle) + 100}"
    running = site.start("ours", replace(ours, command=command), folder="ours-held")
    load = Load(
        f"2k_stream{STREAM_EVENTS}",
        streams,
        STREAM_EVENTS,
        0.0,
        seconds,
        stagger_ms=5000,
        drain_s=3 * STREAM_EVENTS * PACE_US / 1e6,
    )
    before, lag = bench.upstream.counts(), read_lag(running)
    bench.upstream.pace(PACE_US)
    try:
        asker = _start_idle(running, bench.cpus.load, idle, seconds)
        client = bench.client(running, load)
        told = result_of(running, client, seconds + 120.0)
        memory = pss_bytes(running.pids)
        asked, lost = map(int, asker.communicate(timeout=120)[0].split())
    finally:
        bench.upstream.pace(0)
    wrong = tuple(faults([told["totals"]], bench.upstream.counts().since(before)))
    late_s = quantile_bound_s([read_lag(running, since=lag)], 0.99)
    running.child.stop()
    return Held(told["totals"]["events"], wrong, asked, lost, late_s, memory)


def _start_idle(running: Running, cpu: int, count: int, seconds: float) -> subprocess.Popen[bytes]:
    words = ("--idle-process", str(running.port), "--idle", str(count), "--seconds", str(seconds))
    with pinned(cpu):
        return subprocess.Popen(
            [sys.executable, "-m", "bench.held", *words], stdout=subprocess.PIPE
        )


async def _idle(port: int, count: int, seconds: float) -> tuple[int, int]:
    """Requests that `count` idle clients sent in that time, and how many clients lost theirs."""
    asked = lost = 0
    loop = asyncio.get_running_loop()
    end_s = loop.time() + seconds
    every_s = min(ASK_S, seconds / 2)

    async def one(number: int) -> None:
        nonlocal asked, lost
        await asyncio.sleep(number / count * every_s / 2)
        try:
            reader, writer = await asyncio.open_connection(HOST, port, limit=2048)
            while loop.time() < end_s:
                writer.write(_LIVE)
                async with asyncio.timeout(30):
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = head.lower().partition(b"content-length: ")[2].split()[0]
                    await reader.readexactly(int(length))
                asked += 1
                await asyncio.sleep(every_s)
            writer.close()
        except (OSError, EOFError, TimeoutError):
            lost += 1

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(one(number))
    return asked, lost


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 when something was lost, or the loop was late."""
    parser = argparse.ArgumentParser(prog="python -m bench.held", description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--idle-process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if given.idle_process is not None:
        print(*asyncio.run(_idle(given.idle_process, given.idle, given.seconds)))
        return 0
    cpus = Cpus.of_this_machine()
    try:
        build.build(WORK / "bin")
        with children() as started:
            work = WORK.absolute()
            program = work / "bin" / "upstream"
            engine = upstream.start(started, program, cpus.load, work / "upstream")
            bench = Bench(work / "bin", work / "bodies", cpus, engine)
            site = Site(work, work / "venvs", cpus, started, engine)
            held = hold(bench, site, given.streams, given.idle, given.minutes * 60)
    except BenchError as error:
        print(f"held: FAILED: {error}", file=sys.stderr)
        return 1
    print(
        f"{given.streams} streams of 20 events/s and {given.idle} idle connections, "
        f"{given.minutes:g} minutes: {held.events} events, faults: "
        f"{'; '.join(held.faults) or 'none'}; {held.asked} requests on the idle ones, "
        f"{held.lost} lost; loop lag p99 <= {held.lag_p99_s} s (asked {LAG_S}); "
        f"PSS {held.pss_bytes / 1e6:.0f} MB"
    )
    return 0 if held.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
