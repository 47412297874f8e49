"""An engine that counts output tokens wrongly gets no more requests than one that does not."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import pytest

from proxy.core.config import RouterConfig
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from replayer.engine.types import EngineOptions
from replayer.virtual.arrivals import Planned
from replayer.virtual.fleet import simulate
from replayer.virtual.load import TraceTurn
from replayer.virtual.requests import VirtualOptions

BLOCK, REQUESTS, OUTPUT_TOKENS = 64, 200, 200
ENGINE = EngineOptions(block_size=BLOCK, num_blocks=5000, max_model_len=5000 * BLOCK)
EVENTS_BESIDE = 3
"""Of each stream: role, usage, end."""
MOST = 1.3
"""Bound on the wrong engine's part of the requests, over its part when it counts well."""


class Counted(Router):
    """A router that gets `factor` times the output tokens of `e0`, as the proxy would pass them."""

    def __init__(self, factor: float) -> None:
        super().__init__(RouterConfig(prefill_throughput=20_000))
        self._factor = factor

    def finish(self, route: Route, now_s: float, output_tokens: int | None = None) -> None:
        if output_tokens is not None:
            name, events = route.decode.name, output_tokens + EVENTS_BESIDE
            told = round(output_tokens * (self._factor if name == "e0" else 1))
            output_tokens = self.output_tokens.believed(name, told, events, None)
        super().finish(route, now_s, output_tokens)


@cache
def share(factor: float, gap_s: float) -> float:
    """The part of the requests that `e0` of four engines gets: short prompts, long answers."""
    rng, start_s, planned = random.Random(1), 0.0, []
    for i in range(REQUESTS):
        start_s += rng.expovariate(1 / gap_s)
        blocks = (3 * i, 3 * i + 1, 3 * i + 2)
        turn = TraceTurn(f"s{i}", 200, OUTPUT_TOKENS, 200, blocks, 0, (), 0.0, 0.0)
        planned.append(Planned(turn, f"s{i}", start_s, 0.0, ()))
    run = simulate(planned, Counted(factor), VirtualOptions((ENGINE,) * 4, BLOCK))
    assert run.drift == 0
    return Counter(row.decode for row in run.rows)["e0"] / REQUESTS


@pytest.mark.parametrize("gap_s", [0.02, 0.1])
@pytest.mark.parametrize("factor", [1.3, 2.0, 8.0, 1e6])
def test_what_it_says_too_much_draws_no_traffic(factor: float, gap_s: float) -> None:
    fair = max(0.25, share(1.0, gap_s))
    assert share(factor, gap_s) <= MOST * fair
