"""How a rule is asked: ticks, bounds, newest iterations, means."""

from __future__ import annotations

import pytest

from bench.planner.rules.policy import Mean, Rule, Schedule, Static, View
from tests.bench.planner.runs_for_tests import CONTEXT, engine_row, snapshot


class Seen(Rule):
    """Wants what it is told, and keeps what it saw."""

    wanted: int | None = None

    def replicas(self, view: View) -> int | None:
        self.view = view
        return self.wanted


def test_ticks_are_even_and_answers_within_bounds() -> None:
    rule = Seen(CONTEXT)
    assert rule.initial_tick_ms() == 15_000
    rule.wanted = 99
    answer = rule.on_tick(snapshot(engine_row()))
    assert answer == {"target_prefill": None, "target_decode": 10, "next_tick_ms": 30_000}
    assert rule.view.now_s == 15.0


def test_the_present_number_is_no_order() -> None:
    rule = Seen(CONTEXT)
    rule.wanted = 3
    answer = rule.on_tick(snapshot(engine_row(1), engine_row(2), starting=1))
    assert answer["target_decode"] is None
    assert (rule.view.ready, rule.view.wanted) == (2, 3)


def test_an_engine_without_news_has_its_newest_iteration_until_it_goes() -> None:
    rule = Seen(CONTEXT)
    busy = engine_row(1, num_decode_requests=4, sum_decode_kv_tokens=50, num_queued_prefill=2)
    rule.on_tick(snapshot(busy, engine_row(2, num_prefill_requests=1, sum_prefill_tokens=9)))
    assert (rule.view.running, rule.view.queued, rule.view.kv_tokens) == (5, 2, 50)
    silent = snapshot(busy, engine_row(2)) | {"decode_fpm_snapshots": []}
    rule.on_tick(silent)
    assert (rule.view.running, rule.view.backlog_tokens) == (5, 9)
    rule.on_tick(snapshot(engine_row(2)))
    assert rule.view.running == 0


def test_traffic_is_zero_where_nothing_completed() -> None:
    rule = Seen(CONTEXT)
    rule.on_tick(snapshot(avg_ttft_ms=None, ttft_count=0, avg_isl=512.0, shape_count=3))
    assert rule.view.traffic.ttft_ms == Mean()
    assert rule.view.traffic.isl_tokens == Mean(512.0, 3)
    assert Mean.together([Mean(1.0, 1), Mean(4.0, 2)]) == Mean(3.0, 3)
    assert Mean.together([]) == Mean()


def test_a_schedule_is_followed() -> None:
    rule = Schedule(CONTEXT, orders=[(10.0, 5), (0.0, 2)])
    answers = [rule.on_tick(snapshot(engine_row()))["target_decode"] for _ in range(3)]
    assert answers == [2, 5, 5]
    assert Schedule(CONTEXT, orders=[(99.0, 5)]).replicas(View(5.0, 1, 1, ())) is None
    assert Static(CONTEXT, replicas=4).on_tick(snapshot(engine_row()))["target_decode"] == 4


def test_a_rule_without_a_law_is_none() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Rule(CONTEXT)  # type: ignore[abstract]
