"""Engines that die in virtual time: requests go elsewhere, streams go on where they may."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import RouterConfig
from replayer.engine.types import EngineOptions
from replayer.virtual.arrivals import Planned
from replayer.virtual.fleet import simulate
from replayer.virtual.load import TraceTurn
from replayer.virtual.requests import Loss, VirtualOptions, VirtualRun
from tests.support.examples import examples

BLOCK = 512
ENGINE = EngineOptions(block_size=BLOCK, num_blocks=400, max_model_len=400 * BLOCK)
ENGINES = 3
DOWN_S = 3.0


def load(requests: int, every_s: float = 0.3, output: int = 200) -> list[Planned]:
    """Sessions of two turns each, a new request every so often; some prompts are HEAVY."""
    planned = []
    for n in range(requests):
        blocks = 4 + 28 * (n % 3 == 0)
        ids = tuple(1000 * (n // 2) + at for at in range(blocks))
        session = f"s{n // 2}"
        turn = TraceTurn(session, blocks * BLOCK + 100, output, 100, ids, 0, (), 0.0, 0.0)
        planned.append(Planned(turn, session, every_s * n, delay_s=0.0, wait_for=()))
    return planned


def run(
    planned: list[Planned],
    losses: tuple[Loss, ...] = (),
    limit: int = 0,
    policy: str = "cost",
) -> VirtualRun:
    router = Router(FleetState(RouterConfig(prefill_throughput=20_000, offload_policy=policy)))
    options = VirtualOptions(
        (ENGINE,) * ENGINES, BLOCK, losses=losses, migration_limit=limit, transfer_timeout_s=5.0
    )
    found = simulate(planned, router, options)
    assert (found.drift, router.known.ledger.live) == (0, 0)
    assert len(found.rows) == len(planned)
    return found


LOST = (Loss(0, 6.05, 11.05),)


def test_without_a_limit_streams_are_cut_and_others_go_elsewhere() -> None:
    rows = run(load(40), LOST).rows
    cut = [row for row in rows if row.outcome == "failed"]
    assert cut
    assert all(row.ttft_s is not None and row.end_s is None for row in cut)
    assert all(row.moves == 0 for row in rows)
    assert {row.decode for row in rows if row.outcome == "ok"} == {"e0", "e1", "e2"}


def test_with_a_limit_the_same_streams_go_on() -> None:
    without, rows = (run(load(40), LOST, limit).rows for limit in (0, 1))
    assert all(row.outcome == "ok" for row in rows)
    cut = {row.index for row in without if row.outcome == "failed"}
    moved = {row.index for row in rows if row.moves}
    assert moved == cut
    for index in moved:
        whole = run(load(40)).rows[index]
        row = rows[index]
        assert (row.moves, row.ttft_s) == (1, without[index].ttft_s)
        assert row.e2e_s is not None
        assert whole.e2e_s is not None
        assert row.e2e_s > whole.e2e_s, "the move computes prompt and output so far anew"


def test_what_comes_back_has_nothing_cached_and_is_used_again() -> None:
    planned = load(120)
    rows = run(planned, (Loss(1, 10.0, 14.0),)).rows
    late = [row for row in rows if row.decode == "e1" and row.arrival_s > 22.0]
    assert late
    assert not any(10.1 < row.arrival_s < 14.0 and row.decode == "e1" for row in rows)


def test_nothing_is_learned_of_a_stream_that_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output over the time since its last instance's first token would be far too quick."""
    told: list[int | None] = []
    finish = Router.finish

    def noted(self: Router, route: Route, now_s: float, output_tokens: int | None = None) -> None:
        told.append(output_tokens)
        finish(self, route, now_s, output_tokens)

    monkeypatch.setattr(Router, "finish", noted)
    rows = run(load(40), LOST, 1).rows
    moved = sum(row.moves > 0 for row in rows)
    assert moved
    assert told.count(None) == moved


def test_a_successor_that_came_between_two_probes_has_nothing_cached() -> None:
    planned = load(120)
    rows = run(planned, (Loss(1, 10.0, 10.5),)).rows
    late = [row for row in rows if row.arrival_s > 13.0]
    off = [abs(row.estimated_hit_ratio - row.cached_tokens / row.prompt_tokens) for row in late]
    assert max(off) < 0.1


def test_with_nobody_lost_a_limit_changes_nothing() -> None:
    assert run(load(60), limit=3).rows == run(load(60)).rows


@given(
    gaps_s=st.lists(
        st.tuples(st.floats(0.01, 9.0), st.integers(0, ENGINES - 1)), min_size=1, max_size=4
    ),
    limit=st.integers(0, 4),
    policy=st.sampled_from(["cost", "seed-heuristic", "never"]),
    join=st.booleans(),
)
@settings(max_examples=examples(40))
def test_whatever_dies_every_lease_closes_once(
    gaps_s: list[tuple[float, int]], limit: int, policy: str, join: bool
) -> None:
    """One engine at a time: so with as many moves as there are losses no stream is cut."""
    starts = list(accumulate(gap_s + DOWN_S + 0.5 for gap_s, _ in gaps_s))
    losses = tuple(
        Loss(number, at_s - DOWN_S, at_s) for at_s, (_, number) in zip(starts, gaps_s, strict=True)
    )
    planned = load(30)
    if join:  # bursts, so that some wait in the queue
        planned = [replace(one, earliest_s=one.earliest_s // 3 * 3) for one in planned]
    rows = run(planned, losses, limit, policy).rows
    assert {row.outcome for row in rows} <= {"ok", "failed"}
    assert all(row.moves <= limit for row in rows)
    for row in rows:
        assert (row.end_s is not None) == (row.outcome == "ok")
        if row.outcome == "failed" and row.ttft_s is not None:
            assert limit < len(losses), "it could have gone on"
