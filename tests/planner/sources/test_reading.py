"""Figures of an exposition: those of any fleet's size, and nothing that is no figure."""

from __future__ import annotations

import random

import pytest

from planner.sources.reading import SourceError, samples, shown_url

NAMES = ("cache_proxy_issued_total", "cache_proxy_hits_total")


def test_an_exposition_of_a_large_fleet_is_read_whole() -> None:
    lines = [f'cache_proxy_hits_total{{upstream="e{n}"}} 1' for n in range(3000)]
    lines += [f'cache_proxy_other{{upstream="e{n}"}} 1' for n in range(40_000)]
    lines += ["cache_proxy_issued_total 7", ""]
    found = list(samples("\n".join(lines).encode(), NAMES))
    assert sum(value for name, _, value in found if name == NAMES[1]) == 3000.0
    assert found[-1] == (NAMES[0], {}, 7.0)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e300", "-1e300", "1e999"])
def test_what_is_no_figure_is_left_out(value: str) -> None:
    text = f"cache_proxy_issued_total {value}\ncache_proxy_hits_total 2\n"
    assert list(samples(text.encode(), NAMES)) == [(NAMES[1], {}, 2.0)]


def test_garbage_is_a_failure_of_one_line_or_nothing() -> None:
    chance = random.Random(5)
    alphabet = 'cache_proxy_issued_total{}="\\,.# 0123\tnaNInfeE+-\0é\u2028'
    said = set()
    for _ in range(3000):
        tail = "".join(chance.choices(alphabet, k=chance.randrange(14)))
        try:
            list(samples(f"{NAMES[0]}{tail}\n".encode(), NAMES))
        except SourceError as error:
            said.add(str(error))
    assert said
    assert all(text.isprintable() for text in said)


def test_a_password_is_not_shown() -> None:
    assert shown_url("http://user:secret@h:1/x") == "http://***@h:1/x"
