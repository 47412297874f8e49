"""What one decision costs, without any network: `make bench-core`.

One request is parsed, turned into facts (texts, hashes), admitted, has its first token (its blocks
enter the prefix index) and is finished. The router is in the middle of its work: every instance
runs streams, its cache is full, 100,000 sessions live on all of them, all share a system prompt,
and four fifths of each prompt are known somewhere. CPU time, garbage collector off; the median over
repeats of the mean over a batch.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import orjson
from rich.console import Console

from bench.cost.tables import Grid, number
from bench.measuring import bodies
from proxy.core.accounts.engine_reports import EngineKv
from proxy.core.accounts.lease import Phase
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import Instance, RequestFacts, RouterConfig
from proxy.protocol.names.session_names import session_in
from proxy.protocol.prompt.facts import (
    TokenEstimator,
    block_hashes,
    prompt_bytes,
    prompt_facts,
)
from replayer.arguments import positive_count

SIZES = ("2k", "32k", "400k", "2m")
INSTANCES = (8, 64, 512)
POLICIES = ("seed-heuristic", "cost")
STEPS = ("parse", "texts", "hash", "admit", "first token", "finish")
"""`texts` is everything of the facts but the hashing of blocks, which is timed by itself."""
ENDPOINT = "/v1/chat/completions"
VARIANTS = 4
KNOWN_RATIO, SHARED_RATIO = 0.8, 0.1
UNIQUE = "0123456789abcdef"
"""Stands where a prompt begins to be new; each request has something else there."""
KV_TOKENS, BLOCK_TOKENS = 400_000, 256
SESSIONS = 100_000
IDLE_S = 3000.0
"""The sessions had their last turn within this time before the first decision."""
RUN_BLOCKS = 64
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    size: str
    instances: int
    policy: str


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time of each step per request, and of all of them."""

    case: Case
    steps_s: dict[str, float]

    @property
    def whole_s(self) -> float:
        """From the body's bytes to the released lease."""
        return sum(self.steps_s.values())


class Traffic:
    """Bodies of one size: a shared system prompt, a known conversation, a new end."""

    def __init__(self, size: str) -> None:
        self._numbers = count(1)
        self._halves = [self._split(size, variant) for variant in range(VARIANTS)]

    @staticmethod
    def _split(size: str, variant: int) -> tuple[bytes, bytes]:
        chars, turns = bodies.SIZES[size]
        own = bodies.prompt(f"{size}{variant}", chars)
        shared = bodies.prompt(size, int(chars * SHARED_RATIO))
        new = int(chars * KNOWN_RATIO)
        text = shared + own[len(shared) : new] + UNIQUE + own[new + len(UNIQUE) :]
        request = {"model": "bench", "messages": bodies.messages(text, turns), "stream": True}
        before, _, after = orjson.dumps(request | {"max_tokens": 256}).partition(UNIQUE.encode())
        return before, after

    def batch(self, n: int) -> list[bytes]:
        """The next requests; no two are alike."""
        chosen = (self._halves[i % VARIANTS] for i in range(n))
        return [before + f"{next(self._numbers):016d}".encode() + after for before, after in chosen]


def busy_router(
    case: Case, traffic: Traffic, estimator: TokenEstimator, sessions: int = SESSIONS
) -> Router:
    """Instances with running streams and full caches; each conversation is known to two."""
    rng = random.Random(case.instances)
    router = Router(FleetState(RouterConfig(prefill_throughput=20_000, offload_policy=case.policy)))
    names = [f"instance{i}" for i in range(case.instances)]
    for name in names:
        router.known.add(Instance(name, f"http://{name}:8000", f"http://{name}:8998"))
        router.known.events.probe_answered(name, 0.0)
        router.known.gate.observe_engine(name, EngineKv(KV_TOKENS, 0.5), 0.0)
        for _ in range(rng.randint(1, 8)):
            router.known.ledger.open(
                router.known.ledger.charge(name, Phase.DECODE, rng.randint(500, 50_000))
            )
    _fill(router, sessions, rng)
    for raw in traffic.batch(VARIANTS):
        known = facts_of(estimator, orjson.loads(raw)).block_hashes
        for name in names:
            router.known.prefixes.insert(
                router.known.fleet.states[name].cache, known[: int(len(known) * SHARED_RATIO)]
            )
        for name in rng.sample(names, 2):
            cache = router.known.fleet.states[name].cache
            router.known.prefixes.insert(cache, known[: int(len(known) * KNOWN_RATIO)])
    return router


