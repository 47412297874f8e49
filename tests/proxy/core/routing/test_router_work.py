"""How much work a decision is: the calls of `admit` alone, without hashing.

Calls are counted, not time: they are the same on every machine, and what this is to catch is a
decision that grew by a factor, or with the sessions that are known. `make bench-core` has its time.
Compiled code shows a counter only the calls that leave it.
"""

from __future__ import annotations

import statistics

import pytest

from proxy.core.accounts.engine_reports import EngineKv
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import Instance, RequestFacts, RouterConfig
from tests.support.work import calls_of

BLOCKS = 400


def facts(session: int, tokens: int, blocks: int = BLOCKS) -> RequestFacts:
    """A prompt with a head that all share and a tail of its session's own."""
    head, first = blocks // 10, 1000 * session + 1000
    own = range(first, first + blocks - head)
    return RequestFacts("m", f"s{session}", tokens, [*range(head), *own], tokens / blocks)


def fleet(n: int, policy: str, sessions: int, blocks: int) -> Router:
    """Instances with sessions, running streams and known KV."""
    made = Router(FleetState(RouterConfig(prefill_throughput=20_000, offload_policy=policy)))
    for i in range(n):
        made.known.add(Instance(f"i{i}", f"http://i{i}", f"http://i{i}:8998"))
        made.known.gate.observe_engine(f"i{i}", EngineKv(600_000, 0.5), 0.0)
    for i in range(sessions):
        f, now_s = facts(i, 30_000, blocks), 12.0 * n * i / sessions
        route = made.admit(f, now_s)
        assert isinstance(route, Route)
        made.prefill_done(route, f, now_s + 1.0)
        made.first_token(route, f, now_s + 2.0)
        if i % 2 or i < sessions - 4 * n:
            made.finish(route, now_s + 3.0, 100)
    return made


def calls_to_place(r: Router, f: RequestFacts, now_s: float) -> int:
    """Calls that one decision takes."""
    routes: list[object] = []
    count = calls_of(lambda: routes.append(r.admit(f, now_s)))
    (route,) = routes
    assert isinstance(route, Route)
    r.finish(route, now_s)
    return count - 2  # of the lambda and of the list


def median_calls(n: int, policy: str, sessions: int, blocks: int = BLOCKS) -> float:
    """Of 30 decisions; every third prompt is new but for its head."""
    r, counts = fleet(n, policy, sessions, blocks), []
    for i in range(30):
        f = facts(i % sessions if i % 3 else 10_000 + i, 100_000, blocks)
        counts.append(calls_to_place(r, f, 12.0 * n + 0.5 * i))
    return statistics.median(counts)


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "n", "most"),
    [
        ("cost", 8, 1300),
        ("cost", 64, 5700),
        ("seed-heuristic", 8, 630),
        ("seed-heuristic", 64, 1440),
    ],
)
def test_a_decision_is_so_many_calls_at_most(policy: str, n: int, most: int) -> None:
    assert median_calls(n, policy, 4 * n) <= most


@pytest.mark.long
def test_a_decision_does_not_grow_with_the_sessions_that_are_known() -> None:
    few, many = (median_calls(8, "cost", sessions, blocks=50) for sessions in (32, 2000))
    assert many <= 2 * few
