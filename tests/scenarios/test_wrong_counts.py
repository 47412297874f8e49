"""An engine whose counts are wrong does not draw the fleet's traffic."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from proxy.core.accounts.engine_reports import EngineKv
from proxy.core.known.fleet_state import FleetState
from proxy.core.kvcache.trust import Counts
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import RequestFacts, RouterConfig
from replayer.engine.types import EngineOptions
from replayer.virtual.arrivals import LoadRules, Planned, plan
from replayer.virtual.fleet import simulate
from replayer.virtual.load import TraceTurn, load_source
from replayer.virtual.requests import VirtualOptions

BLOCK, REQUESTS, OUTPUT_TOKENS = 64, 200, 200
ENGINE = EngineOptions(block_size=BLOCK, num_blocks=5000, max_model_len=5000 * BLOCK)
EVENTS_BESIDE = 3
"""Of each stream: role, usage, end."""
SAMPLE = Path(__file__).parents[2] / "replayer/data/agentic_sample.trace.jsonl.gz"
MOST = 1.3
"""Bound on the wrong engine's part of the requests, over its part when it counts well."""


class Counted(Router):
    """A router that gets `factor` times the output tokens of `e0`, as the proxy would pass them."""

    def __init__(self, factor: float) -> None:
        super().__init__(FleetState(RouterConfig(prefill_throughput=20_000)))
        self._factor = factor

    def finish(self, route: Route, now_s: float, output_tokens: int | None = None) -> None:
        if output_tokens is not None:
            name, events = route.decode.name, output_tokens + EVENTS_BESIDE
            told = round(output_tokens * (self._factor if name == "e0" else 1))
            output_tokens = self.known.output_tokens.believed(name, told, events, None)
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
@pytest.mark.parametrize("factor", [1.3, 2.0, 1e6])
def test_what_it_says_too_much_draws_no_traffic(factor: float, gap_s: float) -> None:
    fair = max(0.25, share(1.0, gap_s))
    assert share(factor, gap_s) <= MOST * fair


class Reported(Router):
    """A router to which `e0` reports `kv` times its KV cache, and `cached` of each prompt."""

    def __init__(self, kv: float, cached: float | None) -> None:
        super().__init__(FleetState(RouterConfig(prefill_throughput=20_000)))
        self._cached = cached
        observe = self.known.gate.observe_engine

        def observed(name: str, told: EngineKv, now_s: float) -> None:
            if name == "e0" and told.total_tokens is not None:
                told = EngineKv(round(told.total_tokens * kv), told.used_ratio)
            observe(name, told, now_s)

        setattr(self.known.gate, "observe_engine", observed)  # noqa: B010 - mypy knows it as a method

    def completed(
        self,
        route: Route,
        facts: RequestFacts,
        cached_ratio: float | None = None,
        counts: Counts | None = None,
    ) -> None:
        is_wrong = route.decode.name == "e0" and self._cached is not None
        super().completed(route, facts, self._cached if is_wrong else cached_ratio, counts)


@pytest.mark.parametrize(("kv", "cached"), [(4.0, None), (1e9, 1.0), (1.0, 0.0)])
def test_times_are_measured_whatever_it_reports(kv: float, cached: float | None) -> None:
    """Too large a cache draws prompts until they take longer there: less than twice its part."""
    source = load_source(SAMPLE)
    planned = plan(source, LoadRules(rate=0.8, horizon_s=150.0, seed=1))
    blocks = 400_000 // source.block_tokens
    engine = EngineOptions(
        block_size=source.block_tokens,
        num_blocks=blocks,
        max_model_len=blocks * source.block_tokens,
    )
    options = VirtualOptions((engine,) * 4, source.block_tokens)
    run = simulate(planned, Reported(kv, cached), options)
    computed: Counter[str] = Counter()
    for row in run.rows:
        computed[row.decode] += row.prompt_tokens - row.cached_tokens
    assert computed["e0"] < 2 * computed.total() / 4
