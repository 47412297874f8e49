"""What a reader sees of a run: nothing cut, nothing unexplained."""

import io

import pandas as pd
import pytest
from rich.console import Console

from analysis.report.compare import compare, print_comparison
from analysis.report.page import page
from analysis.report.plots import axis
from analysis.report.tables import facts, milliseconds, print_report
from analysis.runs import LoadedRun, table
from tests.support.runs import failed, row, run

CLASSES = ("WARM", "MEDIUM", "HEAVY_P2P", "HEAVY_COLO")


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


def test_the_page_says_what_was_run():
    rows = [row(name, route_class=name, policy="seed-cost") for name in CLASSES]
    summary = run(*rows, trace="/some/where/t.jsonl", time_scale=6.0, speedup=2.0)
    html = page(summary, table(rows, 6.0))
    assert "<title>Replay of t.jsonl</title>" in html
    assert "/some/where" not in html
    for name, value in (("mode", "open"), ("speedup", "2"), ("time scale", "6")):
        assert f"<dt>{name}</dt><dd>{value}</dd>" in html
    assert "<dt>offload policy</dt><dd>seed-cost</dd>" in html
    assert "one second measured is 6 seconds" in html
    assert "<td>HEAVY_COLO</td><td>1</td><td>6,000</td>" in html


def test_every_tick_of_a_log_axis_has_its_number():
    wide = axis(pd.Series([3.0, 700.0, None, 0.0]))
    assert wide["ticktext"] == ["5", "10", "20", "50", "100", "200", "500"]
    assert axis(pd.Series([3.0, 14.0])) == {}
    assert axis(pd.Series([], dtype=float)) == {}


def test_a_comparison_says_what_is_compared_and_which_sign_is_good():
    def loaded(name, policy, scale):
        rows = [row("x", policy=policy)]
        return LoadedRun(name, run(*rows, time_scale=scale), table(rows, scale))

    a, b = loaded("one", "seed-heuristic", 6.0), loaded("two", "never", 3.0)
    result = compare(a, b)
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as captured:
        print_comparison(result, a, b, console)
    text = captured.get()
    assert "A = one (offload policy seed-heuristic; measured x 6)" in text
    assert "B = two (offload policy never; measured x 3)" in text
    assert "negative: B is faster" in text
    assert "…" not in text
    assert result.differences[0].mean_s == -3.0
