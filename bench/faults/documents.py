"""An engine serves the worst documents that are accepted: how late the proxy's event loop is.

    python -m bench.faults.documents [--seconds 10] [DOCUMENT ...]

With `PYTHONPATH=.cache/compiled:.` and `python -P` the proxy is what `make compiled` made.
For each document a row: the loop's lag over so many seconds, as the proxy itself exports it, and
the memory that came on top. Two engines are there; one is honest, and its client asks all the time.
The exit status is 1 where the p99 is beyond 5 ms, the memory beyond 64 MiB, or an answer was lost.
The first row has no such document: it shows what the machine does to a loop by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.faults.soak import LAG, say
from bench.measuring.looplag import buckets, quantile_bound_s
from proxy.protocol.streams.parse_cost import is_cheap
from tests.chaos.command import Command, command
from tests.chaos.rig import MODEL
from tests.chaos.test_d_control_signals import BATCHES, publishes
from tests.support.harness import GOOD, RawEngine, plain

MOST_LAG_S, MOST_BYTES = 0.005, 64 << 20
LINE = b"vllm:num_requests_running{%b} 0\n"
MIB = 1 << 20


def cards(most: int = MIB) -> bytes:
    """The longest list of models that is parsed: of cards as small as they can be."""
    least, beyond = 1, most
    while beyond - least > 1:
        count = (least + beyond) // 2
        least, beyond = (count, beyond) if is_cheap(_cards(count)) else (least, count)
    return _cards(least)


def _cards(count: int) -> bytes:
    rest = b"".join(b',{"id":"m%d"}' % number for number in range(count))
    return b'{"data":[{"id":"%b"}%b]}' % (MODEL.encode(), rest)


def _of_labels() -> bytes:
    return LINE % b",".join(b'a%d=""' % number for number in range(480))


def _padded(lines: bytes) -> bytes:
    """As long as is read, with as many lines as are read."""
    return lines + b"\n" * min(MIB - len(lines), 30_000)


DOCUMENTS: dict[str, tuple[str, bytes]] = {
    "none": ("", b""),
    "metrics: lines of labels": ("/metrics", _padded(_of_labels() * 64)),
    "metrics: many lines": ("/metrics", _padded(LINE % (b'a="' + b"b" * 90 + b'"') * 2048)),
    "models: many cards": ("/v1/models", cards()),
    "KV events: many events": ("events", BATCHES["15 KiB of events"]),
}
"""Each with the path that has it."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one document did."""

    lag: Counter[str]
    grown_bytes: int
    asked: int
    lost: int

    @property
    def is_within(self) -> bool:
        """Whether the loop, the memory and the answers are as they should be."""
        p99_s = quantile_bound_s([self.lag], 0.99)
        is_soon = p99_s is not None and p99_s <= MOST_LAG_S
        return is_soon and self.grown_bytes <= MOST_BYTES and not self.lost


async def measured(name: str, seconds: float, folder: Path) -> Row:
    """Serve a document for so long, and ask meanwhile."""
    path, document = DOCUMENTS[name]
    options = ["--scrape-interval", "0.2", "--health-interval", "0.5"]
    async with AsyncExitStack() as stack:
        liar, honest = [await stack.enter_async_context(RawEngine(GOOD)) for _ in range(2)]
        if path == "events":
            server = await asyncio.start_server(publishes(document), "127.0.0.1", 0)
            await stack.enter_async_context(server)
            options += ["--kv-events", f"tcp://{{host}}:{server.sockets[0].getsockname()[1]}"]
        where = [liar.address, honest.address]
        proxy = await stack.enter_async_context(command(folder, where, *options))
        await proxy.up(2)
        before, rss = await _lag(proxy), proxy.rss_bytes
        if path.startswith("/"):
            liar.gets[path] = plain(document)
        end_s, asked, lost, most = asyncio.get_running_loop().time() + seconds, 0, 0, rss
        while asyncio.get_running_loop().time() < end_s:
            got = await proxy.ask(f"prompt {asked}")
            asked, lost = asked + 1, lost + (got.status != 200 or not got.is_clean)
            most = max(most, proxy.rss_bytes)
            await asyncio.sleep(0.02)
        return Row(await _lag(proxy) - before, most - rss, asked, lost)


async def _lag(proxy: Command) -> Counter[str]:
    return Counter(buckets(await proxy.exposition(), LAG))


async def main() -> int:
    """Print the table; 1 where a row is beyond its limits."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("document", nargs="*", choices=[[], *DOCUMENTS], default=[])
    given = parser.parse_args()
    say(f"{'document':<28}{'lag p50':>12}{'p99':>12}{'worst':>12}{'MiB':>8}{'lost':>10}")
    is_within = True
    for name in given.document or DOCUMENTS:
        with tempfile.TemporaryDirectory() as folder:
            row = await measured(name, given.seconds, Path(folder))
        bounds_s = [quantile_bound_s([row.lag], q) or 0.0 for q in (0.5, 0.99, 1.0)]
        lag = "".join([f"{f'<= {1e3 * bound_s:g} ms':>12}" for bound_s in bounds_s])
        lost = f"{row.lost} of {row.asked}"
        say(f"{name:<28}{lag}{row.grown_bytes / MIB:>8.1f}{lost:>10}")
        is_within &= row.is_within
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
