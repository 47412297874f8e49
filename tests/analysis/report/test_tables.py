"""The tables of a report: nothing cut, nothing unexplained."""

import io

import pytest
from rich.console import Console

from analysis.report.tables import facts, milliseconds, print_report
from tests.support.printed import CLASSES
from tests.support.runs import failed, placed, row, run


def printed(summary, width=80):
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        print_report(summary, console)
    return captured.get()


def four_classes(**facts):
    return run(*(row(name, route_class=name, end_s=99.0) for name in CLASSES), **facts)


@pytest.mark.parametrize("width", [50, 80, 120])
def test_a_class_is_never_cut(width):
    text = printed(four_classes(time_scale=60.0), width)
    assert all(f" {name} " in text for name in CLASSES)


def test_nothing_is_cut_at_80_columns():
    text = printed(four_classes(time_scale=6.0))
    assert "…" not in text
    assert "Latency of ok requests, ms of the target's time (measured x 6)" in text
    assert "schedule lag, real" in text


def test_without_a_factor_none_is_mentioned():
    text = printed(four_classes())
    assert "Latency of ok requests, ms\n" in text
    assert "target's" not in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), ("inf", "inf"), (0.00123, "1.2"), (0.9999, "999.9"), (1.2346, "1,235")],
)
def test_long_times_are_whole_milliseconds(seconds, text):
    assert milliseconds(seconds) == text


def test_causes_are_printed_as_they_were_said():
    wrong = failed("a", "http_error", status=404, error="no model [/nope]")
    text = printed(run(wrong, wrong | {"request_id": "b"}))
    assert "2 x http_error 404: no model [/nope]" in text
    many = printed(run(*(failed(str(n), error=str(n)) for n in range(12))))
    assert "2 more with other messages" in many


def test_what_sets_itl_and_tpot_apart_is_said():
    assert any("3.0 tokens on average" in line for line in facts(run(row("a", chunks=1))))


def test_the_engines_hits_are_split_where_the_proxys_log_tells():
    moved = row("b", hit_tokens=10, isl_tokens=90, prefill_instance="p", cached_tokens=90)
    lines = list(facts(run(row("a", hit_tokens=30, isl_tokens=110), moved)))
    assert any("engines 65.0% = own 25.0% + from peers 40.0%" in line for line in lines)
    warm = list(facts(run(row("a", hit_tokens=90, isl_tokens=100, cached_tokens=90))))
    assert any("own is above ideal" in line for line in warm)
    assert any(line.endswith("engines 40.0%") for line in facts(run(row("a"))))


def test_where_the_time_went_is_printed_with_what_was_predicted():
    rows = [placed(name, name) for name in CLASSES]
    lost = placed("lost", None, outcome="rejected", phases_s={"queue": 9.0}, proxy_ttft_s=None)
    text = printed(run(*rows, lost, time_scale=2.0))
    assert "…" not in text
    assert "Where the time went at the proxy, mean / p90, ms of the target's time" in text
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    assert ["prefill leg", "-", "-", "1,000 / 1,000", "-"] in lines
    assert ["first token", "1,500 / 1,500", "1,500 / 1,500", "-", "1,500 / 1,500"] in lines
    assert ["all", "6,000", "6,000", "6,000", "6,000"] in lines
    assert ["HEAVY_P2P transfer", "1", "1,000", "500.0", "0.50", "0.50"] in lines
    assert "slowest: lost (rejected, d) waited 18,000 ms; queue 18,000\n" in text
    way = "HEAVY_P2P, ok, p > d) waited 2,000 ms; decide 500.0, prefill leg 1,000, transfer 500.0"
    assert way in " ".join(facts(run(placed("HEAVY_P2P", "HEAVY_P2P"), time_scale=2.0)))


def test_without_the_proxys_log_there_are_no_phases():
    summary = run(row("a"))
    assert (summary["phases"], summary["slowest"]) == ({}, [])
    assert "Where the time went" not in printed(summary)
