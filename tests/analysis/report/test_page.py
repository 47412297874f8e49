"""What a reader sees of a run: nothing cut, nothing unexplained."""

import pytest

from analysis.report.page import page
from analysis.runs import table
from tests.support.printed import CLASSES
from tests.support.runs import placed, row, run


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


@pytest.mark.long
def test_the_page_shows_where_the_time_went():
    rows = [placed(name, name) for name in CLASSES]
    html = page(run(*rows), table(rows))
    assert "Where the time went: mean by route class" in html
    assert "The 4 requests that waited longest for a first token" in html
    assert "<td>transfer</td><td>-</td><td>-</td><td>250.0 / 250.0</td><td>-</td>" in html
    assert "<b>decode wait</b>: from P&#39;s answer, or the decision" in html
    assert "Where the time went" not in page(run(row("a")), table([row("a")]))
