"""Five times what the fleet can do: what it does is not less, and who is refused is told well.

The real router, gate and queue, and models of engines, on one virtual clock.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

import pytest

from proxy.core.accounts.engine_reports import EngineKv
from proxy.core.admission.queue import Entry, Priority, QueueLimits, WaitQueue
from proxy.core.admission.retry_after import RetryAdvice, milliseconds
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import Instance, Reject, RejectReason, RequestFacts, RouterConfig, Thresholds
from replayer.engine.engine import Engine
from replayer.engine.types import EngineOptions, Finished, FirstToken, Job, SimRequest

PROMPTS, OUTPUTS = (500, 2000, 8000), (20, 60, 120)
MEAN_TOKENS = sum(PROMPTS) / 3 + sum(OUTPUTS) / 3
LIMITS = QueueLimits(256, 64 << 20, 10.0)
TOKEN_BYTES = 4
BUDGET_S = LIMITS.seconds + 2.0
"""A first token comes at most the queue's time and a full instance's backlog later."""


@dataclass(eq=False)
class Turn(Entry):
    """One client's request."""

    facts: RequestFacts = field(kw_only=True)
    output_tokens: int = field(kw_only=True)
    arrived_s: float = field(kw_only=True)
    route: Route | None = None
    first_s: float | None = None


class Run:
    """A fleet under a list of arrivals."""

    def __init__(self, engines: int, thresholds: Thresholds) -> None:
        self.router = Router(
            FleetState(RouterConfig(prefill_throughput=20_000, thresholds=thresholds))
        )
        self.engines = {f"e{i}": Engine(EngineOptions()) for i in range(engines)}
        self.queue = WaitQueue(LIMITS)
        self.promises = RetryAdvice()
        self.legs: dict[SimRequest, Turn] = {}
        self.finished: list[tuple[float, Turn]] = []
        self.refused: list[Reject] = []
        self.waited_s: list[float] = []
        self.busy = Reject(RejectReason.QUEUE_FULL, 1)
        for name, engine in self.engines.items():
            self.router.known.add(Instance(name, f"http://{name}"))
            tokens = engine.pool.total * engine.options.block_size
            self.router.known.gate.observe_engine(name, EngineKv(tokens), 0.0)

    def run(self, arrivals: Iterable[Turn], *, until_s: float) -> None:
        heap = [(turn.arrived_s, n, turn) for n, turn in enumerate(arrivals)]
        heapq.heapify(heap)
        while True:
            due_s = {name: engine.next_event_s() for name, engine in self.engines.items()}
            now_s = min(heap[0][0] if heap else math.inf, *due_s.values())
            if now_s > until_s:
                break
            while heap and heap[0][0] <= now_s:
                self.arrive(heapq.heappop(heap)[2], now_s)
            for name, engine in self.engines.items():
                if due_s[name] <= now_s:
                    self.advance(engine, now_s)
            self.expire(now_s)
            self.pump(now_s)

    def arrive(self, turn: Turn, now_s: float) -> None:
        answer = self.router.admit(turn.facts, now_s)
        if isinstance(answer, Route) and not self.queue.has(turn.lane):
            self.start(turn, answer, now_s)
            return
        if isinstance(answer, Route):
            self.router.finish(answer, now_s)
            answer = self.busy
        self.busy = answer
        offer = self.queue.offer(turn, answer.wait_s, answer.drain_tps, now_s)
        if offer.refused is not None:
            self.refuse(turn, now_s)
        for displaced in offer.displaced:
            assert isinstance(displaced, Turn)
            self.refuse(displaced, now_s)

    def refuse(self, turn: Turn, now_s: float) -> None:
        told = self.promises.advise(self.busy, turn.tokens, self.queue.tokens, now_s)
        self.refused.append(told)
        self.waited_s.append(now_s - turn.arrived_s)

    def expire(self, now_s: float) -> None:
        for entry in self.queue.entries():
            if now_s - entry.queued_s >= LIMITS.seconds and isinstance(entry, Turn):
                self.queue.leave(entry)
                self.refuse(entry, now_s)

    def pump(self, now_s: float) -> None:
        while isinstance(turn := self.queue.next((), now_s), Turn):
            answer = self.router.admit(turn.facts, now_s)
            if isinstance(answer, Reject):
                self.busy = answer
                return
            self.queue.served(turn, now_s)
            self.start(turn, answer, now_s)

    def start(self, turn: Turn, route: Route, now_s: float) -> None:
        turn.route = route
        job = Job(str(id(turn)), turn.tokens, [], turn.output_tokens)
        self.legs[self.engines[route.decode.name].submit(job, now_s)] = turn

    def advance(self, engine: Engine, now_s: float) -> None:
        for event in engine.advance(now_s):
            if not isinstance(event, FirstToken | Finished):
                continue
            turn = self.legs[event.request]
            assert turn.route is not None
            if isinstance(event, FirstToken):
                turn.first_s = now_s
                self.router.first_token(turn.route, turn.facts, now_s)
            else:
                self.finished.append((now_s, turn))
                self.router.completed(turn.route, turn.facts)
                self.router.finish(turn.route, now_s, turn.output_tokens)


