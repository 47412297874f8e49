"""Capacity by the founding formulas, in numbers that were worked out by hand."""

from __future__ import annotations

import pytest

from planner.core.perf.capacity import (
    Demand,
    Slo,
    aggregated,
    decode,
    prefill,
    prefill_replicas,
)
from planner.core.perf.regression import Line
from planner.core.perf.steps import chunked, largest
from planner.core.types import Capabilities


def line(constant: float, *coefficients: float) -> Line:
    """A line of exactly these coefficients: through points of a profile."""
    inputs = len(coefficients)
    points = [tuple(1000.0 * (i == at) for i in range(inputs)) for at in range(inputs)]
    points += [(0.0,) * inputs, (2000.0,) * inputs]
    priors = [
        (p, constant + sum(a * b for a, b in zip(coefficients, p, strict=True))) for p in points
    ]
    return Line(inputs, priors)


def test_chunks() -> None:
    step = lambda tokens: 0.01 + tokens / 10_000  # noqa: E731
    assert chunked(2500, 1000, step) == pytest.approx(2 * 0.11 + 0.06)
    assert chunked(1000, 1000, step) == pytest.approx(0.11)
    assert chunked(0, 1000, step) == 0.0


@pytest.mark.parametrize(("limit", "found"), [(0, 0), (1, 1), (7, 7), (99, 20)])
def test_the_largest_that_holds(limit: int, found: int) -> None:
    assert largest(1, 20, lambda n: n <= limit) == found


OF = Capabilities(step_tokens=1000, max_seqs=64, kv_tokens=100_000)


def test_prefill() -> None:
    """2,000 of 4,000 tokens are new: two steps of 0.02 s + 1,000 / 10,000 s."""
    model, demand = line(0.02, 1e-4), Demand(10.0, 4000, 100, hit_ratio=0.5)
    one = prefill(model, demand, Slo(0.5, 0.05), OF)
    assert (one.ttft_s, one.rate) == pytest.approx((0.24, 1 / 0.24))
    assert prefill_replicas(model, demand, Slo(0.5, 0.05), OF, 1) == 3
    assert prefill_replicas(model, Demand(0.1, 4000, 100, 0.5), Slo(0.1, 0.05), OF, 1) == 3


def test_decode() -> None:
    """Context 1,000: b streams take 0.01 + b / 1,000 s, so 40 of them keep 0.05 s."""
    model, demand = line(0.01, 1e-6), Demand(20.0, 900, 200)
    one = decode(model, demand, Slo(1.0, 0.05 + 1e-9), OF)
    assert (one.batch, one.is_feasible) == (40, True)
    assert one.rate == pytest.approx(40 / (200 * 0.05))
    assert one.replicas(demand, 1) == 5


def test_decode_of_two_tokens_a_step() -> None:
    """A step of 0.1 s keeps 0.05 s a token: 64 streams, as many as there may be."""
    demand = Demand(20.0, 900, 200, accept_length=2.0)
    one = decode(line(0.01, 1e-6), demand, Slo(1.0, 0.05), OF)
    assert one.batch == 64
    assert one.rate == pytest.approx(2 * 64 / (200 * 0.074))


def test_a_target_that_one_stream_misses() -> None:
    one = decode(line(0.2, 1e-6), Demand(20.0, 900, 200), Slo(1.0, 0.05), OF)
    assert (one.batch, one.is_feasible) == (1, False)
    assert one.rate == pytest.approx(1 / (200 * 0.201))


def test_both() -> None:
    """x = 500, O = 100, context 550: b streams bring 5 b tokens of prompts a step.

    wt = 0.01 + 5 b / 20,000 + 550 b / 10^7 = 0.01 + 0.000305 b; 0.04 s allow 98 streams, the KV
    cache 181 and the batch 64. First token: 500 tokens in one step of 936: 0.01 + 0.025 + 0.00352.
    """
    model = line(0.01, 1 / 20_000, 1e-7)
    one = aggregated(model, Demand(30.0, 500, 100), Slo(0.2, 0.04), OF)
    assert one.batch == 64
    assert one.itl_s == pytest.approx(0.01 + 0.000305 * 64)
    assert one.ttft_s == pytest.approx(0.01 + 500 / 20_000 + 64 * 550 / 1e7)
    assert one.rate == pytest.approx(64 / (100 * one.itl_s))


def test_prompts_that_fill_the_step() -> None:
    """x = 5,000, O = 10: 500 tokens of prompts per stream and step, so one stream is in balance."""
    model = line(0.01, 1 / 20_000, 1e-7)
    one = aggregated(model, Demand(1.0, 5000, 10), Slo(2.0, 0.1), OF)
    assert one.batch == 1
    assert one.rate == pytest.approx(1 / (10 * one.itl_s))
