"""Figures of an exposition: those of any fleet's size, and nothing that is no figure."""

from __future__ import annotations

import random
from collections.abc import Generator

import pytest

from planner.sources import reading
from planner.sources.reading import PROXY_TIMES, samples, shown_url
from proxy.net.peer_documents import (
    MOST_LINES,
    MOST_WANTED,
    SKIP_BYTES,
    TURN_BYTES,
    WANTED_BYTES,
    Sample,
)
from replayer.answers import MOST_VALUE

NAMES = ("cache_proxy_issued_total", "cache_proxy_hits_total")


async def test_an_exposition_of_a_large_fleet_is_read_whole() -> None:
    lines = [f'cache_proxy_hits_total{{upstream="e{n}"}} 1' for n in range(3000)]
    lines += [f'cache_proxy_other{{upstream="e{n}"}} 1' for n in range(40_000)]
    lines += ["cache_proxy_issued_total 7", ""]
    found = await samples("\n".join(lines).encode(), NAMES, PROXY_TIMES)
    assert sum(value for name, _, value in found if name == NAMES[1]) == 3000.0
    assert found[-1] == (NAMES[0], {}, 7.0)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e300", "-1e300", "1e999", "-1"])
async def test_what_is_no_figure_is_left_out(value: str) -> None:
    text = f"cache_proxy_issued_total {value}\ncache_proxy_hits_total 2\n"
    assert await samples(text.encode(), NAMES) == [(NAMES[1], {}, 2.0)]


async def test_garbage_is_left_out() -> None:
    chance = random.Random(5)
    alphabet = 'cache_proxy_issued_total{}="\\,.# 0123\tnaNInfeE+-\0é\u2028'
    lines = [
        NAMES[0] + "".join(chance.choices(alphabet, k=chance.randrange(14))) for _ in range(1500)
    ]
    found = await samples("\n".join([*lines, f"{NAMES[1]} 3", ""]).encode(), NAMES)
    assert found[-1] == (NAMES[1], {}, 3.0)
    assert all(name in NAMES and 0.0 <= value < MOST_VALUE for name, _, value in found)


@pytest.mark.parametrize(
    "document",
    [
        b"vllm:x{%s} 1\n" % b",".join(b'l%d="v"' % n for n in range(100_000)),
        b"cache_proxy_hits_total 1\n" * 300_000,
        b'cache_proxy_hits_total{a="%s"} 1\n' % (b"x" * (1 << 20)),
        b'cache_proxy_hits_total{a="' + b'\\"' * 500_000,
    ],
)
async def test_what_takes_long_is_not_parsed(document: bytes) -> None:
    found: list[Sample] = []

    def parsed() -> Generator[None]:
        found.extend((yield from reading._samples(document, NAMES, 1)))

    turns = sum(1 for _ in parsed())
    assert turns * TURN_BYTES <= WANTED_BYTES + SKIP_BYTES * MOST_LINES
    assert len(found) <= MOST_WANTED


def test_a_password_is_not_shown() -> None:
    assert shown_url("http://user:secret@h:1/x") == "http://***@h:1/x"
