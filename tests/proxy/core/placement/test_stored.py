"""Decisions that are made again from what is stored of them, as JSON."""

from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.league.fleet import EngineFleet, engines
from analysis.league.simulate import run_rival
from analysis.rivals.registry import RIVALS
from proxy.core.placement.decision import Choice, PlacementView
from proxy.core.placement.policies import POLICIES
from proxy.core.placement.stored import KEPT, Made, as_json, from_json
from replayer.virtual.arrivals import plan
from replayer.virtual.load import load_source
from tests.support.examples import examples
from tests.support.league import RULES
from tests.support.scenes import candidate, scene_of
from tests.support.traces import SAMPLE

LEAST = examples(1000)
"""Decisions of each run."""


def told(choice: Choice) -> tuple[object, ...]:
    d, p = choice.decode.instance.name, choice.prefill and choice.prefill.instance.name
    costs = [repr(option.cost_s) for option in choice.options]
    return d, p, choice.size, choice.reason, choice.predicted_ttft_s, costs


def stored(view: PlacementView) -> PlacementView:
    return from_json(orjson.loads(orjson.dumps(as_json(view))))


@pytest.mark.long
@pytest.mark.parametrize("policy", ["cost", "seed-heuristic", "seed-cost", "threshold"])
def test_a_stored_decision_is_the_same_one_again(policy: str) -> None:
    """In a run of the league, under its own policy and under the rules."""
    source = load_source(SAMPLE)
    seen: list[tuple[Choice, PlacementView]] = []
    others: list[bool] = []

    def decide(view: PlacementView) -> Choice:
        choice = POLICIES[policy](view)
        again = stored(view)
        seen.append((choice, again))
        rules = [POLICIES[other] for other in ("seed-heuristic", "seed-cost", "threshold")]
        others.extend(told(rule(view)) == told(rule(again)) for rule in rules)
        return choice

    rival = replace(RIVALS["cost"], make=lambda _kv_tokens: decide)
    fleet = EngineFleet(engines(3, 200_000, source.block_tokens))
    for seed in range(20):
        rules = replace(RULES, seed=seed)
        run_rival(rival, plan(source, rules), fleet, source.block_tokens)
        if len(seen) >= LEAST:
            break
    assert len(seen) >= LEAST
    assert all(told(POLICIES[policy](again)) == told(choice) for choice, again in seen)
    assert all(others)
    if policy == "cost":
        assert any(option.prefill for choice, _ in seen for option in choice.options)
        assert any(again.session_kv is not None for _, again in seen)


def test_only_the_last_views_are_kept() -> None:
    made = Made()
    views = [scene_of(candidate("a"), candidate("b")) for _ in range(KEPT + 1)]
    options = [POLICIES["cost"](view).alternatives() for view in views]
    for one, view in zip(options, views, strict=True):
        made.add(one, view)
    assert made.of(options[0]) is None
    assert made.of(options[1]) is views[1]
    assert made.of(None) is None


@given(st.booleans(), st.sampled_from([None, "a"]))
def test_of_a_request_only_what_policies_read_is_kept(may_split: bool, holder: str | None) -> None:
    """Hashes of a prompt of megabytes are no part of a decision."""
    view = scene_of(candidate("a"), candidate("b"), home="a")
    view.facts.block_hashes = list(range(1000))
    view.facts.offloadable, view.facts.holder = may_split, holder
    Made().add(POLICIES["cost"](view).alternatives(), view)
    assert not view.facts.block_hashes
    assert view.facts.offloadable is may_split
    assert (view.facts.holder is None) is (holder is None)


@pytest.mark.parametrize("change", [{"free": None}, {"free": {}}, {"rules": {"x": 1}}])
def test_another_form_is_an_error(change: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        from_json(as_json(scene_of(candidate("a"))) | change)
