"""Dynamo's rules: what it charges an instance, and when another one prefills."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from analysis.rivals.dynamo import ActiveBlocks, DynamoKv, isl_or_load, rule_of_2025
from proxy.core.placement.candidates import Candidate
from proxy.core.placement.decision import PlacementView
from proxy.core.types import RequestFacts
from tests.support.scenes import BLOCK, PROMPT, candidate, scene_of

TURN = tuple(range(1, 21))


def _facts(blocks: tuple[int, ...]) -> RequestFacts:
    return RequestFacts("m", None, PROMPT, blocks, BLOCK)


def _scene(blocks: tuple[int, ...], *free: Candidate) -> PlacementView:
    return replace(scene_of(*free), facts=_facts(blocks))


def test_blocks_that_prompts_share_are_counted_once() -> None:
    active, first, later = ActiveBlocks(), _facts(TURN[:10]), _facts(TURN)
    assert active.with_prompt("a", first) == 10 * BLOCK
    active.give("a", first)
    assert active.with_prompt("a", first) == 10 * BLOCK
    assert active.with_prompt("a", later) == 20 * BLOCK
    active.give("a", later)
    active.release(first)
    assert active.with_prompt("a", _facts((99,))) == 21 * BLOCK
    active.release(later)
    active.release(later)
    assert active.with_prompt("a", _facts((99,))) == BLOCK
    assert not active._given


def test_an_overlap_is_weighed_against_the_prompts_that_an_instance_has() -> None:
    """Prompts that were given and have no first token yet count too."""
    rule = DynamoKv()
    a, b = candidate("a", hit=8000), candidate("b", placed=1)
    assert rule(_scene(TURN, a, b)).decode is a
    rule._active.give("a", _facts(tuple(range(100, 115))))
    assert rule(_scene(TURN, a, b)).decode is a
    rule._active.give("a", _facts(tuple(range(200, 215))))
    # 30 blocks of others are more than the 8,000 tokens; the prompt's own 20 are active there.
    other = tuple(range(300, 320))
    assert rule(_scene(other, a, b)).decode is b


def test_lmetric_multiplies() -> None:
    a, b = candidate("a", hit=9000), candidate("b")
    rule = DynamoKv(multiplies=True)
    # 1,000 new tokens beside 10,000, and prompts of 80 blocks beside the 20 of its own.
    rule._active.give("a", _facts(tuple(range(100, 160))))
    assert rule(_scene(TURN, a, b)).decode is a
    rule._active.give("a", _facts(tuple(range(200, 360))))
    assert rule(_scene(tuple(range(300, 320)), a, b)).decode is b


def test_a_request_is_counted_once_however_often_it_is_placed() -> None:
    """As after a failure: only its last place has its blocks, and none once it is over."""
    rule = DynamoKv()
    scene = _scene(TURN, candidate("a"))
    rule(scene)
    assert rule(replace(_scene((), candidate("b")), facts=scene.facts)).decode.instance.name == "b"
    assert not rule._active._holders["a"]
    rule.on_finish(_route(), scene.facts, 9, 1.0, 2.0)
    rule.on_failed(_route(), scene.facts, 2.0)
    assert not rule._active._holders["b"]


def _route() -> Any:
    return SimpleNamespace()


@pytest.mark.parametrize(
    ("hit", "backlog", "remote"),
    [(PROMPT - 2047, 0, False), (PROMPT - 2048, 0, True), (0, 32_769, False), (0, 32_768, True)],
)
def test_dynamo_is_local_when_little_is_new_or_p_is_busy(
    hit: int, backlog: int, remote: bool
) -> None:
    d, p = candidate("d", hit=hit), candidate("p", prefill_tokens=backlog)
    assert isl_or_load(scene_of(d, p), d, p) is remote


@pytest.mark.parametrize(
    ("hit", "queue", "remote"),
    [(PROMPT - 1000, 0, False), (PROMPT - 1001, 1, True), (0, 2, False)],
)
def test_dynamo_2025_bounds_the_queue_in_requests(hit: int, queue: int, remote: bool) -> None:
    d, p = candidate("d", hit=hit), candidate("p", prefill_requests=queue)
    assert rule_of_2025(scene_of(d, p), d, p) is remote