def _fill(router: Router, sessions: int, rng: random.Random) -> None:
    """Fill the caches with older KV, and the table with sessions that are idle."""
    caches = [state.cache for state in router.known.fleet.states]
    first_block = count(1, RUN_BLOCKS)
    for cache in caches:
        router.known.prefixes.limit(cache, KV_TOKENS // BLOCK_TOKENS)
        # Not until it is full: the index as a whole has a bound that many instances reach before.
        for _ in range(KV_TOKENS // BLOCK_TOKENS // RUN_BLOCKS + 1):
            start = next(first_block)
            router.known.prefixes.now_s = rng.uniform(-IDLE_S, 0.0)
            router.known.prefixes.insert(cache, range(start, start + RUN_BLOCKS))
    for at in range(sessions):
        cache, since_s = caches[at % len(caches)], IDLE_S * (at / sessions - 1.0)
        stay = router.known.sessions.assign(f"known-{at}", cache, since_s, rng.randint(500, 9000))
        if stay is not None:
            router.known.sessions.ended(stay, stay.tokens, since_s)


def facts_of(
    estimator: TokenEstimator, parsed: dict[str, Any], session_id: str = "s"
) -> RequestFacts:
    """What the proxy does with a parsed body."""
    prompt = prompt_facts(ENDPOINT, parsed)
    assert prompt is not None
    return estimator.facts(prompt, {"X-Session-ID": session_id}, session_in(parsed))


def measure(case: Case, repeats: int, batch: int, sessions: int) -> Cost:
    """The median cost of each step."""
    traffic, estimator = Traffic(case.size), TokenEstimator()
    router = busy_router(case, traffic, estimator, sessions)
    now_s, samples = 1.0, []
    for _ in range(repeats + 1):
        samples.append(_once(router, estimator, traffic.batch(batch), now_s))
        now_s += batch / case.instances  # each instance has a request per second
    samples = samples[1:]  # the first one warms the caches
    return Cost(case, {step: median(sample[step] for sample in samples) for step in STEPS})


def _once(
    router: Router, estimator: TokenEstimator, raws: Sequence[bytes], now_s: float
) -> dict[str, float]:
    """A batch of requests, step by step: all are parsed, then all admitted, and so on."""
    spent = {}
    parsed, spent["parse"] = _timed(lambda: [orjson.loads(raw) for raw in raws])
    names = [f"session-{now_s}-{i}" for i in range(len(raws))]
    pairs = list(zip(parsed, names, strict=True))
    facts, facts_s = _timed(lambda: [facts_of(estimator, body, name) for body, name in pairs])
    texts = [prompt_bytes("/v1/chat/completions", body) or b"" for body in parsed]
    _, spent["hash"] = _timed(lambda: [block_hashes(text) for text in texts])
    spent["texts"] = max(0.0, facts_s - spent["hash"])
    routes, spent["admit"] = _timed(lambda: [_admit(router, one, now_s) for one in facts])
    both = list(zip(routes, facts, strict=True))
    _, spent["first token"] = _timed(lambda: _first_tokens(router, both, now_s + 0.1))
    _, spent["finish"] = _timed(lambda: _finish(router, routes, now_s + 0.2))
    return {step: seconds / len(raws) for step, seconds in spent.items()}


def _admit(router: Router, facts: RequestFacts, now_s: float) -> Route:
    route = router.admit(facts, now_s)
    if not isinstance(route, Route):
        raise RuntimeError(f"nobody takes the request: {route.reason}")
    return route


def _first_tokens(
    router: Router, placed: Sequence[tuple[Route, RequestFacts]], now_s: float
) -> None:
    for route, facts in placed:
        router.first_token(route, facts, now_s)


def _finish(router: Router, routes: Sequence[Route], now_s: float) -> None:
    for route in routes:
        router.finish(route, now_s)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """What it gives, and the CPU time it took."""
    gc.disable()
    try:
        begun_ns = time.process_time_ns()
        done = work()
        return done, (time.process_time_ns() - begun_ns) / 1e9
    finally:
        gc.enable()


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.core", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="OUT", help="every figure, in seconds")
    parser.add_argument(
        "--repeats", type=positive_count, default=15, help="batches per row, %(default)s"
    )
    parser.add_argument(
        "--batch", type=positive_count, default=8, help="requests per batch, %(default)s"
    )
    parser.add_argument(
        "--sizes", type=_of(SIZES), default=",".join(SIZES), help="of %(default)s, by commas"
    )
    parser.add_argument(
        "--instances", type=_counts, default=",".join(map(str, INSTANCES)), help="%(default)s"
    )
    parser.add_argument(
        "--sessions", type=positive_count, default=SESSIONS, help="known ones, %(default)s"
    )
    parser.add_argument(
        "--policies", type=_of(POLICIES), default=",".join(POLICIES), help="of %(default)s"
    )
    options = parser.parse_args(argv)
    cases = product(options.sizes, options.instances, options.policies)
    repeats, batch, sessions = options.repeats, options.batch, options.sessions
    costs = [measure(Case(*case), repeats, batch, sessions) for case in cases]
    Console(width=None if sys.stdout.isatty() else 120).print(grid(costs).rich())
    if options.json:
        rows = [{"whole_s": cost.whole_s} | orjson.loads(orjson.dumps(cost)) for cost in costs]
        options.json.write_bytes(orjson.dumps(rows, option=orjson.OPT_INDENT_2))
    return 0


def _of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Read names of these, by commas."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        if wrong := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(known)}, not {wrong[0]!r}")
        return names

    return read


def _counts(text: str) -> list[int]:
    return [positive_count(part) for part in text.split(",")]


def grid(costs: Sequence[Cost]) -> Grid:
    """One row per case, in microseconds."""
    rows = [
        [
            cost.case.size,
            str(cost.case.instances),
            cost.case.policy,
            *(number(cost.steps_s[step] * 1e6) for step in STEPS),
            number(cost.whole_s * 1e6),
        ]
        for cost in costs
    ]
    return Grid("CPU µs per request", ["body", "instances", "policy", *STEPS, "whole"], rows)


if __name__ == "__main__":
    sys.exit(main())
