"""Figures of a run, from the records of its requests and the report on its fleet."""

from __future__ import annotations

from dataclasses import replace

from analysis.plan.measured import Drain, Fleet, Name, measured, out_of_slo
from tests.analysis.plan.runs_for_tests import load, record

FLEET = Fleet(gpu_s=7200.0, duration_s=3600.0, started=2, drains=(), changes=3)


def test_both_limits_are_kept_or_the_slo_is_not() -> None:
    made = load(0.0)
    assert record(0.0).keeps_slo(made)
    assert not record(0.0, ttft_s=2.1).keeps_slo(made)
    assert not replace(record(0.0), itl_s=0.051).keeps_slo(made)
    assert replace(record(0.0), itl_s=None).keeps_slo(made)
    unfinished = record(0.0, ttft_s=None)
    assert not unfinished.keeps_itl(made)


def test_requests_without_a_record_count_as_missed() -> None:
    made = load(0.0, 1.0, 2.0, 3.0)
    found = measured(Name("p", '{"a": 2}', 30.0), made, [record(0.0), record(1.0)], FLEET)
    assert (found.requests, found.attainment_ratio) == (4, 0.5)
    assert (found.gpu_h, found.replicas, found.good_per_gpu_h) == (2.0, 2.0, 1.0)
    assert (found.settings, found.startup_s) == ('{"a": 2}', 30.0)


def test_a_bin_is_out_of_the_slo_below_nine_of_ten() -> None:
    nine_of_ten = [record(at, ttft_s=9.0 if at == 3 else 0.1) for at in range(10)]
    eight_of_ten = [record(20.0 + at, ttft_s=9.0 if at in (3, 4) else 0.1) for at in range(10)]
    made = load(0.0, rises_s=(5.0, 25.0))
    assert out_of_slo(made, nine_of_ten + eight_of_ten) == [20.0]
    found = measured(Name("p", "{}", 0.0), made, nine_of_ten + eight_of_ten, FLEET)
    assert (found.out_s, found.out_after_rises_s) == (10.0, 10.0)


def test_a_drain_meets_what_its_engines_have() -> None:
    drain = Drain(10.0, {1})
    assert drain.meets(record(8.0, engine=1))
    assert not drain.meets(record(8.0, engine=2))
    assert not drain.meets(record(4.0, engine=1))  # had ended before
    assert not drain.meets(record(11.0, engine=1))  # came later
    assert drain.meets(replace(record(4.0, engine=1), last_token_s=None))
    fleet = replace(FLEET, drains=[drain])
    missed = [record(8.0, engine=1), record(8.0, ttft_s=5.0, engine=1)]
    found = measured(Name("p", "{}", 0.0), load(8.0, 8.0), missed, fleet)
    assert (found.on_drain, found.lost_on_drain) == (2, 1)
