"""How Dynamo's replay asks the planner: settings, ticks, bounds, traffic of an interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from planner.sources.replay import Policy


@dataclass
class Site:
    """A small place to run in."""

    slo_ttft_ms: float = 2000.0
    slo_itl_ms: float = 50.0
    min_replicas: int = 2
    max_replicas: int = 4
    initial_replicas: int = 2
    kv_tokens: int = 100_000
    max_batched_tokens: int = 8192
    max_seqs: int = 256


def row(name: int, prefill: int, queued: int) -> dict[str, Any]:
    """An iteration of an engine: 4 ms, and 50 us for each token."""
    return {
        "worker_id": name,
        "wall_time": 0.004 + prefill * 5e-5,
        "sum_prefill_tokens": prefill,
        "num_decode_requests": 8,
        "sum_decode_kv_tokens": 4000,
        "sum_queued_prefill_tokens": queued,
        "sum_queued_decode_kv_tokens": 0,
    }


def snapshot(ready: int, prefill: int, queued: int, traffic: Any = None) -> dict[str, Any]:
    return {
        "active_decode_count": ready,
        "starting_decode_count": 0,
        "draining_decode_count": 0,
        "non_draining_decode_count": ready,
        "decode_fpm_snapshots": [row(i, prefill, queued) for i in range(ready)],
        "traffic": traffic,
    }


TRAFFIC = {"duration_s": 60.0, "num_req": 6000, "avg_isl": 3000.0, "avg_osl": 100.0}
COUNTS = {"shape_count": 6000, "avg_kv_hit_rate": None, "hit_rate_count": 0}


def test_a_setting_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match="settings: spare: not known"):
        Policy(Site(), spare=1)


def test_queues_beyond_the_slo_bring_one_more_up_to_the_most() -> None:
    policy = Policy(Site(), throughput_scaling=False, down_rule="sensitivity")
    assert policy.initial_tick_ms() == 5000.0
    wanted = ready = 2
    for tick in range(40):
        answer = policy.on_tick(snapshot(ready, 1000 + 100 * tick, 200_000, TRAFFIC | COUNTS))
        assert answer["target_prefill"] is None
        assert answer["next_tick_ms"] == 5000.0 * (tick + 2)
        wanted = answer["target_decode"] or ready
        assert ready <= wanted <= ready + 1
        ready = wanted
    assert wanted == Site().max_replicas


def test_nothing_to_do_is_no_order_below_the_least() -> None:
    policy = Policy(Site(), throughput_scaling=False)
    answers = [policy.on_tick(snapshot(2, 10 + i, 0))["target_decode"] for i in range(20)]
    assert answers == [None] * 20


def test_traffic_of_the_interval_is_summed_and_what_is_older_forgotten() -> None:
    policy = Policy(Site(), load_scaling=False, throughput_interval_s=60.0)
    assert policy.initial_tick_ms() == 60_000.0
    asked = [
        policy.on_tick(snapshot(2, 1000 + 100 * i, 0, TRAFFIC | COUNTS))["target_decode"]
        for i in range(12)
    ]
    assert 4 in asked, "6,000 prompts of 3,000 tokens a minute are more than two can take"
    assert policy.builtin.throughput.decisions == {"combined": "scale"}


def test_a_reserve_is_chosen_by_settings_and_goes_by_what_arrives() -> None:
    policy = Policy(Site(), strategy="reserve", reserve={"first": 0.0, "hold_ratio": 0.0})
    assert policy.initial_tick_ms() == 5000.0
    traffic = TRAFFIC | COUNTS | {"duration_s": 5.0, "num_req": 100, "shape_count": 100}
    asked = [policy.on_tick(snapshot(2, 1000 + 100 * i, 0, traffic)) for i in range(12)]
    assert asked[-1]["target_decode"] == 4, "20 prompts of 3,000 tokens a second"
    with pytest.raises(ValueError, match="settings: spare: not known"):
        Policy(Site(), reserve={"spare": 1})
