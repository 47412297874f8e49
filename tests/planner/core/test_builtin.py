"""The builtin plugins together: which of them run, and how often."""

from __future__ import annotations

import pytest

from planner.core.builtin import Builtin, limits_of
from planner.core.propose.load import LoadDecision
from planner.core.propose.throughput import ThroughputDecision
from planner.core.rules import Rules
from planner.core.types import COMPONENT, Capabilities, Context, Engine, Replicas, Traffic

LIMITS = limits_of(2, 1, 4)


def context(tick: int, engines: tuple[Engine, ...]) -> Context:
    return Context(
        tick,
        5.0 * tick,
        {COMPONENT: Replicas(len(engines), 2)},
        {COMPONENT: Capabilities()},
        Traffic(180.0, 1800.0, 1000.0, 100.0, 0.0),
        {COMPONENT: engines},
        baseline={COMPONENT: 2},
    )


@pytest.mark.parametrize(
    ("rules", "interval_s", "asked"),
    [
        (Rules(), 5.0, (True, True)),
        (Rules(load_scaling=False), 180.0, (False, True)),
        (Rules(throughput_scaling=False), 5.0, (True, False)),
    ],
)
def test_the_loops_that_are_on_are_asked(
    rules: Rules, interval_s: float, asked: tuple[bool, bool]
) -> None:
    builtin = Builtin(rules, LIMITS)
    builtin.tick(context(1, ()))
    assert builtin.interval_s == interval_s
    assert (bool(builtin.load.decisions), bool(builtin.throughput.decisions)) == asked


def test_it_learns_from_each_tick_and_the_limits_stand() -> None:
    builtin, found, targets = Builtin(Rules(), LIMITS), {}, []
    for tick in range(1, 12):
        seen = Engine("a", 0.01 + tick / 1000, 100.0 * tick, 9.0, 5000.0 * tick, 1e6)
        targets.append(builtin.tick(context(tick, (seen, seen))).targets)
        found[tick] = builtin.load.decisions[COMPONENT]
    assert found[1] is LoadDecision.INSUFFICIENT
    assert found[11] is LoadDecision.UP
    assert builtin.throughput.decisions[COMPONENT] is ThroughputDecision.NOT_READY
    assert targets[-1] == {COMPONENT: 3}
    assert LIMITS.max_gpus == 8
