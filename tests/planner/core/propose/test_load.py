"""Scaling by load: estimates by hand, and why the founding rule goes down and up for ever."""

from __future__ import annotations

from itertools import pairwise

import pytest

from planner.core.perf.capacity import Slo
from planner.core.perf.regression import Line
from planner.core.propose.load import (
    Judge,
    Typical,
    wants_fewer,
    wants_fewer_as_founded,
    wants_more,
)
from planner.core.types import Capabilities, Engine
from tests.planner.core.perf.test_capacity import line

OF = Capabilities(step_tokens=1000, max_seqs=64, kv_tokens=100_000)
SLO, SENSITIVITY = Slo(0.5, 0.05), 0.8


def judge(model: Line | None = None, **typical: float) -> Judge:
    usual = {"isl_tokens": 500.0, "osl_tokens": 100.0} | typical
    return Judge(model or line(0.01, 1e-4, 1e-7), Typical(**usual), OF)


def test_estimates_by_hand() -> None:
    """1,500 tokens wait and 500 come, half of them cached: 1,000 in steps of 990.

    0.01 + 0.099 + 0.005 and 0.01 + 0.001 + 0.005 s; the next token with 51,000 + 550 tokens of KV.
    """
    engine = Engine("a", 0.02, 200.0, 10.0, 50_000.0, 1500.0, 1000.0)
    found = judge(hit_ratio=0.5).estimate(engine)
    assert found.ttft_s == pytest.approx(0.114 + 0.016)
    assert found.own_s == pytest.approx(0.01 + 0.025 + 0.005)
    assert found.itl_s == pytest.approx(0.01 + 0.02 + 51_550 * 1e-7)


LATE = Engine("late", 0.02, 0.0, 0.0, 0.0, queued_prefill_tokens=9000.0)
IDLE = Engine("idle", None)


def test_up_only_if_all_are_late() -> None:
    assert wants_more(judge(), [LATE, LATE], SLO)
    assert not wants_more(judge(), [LATE, IDLE], SLO)
    slow = Engine("slow", 0.02, 600.0)
    assert wants_more(judge(), [slow, slow], SLO), "late with tokens alone"
    assert not wants_more(judge(), [slow, LATE], SLO), "all late, but not with the same"


def fleet(replicas: int, kv: float = 60_000.0, prefill: float = 0.0) -> list[Engine]:
    """A constant load, shared by so many."""
    share = kv / replicas
    return [Engine(str(i), 0.02, prefill / replicas, 20.0, share) for i in range(replicas)]


def course(
    fewer: object, load: tuple[float, float], replicas: int = 2, ticks: int = 20
) -> list[int]:
    """Replicas over some ticks under a constant load."""
    seen = [replicas]
    for _ in range(ticks):
        engines = fleet(seen[-1], *load)
        if wants_more(judge(), engines, SLO):
            seen.append(seen[-1] + 1)
        elif seen[-1] > 1 and fewer(judge(), engines, SLO, SENSITIVITY):  # type: ignore[operator]
            seen.append(seen[-1] - 1)
        else:
            seen.append(seen[-1])
    return seen


@pytest.mark.parametrize("prefill", [0.0, 150.0, 300.0, 450.0, 600.0, 800.0])
@pytest.mark.parametrize("kv", [0.0, 40_000.0, 90_000.0, 150_000.0])
def test_under_a_constant_load_it_never_goes_back(kv: float, prefill: float) -> None:
    seen = course(wants_fewer, (kv, prefill), replicas=4, ticks=40)
    turns = [b - a for a, b in pairwise(seen) if a != b]
    assert len(set(turns)) <= 1, seen


def test_the_rule_as_founded_goes_down_and_up_for_ever() -> None:
    """At 2 it has room, by its own measure; at 1 it is late."""
    load = (0.0, 450.0)
    assert course(wants_fewer_as_founded, load)[:5] == [2, 1, 2, 1, 2]
    assert set(course(wants_fewer, load)) == {2}


def test_the_kv_of_all_has_to_fit_on_one_fewer() -> None:
    roomy = judge(line(0.001, 1e-6, 1e-9))
    assert wants_fewer(roomy, fleet(2, 90_000.0), SLO, SENSITIVITY)
    assert not wants_fewer(roomy, fleet(2, 110_000.0), SLO, SENSITIVITY)
    assert not wants_fewer(roomy, fleet(1, 0.0), SLO, SENSITIVITY)
