"""A fleet that is offered more than it can carry: rules, clients that come again, figures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import orjson
import pytest

from analysis.cli import main
from analysis.league.capacity.overload import best_limit, longest_streak, rule, sentences, summarise
from proxy.core.types import Thresholds
from replayer.virtual.requests import Retry, VirtualRow
from tests.support.traces import SAMPLE

OPTIONS = "--instances 2 --scale 6:300000 --horizon 20 --jobs 1 --rules cost,cost+-/2000"


def _row(index: int, session: str, rejects: int, outcome: str = "ok") -> VirtualRow:
    return VirtualRow(index, session, float(index), 10, 10, 10, rejects=rejects, outcome=outcome)


def test_rules_are_policies_with_options() -> None:
    assert rule("cost") == ("cost", {})
    assert rule("threshold+0.7/5000") == ("threshold", {"thresholds": Thresholds(0.7, 5000)})
    assert rule("cost+-/20") == ("cost", {"thresholds": Thresholds(None, 20)})
    assert rule("cost+late") == ("cost", {"late": "refuse"})
    assert rule("cost+fixed") == rule("cost+now") == ("cost", {})
    assert rule("cost+late+now") == ("cost", {"late": "refuse"})
    both = {"thresholds": Thresholds(0.5, None), "late": "refuse"}
    assert rule("cost+0.5/-+late") == ("cost", both)


@pytest.mark.parametrize(
    "text",
    ["nobody", "cost+", "cost+0.7", "cost+x/1", "cost+1.1/1", "cost+0.7/-1", "cost+nan/1", "late"],
)
def test_other_rules_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"policy|BLOCKS"):
        rule(text)


@pytest.mark.parametrize(
    "words", [["--rules", "nobody"], ["--clients", "angry"], ["--load", "0"], ["--profile", "x"]]
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    try:
        status: Any = main(["overload", str(SAMPLE), *OPTIONS.split(), *words])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    error = capsys.readouterr().err.strip()
    assert words[0] in error
    assert "\n" not in error


def test_the_best_limit_is_found_between_those_that_are_tried_first() -> None:
    found = best_limit(lambda limit: {"limit": limit, "goodput_per_s": -abs(limit - 25)})
    assert found["limit"] == 24


def test_a_fixed_limit_and_the_bound_are_in_the_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    words = [*OPTIONS.split(), "--rules", "cost,cost+fixed,cost+-/2000+now", "--load", "5"]
    assert main(["overload", str(SAMPLE), *words, "--clients", "gone", f"--json={out}"]) == 0
    by = {row["rule"]: row for row in orjson.loads(out.read_bytes())["rows"]}
    assert len({row["bound"] for row in by.values()}) == 1
    assert all(row["good"] <= row["bound"] for row in by.values())
    assert by["cost"]["limit"] is None
    assert by["cost+fixed"]["limit"] > 0
    assert by["cost+fixed"]["goodput_per_s"] > by["cost"]["goodput_per_s"]
    assert by["cost+-/2000+now"]["refusals"] > 0 == by["cost"]["refusals"]


def test_a_streak_goes_on_over_a_sessions_requests_until_one_is_served() -> None:
    rows = [
        _row(0, "a", 2, "rejected"),
        _row(1, "b", 4),
        _row(2, "a", 3),
        _row(3, "a", 1),
    ]
    assert longest_streak(rows) == 5


def test_clients_come_again_as_they_are() -> None:
    row = _row(3, "a", 1)
    assert Retry().after_s(row, 7.0) == 7.0
    assert Retry(most=0).after_s(row, 7.0) is None
    own_s = Retry(most=1, pause_s=0.5).after_s(row, 7.0)
    assert own_s is not None
    assert 0.25 <= own_s <= 0.75
    assert Retry(most=1).after_s(_row(3, "a", 2), 7.0) is None


@pytest.mark.long
def test_past_saturation_a_fleet_is_refused_and_late(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    words = [*OPTIONS.split(), "--load", "0.3,5", "--clients", "patient,hasty,gone"]
    assert main(["overload", str(SAMPLE), *words, f"--json={out}"]) == 0
    rows = orjson.loads(out.read_bytes())["rows"]
    by = {(row["clients"], row["rule"], row["load"]): row for row in rows}
    assert len(by) == len(rows) == 12
    assert all(row["drift"] == 0 for row in rows)
    calm, full = by["patient", "cost", 0.3], by["patient", "cost", 5.0]
    assert calm["first_ratio"] > full["first_ratio"]
    assert (full["refusals"], full["streak"]) == (0, 0), "without thresholds nobody is refused"
    refused = {clients: by[clients, "cost+-/2000", 5.0] for clients in ("patient", "hasty", "gone")}
    assert refused["hasty"]["refusals"] > refused["patient"]["refusals"] > 0
    assert refused["gone"]["unserved_ratio"] > 0
    summary = summarise(rows)
    assert max(row["held_ratio"] for row in summary) == 1.0
    assert sentences(summary)[0] in capsys.readouterr().out
    (alone,) = sentences(
        summarise([r for r in rows if (r["clients"], r["load"]) == ("patient", 5.0)])
    )
    assert "at load 5 cost serves" in alone
    assert "best goodput" not in alone


@pytest.mark.figures
def test_past_saturation_goodput_stays_where_late_requests_are_refused(tmp_path: Path) -> None:
    """And below it nothing changes."""
    out, words = tmp_path / "rows.json", "--instances 4 --horizon 60 --load 0.5,1.5,3 --jobs 1"
    asked = [*words.split(), "--rules", "cost,cost+late", "--clients", "patient"]
    assert main(["overload", str(SAMPLE), *asked, f"--json={out}"]) == 0
    rows = orjson.loads(out.read_bytes())["rows"]
    by = {(row["rule"], row["load"]): row for row in rows}
    assert by["cost", 0.5] | {"rule": ""} == by["cost+late", 0.5] | {"rule": ""}
    for load, least in ((1.5, 0.8), (3.0, 0.6)):
        best = by["cost+late", 0.5]["goodput_per_s"]
        assert by["cost+late", load]["goodput_per_s"] > least * best
        assert by["cost", load]["goodput_per_s"] < 0.1 * best