def load(rate: float, until_s: float) -> list[Turn]:
    """Requests of some sizes, in no order, `rate` per second."""
    rng = Random(7)
    turns = []
    now_s = 0.0
    while now_s < until_s:
        now_s += rng.expovariate(rate)
        tokens = rng.choice(PROMPTS)
        facts = RequestFacts("m", None, tokens, [], 1.0)
        turn = Turn(
            "m",
            rng.choice("ab"),
            Priority.NORMAL,
            tokens,
            tokens * TOKEN_BYTES,
            facts=facts,
            output_tokens=rng.choice(OUTPUTS),
            arrived_s=now_s,
        )
        turns.append(turn)
    return turns


def per_s(run: Run, from_s: float, until_s: float) -> float:
    """Tokens of answered requests per second within a part of the run."""
    inside = (turn for at_s, turn in run.finished if from_s <= at_s < until_s)
    return sum(turn.tokens + turn.output_tokens for turn in inside) / (until_s - from_s)


@pytest.mark.parametrize(
    "thresholds",
    [Thresholds(None, 12_000, None), Thresholds(0.3, 12_000, None)],
    ids=["prefill", "prefill and decode"],
)
def test_five_times_too_much(thresholds: Thresholds) -> None:
    free = Run(2, Thresholds())
    free.run(load(400.0, 5.0), until_s=40.0)
    capacity = per_s(free, 10.0, 40.0)
    run = Run(2, thresholds)
    sent = load(5 * capacity / MEAN_TOKENS, 40.0)
    run.run(sent, until_s=70.0)
    goodput = per_s(run, 10.0, 40.0)
    sys.stdout.write(
        f"capacity {capacity:.0f} tokens/s, goodput {goodput:.0f} ({goodput / capacity:.0%}), "
        f"{len(run.refused)} of {len(sent)} refused\n"
    )
    ttfts = sorted((t.first_s or math.inf) - t.arrived_s for _, t in run.finished)
    sys.stdout.write(f"TTFT p50 {ttfts[len(ttfts) // 2]:.2f} s, worst {ttfts[-1]:.2f} s\n")
    waits = sorted(run.waited_s)
    sys.stdout.write(f"refused after p50 {waits[len(waits) // 2]:.2f} s, worst {waits[-1]:.2f}\n")
    assert goodput >= 0.95 * capacity
    assert len(run.finished) + len(run.refused) == len(sent)
    assert all(1 <= r.retry_after_s <= 30 and milliseconds(r) >= 50 for r in run.refused)
    assert ttfts[-1] <= BUDGET_S
    assert sum(w == 0 for w in waits) > 0.9 * len(waits), "most know at once"
    assert run.router.known.ledger.live == 0
    assert run.router.known.ledger.drift() == 0
    assert not len(run.queue)
