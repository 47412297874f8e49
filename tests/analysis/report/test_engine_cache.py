"""What the engines' counters say of a run: one denominator, and nothing made up."""

import pytest

from analysis.report.engine_cache import engine_cache
from analysis.report.tables import facts
from tests.support.runs import row, run

ZERO = dict.fromkeys(("local_queries", "local_hits", "external_queries", "external_hits"), 0.0)
NOW = {"local_queries": 100.0, "local_hits": 50.0, "external_queries": 50.0, "external_hits": 30.0}


def read(*engines, source="engines", **more):
    """Counters of engines, by pairs of readings."""
    before = {f"e{at}": one for at, (one, _) in enumerate(engines)}
    after = {f"e{at}": one for at, (_, one) in enumerate(engines) if one is not None}
    return {"source": source, "before": before, "after": after, "unread": {}} | more


def ratios(counters):
    found = engine_cache(counters)
    return tuple(found[f"{name}_hit_ratio"] for name in ("local", "external", "combined"))


PROXY = {"looked_up": 0.0, "local_hits": 0.0, "external_in_place": 0.0}
OLD = {"local_queries": 0.0, "local_hits": 0.0}


@pytest.mark.parametrize(
    ("counters", "expected"),
    [
        (read((ZERO, NOW)), (0.5, 0.3, 0.8)),
        (read((NOW, {name: value * 3 for name, value in NOW.items()})), (0.5, 0.3, 0.8)),
        (read((ZERO, NOW), (ZERO, NOW | {"local_hits": 100.0})), (0.75, 0.3, 1.05)),
        # Of the transfers that were to come, those that did.
        (
            read((ZERO | {"external_in_place": 5.0}, NOW | {"external_in_place": 25.0})),
            (0.5, 0.2, 0.7),
        ),
        # A counter that a first transfer makes appear was 0 before it.
        (read((OLD, NOW | {"external_in_place": 20.0})), (0.5, 0.2, 0.7)),
        # No local cache: all of a prompt is looked up at the connector.
        (
            read((ZERO, {**ZERO, "external_queries": 100.0, "external_hits": 30.0})),
            (0.0, 0.3, 0.3),
        ),
        (
            read((PROXY, {"looked_up": 10.0, "local_hits": 4.0, "external_in_place": 2.0})),
            (0.4, 0.2, 0.6),
        ),
        (read((OLD, {"local_queries": 10.0, "local_hits": 4.0})), (0.4, None, None)),
        (read((ZERO, ZERO)), (None, None, None)),
        (read(), (None, None, None)),
        (None, (None, None, None)),
    ],
)
def test_ratios_are_per_prompt_token_looked_up(counters, expected):
    assert ratios(counters) == tuple(one if one is None else pytest.approx(one) for one in expected)


def test_an_engine_that_was_not_there_all_the_time_is_left_out_and_named():
    started = {"start_s": 1.0}
    counters = read(
        (ZERO, NOW), (ZERO, None), (NOW, ZERO), (ZERO | started, NOW | {"start_s": 2.0}),
        unread={"e9": "GET /metrics answers 404"},
    )  # fmt: skip
    found = engine_cache(counters)
    restarted = "restarted during the run"
    assert found["unread"] == {
        "e1": "not read after the run", "e2": restarted, "e3": restarted,
        "e9": "GET /metrics answers 404",
    }  # fmt: skip
    assert (found["engines_counted"], found["looked_up_tokens"]) == (1, 100.0)
    assert found["during"] == {**NOW, "external_in_place": None}
    assert found["engines"]["e1"] == {"before": ZERO, "after": None}


def test_the_counters_are_told():
    lines = list(facts(run(row("a"), engine_counters=read((ZERO, NOW), (ZERO, None)))))
    said = "100 prompt tokens looked up on 1 engines, hit 80.0% = local 50.0% + external 30.0%"
    assert f"engines' own counters: {said}" in lines
    assert "engines' own counters: not of e1: not read after the run" in lines
    of_proxy = facts(run(row("a"), engine_counters=read((ZERO, NOW), source="proxy")))
    assert any("counters, as the proxy last read them: 100" in line for line in of_proxy)
    assert "engine_counters" not in run(row("a"), engine_counters=read())
