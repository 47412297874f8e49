"""The rows with caches without an end, by hand."""

from __future__ import annotations

import pytest

from bench.routing.bound import STEP, alone, bounds, endless
from bench.routing.load import Shape, Work
from bench.routing.runs import Cell
from replayer.trace.loaders import TraceRequest

CELL = Cell(Shape("one", 1, 131_072), "low", 1, 12)


def request(session: str, turn: int, runs: tuple[tuple[int, int], ...]) -> TraceRequest:
    blocks = sum(count for _first, count in runs)
    return TraceRequest(
        request_id=f"{session}:{turn}",
        session_id=session,
        turn=turn,
        arrival_s=0.0,
        input_tokens=64 * blocks,
        output_tokens=101,
        runs=runs,
        block_tokens=64,
        line=1,
        wait_for=(f"{session}:{turn - 1}",) if turn else (),
        delay_s=5.0 if turn else None,
    )


WORK = Work(
    at_a_time=1,
    sessions=((request("a", 0, ((0, 100),)), request("a", 1, ((0, 200),))),),
    left_out=0,
)


def test_a_step_is_its_prefill_and_its_decodes() -> None:
    assert STEP.step_s(0, 0.0, 2, 100_000) == pytest.approx(0.013)
    assert STEP.step_s(8_192, 1e9, 0, 0) == pytest.approx(0.004 + 0.4096)
    assert STEP.step_s(20, 0.0, 1, 0) == pytest.approx(0.004 + 0.001 + 0.010)


def test_alone_a_request_waits_for_its_own_prefill_only() -> None:
    run = alone(CELL, WORK)
    first, second = run.answered
    assert first.ttft_s == second.ttft_s == pytest.approx(0.004 + 6_400 / 20_000)
    assert (first.cached_tokens, second.cached_tokens) == (0, 6_400)
    assert first.tpot_s == pytest.approx(0.010 + 6_400 * 3e-8)
    answers_s = 100 * (first.tpot_s + second.tpot_s)
    assert run.makespan_s == pytest.approx(first.ttft_s + second.ttft_s + 5.0 + answers_s)


def test_endless_caches_hit_what_can_be_hit() -> None:
    run = endless(CELL, WORK)
    assert [one.cached_tokens for one in run.answered] == [0, 6_400]
    assert run.lost == 0


def test_no_row_is_below_the_bound() -> None:
    busy = Work(
        at_a_time=3,
        sessions=tuple(
            tuple(request(name, turn, ((100 * n, 30 + 9 * turn),)) for turn in range(4))
            for n, name in enumerate("abcdef")
        ),
        left_out=0,
    )
    bound, reached = (run.figures for run in bounds(CELL, busy))
    assert bound is not None
    assert reached is not None
    assert bound.ttft_mean_s <= reached.ttft_mean_s
    assert bound.tpot_p90_s <= reached.tpot_p90_s
    assert bound.hit_ratio == pytest.approx(reached.hit_ratio)
