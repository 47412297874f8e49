"""Fixed thresholds of use: Dynamo's table, computed by hand."""

from __future__ import annotations

import pytest

from planner.core.builtin import Builtin, limits_of
from planner.core.propose.load import LoadDecision
from planner.core.propose.static import (
    DECODE,
    PREFILL,
    Aim,
    Thresholds,
    change,
    combined_use,
    decode_use,
    prefill_use,
)
from planner.core.rules import Rules
from planner.core.types import COMPONENT, Capabilities, Context, Engine, Replicas

OF = Capabilities(kv_tokens=100_000)


def engine(kv: float, queued: float = 0.0, waiting_kv: float = 0.0) -> Engine:
    return Engine("e", 0.01, 0.0, 1.0, kv, queued, waiting_kv)


def test_uses_are_shares_of_a_context_and_of_the_cache() -> None:
    one = engine(30_000, 20_000, 10_000)
    assert prefill_use(one, 40_000) == 0.5
    assert decode_use(one, OF) == 0.4
    assert combined_use(one, OF) == pytest.approx(0.6)
    assert decode_use(one, Capabilities()) is None
    assert combined_use(one, Capabilities()) is None


@pytest.mark.parametrize(
    ("aim", "uses", "wanted"),
    [
        (Aim.THROUGHPUT, [1.01, 0.0], 1),
        (Aim.THROUGHPUT, [1.0, 1.0], 0),
        (Aim.THROUGHPUT, [0.59, 0.2], 0),  # the other one would have 1.18
        (Aim.THROUGHPUT, [0.49, 0.2], -1),
        (Aim.THROUGHPUT, [0.6, 0.2], 0),
        (Aim.THROUGHPUT, [0.59] * 3, -1),
        (Aim.THROUGHPUT, [0.1], 0),
        (Aim.LATENCY, [0.41, 0.0], 1),
        (Aim.LATENCY, [0.4, 0.0], 0),
        (Aim.LATENCY, [0.09, 0.09], -1),
        (Aim.LATENCY, [0.1, 0.0], 0),
    ],
)
def test_the_cache_is_full_or_empty(aim: Aim, uses: list[float], wanted: int) -> None:
    assert DECODE[aim].change(uses) == wanted
    engines = [engine(use * 100_000) for use in uses]
    assert change(engines, OF, DECODE[aim]) == wanted


@pytest.mark.parametrize(
    ("aim", "uses", "wanted"),
    [
        (Aim.THROUGHPUT, [1.01, 0.0], 1),
        (Aim.THROUGHPUT, [0.09, 0.09], -1),
        (Aim.THROUGHPUT, [0.1, 0.0], 0),
        (Aim.LATENCY, [0.1, 0.0], 1),
        (Aim.LATENCY, [0.0, 0.0], -1),
        (Aim.LATENCY, [0.01, 0.0], 0),
    ],
)
def test_prompts_wait_or_none_do(aim: Aim, uses: list[float], wanted: int) -> None:
    assert PREFILL[aim].change(uses) == wanted


def test_thresholds_of_ones_own_count_at_their_value() -> None:
    own = Thresholds(0.8, 0.3, is_closed=True)
    assert [own.change(uses) for uses in ([0.8, 0.1], [0.3, 0.3], [0.31, 0.3])] == [1, -1, 0]


@pytest.mark.parametrize(
    ("kv", "decision", "target"),
    [(90_000.0, "scale_up", 3), (5_000.0, "scale_down", 1), (20_000.0, "no_change", 2)],
)
def test_load_scaling_follows_the_thresholds(kv: float, decision: str, target: int) -> None:
    rules = Rules(aim=Aim.LATENCY, throughput_scaling=False)
    builtin = Builtin(rules, limits_of(1, 1, 9))
    engines = (engine(kv), engine(kv / 2))
    context = Context(
        1, 5.0, {COMPONENT: Replicas(2, 2)}, {COMPONENT: OF}, None, {COMPONENT: engines},
        baseline={COMPONENT: 2},
    )  # fmt: skip
    assert builtin.tick(context).targets == {COMPONENT: target}
    assert builtin.load.decisions[COMPONENT] is LoadDecision(decision)


def test_without_the_size_of_the_cache_nothing_changes() -> None:
    builtin = Builtin(Rules(aim=Aim.LATENCY, throughput_scaling=False), limits_of(1, 1, 9))
    context = Context(
        1, 5.0, {COMPONENT: Replicas(1, 1)}, {}, None, {COMPONENT: (engine(9e9),)},
        baseline={COMPONENT: 1},
    )  # fmt: skip
    assert builtin.tick(context).targets == {COMPONENT: 1}
    assert builtin.load.decisions[COMPONENT] is LoadDecision.INSUFFICIENT
