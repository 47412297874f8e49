"""From a client's rows to figures in engine time, and back from a file."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.measuring.peers import ROOT
from bench.routing.measured import Answered, Figures, Result, answers
from bench.routing.report import tables
from tests.bench.routing.runs_for_tests import result, run


def row(**more: Any) -> dict[str, Any]:
    given = {
        "session_id": "s",
        "outcome": "ok",
        "sent_s": 1.0,
        "first_token_s": 1.5,
        "last_token_s": 2.5,
        "output_length": 11,
        "completion_tokens": 11,
        "prompt_tokens": 640,
        "cached_tokens": 128,
    }
    return given | more


def test_times_are_the_engines() -> None:
    [one] = answers([row()], speedup=4.0)
    assert (one.ttft_s, one.tpot_s) == pytest.approx((2.0, 0.4))
    assert (one.session, one.prompt_tokens, one.cached_tokens) == ("s", 640, 128)


@pytest.mark.parametrize(
    "more",
    [{"outcome": "truncated"}, {"completion_tokens": 10}, {"completion_tokens": None}],
)
def test_an_answer_that_is_not_whole_is_none(more: dict[str, Any]) -> None:
    assert answers([row(**more)], 1.0) == ()


def test_an_engine_that_tells_no_hit_has_had_none() -> None:
    assert answers([row(cached_tokens=None)], 1.0)[0].cached_tokens == 0


def test_figures_are_nearest_ranks() -> None:
    made = Figures.of([Answered("s", n / 10, n / 100, 100, n) for n in range(1, 11)], 9.0)
    assert made is not None
    assert (made.ttft_p50_s, made.ttft_p90_s, made.ttft_p99_s) == (0.5, 0.9, 1.0)
    assert (made.ttft_mean_s, made.hit_ratio) == pytest.approx((0.55, 0.055))
    assert (made.tpot_p90_s, made.makespan_s) == (0.09, 9.0)
    assert Figures.of([], 9.0) is None


def test_the_middle_of_seeds_is_each_figures_own() -> None:
    seeds = [Figures(0.5, n, n, n, n, 1.0 - n, took) for n, took in ((0.1, 9.0), (0.3, None))]
    middle = Figures.middle([*seeds, Figures(0.7, 0.2, 0.4, 0.2, 0.2, 0.1, 7.0)])
    assert middle == Figures(0.5, 0.2, 0.3, 0.2, 0.2, 0.7, 8.0)
    assert Figures.middle(seeds[1:]).makespan_s is None


@pytest.mark.parametrize("name", ["r.json", "r.json.gz"])
def test_a_result_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    made = result(run("dynamo-kv", 1, [1.0, 2.0]), run("cache-proxy", 1, [1.0], "plain", lost=1))
    made.save(tmp_path / name)
    assert Result.load(tmp_path / name) == made


def test_a_result_has_its_commit_and_an_older_one_has_none(tmp_path: Path) -> None:
    command = ("git", "describe", "--always", "--dirty")
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert Result.begin("t.jsonl", 1.0, "compiled").commit == told.stdout.strip()
    old = b'{"machine": "2 CPUs", "trace": "t", "speedup": 1.0, "ours": "compiled", "runs": []}'
    (tmp_path / "old.json").write_bytes(old)
    assert Result.load(tmp_path / "old.json").commit == ""


def test_results_taken_together_have_each_run_once() -> None:
    one = result(run("dynamo-kv", 1, [1.0]), run("dynamo-kv", 2, [1.0]))
    two = result(run("dynamo-kv", 2, [3.0]), run("cache-proxy", 2, [1.0], "plain"))
    both = Result.merged([one, two])
    assert [(r.name, r.seed, r.answered[0].ttft_s) for r in both.runs] == [
        ("dynamo-kv", 1, 1.0),
        ("dynamo-kv", 2, 3.0),
        ("cache-proxy plain", 2, 1.0),
    ]


def test_the_tables_mark_what_is_no_clean_figure() -> None:
    made = result(
        run("alone", 1, [0.5], is_bound=True, busy_ratio=None),
        run("dynamo-kv", 1, [1.0, 1.0], busy_ratio=0.3),
        run("dynamo-kv", 2, [3.0, 3.0], busy_ratio=0.7, lost=1, sent=3),
        run("cache-proxy", 1, [], "gauges", fault="proxy ended"),
    )
    [cell] = tables.grids(made)
    assert cell.title == "4x262k, low load"
    alone, rival = cell.rows
    assert (alone[0], alone[-1]) == ("alone", "")
    assert (rival[0], rival[2], rival[4], rival[-1]) == ("dynamo-kv", "1/5", "2.00", "70% !")
    assert tables.faults(made) == [
        "4x262k, low, seed 2, dynamo-kv: 1 of 3 requests lost",
        "4x262k, low, seed 1, cache-proxy gauges: proxy ended",
    ]
