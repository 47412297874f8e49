"""A successor knows what the process before has learned."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from planner.core.builtin import Builtin, limits_of
from planner.core.memory import recall, remembered
from planner.core.rules import Rules, Strategy
from planner.core.types import COMPONENT, Capabilities, Context, Engine, Replicas, Traffic


def made() -> Builtin:
    return Builtin(Rules(throughput_interval_s=10.0), limits_of(1, 1, 9))


def context(n: int) -> Context:
    engine = Engine("a", 0.01 + 0.001 * n, 100.0 * n, 4 + n, 4000.0 * n, 50.0)
    return Context(
        n,
        10.0 * n,
        {COMPONENT: Replicas(1, 1)},
        {COMPONENT: Capabilities()},
        Traffic(10.0, 20.0 + 3 * n, 1000.0, 100.0, 0.5),
        {COMPONENT: (engine,)},
        baseline={COMPONENT: 1},
    )


def test_what_was_learned_is_decided_from_again() -> None:
    first = made()
    for n in range(1, 8):
        first.tick(context(n))
    kept = json.loads(json.dumps(remembered(first)))
    second = made()
    recall(second, kept, 0.0)
    assert json.loads(json.dumps(remembered(second))) == kept
    again, after = (one.tick(context(9)) for one in (first, second))
    assert again.prediction == after.prediction
    assert again.targets == after.targets
    assert second.state.model(COMPONENT) is not None


def test_errors_of_forecasts_are_known_to_a_successor() -> None:
    rules, limits = Rules(strategy=Strategy.RESERVE), limits_of(1, 1, 9)
    first, second = Builtin(rules, limits), Builtin(rules, limits)
    for n in range(1, 40):
        recent = Traffic(10.0, 20.0 + 3 * n, 1000.0, 100.0, 0.5, ended=20.0)
        first.tick(replace(context(n), recent=recent))
    kept = json.loads(json.dumps(remembered(first)))
    assert len(kept["errors"][COMPONENT]) > 10
    recall(second, kept, 0.0)
    assert json.loads(json.dumps(remembered(second))) == kept
    del kept["errors"]
    recall(Builtin(rules, limits), kept, 0.0)


def test_nothing_learned_is_remembered_as_nothing() -> None:
    second = made()
    recall(second, json.loads(json.dumps(remembered(made()))), 0.0)
    assert second.state.model(COMPONENT) is None
    assert second.predict.windows.maxlen == 512


@pytest.mark.parametrize(
    "memory",
    [
        {},
        {"windows": [], "floors": {}, "lasts": {}, "models": {}, "errors": {"combined": [1]}},
        {"windows": [{"what": 1}]},
        {"windows": [], "floors": [], "lasts": {}, "models": {}},
    ],
)
def test_another_form_is_a_value_error_and_changes_nothing(memory: dict[str, object]) -> None:
    one = made()
    with pytest.raises(ValueError, match="another form"):
        recall(one, memory, 0.0)
    assert remembered(one) == remembered(made())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lasts", {"hit_ratio": 3.0}),
        ("lasts", {"accept_length": 0.0}),
        ("lasts", {"isl_tokens": 10**400}),
        ("windows", [{"window_s": 10.0, "requests": -1.0}]),
        ("windows", [{"window_s": 10.0, "requests": 10**400}]),
        ("models", {"combined": [[1.0, 1.0, 10**400, "a"]]}),
        ("errors", {"combined": [[1.0, float("nan")]]}),
        ("errors", {"combined": [[1.0, 1e12]]}),
    ],
)
def test_what_nobody_can_have_learned_is_a_value_error(name: str, value: object) -> None:
    memory = remembered(made())
    memory[name] = memory[name] | value if isinstance(value, dict) else value
    with pytest.raises(ValueError, match=r"another form|impossible|hit_ratio|accept_length"):
        recall(made(), memory, 0.0)


def test_rows_that_name_nobody_are_taken_over() -> None:
    memory, one = remembered(made()), made()
    recall(one, memory | {"models": {COMPONENT: [[1.0, 1.0, 0.01], [1.0, 2.0, 0.01]]}}, 0.0)
    assert len(one.state.models[COMPONENT].observations) == 2


def test_a_model_takes_over_no_impossible_step() -> None:
    memory, one = remembered(made()), made()
    recall(
        one, memory | {"models": {COMPONENT: [[1.0, 1.0, 1e-200, "a"], [1.0, 2.0, 0.01, "a"]]}}, 0.0
    )
    assert len(one.state.models[COMPONENT].observations) == 1
